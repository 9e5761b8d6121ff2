// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// simulated is a machine with a load that changes, a monitor's judgement of it, and a clock.
type simulated struct {
	t        *testing.T
	f        *findings
	tuner    *tuner
	now      time.Time
	settings map[string]uint64
	memory   uint64
	free     uint64
	owner    string // of the limit
	// demand is how many entries there would be at a time, refuse what is lost in a window besides.
	demand func(time.Duration) float64
	refuse func(s *simulated, since time.Duration) uint64

	changes []history.Tuning // all that happened
	times   []time.Time      // of changes
	steps   map[string]*step // that stand, by ID
	fail    error
	locked  int // how many times taking back finds the journal in use
}

const (
	limitSetting   = "net.netfilter.nf_conntrack_max"
	bucketsSetting = "net.netfilter.nf_conntrack_buckets"
)

func simulate(t *testing.T, mode Tuning, demand func(time.Duration) float64) *simulated {
	return &simulated{t: t, f: newFindings(), tuner: newTuner(mode, 10*time.Second), now: noon, memory: 4 << 30, free: 2 << 30, demand: demand,
		settings: map[string]uint64{limitSetting: 65536, bucketsSetting: 65536}, steps: map[string]*step{}}
}

// window is one interval.
func (m *simulated) window() {
	const interval = 10 * time.Second
	m.now = m.now.Add(interval)
	since := m.now.Sub(noon)
	limit := m.settings[limitSetting]
	want := m.demand(since)
	s := &snapshot.Snapshot{TakenAt: m.now, WindowSeconds: 10, Netns: snapshot.Netns{Init: true, Inode: 1}, Host: snapshot.Host{MemoryBytes: m.memory, AvailableBytes: m.free, CPUs: 2},
		Conntrack: &snapshot.Conntrack{Count: min(uint64(want), limit), Max: limit, Buckets: m.settings[bucketsSetting], ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8, Stats: map[string]uint64{}},
		Sysctls:   map[string]string{limitSetting: strconv.FormatUint(limit, 10)}}
	s.Conntrack.CountStart = s.Conntrack.Count
	for _, can := range []string{snapshot.CanConntrack, snapshot.CanConntrackStats, snapshot.CanSysctls} {
		s.Capabilities = append(s.Capabilities, snapshot.Capability{Name: can, OK: true})
	}
	if want > float64(limit) { // of those that find no room a hundredth tries again each second
		s.Conntrack.Stats["drop"] = uint64((want - float64(limit)) / 10)
	}
	if m.refuse != nil {
		s.Conntrack.Stats["drop"] += m.refuse(m, since)
	}
	if m.owner != "" {
		s.Owners = []snapshot.Owner{{Who: m.owner, Where: "its file", Setting: limitSetting, Value: "1"}}
	}
	shown := flat(causes.JudgeAgain(s, m.f.named(1)))
	m.f.window(s.Netns, m.now, shown)
	act, said := m.tuner.window(s, shown, m.f.asking(1), m.now)
	m.changes = append(m.changes, said...)
	m.perform(act)
	if act == nil {
		act, said = m.tuner.due(m.now)
		m.changes = append(m.changes, said...)
		m.perform(act)
	}
}

func (m *simulated) perform(act *action) {
	switch {
	case act == nil:
	case act.change != nil && m.fail != nil:
		m.changes = append(m.changes, m.tuner.changed(act.change, nil, m.fail, m.now)...)
	case act.change != nil:
		id := fmt.Sprint(len(m.times))
		for _, c := range act.change.plan.Changes {
			old, _ := strconv.ParseUint(c.Old, 10, 64)
			value, err := strconv.ParseUint(c.New, 10, 64)
			if err != nil || old != m.settings[c.Setting] || value > 2*old || value <= old {
				m.t.Errorf("%v: %+v of %d", m.now.Sub(noon), c, m.settings[c.Setting])
			}
			m.settings[c.Setting] = value
		}
		if len(m.times) > 0 && m.now.Sub(m.times[len(m.times)-1]) < 10*time.Minute {
			m.t.Errorf("%v: a change %v after the last one", m.now.Sub(noon), m.now.Sub(m.times[len(m.times)-1]))
		}
		m.times, m.steps[id] = append(m.times, m.now), act.change
		if table := 384*m.settings[limitSetting] + 8*m.settings[bucketsSetting]; table > m.memory/4 {
			m.t.Errorf("the table may take %d of %d", table, m.memory)
		}
		m.changes = append(m.changes, m.tuner.changed(act.change, &tune.Record{ID: id, Changes: act.change.plan.Changes}, nil, m.now)...)
	case m.locked > 0:
		m.locked--
		m.changes = append(m.changes, m.tuner.tookBack(act.why, fmt.Errorf("journal x: %w", journal.ErrLocked), m.now)...)
	default:
		for _, c := range m.steps[act.takeBack].plan.Changes {
			old, _ := strconv.ParseUint(c.Old, 10, 64)
			m.settings[c.Setting] = old
		}
		if late := m.now.Sub(m.times[len(m.times)-1]); late > time.Minute {
			m.t.Errorf("taken back after %v", late)
		}
		m.changes = append(m.changes, m.tuner.tookBack(act.why, nil, m.now)...)
	}
}

