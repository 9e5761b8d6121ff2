// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// course runs windows through the hysteresis: each letter is what the window shows of one cause,
// - nothing, a advice, w warning, c critical. It returns what happened, by window.
func course(t *testing.T, windows string) (out []string) {
	t.Helper()
	f := newFindings()
	for i, letter := range windows {
		var shown []causes.Finding
		if severity := map[rune]causes.Severity{'a': causes.Advice, 'w': causes.Warning, 'c': causes.Critical}[letter]; severity > 0 {
			shown = append(shown, causes.Finding{Code: "x", Severity: severity})
		}
		for _, e := range f.window(snapshot.Netns{Inode: 7, Name: "blue"}, noon.Add(time.Duration(i)*10*time.Second), shown) {
			said := fmt.Sprintf("%d %s %s", i, e.Kind, e.Severity)
			if !e.Since.IsZero() {
				said += fmt.Sprintf(" %.0f", e.Since.Sub(noon).Seconds()/10)
			}
			out = append(out, said)
		}
	}
	return out
}

func TestHysteresis(t *testing.T) {
	for _, test := range []struct {
		windows string
		want    []string
	}{
		{"", nil},
		{"c", nil},
		{"c-c-c-c-", nil},
		{"--cc", []string{"3 began critical 2"}},
		{"-c-cc-----", []string{"4 began critical 3", "9 ended critical 4"}},
		{"cc----", []string{"1 began critical 0"}},
		{"cc----c----c-----", []string{"1 began critical 0", "16 ended critical 11"}},
		{"ww-w-ww-w--w-----ww", []string{"1 began warning 0", "16 ended warning 11", "18 began warning 17"}},
		{"wwcwcw", []string{"1 began warning 0"}},
		{"wwcc", []string{"1 began warning 0", "3 changed critical"}},
		{"ccww-----", []string{"1 began critical 0", "8 ended critical 3"}},
		{"ccwwwww-----", []string{"1 began critical 0", "6 changed warning", "11 ended warning 6"}},
		{"ccwwccwwccww", []string{"1 began critical 0"}},
		{"wwaaaac", []string{"1 began warning 0"}},
		{"aa-----", []string{"1 began advice 0", "6 ended advice 1"}},
	} {
		got := course(t, test.windows)
		if !reflect.DeepEqual(got, test.want) {
			t.Errorf("%q: %q, want %q", test.windows, got, test.want)
		}
	}
}

// A load near a threshold, as ten windows of it were measured: no more than one beginning.
func TestFlapping(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, share := range []float64{0.3, 0.5, 0.8} {
		windows := ""
		for range 1000 {
			windows += map[bool]string{true: "w", false: "-"}[r.Float64() < share]
		}
		raw, events := 0, 0
		for i := 1; i < len(windows); i++ {
			if windows[i] != windows[i-1] {
				raw++
			}
		}
		if events = len(course(t, windows)); events > raw/4 {
			t.Errorf("%.0f %% of windows: %d changes became %d events", 100*share, raw, events)
		}
	}
}

func TestNamespaceGone(t *testing.T) {
	f := newFindings()
	ns := snapshot.Netns{Inode: 9, Container: "pod shop/cart"}
	shown := []causes.Finding{{Code: "a", Severity: causes.Critical, Consequences: []causes.Finding{{Code: "b", Severity: causes.Warning}}}}
	f.window(ns, noon, shown)
	if e := f.window(ns, noon.Add(time.Second), shown); len(e) != 2 || e[1].Code != "b" {
		t.Fatal(e)
	}
	if got := f.active(); len(got) != 2 || got[0].Finding.Code != "a" || !f.urgent(9) || f.urgent(8) {
		t.Error(got)
	}
	if e := f.gone(func(inode uint64) bool { return inode != 9 }, noon); len(e) != 0 {
		t.Error(e)
	}
	e := f.gone(func(uint64) bool { return true }, noon.Add(time.Minute))
	if len(e) != 2 || e[0].Kind != history.Ended || e[0].Why == "" || e[0].Namespace != "pod shop/cart" || len(f.active()) != 0 {
		t.Error(e)
	}
}

