// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"math/bits"
	"sort"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// To examine a namespace takes some 20 ms of processor time, to sample it a fiftieth of
// that. attention decides who is examined in the next window: who has a finding, whose sample
// shows a symptom, whose rules changed, and who has not been for the longest time; as many as
// there is time for. A symptom is no finding: it says where to look.
type attention struct {
	// quiet is for the clock's turn, alert for what is or may be wrong: a machine on which all is
	// well costs little, and a fault does not wait.
	quiet, alert budget
	spaces       map[uint64]*watched
}

// watched is what is known of a namespace.
type watched struct {
	last     time.Time // its last examination; before the first one, long before it was seen
	symptoms symptoms
	// explained are the symptoms of which examinations found nothing, and pause how long it is
	// left alone with them: it doubles.
	explained symptoms
	pause     time.Duration
	// fresh is how many examinations a change is worth, at once and with the table: what a change
	// breaks need not show in a sample. announced is when a change last was.
	fresh     int
	announced time.Time
	idle      bool // no interface but loopback
	entries   uint64
	// forwarded is how many packets a second are forwarded as a rule; counted says that the last sample had that number.
	forwarded float64
	counted   bool
	ports     uint64
	table     *snapshot.Table // the last reading
	dumped    time.Time
	probes    probes
	// wanted says that a finding depends on the table's entries: it begins, stays and ends by them.
	wanted bool
	// undecided says that one more window decides whether a finding begins.
	undecided bool
}

const (
	// hostApart and otherApart are between two examinations of a namespace in which all is well, of the host
	// and of the others; there may be no time for them so soon.
	hostApart  = time.Minute
	otherApart = 5 * time.Minute
	maxPause   = 10 * time.Minute

	// mostLooks is how many are examined in one window.
	mostLooks = 32

	// fewResets is how many invalid segments and resets of a window are a symptom, and fewFrames how many frames
	// for somebody else, or requests for an address.
	fewResets = 10
	fewFrames = 3
	// fewUnconfirmed is how many connections one client must leave unconfirmed, and manyUnconfirmed all together.
	fewUnconfirmed  = 5
	manyUnconfirmed = 100

	// fillSymptom is how full a table is from which on it is of interest who fills it.
	fillSymptom = 0.4
	// growthSymptom is by how much of its limit a table must grow in one window.
	growthSymptom = 0.02
	// levelSymptom is how much of a table, of an address's ports or of a pool's blocks the engine must have in use.
	levelSymptom = 0.7
	// portsSymptom is which part of the ports that a source has to choose from all entries
	// together must be, before one destination may have taken nearly all of them.
	portsSymptom = 0.8
	// dumpShare bounds how much of the time the table is read while it has about as many entries, foundShare while a finding
	// depends on them, and reusable is how long a reading stands for the next.
	dumpShare  = 200
	foundShare = 20
	reusable   = 2 * time.Minute
	// entrySeconds is what an entry takes of a reading at most.
	entrySeconds = 4e-6

	// busyEntries and busyForwarded are when a namespace that translates is so busy that a fall of its traffic to a part of fellTo is a
	// symptom: who does not get a packet through to it, or back, leaves no other trace in it.
	busyEntries   = 10
	busyForwarded = 20.0
	fellTo        = 1 / 3.0

	// changeLooks are how many examinations follow a change, changeEvery how often that may be so.
	changeLooks = 2
	changeEvery = time.Minute

	// pressing is the urgency from which on the budget for alerts pays.
	pressing = 1e3
)

// budget is processor time that may be spent on examinations: it grows with the clock.
type budget struct {
	rate float64       // of one processor
	most time.Duration // that can be saved up
	left time.Duration
}

// pass lets time pass.
func (b *budget) pass(d time.Duration) {
	b.left = min(b.most, b.left+time.Duration(float64(d)*b.rate))
}

// affordable is how many examinations there is time for, at about examinationCost each.
func (b *budget) affordable() int { return int(max(0, b.left) / examinationCost) }

const examinationCost = 20 * time.Millisecond

