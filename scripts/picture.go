// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Draws docs/picture.svg from what a run of `natkit demo` printed (scripts/picture.sh):
// four screens of a terminal, one after the other. Every line is from the run; lines
// that are left out show as an ellipsis.
package main

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	columns, rows  = 96, 25
	charW, lineH   = 8.0, 18.0 // px, of a 13 px monospace font
	margin, header = 16.0, 34.0
	seconds        = 7 // that a screen stands
)

// A screen is what a reader sees at once.
type screen struct {
	title string
	lines []string
}

// step returns the lines below a heading in capitals, up to the next such heading.
func step(lines []string, name string) []string {
	var out []string
	in := false
	for _, line := range lines {
		if line != "" && line == strings.ToUpper(line) && !strings.ContainsAny(line, " :") {
			in = line == name
			continue
		}
		if in {
			out = append(out, line)
		}
	}
	return out
}

// after returns the lines from the first that begins with a prefix, leading blanks
// not counted, up to one that begins with another; "" is the end.
func after(lines []string, from, to string) []string {
	for i, line := range lines {
		if !strings.HasPrefix(strings.TrimSpace(line), from) {
			continue
		}
		for j, line := range lines[i+1:] {
			if to != "" && strings.HasPrefix(strings.TrimSpace(line), to) {
				return lines[i : i+1+j]
			}
		}
		return lines[i:]
	}
	return nil
}

// screens chooses from a run what the picture shows.
func screens(run []string) []screen {
	diagnosis := step(run, "DIAGNOSIS")
	finding := after(diagnosis, "CRITICAL", "CRITICAL [")
	cure := step(run, "CURE")
	result := after(step(run, "REPLACE"), "Side by side", "RESULT")
	return []screen{
		{"1  A published port, healthy and with a full connection tracking table", append(step(run, "BASELINE"), step(run, "COLLAPSE")...)},
		{"2  The doctor names the cause and its evidence", append([]string{"$ natkit doctor"}, after(finding, "CRITICAL", "Why it matters")...)},
		{"3  The cure, with a way back, and the same load again", append(append([]string{}, cure...), step(run, "PROOF")...)},
		{"4  Side by side: the kernel's NAT, accelerated, replaced", result},
	}
}

func colour(line string) string {
	switch t := strings.TrimSpace(line); {
	case strings.HasPrefix(t, "$ "):
		return "c"
	case strings.HasPrefix(t, "CRITICAL"):
		return "r"
	case strings.HasPrefix(t, "("):
		return "d"
	case strings.Contains(t, " x "):
		return "g"
	}
	return "t"
}

// fit leaves out what a screen has no room for.
func fit(lines []string) []string {
	for len(lines) > 0 && strings.TrimSpace(lines[0]) == "" {
		lines = lines[1:]
	}
	for len(lines) > 0 && strings.TrimSpace(lines[len(lines)-1]) == "" {
		lines = lines[:len(lines)-1]
	}
	if len(lines) > rows {
		lines = append(append([]string{}, lines[:rows-1]...), "  …")
	}
	return lines
}

func draw(w io.Writer, all []screen) {
	width, height := columns*charW+2*margin, header+rows*lineH+2*margin
	total := float64(seconds * len(all))
	part := 100.0 / float64(len(all))
	fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-label="natkit demo: a full connection tracking table found, cured and proven">
<style>
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.t{fill:#d6deeb}.d{fill:#7f8ea3}.c{fill:#82aaff}.r{fill:#ff6b6b;font-weight:bold}.g{fill:#9ccc65}.h{fill:#fff;font-weight:bold}
.s{opacity:0;animation:show %.0fs infinite backwards}
.s1{opacity:1}
@keyframes show{0%%{opacity:0}1%%{opacity:1}%.1f%%{opacity:1}%.1f%%{opacity:0}100%%{opacity:0}}
`, width, height, width, height, total, part-1, part)
	for i := range all {
		fmt.Fprintf(w, ".s%d{animation-delay:%ds}\n", i, i*seconds)
	}
	fmt.Fprintf(w, `@media (prefers-reduced-motion:reduce){.s{animation:none}}
</style>
<rect width="100%%" height="100%%" rx="8" fill="#0f1720"/>
`)
	for i, s := range all {
		fmt.Fprintf(w, `<g class="s s%d"><text class="h" x="%.0f" y="%.0f">%s</text>`+"\n", i, margin, margin+10, html.EscapeString(s.title))
		shows := false // a sentence about what follows goes on in its colour
		for n, line := range fit(s.lines) {
			if r := []rune(line); len(r) > columns {
				line = string(r[:columns-1]) + "…"
			}
			t := strings.TrimSpace(line)
			first, _ := utf8.DecodeRuneInString(t)
			shows = strings.HasPrefix(t, "Shows:") || strings.HasPrefix(t, "Side by side:") || shows && unicode.IsLower(first)
			if t == "" {
				continue
			}
			class := colour(line)
			if shows {
				class = "d"
			}
			fmt.Fprintf(w, `<text class="%s" x="%.0f" y="%.0f" xml:space="preserve">%s</text>`+"\n",
				class, margin, header+margin+float64(n)*lineH+10, html.EscapeString(line))
		}
		fmt.Fprintln(w, "</g>")
	}
	fmt.Fprintln(w, "</svg>")
}

func main() {
	var run []string
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		run = append(run, strings.TrimRight(in.Text(), " "))
	}
	all := screens(run)
	for _, s := range all {
		if len(fit(s.lines)) < 3 {
			fmt.Fprintf(os.Stderr, "picture: the run has nothing for %q\n", s.title)
			os.Exit(1)
		}
	}
	draw(os.Stdout, all)
}