// A container that is started again mostly gets the number of its old namespace: nothing of that is said of the new one.
func TestNumberIsGivenAgain(t *testing.T) {
	m := crowded()
	m.attention, m.sysctls, m.legacy = newAttention(), map[uint64]map[string]string{}, map[uint64]map[string]snapshot.Chain{}
	settings := func(inode uint64, value string) *snapshot.Snapshot {
		return &snapshot.Snapshot{Netns: snapshot.Netns{Inode: inode}, Sysctls: map[string]string{"net.ipv4.ip_forward": value}}
	}
	const again, other = 7, 8
	for _, inode := range []uint64{again, other} {
		m.changedSettings(settings(inode, "1"))
		m.changedRules(legacyRules(inode, "-A FORWARD -s 10.0.0.1/32 -j DROP"))
		m.attention.examined(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: inode}, Conntrack: &snapshot.Conntrack{Table: &snapshot.Table{Entries: 1}}}, true, noon)
		m.tuner.harm[harmKey{inode, "x"}], m.tuner.wrote[settingKey{inode, "x"}] = []loss{{rate: 1}}, "1"
	}
	m.tuner.trial = &trial{step: step{netns: snapshot.Netns{Inode: again}}, windows: 1}
	held := m.collect().Len()
	events := m.forget(again, noon.Add(time.Minute))
	if len(events) != 1 || events[0].Kind != history.Ended || events[0].Namespace != "n6" || events[0].Why == "" {
		t.Errorf("ended: %+v", events)
	}
	for inode, want := range map[uint64]bool{again: false, other: true} {
		_, examined := m.attention.spaces[inode]
		_, lost := m.tuner.harm[harmKey{inode, "x"}]
		_, wrote := m.tuner.wrote[settingKey{inode, "x"}]
		got := []bool{examined, lost, wrote, m.findings.urgent(inode), m.state.trends[inode] != nil, m.state.tables[inode] != nil, m.state.engines[inode] != nil, m.state.windows[inode] > 0,
			m.state.logs[inode].Log != nil, len(m.changedSettings(settings(inode, "0"))) > 0, len(m.changedRules(legacyRules(inode))) > 0}
		for i, known := range got {
			if known != want {
				t.Errorf("%d: part %d is known: %v", inode, i, known)
			}
		}
	}
	// The effect of a change in the old one is not measured in the new one.
	m.tuner.window(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: again}, TakenAt: noon.Add(time.Hour)}, nil, nil, noon.Add(time.Hour))
	if m.tuner.trial.windows != 1 {
		t.Error("the effect of a change was measured in another namespace")
	}
	if got := m.collect(); got.Len() > held {
		t.Errorf("%d series, %d before", got.Len(), held)
	}
}

// legacyRules is a namespace with rules of iptables-legacy in one chain.
func legacyRules(inode uint64, texts ...string) *snapshot.Snapshot {
	chain := snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "FORWARD", Policy: "accept", Rules: len(texts)}
	for _, text := range texts {
		chain.Walk = append(chain.Walk, snapshot.Rule{Text: text})
	}
	return &snapshot.Snapshot{TakenAt: noon, Netns: snapshot.Netns{Inode: inode}, Chains: []snapshot.Chain{chain}, Capabilities: []snapshot.Capability{{Name: snapshot.CanIPTablesLegacy, OK: true}}}
}

