// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// PacketReader answers for single packets what the eBPF engine or the acceleration of a namespace
// did to them. It reads maps after the packet and changes nothing.
type PacketReader struct {
	ns     *netns.Handle
	record os.FileInfo // of what is open
	counts map[string]uint64
	packetPrograms
}

// packetPrograms is what is open: an engine or an accelerator, neither where both are off.
type packetPrograms struct {
	engine *datapath.Engine
	finder *datapath.SessionFinder
	where  string                     // "tc on eth0, tc on eth1"
	unseen bool                       // some are at XDP
	rules  map[rulefile.RuleID]string // "rule 1 `masquerade: any`"

	creators map[snapshot.TraceTuple]uint64 // when the packet came that created the session of these ends

	accel *datapath.Accelerator
}

func (p *packetPrograms) close() error {
	var errs []error
	if p.finder != nil {
		errs = append(errs, p.finder.Close())
	}
	if p.engine != nil {
		errs = append(errs, p.engine.Close())
	}
	if p.accel != nil {
		errs = append(errs, p.accel.Close())
	}
	*p = packetPrograms{}
	return errors.Join(errs...)
}

// OpenPacketReader returns nil where nothing of natkit's is attached. Close closes its copy of ns.
func OpenPacketReader(ref string) (*PacketReader, error) {
	ns, err := netns.Open(ref)
	if err != nil {
		return nil, err
	}
	r := &PacketReader{ns: ns}
	err = r.current()
	if none := errors.Is(err, ErrDown) || err == nil && r.engine == nil && r.accel == nil; none || err != nil {
		if none {
			err = nil
		}
		return nil, errors.Join(err, r.Close())
	}
	if r.engine != nil {
		if err := r.count(); err != nil { // to compare with
			return nil, errors.Join(err, r.Close())
		}
	}
	return r, nil
}

// Close ends the reading.
func (r *PacketReader) Close() error { return errors.Join(r.close(), r.ns.Close()) }

// current opens what is attached, unless it is open: the record is another file when that has changed.
func (r *PacketReader) current() error {
	record, err := os.Stat(instancePath(r.ns.Inode(), ".json"))
	if err == nil && r.record != nil && os.SameFile(record, r.record) && record.ModTime().Equal(r.record.ModTime()) {
		return nil
	}
	r.record = nil
	if err := r.close(); err != nil {
		return err
	}
	if err := r.open(); err != nil {
		return errors.Join(err, r.close())
	}
	r.record = record
	return nil
}

func (r *PacketReader) open() error {
	rec, err := recordOf(r.ns)
	switch {
	case err != nil:
		return err
	case rec.Accel != nil:
		r.accel, err = datapath.OpenAccelerator(pinsOf(r.ns.Inode()))
		return err
	case rec.Engine != EngineEBPF:
		return nil
	}
	status, err := readStatus(r.ns, true)
	if err != nil {
		return err
	}
	r.where = hooksText(status.Interfaces)
	r.unseen = slices.ContainsFunc(status.Interfaces, func(i InterfaceStatus) bool { return slices.Contains(i.Hooks, string(AttachXDP)) })
	_, file, err := inUse(r.ns)
	if err != nil {
		return err
	}
	ids := file.RuleIDs()
	r.rules = make(map[rulefile.RuleID]string, len(ids))
	for i, id := range ids {
		r.rules[id] = fmt.Sprintf("rule %d `%s`", i+1, file.Rules[i].String())
	}
	if r.engine, err = Open(r.ns); err != nil {
		return err
	}
	r.finder, err = r.engine.FindSessions()
	return err
}

// hooksText is where programs are attached: "tc and egress on eth0, eth1, xdp on eth2".
func hooksText(interfaces []InterfaceStatus) string {
	var where []string
	last := ""
	for _, i := range interfaces {
		hooks := strings.Join(i.Hooks, " and ")
		switch {
		case hooks == "":
		case hooks == last:
			where = append(where, i.Name)
		default:
			where = append(where, hooks+" on "+i.Name)
		}
		last = hooks
	}
	return strings.Join(where, ", ")
}

// Forwarded says how a packet that was seen at a time of CLOCK_MONOTONIC came to have other ends,
// or was forwarded with those it has; "" if that was not here. before and after may be equal.
func (r *PacketReader) Forwarded(before, after snapshot.TraceTuple, at uint64) string {
	if r.current() != nil { // of what can't be read nothing is known
		return ""
	}
	if r.accel != nil {
		protocol, err := rulefile.ParseProtocol(before.Protocol)
		if err != nil {
			return ""
		}
		e, err := r.accel.AccelEntry(protocol, before.Source, before.Destination)
		if err == nil && e != nil && e.SourceAfter.AddrPort == after.Source && e.DestinationAfter.AddrPort == after.Destination {
			return "accel: forwarded by fast-path entry, before the kernel stack"
		}
		return ""
	}
	s, becomes := r.session(before)
	if s == nil || becomes != after {
		return ""
	}
	return r.describe(s, before, at)
}

