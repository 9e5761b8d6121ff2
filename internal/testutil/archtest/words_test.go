// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	_ "embed"
	"fmt"
	"go/scanner"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

//go:embed words.txt
var wordList string

// banned is a row of words.txt.
type banned struct {
	phrases []string
	where   []string
	instead string
	find    *regexp.Regexp
	heads   []string       // first words of the phrases, in lower case: find is slow where none occurs
	allowed *regexp.Regexp // nil if there is nothing of the kind
}

// span is a part of a file with one of the places of words.txt.
type span struct {
	line        int
	where, text string
}

func readWords(list string) ([]banned, error) {
	var out []banned
	for line := range strings.Lines(list) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		cells := strings.Split(line, "|")
		if len(cells) != 3 && len(cells) != 4 {
			return nil, fmt.Errorf("%d columns: %s", len(cells), line)
		}
		b := banned{phrases: phrases(cells[0]), where: strings.Fields(cells[1]), instead: strings.TrimSpace(cells[2])}
		for _, where := range b.where {
			if !slices.Contains([]string{"docs", "strings", "go", "c"}, where) {
				return nil, fmt.Errorf("no such place %q: %s", where, line)
			}
		}
		if len(b.phrases) == 0 || len(b.where) == 0 || b.instead == "" {
			return nil, fmt.Errorf("an empty column: %s", line)
		}
		b.find = anyOf(b.phrases)
		for _, p := range b.phrases {
			b.heads = append(b.heads, strings.ToLower(strings.Fields(p)[0]))
		}
		if len(cells) == 4 {
			b.allowed = anyOf(phrases(cells[3]))
		}
		out = append(out, b)
	}
	return out, nil
}

func phrases(cell string) []string {
	var out []string
	for p := range strings.SplitSeq(cell, ",") {
		if p = strings.TrimSpace(p); p != "" {
			out = append(out, p)
		}
	}
	return out
}

// anyOf matches one of the phrases; a line may break between their words, in comments too.
func anyOf(phrases []string) *regexp.Regexp {
	var alternatives []string
	for _, p := range phrases {
		var words []string
		for word := range strings.FieldsSeq(p) {
			words = append(words, regexp.QuoteMeta(word))
		}
		alternatives = append(alternatives, strings.Join(words, `[\s/*]+`))
	}
	return regexp.MustCompile(`(?i)\b(` + strings.Join(alternatives, "|") + `)\b`)
}

var (
	capital = regexp.MustCompile(`([a-z0-9])([A-Z])`)
	joints  = strings.NewReplacer("_", " ", "-", " ")
)

// apart splits the names in a text into their words.
func apart(text string) string {
	return joints.Replace(capital.ReplaceAllString(text, "$1 $2"))
}

// spans cuts a file into what words.txt tells apart; none of a file that is not read.
func spans(path string, data []byte) []span {
	switch ext := filepath.Ext(path); {
	case slices.Contains([]string{".md", ".8", ".sh", ".service", ".yml", ".yaml"}, ext), slices.Contains([]string{"Makefile", ".ci/run", "deploy/default/natkit"}, path):
		return []span{{1, "docs", string(data)}}
	case strings.HasPrefix(path, "bpf/") && (ext == ".c" || ext == ".h"):
		return []span{{1, "c", string(data)}}
	case ext != ".go":
		return nil
	}
	var out []span
	fset := token.NewFileSet()
	file := fset.AddFile(path, -1, len(data))
	var s scanner.Scanner
	s.Init(file, data, nil, scanner.ScanComments)
	for {
		pos, tok, text := s.Scan()
		where := "go"
		switch {
		case tok == token.EOF:
			return out
		case tok == token.STRING && !strings.HasSuffix(path, "_test.go"):
			where = "strings"
		case tok != token.STRING && tok != token.COMMENT && tok != token.IDENT:
			continue
		}
		line := fset.Position(pos).Line
		if n := len(out); tok == token.COMMENT && n > 0 && out[n-1].where == "comment" {
			out[n-1].text += "\n" + text // one sentence goes over several lines
			continue
		}
		if tok == token.COMMENT {
			where = "comment"
		}
		out = append(out, span{line, where, text})
	}
}