// What changed in the rules of iptables-legacy is found by comparing examinations.
func TestLegacyRulesChange(t *testing.T) {
	const drop, queue = "-A FORWARD -s 10.0.0.1/32 -j DROP", "-A FORWARD -p udp -j NFQUEUE"
	changed := func(change func(*snapshot.Snapshot)) func() *snapshot.Snapshot {
		return func() *snapshot.Snapshot {
			s := legacyRules(7, drop)
			change(s)
			return s
		}
	}
	is := func(texts ...string) func() *snapshot.Snapshot {
		return func() *snapshot.Snapshot { return legacyRules(7, texts...) }
	}
	many := make([]string, 15)
	for i := range many {
		many[i] = fmt.Sprintf("-A FORWARD -s 10.0.1.%02d/32 -j DROP", i)
	}
	const name = "iptables-legacy ip filter FORWARD"
	for _, test := range []struct {
		about       string
		before, now func() *snapshot.Snapshot
		want        []string
	}{
		{"nothing", is(drop), is(drop), nil},
		{"a rule is added", is(), is(drop), []string{"rule added: " + name + " `" + drop + "`"}},
		{"a rule is replaced", is(drop, queue), is(drop, drop), []string{"rule added: " + name + " `" + drop + "`", "rule removed: " + name + " `" + queue + "`"}},
		{"many rules are added", is(), is(many...), append(func() (out []string) {
			for _, text := range many[:mostRuleChanges] {
				out = append(out, "rule added: "+name+" `"+text+"`")
			}
			return out
		}(), "5 more of iptables-legacy")},
		{"the policy", is(drop), changed(func(s *snapshot.Snapshot) { s.Chains[0].Policy = "drop" }), []string{"policy changed: " + name + ": accept -> drop"}},
		{"a table is emptied and goes", is(drop), changed(func(s *snapshot.Snapshot) { s.Chains = nil }), []string{"chain removed: " + name}},
		{"rules that are not known one by one", changed(func(s *snapshot.Snapshot) { s.Chains[0].Walk, s.Chains[0].Rules = nil, 3 }), is(drop), []string{"rules changed: " + name + ": 3 -> 1 rule"}},
		{"another target", changed(func(s *snapshot.Snapshot) { s.Chains[0].Walk = nil }), changed(func(s *snapshot.Snapshot) { s.Chains[0].Walk, s.Chains[0].NATRules = nil, map[string]int{"dnat": 1} }), []string{"rules changed: " + name + ": other targets"}},
		{"it could not be read", is(drop), changed(func(s *snapshot.Snapshot) { s.Chains, s.Capabilities = nil, nil }), nil},
		{"rules of nftables are announced", is(drop), changed(func(s *snapshot.Snapshot) { s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Name: "x"}) }), nil},
	} {
		m := &monitor{legacy: map[uint64]map[string]snapshot.Chain{}}
		if got := m.changedRules(test.before()); got != nil {
			t.Errorf("%s: at first %v", test.about, got)
		}
		var got []string
		for _, c := range m.changedRules(test.now()) {
			got = append(got, c.What)
		}
		if !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %q, want %q", test.about, got, test.want)
		}
	}
}

// A namespace may get a better name while a finding is on: the end is that of what began.
func TestEndHasTheNameOfTheBeginning(t *testing.T) {
	f := newFindings()
	shown := []causes.Finding{{Code: "a", Severity: causes.Critical}}
	var names []string
	for i, ns := range []snapshot.Netns{{Inode: 9, Name: "cni-1"}, {Inode: 9, Name: "cni-1"}, {Inode: 9, Name: "cni-1", Container: "pod shop/cart"}} {
		for _, e := range f.window(ns, noon.Add(time.Duration(i)*time.Second), shown) {
			names = append(names, e.Namespace)
		}
	}
	for _, e := range f.gone(func(uint64) bool { return true }, noon.Add(time.Minute)) {
		names = append(names, e.Namespace)
	}
	if !reflect.DeepEqual(names, []string{"cni-1", "cni-1"}) {
		t.Errorf("%q", names)
	}
}

// Advice that was seen once is looked for again within a minute, not at the namespace's next turn.
func TestAdviceIsConfirmed(t *testing.T) {
	a, f, all := newAttention(), newFindings(), spaces(2)[1:]
	pod := append(spaces(1), all...)
	var turns []int
	for i := range 60 {
		now := noon.Add(time.Duration(i) * 10 * time.Second)
		a.pass(10 * time.Second)
		wants, _ := a.choose(pod, f.urgent, now)
		for _, w := range wants {
			s := &snapshot.Snapshot{Netns: snapshot.Netns{Inode: w.Inode}}
			a.examined(s, false, now)
			if w.Inode != 2 {
				continue
			}
			turns = append(turns, i)
			f.window(s.Netns, now, []causes.Finding{{Code: "x", Severity: causes.Advice}})
			a.of(2).undecided = f.undecided(2)
		}
	}
	if want := []int{0, 6, 36}; !reflect.DeepEqual(turns, want) {
		t.Errorf("examined in rounds %v, want %v", turns, want)
	}
}

// Advice waits for the clock's turn: hundreds of namespaces may have the same.
func TestAdviceIsNotUrgent(t *testing.T) {
	for severity, want := range map[causes.Severity]bool{causes.Advice: false, causes.Warning: true, causes.Critical: true} {
		f := newFindings()
		for window := range onAfter + 1 {
			f.window(snapshot.Netns{Inode: 9}, noon.Add(time.Duration(window)*time.Second), []causes.Finding{{Code: "a", Severity: severity}})
			if got := f.urgent(9); got != want {
				t.Errorf("%v after %d windows: urgent %v, want %v", severity, window+1, got, want)
			}
		}
	}
}

