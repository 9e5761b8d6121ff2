// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// Lists says which top lists an Aggregate makes, all by default. Each costs time
// and memory.
type Lists uint8

const (
	ListSources Lists = 1 << iota
	ListDestinations
	ListDestPorts
	ListSNATPorts
	NoLists // only the sums

	allLists = ListSources | ListDestinations | ListDestPorts | ListSNATPorts
)

// Aggregate counts the flows of a table. Its memory is bounded (about 17 MB)
// however large the table and however many addresses are in it: what it counts
// by address is exact up to 32768 different ones; with more, the top lists
// still have every address with more than 1/32768 of the entries, and each row
// says by how much its count may be too low.
type Aggregate struct {
	lists   Lists
	entries uint64
	protos  [256]uint64
	states  [maxState]uint64

	assured, unreplied, offload, hwOffload, snat, dnat uint64

	sources, destinations tally[addrKey]
	ports                 tally[portKey]
	outside               tally[outsideKey]

	// Timeouts, where known, tell from the time that a flow has left when it had its
	// last packet.
	Timeouts Timeouts
	// Recent is how many seconds ago a recent flow's last packet was at most;
	// snapshot.RecentSeconds by default.
	Recent uint64
	// Label is the bit of a label, above 0; translated flows that have it are counted.
	Label int

	labelled     uint64
	oneWay, idle uint64
	outsides     tally[addrKey]
	silent       tally[addrKey] // outside addresses of recent flows that nobody has answered
	unanswered   tally[unansweredKey]
	halfway      tally[unansweredKey]
	targets      map[targetKey]*targetCount
	asked        map[answerKey]question
	came         map[answerKey]addrKey // from whom
	helpers      map[string]uint64
	controls     map[controlKey]*controlCount
}

// Keys without pointers, so that the garbage collector passes the tallies over.
type (
	addrKey [16]byte
	portKey struct {
		port  uint16
		proto uint8
	}
	outsideKey struct {
		outside, dest addrKey
		port          uint16
		proto         uint8
	}
	unansweredKey struct {
		source, dest, target addrKey
		destPort, targetPort uint16
		proto                uint8
		snat                 bool
	}
)

type targetKey struct {
	dest, target         addrKey
	destPort, targetPort uint16
	proto                uint8
}

type targetCount struct{ answered, unanswered uint64 }

// controlKey is who has a connection that agrees on further ones, and with whom.
type controlKey struct {
	source, seen, dest, target addrKey
	destPort, targetPort       uint16
	proto                      uint8
}

type controlCount struct{ entries, helped uint64 }

// maxControls is how many pairs of hosts are looked at that agree on further connections.
const maxControls = 4096

// helperPorts are snapshot.HelperPorts by protocol and port.
var helperPorts = func() map[portKey]bool {
	out := map[portKey]bool{}
	for _, p := range snapshot.HelperPorts {
		proto := uint8(unix.IPPROTO_TCP)
		if p.Protocol == "udp" {
			proto = unix.IPPROTO_UDP
		}
		out[portKey{proto: proto, port: p.Port}] = true
	}
	return out
}()

// answerKey is what an answer over UDP has besides its source address; question is who asked
// whom, and from whom the answer is awaited.
type (
	answerKey struct {
		client           addrKey
		clientPort, port uint16
	}
	question struct {
		source, dest, target addrKey
		destPort             uint16
	}
)

// maxQuestions is how many flows of UDP that nobody has answered are looked at for answers
// from elsewhere; where there are more, the table's first.
const maxQuestions = 1 << 14

// maxTargets is more than a machine publishes; of more, some are not told.
const maxTargets = 16384

// NewAggregate returns an empty one that makes these lists.
func NewAggregate(lists Lists) *Aggregate {
	if lists == 0 {
		lists = allLists
	}
	return &Aggregate{
		lists:        lists,
		sources:      newTally[addrKey](exactKeys),
		destinations: newTally[addrKey](exactKeys),
		ports:        newTally[portKey](exactKeys),
		outside:      newTally[outsideKey](exactKeys),
		outsides:     newTally[addrKey](exactKeys / 8),
		silent:       newTally[addrKey](exactKeys / 8),
		unanswered:   newTally[unansweredKey](exactKeys / 8),
		halfway:      newTally[unansweredKey](exactKeys / 8),
		targets:      map[targetKey]*targetCount{},
		asked:        map[answerKey]question{},
		came:         map[answerKey]addrKey{},
		helpers:      map[string]uint64{},
		controls:     map[controlKey]*controlCount{},
	}
}

