// SPDX-License-Identifier: Apache-2.0

package causes

// Nobody outside replies to anything.

import (
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
)

const (
	// Where nobody outside answers at all, it is not they. What expects no answer, and
	// scans, are spread so over many destinations as well, but are not all there is.
	nothingFew          = 20
	nothingMost         = 0.80
	nothingDestinations = 3
	nothingDeaf         = 5 // where nothing at all comes in by the interface that they leave by
)

// answersExpected are the UDP ports of what is always answered: DNS, time, QUIC.
var answersExpected = map[uint16]bool{53: true, 123: true, 443: true}

// opening are flows with translated sources that nobody has replied to, of the last seconds.
type opening struct {
	flows        uint64
	example      snapshot.UnansweredUse
	destinations map[netip.Addr]bool
}

func (f facts) opening() opening {
	out := opening{destinations: map[netip.Addr]bool{}}
	for _, u := range f.Conntrack.Table.Unanswered {
		if !u.SNAT || u.Target != u.Dest || u.Recent == 0 || u.Recent >= implausible || u.Protocol != "tcp" && !answersExpected[u.Dest.Port()] {
			continue
		}
		if out.flows == 0 {
			out.example = u
		}
		out.flows = saturate(out.flows, u.Recent)
		out.destinations[u.Dest.Addr()] = true
	}
	return out
}

// few says that it may be the destinations that are down, unless others reply.
func (o opening) few() bool { return len(o.destinations) < nothingDestinations }

// judgeNothingBack tells that nobody outside answers anything: the fault lies between here and
// the next router, or in whose this machine's address is there.
func judgeNothingBack(f facts) *verdict {
	t := f.Conntrack.Table
	if t == nil || f.Drops == nil || !f.translatesSources() {
		return nil
	}
	open, deaf := f.opening(), f.deafLinks()
	if open.flows < nothingFew && (len(deaf) == 0 || open.flows < nothingDeaf) {
		return nil
	}
	for _, row := range f.Drops.Rows {
		if !row.Benign && f.here(row.Netns) && row.Count < implausible && row.Count >= open.flows/2 {
			return nil // what drops them, or the answers, is told by its own cause
		}
	}
	for _, o := range t.Outsides {
		least := uint64(nothingFew)
		if deaf[f.holder(o.Addr)] {
			least = nothingDeaf
		}
		if f.own(o.Addr) && o.Recent < implausible && o.Unanswered >= least && o.Unanswered <= o.Recent && share(o.Unanswered, o.Recent) >= nothingMost && (!open.few() || o.Unanswered == o.Recent) {
			return f.nothingVerdict(open, o)
		}
	}
	return nil
}

// nothingVerdict is what was seen of flows that leave as o.
func (f facts) nothingVerdict(open opening, o snapshot.OutsideUse) *verdict {
	out := f.holder(o.Addr)
	if f.quietHolder(out) {
		out = f.wayOut(open.example.Dest.Addr(), out)
	}
	v := &verdict{impact: float64(o.Unanswered)}
	v.Severity = Critical
	v.Title = fmt.Sprintf("%d of %s sent as %s in the last %d s saw no reply, from any destination", o.Unanswered, number(o.Recent, "flow"), o.Addr, f.recent())
	v.Why = "Packets leave translated, nothing here drops them, and no destination replies. Either they do not reach the next router (wrong hardware address, VLAN, cable), or replies go elsewhere: another machine has this address, or the router has lost its route to it, or the line behind it is down."
	if open.few() {
		v.Severity = Warning
		v.Title = fmt.Sprintf("none of %s sent as %s in the last %d s saw a reply", number(o.Recent, "flow"), o.Addr, f.recent())
		v.Why += " Or the few destinations are down themselves."
	}
	v.Evidence = []Evidence{
		{"flows translated to " + o.Addr.String() + " with a packet in the last seconds, and those without a reply", fmt.Sprintf("%d, %d", o.Recent, o.Unanswered), fromDump},
		{"destinations of flows without a reply, at least", strconv.Itoa(len(open.destinations)), fromDump},
		{"packets that arrived on " + out + ", and left", f.inAndOut(out), fromLinks},
		{"one of them", fmt.Sprintf("%s %s to %s", open.example.Protocol, open.example.Source, open.example.Dest), fromDump},
	}
	v.Remedy = []string{"# is the next router's hardware address right, and not an old permanent entry?", f.run("ip neigh show dev " + quote(out)),
		"# does another machine have this address?", f.run(fmt.Sprintf("arping -D -c 3 -I %s %s", quote(out), o.Addr)) + " || echo another machine has it",
		"# do packets arrive, and are there errors?", f.run("ip -s link show dev " + quote(out)),
		"# which is the next router, and does it reply to ping?", f.run("ip route get " + open.example.Dest.Addr().String())}
	return v
}

// inAndOut is what came in by an interface and left by it.
func (f facts) inAndOut(name string) string {
	l, _ := f.link(name)
	return fmt.Sprintf("%d, %d", l.RxPackets, l.TxPackets)
}

// deafLinks are interfaces that packets left by in the window, and not one came in by.
func (f facts) deafLinks() map[string]bool {
	out := map[string]bool{}
	for _, l := range f.links() {
		if l.RxPackets == 0 && l.TxPackets >= nothingDeaf && l.TxPackets < implausible {
			out[l.Name] = true
		}
	}
	return out
}