// look is what an attention is told after it chose.
func (a *attention) lookAll(spaces []snapshot.Netns, now time.Time, found bool) (chosen []uint64) {
	wants, alerts := a.choose(spaces, func(uint64) bool { return false }, now)
	for _, w := range wants {
		chosen = append(chosen, w.Inode)
		a.examined(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: w.Inode}}, found, now)
	}
	a.paid(time.Duration(len(chosen))*examinationCost, len(chosen), alerts)
	return chosen
}

func spaces(n int) (out []snapshot.Netns) {
	for i := range n {
		out = append(out, snapshot.Netns{Inode: uint64(i + 1), Name: fmt.Sprint(i)})
	}
	return out
}

// However many namespaces there are and whatever is wrong with them, examinations stay within
// their budget, and each namespace gets its turn.
func TestBudget(t *testing.T) {
	for _, sick := range []bool{false, true} {
		a, all := newAttention(), spaces(250)
		looks, turns := 0, map[uint64]int{}
		const hours = 3
		for i := range hours * 360 {
			now := noon.Add(time.Duration(i) * 10 * time.Second)
			a.pass(10 * time.Second)
			for _, n := range all {
				s := &snapshot.Snapshot{Netns: n}
				if sick {
					s.Drops = &snapshot.Drops{Rows: []snapshot.Drop{{Count: 1, Reason: fmt.Sprint(i % 7)}}}
				}
				a.sample(s, conntrack.Unconfirmed{})
			}
			for _, inode := range a.lookAll(all, now, sick) {
				looks++
				turns[inode]++
			}
		}
		spent := time.Duration(looks) * 20 * time.Millisecond
		pays := a.quiet
		if sick {
			pays = a.alert
		}
		allowed := time.Duration(pays.rate*float64(hours*time.Hour)) + pays.most + a.quiet.most
		if spent > allowed || spent < allowed/2 {
			t.Errorf("sick %v: %v spent, %v allowed", sick, spent, allowed)
		}
		if len(turns) != len(all) {
			t.Errorf("sick %v: %d of %d examined", sick, len(turns), len(all))
		}
	}
}

// Who is examined next: a finding to decide about, then a symptom, then a change, then the clock;
// and a symptom that examinations explained nothing of is left alone ever longer.
func TestAttention(t *testing.T) {
	a, all := newAttention(), spaces(4)
	now := noon
	if got := a.lookAll(all, now, false); !reflect.DeepEqual(got, []uint64{1, 2, 3, 4}) {
		t.Errorf("at first %v", got)
	}
	now = now.Add(10 * time.Second)
	if got := a.lookAll(all, now, false); got != nil {
		t.Errorf("again %v", got)
	}
	dropping := &snapshot.Snapshot{Netns: all[2], Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 1, Reason: "NETFILTER_DROP"}}}}
	var times []int
	for i := range 120 {
		now = now.Add(10 * time.Second)
		a.pass(10 * time.Second)
		a.sample(dropping, conntrack.Unconfirmed{})
		for _, inode := range a.lookAll(all, now, false) {
			if inode == 3 {
				times = append(times, i)
			}
		}
	}
	if len(times) < 4 || times[0] != 0 || len(times) > 10 {
		t.Errorf("with a symptom examined in rounds %v", times)
	}
	for i := 2; i < len(times); i++ {
		if times[i]-times[i-1] < times[i-1]-times[i-2] && times[i]-times[i-1] < 29 {
			t.Errorf("with a symptom examined in rounds %v", times)
		}
	}
	if w, _ := a.choose(all[2:3], func(uint64) bool { return true }, now); len(w) != 1 || !w[0].Dump {
		t.Errorf("with a finding %v", w)
	}
	dropping.Drops.Rows[0].Reason = "another"
	a.sample(dropping, conntrack.Unconfirmed{})
	if w, _ := a.choose(all[2:3], func(uint64) bool { return false }, now); len(w) != 1 {
		t.Error("another symptom was left alone")
	}
	a.sample(&snapshot.Snapshot{Netns: all[2]}, conntrack.Unconfirmed{})
	a.examined(&snapshot.Snapshot{Netns: all[2]}, false, now)
	a.changed(3, now)
	for i := range 3 { // what it broke may be in the table; then it is as before
		w, alerts := a.choose(all[2:3], func(uint64) bool { return false }, now.Add(time.Second))
		if i < changeLooks && (len(w) != 1 || !w[0].Dump || alerts != 1) || i == changeLooks && alerts > 0 {
			t.Errorf("examination %d after a change: %v", i, w)
		}
		a.examined(&snapshot.Snapshot{Netns: all[2]}, false, now.Add(time.Second))
		a.changed(3, now.Add(2*time.Second)) // another soon after is not worth as much
	}
}