func newAttention() *attention {
	return &attention{
		quiet:  budget{rate: 0.003, most: time.Second, left: time.Second / 4},
		alert:  budget{rate: 0.03, most: 5 * time.Second, left: 5 * time.Second},
		spaces: map[uint64]*watched{},
	}
}

// pass lets time pass.
func (a *attention) pass(d time.Duration) {
	a.quiet.pass(d)
	a.alert.pass(d)
}

// paid takes what examinations have cost, of which so many were pressing.
func (a *attention) paid(cost time.Duration, looks, alerts int) {
	if looks == 0 {
		return
	}
	forAlerts := cost * time.Duration(alerts) / time.Duration(looks)
	a.alert.left -= forAlerts
	a.quiet.left -= cost - forAlerts
}

func (a *attention) of(inode uint64) *watched {
	r := a.spaces[inode]
	if r == nil {
		r = &watched{}
		a.spaces[inode] = r
	}
	return r
}

// engineRefusals are the reasons of the engine's drops that mean that it refuses what it should translate.
var engineRefusals = append([]string{"no-port", "no-address", "sessions-full", "mappings-full", "sources-full", "fragments-full"}, rulefile.Refusals...)

// symptoms are what a sample shows that may be a fault, in words that stay the same while it lasts, and how much of
// it there is, in coarse steps: a symptom of which examinations have found nothing is another one when it has grown.
type symptoms map[string]int

// magnitude is the step of numbers that are counted: the next one begins at four times as many.
func magnitude(n uint64) int { return (bits.Len64(n) + 1) / 2 }

// Of a table the next step of how full it is begins a twentieth of its limit later, or a fiftieth while it grows so fast
// that it takes no longer than a window.
const (
	fillSteps   = 20
	growthSteps = 50
)

func symptomsOf(s *snapshot.Snapshot, ports uint64) symptoms {
	out := symptoms{}
	if ct := s.Conntrack; ct != nil {
		for _, name := range []string{"insert_failed", "drop", "early_drop", "error", "chaintoolong"} {
			if n := ct.Stats[name]; n > 0 {
				out["conntrack."+name] = magnitude(n)
			}
		}
		if ct.Max > 0 {
			fill := float64(ct.Count) / float64(ct.Max)
			if fill >= fillSymptom {
				out["fill"] = int(fill * fillSteps)
			}
			if ct.Count > ct.CountStart && float64(ct.Count-ct.CountStart) >= growthSymptom*float64(ct.Max) {
				out["growth"] = int(fill * growthSteps)
			}
		}
		if ports > 0 && float64(ct.Count) >= portsSymptom*float64(ports) {
			out["ports"] = magnitude(ct.Count)
		}
		if n := min(ct.Stats["invalid"], s.Counters["Tcp.OutRsts"]); n >= fewResets {
			out["resets"] = magnitude(n)
		}
	}
	out.drops(s)
	if s.Engine != nil {
		for _, name := range engineRefusals {
			if n := s.Engine.Packets[name]; n > 0 {
				out["engine."+name] = magnitude(n)
			}
		}
		out.levels(s.Engine)
	}
	for _, name := range []string{"TcpExt.ListenOverflows", "TcpExt.TCPBacklogDrop", "TcpExt.IPReversePathFilter", "Ip.InAddrErrors", "Ip.OutNoRoutes", "Ip.FragFails", "Ip.ReasmFails", "Udp.RcvbufErrors"} {
		if n := s.Counters[name]; n > 0 {
			out[name] = magnitude(n)
		}
	}
	lost := uint64(0)
	for _, socket := range s.EventSockets {
		lost += socket.Drops
	}
	if lost > 0 {
		out["events"] = magnitude(lost)
	}
	return out
}

// levels adds what the engine has little left of, before it refuses anything.
func (out symptoms) levels(e *snapshot.Engine) {
	level := func(name string, used, all uint64) {
		if all > 0 && float64(used) >= levelSymptom*float64(all) {
			name = "engine level." + name
			out[name] = max(out[name], int(used*fillSteps/all))
		}
	}
	level("sessions", e.Sessions, e.SessionsMax)
	level("mappings", e.Mappings, e.MappingsMax)
	for _, a := range e.Addresses {
		level("ports", a.Given-min(a.Given, a.FreeTCP, a.FreeUDP, a.FreeICMP), a.Given)
	}
	for _, p := range e.Pools {
		level("blocks", p.BlocksUsed, p.BlocksUsed+p.BlocksFree)
	}
}

