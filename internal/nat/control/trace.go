// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net/netip"
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
	accel  bool
	where  string // "tc on eth0, tc on eth1"
	counts map[string]uint64
}

// OpenPacketReader returns nil where nothing of natkit's is attached. Close closes its copy of ns.
func OpenPacketReader(ref string) (_ *PacketReader, err error) {
	ns, err := netns.Open(ref)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ns.Close())
		}
	}()
	rec, err := recordOf(ns)
	switch {
	case errors.Is(err, ErrDown) || err == nil && rec.Accel == nil && rec.Engine != EngineEBPF:
		return nil, ns.Close()
	case err != nil:
		return nil, err
	}
	r := &PacketReader{ns: ns, accel: rec.Accel != nil}
	if r.accel {
		return r, nil
	}
	status, err := readStatus(ns, true)
	if err != nil {
		return nil, err
	}
	var where []string
	last := ""
	for _, i := range status.Interfaces {
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
	r.where = strings.Join(where, ", ")
	return r, r.count() // to compare with
}

// Close ends the reading.
func (r *PacketReader) Close() error { return r.ns.Close() }

// Forwarded says how a packet that was seen at a time of CLOCK_MONOTONIC came to have other ends,
// or was forwarded with those it has; "" if that was not here. before and after may be equal.
func (r *PacketReader) Forwarded(before, after snapshot.TraceTuple, at uint64) (text string) {
	if r.accel {
		_ = AccelEntries(r.ns, func(e *rulefile.AccelEntry) bool { // of what can't be read nothing is known
			if e.Protocol.String() == before.Protocol && e.Source.AddrPort == before.Source && e.Destination.AddrPort == before.Destination &&
				e.SourceAfter.AddrPort == after.Source && e.DestinationAfter.AddrPort == after.Destination {
				text = "accel: forwarded by fast-path entry, before the kernel stack"
			}
			return text == ""
		})
		return text
	}
	_ = r.sessions(func(s *rulefile.Session) bool {
		from, to, reply := ends(s)
		if (before == from && after == to) || (before == reply && after == from.Turned()) {
			text = r.describe(s, at)
		}
		return text == ""
	})
	return text
}

// Becomes is what a packet's ends become here.
func (r *PacketReader) Becomes(before snapshot.TraceTuple) (after snapshot.TraceTuple, known bool) {
	if r.accel {
		return after, false // connection tracking has it, too
	}
	_ = r.sessions(func(s *rulefile.Session) bool {
		switch from, to, reply := ends(s); before {
		case from:
			after, known = to, true
		case reply:
			after, known = from.Turned(), true
		}
		return !known
	})
	return after, known
}

func (r *PacketReader) sessions(fn func(*rulefile.Session) bool) error {
	e, err := r.open()
	if err != nil {
		return err
	}
	return errors.Join(e.Sessions(fn), e.Close())
}

func (r *PacketReader) open() (*datapath.Engine, error) { return Open(r.ns) }

// ends are those of a session's packets as they arrive and leave, and of its replies as they arrive.
func ends(s *rulefile.Session) (from, to, reply snapshot.TraceTuple) {
	or := func(a, b netip.AddrPort) netip.AddrPort {
		if a.IsValid() {
			return a
		}
		return b
	}
	from = snapshot.TraceTuple{Protocol: s.Protocol.String(), Source: s.Source.AddrPort, Destination: s.Destination.AddrPort}
	to = snapshot.TraceTuple{Protocol: from.Protocol, Source: or(s.SourceAfter.AddrPort, from.Source), Destination: or(s.DestinationAfter.AddrPort, from.Destination)}
	return from, to, to.Turned()
}

// A packet made a session that is not older than it, but for the jiffies that the engine's clock
// counts, and not much younger.
const createdBefore, createdWithin = 15 * time.Millisecond, 50 * time.Millisecond

func (r *PacketReader) describe(s *rulefile.Session, at uint64) string {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it can't fail
	made := time.Duration(now.Nano()) - time.Duration(s.Age)
	text := "eBPF engine (" + r.where + ")"
	if rules, err := Rules(r.ns); err == nil {
		if i := slices.IndexFunc(rules, func(u RuleUse) bool { return u.ID == s.Rule }); i >= 0 {
			text += fmt.Sprintf(": rule %d `%s`", i+1, rules[i].Rule)
		}
	}
	if since := made - time.Duration(at); since > -createdBefore && since < createdWithin {
		return text + ", session created"
	}
	return text + ", session found"
}

// Refused says why the engine dropped packets since it was asked last; "" if it dropped none.
func (r *PacketReader) Refused() string {
	if r.accel {
		return ""
	}
	was := r.counts
	if r.count() != nil {
		return ""
	}
	var reasons []string
	for _, reason := range rulefile.Reasons {
		if more := r.counts[reason.Name] - was[reason.Name]; reason.Kind == "dropped" && more > 0 {
			reasons = append(reasons, fmt.Sprintf("%s: %s (%s)", reason.Name, reason.Means, plural.Count(more, "packet")))
		}
	}
	if reasons == nil {
		return ""
	}
	return "eBPF engine (" + r.where + "): " + strings.Join(reasons, "; or ")
}

func (r *PacketReader) count() error {
	e, err := r.open()
	if err != nil {
		return err
	}
	stats, err := e.Stats()
	if err = errors.Join(err, e.Close()); err == nil {
		r.counts = stats.Reasons
	}
	return err
}