// Traffic that falls to a part of what it was is a symptom, where it is counted in each sample.
func TestTrafficFalls(t *testing.T) {
	a := newAttention()
	rate := func(perSecond uint64) bool {
		s := &snapshot.Snapshot{Netns: snapshot.Netns{Inode: 3}, WindowSeconds: 10, Counters: map[string]uint64{"Ip.ForwDatagrams": 10 * perSecond}}
		a.sample(s, conntrack.Unconfirmed{})
		return a.of(3).symptoms["traffic"] > 0
	}
	for _, n := range []uint64{1000, 900, 1100, 400, 5000, 900, 800, 1000, 900, 1000, 1000, 900, 1000, 1100, 1000} {
		if rate(n) {
			t.Errorf("%d a second are a symptom", n)
		}
	}
	if !rate(60) || !rate(50) {
		t.Error("a fall is no symptom")
	}
	a.sample(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: 3}, WindowSeconds: 10}, conntrack.Unconfirmed{}) // without counters
	if rate(20) {
		t.Error("counters of a longer time are compared")
	}
}

func TestSymptoms(t *testing.T) {
	for _, test := range []struct {
		about string
		s     snapshot.Snapshot
		ports uint64
		want  string
	}{
		{"nothing", snapshot.Snapshot{}, 0, ""},
		{"a table that grows", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 100, Count: 2200, Max: 100000}}, 0, "growth"},
		{"a table that shrinks", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 20000, Count: 100, Max: 100000}}, 0, ""},
		{"half full", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 50, Count: 50, Max: 100}}, 0, "fill"},
		{"no limit", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 50, Count: 50}}, 0, ""},
		{"few ports", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 80, Count: 80, Max: 1000}}, 100, "ports"},
		{"enough ports", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: 79, Count: 79, Max: 1000}}, 100, ""},
		{"refused", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Max: 9, Stats: map[string]uint64{"drop": 1, "found": 9}}}, 0, "conntrack.drop"},
		{"benign drop", snapshot.Snapshot{Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 9, Benign: true}}}}, 0, ""},
		{"frames for others", snapshot.Snapshot{Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 2, Reason: "OTHERHOST", Benign: true}, {Count: 1, Reason: "OTHERHOST", Benign: true}}}}, 0, "frames"},
		{"few frames for others", snapshot.Snapshot{Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 2, Reason: "OTHERHOST", Benign: true}}}}, 0, ""},
		{"requests with another VLAN's tag", snapshot.Snapshot{Frames: &snapshot.Frames{Asked: []snapshot.ARPQuestion{{Count: 1}, {Count: 2}}}}, 0, "asked"},
		{"the engine refuses a host", snapshot.Snapshot{Engine: &snapshot.Engine{Packets: map[string]uint64{"source-limit": 1, "translated-out": 900}}}, 0, "engine.source-limit"},
		{"the engine's sessions", snapshot.Snapshot{Engine: &snapshot.Engine{Sessions: 70, SessionsMax: 100, Mappings: 69, MappingsMax: 100}}, 0, "engine level.sessions"},
		{"an address with few ports", snapshot.Snapshot{Engine: &snapshot.Engine{Addresses: []snapshot.EngineAddress{{Given: 9, FreeTCP: 9, FreeUDP: 9, FreeICMP: 9}, {Given: 9, FreeTCP: 9, FreeUDP: 1, FreeICMP: 9}}}}, 0, "engine level.ports"},
		{"a pool with few blocks", snapshot.Snapshot{Engine: &snapshot.Engine{Pools: []snapshot.EnginePool{{}, {BlocksUsed: 8, BlocksFree: 2}}}}, 0, "engine level.blocks"},
		{"the engine has enough of all", snapshot.Snapshot{Engine: &snapshot.Engine{SessionsMax: 9, Addresses: []snapshot.EngineAddress{{Given: 9, FreeTCP: 10, FreeUDP: 4, FreeICMP: 9}}, Pools: []snapshot.EnginePool{{BlocksUsed: 2, BlocksFree: 2}}}}, 0, ""},
		{"the engine drops what belongs to nobody", snapshot.Snapshot{Engine: &snapshot.Engine{Packets: map[string]uint64{"no-mapping": 40, "spoofed": 9}}}, 0, ""},
		{"invalid", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Stats: map[string]uint64{"invalid": 50}}, Counters: map[string]uint64{"Tcp.OutRsts": 9}}, 0, ""},
		{"invalid and reset", snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Stats: map[string]uint64{"invalid": 50}}, Counters: map[string]uint64{"Tcp.OutRsts": 40}}, 0, "resets"},
		{"events are lost", snapshot.Snapshot{EventSockets: []snapshot.EventSocket{{Drops: 1}}}, 0, "events"},
		{"drop", snapshot.Snapshot{Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 9, Cause: snapshot.CauseRule, Reason: "R"}}}}, 0, "drop.firewall-rule.R"},
	} {
		got := symptomsOf(&test.s, test.ports)
		if len(got) > 1 || test.want == "" && len(got) > 0 || test.want != "" && got[test.want] == 0 {
			t.Errorf("%s: %v, want %q", test.about, got, test.want)
		}
	}
}

