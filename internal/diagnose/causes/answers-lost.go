// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

const (
	// Single hosts do not answer anywhere. What is told here is that so many flows
	// fail for the source that they leave with.
	lostFew  = 3
	lostMost = 0.90 // of the flows of that kind
	// Where nobody outside answers at all, it is not they. What expects no answer, and
	// scans, are spread so over many destinations as well, but are not all there is.
	nothingFew          = 20
	nothingMost         = 0.80
	nothingDestinations = 3
	nothingDeaf         = 5 // where nothing at all comes in by the interface that they leave by
	// Of TCP single packets that connection tracking takes for invalid leave untranslated
	// everywhere.
	leavingFew  = 5
	leavingSome = 0.05 // of what leaves for the Internet by that interface
	leavingMost = 0.20 // critical
	leavingBack = 0.10 // of them: so many answers show that they find their way
)

var answersLost = Cause{
	Code:     "answers-lost",
	Title:    "Replies cannot return: packets leave with an untranslated source, or with one that is not this machine's",
	Headline: "Clients behind NAT get no replies: MASQUERADE or SNAT is missing or does not match",
	Search: []string{
		"Connection timed out",
		"conntrack: [UNREPLIED]",
		"conntrack: SYN_SENT",
		"iptables -t nat -A POSTROUTING -j MASQUERADE not working",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Needs:      []string{snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanRoutes, snapshot.CanLeaving},
	Symptom:    "A network behind this machine, often a new one, gets no reply from anywhere; this machine itself does. A capture on the egress interface shows private addresses, or an address that nobody has.",
	Proof: fmt.Sprintf("One of these holds. (1) At least %d flows have no reply, and they are %s of the flows like them: private sources to public addresses that no rule translated (if no rule translates at all, nearly all flows); any sources, if rules translate and no flow in the table is translated; or a source address given by a rule that is on a network here but on no interface. (2) Rules translate, packets are forwarded and connection tracking has no entry: untracked packets (notrack) are not translated. (3) Packets left for the Internet with private sources whose return path is another interface, at least %s of what left for the Internet by that interface, while rules translate, or did when entries in the table were created, and almost nothing came back to such addresses: a warning, from %s critical. (4) As many leave for the IPv6 Internet with a unique local source (fc00::/7), whatever the rules. (5) Flows have no reply (SYN_SENT, UNREPLIED) while replies arrive for this machine's own address and find no entry: a conntrack zone is set in one direction only, or replies are not tracked. (6) Of at least %d flows that left in the last %d s, to at least %d destinations, %s have no reply and nothing here drops the replies. With fewer destinations it is a warning if none has a reply.", lostFew, percent(lostMost), percent(leavingSome), percent(leavingMost),
		nothingFew, snapshot.RecentSeconds, nothingDestinations, percent(nothingMost)),
	FalsePositive: "A host that is down, a scan, a router without NAT whose networks have a return path: there, sources are public or flows have replies. Pools of addresses that are routed here.",
	Cure:          "Add a rule that translates the sources of this network on the egress interface, or add the missing address to the interface. Do not use notrack or zones for flows to translate.",
	judge:         judgeAnswersLost,
}

func judgeAnswersLost(f facts) *verdict {
	if f.Conntrack == nil || f.Interfaces == nil || !f.rulesKnown() {
		return nil
	}
	for _, judge := range []func(facts) *verdict{judgeUntracked, judgeUnmatched, judgeForeignSource, judgeUntranslated, judgeLeaving, judgeLeavingSix, judgeNothingBack} {
		if v := judge(f); v != nil {
			v.Verify = f.look(f.natkit("conntrack list --state SYN_SENT"))
			return v
		}
	}
	return nil
}

// judgeUntracked tells of packets that rules would translate and connection tracking is kept from.
func judgeUntracked(f facts) *verdict {
	forwarded, _ := f.counter("Ip.ForwDatagrams")
	sent, _ := f.counter("Ip.OutTransmits")
	if !f.translates() || f.Conntrack.Count > 0 || f.Conntrack.CountStart > 0 || forwarded < lostFew || sent < forwarded/2 || !f.tracks() {
		return nil
	}
	// Entries may be gone at once: of a SYN that is refused. What keeps packets out is a rule before connection tracking.
	var before []snapshot.Chain
	for _, c := range f.Chains {
		if (c.Hook == "prerouting" || c.Hook == "output") && c.Priority <= -200 && c.Rules > 0 {
			before = append(before, c)
		}
	}
	if len(before) == 0 {
		return nil
	}
	v := &verdict{impact: float64(forwarded)}
	v.Severity = Critical
	v.Title = fmt.Sprintf("NAT rules exist, but none of %s was tracked and translated", number(forwarded, "forwarded packet"))
	v.Evidence = []Evidence{
		{"packets that were to be forwarded " + f.window(), strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"},
		{"conntrack entries", "0", fromSettings + ": nf_conntrack_count"},
	}
	for _, c := range f.Chains {
		if len(c.NATRules) > 0 {
			v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("chain %s of table %s %s", c.Name, c.Family, c.Table), "translates", fromRules + " (" + c.Backend + ")"})
		}
	}
	v.Why = "NAT needs a conntrack entry. A packet that a rule excludes from connection tracking (notrack, the targets NOTRACK and CT --notrack) passes every NAT rule untouched and leaves with its own source."
	v.Remedy = []string{"# find the notrack rule, and narrow it to traffic that is not translated:"}
	for _, c := range before {
		v.Remedy = append(v.Remedy, f.run(listChain(c)))
	}
	return v
}

