// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/snapshot"
)

const (
	// A packet too big for the next link is answered with "fragmentation needed",
	// and its sender learns the size: a few drops at the begin of a connection are
	// path MTU discovery at work. Where the answer does not arrive the same packet
	// is lost again and again, while little else of the flow goes through.
	mtuFew       = 3
	mtuShare     = 0.001 // of the packets to be forwarded: a warning
	mtuHole      = 0.01  // critical
	mtuPerSecond = 10.0  // however much else is forwarded
)

var mtuDrop = Cause{
	Code:       "mtu-drop",
	Title:      "Packets are too big for the way out",
	Severities: []Severity{Advice, Warning, Critical},
	Needs:      []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:    "Small transfers work, large ones hang; connections open and then stand still. Typical behind tunnels, PPPoE and container networks.",
	Proof: fmt.Sprintf("Packets with DF were too big for the interface they should leave by (Ip.FragFails, PKT_TOO_BIG). From %d packets and %s of all that are to be forwarded it is a "+
		"warning, from %s critical; %.0f a second are a warning in any case. Or a rule here drops the messages (ICMP type 3 code 4, ICMPv6 type 2) by which another router says so: a warning, from %d.", mtuFew, "0.1 %", percent(mtuHole), mtuPerSecond, mtuFew),
	Lookalike: "One or two such packets at the begin of a connection: the sender is told and sends smaller ones. Forged messages about flows that connection tracking does not know, dropped as invalid.",
	Cure:      "Clamping the segment size that TCP announces to what fits the smallest link, in both directions; for other protocols one MTU everywhere.",
	judge:     judgeMTU,
}

func judgeMTU(f facts) *verdict {
	traced, rows, _ := f.dropped(snapshot.CauseTooBig)
	counted, _ := f.counter("Ip.FragFails")
	lost := max(traced, counted)
	if lost < mtuFew {
		return judgeSizeUntold(f)
	}
	forwarded, known := f.counter("Ip.ForwDatagrams") // too big ones included
	part := share(lost, forwarded)
	v := &verdict{harm: float64(lost)}
	switch {
	case known && part >= mtuHole:
		v.Severity = Critical
	case known && part < mtuShare && f.perSecond(lost) < mtuPerSecond:
		v.Severity = Advice
	default:
		v.Severity = Warning
	}
	out, mtu, found := f.tightLink(rows)
	v.Title = fmt.Sprintf("%s too big to be forwarded %s", number(lost, "packet"), f.window())
	if found {
		v.Title = fmt.Sprintf("%s too big for %s (MTU %d) %s", number(lost, "packet"), out, mtu, f.window())
	}
	if counted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets with DF that did not fit", strconv.FormatUint(counted, 10), fromSnmp + ": Ip FragFails"})
	}
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped with reason PKT_TOO_BIG", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	if known {
		v.Evidence = append(v.Evidence, Evidence{"packets to be forwarded, these included", strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"})
	}
	for _, l := range f.links() {
		if len(l.Addresses) > 0 {
			v.Evidence = append(v.Evidence, Evidence{"MTU of " + l.Name, strconv.Itoa(l.MTU), fromLinks})
		}
	}
	v.Why = "Each is answered with an ICMP message that says which size fits. Where a firewall on the way drops that message the sender goes on sending the same packet: " +
		"connections open, and hang with the first full segment."
	if found {
		const headers = 40 // IPv4 and TCP without options: what a segment size does not count
		v.Remedy = []string{
			"# announce a segment size that fits, in both directions, whatever ICMP gets through:",
			f.run("nft add table ip natkit-mss"),
			f.run("nft " + quote("add chain ip natkit-mss forward { type filter hook forward priority mangle; }")),
			f.run("nft " + quote(fmt.Sprintf("add rule ip natkit-mss forward%s tcp flags & (syn|rst) == syn tcp option maxseg size set %d", nftIface(" oifname ", out), mtu-headers))),
			f.run("nft " + quote(fmt.Sprintf("add rule ip natkit-mss forward%s tcp flags & (syn|rst) == syn tcp option maxseg size set %d", nftIface(" iifname ", out), mtu-headers))),
			"# connections that exist keep their size. Other protocols than TCP need the ICMP messages: let type 3 code 4 pass every firewall on the way",
		}
	} else {
		v.Remedy = []string{"# all interfaces have the same MTU, so a route has a smaller one; see which:", f.run("ip route show table all"), f.natkit("drops --for 10s")}
	}
	v.Verify = f.look(f.run("nstat -az IpFragFails"))
	return v
}