// One client that does not confirm some connections is a symptom, as are many that do not confirm one each; and so is another
// machine with the router's address.
func TestQuietFaultsAreSymptoms(t *testing.T) {
	for _, test := range []struct {
		found conntrack.Unconfirmed
		want  bool
	}{{conntrack.Unconfirmed{Entries: 4, Most: 4}, false}, {conntrack.Unconfirmed{Entries: 5, Most: 5}, true},
		{conntrack.Unconfirmed{Entries: 99, Most: 1}, false}, {conntrack.Unconfirmed{Entries: 100, Most: 1}, true}} {
		a, all := newAttention(), spaces(1)
		a.sample(&snapshot.Snapshot{Netns: all[0]}, test.found)
		if got := a.of(all[0].Inode).symptoms; (got["unconfirmed"] > 0) != test.want {
			t.Errorf("%+v: %v", test.found, got)
		}
	}
	claimed := symptomsOf(&snapshot.Snapshot{Frames: &snapshot.Frames{Claims: []snapshot.AddressClaim{{Own: true, Count: 1}}}}, 0)
	if claimed["claims"] == 0 {
		t.Errorf("another machine has the router's address: %v", claimed)
	}
}

// A symptom of which an examination found nothing is looked at again when there is clearly more of it: a table that
// goes on filling, drops that multiply. What varies about a level is not.
func TestSymptomGrows(t *testing.T) {
	table := func(entries, before uint64) *snapshot.Snapshot {
		return &snapshot.Snapshot{Conntrack: &snapshot.Conntrack{CountStart: before, Count: entries, Max: 1000}}
	}
	drops := func(n uint64) *snapshot.Snapshot {
		return &snapshot.Snapshot{Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: n, Reason: "R"}}}}
	}
	for _, test := range []struct {
		about   string
		samples []*snapshot.Snapshot
		want    int // examinations
	}{
		{"a table that fills slowly", []*snapshot.Snapshot{table(410, 405), table(420, 410), table(430, 420), table(460, 430), table(470, 460), table(510, 500)}, 3},
		{"a table that grows fast", []*snapshot.Snapshot{table(100, 50), table(150, 100), table(200, 150)}, 3},
		{"a table about a level", []*snapshot.Snapshot{table(451, 451), table(449, 451), table(451, 449), table(448, 451), table(452, 448)}, 1},
		{"drops that multiply", []*snapshot.Snapshot{drops(4), drops(5), drops(7), drops(30), drops(40), drops(6)}, 2},
	} {
		a, all := newAttention(), spaces(1)
		a.lookAll(all, noon.Add(-time.Second), false)
		got := 0
		for i, s := range test.samples {
			s.Netns = all[0]
			a.pass(10 * time.Second)
			a.sample(s, conntrack.Unconfirmed{})
			// The pause after the first examination is 30 seconds; the test's samples are closer.
			got += len(a.lookAll(all, noon.Add(time.Duration(i)*4*time.Second), false))
		}
		if got != test.want {
			t.Errorf("%s: %d examinations, want %d", test.about, got, test.want)
		}
	}
}

