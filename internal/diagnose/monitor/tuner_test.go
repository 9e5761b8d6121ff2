// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/tune"
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
		if c.Kind == history.TakenBack && (c.Setting == limitSetting && (c.Old != "131072" || c.New != "65536") || !strings.Contains(c.Why, "a second are lost after it")) {
			t.Errorf("%+v", c)
		}
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