// judgeSizeUntold tells of senders that can't learn which size fits another router's link,
// because a rule here drops what that router says.
func judgeSizeUntold(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseRule)
	var victims ruleVictims
	example, known := "", false
	for _, row := range rows {
		for _, sample := range row.Samples {
			if saysSize(sample) {
				in, _ := f.link(row.Interface)
				victims.add(row, in)
				_, ofFlow := parseFlow(sample)
				example, known = sample, known || ofFlow
				break
			}
		}
	}
	suspects, sure := f.droppingRules(victims)
	if victims.count < mtuFew || !known && !f.beforeTracking(suspects, sure) {
		return nil
	}
	v := &verdict{harm: float64(victims.count)}
	v.Severity = Warning
	who := "a rule"
	if sure {
		who = suspects[0].name()
	}
	v.Title = fmt.Sprintf("%s drops the messages by which routers say that packets are too big for them", who)
	v.Evidence = []Evidence{
		{"packets dropped by rules, such messages among them", strconv.FormatUint(victims.count, 10) + cameInBy(victims.rows), fromTracer},
		{"one of them", example, fromTracer},
	}
	v.Evidence = append(v.Evidence, ruleEvidence(suspects)...)
	v.Why = "A router whose link is too small for a packet drops it and answers with an ICMP message that says which size fits. Its sender never hears of it, and goes on sending the same packet: connections open, and hang with the first full segment."
	v.Remedy = append([]string{"# let these messages pass before that rule: in nftables \"icmp type destination-unreachable accept\" and \"icmpv6 type packet-too-big accept\", in iptables \"-p icmp --icmp-type fragmentation-needed -j ACCEPT\""}, f.spare(victims, suspects, sure)...)
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
}

// saysSize says whether a sampled packet is a message about one that was too big.
func saysSize(sample string) bool {
	return strings.HasPrefix(sample, "icmp ") && strings.Contains(sample, " type 3 code 4") ||
		strings.HasPrefix(sample, "icmpv6 ") && strings.Contains(sample, " type 2 code 0")
}

// beforeTracking says whether none but rules before connection tracking may have dropped
// something. After it, what is about no flow is dropped as invalid, and may be forged.
func (f facts) beforeTracking(suspects []suspect, sure bool) bool {
	if sure && suspects[0].rule.Packets != nil {
		suspects = suspects[:1]
	} else if slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool { return c.Policy == "drop" }) {
		return false
	}
	return len(suspects) > 0 && !slices.ContainsFunc(suspects, func(s suspect) bool {
		return s.chain.Family != "netdev" && (s.chain.Hook != "prerouting" || s.chain.Priority > -200)
	})
}

// tightLink is the interface that the packets did not fit: the one towards a
// dropped packet's destination, otherwise the one with the smallest MTU, if they
// differ.
func (f facts) tightLink(rows []snapshot.Drop) (name string, mtu int, found bool) {
	links := slices.DeleteFunc(f.links(), func(l snapshot.Interface) bool { return l.MTU < 68 || len(l.Addresses) == 0 })
	largest := 0
	for _, l := range links {
		largest = max(largest, l.MTU)
	}
	for _, t := range samples(rows) {
		if l, ok := f.linkTo(t.dest.Addr()); ok && l.MTU >= 68 && l.MTU < largest {
			return l.Name, l.MTU, true
		}
	}
	for _, l := range links {
		if l.MTU < largest && (!found || l.MTU < mtu) {
			name, mtu, found = l.Name, l.MTU, true
		}
	}
	return name, mtu, found
}
