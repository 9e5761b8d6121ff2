// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"natkit/internal/bench"
)

// savedFiles are results as natkit saves them, one of each kind and more.
var savedFiles = []string{"saved-udp.json", "saved-udp-later.json", "saved-rules.json", "saved-trimming.json", "saved-cps.json", "saved-subscribers.json", "saved-paper.json", "saved-demo.json", "http.json"}

func loadFile(t testing.TB, name string) *Saved {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Load(name, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestText(t *testing.T) {
	for _, name := range []string{"saved-udp.json", "saved-rules.json", "saved-trimming.json", "saved-cps.json", "saved-subscribers.json", "saved-paper.json", "saved-demo.json"} {
		var b bytes.Buffer
		if err := Text(&b, []*Saved{loadFile(t, name)}); err != nil {
			t.Fatal(err)
		}
		printed(t, strings.TrimSuffix(name, ".json")+".txt", b.Bytes())
		for line := range strings.Lines(b.String()) {
			if n := len([]rune(line)); n > 101 {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
	}
}

// A page of every kind of result, alone and together, is well-formed and needs
// nothing from elsewhere.
func TestHTML(t *testing.T) {
	var all []*Saved
	for _, name := range savedFiles {
		s := loadFile(t, name)
		all = append(all, s)
		page := checkPage(t, name, func(w io.Writer) error { return HTML(w, []*Saved{s}) })
		if !strings.Contains(page, "<svg") {
			t.Errorf("%s: no picture", name)
		}
	}
	page := checkPage(t, "all", func(w io.Writer) error { return HTML(w, all) })
	for _, want := range []string{
		"UDP through a NAT router", "The rule-count experiment of 1997", "published kB/s", "Cost of the number of rules", "A published port that collapses under load",
		"natkit bench rules -o json", "natkit demo --no-host-write --report demo.html", "not measured:", "noisy", "published elsewhere", "6.18.0", "prefers-color-scheme: dark",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
}

var inSVG = regexp.MustCompile(`(?s)<svg.*?</svg>`)

// checkPage writes a page and looks at its form.
func checkPage(t testing.TB, what string, write func(io.Writer) error) string {
	t.Helper()
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	page := b.String()
	if err := wellFormed(page); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	for _, svg := range inSVG.FindAllString(page, -1) {
		for d := xml.NewDecoder(strings.NewReader(svg)); ; {
			_, err := d.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Errorf("%s: %v in %.2000s", what, err, svg)
				break
			}
		}
		for _, absurd := range []string{"NaN", "Inf"} {
			if strings.Contains(regexp.MustCompile(`(?s)>[^<]*<|aria-label="[^"]*"`).ReplaceAllString(svg, "><"), absurd) {
				t.Errorf("%s: %s in %.2000s", what, absurd, svg)
			}
		}
		if err := insideCanvas(svg); err != nil {
			t.Errorf("%s: %v in %.2000s", what, err, svg)
		}
	}
	return page
}

var (
	canvasSize = regexp.MustCompile(`viewBox="0 0 (\S+) (\S+)"`)
	placeOf    = regexp.MustCompile(`[ML]([-+.eE\d]+) ([-+.eE\d]+)`)
	textAt     = regexp.MustCompile(`<text [^>]*x="(\S+)" y="(\S+)" font-size="(\S+)" textLength="(\S+)"`)
)

// insideCanvas says what of a picture is drawn where nobody sees it.
func insideCanvas(svg string) error {
	numbers := func(words []string) (out []float64) {
		for _, w := range words[1:] {
			v, err := strconv.ParseFloat(w, 64)
			if err != nil {
				v = math.NaN()
			}
			out = append(out, v)
		}
		return out
	}
	size := numbers(canvasSize.FindStringSubmatch(svg))
	inside := func(x, y float64) bool { return x >= 0 && x <= size[0]+0.01 && y >= 0 && y <= size[1]+0.01 }
	for _, place := range placeOf.FindAllStringSubmatch(svg, -1) {
		if at := numbers(place); !inside(at[0], at[1]) {
			return fmt.Errorf("a line to %v is outside of %v", at, size)
		}
	}
	for _, text := range textAt.FindAllStringSubmatch(svg, -1) {
		if at := numbers(text); !inside(at[0], at[1]) || !inside(at[0]+at[3], at[1]-halfCapital*at[2]) {
			return fmt.Errorf("a text at %v is outside of %v", at, size)
		}
	}
	return nil
}

// wellFormed checks that every element is closed where it must be, that none
// refers to anything elsewhere, and that the one script is the page's own.
func wellFormed(page string) error {
	void := []string{"meta", "br", "link", "img", "input", "hr"}
	var open []string
	scripts := 0
	for z := html.NewTokenizer(strings.NewReader(page)); ; {
		switch z.Next() {
		case html.ErrorToken:
			if z.Err() != io.EOF {
				return z.Err()
			}
			if len(open) > 0 {
				return fmt.Errorf("not closed: %v", open)
			}
			if scripts != 1 {
				return fmt.Errorf("%d scripts, want the page's own", scripts)
			}
			return nil
		case html.StartTagToken:
			token := z.Token()
			for _, a := range token.Attr {
				if slices.Contains([]string{"src", "href", "srcset", "action", "data", "poster", "xlink:href"}, a.Key) || strings.HasPrefix(a.Key, "on") {
					return fmt.Errorf("<%s> has %s=%q", token.Data, a.Key, a.Val)
				}
			}
			if token.Data == "script" {
				scripts++
			}
			if !slices.Contains(void, token.Data) {
				open = append(open, token.Data)
			}
		case html.EndTagToken:
			token := z.Token()
			if len(open) == 0 || open[len(open)-1] != token.Data {
				return fmt.Errorf("</%s> closes %v", token.Data, open)
			}
			open = open[:len(open)-1]
		case html.TextToken:
			if len(open) > 0 && (open[len(open)-1] == "style" || open[len(open)-1] == "script") {
				for _, outside := range []string{"url(", "@import", "http:", "https:", "fetch"} {
					if strings.Contains(string(z.Raw()), outside) {
						return fmt.Errorf("%s in %s", outside, open[len(open)-1])
					}
				}
			}
		}
	}
}

// hostile is a result as somebody would write it who wishes the reader ill.
func hostile() *bench.Result {
	const markup = `</td><script>alert(1)</script>"'<svg onload=alert(1)>` + "\x1b[2J\u202e"
	r := &bench.Result{Kind: markup, Command: markup, Notes: []string{markup}, Seconds: -1e18,
		Environment: bench.Environment{CPU: markup, Settings: map[string]string{markup: markup}},
		Routers:     []bench.RouterUse{{Name: markup, Describe: markup}, {Name: "b", Unsupported: markup}},
		Published:   []bench.Published{{Source: markup, Router: markup, Name: markup, Metric: markup, Note: markup, Value: -1e18}, {Metric: "loss_ratio", Value: 0}},
	}
	values := [][]float64{nil, {}, {0}, {0, 0}, {-1, 1}, {5e-324}, {1e18, -1e18}, {1e-300, 1e18}, {1, 2, 3}, {-5e-324}, {1e18}}
	for _, metric := range []string{markup, "_", "ndr_pps", "cost_ns", "loss_ratio", "latency_ns", "x"} {
		for i, v := range values {
			p := bench.Params{Setup: markup, Mix: markup, Direction: markup}
			switch metric {
			case "loss_ratio", "latency_ns":
				p = bench.Params{OfferedPPS: []float64{0, 5e-324, 1e18, 1, 1}[i%5]}
			case "x":
				p = bench.Params{Rules: []int{0, math.MaxInt, 1}[i%3]}
			case "cost_ns":
				p = bench.Params{Flows: i % 2}
			}
			r.Figures = append(r.Figures, bench.Figure{Router: markup + fmt.Sprint(i), Metric: metric, Params: p, Values: v, Label: markup,
				Discarded: -1, Median: math.NaN(), Min: math.Inf(1), Max: math.Inf(-1)})
		}
	}
	for i := range 200 { // more than a plot has room for
		r.Figures = append(r.Figures, bench.Figure{Router: fmt.Sprint("r", i), Metric: "many_bytes", Values: []float64{float64(i)}})
	}
	return r
}

func TestHostileResult(t *testing.T) {
	saved := []*Saved{{Name: "x\x1b[31m<script>", Result: hostile()}}
	page := checkPage(t, "hostile", func(w io.Writer) error { return HTML(w, saved) })
	if strings.Contains(page, "<script>alert") {
		t.Error("markup from a result is markup in the page")
	}
	c, err := Compare(saved[0], saved[0])
	if err != nil {
		t.Fatal(err)
	}
	checkPage(t, "hostile, compared", func(w io.Writer) error { return ComparedHTML(w, c) })
	var b bytes.Buffer
	if err := Text(&b, saved); err != nil {
		t.Fatal(err)
	}
	if err := Compared(&b, c); err != nil {
		t.Fatal(err)
	}
	if err := JSON(&b, c); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String()[:strings.Index(b.String(), "{\n")], "\x1b\u202e") {
		t.Error("a result steers the terminal")
	}
}

// Results in which nothing happened are shown, too.
func TestEmptyResults(t *testing.T) {
	for _, in := range []string{
		`{"schema": "natkit/bench/1", "kind": "udp", "figures": []}`,
		`{"schema": "natkit/bench/1", "kind": "new", "figures": [{"metric": "m", "values": []}], "published": [{"metric": "n", "published_value": 1}]}`,
		`{"schema": "natkit/demo/1", "steps": [], "restored": true}`,
		`{"schema": "natkit/demo/1", "steps": [{"name": "a", "http": {}}, {"http": {"completed": 1}}], "restored": false, "left": ["x"]}`,
		`{"schema": "natkit/bench-http/1", "requests_per_second": 0, "percentiles_ms": {}}`,
		`{"schema": "natkit/bench-http/1", "requests_per_second": 1, "completed": 5, "percentiles_ms": {}}`,
	} {
		s, err := Load("f", strings.NewReader(in))
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		checkPage(t, in, func(w io.Writer) error { return HTML(w, []*Saved{s}) })
		if err := Text(io.Discard, []*Saved{s}); err != nil {
			t.Error(err)
		}
		c, err := Compare(s, s)
		if err != nil {
			t.Fatal(err)
		}
		checkPage(t, in, func(w io.Writer) error { return ComparedHTML(w, c) })
	}
}

// Rows stand by the axis where routers have points in common, else router by
// router; published ones come last, and a ratio is to the kernel's NAT or else to the
// first router. Two points are no curve.
func TestSheetOrder(t *testing.T) {
	at := func(router string, offered, value float64) bench.Figure {
		return bench.NewFigure(router, "received_pps", bench.Params{OfferedPPS: offered}, value)
	}
	order := func(figures ...bench.Figure) string {
		sheets := sheetsOf([]string{"a", "b"}, figures, []bench.Published{{Source: "s", Router: "a", Metric: "received_pps", Params: bench.Params{OfferedPPS: 1}, Value: 9}})
		var words []string
		for i, b := range sheets[0].Blocks {
			if i > 0 {
				words = append(words, "|")
			}
			for _, r := range b.Rows {
				words = append(words, fmt.Sprintf("%s%.0f=%.0f/%s", r.Name, r.X, r.Median, ratio(r.Ratio)))
			}
		}
		return strings.Join(words, " ")
	}
	for _, c := range []struct {
		got, want string
	}{
		{order(at("b", 2, 8), at("a", 2, 4), at("b", 1, 1), at("a", 1, 2), at("a", 3, 5)), "a1=2/1.00 b1=1/0.50 a1=9/- a2=4/1.00 b2=8/2.00 a3=5/1.00"},
		{order(at("b", 5, 8), at("a", 2, 4), at("b", 3, 1), at("a", 1, 2), at("a", 4, 6)), "a1=2/1.00 a2=4/1.00 a4=6/1.00 b3=1/- b5=8/- a1=9/-"},
		{order(at("b", 2, 8), at("a", 2, 4), at("b", 1, 1), at("a", 1, 2)), "a0=4/1.00 b0=8/2.00 | a0=2/1.00 b0=1/0.50 a0=9/-"},
		{order(at("a", 1, 2), at("nft", 1, 4), at("b", 1, 1)), "a0=2/0.50 b0=1/0.25 nft0=4/1.00 a0=9/-"},
	} {
		if c.got != c.want {
			t.Errorf("got  %s\nwant %s", c.got, c.want)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	result := func(rest string) string {
		return `{"schema": "natkit/bench/1", "kind": "udp", "figures": [` + rest + `]}`
	}
	for _, c := range []struct{ in, want string }{
		{``, `empty`},
		{`{`, `line 1, column 1: it ends too early`},
		{"{\n  \"version\": 1,\n  x}", `line 3, column 3: this is not JSON`},
		{`[1]`, `not the result of a measurement`},
		{`null`, `not the result of a measurement`},
		{`{"version": 1}`, `not the result of a measurement`},
		{`{"schema": "natkit/bench/2", "kind": "udp", "figures": []}`, `it is "natkit/bench/2", this natkit reads "natkit/bench/1": use a newer natkit`},
		{`{"schema": "natkit/bench/0", "kind": "udp", "figures": []}`, `not the result of a measurement`},
		{`{"schema": 1, "kind": "udp", "figures": []}`, `not the result of a measurement`},
		{`{"schema": "natkit/doctor/1"}`, `it is "natkit/doctor/1": not the result of a measurement`},
		{`{"version": 1, "kind": "udp", "figures": []}`, `an earlier natkit saved it`},
		{result(`{"router": "a", "metric": "m", "values": ["1"]}`), `figures.values is of type string, want float64`},
		{"{\"schema\": \"natkit/bench/1\", \"kind\": \"udp\",\n \"figures\": {}}", `line 2, column 13: figures is of type object`},
		{result(`{"router": "a", "metric": "m", "values": [1e999]}`), `want float64`},
		{result(`{"router": "a", "metric": "m", "values": [1, 1e308]}`), `figures[0].values[1] is 1e+308: want a number up to 1e+18`},
		{result(`{"router": "a", "values": [1]}`), `figures[0].metric is missing`},
		{result(`{"metric": "m", "params": {"flows": -1}}`), `figures[0].params.flows is -1: want 0 to`},
		{result(``) + `{}`, `more data after the end`},
		{`{"schema": "natkit/bench/1", "kind": "udp", "figures": [], "time": "yesterday"}`, `"yesterday" is not a time`},
		{`{"schema": "natkit/demo/1", "steps": [{"http": {"requests_per_second": 1e300}}], "restored": true}`, `steps[0].http.requests_per_second is 1e+300`},
		{`{"schema": "natkit/bench-http/1", "requests_per_second": 1, "percentiles_ms": {"50": -1e300}}`, `percentiles_ms["50"] is -1e+300`},
	} {
		if _, err := Load("f.json", strings.NewReader(c.in)); err == nil || !strings.HasPrefix(err.Error(), `read "f.json": `) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s\n got %v\nwant %s", c.in, err, c.want)
		}
	}
	if _, err := Load("f.json", io.MultiReader(strings.NewReader(`{"a": "`), &endless{})); err == nil || !strings.Contains(err.Error(), "more than 64 MiB") {
		t.Errorf("a file without end: %v", err)
	}
}

type endless struct{}

func (*endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'x'
	}
	return len(b), nil
}

// Keys that a later natkit of the same version adds don't hinder.
func TestLoadNewKeys(t *testing.T) {
	s, err := Load("f", strings.NewReader(`{"schema": "natkit/bench/1", "kind": "udp", "new": {}, "figures": [{"metric": "m", "values": [1], "newer": 2}]}`))
	if err != nil || s.Result == nil || len(s.Result.Figures) != 1 {
		t.Fatal(s, err)
	}
}

func TestCompare(t *testing.T) {
	c, err := Compare(loadFile(t, "saved-udp.json"), loadFile(t, "saved-udp-later.json"))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := Compared(&b, c); err != nil {
		t.Fatal(err)
	}
	printed(t, "compared.txt", b.Bytes())
	b.Reset()
	if err := JSON(&b, c); err != nil {
		t.Fatal(err)
	}
	printed(t, "compared.json", b.Bytes())
	checkPage(t, "compared", func(w io.Writer) error { return ComparedHTML(w, c) })

	if _, err := Compare(loadFile(t, "saved-udp.json"), loadFile(t, "saved-rules.json")); err == nil || !strings.Contains(err.Error(), "kind") {
		t.Errorf("results of two kinds compared: %v", err)
	}
}

func TestVerdict(t *testing.T) {
	spread := func(values ...float64) Spread {
		f := bench.NewFigure("", "", bench.Params{}, values...)
		return Spread{N: len(values), Median: f.Median, Min: f.Min, Max: f.Max}
	}
	noisy := spread(10, 11, 12, 13)
	noisy.Label = "noisy"
	for _, c := range []struct {
		what string
		a, b Spread
		want Verdict
	}{
		{"one value twice", spread(1), spread(1), VerdictSame},
		{"single runs", spread(1), spread(2), VerdictFew},
		{"three and three", spread(1, 1.1, 1.2), spread(2, 2.1, 2.2), VerdictFew},
		{"three and four", spread(1, 1.1, 1.2), spread(2, 2.1, 2.2, 2.3), VerdictFew},
		{"three and five", spread(1, 1.1, 1.2), spread(2, 2.1, 2.2, 2.3, 2.4), VerdictOutside},
		{"four and four", spread(1, 1.1, 1.2, 1.3), spread(2, 2.1, 2.2, 2.3), VerdictOutside},
		{"downwards", spread(2, 2.1, 2.2, 2.3), spread(1, 1.1, 1.2, 1.3), VerdictOutside},
		{"ranges touch", spread(1, 1.1, 1.2, 2), spread(2, 2.1, 2.2, 2.3), VerdictInside},
		{"apart, but less than the spread", spread(1, 2, 3, 4), spread(4.1, 4.2, 4.3, 4.4), VerdictInside},
		{"noisy", spread(1, 1.1, 1.2, 1.3), noisy, VerdictLabelled},
	} {
		if got := verdict(c.a, c.b); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
}

// The rule's share of chance, against counting all ways to choose the first
// sample's places.
func TestChanceApart(t *testing.T) {
	for n := 1; n <= 5; n++ {
		for m := 1; m <= 5; m++ {
			ways, apart := 0, 0
			for set := range 1 << (n + m) {
				var places []int
				for i := range n + m {
					if set>>i&1 == 1 {
						places = append(places, i)
					}
				}
				if len(places) != n {
					continue
				}
				ways++
				if places[n-1] == n-1 || places[0] == m {
					apart++
				}
			}
			if got, want := chanceApart(n, m), float64(apart)/float64(ways); math.Abs(got-want) > 1e-9 {
				t.Errorf("%d and %d: %g, want %g", n, m, got, want)
			}
		}
	}
}

func TestQuantities(t *testing.T) {
	for _, c := range []struct {
		metric string
		value  float64
		want   string
		better string
	}{
		{"ndr_pps", 1_020_000, "1.020 Mpps", "more is better"},
		{"cost_ns", 352, "352 ns", "less is better"},
		{"latency_p99_ns", 612_345, "612.3 µs", "less is better"},
		{"connect_mean_ms", 1300, "1.300 s", "less is better"},
		{"loss_ratio", 0.005, "0.5 %", "less is better"},
		{"cpu_share", 0.87, "87 %", ""},
		{"throughput_bits_per_second", 16.3e9, "16.30 Gbit/s", "more is better"},
		{"cpu_seconds_per_gbit", 0.0321, "0.0321 CPU s/Gbit", "less is better"},
		{"new_connections_per_second", 25355, "25355 connections/s", "more is better"},
		{"session_bytes", 320, "320 B", "less is better"},
		{"lost_pps", 10, "10 pps", "less is better"},
		{"never_heard_of", 12345.678, "12346", ""},
		{"never_heard_of", 0, "0", ""},
		{"never_heard_of", 0.99999, "1", ""},
		{"memory_bytes", 1.5 * (1 << 20), "1.500 MiB", "less is better"},
	} {
		m := measureOf(c.metric)
		if got := m.unit(c.value).with(c.value); got != c.want || m.Better() != c.better {
			t.Errorf("%s %g: %q, %q; want %q, %q", c.metric, c.value, got, m.Better(), c.want, c.better)
		}
	}
	if got := measureOf("never_heard_of").Title; got != "Never heard of" {
		t.Errorf("title %q", got)
	}
}

// What a file says of its values is not believed.
func TestRebuilt(t *testing.T) {
	f := rebuilt(bench.Figure{Router: "a", Metric: "m", Values: []float64{3, 1, 2}, Median: 99, Min: 98, Max: 97, Label: "noisy", Discarded: 2})
	if f.Median != 2 || f.Min != 1 || f.Max != 3 || f.Label != "noisy" || f.Discarded != 2 {
		t.Errorf("%+v", f)
	}
}

// Whatever a file holds: it is refused, or shown in all ways without a panic.
func FuzzLoad(f *testing.F) {
	for _, name := range savedFiles {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	r := hostile()
	for i := range r.Figures {
		r.Figures[i].Median, r.Figures[i].Min, r.Figures[i].Max = 0, 0, 0 // JSON has no NaN
	}
	data, err := json.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"schema": "natkit/demo/1", "steps":[{"name":"a","http":{"completed":1}}],"restored":true}`))
	f.Add([]byte(`{"version":1,"kind":"rules","figures":[{"metric":"a_ns","params":{"rules":1},"values":[1]},{"metric":"a_ns","params":{"rules":9},"values":[9e17]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Load("f", bytes.NewReader(data))
		if err != nil {
			return
		}
		checkPage(t, "page", func(w io.Writer) error { return HTML(w, []*Saved{s}) })
		if err := Text(io.Discard, []*Saved{s}); err != nil {
			t.Fatal(err)
		}
		c, err := Compare(s, s)
		if err != nil {
			t.Fatal(err)
		}
		checkPage(t, "compared", func(w io.Writer) error { return ComparedHTML(w, c) })
		if err := JSON(io.Discard, c); err != nil {
			t.Fatal(err)
		}
	})
}

// A file that claims more figures than a result has takes little more memory than its text.
func TestLoadTooMuch(t *testing.T) {
	const most = 600 << 20
	for _, value := range []string{"{}", "1"} {
		text := `{"schema":"natkit/bench/1","figures":[` + strings.Repeat(value+",", (48<<20)/(len(value)+1)) + "0]}"
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := Load("x", strings.NewReader(text)); err == nil {
			t.Errorf("%s: it was read", value)
		}
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > most {
			t.Errorf("%s: %d MB were taken, want at most %d", value, took>>20, most>>20)
		}
	}
}

// Of two figures under the same conditions the first counts, on both sides.
func TestCompareTwice(t *testing.T) {
	result := &Saved{Name: "x", Result: &bench.Result{Kind: "udp", Figures: []bench.Figure{bench.NewFigure("nft", "ndr_pps", bench.Params{}, 1, 2), bench.NewFigure("nft", "ndr_pps", bench.Params{}, 8, 9)}}}
	c, err := Compare(result, result)
	if err != nil || len(c.Rows) != 1 || c.Rows[0].A.Median != c.Rows[0].B.Median {
		t.Errorf("%v, %+v", err, c.Rows)
	}
}
