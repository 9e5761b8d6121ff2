// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gdamore/tcell/v2"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/golden"
	"natkit/internal/ui/live"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// busy is a moment with something in every panel.
func busy() *live.Moment {
	at := time.Date(2026, 11, 21, 12, 0, 5, 0, time.Local)
	rate, full := 120.4, 4000.0
	m := &live.Moment{
		At: at, Seconds: 1,
		Host:  snapshot.Host{Hostname: "gw", Kernel: "6.18.0"},
		Netns: snapshot.Netns{Name: "blue", Inode: 4026532322},
		Table: &live.Fill{Entries: 220000, Max: 262144, PerSecond: &rate, FullIn: &full},
		Flows: &live.Flows{NewPerSecond: 1884.2, EndedPerSecond: 12.25, LostEvents: 3},
		Drops: &snapshot.Drops{LostEvents: 2, Rows: []snapshot.Drop{
			{Count: 17, Location: "nf_hook_slow+0xa6", Reason: "NETFILTER_DROP", Cause: snapshot.CauseTableFull, Interface: "eth0"},
			{Count: 4, Location: "ip_forward+0x10", Reason: "NOT_SPECIFIED"},
			{Count: 99, Benign: true},
		}},
		CPUs: []snapshot.CPU{{Number: 0, Busy: 0.95, Softirq: 0.92, Packets: 812345}, {Number: 1, Busy: 0.25, Softirq: 0.05, Packets: 12}},
		Judged: &live.Judged{
			At: at.Add(-4 * time.Second), WindowSeconds: 10, TableAt: at.Add(-4 * time.Second),
			Table: &snapshot.Table{
				Entries: 220000, DumpSeconds: 0.31,
				ByState: map[string]uint64{"ESTABLISHED": 200000, "TIME_WAIT": 5000}, ByProtocol: map[string]uint64{"tcp": 205000, "udp": 15000},
				ByStatus: map[string]uint64{"SNAT": 219000},
				Sources:  []snapshot.Talker{{Addr: addr("10.0.0.9"), Entries: 150000}, {Addr: addr("2001:db8:1234:5678:9abc:def0:1234:5678"), Entries: 70000, Unreplied: 69999}},
			},
			SNATPorts: []live.PortUse{{SNATUse: snapshot.SNATUse{Protocol: "tcp", Outside: addr("198.51.100.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.200:443")), Used: 60000, MinPort: 1024, MaxPort: 65535}, Ports: 64512}},
			Findings: []causes.Finding{
				{Code: "conntrack-table-full", Severity: causes.Critical, Title: "the table is full: 17 new flows were dropped in 10 s", Why: "New connections fail.",
					Evidence: []causes.Evidence{{What: "entries", Value: "262144 of 262144", Source: "/proc/sys"}}, Remedy: []string{"sysctl -w net.netfilter.nf_conntrack_max=524288"}},
				{Code: "br-netfilter-overhead", Severity: causes.Advice, Title: "frames of bridges walk through the IP hooks"},
			},
			TopFlows: []live.FlowRate{
				{Protocol: "tcp", Source: snapshot.EndpointOf(netip.MustParseAddrPort("10.0.0.9:40000")), Destination: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.200:443")), BytesPerSecond: 1.25e6, PacketsPerSecond: 900},
				{Protocol: "udp", Source: snapshot.EndpointOf(netip.MustParseAddrPort("10.0.0.7:5353")), Destination: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:53")), BytesPerSecond: 90000, PacketsPerSecond: 1200, Engine: true},
			},
			Unseen: []snapshot.Capability{{Name: "kernel-log", Reason: "not permitted"}},
		},
	}
	m.Judged.Table.Destinations = m.Judged.Table.Sources[:1]
	return m
}

// screen draws a state on a terminal of that size and returns its lines.
func screen(t *testing.T, s *state, w, h int, charset string) string {
	t.Helper()
	sim := tcell.NewSimulationScreen(charset)
	if err := sim.Init(); err != nil {
		t.Fatal(err)
	}
	defer sim.Fini()
	sim.SetSize(w, h)
	(&runner{screen: sim}).show(s)
	cells, w, h := sim.GetContents()
	var b strings.Builder
	for y := range h {
		var line strings.Builder
		for x := range w {
			line.WriteString(string(cells[y*w+x].Runes))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String()
}

func TestScreens(t *testing.T) {
	keys := func(s *state, keys string) {
		for _, r := range keys {
			switch r {
			case '\t':
				s.key(tcell.KeyTab, 0)
			case '\n':
				s.key(tcell.KeyEnter, 0)
			default:
				s.key(tcell.KeyRune, r)
			}
		}
	}
	for _, c := range []struct {
		name string
		keys string
		w, h int
	}{
		{"80x24", "", 80, 24},
		{"160x50", "", 160, 50},
		{"50x20", "\t\t\t\t\t\t", 50, 20},
		{"findings", "f", 80, 24},
		{"ports", "\t\t\t\t\n", 80, 24},
		{"sorted", "\tss", 80, 24},
		{"flows", "\t\t\t\n", 80, 24},
		{"flows by packets", "\t\t\t\nP", 80, 24},
		{"filtered", "/2001\n", 80, 24},
		{"help", "h", 80, 24},
		{"tiny", "", 30, 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newState()
			s.add(busy())
			keys(s, c.keys)
			screenIs(t, c.name, screen(t, s, c.w, c.h, "UTF-8"))
		})
	}
	t.Run("nothing known", func(t *testing.T) {
		s := newState()
		screenIs(t, "first", screen(t, s, 80, 24, "UTF-8"))
		s.add(&live.Moment{At: busy().At, Unseen: []string{"dropped packets: not permitted"}, Judged: &live.Judged{At: busy().At,
			Unseen: []snapshot.Capability{{Name: snapshot.CanConntrackDump, Reason: "not requested"}}}})
		screenIs(t, "blind", screen(t, s, 80, 24, "UTF-8"))
	})
	t.Run("namespaces", func(t *testing.T) {
		s := newState()
		s.add(busy())
		s.choice = &choice{list: []live.Namespace{{}, {Ref: "blue"}, {Ref: "pid:4321", About: "docker web1"}}, at: 1}
		screenIs(t, "namespaces", screen(t, s, 80, 24, "UTF-8"))
	})
	t.Run("text", func(t *testing.T) { screenIs(t, "text", Text(busy(), 80, false)) })
	t.Run("ascii", func(t *testing.T) {
		for _, r := range Text(busy(), 80, true) {
			if r > '~' {
				t.Fatalf("%q in ASCII", r)
			}
		}
	})
}

// The capital letter of a column's name sorts by it; of one that is not shown it does nothing, and
// once more it is as it was.
func TestSortKeys(t *testing.T) {
	s := newState()
	s.add(busy())
	s.focus = panelFlows
	first := func() string {
		p := s.panel(s.focus, s.zoomed, 80)
		p.arrange(s.sort[s.focus], "")
		return p.rows[0].cells[0]
	}
	for _, c := range []struct {
		key  rune
		zoom bool
		want string
	}{{'P', false, "tcp"}, {'P', true, "udp"}, {'P', true, "tcp"}, {'P', true, "udp"}, {'B', true, "tcp"}, {'Z', true, "tcp"}} {
		s.zoomed = c.zoom
		if s.key(tcell.KeyRune, c.key); !strings.HasPrefix(first(), c.want) {
			t.Errorf("%c: %s, want %s", c.key, first(), c.want)
		}
	}
	s.zoomed = true
	for n := range panels {
		p := s.panel(n, true, 80)
		if p.text {
			continue
		}
		for i, key := range p.keys() {
			if key == 0 {
				t.Errorf("%s: no key for %s", p.title, p.columns[i].name)
			}
		}
	}
}

// Without accounting the panel says how to switch it on.
func TestNoAccounting(t *testing.T) {
	s := newState()
	m := busy()
	m.Judged.TopFlows, m.Judged.FlowsNote = nil, live.NoAccounting
	s.add(m)
	s.focus, s.zoomed = panelFlows, true
	if got := screen(t, s, 120, 24, "UTF-8"); !strings.Contains(got, "sysctl -w net.netfilter.nf_conntrack_acct=1") {
		t.Error(got)
	}
}

// Whatever is known, all sizes can be drawn, and a terminal without Unicode gets
// none.
func TestAllSizes(t *testing.T) {
	s := newState()
	s.add(busy())
	for focus := range panels {
		for _, zoomed := range []bool{false, true} {
			s.focus, s.zoomed = focus, zoomed
			for w := 1; w < 200; w += 29 {
				for h := 1; h < 60; h += 9 {
					for _, r := range screen(t, s, w, h, "US-ASCII") {
						if r > '~' {
							t.Fatalf("%c on a terminal without Unicode", r)
						}
					}
				}
			}
		}
	}
}

func screenIs(t *testing.T, name, screen string) {
	t.Helper()
	golden.Check(t, filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".txt"), []byte(screen))
}

// While paused the screen stays; what was dropped is out of sight in time.
func TestPause(t *testing.T) {
	s := newState()
	first, second := busy(), busy()
	second.At = second.At.Add(dropsOver)
	second.Drops = &snapshot.Drops{}
	s.add(first)
	s.key(tcell.KeyRune, 'p')
	s.add(second)
	if s.shown != first {
		t.Error("the screen went on while paused")
	}
	s.key(tcell.KeyRune, 'p')
	if s.shown != second || len(s.drops) != 1 {
		t.Errorf("after the pause: %d intervals with drops", len(s.drops))
	}
}

// terminal is a simulated one that knows whether it was given back.
type terminal struct {
	tcell.SimulationScreen
	finished atomic.Bool
}

func (t *terminal) Fini() {
	t.finished.Store(true)
	t.SimulationScreen.Fini()
}

// run starts the screen on a simulated terminal.
func run(t *testing.T, o Options) (sim *terminal, result chan error) {
	t.Helper()
	sim = &terminal{SimulationScreen: tcell.NewSimulationScreen("UTF-8")}
	if err := sim.Init(); err != nil {
		t.Fatal(err)
	}
	result = make(chan error, 1)
	go func() { result <- Run(t.Context(), sim, o) }()
	return sim, result
}

func await(t *testing.T, result chan error) error {
	t.Helper()
	select {
	case err := <-result:
		return err
	case <-time.After(10 * time.Second):
		t.Fatal("the screen does not end")
		return nil
	}
}

// A namespace that can't be watched: the one before is shown again, and the
// screen ends by its key.
func TestNamespaces(t *testing.T) {
	watched := make(chan string, 10)
	o := Options{
		Netns: "blue",
		Watch: func(ctx context.Context, netns string, fn func(*live.Moment) error) error {
			watched <- netns
			if netns == "gone" {
				return errors.New("open namespace: it has gone")
			}
			for {
				if err := fn(busy()); err != nil {
					return err
				}
			}
		},
		Namespaces: func() ([]live.Namespace, error) {
			return []live.Namespace{{}, {Ref: "blue"}, {Ref: "gone", About: "docker web1"}}, nil
		},
	}
	sim, result := run(t, o)
	want := func(name string) {
		t.Helper()
		select {
		case got := <-watched:
			if got != name {
				t.Fatalf("%q is watched, want %q", got, name)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%q is not watched", name)
		}
	}
	want("blue")
	sim.InjectKey(tcell.KeyRune, 'n', 0)
	sim.InjectKey(tcell.KeyDown, 0, 0)
	sim.InjectKey(tcell.KeyEnter, 0, 0)
	want("gone")
	want("blue")
	sim.InjectKey(tcell.KeyRune, 'q', 0)
	if err := await(t, result); err != nil {
		t.Error(err)
	}
}

// The terminal is given back when what watches fails, even by a panic.
func TestFailures(t *testing.T) {
	for name, c := range map[string]struct {
		watch func() error
		want  string
	}{
		"error": {func() error { return errors.New("broken") }, "broken"},
		"panic": {func() error { panic("index out of range") }, "index out of range"},
	} {
		t.Run(name, func(t *testing.T) {
			sim, result := run(t, Options{Watch: func(context.Context, string, func(*live.Moment) error) error { return c.watch() }})
			if err := await(t, result); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if !sim.finished.Load() {
				t.Error("the terminal was not given back")
			}
		})
	}
}

func TestDumbTerminal(t *testing.T) {
	for _, name := range []string{"", "dumb", "nonsense"} {
		t.Setenv("TERM", name)
		if _, err := Open(); !errors.Is(err, ErrTerminal) {
			t.Errorf("TERM=%q: %v", name, err)
		}
	}
}

// Each line of a cure, pasted into a shell, is a remark or does what the whole does.
func TestCuresCanBePasted(t *testing.T) {
	for _, c := range []struct {
		line string
		want []string
	}{
		{"# a remark that is longer than the panel", []string{"# a remark that is", "# longer than the", "# panel"}},
		{"#   a command for another host", []string{"# a command for", "# another host"}},
		{"sysctl -w a=1", []string{"sysctl -w a=1"}},
		{"ip route add unreachable 10.0.0.1", []string{"ip route add \\", "unreachable \\", "10.0.0.1"}},
		{"nft 'add chain ip a b { type x; }'", []string{"nft 'add chain ip a b { type x; }'"}},
	} {
		if got := pasteable(c.line, 20); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.line, got, c.want)
		}
	}
}