// Add counts a flow.
func (a *Aggregate) Add(f *Flow) {
	a.entries++
	a.protos[f.Proto]++
	if f.Proto == unix.IPPROTO_TCP && f.Has&HasState != 0 {
		a.states[f.State]++
	}
	unreplied := f.Unreplied()
	count(&a.unreplied, unreplied)
	count(&a.assured, f.Status&StatusAssured != 0)
	count(&a.offload, f.Status&StatusOffload != 0)
	count(&a.hwOffload, f.Status&StatusHWOffload != 0)
	if a.lists&ListSources != 0 {
		a.sources.add(f.Orig.Src.As16(), unreplied, 0)
		if f.halfOpen() {
			a.sources.lastHalfOpen()
		}
	}
	if a.lists&ListDestinations != 0 {
		a.destinations.add(f.Orig.Dst.As16(), unreplied, 0)
	}
	if a.lists&ListDestPorts != 0 && f.hasPorts() && f.Proto != unix.IPPROTO_GRE {
		a.ports.add(portKey{proto: f.Proto, port: f.Orig.DstPort}, unreplied, 0)
	}
	recent := a.Timeouts.recent(f, cmp.Or(a.Recent, snapshot.RecentSeconds))
	if f.DNAT() {
		a.dnat++
		if a.lists&ListDestinations != 0 && recent && f.hasPorts() && !f.zoned() {
			a.addTarget(f, unreplied)
		}
	}
	count(&a.labelled, a.Label > 0 && (f.SNAT() || f.DNAT()) && f.Label(a.Label))
	a.judge(f, unreplied, recent)
	if f.SNAT() {
		a.snat++
		if a.lists&ListSNATPorts != 0 && f.Reply.Dst != f.Orig.Src && !f.zoned() {
			a.outsides.add(f.Reply.Dst.As16(), recent, 0)
			if recent && unreplied {
				a.silent.add(f.Reply.Dst.As16(), false, 0)
			}
		}
		if a.lists&ListSNATPorts == 0 {
			return
		}
		k := outsideKey{proto: f.Proto, outside: f.Reply.Dst.As16(), dest: f.Reply.Src.As16()}
		port := f.Reply.DstPort
		if f.isICMP() {
			port = f.Reply.SrcPort // its identifier is what is translated
		} else {
			k.port = f.Reply.SrcPort
		}
		a.outside.add(k, unreplied, port)
	}
}

// judge counts what the doctor asks about beyond numbers of entries.
func (a *Aggregate) judge(f *Flow, unreplied, recent bool) {
	tcp := f.Proto == unix.IPPROTO_TCP && f.Has&HasState != 0
	switch {
	case tcp && f.State == TCPEstablished && unreplied:
		a.oneWay++
	case tcp && f.State == TCPEstablished && a.Timeouts.idle(f) >= snapshot.IdleSeconds:
		a.idle++
	}
	if f.Has&HasHelper != 0 && len(a.helpers) < maxHelpers {
		a.helpers[string(f.Helper)]++
	}
	if a.lists&ListDestinations == 0 {
		return
	}
	if f.hasPorts() && helperPorts[portKey{proto: f.Proto, port: f.Reply.SrcPort}] && !(tcp && unreplied) {
		a.addControl(f)
	}
	if f.zoned() {
		return
	}
	if unreplied && recent && f.Proto == unix.IPPROTO_UDP {
		a.addQuestion(f)
	}
	var to *tally[unansweredKey]
	switch {
	case tcp && f.State == TCPSynRecv && a.Timeouts.unconfirmed(f):
		to = &a.halfway
	case unreplied && (f.Proto == unix.IPPROTO_UDP || tcp && f.State == TCPSynSent):
		to = &a.unanswered
	default:
		return
	}
	to.add(unansweredKey{
		proto: f.Proto, source: f.Orig.Src.As16(), dest: f.Orig.Dst.As16(), destPort: f.Orig.DstPort,
		target: f.Reply.Src.As16(), targetPort: f.Reply.SrcPort, snat: f.SNAT(),
	}, recent, 0)
}

