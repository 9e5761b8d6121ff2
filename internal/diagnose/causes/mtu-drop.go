// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A packet too big for the next link is answered with "fragmentation needed",
	// and its sender learns the size: a few drops at the start of a connection are
	// path MTU discovery at work. Where the answer does not arrive the same packet
	// is lost again and again, while little else of the flow goes through.
	mtuFew       = 3
	mtuShare     = 0.001 // of the packets to be forwarded: a warning
	mtuHole      = 0.01  // critical
	mtuPerSecond = 10.0  // however much else is forwarded
)

var mtuDrop = Cause{
	Code:     "mtu-drop",
	Title:    "Packets are too big for the egress interface",
	Headline: "Large transfers hang, ping works: path MTU black hole (Frag needed and DF set)",
	Search: []string{
		"Frag needed and DF set",
		"Message too long",
		"Packet too big",
		"nstat IpFragFails",
		"reason: PKT_TOO_BIG",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "Small transfers work, large ones hang. Connections open and then stall. Typical behind tunnels, PPPoE and container networks.",
	Proof:         fmt.Sprintf("Packets with DF were too big for their egress interface (Ip.FragFails, PKT_TOO_BIG). From %d packets and %s of all packets to forward it is a warning, from %s critical; %.0f a second are a warning in any case. Or a rule here drops the ICMP messages (type 3 code 4, ICMPv6 type 2) by which another router reports it: a warning from %d. If this machine's own rules drop the messages that it sends, natkit names the rule.", mtuFew, "0.1 %", percent.Whole(mtuHole), mtuPerSecond, mtuFew),
	FalsePositive: "One or two such packets at the start of a connection: the sender gets the message and sends smaller packets. Forged messages about flows that connection tracking does not know, dropped as invalid.",
	Cure:          "Let the ICMP messages pass, or clamp the TCP MSS to the smallest link, in both directions. Clamping does not help UDP: it needs the messages, or one MTU everywhere.",
	judge:         judgeMTU,
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
	if counted == 0 && onlySix(rows) {
		part, known = f.receivedShare(lost, rows, devices(rows))
	}
	v := &verdict{impact: float64(lost)}
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
	v.Evidence = append(v.Evidence, f.wholeEvidence(rows, counted, "packets to be forwarded, including these")...)
	for _, l := range f.links() {
		if len(l.Addresses) > 0 {
			v.Evidence = append(v.Evidence, Evidence{"MTU of " + l.Name, strconv.Itoa(l.MTU), fromLinks})
		}
	}
	v.Why = "The kernel replies to each with an ICMP message that reports the size that fits. If a firewall on the path drops that message, the sender keeps sending packets of the same size: " +
		"connections open, and hang at the first full segment."
	v.Remedy = f.fitSize(rows, out, mtu, found)
	if c, n, ok := f.ownSizeMessages(); ok {
		if whole := titled(v.Title, fmt.Sprintf("; %s drops the ICMP errors", c.short())); whole != v.Title {
			v.Title = whole
		} else {
			v.Title = titled(v.Title, "; rules here drop the ICMP errors")
		}
		v.Evidence = append(v.Evidence, Evidence{"ICMP messages of this machine that its own rules dropped", strconv.FormatUint(n, 10), fromTracer})
		v.Evidence = append(v.Evidence, c.evidence(f)...)
		v.Why = "This machine replies to each with an ICMP message that reports the size that fits, but its own rules drop that message. The sender keeps sending packets of the same size."
		v.Remedy = append(f.sendSizeMessages(c), v.Remedy...)
	}
	v.Verify = f.look(f.run("nstat -az IpFragFails"))
	return v
}

// fitSize is how senders get to send what fits.
func (f facts) fitSize(rows []snapshot.Drop, out string, mtu int, found bool) []string {
	if !found {
		return []string{"# all interfaces have the same MTU, so a route has a smaller one; find it:", f.run("ip route show table all"), f.natkit("drops --for 10s")}
	}
	packets := samples(rows)
	udp := slices.IndexFunc(packets, func(t tuple) bool { return t.protocol != "tcp" })
	tcp := slices.ContainsFunc(packets, func(t tuple) bool { return t.protocol == "tcp" })
	var remedy []string
	if tcp || udp < 0 {
		remedy = []string{"# announce a segment size that fits, in both directions, even if no ICMP message gets through:"}
		six := slices.ContainsFunc(packets, func(t tuple) bool { return t.dest.Addr().Is6() })
		if !six || !onlySix(rows) {
			remedy = append(remedy, f.clampTo("ip", out, mtu)...)
		}
		if six {
			remedy = append(remedy, f.clampTo("ip6", out, mtu)...)
		}
		messages := "type 3 code 4"
		if six {
			messages += ", of IPv6 type 2,"
		}
		remedy = append(remedy, "# existing connections keep their size. Protocols other than TCP need the ICMP messages: let "+messages+" pass every firewall on the path")
	}
	if udp >= 0 {
		t := packets[udp]
		remedy = append(remedy,
			fmt.Sprintf("# MSS clamping does not help %s: its sender must learn the size. Does the ICMP message (type 3 code 4, of IPv6 type 2) get there? Then this shows mtu %d on %s:", strings.ToUpper(t.protocol), mtu, t.source.Addr()),
			fmt.Sprintf("#   ip%s route get %s", sixFlag(t.dest.Addr()), t.dest.Addr()),
			fmt.Sprintf("# if not, a packet filter on the path or on %s drops it. Or use the same MTU on all links, if the network behind %s supports it; it is now:", t.source.Addr(), out),
			f.run("ip link show dev "+quote(out)))
	}
	return remedy
}

// clampTo are commands that give TCP connections of a family through a link the segment size that fits it.
func (f facts) clampTo(family, out string, mtu int) []string {
	headers := map[string]int{"ip": 40, "ip6": 60}[family] // with TCP's, without options: what a segment size does not count
	rule := func(key string) string {
		return f.run("nft " + quote(fmt.Sprintf("add rule %s natkit-mss forward%s tcp flags & (syn|rst) == syn tcp option maxseg size set %d", family, nftIface(key, out), mtu-headers)))
	}
	return []string{f.run("nft add table " + family + " natkit-mss"),
		f.run("nft " + quote("add chain "+family+" natkit-mss forward { type filter hook forward priority mangle; }")),
		rule(" oifname "), rule(" iifname ")}
}

// ownSizeMessages is what drops the messages by which this machine itself says that packets
// are too big, and how many.
func (f facts) ownSizeMessages() (c culprit, n uint64, ok bool) {
	var own []blamed
	for _, b := range f.blamed() {
		if b.kind == sizeMessage && slices.ContainsFunc(samples([]snapshot.Drop{b.row}), func(t tuple) bool { return f.own(t.source.Addr()) }) {
			own = append(own, b)
			n = saturate(n, b.row.Count)
		}
	}
	all, _ := culprits(own)
	if len(all) == 0 {
		return culprit{}, 0, false
	}
	return all[0], n, true
}

// sendSizeMessages lets these messages, and nothing else, pass a rule or a policy.
func (f facts) sendSizeMessages(c culprit) []string {
	tool := iptables(*c.Chain)
	six := strings.HasPrefix(c.sample.Text, "icmpv6")
	accept := "icmp type destination-unreachable icmp code frag-needed accept"
	switch {
	case tool != "" && six:
		accept = "-p icmpv6 --icmpv6-type packet-too-big -j ACCEPT"
	case tool != "":
		accept = "-p icmp --icmp-type fragmentation-needed -j ACCEPT"
	case six:
		accept = "icmpv6 type packet-too-big accept"
	}
	remedy := []string{"# let these messages, and nothing else, pass before that rule:"}
	where := fmt.Sprintf("%s %s %s", c.Chain.Family, c.Chain.Table, c.Chain.Name)
	switch {
	case tool != "" && c.Rule != nil:
		return append(remedy, f.run(fmt.Sprintf("%s -t %s -I %s %d %s", tool, quote(c.Chain.Table), quote(c.Chain.Name), c.Rule.Number, accept)))
	case tool != "":
		return append(remedy, f.run(fmt.Sprintf("%s -t %s -A %s %s", tool, quote(c.Chain.Table), quote(c.Chain.Name), accept)))
	case c.Rule != nil && c.Rule.Handle != 0:
		return append(remedy, f.run("nft "+quote(fmt.Sprintf("insert rule %s handle %d %s", where, c.Rule.Handle, accept))))
	}
	return append(remedy, f.run("nft "+quote("add rule "+where+" "+accept)))
}

// judgeSizeUntold tells of senders that can't learn which size fits another router's link,
// because a rule here drops what that router says.
func judgeSizeUntold(f facts) *verdict {
	var victims ruleVictims
	example, known := "", false
	for _, b := range f.blamed() {
		for _, sample := range b.row.Samples {
			if saysSize(sample) {
				in, _ := f.link(b.row.Interface)
				victims.add(b, in)
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
	v := &verdict{impact: float64(victims.count)}
	v.Severity = Warning
	who := "a rule"
	if sure {
		who = suspects[0].short()
	}
	v.Title = fmt.Sprintf("%s drops the ICMP messages of path MTU discovery", who)
	v.Evidence = []Evidence{
		{"packets dropped by rules, including such messages", strconv.FormatUint(victims.count, 10) + cameInBy(victims.rows), fromTracer},
		{"one of them", example, fromTracer},
	}
	for _, s := range suspects {
		v.Evidence = append(v.Evidence, s.evidence(f)...)
	}
	v.Why = "A router whose link is too small for a packet drops it and replies with an ICMP message that reports the size that fits. The sender never gets it, and keeps sending packets of the same size: connections open, and hang at the first full segment."
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
func (f facts) beforeTracking(suspects []culprit, sure bool) bool {
	if sure && (suspects[0].blamed || suspects[0].Packets() != nil) {
		suspects = suspects[:1]
	} else if slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool { return c.Policy == "drop" }) {
		return false
	}
	return len(suspects) > 0 && !slices.ContainsFunc(suspects, func(s culprit) bool {
		return s.Chain.Family != "netdev" && (s.Chain.Hook != "prerouting" || s.Chain.Priority > -200)
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