// drops adds what was dropped, the frames that nobody here takes, for another hardware address or VLAN, and ARP requests that may
// have got no reply.
func (out symptoms) drops(s *snapshot.Snapshot) {
	frames := uint64(0)
	if s.Drops != nil {
		for _, row := range s.Drops.Rows {
			switch {
			case !row.Benign:
				name := fmt.Sprintf("drop.%s.%s", row.Cause, row.Reason)
				out[name] = max(out[name], magnitude(row.Count))
			case row.Reason == "OTHERHOST":
				frames += row.Count
			}
		}
	}
	if s.Frames != nil {
		asked := uint64(0)
		for _, q := range s.Frames.Asked {
			asked += q.Count
		}
		if asked >= fewFrames {
			out["asked"] = magnitude(asked)
		}
		if len(s.Frames.Claims) > 0 {
			out["claims"] = 1
		}
	}
	if frames >= fewFrames {
		out["frames"] = magnitude(frames)
	}
}

// sample takes what a sample of a namespace shows, and which of its connections are not confirmed.
func (a *attention) sample(s *snapshot.Snapshot, unconfirmed conntrack.Unconfirmed) {
	r := a.of(s.Netns.Inode)
	r.symptoms = symptomsOf(s, r.ports)
	if unconfirmed.Most >= fewUnconfirmed || unconfirmed.Entries >= manyUnconfirmed {
		r.symptoms["unconfirmed"] = magnitude(unconfirmed.Entries)
	}
	if r.fell(s) {
		r.symptoms["traffic"] = 1
	}
}

// fell says whether much less is forwarded than before.
func (r *watched) fell(s *snapshot.Snapshot) bool {
	if r.entries = 0; s.Conntrack != nil {
		r.entries = s.Conntrack.Count
	}
	counted := r.counted
	if r.counted = s.Counters != nil; !r.counted || s.WindowSeconds <= 0 {
		return false
	}
	if !counted { // the counters are of a longer time than the sample
		return false
	}
	rate, before := float64(s.Counters["Ip.ForwDatagrams"])/s.WindowSeconds, r.forwarded
	if before == 0 {
		r.forwarded = rate
		return false
	}
	r.forwarded = (7*before + rate) / 8
	return before >= busyForwarded && rate < fellTo*before
}

// busy says whether the namespace is worth more counters in each sample.
func (r *watched) busy() bool { return r.ports > 0 && r.entries >= busyEntries }

// changed says that somebody changed the namespace: it is examined at once, with or without symptoms, or soon where there
// are changes all the time.
func (a *attention) changed(inode uint64, now time.Time) {
	r := a.of(inode)
	if now.Sub(r.announced) >= changeEvery {
		r.announced, r.fresh = now, changeLooks
	}
	r.explained, r.pause, r.idle = nil, 0, false
	r.last = r.last.Add(-otherApart)
}

// examined takes what an examination has shown.
func (a *attention) examined(s *snapshot.Snapshot, found bool, now time.Time) {
	r := a.of(s.Netns.Inode)
	r.last, r.idle, r.fresh = now, false, max(0, r.fresh-1)
	r.ports = fewestPorts(s)
	if s.Conntrack != nil && s.Conntrack.Table != nil && s.Conntrack.Table.Entries > 0 {
		if s.Conntrack.Table != r.table {
			r.table, r.dumped = s.Conntrack.Table, now
		}
	}
	if found || len(r.symptoms) == 0 {
		r.explained, r.pause = nil, 0
		return
	}
	if r.pause == 0 || !r.symptoms.within(r.explained) {
		r.explained, r.pause = symptoms{}, hostApart/4
	}
	for name, n := range r.symptoms {
		r.explained[name] = max(r.explained[name], n)
	}
	r.pause = min(2*r.pause, maxPause)
}

// within says whether others have each symptom, and no less of it.
func (a symptoms) within(b symptoms) bool {
	for name, n := range a {
		if b[name] < n {
			return false
		}
	}
	return true
}