func (m *simulated) run(d time.Duration) *simulated {
	for end := m.now.Add(d); m.now.Before(end); {
		m.window()
	}
	for _, c := range m.changes {
		if c.Why == "" || c.Code == "" || c.Setting == "" || c.Namespace != "host" {
			m.t.Errorf("not justified: %+v", c)
		}
	}
	return m
}

// kinds are what happened to the limit.
func (m *simulated) kinds() (out []string) {
	for _, c := range m.changes {
		if c.Setting == limitSetting {
			out = append(out, c.Kind+" "+c.New)
		}
	}
	return out
}

// A load that grows: the table follows it by doubling, ten minutes apart, and stays when the load falls.
func TestTunerFollows(t *testing.T) {
	m := simulate(t, TuneApply, func(d time.Duration) float64 {
		switch {
		case d < 30*time.Minute:
			return 20000
		case d < 2*time.Hour:
			return 400000
		}
		return 5000
	}).run(6 * time.Hour)
	want := "applied 131072, kept 131072, applied 262144, kept 262144, applied 524288, kept 524288"
	if got := strings.Join(m.kinds(), ", "); got != want || m.settings[bucketsSetting] != 524288 {
		t.Errorf("%s, %d buckets; want %s", got, m.settings[bucketsSetting], want)
	}
	if took := m.times[len(m.times)-1].Sub(m.times[0]); took > 25*time.Minute {
		t.Errorf("steps that help take %v", took)
	}
}

// A change that makes nothing better stays, but the next step is an hour away, and then two: what is lost is lost for
// another reason, or the setting is so far off that doubling it is not the way.
func TestTunerWithoutEffect(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 1e8 }).run(50 * time.Minute)
	if got := strings.Join(m.kinds(), ", "); got != "applied 131072, kept 131072" || !strings.Contains(m.changes[len(m.changes)-1].Why, "not enlarged again before ") {
		t.Errorf("%s: %+v", got, m.changes)
	}
	m.run(3 * time.Hour)
	if len(m.times) != 3 || m.times[2].Sub(m.times[1]) < 2*time.Hour {
		t.Errorf("steps at %v", m.times)
	}
}

// Twelve hours of load that goes up and down with noise, around every limit: nothing is ever made
// smaller except by being taken back, and each doubling happens once.
func TestTunerDoesNotOscillate(t *testing.T) {
	for _, period := range []time.Duration{time.Minute, 7 * time.Minute, 25 * time.Minute, 3 * time.Hour} {
		m := simulate(t, TuneApply, func(d time.Duration) float64 {
			wave := math.Sin(2 * math.Pi * d.Seconds() / period.Seconds())
			return 120000 + 100000*wave + 3000*math.Sin(d.Seconds()*1.7)
		}).run(12 * time.Hour)
		applied := map[string]int{}
		for _, c := range m.changes {
			if c.Kind == history.Applied {
				applied[c.Setting+" "+c.New]++
			}
		}
		for what, n := range applied {
			// What was taken back may be tried again, an hour later and then two.
			if n > 4 {
				t.Errorf("period %v: %s applied %d times: %v", period, what, n, m.kinds())
			}
		}
		if m.settings[limitSetting] != 262144 {
			t.Errorf("period %v: the limit ends at %d: %v", period, m.settings[limitSetting], m.kinds())
		}
	}
}

