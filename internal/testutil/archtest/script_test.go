// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// unsteadyTests fail as FIXTURE says; what has failed once leaves a file.
const unsteadyTests = `package fixture

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func test(t *testing.T) {
	for _, what := range strings.Fields(os.Getenv("FIXTURE")) {
		how, ok := strings.CutPrefix(what, t.Name()+":")
		_, err := os.Stat(t.Name())
		if again := err == nil; !ok || again && strings.HasPrefix(how, "once") {
			continue
		} else if again && how == "skips" {
			t.Skip("no more")
		}
		if err := os.WriteFile(t.Name(), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		switch how {
		case "once-race":
			fmt.Println("WARNING: DATA RACE")
		case "once-panic":
			panic("here")
		case "once-exit":
			os.Exit(1)
		case "leaves":
			if err := os.WriteFile(strings.Fields(os.Getenv("NATKIT_TEST_FOLDERS"))[0]+"/something", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return
		}
		t.Run("part", func(t *testing.T) { t.Error("this is how") })
	}
}

func TestA(t *testing.T)  { test(t) }
func TestAB(t *testing.T) { test(t) }
func TestC(t *testing.T)  { test(t) }
func TestD(t *testing.T)  { test(t) }
`

// A test that fails is run once more by itself, and what that can't excuse fails the run.
func TestUnsteady(t *testing.T) {
	for _, c := range []struct {
		name, fixture string
		broken        bool   // there is a package that does not build
		before        string // what an earlier run has run again
		passes        bool
		says          []string
	}{
		{name: "all pass", passes: true, says: []string{"all that ran passed"}},
		{name: "one, once", fixture: "TestA:once", passes: true, says: []string{
			"unsteady: failed once, passed when run again: 1\n  fixture TestA\nhow they failed:\n  --- FAIL: TestA ", "      fixture_test.go:35: this is how\ntests: all that ran passed"}},
		{name: "three, once", fixture: "TestA:once TestAB:once TestD:once", passes: true, says: []string{"when run again: 3\n  fixture TestA\n  fixture TestAB\n  fixture TestD\n"}},
		{name: "one, once, and once before", fixture: "TestA:once", before: "fixture TestA\n", says: []string{"run again in an earlier run, and failed in this one:\n  fixture TestA\n"}},
		{name: "one, once, another before", fixture: "TestA:once", before: "fixture TestAB\n", passes: true},
		{name: "leaves something", fixture: "TestA:leaves", passes: os.Geteuid() != 0},
		{name: "four, once", fixture: "TestA:once TestAB:once TestC:once TestD:once"},
		{name: "always", fixture: "TestA:always", says: []string{"once more, by itself: fixture TestA\n=== RUN"}},
		{name: "one once, one always", fixture: "TestA:once TestC:always", says: []string{"fixture TestA\npassed\n"}},
		{name: "skips when run again", fixture: "TestA:skips", says: []string{"no more"}},
		{name: "data race", fixture: "TestA:once-race"},
		{name: "panic", fixture: "TestA:once TestC:once-panic"},
		{name: "ends early", fixture: "TestA:once TestC:once-exit"},
		{name: "does not build", fixture: "TestA:once", broken: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			files := map[string]string{
				"go.mod":          "module fixture\n\ngo 1.26\n",
				"fixture_test.go": unsteadyTests,
				"scripts/test.sh": string(read(t, "scripts/test.sh")),
			}
			if c.broken {
				files["broken/broken_test.go"] = "package broken\n\nvar x int = \"\"\n"
			}
			writeFiles(t, dir, files)
			cmd := exec.Command("bash", filepath.Join(dir, "scripts/test.sh"), "-vet=off")
			left, before := filepath.Join(dir, "left"), filepath.Join(dir, "before")
			if err := errors.Join(os.Mkdir(left, 0o755), os.WriteFile(before, []byte(c.before), 0o644)); err != nil {
				t.Fatal(err)
			}
			cmd.Env = append(os.Environ(), "FIXTURE="+c.fixture, "NATKIT_TEST_FOLDERS="+left+" "+left+"/missing", "NATKIT_TEST_AGAIN="+before)
			out, err := cmd.CombinedOutput()
			if passed := err == nil; passed != c.passes {
				t.Errorf("passed: %v", passed)
			}
			if !c.passes {
				c.says = append(c.says, "tests: FAILED")
			}
			for _, want := range c.says {
				if !strings.Contains(string(out), want) {
					t.Errorf("does not say %q", want)
				}
			}
			if c.name == "leaves something" && !c.passes && !strings.Contains(string(out), "left behind on this machine:\n  "+left+"/something\n") {
				t.Error("does not name what is left behind")
			}
			noted, err := os.ReadFile(before)
			if want := c.passes && strings.Contains(c.fixture, "TestA:once"); err != nil || want && !strings.Contains(string(noted), "fixture TestA\n") {
				t.Errorf("run again, and noted for later runs: %q, %v", noted, err)
			}
			if !c.passes && strings.Contains(string(out), "unsteady") {
				t.Error("the failure is called unsteady")
			}
			if t.Failed() {
				t.Logf("%s", out)
			}
		})
	}
}