// fewestPorts is how many ports the narrowest rule of source translation allows, 0 where none translates.
func fewestPorts(s *snapshot.Snapshot) (fewest uint64) {
	const all = 65536 - 1024
	for _, c := range s.Chains {
		if c.NATRules["masquerade"]+c.NATRules["snat"] > 0 && fewest == 0 {
			fewest = all
		}
		for _, r := range c.SNATRanges {
			if n := uint64(r.Max) - uint64(r.Min) + 1; r.Min > 0 && r.Max >= r.Min && (fewest == 0 || n < fewest) {
				fewest = n
			}
		}
	}
	return fewest
}

// urgency orders those who may be examined; below 1 it is too early.
func (r *watched) urgency(inode uint64, urgent, host bool, now time.Time) float64 {
	since := now.Sub(r.last)
	apart := otherApart
	if host || r.undecided { // of advice, which is not urgent
		apart = hostApart
	}
	switch {
	case urgent:
		return 1000*pressing + since.Seconds()
	case r.fresh > 0:
		return pressing + since.Seconds()
	case len(r.symptoms) > 0 && !r.symptoms.within(r.explained):
		return pressing + since.Seconds()
	case len(r.symptoms) > 0 && r.pause > 0:
		apart = min(apart, r.pause)
	}
	return since.Seconds() / apart.Seconds()
}

// choose says who is examined in the next window, most urgent first, and how many of them are pressing.
func (a *attention) choose(there []snapshot.Netns, urgent func(uint64) bool, now time.Time) (out []probe.Want, alerts int) {
	type candidate struct {
		inode   uint64
		urgency float64
	}
	var all []candidate
	known := map[uint64]bool{}
	for i, n := range there {
		known[n.Inode] = true
		r := a.of(n.Inode)
		if r.last.IsZero() {
			r.last = now.Add(-maxPause)
		}
		if r.idle && now.Sub(r.last) < otherApart {
			continue
		}
		if u := r.urgency(n.Inode, urgent(n.Inode), i == 0, now); u >= 1 {
			all = append(all, candidate{n.Inode, u})
		}
	}
	for inode := range a.spaces {
		if !known[inode] {
			delete(a.spaces, inode)
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].urgency > all[j].urgency })
	quiet, alert := a.quiet.affordable(), a.alert.affordable()
	for _, c := range all {
		left := &quiet
		if c.urgency >= pressing {
			left = &alert
		}
		if *left == 0 || len(out) == mostLooks {
			continue
		}
		*left--
		if c.urgency >= pressing {
			alerts++
		}
		out = append(out, a.of(c.inode).want(c.inode, now))
	}
	return out, alerts
}

// want is how to examine the namespace: cheaper facts ask for the entries of its table.
func (r *watched) want(inode uint64, now time.Time) probe.Want {
	w := probe.Want{Inode: inode, ARP: r.symptoms["asked"] > 0}
	if len(r.symptoms) == 0 && r.fresh == 0 && !r.wanted {
		return w
	}
	apart := float64(dumpShare)
	if r.wanted {
		apart = foundShare
	}
	if age := now.Sub(r.dumped); r.table != nil && age < reusable && age.Seconds() < apart*dumpCost(r.table) && r.stillHolds(r.table) {
		w.Table = r.table
	} else {
		w.Dump = true
	}
	return w
}

// dumpCost is how many seconds of processor time another reading takes. What it lasts is longer where others have
// the processors.
func dumpCost(t *snapshot.Table) float64 { return min(t.DumpSeconds, entrySeconds*float64(t.Entries)) }

// otherTable is by what a table must have grown or shrunk to be another one: a flood has begun or ended.
const otherTable = 4

// stillHolds says whether the table has about as many entries as when it was read.
func (r *watched) stillHolds(t *snapshot.Table) bool {
	return r.entries <= otherTable*t.Entries && t.Entries <= otherTable*r.entries
}

// idleAgain notes a namespace that has nothing to examine.
func (a *attention) idleAgain(inode uint64, now time.Time) {
	r := a.of(inode)
	r.idle, r.last, r.fresh = true, now, 0
}