// A change that makes it worse is taken back within a minute, and left alone for longer each time.
func TestTunerTakesBack(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 140000 })
	m.refuse = func(m *simulated, _ time.Duration) uint64 {
		if m.settings[limitSetting] > 65536 {
			return 50000
		}
		return 0
	}
	m.run(8 * time.Hour)
	if m.settings[limitSetting] != 65536 {
		t.Errorf("the limit is %d", m.settings[limitSetting])
	}
	// At once, after one hour, after two more, after four more.
	if len(m.times) != 4 || m.times[2].Sub(m.times[1]) < 2*time.Hour {
		t.Errorf("changes at %v", m.times)
	}
	for _, c := range m.changes {
		if c.Kind == history.TakenBack && (c.Setting == limitSetting && (c.Old != "131072" || c.New != "65536") || !strings.Contains(c.Why, "lost after it: ")) {
			t.Errorf("%+v", c)
		}
	}
}

// While somebody else has the journal, nothing can be taken back: it is tried again, and nothing else is changed.
func TestTunerTakesBackLater(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 140000 })
	m.locked = 3
	m.refuse = func(m *simulated, _ time.Duration) uint64 {
		if m.settings[limitSetting] > 65536 {
			return 50000
		}
		return 0
	}
	m.run(30 * time.Minute)
	if got, want := strings.Join(m.kinds(), ", "), "applied 131072, failed 131072, taken back 65536"; got != want || m.settings[limitSetting] != 65536 {
		t.Errorf("%q, want %q; the limit is %d", got, want, m.settings[limitSetting])
	}
}

// A load that grows tenfold just after a change looks as if the change had done harm. That as much is lost without it
// shows that it had not: it is tried again after ten minutes, not after an hour.
func TestTunerGrowingLoad(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 66000 })
	for len(m.times) == 0 {
		m.window()
	}
	grown := m.now.Sub(noon)
	m.demand = func(d time.Duration) float64 { return 200000 }
	m.run(40 * time.Minute)
	want := "applied 131072, taken back 65536, not the cause 131072, applied 131072, kept 131072, applied 262144, kept 262144"
	if got := strings.Join(m.kinds(), ", "); got != want {
		t.Errorf("%s\nwant %s (the load grew after %v)", got, want, grown)
	}
}

// A load that grows after each change, and falls: the change is tried once more after ten minutes, then not for two hours.
func TestTunerLoadGrowsEachTime(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 140000 })
	m.refuse = func(m *simulated, _ time.Duration) uint64 {
		if len(m.times) > 0 && m.now.Sub(m.times[len(m.times)-1]) < 5*time.Minute {
			return 50000
		}
		return 0
	}
	m.run(2 * time.Hour)
	want := "applied 131072, taken back 65536, not the cause 131072, applied 131072, taken back 65536"
	if got := strings.Join(m.kinds(), ", "); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	for _, c := range m.changes {
		if c.ID == "" {
			t.Errorf("of which change? %+v", c)
		}
	}
}

// Losses come in bursts. A change that has nothing to do with them is not taken back for one, whatever the windows before
// happened to lose; a change that multiplies them is.
func TestTunerBursts(t *testing.T) {
	const runs = 300
	for _, test := range []struct {
		about         string
		spread, times float64 // of the losses of windows, and by what the change multiplies them
		least, most   int     // of the runs in which it is taken back
	}{
		{"even losses", 0.1, 1, 0, 0},
		{"bursts", 0.5, 1, 0, 3},
		{"large bursts", 1, 1, 0, 9},
		{"larger bursts", 1.5, 1, 0, 12},
		{"harm", 0.1, 3, runs, runs},
		{"harm with bursts", 0.3, 5, runs * 97 / 100, runs},
	} {
		taken := 0
		for seed := range uint64(runs) {
			r := rand.New(rand.NewPCG(seed, 1))
			const demand = 140000 // more than the first step gives
			m := simulate(t, TuneApply, func(time.Duration) float64 { return demand })
			m.refuse = func(m *simulated, _ time.Duration) uint64 {
				lost := 50000 * math.Exp(test.spread*r.NormFloat64())
				if m.settings[limitSetting] > 65536 {
					lost *= test.times
				}
				return uint64(max(0, lost-float64(demand-m.settings[limitSetting])/10)) // as many with the change as without
			}
			m.run(5 * time.Minute)
			if len(m.times) != 1 {
				t.Fatalf("%s: changes at %v", test.about, m.times)
			}
			if slices.ContainsFunc(m.changes, func(c history.Tuning) bool { return c.Kind == history.TakenBack }) {
				taken++
			}
		}
		if taken < test.least || taken > test.most {
			t.Errorf("%s: taken back in %d of %d runs, want %d to %d", test.about, taken, runs, test.least, test.most)
		}
	}
}

