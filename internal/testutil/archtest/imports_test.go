// SPDX-License-Identifier: Apache-2.0

// Package archtest holds the tests about the repository as a whole: who may
// import whom, licence lines, and that what tests need can be installed. It has
// no code of its own.
package archtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// layering is what ARCHITECTURE.md says about imports, in its section "The rooms".
type layering struct {
	floor  map[string]int      // of each package: it imports packages of lower floors
	also   map[string][]string // and these of its own
	pure   []string            // reach nothing of touchesKernel
	onlyIn map[string][]string // what may be imported directly by these packages and no other
}

// touchesKernel is what a pure package must not reach, so that it gives the same
// answer on every machine.
var touchesKernel = []string{"github.com/cilium/ebpf", "golang.org/x/sys/unix", "net", "os/exec"}

const (
	module = "natkit/"
	tests  = "internal/testutil/" // imported by tests only, and free to import anything
)

var quoted = regexp.MustCompile("`([^`]+)`")

// names are the words between backquotes.
func names(cell string) []string {
	var out []string
	for _, m := range quoted.FindAllStringSubmatch(cell, -1) {
		out = append(out, m[1])
	}
	return out
}

// readLayering reads the two tables of the section: rows of packages begin with the
// number of their floor, rows of imports with a name.
func readLayering(doc string) (layering, error) {
	l := layering{floor: map[string]int{}, also: map[string][]string{}, onlyIn: map[string][]string{}}
	_, section, found := strings.Cut(doc, "\n## The rooms\n")
	if !found {
		return l, errors.New("no section \"The rooms\"")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") || len(cells) < 2 {
			continue
		}
		floor, err := strconv.Atoi(strings.TrimSpace(cells[0]))
		switch first := names(cells[0]); {
		case err == nil && len(cells) == 4 && len(names(cells[1])) == 1:
			name := names(cells[1])[0]
			if _, twice := l.floor[name]; twice {
				return l, fmt.Errorf("%s has two rows", name)
			}
			l.floor[name], l.also[name] = floor, names(cells[2])
			if strings.HasSuffix(strings.TrimSpace(cells[3]), "Pure") {
				l.pure = append(l.pure, name)
			}
		case len(first) > 0 && len(cells) == 2:
			for _, name := range first {
				l.onlyIn[name] = names(cells[1])
			}
		case !strings.Contains(line, "Package") && !strings.Contains(line, "only in"):
			return l, fmt.Errorf("not a row of a package or an import: %s", strings.TrimSpace(line))
		}
	}
	if len(l.floor) == 0 || len(l.pure) == 0 || len(l.onlyIn) == 0 {
		return l, fmt.Errorf("%d packages, %d of them pure, %d imports", len(l.floor), len(l.pure), len(l.onlyIn))
	}
	return l, nil
}

// graph is import path -> what it imports directly, of natkit's packages and of
// everything they reach. Imports of tests are not in it.
type graph map[string][]string

// violations returns every import that breaks a rule, in words.
func (l layering) violations(g graph) []string {
	var out []string
	report := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for path, imports := range g {
		name, ours := strings.CutPrefix(path, module)
		if !ours || strings.HasPrefix(name, tests) {
			continue
		}
		floor, known := l.floor[name]
		if !known {
			report("%s: not in the table of ARCHITECTURE.md; decide where it belongs", name)
			continue
		}
		for _, imp := range imports {
			dep, ours := strings.CutPrefix(imp, module)
			if allowed, ruled := l.onlyIn[dep]; ruled && !slices.Contains(allowed, name) {
				report("%s imports %s: only %v may", name, dep, allowed)
				continue
			}
			below, known := l.floor[dep]
			switch {
			case !ours || known && below < floor:
			case !known:
				report("%s imports %s, which is not in the table", name, dep)
			case below > floor:
				report("%s (floor %d) imports %s (floor %d): imports go down", name, floor, dep, below)
			case !slices.Contains(l.also[name], dep):
				report("%s imports %s: both are on floor %d, and the row does not name it", name, dep, floor)
			}
		}
	}
	for _, name := range l.pure {
		for _, bad := range touchesKernel {
			if path := g.path(module+name, bad); path != nil {
				report("%s must be pure and reaches %s: %s", name, bad, strings.Join(path, " -> "))
			}
		}
	}
	slices.Sort(out)
	return out
}

