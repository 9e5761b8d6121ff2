// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// textRouter is a router of the rules of nft(8).
type textRouter struct{ name, rules string }

func (r textRouter) Name() string     { return r.name }
func (r textRouter) Describe() string { return "a router of the test" }
func (r textRouter) NAT() bool        { return true }

func (r textRouter) Install(ctx context.Context, b *Testbed, _ RouterOptions) (func() error, error) {
	run := func(ctx context.Context, rules string) error {
		return b.Router.Do(func() error {
			cmd := exec.CommandContext(ctx, "nft", "-f", "-")
			cmd.Stdin = strings.NewReader(rules)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("nft: %w: %s", err, out)
			}
			return nil
		})
	}
	err := run(ctx, "table ip t { chain c { type nat hook postrouting priority srcnat\n"+r.rules+"\n}\n}\n")
	return func() error { return run(context.WithoutCancel(ctx), "delete table ip t") }, err
}

var (
	masquerading = textRouter{"masquerading", `oifname "eth0" masquerade`}
	// Sources have the ports from 1024 on, of which it has none to give.
	limited = textRouter{"limited", `oifname "eth0" ip protocol udp masquerade to :20000-20099`}
)

// The table has each session that was sent once, a second pass adds none, and a
// new fill begins with an empty table.
func TestFillTable(t *testing.T) {
	ktest.Root(t)
	if testing.Short() {
		ktest.Unsupported(t, "needs a machine that takes a hundred thousand frames a second (-short)")
	}
	ktest.Tool(t, "nft")
	r := &cpsRun{CPSOptions: CPSOptions{Sessions: 2000}, fills: map[*trial]fill{}}
	l, err := newDUT(t.Context(), masquerading, RouterOptions{}, r.Sessions, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	counted := func(want int) {
		t.Helper()
		sources := map[string]bool{}
		if err := l.tester.testbed.Router.Do(func() error {
			_, err := conntrack.Dump(t.Context(), conntrack.Filter{}, func(f *conntrack.Flow) error {
				sources[fmt.Sprint(f.Orig)] = true
				return nil
			})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if len(sources) != want {
			t.Errorf("%d sessions are in the table, want %d", len(sources), want)
		}
	}
	filled, err := r.fill(t.Context(), l, "udp", 0)
	if err != nil {
		t.Fatal(err)
	}
	if filled.sent.frames != 2000 || filled.received.frames != 2000 || r.fills[filled].sessions != 2000 {
		t.Errorf("%d frames sent, %d received, %d sessions; want 2000", filled.sent.frames, filled.received.frames, r.fills[filled].sessions)
	}
	if filled.sent.elapsed <= 0 || filled.sent.elapsed > time.Second {
		t.Errorf("took %v", filled.sent.elapsed)
	}
	counted(2000)
	if _, err := l.run(t.Context(), frameLoad{frames: []int{MinFrame}, flows: 2000, duration: 20 * time.Millisecond, cpus: []int{l.tester.generatorCPU}}); err != nil {
		t.Fatal(err)
	}
	counted(2000)
	r.Sessions = 500
	if _, err := r.fill(t.Context(), l, "udp", 0); err != nil {
		t.Fatal(err)
	}
	counted(500)
	// Beside others that are there already.
	r.Sessions, r.Held = 300, 1200
	filled, err = r.fill(t.Context(), l, "udp", 0)
	if err != nil {
		t.Fatal(err)
	}
	counted(1500)
	if filled.sent.frames != 300 || r.fills[filled].sessions != 300 {
		t.Errorf("%d frames sent, %d sessions; want 300 beside 1200", filled.sent.frames, r.fills[filled].sessions)
	}
}

// A TCP connection through a router with NAT is made and closed as the router's
// connection tracking expects it, segment by segment: the right checksums and
// numbers, each connection with a source of its own.
func TestTCPConnections(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	const flows = 200
	rules := masquerading
	rules.rules += "\n}\nchain f { type filter hook forward priority filter\nct state invalid counter name \"invalid\"\n}\ncounter invalid {"
	l, err := newDUT(t.Context(), rules, RouterOptions{}, flows, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	states := func() string {
		t.Helper()
		count := map[string]int{}
		if err := l.tester.testbed.Router.Do(func() error {
			_, err := conntrack.Dump(t.Context(), conntrack.Filter{}, func(f *conntrack.Flow) error {
				count[fmt.Sprint(f.State, " assured ", f.Status&conntrack.StatusAssured != 0)]++
				return nil
			})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(count)
	}
	invalid := func() string {
		t.Helper()
		var out []byte
		if err := l.tester.testbed.Router.Do(func() (err error) {
			out, err = exec.CommandContext(t.Context(), "nft", "list", "counter", "ip", "t", "invalid").CombinedOutput()
			return err
		}); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	load := frameLoad{frames: []int{MinFrame}, flows: flows, pps: 500, duration: 10 * time.Second, once: true, cpus: []int{l.tester.generatorCPU}}
	for _, c := range []struct {
		traffic traffic
		states  string
	}{{connections, "map[TIME_WAIT assured true:200]"}, {openings, "map[ESTABLISHED assured true:200]"}, {segments, "map[ESTABLISHED assured true:200]"}} {
		if c.traffic != segments {
			if err := l.emptyTable(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		load.traffic = c.traffic
		salt := l.tester.salt
		tr, err := l.tester.runLearning(t.Context(), load, c.traffic == openings)
		if err != nil {
			t.Fatal(err)
		}
		if (l.tester.salt == salt) != (c.traffic == segments) {
			t.Errorf("%s: the cookies' salt was %d and is %d", c.states, salt, l.tester.salt)
		}
		if tr.sent.frames != flows || tr.received.frames != flows || tr.received.strays != 0 {
			t.Errorf("%s: %d sent, %d completed, %d astray, lost %s", c.states, tr.sent.frames, tr.received.frames, tr.received.strays, placesOf(tr.lost))
		}
		if got := states(); got != c.states {
			t.Errorf("the table has %s, want %s", got, c.states)
		}
	}
	if got := invalid(); !strings.Contains(got, "packets 0 ") {
		t.Errorf("connection tracking found segments invalid: %s", got)
	}
	// What a router gets wrong is not taken for a connection: data of which the
	// addresses have changed, since the table forgot them.
	if err := l.emptyTable(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.tester.testbed.Router.Do(func() error {
		return exec.CommandContext(t.Context(), "nft", "flush", "chain", "ip", "t", "c").Run()
	}); err != nil {
		t.Fatal(err)
	}
	tr, err := l.tester.run(t.Context(), load)
	if err != nil {
		t.Fatal(err)
	}
	if tr.received.frames != 0 || tr.received.strays != flows || tr.lost[LostAstray] != flows || tr.lost[Unexplained] != 0 {
		t.Errorf("%d segments without translation: %d taken, %d astray, lost %s", tr.sent.frames, tr.received.frames, tr.received.strays, placesOf(tr.lost))
	}
}

// segment is a TCP segment as a packet socket has it.
func segment(t *testing.T, f []byte) string {
	t.Helper()
	if len(f) < 54 || f[23] != unix.IPPROTO_TCP {
		t.Fatalf("no TCP segment: % x", f)
	}
	end := 14 + int(binary.BigEndian.Uint16(f[16:]))
	ip, tcp := f[14:34], f[34:end]
	if ones(ip, 0) != 0xffff || ones(tcp, ones(ip[12:20], uint32(6+len(tcp)))) != 0xffff {
		t.Errorf("wrong checksum: % x", f)
	}
	return fmt.Sprintf("%#x %d", tcp[13], end-54)
}

// The segments of one connection are those of tcp.h, with right checksums and
// numbers that follow from each other.
func TestTCPSegments(t *testing.T) {
	ktest.Root(t)
	l, err := newDUT(t.Context(), stubRouter{"plain", plain}, RouterOptions{}, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	c := newCapture(t, l.tester.testbed.Router, l.tester.testbed.InsideDev)
	c.protocol = unix.IPPROTO_TCP
	load := frameLoad{frames: []int{MinFrame}, flows: 1, pps: 1000, duration: time.Second, once: true, cpus: []int{l.tester.generatorCPU}}
	for _, step := range []struct {
		traffic traffic
		want    []string // flags and payload
	}{
		{connections, []string{"0x2 0", "0x12 0", "0x10 0", "0x11 0", "0x11 0", "0x10 0"}},
		{openings, []string{"0x2 0", "0x12 0", "0x10 0"}},
		{segments, []string{"0x10 6"}},
	} {
		load.traffic = step.traffic
		if _, err := l.tester.runLearning(t.Context(), load, true); err != nil {
			t.Fatal(err)
		}
		frames := c.frames(t, len(step.want)+1)
		if len(frames) != len(step.want) {
			t.Fatalf("%d segments, want %q", len(frames), step.want)
		}
		var next [2]uint32 // what each end is to acknowledge
		for i, f := range frames {
			if got := segment(t, f); got != step.want[i] {
				t.Errorf("segment %d: %s, want %s", i, got, step.want[i])
			}
			number, acknowledged, flags := binary.BigEndian.Uint32(f[38:]), binary.BigEndian.Uint32(f[42:]), f[47]
			from := i % 2
			if next[1-from] != 0 && acknowledged != next[1-from] {
				t.Errorf("segment %d acknowledges %d, want %d", i, acknowledged, next[1-from])
			}
			if next[from] != 0 && number != next[from] {
				t.Errorf("segment %d is number %d, want %d", i, number, next[from])
			}
			next[from] = number + uint32(flags&1+flags>>1&1)
		}
	}
}

func TestCPS(t *testing.T) {
	ktest.Root(t)
	if testing.Short() {
		ktest.Unsupported(t, "needs a machine that takes a hundred thousand frames a second (-short)")
	}
	ktest.Tool(t, "nft")
	bare := &bareRouter{name: "bare"}
	res, err := CPS(t.Context(), CPSOptions{
		Protocols: []string{"udp"}, Routers: []Router{bare, masquerading, limited, &bareRouter{name: "missing", unsupported: true}},
		Sessions: fewSessions, Duration: 50 * time.Millisecond, Trials: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if res.Kind != "cps" || len(res.Routers) != 4 || res.Routers[3].Unsupported != "of the test" {
		t.Errorf("%s %+v", res.Kind, res.Routers)
	}
	for _, want := range []struct {
		router, metric string
		figures        int
	}{
		{"bare", "new_flow_cost_ns", 1}, {"bare", "establishment_cps", 0}, {"bare", "established_pps", 2}, {"bare", "capacity_sessions", 0},
		{"masquerading", "new_flow_cost_ns", 1}, {"masquerading", "establishment_cps", 1}, {"masquerading", "established_pps", 2},
		{"masquerading", "capacity_sessions", 1},
		{"limited", "capacity_sessions", 1}, {"limited", "session_bytes", 0},
	} {
		figures := figuresOf(res, want.router, want.metric)
		if len(figures) != want.figures {
			t.Errorf("%s %s: %d figures, want %d", want.router, want.metric, len(figures), want.figures)
		}
		for _, f := range figures {
			if len(f.Values) != 1 || f.Min <= 0 && f.Label == "" {
				t.Errorf("%+v", f)
			}
		}
	}
	for router, sessions := range map[string]float64{"masquerading": fewSessions, "limited": 100} {
		if f := figuresOf(res, router, "capacity_sessions"); len(f) == 1 && f[0].Median != sessions {
			t.Errorf("%s has %.0f sessions, want %.0f", router, f[0].Median, sessions)
		}
	}
	// Other programs' sessions may hide how much one takes, but not change it.
	if f := figuresOf(res, "masquerading", "session_bytes"); len(f) > 0 && (f[0].Min < 256 || f[0].Max > 2048) {
		t.Errorf("a session takes %v bytes", f[0].Values)
	}
	notes := strings.Join(res.Notes, "\n")
	if !strings.Contains(notes, "offered to limited, 100 were in its table: 9900 are missing. Packets were lost: connection tracking table 9900.") ||
		strings.Contains(notes, "offered to masquerading") || !strings.Contains(notes, "300 s without a packet") {
		t.Errorf("notes:\n%s", notes)
	}
}

// A search that is interrupted ends at once, and leaves no testbed behind.
func TestCPSInterrupted(t *testing.T) {
	ktest.Root(t)
	if cpus, err := allowedCPUs(); err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var interrupted time.Time
	bare := &bareRouter{name: "bare"}
	res, err := CPS(ctx, CPSOptions{
		Routers: []Router{bare}, Protocols: []string{"udp"}, Sessions: fewSessions, Duration: time.Second, Trials: 1, Goals: []SearchGoal{GoalNDR},
		About: About{Progress: func(format string, args ...any) {
			if interrupted.IsZero() && strings.Contains(fmt.Sprintf(format, args...), "bare: 10000 new udp sessions, search for NDR: ") {
				interrupted = time.Now()
				cancel()
			}
		}}})
	if errors.Is(err, errThreadsHidden) {
		ktest.Missing(t, "%v", err)
	}
	if res != nil || !errors.Is(err, context.Canceled) || interrupted.IsZero() || time.Since(interrupted) > 20*time.Second {
		t.Errorf("interrupted at %v, at %v: %v", interrupted, time.Now(), err)
	}
	if h, err := netns.Open(bare.testbed); err == nil {
		h.Close()
		t.Errorf("the testbed's namespace %s is left", bare.testbed)
	}
}

func TestCPSRefuses(t *testing.T) {
	good := CPSOptions{Routers: []Router{&bareRouter{name: "bare"}}, Protocols: []string{"udp"}, Sessions: 1000, Duration: time.Second, Trials: 1}
	for what, change := range map[string]func(*CPSOptions){
		"no router":          func(o *CPSOptions) { o.Routers = nil },
		"no session":         func(o *CPSOptions) { o.Sessions = 0 },
		"too many sessions":  func(o *CPSOptions) { o.Sessions = MaxFlows + 1 },
		"too many rules":     func(o *CPSOptions) { o.Rules = []int{0, MaxRules + 1} },
		"too many held":      func(o *CPSOptions) { o.Held = MaxFlows },
		"held with TCP":      func(o *CPSOptions) { o.Held, o.Protocols = 1, []string{"udp", "tcp"} },
		"no trial":           func(o *CPSOptions) { o.Trials = 0 },
		"no time":            func(o *CPSOptions) { o.Duration = 0 },
		"few for the search": func(o *CPSOptions) { o.Goals = []SearchGoal{GoalNDR} },
	} {
		o := good
		change(&o)
		if _, err := CPS(t.Context(), o); !errors.As(err, new(*OptionError)) {
			t.Errorf("%s: %v", what, err)
		}
	}

	ktest.Root(t)
	ktest.Tool(t, "nft")
	limits, err := conntrack.ReadLimits()
	if err != nil {
		t.Fatal(err)
	}
	if limits.Max == 0 || limits.Max >= uint64(MaxFlows) {
		ktest.Unsupported(t, "nf_conntrack_max is %d: no number of sessions is beyond it", limits.Max)
	}
	o := good
	o.Routers, o.Sessions = []Router{masquerading}, MaxFlows
	if _, err := CPS(t.Context(), o); !errors.As(err, new(*OptionError)) || !strings.Contains(err.Error(), "nf_conntrack_max") {
		t.Errorf("%d sessions: %v", o.Sessions, err)
	}
}

func TestObjectsPerSession(t *testing.T) {
	const head = "slabinfo - version: 2.1\n# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit> <batchcount> <sharedfactor> : slabdata <active_slabs> <num_slabs> <sharedavail>\n"
	before := parseSlabs(head + `nf_conntrack         352    352    256   16    1 : tunables    0    0    0 : slabdata     22     22      0
kmalloc-128        19143  35936    128   32    1 : tunables    0    0    0 : slabdata   1123   1123      0
kmalloc-64          5248   5248     64   64    1 : tunables    0    0    0 : slabdata     82     82      0
`)
	after := parseSlabs(head + `nf_conntrack       20396  20400    256   16    1 : tunables    0    0    0 : slabdata   1275   1275      0
kmalloc-128        38950  38952    128   32    1 : tunables    0    0    0 : slabdata   1217   1217      0
kmalloc-64          8000   8000     64   64    1 : tunables    0    0    0 : slabdata    125    125      0
nf_new             40000  40000    300   13    1 : tunables    0    0    0 : slabdata   3077   3077      0
`)
	fill := growthPerSession(before, after, 20_000)
	if got := growthPerSession(before, after, 0); len(got) != 0 {
		t.Errorf("without sessions %v", got)
	}
	disturbed := func(name string, objects float64) map[string]growth {
		g := maps.Clone(fill)
		g[name] = growth{objects, 128}
		return g
	}
	const session = "1 of kmalloc-128 (128 bytes), 1 of nf_conntrack (256 bytes), 2 of nf_new (315 bytes)"
	for _, tt := range []struct {
		name   string
		trials []map[string]growth
		want   string
	}{
		{"quiet", []map[string]growth{fill}, session},
		{"one disturbed trial", []map[string]growth{disturbed("kmalloc-128", 0.1), fill, disturbed("dentry", 1)}, session},
		{"an extension hidden", []map[string]growth{disturbed("kmalloc-128", 0.4), disturbed("kmalloc-128", 0.6), fill}, "kmalloc-128 grew by 0.60 objects a session"},
		{"memory given back", []map[string]growth{disturbed("dentry", -1)}, "dentry grew by -1.00 objects a session"},
		{"others' sessions", []map[string]growth{disturbed(entryCache, 2)}, "nf_conntrack grew by 2.00 objects a session"},
		{"no session", []map[string]growth{{}}, "nf_conntrack grew by 0.00 objects a session"},
	} {
		took, err := objectsPerSession(tt.trials)
		got := objectNames(took)
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
