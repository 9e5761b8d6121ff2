// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

var answeredFromElsewhere = Cause{
	Code:     "answered-from-elsewhere",
	Title:    "A UDP server replies from another address than the one that clients asked",
	Headline: "UDP reply from unexpected source: the server replies from another address",
	Search: []string{
		"reply from unexpected source",
		";; reply from unexpected source: 192.0.2.2#53, expected 192.0.2.1#53",
		"TLS Error: Unroutable control packet received",
		"conntrack: [UNREPLIED]",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"answers-lost", "backend-silent"},
	Needs:      []string{snapshot.CanConntrackDump, snapshot.CanInterfaces},
	Symptom:    "A UDP service (DNS, OpenVPN, SIP, SNMP, TFTP) with several addresses does not work at one of them, although a capture shows its replies. Without NAT on the path it works for some clients.",
	Proof: fmt.Sprintf("UDP flows of the last %d s have no reply, while another address sent to the port that waits for one, from the port that was asked: %d or more flows to one destination are a warning, critical if almost no flow has a reply there; fewer are advice.",
		snapshot.RecentSeconds, fewFailures),
	FalsePositive: "Endpoints that use the same port on both sides (NTP, IKE), either of which may start; programs that talk to many others from one port, each of which looks like another's reply at most once.",
	Cure:          "Let the server reply from the address that was asked: it listens on each address separately, or with its option for that. Or set that address as the source of its route to the clients.",
	judge:         judgeStrays,
}

func judgeStrays(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	var worst snapshot.StrayUse
	for _, u := range t.Strays {
		if u.Flows < implausible && u.Flows > worst.Flows && u.Source.IsValid() && u.Seen.IsValid() && u.Dest.IsValid() && u.Target.IsValid() && u.From.IsValid() && u.From != u.Target.Addr() {
			worst = u
		}
	}
	if worst.Flows == 0 {
		return nil
	}
	v := &verdict{impact: float64(worst.Flows)}
	v.Severity = Advice
	if worst.Flows >= fewFailures {
		v.Severity = Warning
		if slices.ContainsFunc(t.Destinations, func(d snapshot.Talker) bool {
			return d.Addr == worst.Dest.Addr() && share(d.Unreplied, d.Entries) >= lostMost
		}) {
			v.Severity = Critical
		}
	}
	v.Title = fmt.Sprintf("UDP replies for %s come from %s; no flow matches them", worst.Target, worst.From)
	v.Evidence = []Evidence{
		{"flows without a reply for which such a packet arrived", strconv.FormatUint(worst.Flows, 10), fmt.Sprintf("%s: with a packet in the last %d s", fromDump, f.recent())},
		{"one of them", fmt.Sprintf("udp %s to %s", worst.Source, worst.Dest), fromDump},
	}
	if worst.Target != worst.Dest {
		v.Evidence = append(v.Evidence, Evidence{"translated to", worst.Target.String(), fromDump})
	}
	v.Why = "A UDP socket that is bound to no address replies from the address that its route to the client prefers, not from the one that the client asked. Connection tracking matches replies by the address that was asked: a packet from another address starts a new flow, is not translated back, and does not reach the client."
	port := worst.Target.Port()
	v.Remedy = []string{fmt.Sprintf("# on the server: let the program listen on %s itself and not on all addresses, or reply from the address that was asked (OpenVPN: multihome; unbound: interface-automatic)", worst.Target.Addr())}
	listens := fmt.Sprintf("ss -lunp 'sport = :%d'", port)
	route := fmt.Sprintf("ip route get %s", worst.Seen)
	if f.own(worst.Target.Addr()) || f.own(worst.From) {
		listens, route = f.run(listens), f.run(route)
	}
	v.Remedy = append(v.Remedy, listens,
		fmt.Sprintf("# or set that address as the source of its route to the clients (ip route change ... src %s); the current source, on the server:", worst.Target.Addr()), route)
	v.Verify = f.look(f.run(fmt.Sprintf("conntrack -L%s -p udp --orig-src %s --sport %d", conntrackFamily(worst.From), worst.From, port)))
	return v
}