// A side effect takes a change back, too; so do memory that runs short and a namespace that is not examined.
func TestTunerSideEffects(t *testing.T) {
	full := func(time.Duration) float64 { return 90000 }
	m := simulate(t, TuneApply, full)
	for len(m.times) == 0 {
		m.window()
	}
	m.free = 100 << 20
	m.window()
	m.window()
	if got := strings.Join(m.kinds(), ", "); got != "applied 131072, taken back 65536" || !strings.Contains(m.changes[len(m.changes)-1].Why, "memory") {
		t.Error(got, m.changes)
	}
	m = simulate(t, TuneApply, full)
	for len(m.times) == 0 {
		m.window()
	}
	act, _ := m.tuner.due(m.now.Add(40 * time.Second))
	if act != nil {
		t.Error("decided after 40 s")
	}
	if act, _ = m.tuner.due(m.now.Add(51 * time.Second)); act == nil || !strings.Contains(act.why, "could not be measured") {
		t.Errorf("%+v", act)
	}
	// A finding that more room may bring about.
	shown := []causes.Finding{{Code: "conntrack-no-memory", Severity: causes.Critical, Title: "no memory"}}
	s := &snapshot.Snapshot{TakenAt: m.now.Add(20 * time.Second), WindowSeconds: 10, Netns: snapshot.Netns{Init: true, Inode: 1}}
	if act, _ = m.tuner.window(s, shown, nil, m.now.Add(20*time.Second)); act != nil {
		t.Error("taken back after one window")
	}
	if act, _ = m.tuner.window(s, shown, nil, m.now.Add(30*time.Second)); act == nil || act.takeBack != "0" || !strings.Contains(act.why, "conntrack-no-memory") {
		t.Errorf("%+v", act)
	}
}

func TestTunerLeavesAlone(t *testing.T) {
	full := func(time.Duration) float64 { return 90000 }
	// Somebody else sets it.
	m := simulate(t, TuneApply, full)
	m.owner = "kube-proxy"
	if m.run(time.Hour); len(m.changes) > 0 {
		t.Error(m.changes)
	}
	// Somebody changes what natkit has changed.
	m = simulate(t, TuneApply, func(time.Duration) float64 { return 500000 })
	m.run(5 * time.Minute)
	m.settings[limitSetting] = 100000
	if m.run(3 * time.Hour); m.settings[limitSetting] != 100000 {
		t.Error(m.kinds())
	}
	// A quarter of the memory.
	m = simulate(t, TuneApply, func(time.Duration) float64 { return 5e6 })
	m.memory, m.free = 1<<30, 400<<20
	if m.run(3 * time.Hour); m.settings[limitSetting] != 262144 {
		t.Error(m.kinds())
	}
	// What cannot be changed is left alone for an hour.
	m = simulate(t, TuneApply, full)
	m.fail = errors.New("read-only")
	if m.run(50 * time.Minute); strings.Join(m.kinds(), ", ") != "failed 131072" {
		t.Error(m.kinds())
	}
	// A burst of one window is no reason.
	m = simulate(t, TuneApply, func(d time.Duration) float64 {
		if int(d.Seconds())%60 == 0 {
			return 90000
		}
		return 1000
	})
	if m.run(2 * time.Hour); len(m.changes) > 0 {
		t.Error(m.changes)
	}
}

