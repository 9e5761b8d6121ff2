// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/internal/kernel/observe"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// Flame is a picture of a profile: each function is a box below its caller, as
// wide as its share of the samples. With Before it is the difference of two
// profiles: a box is as wide as the mean of its two shares.
type Flame struct {
	Title  string
	Root   string
	After  *observe.Profile
	Before *observe.Profile // nil for a picture of one profile
}

//go:embed flame.js
var flameScript string

//go:embed flame.css
var flameStyle string

//go:embed flamepage.css
var flamePageStyle string

// flameBox is one function at one place of the tree. Values are shares of all
// ticks, so that profiles of different length compare.
type flameBox struct {
	function, module string
	before, after    float64
	callees          []*flameBox
}

func (b *flameBox) width(diff bool) float64 {
	if diff {
		return (b.before + b.after) / 2
	}
	return b.after
}

// leastBox is the part of the picture that is drawn at all; a thousandth of a
// wide screen is two points.
const leastBox = 0.0005

const (
	boxHeight   = 18
	flameHeader = 58
)

// boxes joins the stacks below the root.
func (f *Flame) boxes() *flameBox {
	root := &flameBox{function: f.Root}
	add := func(p *observe.Profile, to func(*flameBox) *float64) {
		if p == nil || p.Samples == 0 {
			return
		}
		for _, stack := range p.Stacks {
			from := stack.Below(f.Root)
			if from < -1 {
				continue
			}
			share := float64(stack.Count) / float64(p.Samples)
			box := root
			*to(box) += share
			for ; from >= 0; from-- {
				box = box.callee(stack.Frames[from])
				*to(box) += share
			}
		}
	}
	add(f.After, func(b *flameBox) *float64 { return &b.after })
	add(f.Before, func(b *flameBox) *float64 { return &b.before })
	return root
}

func (b *flameBox) callee(frame observe.Frame) *flameBox {
	for _, c := range b.callees {
		if c.function == frame.Function {
			return c
		}
	}
	c := &flameBox{function: frame.Function, module: frame.Module}
	b.callees = append(b.callees, c)
	return c
}

// HTML writes the picture as a page that needs nothing besides itself.
func (f *Flame) HTML(w io.Writer) error {
	body := tag("h1", text(f.Title)) + each(f.about(), func(line string) markup { return said("p.dim", line) })
	hint := markup("A box is a function of the kernel below the one that called it, as wide as its share of the samples. A click zooms, escape shows all, / searches.")
	diff := f.Before != nil
	if diff {
		hint += " Red boxes grew, blue ones shrank; a box is as wide as the mean of its two shares."
	}
	body += tag("p.dim", hint)
	if !diff {
		body += tag("p.dim keys", each(f.kinds(), func(k flameKind) markup { return tag("span", k.swatch(12), " ", text(k.Name)) }))
	}
	body += markup(f.svg(false)) + "\n" + f.legend(diff)
	return document{title: f.Title, style: flamePageStyle, inPicture: true, body: body}.write(w)
}

// legend says what the colours mean, and how much of the time each has.
func (f *Flame) legend(diff bool) markup {
	shares := tag("th.num", "of all time")
	if diff {
		shares = tag("th.num", "before") + tag("th.num", "after")
	}
	return scroll("", tag("tr", tag("th"), tag("th", "work"), shares, tag("th", "what it is")), each(f.kinds(), func(k flameKind) markup {
		swatch, before := k.swatch(14), markup("")
		if diff {
			swatch, before = "", tag("td.num", text(k.Before))
		}
		return tag("tr", tag("td", swatch), tag("td", text(k.Name)), before, tag("td.num", text(k.After)), tag("td", text(k.About)))
	}))
}

// swatch is a square in the kind's colour.
func (k flameKind) swatch(size int) markup {
	side := []attribute{{"width", fmt.Sprint(size)}, {"height", fmt.Sprint(size)}}
	return element("svg", append([]attribute{{"class", "flame swatch"}}, side...), element("rect", append([]attribute{{"class", k.Name}}, side...)))
}