// tracks says whether connection tracking's functions are on the hooks, as far as that is known.
func (f facts) tracks() bool {
	return f.Hooks == nil || slices.ContainsFunc(f.Hooks, func(h snapshot.Hook) bool { return h.Function == "ipv4_conntrack_in" })
}

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
	protocol := "tcp"
	if t := samples(rows); len(t) > 0 {
		protocol = t[0].protocol
	}
	v.Remedy = []string{"# the zones of the entries:", f.run("conntrack -L -p " + protocol),
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
		ruled := row.Cause == snapshot.CauseRule && f.hookOf(row) == "input"
		if row.Reason != "NO_SOCKET" && !ruled || row.Benign || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		if slices.ContainsFunc(row.Samples, func(s string) bool {
			packet, ok := parseSample(s)
			switch {
			case !ok || !f.own(packet.dest.Addr()):
				return false
			case packet.protocol == "udp":
				foreseen := slices.ContainsFunc(t.Controls, func(c snapshot.ControlUse) bool { return opensData(c, packet, s) })
				return !foreseen && (f.silentAt(packet.source.Addr()) || f.silentFrom(packet.source, s)) && judgeUDPShort(f) == nil
			}
			return connecting && packet.protocol == "tcp" && strings.Contains(s, " SYN,ACK")
		}) {
			n = saturate(n, row.Count)
			rows = append(rows, row)
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
		if u.Protocol == "udp" && u.SNAT && u.Target == from && u.Entries < implausible {
			flows = saturate(flows, u.Entries)
		}
	}
	_, known := parseFlow(sample)
	return !known && flows >= lostFew && slices.ContainsFunc(f.Conntrack.Table.DestPorts, func(p snapshot.PortUse) bool {
		return p.Protocol == "udp" && p.Port == from.Port() && p.Unreplied <= p.Entries && share(p.Unreplied, p.Entries) >= lostMost
	})
}

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