// A reading of a large table stands for the next ones, unless the table is another one by now.
func TestTableIsReadAgain(t *testing.T) {
	a := newAttention()
	sample := func(entries uint64) probe.Want {
		ct := &snapshot.Conntrack{CountStart: entries, Count: entries, Max: 100000}
		a.sample(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: 3}, Conntrack: ct}, conntrack.Unconfirmed{})
		return a.of(3).want(3, noon.Add(30*time.Second))
	}
	sample(50000)
	read := &snapshot.Table{Entries: 50000, DumpSeconds: 1}
	a.examined(&snapshot.Snapshot{Netns: snapshot.Netns{Inode: 3}, Conntrack: &snapshot.Conntrack{Table: read}}, true, noon)
	for entries, again := range map[uint64]bool{50000: false, 90000: false, 41000: false, 220000: true} {
		if w := sample(entries); w.Dump != again || !again && w.Table != read {
			t.Errorf("%d entries: %+v, want another reading %v", entries, w, again)
		}
	}
	a.changed(3, noon) // reading is for what a change may have broken, too, when the flood is over
	if w := sample(1000); !w.Dump {
		t.Errorf("the flood is over: %+v", w)
	}
}

// What depends on the table's entries needs them in each window, also where no sample shows anything, and ends by them:
// an old reading stands for the next ones for a shorter time.
func TestTableOfAFinding(t *testing.T) {
	a, f := newAttention(), newFindings()
	ns := snapshot.Netns{Inode: 3}
	f.window(ns, noon, []causes.Finding{{Code: "rule-drop", Severity: causes.Critical}, {Code: "clients-unreached", Severity: causes.Advice}})
	if f.needTable(3) {
		t.Error("neither needs the table")
	}
	f.window(ns, noon.Add(time.Second), []causes.Finding{{Code: "clients-unreached", Severity: causes.Critical}})
	a.of(3).wanted = f.needTable(3)
	if w := a.of(3).want(3, noon); !w.Dump {
		t.Errorf("a finding without a symptom: %+v", w)
	}
	read := &snapshot.Table{Entries: 150000, DumpSeconds: 3}
	a.sample(&snapshot.Snapshot{Netns: ns, Conntrack: &snapshot.Conntrack{CountStart: 150000, Count: 150000, Max: 500000}}, conntrack.Unconfirmed{})
	a.examined(&snapshot.Snapshot{Netns: ns, Conntrack: &snapshot.Conntrack{Table: read}}, true, noon)
	for after, again := range map[time.Duration]bool{8 * time.Second: false, 24 * time.Second: true} {
		if w := a.of(3).want(3, noon.Add(after)); w.Dump != again || !again && w.Table != read {
			t.Errorf("after %v: %+v, want another reading %v", after, w, again)
		}
	}
	for i := range offAfter {
		f.window(ns, noon.Add(time.Duration(2+i)*time.Second), nil)
	}
	if f.needTable(3) {
		t.Error("the finding is over")
	}
}

// forecastOf runs levels through a trend, ten seconds apart.
func forecastOf(levels func(i int) float64, n int, limit uint64) (tr tableTrend, last *Forecast) {
	for i := range n {
		last = tr.add(noon.Add(time.Duration(i)*10*time.Second), uint64(max(0, levels(i))), limit)
	}
	return tr, last
}

