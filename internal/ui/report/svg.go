// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"html"
	"image"
	"image/color"
	"math"
	"strconv"
	"strings"

	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// An ink is a colour that the page's style sheet decides, so that a plot follows
// the reader's theme: an SVG class of that name sets its --ink.
type ink string

// RGBA makes an ink a color.Color. Nothing looks at it: svgCanvas takes inks by
// their names.
func (ink) RGBA() (r, g, b, a uint32) { return color.Black.RGBA() }

// svgCanvas is a vg.Canvas that writes SVG for a page that it stands in: colours
// are inks, text is text. Its origin is at the bottom left, as vg wants it.
type svgCanvas struct {
	b      strings.Builder
	height vg.Length
	now    svgState
	saved  []svgState
}

type svgState struct {
	ink    ink
	width  vg.Length
	dashes []vg.Length
	m      [6]float64 // x' = m0 x + m2 y + m4, y' = m1 x + m3 y + m5
}

// drawSVG returns what paint draws as an SVG element; title is for those who
// can't see it.
func drawSVG(width, height vg.Length, class, title string, paint func(draw.Canvas)) string {
	c := &svgCanvas{height: height}
	c.now = svgState{ink: "fg", width: 1, m: [6]float64{1, 0, 0, 1, 0, 0}}
	fmt.Fprintf(&c.b, `<svg class="%s" viewBox="0 0 %s %s" width="%s" height="%s" role="img" aria-label="%s">`,
		class, length(width), length(height), length(width), length(height), escaped(title))
	c.b.WriteByte('\n')
	paint(draw.NewCanvas(c, width, height))
	c.b.WriteString("</svg>")
	return c.b.String()
}

func (c *svgCanvas) SetLineWidth(w vg.Length)               { c.now.width = w }
func (c *svgCanvas) SetLineDash(d []vg.Length, _ vg.Length) { c.now.dashes = d }
func (c *svgCanvas) Push()                                  { c.saved = append(c.saved, c.now) }

func (c *svgCanvas) Pop() {
	c.now, c.saved = c.saved[len(c.saved)-1], c.saved[:len(c.saved)-1]
}

// SetColor takes an ink; any other colour is that of text.
func (c *svgCanvas) SetColor(col color.Color) {
	var ok bool
	if c.now.ink, ok = col.(ink); !ok {
		c.now.ink = "fg"
	}
}

func (c *svgCanvas) Rotate(rad float64) {
	sin, cos := math.Sincos(rad)
	c.transform(cos, sin, -sin, cos, 0, 0)
}

func (c *svgCanvas) Translate(p vg.Point) { c.transform(1, 0, 0, 1, float64(p.X), float64(p.Y)) }
func (c *svgCanvas) Scale(x, y float64)   { c.transform(x, 0, 0, y, 0, 0) }

func (c *svgCanvas) transform(a, b, d, e, f, g float64) {
	m := c.now.m
	c.now.m = [6]float64{
		m[0]*a + m[2]*b, m[1]*a + m[3]*b,
		m[0]*d + m[2]*e, m[1]*d + m[3]*e,
		m[0]*f + m[2]*g + m[4], m[1]*f + m[3]*g + m[5],
	}
}

// at is where a point lies in the SVG, whose origin is at the top left.
func (c *svgCanvas) at(p vg.Point) string {
	m, x, y := c.now.m, float64(p.X), float64(p.Y)
	return length(vg.Length(m[0]*x+m[2]*y+m[4])) + " " + length(c.height-vg.Length(m[1]*x+m[3]*y+m[5]))
}

func (c *svgCanvas) Stroke(path vg.Path) {
	if c.now.width <= 0 {
		return
	}
	dashes := ""
	for i, d := range c.now.dashes {
		if i > 0 {
			dashes += " "
		}
		dashes += length(d)
	}
	if dashes != "" {
		dashes = ` stroke-dasharray="` + dashes + `"`
	}
	fmt.Fprintf(&c.b, `<path class="line i-%s" stroke-width="%s"%s d="%s"/>`+"\n", c.now.ink, length(c.now.width), dashes, c.path(path))
}

func (c *svgCanvas) Fill(path vg.Path) {
	fmt.Fprintf(&c.b, `<path class="area i-%s" d="%s"/>`+"\n", c.now.ink, c.path(path))
}

func (c *svgCanvas) path(path vg.Path) string {
	var b strings.Builder
	for _, p := range path {
		switch p.Type {
		case vg.MoveComp:
			b.WriteString("M" + c.at(p.Pos))
		case vg.LineComp:
			b.WriteString("L" + c.at(p.Pos))
		case vg.ArcComp:
			c.arc(&b, p)
		case vg.CurveComp:
			b.WriteString([]string{"", "Q", "C"}[len(p.Control)])
			for _, control := range p.Control {
				b.WriteString(c.at(control) + " ")
			}
			b.WriteString(c.at(p.Pos))
		case vg.CloseComp:
			b.WriteString("Z")
		}
	}
	return b.String()
}

// arc writes an arc as two, for SVG does not draw one whose ends are the same.
func (c *svgCanvas) arc(b *strings.Builder, p vg.PathComp) {
	end := func(angle float64) string {
		return c.at(vg.Point{X: p.Pos.X + p.Radius*vg.Length(math.Cos(angle)), Y: p.Pos.Y + p.Radius*vg.Length(math.Sin(angle))})
	}
	verb := "L"
	if b.Len() == 0 {
		verb = "M"
	}
	sweep := 0
	if p.Angle < 0 {
		sweep = 1
	}
	b.WriteString(verb + end(p.Start))
	for _, part := range []float64{0.5, 1} {
		fmt.Fprintf(b, "A%s %s 0 0 %d %s", length(p.Radius), length(p.Radius), sweep, end(p.Start+p.Angle*part))
	}
}

// FillString says how wide the text is in the font that the plot was laid out
// with, so that it fits where the reader has another.
func (c *svgCanvas) FillString(f font.Face, p vg.Point, text string) {
	if text == "" || f.Font.Size == 0 {
		return
	}
	xy := strings.Fields(c.at(p))
	turn := ""
	if angle := math.Atan2(c.now.m[1], c.now.m[0]); angle != 0 {
		turn = fmt.Sprintf(` transform="rotate(%s %s %s)"`, length(vg.Length(-angle*180/math.Pi)), xy[0], xy[1])
	}
	fmt.Fprintf(&c.b, `<text class="i-%s" x="%s" y="%s" font-size="%s" textLength="%s" lengthAdjust="spacingAndGlyphs"%s>%s</text>`+"\n",
		c.now.ink, xy[0], xy[1], length(f.Font.Size), length(f.Width(text)), turn, escaped(text))
}

// DrawImage is what vg.Canvas wants; no plot has an image.
func (c *svgCanvas) DrawImage(vg.Rectangle, image.Image) {}

// length writes a length with a hundredth of a point.
func length(l vg.Length) string {
	return strconv.FormatFloat(math.Round(float64(l)*100)/100, 'f', -1, 64)
}

// escaped is a text as XML allows it.
func escaped(s string) string { return html.EscapeString(printable(s)) }