// SVG writes the picture as a file that a browser opens.
func (f *Flame) SVG(w io.Writer) error {
	_, err := io.WriteString(w, `<?xml version="1.0" encoding="UTF-8"?>`+"\n"+f.svg(true)+"\n")
	return err
}

func (f *Flame) about() []string {
	about := func(name string, p *observe.Profile) string {
		return fmt.Sprintf("%s%s, %.1f s, %s, %d Hz: %s: %d kernel, %d user, %d idle, %d lost", name,
			p.Start.UTC().Format("2006-01-02 15:04:05 UTC"), p.Duration.Seconds(), plural.Count(p.CPUs, "CPU"), p.Frequency, plural.Count(p.Samples, "sample"), p.Kernel, p.User, p.Idle, p.Lost)
	}
	var out []string
	if f.Before != nil {
		out = append(out, about("before: ", f.Before), about("after: ", f.After))
	} else {
		out = append(out, about("", f.After))
	}
	if p := f.After; p.OtherNetns+p.NoNetns > 0 {
		out = append(out, fmt.Sprintf("Tasks of one namespace only; left out: %d kernel samples of others, %d of interrupts and softirqs, which belong to no task.", p.OtherNetns, p.NoNetns))
	}
	return out
}

// flameKind is a row of the legend: how much of all time was spent in functions
// of a kind themselves.
type flameKind struct {
	Name, About   string
	Before, After string
}

func (f *Flame) kinds() []flameKind {
	sums := func(p *observe.Profile) map[string]float64 {
		out := map[string]float64{}
		if p == nil {
			return out
		}
		for _, stack := range p.Stacks {
			if stack.Below(f.Root) < -1 || len(stack.Frames) == 0 {
				continue
			}
			out[workKind(stack.Frames).Name] += float64(stack.Count) / float64(max(p.Samples, 1))
		}
		return out
	}
	before, after := sums(f.Before), sums(f.After)
	var out []flameKind
	for _, k := range frameKinds {
		out = append(out, flameKind{k.Name, k.About, percent.Of(before[k.Name], 2), percent.Of(after[k.Name], 2)})
	}
	return out
}

// workKind is the kind of the innermost function that has one: a lock or a copy
// is work of whoever wants it.
func workKind(frames []observe.Frame) frameKind {
	for _, f := range frames {
		if k := kindOf(f.Function, f.Module); k != kindOther {
			return k
		}
	}
	return kindOther
}