// judgeUntranslated tells of flows that leave with a source that only this machine knows.
func judgeUntranslated(f facts) *verdict {
	t := f.Conntrack.Table
	if t == nil || t.Entries == 0 {
		return nil
	}
	var flows, recent uint64
	var example snapshot.UnansweredUse
	public := false
	for _, u := range t.Unanswered {
		if u.SNAT || u.Target != u.Dest || u.Entries >= implausible || u.Recent > u.Entries || !u.Source.IsValid() || !u.Dest.IsValid() ||
			f.own(u.Source) || f.own(u.Dest.Addr()) || !onlyInside(u.Source) || u.Dest.Addr().IsMulticast() || f.answers(u.Dest.Addr()) {
			continue
		}
		from, ok := f.linkTo(u.Source)
		if to, known := f.linkTo(u.Dest.Addr()); !ok || known && to.Name == from.Name {
			continue
		}
		outward := !onlyInside(u.Dest.Addr())
		if !outward && (!f.translatesSources() || t.ByStatus["SNAT"] > 0) {
			continue // networks that are routed here know each other
		}
		if example.Source.IsValid() && public != outward {
			continue
		}
		if !example.Source.IsValid() {
			example, public = u, outward
		}
		flows, recent = saturate(flows, u.Entries), saturate(recent, u.Recent)
	}
	// Without rules that translate, a router further on may: then others are answered.
	like := t.Entries - min(t.Entries, f.inward())
	if flows < lostFew || (!public || !f.translatesSources()) && share(min(flows, like), like) < lostMost {
		return nil
	}
	v := &verdict{impact: float64(recent)}
	v.Severity = Warning
	switch {
	case recent >= lostFew && public && f.translatesSources():
		v.Severity = Critical
	case !public && recent < lostFew:
		v.Severity = Advice
	}
	from, _ := f.linkTo(example.Source)
	network := netip.PrefixFrom(example.Source, example.Source.BitLen())
	for _, p := range from.Addresses {
		if p.IsValid() && p.Masked().Contains(example.Source) {
			network = p.Masked()
		}
	}
	v.Title = fmt.Sprintf("%s from %s left untranslated and saw no reply", number(flows, "flow"), network)
	v.Evidence = []Evidence{
		{"flows without a reply whose source no rule translated", fmt.Sprintf("%d, %d with a packet in the last %d s", flows, recent, f.recent()), fromDump},
		{"one of them", fmt.Sprintf("%s %s to %s", example.Protocol, example.Source, example.Dest), fromDump},
		{"flows of all kinds whose source is translated", strconv.FormatUint(t.ByStatus["SNAT"], 10), fromDump},
	}
	out := f.wayOut(example.Dest.Addr(), from.Name)
	if out == from.Name {
		v.Title = fmt.Sprintf("%s from %s saw no reply: the route to %s leads back to them", number(flows, "flow"), network, example.Dest.Addr())
		v.Why = "The packets leave by the interface on which they arrived, to a host or router of the network that they came from, which did not reply. Rules that translate sources usually match another egress interface."
		v.Remedy = []string{"# the route; correct it, or delete it if another one is meant:",
			f.run(fmt.Sprintf("ip%s route get %s from %s iif %s", sixFlag(example.Dest.Addr()), example.Dest.Addr(), example.Source, quote(from.Name))),
			f.run(fmt.Sprintf("ip%s route show table all to match %s", sixFlag(example.Dest.Addr()), example.Dest.Addr()))}
		return v
	}
	v.Why = "The receiver of a packet with a private source sends the reply into its own network, or nowhere. A rule for another interface or another network does not match these packets."
	v.Remedy = []string{"# the rules that translate sources, if any; look for one with another interface or network than the one above:"}
	chain := snapshot.Chain{}
	for _, c := range f.Chains {
		if c.Hook == "postrouting" && c.Type == "nat" && concerns(c, example.Source) {
			v.Remedy = append(v.Remedy, f.run(listChain(c)))
			if chain.Name == "" {
				chain = c
			}
		}
	}
	family := "ip"
	if example.Source.Is6() {
		family = "ip6"
	}
	if chain.Name == "" {
		v.Remedy[0] = "# no chain here translates sources. If this machine is meant to, and not a router behind it:"
	} else {
		v.Remedy = append(v.Remedy, "# if none matches this network, add one (where your firewall keeps its own):")
	}
	verb, option := "add", "-A"
	if translating := 0; chain.Name != "" {
		for _, n := range chain.NATRules {
			translating += n
		}
		if chain.Rules > translating { // an accept or a return may end the search before the last rule
			verb, option = "insert", "-I"
			v.Remedy[len(v.Remedy)-1] = "# if none matches this network, or an earlier one accepts these packets, insert one first (where your firewall keeps its own; exceptions for a VPN must stay before it):"
		}
	}
	switch tool := iptables(chain); {
	case chain.Name == "":
		v.Remedy = append(v.Remedy, f.run("nft add table "+family+" natkit-masquerade"),
			f.run("nft "+quote("add chain "+family+" natkit-masquerade postrouting { type nat hook postrouting priority srcnat; }")),
			f.run("nft "+quote(fmt.Sprintf("add rule %s natkit-masquerade postrouting %s saddr %s oifname %q masquerade", family, family, network, out))))
	case tool != "":
		v.Remedy = append(v.Remedy, f.run(fmt.Sprintf("%s -t nat %s %s -s %s -o %s -j MASQUERADE", tool, option, quote(chain.Name), network, quote(out))))
	default:
		v.Remedy = append(v.Remedy, f.run("nft "+quote(fmt.Sprintf("%s rule %s %s %s %s saddr %s oifname %q masquerade", verb, chain.Family, chain.Table, chain.Name, family, network, out))))
	}
	if chain.Name != "" {
		v.Remedy = append(v.Remedy, "# if one exists already, the packets leave by another interface than the one it matches: policy routing may send marked packets elsewhere:",
			f.run(fmt.Sprintf("ip%s rule show", sixFlag(example.Source))))
	}
	v.Remedy = append(v.Remedy, "# existing flows keep leaving untranslated; remove their entries:",
		f.run(fmt.Sprintf("conntrack -D%s -s %s", conntrackFamily(example.Source), example.Source)))
	return v
}

