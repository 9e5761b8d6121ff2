// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	_ "embed"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

//go:embed long.txt
var longFunctions string

// Functions longer than this have to be in long.txt. What makes a command is mostly its help
// and its flags.
const functionLines, commandLines = 60, 100

var makesCommand = regexp.MustCompile(`^new\w+Command$`)

// functions calls fn with each function of the programs, without tests and generated files.
func functions(t *testing.T, fn func(path string, f *ast.FuncDecl, lines int)) {
	t.Helper()
	for _, path := range sources(t, func(path string) bool {
		return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, "_bpfel.go") &&
			!strings.HasPrefix(path, "internal/testutil/")
	}) {
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, read(t, path), parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
				fn(path, f, fset.Position(f.End()).Line-fset.Position(f.Pos()).Line+1)
			}
		}
	}
}

// A function longer than a page mixes things that belong apart, unless it is a table of flags
// or cases. long.txt has those that are; it may only shrink.
func TestLongFunctions(t *testing.T) {
	listed := map[string]bool{}
	for line := range strings.Lines(longFunctions) {
		if name := strings.TrimSpace(line); name != "" && !strings.HasPrefix(name, "#") {
			listed[name] = false
		}
	}
	functions(t, func(path string, f *ast.FuncDecl, lines int) {
		most := functionLines
		if makesCommand.MatchString(f.Name.Name) {
			most = commandLines
		}
		if lines <= most {
			return
		}
		name := fmt.Sprintf("%s %s", path, f.Name.Name)
		if _, ok := listed[name]; !ok {
			t.Errorf("%s has %d lines: split facts, decision and words", name, lines)
		}
		listed[name] = true
	})
	for name, seen := range listed {
		if !seen {
			t.Errorf("long.txt: %s is no longer that long, or gone: remove the line", name)
		}
	}
}

// A command is made in the file that has its name, or that of the command above it:
// newTuneApplyCommand in tune_apply.go or tune.go.
func TestCommandsAreInFilesOfTheirName(t *testing.T) {
	found := 0
	functions(t, func(path string, f *ast.FuncDecl, _ int) {
		name, isNew := strings.CutPrefix(f.Name.Name, "new")
		name, isCommand := strings.CutSuffix(name, "Command")
		if filepath.Dir(path) != "cmd/natkit" || !isNew || !isCommand || name == "" {
			return
		}
		found++
		words := camelWords(name)
		var files []string
		for n := range words {
			files = append(files, "cmd/natkit/"+strings.Join(words[:n+1], "_")+".go")
		}
		if !slices.Contains(files, path) {
			t.Errorf("%s is in %s, not in %s", f.Name.Name, path, files[len(files)-1])
		}
	})
	if found < 40 {
		t.Errorf("%d commands", found)
	}
}

// camelWords are the words of a name, in lower case: benchUDP, or BenchUDP, is bench, udp.
func camelWords(name string) (words []string) {
	runes := []rune(name)
	start := 0
	for i := 1; i <= len(runes); i++ {
		if i == len(runes) || unicode.IsUpper(runes[i]) && (unicode.IsLower(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) {
			words = append(words, strings.ToLower(string(runes[start:i])))
			start = i
		}
	}
	return words
}