// path returns a shortest chain of imports between two packages, nil without one.
func (g graph) path(from, to string) []string {
	paths := [][]string{{from}}
	seen := map[string]bool{from: true}
	for len(paths) > 0 {
		path := paths[0]
		paths = paths[1:]
		last := path[len(path)-1]
		if last == to {
			return path
		}
		for _, next := range g[last] {
			if !seen[next] {
				seen[next] = true
				paths = append(paths, append(slices.Clone(path), next))
			}
		}
	}
	return nil
}

func TestImports(t *testing.T) {
	l, err := readLayering(string(read(t, "ARCHITECTURE.md")))
	if err != nil {
		t.Fatal("ARCHITECTURE.md: ", err)
	}
	g := load(t)
	for _, v := range l.violations(g) {
		t.Error(v)
	}
	for name, also := range l.also {
		if _, exists := g[module+name]; !exists {
			t.Errorf("ARCHITECTURE.md has a row for %s, which does not exist", name)
		}
		for _, dep := range also {
			if !slices.Contains(g[module+name], module+dep) {
				t.Errorf("ARCHITECTURE.md lets %s import %s, which it does not", name, dep)
			}
		}
	}
}

// load asks the go command for the import graph of the whole module.
func load(t *testing.T) graph {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Imports", module+"...")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	g := graph{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		g[p.ImportPath] = p.Imports
	}
	if len(g) < 10 {
		t.Fatalf("go list gave %d packages", len(g))
	}
	return g
}

// The checker itself: each row breaks one rule, or none.
func TestViolations(t *testing.T) {
	l, err := readLayering("x\n## The rooms\n\nWords.\n\n" +
		"| Floor | Package | also imports | What |\n|---|---|---|---|\n" +
		"| 2 | `top` | | wiring |\n| 1 | `left` | `right` | with a sibling |\n| 1 | `right` | | without |\n| 0 | `ground` | | facts. Pure |\n\n" +
		"| Import | only in |\n|---|---|\n| `os/exec`, `flags` | `top` |\n| `internal/testutil/ktest` | tests |\n\n## Next\n| 3 | `no` | | row |\n")
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		g    graph
		want string // part of the only violation; "" for none
	}{
		{"down is allowed", graph{"natkit/top": {"natkit/ground", "natkit/left", "os/exec", "fmt"}}, ""},
		{"named sibling", graph{"natkit/left": {"natkit/right"}}, ""},
		{"test packages are free", graph{"natkit/internal/testutil/x": {"natkit/top", "os/exec"}}, ""},
		{"up", graph{"natkit/ground": {"natkit/top"}}, "ground (floor 0) imports top (floor 2)"},
		{"sibling", graph{"natkit/right": {"natkit/left"}}, "right imports left: both are on floor 1"},
		{"unknown package", graph{"natkit/helper": {"fmt"}}, "helper: not in the table"},
		{"unknown import", graph{"natkit/top": {"natkit/helper"}}, "top imports helper, which is not in the table"},
		{"restricted import", graph{"natkit/left": {"os/exec"}}, "left imports os/exec: only [top] may"},
		{"for tests only", graph{"natkit/top": {"natkit/internal/testutil/ktest"}}, "top imports internal/testutil/ktest: only [] may"},
		{"pure, directly", graph{"natkit/ground": {"net"}}, "ground must be pure and reaches net"},
		{"pure, far away", graph{
			"natkit/ground": {"fmt", "example.org/x"},
			"example.org/x": {"example.org/y", "natkit/ground"},
			"example.org/y": {"golang.org/x/sys/unix"},
		}, "ground must be pure and reaches golang.org/x/sys/unix: natkit/ground -> example.org/x -> example.org/y"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := l.violations(tt.g)
			switch {
			case tt.want == "" && len(got) == 0:
			case tt.want != "" && len(got) == 1 && strings.Contains(got[0], tt.want):
			default:
				t.Errorf("violations %q, want %q", got, tt.want)
			}
		})
	}
	for name, doc := range map[string]string{
		"no section":  "## Packages\n",
		"empty":       "\n## The rooms\n",
		"a bad floor": "\n## The rooms\n| x | `top` | | wiring |\n",
		"two rows":    "\n## The rooms\n| 1 | `top` | | a |\n| 2 | `top` | | b |\n",
	} {
		if _, err := readLayering(doc); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