// Advice says what would be done, once, and changes nothing.
func TestTunerAdvises(t *testing.T) {
	m := simulate(t, TuneAdvise, func(d time.Duration) float64 {
		if d > time.Hour {
			return 1000
		}
		return 90000
	})
	m.run(30 * time.Minute)
	if got := strings.Join(m.kinds(), ", "); got != "proposed 131072" || len(m.times) > 0 || len(m.tuner.proposed) != 2 {
		t.Errorf("%s, %v", got, m.tuner.proposed)
	}
	if m.run(time.Hour); len(m.tuner.proposed) != 0 || len(m.changes) != 2 {
		t.Errorf("%v, %v", m.changes, m.tuner.proposed)
	}
}

// A monitor that is started again takes back what was changed by one that ended before it knew the effect, and nothing else:
// a change that was kept stays when the history no longer reaches back to it.
func TestUndecided(t *testing.T) {
	const id = "20260301-120000"
	change := tune.Record{ID: id, Time: noon}
	at := func(after time.Duration, kinds ...string) *history.Entry {
		e := &history.Entry{At: noon.Add(after), Seconds: 10}
		for _, kind := range kinds {
			e.Tunings = append(e.Tunings, history.Tuning{At: e.At, Kind: kind, ID: id, Setting: limitSetting})
		}
		return e
	}
	begins := func(e *history.Entry) *history.Entry { e.Begins = true; return e }
	before := at(-time.Minute)
	for _, test := range []struct {
		about   string
		entries []*history.Entry
		age     time.Duration
		want    bool
	}{
		{"killed right after it", []*history.Entry{before, at(0, history.Applied)}, time.Minute, true},
		{"killed before that was stored", []*history.Entry{before}, time.Minute, true},
		{"killed right after it, and started again a month later", []*history.Entry{before, at(0, history.Applied)}, 30 * 24 * time.Hour, true},
		{"killed before that was stored, and started again a month later", []*history.Entry{before}, 30 * 24 * time.Hour, true},
		{"killed, and started without --tune in between", []*history.Entry{before, at(0, history.Applied), begins(at(time.Minute)), at(time.Hour)}, 2 * time.Hour, true},
		{"kept", []*history.Entry{before, at(0, history.Applied), at(50*time.Second, history.Kept)}, time.Hour, false},
		{"kept, and the disk was full then", []*history.Entry{before, at(0, history.Applied), at(30 * time.Minute)}, time.Hour, false},
		{"kept, and forgotten", []*history.Entry{at(8 * 24 * time.Hour)}, 15 * 24 * time.Hour, false},
		{"kept, and the history was removed", nil, 15 * 24 * time.Hour, false},
		{"a moment ago, and there is no history", nil, time.Minute, true},
		{"taking it back failed", []*history.Entry{before, at(0, history.Applied), at(50*time.Second, history.NotTuned), at(30 * time.Minute)}, time.Hour, true},
	} {
		dir := t.TempDir()
		w, err := history.Create(dir, history.Limits{Bytes: 1 << 20, Age: 1e6 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range test.entries {
			if err := w.Add(e); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		m := &monitor{o: Options{HistoryDir: dir}}
		if got := m.undecided(change, noon.Add(test.age)); got != test.want {
			t.Errorf("%s: undecided %v, want %v", test.about, got, test.want)
		}
	}
}

// A monitor that is started again knows when the last change was, and by what was given that somebody else has changed a
// setting since. A change that is in the future by a clock that was set back does not hold up the next one for years.
func TestTunerRemembers(t *testing.T) {
	change := func(value string) []tune.Change {
		return []tune.Change{{Setting: limitSetting, New: value}}
	}
	for _, test := range []struct {
		about   string
		records []tune.Record
		limit   uint64 // when it is started again
		want    string
	}{
		{"long ago", []tune.Record{{Time: noon.Add(-time.Hour), State: tune.StateApplied, Changes: change("65536")}}, 65536, "applied 131072, kept 131072"},
		{"just now", []tune.Record{{Time: noon, State: tune.StateApplied, Changes: change("65536")}}, 65536, ""},
		{"in the future", []tune.Record{{Time: noon.Add(10 * 365 * 24 * time.Hour), State: tune.StateApplied, Changes: change("65536")}}, 65536, "applied 131072, kept 131072"},
		{"somebody has changed it since", []tune.Record{{Time: noon.Add(-time.Hour), State: tune.StateApplied, Changes: change("131072")}}, 65536, ""},
		{"it was taken back", []tune.Record{{Time: noon.Add(-time.Hour), State: tune.StateRolledBack, Changes: change("131072")}}, 65536, "applied 131072, kept 131072"},
	} {
		m := simulate(t, TuneApply, func(time.Duration) float64 { return 90000 })
		m.settings[limitSetting] = test.limit
		m.tuner.remembers(test.records, noon, nil)
		m.run(5 * time.Minute)
		if test.about == "in the future" {
			m.run(10 * time.Minute)
		}
		if got := strings.Join(m.kinds(), ", "); got != test.want {
			t.Errorf("%s: %q, want %q", test.about, got, test.want)
		}
	}
}

// What was given in a namespace is remembered as long as that one lives, and nothing of what was taken back.
func TestTunerRemembersNamespaces(t *testing.T) {
	const setting = "net.ipv4.tcp_max_syn_backlog"
	change := func(inode uint64, value string) []tune.Change {
		return []tune.Change{{Setting: setting, Scope: tune.ScopeNamespace, New: value, Space: netns.ID{Inode: inode}}}
	}
	tuner := newTuner(TuneApply, 10*time.Second)
	tuner.remembers([]tune.Record{
		{Time: noon, State: tune.StateApplied, Changes: change(1, "512")}, {Time: noon, State: tune.StateApplied, Changes: change(1, "1024")},
		{Time: noon, State: tune.StateApplied, Changes: change(2, "2048")}, {Time: noon, State: tune.StateRolledBack, Changes: change(2, "4096")},
		{Time: noon, State: tune.StateApplied, Changes: change(3, "8192")},
	}, noon, func(c tune.Change) bool { return c.Space.Inode != 3 })
	if want := map[settingKey]string{{1, setting}: "1024"}; !reflect.DeepEqual(tuner.wrote, want) {
		t.Errorf("%v, want %v", tuner.wrote, want)
	}
}

// What somebody else has changed since holds up no other setting that findings ask for.
func TestTunerTakesTheNextPurpose(t *testing.T) {
	const backlog = "net.core.netdev_max_backlog"
	asks := func(code, setting, value string) causes.Finding {
		return causes.Finding{Code: code, Severity: causes.Warning, Title: code, Settings: []snapshot.Setting{{Name: setting, Value: value}}}
	}
	on := []causes.Finding{asks("conntrack-table-full", limitSetting, "131072"), asks("cpu-backlog-full", backlog, "2000")}
	s := &snapshot.Snapshot{TakenAt: noon, Netns: snapshot.Netns{Init: true, Inode: 1}, Host: snapshot.Host{MemoryBytes: 4 << 30},
		Conntrack: &snapshot.Conntrack{Count: 65536, Max: 65536, Buckets: 65536}, Sysctls: map[string]string{backlog: "1000"}}
	for _, test := range []struct {
		about string
		wrote map[settingKey]string
		want  string // the setting of the step
	}{
		{"nothing was changed yet", nil, bucketsSetting},
		{"the limit is as it was given", map[settingKey]string{{0, limitSetting}: "65536"}, bucketsSetting},
		{"somebody else has the limit", map[settingKey]string{{0, limitSetting}: "262144"}, backlog},
		{"and the backlog", map[settingKey]string{{0, limitSetting}: "262144", {0, backlog}: "3000"}, ""},
	} {
		tuner := newTuner(TuneApply, 10*time.Second)
		tuner.wrote = test.wrote
		got := ""
		if next := tuner.next(s, on, noon); next != nil {
			got = next.plan.Changes[0].Setting
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", test.about, got, test.want)
		}
	}
}

// A table that is nearly full has lost nothing: a share of its limit is no rate.
func TestTunerNearlyFull(t *testing.T) {
	m := simulate(t, TuneApply, func(time.Duration) float64 { return 63000 }).run(10 * time.Minute)
	if got := strings.Join(m.kinds(), ", "); got != "applied 131072, kept 131072" {
		t.Fatal(got)
	}
	if why, want := m.changes[len(m.changes)-1].Why, "lost after it: nothing; before: nothing, at 96 % of the limit"; why != want {
		t.Errorf("%q, want %q", why, want)
	}
	for l, want := range map[loss]string{{rate: 0.3}: "0.3 a second", {rate: 5000}: "5000 a second", {rate: 12345.6}: "12346 a second"} {
		if got := l.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
