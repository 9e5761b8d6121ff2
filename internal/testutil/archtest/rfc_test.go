// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// requirements are those of docs/rfc.md: of each RFC its numbers, or its sections.
var requirements = map[string]string{
	"4787": "1 2 3 3a 4 5 6 7 8 9 9a 10 11 12 12a 12b 13 13a 14 14a",
	"5382": "1 2 2a 3 4 5 6 7 8 9 10",
	"5508": "1 1a 2 3 3a 3b 4 5 6 7 8 9 10 11",
	"6888": "1 2 3 4 4a 5 5b 6 7 8 9 10 11 11a 11b 11c 12 13 14 15",
	"7857": "2 2.1 2.2 3 4 5 6 7 7.1 8 9 10 11 12",
	"3022": "2.1 2.2 4.1 4.3",
	"6887": "7.4 8.3 8.5 11 11.1 12 13.1 13.2 13.3 14.1 15 17.2",
	"6886": "3.2 3.3 3.3a 3.4",
	"7422": "",
	"8158": "",
}

// testNames are the test functions of the repository.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, path := range sources(t, func(path string) bool { return strings.HasSuffix(path, "_test.go") }) {
		file, err := parser.ParseFile(token.NewFileSet(), path, read(t, path), parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				names[f.Name.Name] = true
			}
		}
	}
	return names
}

// nftTests are the test functions that run engine nft.
func nftTests(t *testing.T) map[string]bool {
	t.Helper()
	runs := regexp.MustCompile(`\b(EngineNFT|engines|everyWay|matrixRuns|clientNetworks)\b`)
	names := map[string]bool{}
	for _, path := range sources(t, func(path string) bool {
		return strings.HasSuffix(path, "_test.go") && (strings.HasPrefix(path, "internal/nat/control/") || strings.HasPrefix(path, "internal/nat/nft/"))
	}) {
		text := read(t, path)
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				body := text[fset.Position(f.Pos()).Offset:fset.Position(f.End()).Offset]
				names[f.Name.Name] = strings.HasPrefix(path, "internal/nat/nft/") || runs.Match(body)
			}
		}
	}
	return names
}

// docs/rfc.md has every requirement once, with a mark and a test where there is one, and
// names no test and no file that does not exist. What it says of engine nft a test has shown that runs
// engine nft, or the row says what the kernel does.
func TestRFCs(t *testing.T) {
	want := map[string]bool{}
	for rfc, numbers := range requirements {
		if numbers == "" {
			want[rfc] = true
		}
		for number := range strings.FieldsSeq(numbers) {
			want[rfc+"-"+number] = true
		}
	}
	marks := []string{"met", "partly", "not met", "not applicable"}
	tests, nft := testNames(t), nftTests(t)
	ofKernel := regexp.MustCompile(`\b(kernel\w*|netfilter|engine nft|Engine nft|as \d{4}-\d+)\b`)
	quoted := regexp.MustCompile("`([^`]+)`")
	name := regexp.MustCompile("`(Test[A-Za-z0-9]+)`")
	number := regexp.MustCompile(`^\d{4}(-[0-9a-z.]+)?$`)
	mutations := 0
	for _, line := range strings.Split(string(read(t, "docs/rfc.md")), "\n") {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		named := name.FindAllStringSubmatch(line, -1)
		for _, m := range named {
			if !tests[m[1]] {
				t.Errorf("%s: there is no test %s", cells[0], m[1])
			}
		}
		switch {
		case number.MatchString(cells[0]):
			if !want[cells[0]] {
				t.Errorf("%s is there twice, or is none of the requirements", cells[0])
			}
			delete(want, cells[0])
			if len(cells) != 7 || !slices.Contains(marks, cells[3]) || cells[4] != "" && !slices.Contains(marks, cells[4]) {
				t.Errorf("%s: the marks of engine ebpf and nft are not of %q: %q", cells[0], marks, cells)
			} else if needed := cells[3] == "met" || cells[3] == "partly"; needed != (len(named) > 0) {
				t.Errorf("%s is %s and names %d tests", cells[0], cells[3], len(named))
			}
			met := cmp.Or(cells[4], cells[3])
			if shown := slices.ContainsFunc(named, func(m []string) bool { return nft[m[1]] }); (met == "met" || met == "partly") && !shown && !ofKernel.MatchString(cells[5]) {
				t.Errorf("%s is %s on engine nft, but no test that it names runs it: %q", cells[0], met, cells)
			}
		case strings.HasPrefix(cells[0], "`bpf/"):
			mutations++
			if len(cells) != 3 || len(named) == 0 {
				t.Errorf("mutation %q: no test", cells)
			}
			if _, err := os.Stat(filepath.Join(top, quoted.FindStringSubmatch(cells[0])[1])); err != nil {
				t.Error(err)
			}
		}
	}
	for id := range want {
		t.Errorf("%s is not in docs/rfc.md", id)
	}
	if mutations == 0 {
		t.Error("docs/rfc.md lists no mutation")
	}
}
