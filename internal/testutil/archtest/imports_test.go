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
	"strings"
	"testing"
)

// table is the import rule, read from ARCHITECTURE.md: a package imports packages of lower
// layers, and of its own layer only its siblings. A pure one is a function of its arguments:
// nothing of touchesKernel is in its import closure, so that it gives the same answer on
// every machine.
type table struct {
	layer    map[string]int
	siblings map[string][]string
	pure     []string
}

var touchesKernel = []string{"github.com/cilium/ebpf", "golang.org/x/sys/unix", "net", "os/exec"}

// rules reads the first block of code below "The packages".
func rules(t *testing.T) table {
	t.Helper()
	_, text, _ := strings.Cut(string(read(t, "ARCHITECTURE.md")), "\n## The packages\n")
	_, text, _ = strings.Cut(text, "\n```\n")
	text, _, _ = strings.Cut(text, "```")
	line := regexp.MustCompile(`^(?: (\d) \S.{14}| {18})(\S+) {2,}(.*?)(?: \[([^]]+)\])?$`)
	out, layer := table{layer: map[string]int{}, siblings: map[string][]string{}}, 0
	for l := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		m := line.FindStringSubmatch(l)
		if m == nil {
			t.Fatalf("ARCHITECTURE.md: not a line of the table of packages: %q", l)
		}
		if m[1] != "" {
			layer = int(m[1][0] - '0')
		}
		out.layer[m[2]] = layer
		if m[4] != "" {
			out.siblings[m[2]] = strings.Split(m[4], ", ")
		}
		if strings.Contains(m[3], "Pure") {
			out.pure = append(out.pure, m[2])
		}
	}
	if len(out.layer) < 20 || len(out.pure) < 5 || len(out.siblings) < 5 {
		t.Fatalf("ARCHITECTURE.md: read %+v", out)
	}
	return out
}

// onlyIn names what may be imported directly by the packages listed and by no
// other: flags are parsed in one place, and natkit runs no program except where
// a user asks for it.
var onlyIn = map[string][]string{
	"github.com/spf13/cobra":         {"cmd/natkit"},
	"github.com/spf13/pflag":         {"cmd/natkit"},
	"os/exec":                        {"bench", "cmd/natkit", "internal/ktest", "lab"},
	"testing":                        {"internal/ktest"},
	"natkit/internal/testutil/ktest": {},
}

// graph is import path -> what it imports directly, of natkit's packages and of
// everything they reach. Imports of tests are not in it.
type graph map[string][]string

const module = "natkit/"

// violations returns every import that breaks a rule, in words.
func (g graph) violations(rules table) []string {
	layerOf := rules.layer
	var out []string
	report := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for path, imports := range g {
		name, ours := strings.CutPrefix(path, module)
		if !ours || name == "internal/archtest" {
			continue
		}
		layer := layerOf[name]
		if layer == 0 {
			report("%s: not in ARCHITECTURE.md's table of packages; decide where it belongs", name)
			continue
		}
		for _, imp := range imports {
			if allowed, ruled := onlyIn[imp]; ruled && !slices.Contains(allowed, name) {
				report("%s imports %s: only %v may", name, imp, allowed)
			}
			dep, ours := strings.CutPrefix(imp, module)
			switch {
			case !ours || layerOf[dep] < layer:
			case layerOf[dep] > layer:
				report("%s (layer %d) imports %s (layer %d): imports go down", name, layer, dep, layerOf[dep])
			case !slices.Contains(rules.siblings[name], dep):
				report("%s imports %s: both are in layer %d, and ARCHITECTURE.md does not name the pair", name, dep, layer)
			}
		}
	}
	for _, name := range rules.pure {
		for _, bad := range touchesKernel {
			if way := g.wayTo(module+name, bad); way != nil {
				report("%s must be pure and reaches %s: %s", name, bad, strings.Join(way, " -> "))
			}
		}
	}
	slices.Sort(out)
	return out
}

// wayTo returns a shortest chain of imports between two packages, nil without one.
func (g graph) wayTo(from, to string) []string {
	ways := [][]string{{from}}
	seen := map[string]bool{from: true}
	for len(ways) > 0 {
		way := ways[0]
		ways = ways[1:]
		last := way[len(way)-1]
		if last == to {
			return way
		}
		for _, next := range g[last] {
			if !seen[next] {
				seen[next] = true
				ways = append(ways, append(slices.Clone(way), next))
			}
		}
	}
	return nil
}

func TestImports(t *testing.T) {
	g, rules := load(t), rules(t)
	for _, v := range g.violations(rules) {
		t.Error(v)
	}
	for name := range rules.layer {
		if g[module+name] == nil {
			t.Errorf("ARCHITECTURE.md's table of packages has %s, which is not there", name)
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
	tests := []struct {
		name string
		g    graph
		want string // part of the only violation; "" for none
	}{
		{"down is allowed", graph{"natkit/internal/diagnose/tune": {"natkit/internal/snapshot", "fmt"}}, ""},
		{"named sibling", graph{"natkit/internal/lab": {"natkit/internal/kernel/conntrack", "os/exec"}}, ""},
		{"archtest itself is free", graph{"natkit/internal/testutil/archtest": {"natkit/internal/scenario"}}, ""},
		{"up", graph{"natkit/internal/kernel/conntrack": {"natkit/internal/diagnose/tune"}}, "conntrack (layer 2) imports tune (layer 3)"},
		{"sibling", graph{"natkit/internal/nat/nft": {"natkit/internal/nat/datapath"}}, "nft imports datapath: both are in layer 2"},
		{"named sibling backwards", graph{"natkit/internal/kernel/conntrack": {"natkit/internal/lab"}}, "conntrack imports lab"},
		{"unknown package", graph{"natkit/helper": {"fmt"}}, "helper: not in ARCHITECTURE.md's table"},
		{"cobra outside cmd", graph{"natkit/internal/ui/report": {"github.com/spf13/cobra"}}, "report imports github.com/spf13/cobra"},
		{"programs run", graph{"natkit/internal/diagnose/probe": {"os/exec"}}, "probe imports os/exec"},
		{"ktest outside tests", graph{"natkit/internal/lab": {"natkit/internal/testutil/ktest"}}, "lab imports natkit/internal/ktest"},
		{"pure, directly", graph{"natkit/internal/diagnose/causes": {"net"}}, "diagnose must be pure and reaches net"},
		{"pure, far away", graph{
			"natkit/internal/diagnose/causes": {"natkit/internal/snapshot", "example.org/x"},
			"natkit/internal/snapshot":        {"fmt"},
			"example.org/x":                   {"example.org/y", "natkit/internal/snapshot"},
			"example.org/y":                   {"golang.org/x/sys/unix"},
		}, "diagnose must be pure and reaches golang.org/x/sys/unix: natkit/diagnose -> example.org/x -> example.org/y"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.g.violations(rules(t))
			switch {
			case tt.want == "" && len(got) == 0:
			case tt.want != "" && len(got) == 1 && strings.Contains(got[0], tt.want):
			default:
				t.Errorf("violations %q, want %q", got, tt.want)
			}
		})
	}
}
