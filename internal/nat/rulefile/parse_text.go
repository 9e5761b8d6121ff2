// SPDX-License-Identifier: Apache-2.0

// What makes a text no rule file before it has keys and values: characters, and YAML's
// grammar. The YAML library's words are for those who write YAML parsers, and of what is
// wrong with a character it knows the file's beginning only; so both are put here in our own.

package rulefile

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// byteOrderMark may begin a file in UTF-8; elsewhere it is an invisible character.
const byteOrderMark = "\ufeff"

// isText refuses, with its place, the first character that no rule file has.
func (r *reader) isText(data []byte) bool {
	for _, mark := range []string{"\xff\xfe", "\xfe\xff", "\x00\x00\xfe\xff"} {
		if bytes.HasPrefix(data, []byte(mark)) {
			r.add(Position{1, 1}, "the file is in UTF-16 or UTF-32: save it as UTF-8")
			return false
		}
	}
	at := Position{1, 1}
	comment, before := false, ' '
	for rest := bytes.TrimPrefix(data, []byte(byteOrderMark)); len(rest) > 0; {
		c, size := utf8.DecodeRune(rest)
		if why := unfit(c, rest[:size], comment); why != "" {
			r.add(at, "%s", why)
			return false
		}
		if rest = rest[size:]; c == '\n' || c == '\r' && !bytes.HasPrefix(rest, []byte("\n")) {
			at, comment = Position{at.Line + 1, 1}, false
		} else {
			at.Column++
			comment = comment || c == '#' && unicode.IsSpace(before)
		}
		before = c
	}
	return true
}

// unfit is why a character, which encoded is, can't be in a rule file; "" if it can. In
// comments languages are written that need invisible ones.
func unfit(c rune, encoded []byte, comment bool) string {
	switch {
	case c == utf8.RuneError && len(encoded) == 1:
		return fmt.Sprintf("byte 0x%02X is not UTF-8: save the file as UTF-8", encoded[0])
	case c == 0:
		return "a NUL byte: the file is not text, or is damaged"
	case c == '\u0085' || c == '\u2028' || c == '\u2029':
		return fmt.Sprintf("character %U, which some programs take for the end of a line: replace it by one", c)
	case c != '\t' && c != '\n' && c != '\r' && unicode.IsControl(c):
		return fmt.Sprintf("control character %U: delete it", c)
	case c == 0xfffe || c == 0xffff:
		return fmt.Sprintf("%U is not a character: delete it", c)
	case !comment && invisible(c):
		return fmt.Sprintf("invisible character %U: replace it by a space, or delete it", c)
	}
	return ""
}

// invisible reports whether nobody sees a character, or takes it for a space.
func invisible(c rune) bool { return c != ' ' && unicode.In(c, unicode.Cf, unicode.Zs) }

// grammar is what the library says of a text that is no YAML, as far as it has one cause,
// and what we say. The first that is in its words counts.
var grammar = []struct{ words, means string }{
	{"max depth", fmt.Sprintf("lists and keys nested more than %d deep: a rule file has 6 levels at most", maxDepth)},
	{"tab", "a tab: YAML indents by spaces only, replace it by spaces"},
	{"unknown anchor", aliasRefused},
	{"alias", aliasRefused},
	{"anchor", anchorRefused},
	{"directive", directiveRefused},
	{"incompatible YAML", directiveRefused},
	{"tag", tagRefused},
	{"mapping values are not allowed", "a second colon in a line, or a key that is indented otherwise than those above it: put a value with a colon in quotes, or align the key"},
	{"mapping keys are not allowed", "a question mark can't begin a value: put it in quotes"},
	{"block sequence entries are not allowed", "a dash can't stand here: begin a list on a line of its own"},
	{"quoted scalar: found unexpected end", "the quote is not closed"},
	{"quoted scalar: found unexpected document", "the quote is not closed"},
	{"quoted scalar", "an escape that does not exist, in double quotes: write the value in single quotes"},
	{"flow sequence", "the list is not closed, or a comma is missing: write [a, b]"},
	{"flow mapping", "the braces are not closed, or a comma is missing: write {a: b, c: d}"},
	{"flow node", "a value is missing here, or a bracket or brace is not closed"},
	{"block collection", "the line is not indented like the list's other dashes"},
	{"block mapping", "the line is not indented like the keys it belongs to, or has no key: write key: value"},
	{"block node", "a bracket or brace is closed that was not opened"},
	{"expected ':'", "a colon is missing behind the key: write key: value"},
	{"block scalar", "text behind | or >: a rule file has no values of several lines"},
	{"comment without", "a comment needs a space in front of #"},
	{"document", "--- and ... are for files of several documents: a rule file is one"},
}

// What YAML has and a rule file does not.
const (
	aliasRefused     = "an alias: a rule file has none, write the value out"
	anchorRefused    = "an anchor: a rule file has none, write the value out where it is needed"
	tagRefused       = "a tag: a rule file has none, write the value alone"
	directiveRefused = "a directive: a rule file has none, delete the line"
)

// syntax reports what is no YAML, in text.
func (r *reader) syntax(err error, text []byte) {
	at, message := Position{1, 1}, "this can't be read as YAML: write key: value, and lists behind dashes"
	var broken *yaml.LoadError
	if !errors.As(err, &broken) {
		r.add(at, "%s", message)
		return
	}
	mark, words := broken.Mark, broken.ContextMsg+": "+broken.Message
	opened := strings.Contains(words, "quoted scalar") && strings.Contains(words, "end of stream")
	if opened && broken.ContextMark.Line > 0 {
		mark = broken.ContextMark
	}
	at = Position{max(1, mark.Line), max(1, mark.Column)}
	if strings.Contains(words, "cannot start any token") {
		r.add(at, "%s", badStart(characterAt(text, at)))
		return
	}
	for _, g := range grammar {
		if strings.Contains(words, g.words) {
			message = g.means
			break
		}
	}
	if from := broken.ContextMark.Line; strings.Contains(words, "parsing a flow") && from > 0 && from < at.Line {
		message += fmt.Sprintf(" (it begins in line %d)", from)
	}
	r.add(at, "%s", message)
}

// badStart is why nothing begins with a character.
func badStart(c rune) string {
	if c == '\t' || c == 0 {
		return "a tab: YAML indents by spaces only, replace it by spaces"
	}
	return fmt.Sprintf("a value can't begin with %q: put it in quotes", c)
}

// characterAt is the character at a place of a text, 0 if it has none.
func characterAt(text []byte, at Position) rune {
	text = bytes.TrimPrefix(text, []byte(byteOrderMark))
	lines := strings.Split(strings.ReplaceAll(strings.ReplaceAll(string(text), "\r\n", "\n"), "\r", "\n"), "\n")
	if at.Line > len(lines) {
		return 0
	}
	line := []rune(lines[at.Line-1])
	if at.Column > len(line) {
		return 0
	}
	return line[at.Column-1]
}