// addQuestion notes a flow of UDP that nobody has answered: as a question, and as what may be
// the answer to another, of which its sender has another address than was asked. Where both
// ends have the same port, as with NTP and IKE, either may begin, and nothing can be told.
func (a *Aggregate) addQuestion(f *Flow) {
	if f.Reply.DstPort == f.Reply.SrcPort || f.Orig.DstPort == f.Orig.SrcPort {
		return
	}
	if len(a.asked) < maxQuestions {
		a.asked[answerKey{f.Reply.Dst.As16(), f.Reply.DstPort, f.Reply.SrcPort}] =
			question{f.Orig.Src.As16(), f.Orig.Dst.As16(), f.Reply.Src.As16(), f.Orig.DstPort}
	}
	if len(a.came) < maxQuestions {
		a.came[answerKey{f.Orig.Dst.As16(), f.Orig.DstPort, f.Orig.SrcPort}] = f.Orig.Src.As16()
	}
}

// strayRows are those who answered for others, most first.
func (a *Aggregate) strayRows(rows int) []snapshot.StrayUse {
	type pair struct {
		dest, target, from addrKey
		destPort, port     uint16
	}
	uses := map[pair]*snapshot.StrayUse{}
	for key, q := range a.asked {
		from, ok := a.came[key]
		if !ok || from == q.target {
			continue
		}
		p := pair{q.dest, q.target, from, q.destPort, key.port}
		if uses[p] == nil {
			uses[p] = &snapshot.StrayUse{From: from.addr(),
				Dest: snapshot.EndpointOf(netip.AddrPortFrom(q.dest.addr(), q.destPort)), Target: snapshot.EndpointOf(netip.AddrPortFrom(q.target.addr(), key.port))}
		}
		u := uses[p]
		u.Flows++
		// The same of several, however the table was ordered.
		if source, seen := q.source.addr(), key.client.addr(); u.Flows == 1 || cmp.Or(source.Compare(u.Source), seen.Compare(u.Seen)) < 0 {
			u.Source, u.Seen = source, seen
		}
	}
	var out []snapshot.StrayUse
	for _, u := range uses {
		out = append(out, *u)
	}
	slices.SortFunc(out, func(x, y snapshot.StrayUse) int {
		return cmp.Or(cmp.Compare(y.Flows, x.Flows), x.Dest.Compare(y.Dest), x.Target.Compare(y.Target), x.From.Compare(y.From))
	})
	return out[:min(len(out), rows)]
}

// addTarget counts a flow whose destination is translated.
func (a *Aggregate) addTarget(f *Flow, unreplied bool) {
	key := targetKey{f.Orig.Dst.As16(), f.Reply.Src.As16(), f.Orig.DstPort, f.Reply.SrcPort, f.Proto}
	n := a.targets[key]
	if n == nil {
		if len(a.targets) == maxTargets {
			return
		}
		n = &targetCount{}
		a.targets[key] = n
	}
	if unreplied {
		n.unanswered++
	} else {
		n.answered++
	}
}

// addControl counts a flow that agrees on further ones.
func (a *Aggregate) addControl(f *Flow) {
	key := controlKey{f.Orig.Src.As16(), f.Reply.Dst.As16(), f.Orig.Dst.As16(), f.Reply.Src.As16(), f.Orig.DstPort, f.Reply.SrcPort, f.Proto}
	n := a.controls[key]
	if n == nil {
		if len(a.controls) == maxControls {
			return
		}
		n = &controlCount{}
		a.controls[key] = n
	}
	n.entries++
	count(&n.helped, f.Has&HasHelper != 0)
}

// controlRows are the pairs of hosts with most such flows, those without a helper first.
func (a *Aggregate) controlRows(rows int) (out []snapshot.ControlUse) {
	for k, n := range a.controls {
		out = append(out, snapshot.ControlUse{Protocol: ProtoName(k.proto), Source: k.source.addr(), Seen: k.seen.addr(),
			Dest: snapshot.EndpointOf(netip.AddrPortFrom(k.dest.addr(), k.destPort)), Target: snapshot.EndpointOf(netip.AddrPortFrom(k.target.addr(), k.targetPort)),
			Entries: n.entries, Helped: n.helped})
	}
	slices.SortFunc(out, func(x, y snapshot.ControlUse) int {
		return cmp.Or(cmp.Compare(y.Entries-y.Helped, x.Entries-x.Helped), cmp.Compare(y.Entries, x.Entries), x.Source.Compare(y.Source), x.Dest.Compare(y.Dest),
			x.Target.Compare(y.Target), x.Seen.Compare(y.Seen), cmp.Compare(x.Protocol, y.Protocol))
	})
	return out[:min(len(out), rows)]
}