func TestForecast(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	noise := func(size float64) float64 { return size * r.NormFloat64() }
	for _, test := range []struct {
		about    string
		levels   func(i int) float64
		low, top time.Duration // of Full; 0: none is expected
	}{
		{"steady growth", func(i int) float64 { return 1000 + 100*float64(i) }, 58 * time.Minute, 72 * time.Minute},
		{"noisy growth", func(i int) float64 { return 1000 + 100*float64(i) + noise(100) }, 45 * time.Minute, 90 * time.Minute},
		{"standing still", func(i int) float64 { return 20000 + noise(50) }, 0, 0},
		{"emptying", func(i int) float64 { return 40000 - 100*float64(i) }, 0, 0},
		{"levelled off", func(i int) float64 { return 30000 * min(1, float64(i)/40) }, 0, 0},
	} {
		_, f := forecastOf(test.levels, 120, 50000)
		switch {
		case test.top == 0 && f != nil:
			t.Errorf("%s: full in %v", test.about, f.Full)
		case test.top > 0 && (f == nil || f.Full < test.low || f.Full > test.top || f.Early > f.Full || f.Late != 0 && f.Late < f.Full):
			t.Errorf("%s: %+v, want %v to %v", test.about, f, test.low, test.top)
		}
	}
	if _, f := forecastOf(func(i int) float64 { return 100 * float64(i) }, 10, 50000); f != nil {
		t.Error("a forecast from less than two minutes")
	}
	// With the longest interval, and a clock that is not exact.
	var slow tableTrend
	var f *Forecast
	at := func(i int) time.Time {
		return noon.Add(time.Duration(i)*5*time.Minute + time.Duration(r.IntN(50))*time.Millisecond)
	}
	for i := range trendLevels {
		f = slow.add(at(i), uint64(1000+3000*i), 100000) // 10 a second
	}
	if f == nil || f.Full < 80*time.Minute || f.Full > 90*time.Minute {
		t.Errorf("with intervals of five minutes: %+v", f)
	}
	if f = slow.add(at(trendLevels+3), 60000, 100000); f != nil {
		t.Errorf("across a time in which nobody looked: %+v", f)
	}
	// More than a year is not at once.
	if _, f := forecastOf(func(i int) float64 { return 1000 + 6*float64(i) }, 120, 1<<26); f != nil {
		t.Errorf("a table of 2^26 entries that grows by 0.6 a second: full in %v", f.Full)
	}
}

// The record of forecasts is what they are worth: of a load that goes on most held, of one that
// changes its mind fewer.
func TestForecastScore(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	steady, _ := forecastOf(func(i int) float64 { return 1000 + 50*float64(i) + 30*r.NormFloat64() }, 600, 1<<20)
	level := 20000.0
	erratic, _ := forecastOf(func(i int) float64 {
		if (i/45)%2 == 0 {
			level += 200
		} else {
			level -= 200
		}
		return level
	}, 600, 1<<20)
	if s := steady.score; s.Checked < 500 || s.Held*10 < s.Checked*8 {
		t.Errorf("steady: %+v", s)
	}
	if e := erratic.score; e.Checked < 500 || e.Held*10 > e.Checked*8 {
		t.Errorf("erratic: %+v", e)
	}
}

// The history gets a list of what is on every few minutes, an empty one too, and at once when an entry could not be stored.
func TestHistoryListsWhatIsOn(t *testing.T) {
	dir := t.TempDir()
	w, err := history.Create(filepath.Join(dir, "history"), history.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	m := &monitor{o: Options{History: w}, findings: newFindings()}
	stored := func(minutes int) *history.Entry {
		now := noon.Add(time.Duration(minutes) * time.Minute)
		e := &history.Entry{At: now}
		m.list(e, now)
		_ = m.store(e)
		return e
	}
	if e := stored(0); e.On == nil || len(e.On) != 0 {
		t.Errorf("nothing is on: %+v", e.On)
	}
	for i := range onAfter {
		m.findings.window(snapshot.Netns{Inode: 1, Init: true}, noon.Add(time.Duration(i)*time.Second), []causes.Finding{{Code: "a", Severity: causes.Critical, Title: "it is", Impact: 3}})
	}
	if e := stored(9); e.On != nil {
		t.Errorf("listed again after 9 minutes: %+v", e.On)
	}
	want := []history.Event{{At: noon.Add(10 * time.Minute), Kind: history.On, Inode: 1, Namespace: "host", Code: "a", Severity: "critical", Title: "it is", Impact: 3, Since: noon}}
	if e := stored(10); !reflect.DeepEqual(e.On, want) {
		t.Errorf("%+v, want %+v", e.On, want)
	}
	if err := os.Rename(filepath.Join(dir, "history"), filepath.Join(dir, "away")); err != nil {
		t.Fatal(err)
	}
	stored(11)
	if e := stored(12); len(e.On) != 1 {
		t.Errorf("not listed after an entry that could not be stored: %+v", e.On)
	}
}