// judgeLeaving tells of packets that were seen to leave untranslated: kept from connection
// tracking beside others that are not, or after the rules are gone.
func judgeLeaving(f facts) *verdict {
	for _, l := range f.Leaving {
		link, known := f.link(l.Interface)
		if !known || l.Family != "" || len(link.Addresses) == 0 || f.bridgeOf(l.Interface) != "" || !lostOnes(l) {
			continue // what is only bridged has an interface without addresses, but for those that each has by itself
		}
		part := share(l.Inside, saturate(l.Inside, l.Others))
		gone := !f.translatesSourcesOfIPv4() && f.translatedSources() > 0
		if part < leavingSome || !gone && !f.translatesSourcesOfIPv4() {
			continue
		}
		v := leavingVerdict(l, part, "private")
		v.Title = fmt.Sprintf("%s of Internet traffic leaving by %s has an untranslated private source", percent(part), l.Interface)
		if gone {
			v.Title += ": NAT rules are gone"
			v.Evidence = append(v.Evidence, Evidence{"older entries whose source was translated", strconv.FormatUint(f.translatedSources(), 10), fromDump})
			v.Why = "No rule here translates sources, but entries in the table show that one did. Someone flushed the rules, or started a firewall that does, and the NAT rules went with them."
			v.Remedy = []string{"# restore the rules with the program that manages them (systemctl restart docker, nftables, firewalld ...), then check that they are there:",
				f.run("nft list ruleset"), f.run("iptables-legacy-save -t nat")}
			return v
		}
		v.Why = "A packet passes the NAT rules untouched if a rule excludes it from connection tracking (notrack, CT --notrack), if connection tracking marks it invalid, or if it does not match the rules' conditions."
		v.Remedy = []string{"# rules before connection tracking, which may contain notrack; narrow those that match the packets above:"}
		listed := false
		for _, c := range f.Chains {
			if (c.Hook == "prerouting" || c.Hook == "output") && c.Priority <= -200 && c.Rules > 0 {
				v.Remedy = append(v.Remedy, f.run(listChain(c)))
				listed = true
			}
		}
		if !listed {
			v.Remedy = nil
		}
		v.Remedy = append(v.Remedy, "# rules that translate sources; do they match these packets?")
		for _, c := range f.Chains {
			if c.Hook == "postrouting" && c.Type == "nat" {
				v.Remedy = append(v.Remedy, f.run(listChain(c)))
			}
		}
		return v
	}
	return nil
}