// targetRows are the targets with most unanswered flows.
func (a *Aggregate) targetRows(rows int) []snapshot.TargetUse {
	keys := slices.SortedFunc(maps.Keys(a.targets), func(x, y targetKey) int {
		return cmp.Or(cmp.Compare(a.targets[y].unanswered, a.targets[x].unanswered), cmp.Compare(a.targets[y].answered, a.targets[x].answered),
			bytes.Compare(x.dest[:], y.dest[:]), bytes.Compare(x.target[:], y.target[:]),
			cmp.Compare(x.destPort, y.destPort), cmp.Compare(x.targetPort, y.targetPort), cmp.Compare(x.proto, y.proto))
	})
	var out []snapshot.TargetUse
	for _, k := range keys[:min(len(keys), rows)] {
		out = append(out, snapshot.TargetUse{Protocol: ProtoName(k.proto), Dest: snapshot.EndpointOf(netip.AddrPortFrom(k.dest.addr(), k.destPort)),
			Target: snapshot.EndpointOf(netip.AddrPortFrom(k.target.addr(), k.targetPort)), Answered: a.targets[k].answered, Unanswered: a.targets[k].unanswered})
	}
	return out
}

// zoned says that a flow is in a zone of its own: what its addresses mean, and who
// translates them (Open vSwitch, a VRF), is not this namespace's to tell.
func (f *Flow) zoned() bool { return f.Has&(HasZone|HasZoneOrig|HasZoneReply) != 0 }

// halfOpen says whether it is a TCP connection that is not complete.
func (f *Flow) halfOpen() bool {
	return f.Proto == unix.IPPROTO_TCP && f.Has&HasState != 0 && (f.State == TCPSynSent || f.State == TCPSynRecv)
}

// maxHelpers is more than the kernel has; a text dump may name any.
const maxHelpers = 64

func count(n *uint64, yes bool) {
	if yes {
		*n++
	}
}

// Table returns what was counted, with at most rows rows in each top list.
func (a *Aggregate) Table(rows int) *snapshot.Table {
	t := &snapshot.Table{
		Entries:    a.entries,
		Labelled:   a.labelled,
		ByProtocol: map[string]uint64{},
		ByState:    map[string]uint64{},
		ByStatus:   map[string]uint64{},
	}
	for proto, n := range a.protos {
		if n > 0 {
			t.ByProtocol[ProtoName(uint8(proto))] = n
		}
	}
	for state, n := range a.states {
		if n > 0 {
			t.ByState[State(state).String()] += n
		}
	}
	for name, n := range map[string]uint64{
		"ASSURED": a.assured, "UNREPLIED": a.unreplied, "OFFLOAD": a.offload, "HW_OFFLOAD": a.hwOffload,
		"SNAT": a.snat, "DNAT": a.dnat,
	} {
		if n > 0 {
			t.ByStatus[name] = n
		}
	}
	t.Sources = talkers(&a.sources, rows)
	t.Destinations = talkers(&a.destinations, rows)
	for _, r := range a.ports.top(rows, func(x, y portKey) int {
		return cmp.Or(cmp.Compare(x.proto, y.proto), cmp.Compare(x.port, y.port))
	}) {
		t.DestPorts = append(t.DestPorts, snapshot.PortUse{
			Protocol: ProtoName(r.key.proto), Port: r.key.port,
			Entries: uint64(r.sure()), Unreplied: uint64(r.unreplied), Missed: uint64(r.missed),
		})
	}
	for _, r := range a.outside.top(rows, func(x, y outsideKey) int {
		return cmp.Or(bytes.Compare(x.outside[:], y.outside[:]), bytes.Compare(x.dest[:], y.dest[:]),
			cmp.Compare(x.port, y.port), cmp.Compare(x.proto, y.proto))
	}) {
		t.SNATPorts = append(t.SNATPorts, snapshot.SNATUse{
			Protocol: ProtoName(r.key.proto), Outside: r.key.outside.addr(),
			Dest: snapshot.EndpointOf(netip.AddrPortFrom(r.key.dest.addr(), r.key.port)),
			Used: uint64(r.sure()), MinPort: r.minPort, MaxPort: r.maxPort, Missed: uint64(r.missed),
		})
	}
	t.OneWay, t.Idle, t.RecentSeconds = a.oneWay, a.idle, a.Recent
	for _, r := range a.outsides.top(rows, func(x, y addrKey) int { return bytes.Compare(x[:], y[:]) }) {
		use := snapshot.OutsideUse{Addr: r.key.addr(), Entries: uint64(r.sure()), Recent: uint64(r.unreplied), Missed: uint64(r.missed)}
		if i, ok := a.silent.at[r.key]; ok {
			use.Unanswered = uint64(a.silent.rows[i].sure())
		}
		t.Outsides = append(t.Outsides, use)
	}
	t.Unanswered, t.Halfway = unansweredRows(&a.unanswered, rows), unansweredRows(&a.halfway, rows)
	t.Targets, t.Strays = a.targetRows(rows), a.strayRows(rows)
	t.Controls = a.controlRows(rows)
	if len(a.helpers) > 0 {
		t.ByHelper = maps.Clone(a.helpers)
	}
	return t
}

