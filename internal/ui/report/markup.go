// SPDX-License-Identifier: Apache-2.0

package report

import (
	"io"
	"slices"
	"strings"
)

// markup is HTML that may stand in a page as it is. What came from outside becomes
// markup by text alone, so that none of it can be a tag.
//
// Not html/template: it calls methods by their names, for which the linker keeps
// every exported method in the program, a tenth of it.
type markup string

// text is any text as markup; its lines stay lines.
func text(s string) markup {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = escaped(strings.ReplaceAll(line, "\t", "    "))
	}
	return markup(strings.Join(lines, "\n"))
}

type attribute struct{ name, value string }

// blocks are the elements that stand on lines of their own.
var blocks = []string{"p", "h1", "h2", "h3", "pre", "dl", "dt", "dd", "ul", "li", "tr", "table", "div", "figure", "figcaption", "details", "summary", "article", "section", "main"}

// element is an element with attributes.
func element(name string, attributes []attribute, content ...markup) markup {
	var b strings.Builder
	b.WriteString("<" + name)
	for _, a := range attributes {
		b.WriteString(" " + a.name + `="` + escaped(a.value) + `"`)
	}
	b.WriteString(">")
	for _, c := range content {
		b.WriteString(string(c))
	}
	b.WriteString("</" + name + ">")
	if slices.Contains(blocks, name) {
		b.WriteByte('\n')
	}
	return markup(b.String())
}

// tag is an element with classes, which stand behind a dot: "td.num".
func tag(name string, content ...markup) markup {
	name, class, ok := strings.Cut(name, ".")
	if !ok || class == "" {
		return element(name, nil, content...)
	}
	return element(name, []attribute{{"class", class}}, content...)
}

// details is a part of a page that opens by a click.
func details(open bool, summary string, content ...markup) markup {
	var attributes []attribute
	if open {
		attributes = []attribute{{"open", ""}}
	}
	return element("details", attributes, append([]markup{tag("summary", text(summary))}, content...)...)
}

// said is a text in an element, nothing where there is no text.
func said(name, s string) markup {
	if s == "" {
		return ""
	}
	return tag(name, text(s))
}

// each joins what of makes of the parts of a list.
func each[T any](list []T, of func(T) markup) markup {
	var b strings.Builder
	for _, v := range list {
		b.WriteString(string(of(v)))
	}
	return markup(b.String())
}

// paragraphs are texts one below the other.
func paragraphs(list []string) markup {
	return each(list, func(s string) markup { return said("p", s) })
}

// scroll is a table that is wider than a telephone.
func scroll(class string, rows ...markup) markup {
	return tag("div.scroll", tag("table."+class, rows...))
}

// A document is a page that needs nothing besides itself.
type document struct {
	title, style, script string
	inPicture            bool // scripts stand in the pictures
	body                 markup
}

func (d document) write(w io.Writer) error {
	var b strings.Builder
	policy := "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
	if d.script != "" || d.inPicture {
		policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
	}
	b.WriteString(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="` + policy + `">
` + string(tag("title", text(d.title))) + "\n<style>\n" + d.style + "</style>\n</head>\n<body>\n" + string(d.body))
	if d.script != "" {
		b.WriteString("<script>\n" + d.script + "</script>\n")
	}
	b.WriteString("</body>\n</html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
