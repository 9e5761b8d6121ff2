// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/snapshot"
)

var linkDown = Cause{
	Code:       "link-down",
	Title:      "An interface that has addresses is down",
	Severities: []Severity{Advice, Warning},
	Needs:      []string{snapshot.CanInterfaces, snapshot.CanConntrackDump, snapshot.CanSysctls},
	Symptom:    "A whole network behind this machine is dead, and nothing is dropped: no packet of it comes in.",
	Proof: fmt.Sprintf("This machine forwards, and an interface with addresses of its own is switched off, or is on and has no carrier. It is advice; a warning, where connection tracking has at least %d entries of sources in its network: they were there a moment ago.",
		downFew),
	Lookalike: "Bridges without a carrier: their last container has ended. Interfaces without addresses, and hosts that do not forward.",
	Cure:      "Switching the interface on; or the cable, the switch's port, the other end of a virtual pair.",
	judge:     judgeLinkDown,
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
		n := f.entriesFrom(i)
		if !found || n > entries {
			down, network, entries, found = i, i.Addresses[at].Masked(), n, true
		}
	}
	if !found {
		return nil
	}
	v := &verdict{harm: float64(entries)}
	v.Severity = Advice
	if entries >= downFew {
		v.Severity = Warning
	}
	state := "switched off"
	v.Remedy = []string{"# switch it on, if it is to be used; its own network's route comes back with it, others must be added again:", f.run("ip link set dev " + quote(down.Name) + " up")}
	if down.Up {
		state = "without a carrier"
		v.Remedy = []string{"# nothing is at its other end: the cable, the switch's port; of a virtual pair, the other interface, which is down or gone:", f.run("ip -d link show dev " + quote(down.Name))}
	}
	v.Title = fmt.Sprintf("%s, with %s, is %s", down.Name, network, state)
	v.Evidence = []Evidence{{"state of " + down.Name, state, fromLinks}, {"network on it", network.String(), fromLinks}}
	if entries > 0 {
		v.Evidence = append(v.Evidence, Evidence{"entries of sources in that network at least", strconv.FormatUint(entries, 10), fromDump})
	}
	v.Why = "No packet of that network comes in, and what is for it is sent by another route, or by none. Rules and translation do not matter."
	v.Verify = f.look(f.run("ip -br link"))
	return v
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