func unansweredRows(of *tally[unansweredKey], rows int) (out []snapshot.UnansweredUse) {
	for _, r := range of.top(rows, unansweredKey.compare) {
		out = append(out, snapshot.UnansweredUse{
			Protocol: ProtoName(r.key.proto), Source: r.key.source.addr(), SNAT: r.key.snat,
			Dest: snapshot.EndpointOf(netip.AddrPortFrom(r.key.dest.addr(), r.key.destPort)), Target: snapshot.EndpointOf(netip.AddrPortFrom(r.key.target.addr(), r.key.targetPort)),
			Entries: uint64(r.sure()), Recent: uint64(r.unreplied), Missed: uint64(r.missed),
		})
	}
	return out
}

func (k unansweredKey) compare(l unansweredKey) int {
	return cmp.Or(bytes.Compare(k.source[:], l.source[:]), bytes.Compare(k.dest[:], l.dest[:]), bytes.Compare(k.target[:], l.target[:]),
		cmp.Compare(k.destPort, l.destPort), cmp.Compare(k.targetPort, l.targetPort), cmp.Compare(k.proto, l.proto))
}

func talkers(t *tally[addrKey], rows int) []snapshot.Talker {
	var out []snapshot.Talker
	for _, r := range t.top(rows, func(x, y addrKey) int { return bytes.Compare(x[:], y[:]) }) {
		out = append(out, snapshot.Talker{Addr: r.key.addr(), Entries: uint64(r.sure()), Unreplied: uint64(r.unreplied), HalfOpen: uint64(r.halfOpen), Missed: uint64(r.missed)})
	}
	return out
}

func (k addrKey) addr() netip.Addr { return netip.AddrFrom16(k).Unmap() }

// TableOptions says what Tabulate counts.
type TableOptions struct {
	Filter Filter
	Lists  Lists
	Rows   int // of each list; snapshot.TopN by default
	// Timeouts under which a text dump was made; Tabulate reads those of the kernel.
	Timeouts Timeouts
	Recent   uint64 // how many seconds ago a recent flow's last packet was at most; snapshot.RecentSeconds by default
	Label    int    // see Aggregate.Label
	// Each, if not nil, gets every flow that is counted; it must not keep it.
	Each func(*Flow)
}

func (o TableOptions) rows() int {
	if o.Rows <= 0 {
		return snapshot.TopN
	}
	return o.Rows
}

// Tabulate counts the live table of the calling thread's namespace.
func Tabulate(ctx context.Context, o TableOptions) (*snapshot.Table, error) {
	a := NewAggregate(o.Lists)
	a.Timeouts, a.Recent, a.Label = ReadTimeouts(), o.Recent, o.Label
	res, err := Dump(ctx, o.Filter, func(f *Flow) error {
		a.Add(f)
		if o.Each != nil {
			o.Each(f)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	t := a.Table(o.rows())
	t.DumpSeconds, t.Interrupted = res.Seconds, res.Interrupted
	t.Malformed = res.Malformed
	return t, nil
}

// TabulateText counts a text dump; bad gets the lines that can't be read.
func TabulateText(ctx context.Context, r io.Reader, o TableOptions, bad func(*LineError)) (*snapshot.Table, TextResult, error) {
	a := NewAggregate(o.Lists)
	a.Timeouts, a.Recent, a.Label = o.Timeouts, o.Recent, o.Label
	res, err := ReadText(ctx, r, o.Filter, func(f *Flow) error {
		a.Add(f)
		if o.Each != nil {
			o.Each(f)
		}
		return nil
	}, bad)
	if err != nil {
		return nil, res, err
	}
	t := a.Table(o.rows())
	t.Malformed = res.Bad
	return t, res, nil
}