// judgeLeavingSix is judgeLeaving for IPv6, of which most is not to be translated at all: but
// no provider has a way back to unique local addresses (RFC 4193, section 4.3).
func judgeLeavingSix(f facts) *verdict {
	for _, l := range f.Leaving {
		if _, known := f.link(l.Interface); !known || l.Family != "ipv6" || f.bridgeOf(l.Interface) != "" || !lostOnes(l) {
			continue
		}
		part := share(l.Inside, saturate(l.Inside, l.Others))
		if part < leavingSome {
			continue
		}
		v := leavingVerdict(l, part, "unique local")
		v.Title = fmt.Sprintf("%s of IPv6 Internet traffic leaving by %s has a unique local source (fc00::/7)", percent(part), l.Interface)
		v.Why = "Container and guest networks often have unique local IPv6 addresses, which are not routed on the Internet. Programs prefer IPv6, wait for a reply that cannot come, and fall back to IPv4 late or never: everything is slow there, or fails. IPv4 rules do not translate this traffic."
		v.Remedy = []string{`# give that network addresses of the provider's prefix. Or translate them: Docker does with "ip6tables": true in /etc/docker/daemon.json (the default since 27.0); by hand:`,
			f.run("nft add table ip6 natkit-masquerade"),
			f.run("nft 'add chain ip6 natkit-masquerade postrouting { type nat hook postrouting priority srcnat; }'"),
			f.run(fmt.Sprintf("nft add rule ip6 natkit-masquerade postrouting ip6 saddr fc00::/7 oifname %s masquerade", quote(l.Interface))),
			"# or disable IPv6 there; the present rules:", f.run("nft list ruleset ip6")}
		return v
	}
	return nil
}

// leavingVerdict is what was seen of packets that left with a source of that kind, part of all.
func leavingVerdict(l snapshot.Leaving, part float64, kind string) *verdict {
	v := &verdict{impact: float64(l.Inside)}
	v.Severity = Warning
	if part >= leavingMost {
		v.Severity = Critical
	}
	v.Evidence = []Evidence{
		{"packets that left with a " + kind + " source of others, and with another source", fmt.Sprintf("%d, %d", l.Inside, l.Others), fromTap},
		{"packets that arrived for such addresses", strconv.FormatUint(l.Back, 10), fromTap},
	}
	for _, sample := range l.Samples {
		v.Evidence = append(v.Evidence, Evidence{"one of them", sample, fromTap})
	}
	return v
}

// lostOnes says whether packets left with a private source, and next to nothing came back.
func lostOnes(l snapshot.Leaving) bool {
	return l.Inside >= leavingFew && l.Inside < implausible && l.Others < implausible && float64(l.Back) < leavingBack*float64(l.Inside)
}

const fromTap = "packets captured on the interface"

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

