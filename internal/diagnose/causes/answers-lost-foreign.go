// SPDX-License-Identifier: Apache-2.0

package causes

// Sources translated to an address that no interface here has.

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

// judgeForeignSource tells of sources translated to an address that nobody here answers for.
func judgeForeignSource(f facts) *verdict {
	t := f.Conntrack.Table
	if t == nil {
		return nil
	}
	var unanswered, recent uint64
	var example snapshot.UnansweredUse
	for _, u := range t.Unanswered {
		if u.SNAT && u.Entries < implausible && u.Recent <= u.Entries {
			unanswered, recent = saturate(unanswered, u.Entries), saturate(recent, u.Recent)
			if !example.Source.IsValid() {
				example = u
			}
		}
	}
	for _, o := range t.Outsides {
		l, onLink := f.linkTo(o.Addr)
		if o.Entries >= implausible || o.Entries < lostFew || !onLink || f.own(o.Addr) || !f.given(o.Addr) || share(min(unanswered, o.Entries), o.Entries) < lostMost {
			continue
		}
		if o.Recent > 0 && share(min(o.Unanswered, o.Recent), o.Recent) < lostMost || o.Recent == 0 && len(t.Outsides) > 1 {
			continue // they have replies, or others' flows have none
		}
		if o.Recent > 0 {
			recent = min(recent, o.Unanswered)
		}
		v := &verdict{impact: float64(recent)}
		v.Severity = Warning
		if recent >= lostFew {
			v.Severity = Critical
		}
		v.Title = fmt.Sprintf("%s translated to %s saw no reply: no interface has it (network on %s)", number(o.Entries, "flow"), o.Addr, l.Name)
		v.Evidence = []Evidence{
			{"flows translated to " + o.Addr.String(), strconv.FormatUint(o.Entries, 10), fromDump},
			{"translated flows without a reply", fmt.Sprintf("%d, %d with a packet in the last %d s", unanswered, recent, f.recent()), fromDump},
		}
		for _, p := range l.Addresses {
			v.Evidence = append(v.Evidence, Evidence{"address of " + l.Name, p.String(), fromLinks})
		}
		if example.Source.IsValid() {
			v.Evidence = append(v.Evidence, Evidence{"one of them", fmt.Sprintf("%s %s to %s", example.Protocol, example.Source, example.Dest), fromDump})
		}
		v.Why = "Replies are sent to the translated address. On a network of its own, this machine must reply to ARP or neighbour discovery for that address, which it does only for addresses on an interface."
		bits := o.Addr.BitLen()
		v.Remedy = []string{"# if this machine may use the address, add it to the interface (and to your network configuration):",
			f.run(fmt.Sprintf("ip addr add %s/%d dev %s", o.Addr, bits, quote(l.Name))),
			"# if not, correct the rule that translates to it:"}
		for _, c := range f.Chains {
			if c.NATRules["snat"] > 0 {
				v.Remedy = append(v.Remedy, f.run(listChain(c)))
			}
		}
		return v
	}
	return nil
}
