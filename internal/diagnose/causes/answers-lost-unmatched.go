// SPDX-License-Identifier: Apache-2.0

package causes

// Replies that come in and match no entry: a conntrack zone of one direction, or untracked replies.

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// judgeUnmatched tells of answers that come in and find no entry.
func judgeUnmatched(f facts) *verdict {
	n, rows := f.unmatched()
	if n == 0 {
		return nil
	}
	v := &verdict{impact: float64(n), explains: []string{"backend-silent", "conntrack-invalid-reset"}}
	v.Severity = Critical
	replies := "1 reply"
	if n != 1 {
		replies = fmt.Sprintf("%d replies", n)
	}
	v.Title = fmt.Sprintf("%s to translated flows arrived %s and matched no conntrack entry", replies, f.window())
	v.Evidence = []Evidence{
		{"replies to this machine's own address without a matching entry or socket (NO_SOCKET, or dropped by a rule)", strconv.FormatUint(n, 10) + cameInBy(rows), fromTracer},
		{"entries without a reply", fmt.Sprintf("%d of %d", f.Conntrack.Table.ByStatus["UNREPLIED"], f.Conntrack.Table.Entries), fromDump + ": UNREPLIED"},
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	v.Why = "A reply is translated back by the entry of its connection. The lookup sees only entries of the reply's own conntrack zone: if a rule sets the zone by interface alone, the two directions are in different zones and never match. A reply that a rule excludes from connection tracking (notrack) is not looked up at all."
	protocol, family := "tcp", ""
	if t := samples(rows); len(t) > 0 {
		protocol, family = t[0].protocol, conntrackFamily(t[0].dest.Addr())
	}
	v.Remedy = []string{"# the zones of the entries:", f.run("conntrack -L" + family + " -p " + protocol),
		"# and the rules that set them; set the zone for both directions, or for the original one only (ct original zone set), and do not exclude replies from tracking:",
		f.run("nft -a list ruleset | grep -n -i -e zone -e notrack"), f.run("iptables-legacy-save -t raw | grep -n -i -e zone -e notrack")}
	return v
}

// unmatched is how many replies came in for an address of this machine that translated flows leave
// with, and found nobody, or a rule about what is for this machine.
func (f facts) unmatched() (n uint64, rows []snapshot.Drop) {
	if f.Drops == nil || f.Conntrack == nil || f.Conntrack.Table == nil {
		return 0, nil
	}
	t := f.Conntrack.Table
	tcp, over := t.ByProtocol["tcp"], t.ByState["TIME_WAIT"] // connections of before the fault, or of others, that are over
	waiting := t.ByState["SYN_SENT"]
	connecting := waiting >= lostFew && share(waiting, tcp-min(tcp, over)) >= silentShare
	for _, row := range f.Drops.Rows {
		// What a rule dropped as it arrived was not looked up.
		ruled := row.Cause == snapshot.CauseRule && f.hookOf(row) == "input" && !slices.ContainsFunc(row.Packets, func(p snapshot.DroppedPacket) bool { return p.Stage == snapshot.StageArrived })
		if row.Reason != "NO_SOCKET" && !ruled || row.Benign || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		replies, some := only(row, func(s string) bool {
			packet, ok := parseSample(s)
			switch {
			case !ok || !f.own(packet.dest.Addr()):
				return false
			case packet.protocol == "udp":
				foreseen := slices.ContainsFunc(t.Controls, func(c snapshot.ControlUse) bool { return opensData(c, packet, s) })
				return !foreseen && (f.silentAt(packet.source.Addr()) || f.silentFrom(packet.source, s)) && judgeUDPShort(f) == nil
			}
			return connecting && packet.protocol == "tcp" && strings.Contains(s, " SYN,ACK")
		})
		if some {
			n = saturate(n, replies.Count)
			rows = append(rows, replies)
		}
	}
	if n < lostFew || t.ByStatus["SNAT"] == 0 {
		return 0, nil
	}
	return n, rows
}

// silentAt says whether flows go to an address that next to none of them has a reply from, as far
// as their entries know.
func (f facts) silentAt(addr netip.Addr) bool {
	for _, d := range f.Conntrack.Table.Destinations {
		if d.Addr == addr {
			return d.Unreplied > 0 && d.Unreplied <= d.Entries && share(d.Unreplied, d.Entries) >= lostMost
		}
	}
	return false
}

// silentFrom is the same of UDP flows to one port of an address, for a reply that has no entry.
func (f facts) silentFrom(from netip.AddrPort, sample string) bool {
	var flows uint64
	for _, u := range f.Conntrack.Table.Unanswered {
		if u.Protocol == "udp" && u.SNAT && u.Target.AddrPort == from && u.Entries < implausible {
			flows = saturate(flows, u.Entries)
		}
	}
	_, known := parseFlow(sample)
	return !known && flows >= lostFew && slices.ContainsFunc(f.Conntrack.Table.DestPorts, func(p snapshot.PortUse) bool {
		return p.Protocol == "udp" && p.Port == from.Port() && p.Unreplied <= p.Entries && share(p.Unreplied, p.Entries) >= lostMost
	})
}