// findWords returns what of a file must not be there, in words.
func findWords(list []banned, path string, data []byte) []string {
	var out []string
	for _, s := range spans(path, data) {
		where, text := s.where, apart(s.text)
		if where == "comment" {
			where = "go"
		}
		lower := strings.ToLower(text)
		for _, b := range list {
			if !slices.Contains(b.where, where) || !slices.ContainsFunc(b.heads, func(head string) bool { return strings.Contains(lower, head) }) {
				continue
			}
			for _, at := range b.find.FindAllStringIndex(text, -1) {
				if b.allowed != nil {
					if ok := b.allowed.FindStringIndex(text[at[0]:]); ok != nil && ok[0] == 0 {
						continue
					}
				}
				line := s.line + strings.Count(text[:at[0]], "\n")
				out = append(out, fmt.Sprintf("%s:%d: %q: write: %s", path, line, text[at[0]:at[1]], b.instead))
			}
		}
	}
	return out
}

// unread are vendored headers, the list itself, and where names still are as they were.
var unread = []string{"bpf/include/", "internal/testutil/archtest/words", "internal/testutil/archtest/claims"}

// The words of natkit are those of its field (words.txt has those it used to have).
func TestWords(t *testing.T) {
	list, err := readWords(wordList)
	if err != nil {
		t.Fatal("words.txt: ", err)
	}
	for _, path := range sources(t, func(path string) bool {
		return !slices.ContainsFunc(unread, func(dir string) bool { return strings.HasPrefix(path, dir) })
	}) {
		for _, found := range findWords(list, path, read(t, path)) {
			t.Error(found)
		}
	}
}

// The check itself: each word is found wherever it must not be, and nowhere else.
func TestWordsAreFound(t *testing.T) {
	list, err := readWords(wordList)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]func(string) (path, text string){
		"docs":    func(p string) (string, string) { return "docs/x.md", "A line.\n\nIt is " + p + " here.\n" },
		"strings": func(p string) (string, string) { return "cmd/x.go", "package x\n\nvar s = \"it is " + p + " here\"\n" },
		"go":      func(p string) (string, string) { return "cmd/x.go", "package x\n\n// It is " + p + " here.\n" },
		"c":       func(p string) (string, string) { return "bpf/x.h", "\n\n/* it is " + p + " here */\n" },
	}
	for _, b := range list {
		for _, phrase := range b.phrases {
			for where, file := range files {
				for _, p := range []string{phrase, strings.ToUpper(phrase), strings.ReplaceAll(phrase, " ", "\n// ")} {
					if where == "strings" && strings.Contains(p, "\n") {
						continue
					}
					path, text := file(p)
					found := findWords([]banned{b}, path, []byte(text))
					if want := slices.Contains(b.where, where); (len(found) > 0) != want {
						t.Errorf("%q in %s: found %q, want %t", p, where, found, want)
					} else if want && (!strings.HasPrefix(found[0], path+":3: ") || !strings.Contains(found[0], b.instead)) {
						t.Errorf("%q in %s: %q", p, where, found)
					}
				}
			}
		}
	}
	for _, path := range []string{"scripts/x.sh", "deploy/x/x.yaml", "deploy/x.service", "Makefile", ".ci/run", "deploy/default/natkit", "docs/natkit.8"} {
		if found := findWords(list, path, []byte("# made anew\n")); len(found) != 1 {
			t.Errorf("%s: %q", path, found)
		}
	}
	for text, want := range map[string]int{
		"package x\n\nfunc flowShortcut() {}\n":         1, // a name's part
		"package x\n\nconst flow_shortcut_max = 1\n":    1,
		"package x\n\nvar s = `as well as this`\n":      0, // allowed nevertheless
		"package x\n\nvar s = `this as well`\n":         1,
		"package x\n\nvar s = `embedded, storyboard`\n": 0, // whole words only
		"package x\n\n// put together\n// again\n":      1,
	} {
		if found := findWords(list, "cmd/x.go", []byte(text)); len(found) != want {
			t.Errorf("%q: found %q, want %d", text, found, want)
		}
	}
	for _, bad := range []string{"a | docs", "a | nowhere | b", "| docs | b", "a | docs | "} {
		if _, err := readWords(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