func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for path, text := range files {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// What make test leaves out or shortens is what make test-long runs, whole.
func TestLong(t *testing.T) {
	dir := t.TempDir()
	writeFiles(t, dir, map[string]string{
		"go.mod":              "module fixture\n\ngo 1.26\n",
		"one_test.go":         "package fixture\n\nimport \"testing\"\n\nfunc TestShort(t *testing.T) {}\n",
		"room/two_test.go":    "package room\n\nimport \"testing\"\n\nfunc TestQuick(t *testing.T) {}\n\nfunc TestTakesLong(t *testing.T) {\n\tif testing." + "Short() {\n\t\tt.Skip()\n\t}\n}\n",
		"room/three_test.go":  "package room\n\nimport \"testing\"\n\nfunc helper() {}\n\nfunc TestTakesAll(t *testing.T) {\n\tfor range 2 {\n\t\tif testing." + "Short() {\n\t\t\tbreak\n\t\t}\n\t}\n}\n",
		"other/other_test.go": "package other\n\nimport \"testing\"\n\nfunc TestTakesLong(t *testing.T) {}\n",
		"scripts/test.sh":     string(read(t, "scripts/test.sh")),
	})
	for _, c := range []struct {
		flag string
		runs []string
		not  string
	}{
		{"-short", []string{"--- PASS: TestShort", "--- PASS: TestQuick", "--- SKIP: TestTakesLong", "--- PASS: TestTakesAll", "fixture/other"}, "FAIL"},
		{"-long", []string{"--- PASS: TestTakesLong", "--- PASS: TestTakesAll"}, "TestShort TestQuick fixture/other SKIP"},
	} {
		cmd := exec.Command("bash", filepath.Join(dir, "scripts/test.sh"), c.flag, "-v", "-vet=off")
		cmd.Env = append(os.Environ(), "NATKIT_TEST_FOLDERS="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v", c.flag, err)
		}
		for _, want := range c.runs {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s: no %q", c.flag, want)
			}
		}
		for _, unwanted := range strings.Fields(c.not) {
			if strings.Contains(string(out), unwanted) {
				t.Errorf("%s: %q", c.flag, unwanted)
			}
		}
		if t.Failed() {
			t.Fatalf("%s", out)
		}
	}
}

// A call that is in no test would leave something out that make test-long can't find.
func TestShortIsAskedByTests(t *testing.T) {
	asks, name := regexp.MustCompile(`testing\.Short\(\)`), regexp.MustCompile(`^func (?:\([^)]*\) )?(\w+)`)
	for _, path := range sources(t, func(path string) bool { return strings.HasSuffix(path, "_test.go") }) {
		in := ""
		for i, line := range strings.Split(string(read(t, path)), "\n") {
			if m := name.FindStringSubmatch(line); m != nil {
				in = m[1]
			}
			if asks.MatchString(line) && !strings.HasPrefix(in, "Test") && !strings.HasPrefix(in, "Benchmark") {
				t.Errorf("%s:%d: %s asks whether it is short; its test has to", path, i+1, in)
			}
		}
	}
}
