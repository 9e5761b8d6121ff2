// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

var linkDown = Cause{
	Code:     "link-down",
	Title:    "An interface with addresses is down",
	Headline: "A whole network behind the router is dead: interface DOWN, NO-CARRIER",
	Search: []string{
		"NO-CARRIER",
		"state DOWN",
		"ip link: linkdown",
		"NIC Link is Down",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"next-hop-silent", "answers-lost", "backend-silent"},
	Needs:      []string{snapshot.CanInterfaces, snapshot.CanConntrackDump, snapshot.CanSysctls, snapshot.CanDrops},
	Symptom:    "A whole network behind this machine is dead. No drop is counted, because no packet arrives.",
	Proof: fmt.Sprintf("This machine forwards, and an interface with addresses is switched off, or is on without a carrier. It is advice. It is a warning if connection tracking has at least %d entries with sources in its network: they were there a moment ago. It is critical if at least %d packets during the window were to leave by it.",
		downFew, downFew),
	FalsePositive: "Bridges without a carrier whose last container has ended; interfaces without addresses; hosts that do not forward.",
	Cure:          "Set the interface up, or check the cable, the switch port, or the other end of the virtual pair.",
	judge:         judgeLinkDown,
}

const downFew = 5

func judgeLinkDown(f facts) *verdict {
	if !f.forwards() || len(f.links()) == 0 {
		return nil
	}
	var down snapshot.Interface
	var network netip.Prefix
	entries, found := uint64(0), false
	for _, i := range f.Interfaces {
		if i.Name == "lo" || i.Up && (!i.NoCarrier || i.Kind == "bridge") {
			continue
		}
		at := slices.IndexFunc(i.Addresses, func(p netip.Prefix) bool { return p.IsValid() && !p.Addr().IsLinkLocalUnicast() })
		if at < 0 {
			continue
		}
		n := saturate(f.entriesFrom(i), f.lostBy(i.Name))
		if !found || n > entries {
			down, network, entries, found = i, i.Addresses[at].Masked(), n, true
		}
	}
	if !found {
		return nil
	}
	v := &verdict{impact: float64(entries)}
	v.Severity = Advice
	lost := f.lostBy(down.Name)
	entries -= min(entries, lost)
	switch {
	case lost >= downFew:
		v.Severity = Critical
	case entries >= downFew:
		v.Severity = Warning
	}
	state := "switched off"
	v.Remedy = []string{"# set it up, if it is meant to be used; the route of its own network returns with it, others must be added again:", f.run("ip link set dev " + quote(down.Name) + " up")}
	if down.Up {
		state = "without a carrier"
		v.Remedy = []string{"# check its other end: the cable and the switch port; for a virtual pair, the other interface, which is down or gone:", f.run("ip -d link show dev " + quote(down.Name))}
	}
	v.Title = fmt.Sprintf("%s, with %s, is %s", down.Name, network, state)
	v.Evidence = []Evidence{{"state of " + down.Name, state, fromLinks}, {"network on it", network.String(), fromLinks}}
	if entries > 0 {
		v.Evidence = append(v.Evidence, Evidence{"entries with sources in that network, at least", strconv.FormatUint(entries, 10), fromDump})
	}
	if lost > 0 {
		v.Title += fmt.Sprintf(": %s for it lost %s", number(lost, "packet"), f.window())
		v.Evidence = append(v.Evidence, Evidence{"packets that were to leave on it and were dropped", strconv.FormatUint(lost, 10), fromTracer})
	}
	v.Why = "No packet from that network arrives, and packets for it take another route, or none. Rules and NAT are not the cause."
	v.Verify = f.look(f.run("ip -br link"))
	return v
}

// lostBy is how many packets were dropped that were to leave by an interface: no neighbour answers there,
// or it is not ready.
func (f facts) lostBy(link string) (n uint64) {
	if f.Drops == nil {
		return 0
	}
	for _, row := range f.Drops.Rows {
		if row.Interface == link && !row.Benign && row.Count < implausible && f.here(row.Netns) && (row.Cause == snapshot.CauseNeighbour || row.Reason == "DEV_READY") {
			n = saturate(n, row.Count)
		}
	}
	return n
}

// entriesFrom is how many entries of connection tracking have a source in an interface's
// networks, of those sources that have most.
func (f facts) entriesFrom(i snapshot.Interface) (n uint64) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return 0
	}
	for _, t := range f.Conntrack.Table.Sources {
		if t.Entries < implausible && !f.own(t.Addr) && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.IsValid() && p.Masked().Contains(t.Addr) }) {
			n = saturate(n, t.Entries)
		}
	}
	return n
}