func TestChangeHasNoNegativeZero(t *testing.T) {
	for rate, want := range map[float64]string{-0.4: "0", 0.4: "0", 0: "0", -0.6: "-1", 12.4: "+12"} {
		if got := change(rate); got != want {
			t.Errorf("%g: %q, want %q", rate, got, want)
		}
	}
}

// As text nothing is left out: neither rows, nor words of a finding, nor where there is no terminal the ends of
// cells.
func TestTextIsWhole(t *testing.T) {
	m := busy()
	m.CPUs = nil
	for i := range 96 {
		m.CPUs = append(m.CPUs, snapshot.CPU{Number: i})
	}
	far := snapshot.EndpointOf(netip.MustParseAddrPort("[2001:db8:1234:5678:9abc:def0:1234:5678]:65535"))
	m.Judged.TopFlows = []live.FlowRate{{Protocol: "tcp", Source: far, Destination: far, BytesPerSecond: 1, PacketsPerSecond: 1}}
	m.Unseen = []string{"dropped packets: natkit needs root for that, or the capabilities", "new and ended flows: they are off"}
	for width, want := range map[int][]string{0: {"tcp " + far.String() + "→" + far.String() + " "}, 80: {}, 50: {}} {
		text := Text(m, width, false)
		for _, part := range append(want, "\n95 ", "new and ended flows: they are off", "17 new flows were dropped in 10 s", "bridges walk through the IP") {
			if !strings.Contains(text, part) && !strings.Contains(strings.Join(strings.Fields(text), " "), part) {
				t.Errorf("%d columns: no %q in\n%s", width, part, text)
			}
		}
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(line) - 1; width > 0 && n > width {
				t.Errorf("%d columns, not %d: %s", n, width, line)
			}
		}
	}
}

// What happens while the screen is paused counts, once: neither a pause without a moment in it nor one with
// several changes a sum.
func TestPauseCounts(t *testing.T) {
	packets := func(s *state) (sum float64) {
		for _, r := range s.dropRows().rows {
			sum += r.nums[1]
		}
		return sum
	}
	// The moments after which the key is pressed, how often: no moment in the pause, or two.
	for name, presses := range map[string]map[int]int{"no moment": {1: 2}, "two moments": {2: 1, 4: 1}} {
		s, straight := newState(), newState()
		for i := range 6 {
			m := busy()
			m.At = m.At.Add(time.Duration(i) * time.Second)
			straight.add(m)
			s.add(m)
			for range presses[i] {
				s.key(tcell.KeyRune, 'p')
			}
		}
		if got, want := packets(s), packets(straight); got != want || len(s.levels) != len(straight.levels) || s.dropSeconds() != straight.dropSeconds() {
			t.Errorf("%s: %v packets in %v s, %d levels; without a pause %v in %v s, %d", name, got, s.dropSeconds(), len(s.levels), want, straight.dropSeconds(), len(straight.levels))
		}
	}
}