// session is the session of packets with these ends, nil if there is none, and what their ends become.
func (r *PacketReader) session(before snapshot.TraceTuple) (s *rulefile.Session, after snapshot.TraceTuple) {
	protocol, err := rulefile.ParseProtocol(before.Protocol)
	if err != nil || r.finder == nil {
		return nil, after
	}
	sessions, _ := r.finder.Of(protocol, before.Source, before.Destination)
	if before.ID != 0 { // the engine has it for the port of the end that asked
		asks, _ := r.finder.Of(protocol, netip.AddrPortFrom(before.Source.Addr(), before.ID), before.Destination)
		replies, _ := r.finder.Of(protocol, before.Source, netip.AddrPortFrom(before.Destination.Addr(), before.ID))
		sessions = append(asks, replies...)
	}
	for i := range sessions {
		switch from, to, reply := ends(&sessions[i]); before {
		case from:
			return &sessions[i], to
		case reply:
			return &sessions[i], from.Turned()
		}
	}
	return nil, after
}

// ends are those of a session's packets as they arrive and leave, and of its replies as they arrive.
func ends(s *rulefile.Session) (from, to, reply snapshot.TraceTuple) {
	or := func(a, b netip.AddrPort) netip.AddrPort {
		if a.IsValid() {
			return a
		}
		return b
	}
	from = tupleOf(s.Protocol, s.Source.AddrPort, s.Destination.AddrPort)
	to = tupleOf(s.Protocol, or(s.SourceAfter.AddrPort, s.Source.AddrPort), or(s.DestinationAfter.AddrPort, s.Destination.AddrPort))
	return from, to, to.Turned()
}

// tupleOf is what a packet with these ends of a session has: ICMP has an identifier for the port of the end that asked.
func tupleOf(protocol rulefile.Protocol, source, destination netip.AddrPort) snapshot.TraceTuple {
	t := snapshot.TraceTuple{Protocol: protocol.String(), Source: source, Destination: destination}
	if protocol == rulefile.ICMP {
		t.ID = source.Port()
		t.Source, t.Destination = netip.AddrPortFrom(source.Addr(), 0), netip.AddrPortFrom(destination.Addr(), 0)
	}
	return t
}

// A packet created a session that is not older than it, but for the jiffies that the engine's clock
// counts, and not much younger.
const createdBefore, createdWithin = 15 * time.Millisecond, 50 * time.Millisecond

// maxCreators bounds what a long trace remembers.
const maxCreators = 4096

// creates reports whether a packet that was seen at a time created the session of these ends, which
// began at a time. A short session has all of its packets near its beginning: the first created it.
func (p *packetPrograms) creates(ends snapshot.TraceTuple, began time.Duration, at uint64) bool {
	near := func(at uint64) bool {
		since := began - time.Duration(at)
		return since > -createdBefore && since < createdWithin
	}
	if !near(at) {
		return false
	}
	if by, ok := p.creators[ends]; ok && near(by) {
		return at <= by
	}
	if p.creators == nil || len(p.creators) == maxCreators {
		p.creators = make(map[snapshot.TraceTuple]uint64)
	}
	p.creators[ends] = at
	return true
}

func (r *PacketReader) describe(s *rulefile.Session, before snapshot.TraceTuple, at uint64) string {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it can't fail
	began := time.Duration(now.Nano()) - time.Duration(s.Age)
	text := "eBPF engine (" + r.where + ")"
	if rule := r.rules[s.Rule]; rule != "" {
		text += ": " + rule
	}
	if from, _, _ := ends(s); before == from && r.creates(from, began, at) { // a reply creates none
		return text + ", session created"
	}
	return text + ", session found"
}

// Refused says why the engine dropped packets since it was asked last; "" if it dropped none.
func (r *PacketReader) Refused() string {
	was := r.counts
	if r.current() != nil || r.engine == nil || r.count() != nil {
		return ""
	}
	var reasons []string
	for _, reason := range rulefile.Reasons {
		now := r.counts[reason.Name]
		if more := now - min(was[reason.Name], now); reason.Kind == "dropped" && more > 0 { // less is of another engine
			reasons = append(reasons, fmt.Sprintf("%s: %s (%s)", reason.Name, reason.Means, plural.Count(more, "packet")))
		}
	}
	if reasons == nil {
		return ""
	}
	return "eBPF engine (" + r.where + "): " + strings.Join(reasons, "; or ")
}

// Unseen reports whether the engine drops packets at XDP.
func (r *PacketReader) Unseen() bool { return r.unseen }

func (r *PacketReader) count() error {
	counts, err := r.engine.Packets()
	if err == nil {
		r.counts = counts
	}
	return err
}