// judgeNothingBack tells that nobody outside answers anything: the fault lies between here and
// the next router, or in whose this machine's address is there.
func judgeNothingBack(f facts) *verdict {
	t := f.Conntrack.Table
	if t == nil || f.Drops == nil || !f.translatesSources() {
		return nil
	}
	destinations := map[netip.Addr]bool{}
	var opening uint64
	var example snapshot.UnansweredUse
	for _, u := range t.Unanswered {
		if !u.SNAT || u.Target != u.Dest || u.Recent == 0 || u.Recent >= implausible || u.Protocol != "tcp" && !answersExpected[u.Dest.Port()] {
			continue
		}
		if opening == 0 {
			example = u
		}
		opening = saturate(opening, u.Recent)
		destinations[u.Dest.Addr()] = true
	}
	deaf := f.deafLinks()
	if opening < nothingFew && (len(deaf) == 0 || opening < nothingDeaf) {
		return nil
	}
	few := len(destinations) < nothingDestinations // it may be they who are down, unless others answer
	for _, row := range f.Drops.Rows {
		if !row.Benign && f.here(row.Netns) && row.Count < implausible && row.Count >= opening/2 {
			return nil // what drops them, or the answers, is told by its own cause
		}
	}
	for _, o := range t.Outsides {
		least := uint64(nothingFew)
		if deaf[f.holder(o.Addr)] {
			least = nothingDeaf
		}
		if !f.own(o.Addr) || o.Recent >= implausible || o.Unanswered < least || o.Unanswered > o.Recent || share(o.Unanswered, o.Recent) < nothingMost || few && o.Unanswered < o.Recent {
			continue
		}
		out := ""
		for _, l := range f.links() {
			if slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Addr() == o.Addr }) {
				out = l.Name
			}
		}
		v := &verdict{impact: float64(o.Unanswered)}
		v.Severity = Critical
		v.Title = fmt.Sprintf("%d of %s sent as %s in the last %d s saw no reply, from any destination", o.Unanswered, number(o.Recent, "flow"), o.Addr, f.recent())
		if few {
			v.Severity = Warning
			v.Title = fmt.Sprintf("none of %s sent as %s in the last %d s saw a reply", number(o.Recent, "flow"), o.Addr, f.recent())
		}
		v.Evidence = []Evidence{
			{"flows translated to " + o.Addr.String() + " with a packet in the last seconds, and those without a reply", fmt.Sprintf("%d, %d", o.Recent, o.Unanswered), fromDump},
			{"destinations of flows without a reply, at least", strconv.Itoa(len(destinations)), fromDump},
			{"packets that arrived on " + out + ", and left", f.inAndOut(out), fromLinks},
			{"one of them", fmt.Sprintf("%s %s to %s", example.Protocol, example.Source, example.Dest), fromDump},
		}
		v.Why = "Packets leave translated, nothing here drops them, and no destination replies. Either they do not reach the next router (wrong hardware address, VLAN, cable), or replies go elsewhere: another machine has this address, or the router has lost its route to it, or the line behind it is down."
		if few {
			v.Why += " Or the few destinations are down themselves."
		}
		v.Remedy = []string{"# is the next router's hardware address right, and not an old permanent entry?", f.run("ip neigh show dev " + quote(out)),
			"# does another machine have this address?", f.run(fmt.Sprintf("arping -D -c 3 -I %s %s", quote(out), o.Addr)) + " || echo another machine has it",
			"# do packets arrive, and are there errors?", f.run("ip -s link show dev " + quote(out))}
		v.Remedy = append(v.Remedy, "# which is the next router, and does it reply to ping?", f.run("ip route get "+example.Dest.Addr().String()))
		return v
	}
	return nil
}

// answersExpected are the UDP ports of what is always answered: DNS, time, QUIC.
var answersExpected = map[uint16]bool{53: true, 123: true, 443: true}

// translatedSources is how many entries have one of this machine's addresses in place of their source.
func (f facts) translatedSources() (n uint64) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return 0
	}
	for _, o := range f.Conntrack.Table.Outsides {
		if f.own(o.Addr) && o.Entries < implausible {
			n = saturate(n, o.Entries)
		}
	}
	return n
}

// onlyInside says whether an address means something within a site only.
func onlyInside(a netip.Addr) bool { return snapshot.OnlyInside(a) }

// inward is how many entries are of connections to this machine's own addresses, published services
// among them.
func (f facts) inward() (n uint64) {
	for _, d := range f.Conntrack.Table.Destinations {
		if f.own(d.Addr) && d.Entries < implausible {
			n = saturate(n, d.Entries)
		}
	}
	return n
}

// answers says whether some flow to addr was answered, as far as the dump tells.
func (f facts) answers(addr netip.Addr) bool {
	return slices.ContainsFunc(f.Conntrack.Table.Destinations, func(d snapshot.Talker) bool {
		return d.Addr == addr && float64(d.Unreplied) < lostMost*float64(d.Entries)
	})
}

// wayOut is the interface that packets to addr leave by, or a word to fill in.
func (f facts) wayOut(addr netip.Addr, not string) string {
	for _, r := range f.Routes {
		if r.Dest == addr && r.Answer == snapshot.RouteFound && r.Out != "" {
			return r.Out
		}
	}
	if l, ok := f.linkTo(addr); ok {
		return l.Name
	}
	var others []string
	for _, l := range f.links() {
		if l.Name != not && len(l.Addresses) > 0 {
			others = append(others, l.Name)
		}
	}
	if len(others) == 1 {
		return others[0]
	}
	return "OUTSIDE"
}
