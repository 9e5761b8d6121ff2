// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// An ink is a colour that the page's style sheet decides, so that a plot follows
// the reader's theme: an SVG class of that name sets its --ink.
type ink string

// A canvas is an SVG element for a page that it stands in: colours are inks, text is
// text. Its origin is at the top left, its unit a pixel.
type canvas struct {
	b             strings.Builder
	width, height float64
}

// spot is a place on a canvas.
type spot struct{ x, y float64 }

// stroke is how a line is drawn.
type stroke struct {
	ink    ink
	width  float64
	dashes []float64
}

// drawSVG returns what paint draws as an SVG element; title is for those who
// can't see it.
func drawSVG(width, height float64, class, title string, paint func(*canvas)) string {
	c := &canvas{width: width, height: height}
	fmt.Fprintf(&c.b, `<svg class="%s" viewBox="0 0 %s %s" width="%s" height="%s" role="img" aria-label="%s">`+"\n",
		class, length(width), length(height), length(width), length(height), escaped(title))
	paint(c)
	c.b.WriteString("</svg>")
	return c.b.String()
}

func (c *canvas) line(s stroke, x1, y1, x2, y2 float64) { c.lines(s, spot{x1, y1}, spot{x2, y2}) }

// lines joins spots.
func (c *canvas) lines(s stroke, spots ...spot) {
	dashes := ""
	if len(s.dashes) > 0 {
		var lengths []string
		for _, d := range s.dashes {
			lengths = append(lengths, length(d))
		}
		dashes = ` stroke-dasharray="` + strings.Join(lengths, " ") + `"`
	}
	fmt.Fprintf(&c.b, `<path class="line i-%s" stroke-width="%s"%s d="%s"/>`+"\n", s.ink, length(s.width), dashes, path(spots))
}

// area fills what spots enclose.
func (c *canvas) area(colour ink, spots ...spot) {
	fmt.Fprintf(&c.b, `<path class="area i-%s" d="%sZ"/>`+"\n", colour, path(spots))
}

func path(spots []spot) string {
	var b strings.Builder
	for i, s := range spots {
		if i == 0 {
			b.WriteByte('M')
		} else {
			b.WriteByte('L')
		}
		b.WriteString(length(s.x) + " " + length(s.y))
	}
	return b.String()
}

// An align says where in a text's width the place lies that it is written at.
type align float64

const (
	alignLeft   align = 0
	alignCentre align = 0.5
	alignRight  align = 1
)

// text writes a line whose middle is at the height y. It says how wide the text is in
// the font that the plot was laid out with, so that it fits where the reader has another.
func (c *canvas) text(colour ink, size, x, y float64, a align, words string) {
	if words == "" {
		return
	}
	width := textWidth(words, size)
	fmt.Fprintf(&c.b, `<text class="i-%s" x="%s" y="%s" font-size="%s" textLength="%s" lengthAdjust="spacingAndGlyphs">%s</text>`+"\n",
		colour, length(x-float64(a)*width), length(y+halfCapital*size), length(size), length(width), escaped(words))
}

// halfCapital is half the height of a capital letter of 1 pixel.
const halfCapital = 0.36

// textWidth is how wide a text is in the sans-serif font that most machines have.
func textWidth(words string, size float64) float64 {
	thousandths := 0
	for _, r := range words {
		switch {
		case r >= ' ' && r <= '~':
			thousandths += advances[r-' ']
		case r < 0x2000:
			thousandths += 580 // × and µ; letters with accents are narrower
		default:
			thousandths += 1000
		}
	}
	return size * float64(thousandths) / 1000
}

// fitted is a text that any file may hold, cut to a width.
func fitted(words string, width float64) string {
	words = printable(words)
	if textWidth(words, textSize) <= width {
		return words
	}
	runes := []rune(words)
	for len(runes) > 0 && textWidth(string(runes)+"…", textSize) > width {
		runes = runes[:len(runes)-1]
	}
	return string(runes) + "…"
}

// advances are how far the characters from ' ' to '~' reach in Helvetica, Arial and
// Liberation Sans, which agree on it, in thousandths of the font's size.
var advances = [...]int{
	278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278,
	556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556,
	1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778,
	667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556,
	333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556,
	556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
}

// length writes a length with a hundredth of a pixel.
func length(l float64) string {
	return strconv.FormatFloat(math.Round(l*100)/100, 'f', -1, 64)
}

// escaped is a text as XML allows it.
func escaped(s string) string { return html.EscapeString(printable(s)) }