// svg draws the boxes. Positions are shares of the width, so that it fits every
// screen without its script; the script zooms and searches.
func (f *Flame) svg(alone bool) string {
	root := f.boxes()
	diff := f.Before != nil
	var boxes strings.Builder
	depth := f.draw(&boxes, root, root, 0, 0, diff)
	height := flameHeader + depth*boxHeight + 24
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="flame%s" width="100%%" height="%d" role="img" aria-label="%s">`+"\n",
		map[bool]string{true: " diff"}[diff], height, escaped(f.Title))
	fmt.Fprintf(&b, "<style>%s</style>\n", flameStyle)
	if alone {
		fmt.Fprintf(&b, `<rect class="page" width="100%%" height="100%%"/>`+"\n"+`<text class="title" x="6" y="18">%s</text>`+"\n", escaped(f.Title))
		names := []string{"more", "less", "same"}
		if !diff {
			names = nil
			for _, k := range frameKinds {
				names = append(names, k.Name)
			}
		}
		for i, name := range names {
			fmt.Fprintf(&b, `<svg x="%g%%" y="26" width="12.5%%" height="14"><rect class="%s" x="6" width="10" height="12"/><text x="20" y="10">%s</text></svg>`+"\n",
				12.5*float64(i), name, name)
		}
	}
	b.WriteString(`<foreignObject x="0" y="0" width="100%" height="58" class="tools" style="display:none"><div xmlns="http://www.w3.org/1999/xhtml" class="bar">` +
		`<input type="search" placeholder="search (regexp)" aria-label="search"/><button type="button" class="reset">all</button></div></foreignObject>` + "\n")
	fmt.Fprintf(&b, `<text class="info" x="6" y="%d"> </text>`+"\n", flameHeader-6)
	b.WriteString(boxes.String())
	if root.width(diff) == 0 {
		fmt.Fprintf(&b, `<text x="6" y="%d">Nothing was seen below %s: was there traffic?</text>`+"\n", flameHeader+14, escaped(f.Root))
	}
	fmt.Fprintf(&b, "<script>//<![CDATA[\n%s//]]></script>\n</svg>", flameScript)
	return b.String()
}

// draw writes a box and those below it from x on, a share of the width, and
// returns how many rows there are.
func (f *Flame) draw(b *strings.Builder, root, box *flameBox, x float64, depth int, diff bool) int {
	whole := root.width(diff)
	if whole == 0 {
		return 1
	}
	width := box.width(diff) / whole
	class := kindOf(box.function, box.module).Name
	label := box.function
	about := fmt.Sprintf("%s: %s of all time, %s of %s", label, percent.Of(box.after, 2), percent.Of(box.after/max(root.after, 1e-9), 1), root.function)
	if box.module != "" {
		about = fmt.Sprintf("%s [%s]", about, box.module)
	}
	look := ""
	if diff {
		about = fmt.Sprintf("%s: %s before, %s after (%+.2f points of all time)", label, percent.Of(box.before, 2), percent.Of(box.after, 2), 100*(box.after-box.before))
		class, look = changeOf(box)
	}
	fmt.Fprintf(b, `<svg class="box" x="%s%%" y="%d" width="%s%%" height="%d" data-x="%s" data-w="%s" data-d="%d"><title>%s</title><rect class="%s"%s width="100%%" height="%d"/><text x="3" y="13">%s</text></svg>`+"\n",
		digits(100*x), flameHeader+depth*boxHeight, digits(100*width), boxHeight, digits(x), digits(width), depth, escaped(about), class, look, boxHeight-1, escaped(label))
	slices.SortStableFunc(box.callees, func(a, b *flameBox) int {
		return cmp.Or(cmp.Compare(b.width(diff), a.width(diff)), cmp.Compare(a.function, b.function))
	})
	deepest := depth + 1
	for _, c := range box.callees {
		if w := c.width(diff) / whole; w >= leastBox {
			deepest = max(deepest, f.draw(b, root, c, x, depth+1, diff))
			x += w
		}
	}
	return deepest
}

// changeOf colours a box by whether it grew: fully where it came or went, or
// doubled or more.
func changeOf(box *flameBox) (class, look string) {
	larger := max(box.before, box.after)
	if larger == 0 {
		return "same", ""
	}
	change := (box.after - box.before) / larger
	class = "more"
	if change < 0 {
		class, change = "less", -change
	}
	if change < 0.05 {
		return "same", ""
	}
	return class, fmt.Sprintf(` fill-opacity="%.2f"`, min(1, 0.15+1.7*change))
}

func digits(v float64) string {
	return strings.TrimRight(strings.TrimRight(fmt.Sprintf("%.5f", v), "0"), ".")
}

// WriteFolded writes a line a stack, outermost function first, as programs that
// draw flame graphs read them: functions joined by semicolons, then the samples.
func WriteFolded(w io.Writer, p *observe.Profile, root string) error {
	var b strings.Builder
	for _, stack := range p.Stacks {
		from := stack.Below(root)
		if from < -1 {
			continue
		}
		if root != observe.AllFunctions {
			b.WriteString(root)
			if from >= 0 {
				b.WriteByte(';')
			}
		}
		for ; from >= 0; from-- {
			b.WriteString(stack.Frames[from].Function)
			if from > 0 {
				b.WriteByte(';')
			}
		}
		fmt.Fprintf(&b, " %d\n", stack.Count)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
