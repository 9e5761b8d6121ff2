// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
)

// outsideOnlyFew is more than somebody tries out by hand.
const outsideOnlyFew = 5

var hairpinMissing = Cause{
	Code:     "hairpin-missing",
	Title:    "Clients cannot reach a published service of their own network by its external address",
	Headline: "Cannot reach my own public IP from inside the LAN: NAT hairpinning (NAT loopback) is missing",
	Search: []string{
		"NAT loopback",
		"NAT reflection",
		"Connection timed out",
		"conntrack: SYN_SENT [UNREPLIED]",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanRefused, snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "The service works from the Internet. From its own network the same name times out or is refused.",
	Proof:         fmt.Sprintf("At least %d TCP connections never saw a reply (SYN_SENT), their destination is translated to an address on the client's own network, and their source is not translated. Critical if a client tried in the last %d s. Or at least %d connections from another network here to an address of this machine were refused by it, although a rule publishes that port: a warning.", fewFailures, snapshot.RecentSeconds, outsideOnlyFew),
	FalsePositive: "A service elsewhere that does not reply, and flows whose source is also translated. natkit does not report UDP: much of it expects no reply. On a bridge of containers it is bridge-nf-missing.",
	Cure:          "Also translate the source of these connections, so that replies return through this machine. Or add a rule that publishes the service for this network too.",
	judge:         judgeHairpin,
}

// hairpin is connections from a network back into it, by way of a destination translation.
type hairpin struct {
	link             snapshot.Interface
	network          netip.Prefix
	example          snapshot.UnansweredUse
	entries, recents uint64
}

// hairpins are the unanswered TCP connections between two addresses of one
// network, of the interfaces for which wanted says so.
func (f facts) hairpins(wanted func(snapshot.Interface) bool) (h hairpin, found bool) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return h, false
	}
	for _, u := range f.Conntrack.Table.Unanswered {
		if u.Protocol != "tcp" || u.SNAT || !u.Source.IsValid() || !u.Dest.IsValid() || !u.Target.IsValid() ||
			u.Target.Addr() == u.Dest.Addr() || u.Entries >= implausible || u.Recent > u.Entries {
			continue
		}
		from, ok1 := f.linkTo(u.Source)
		to, ok2 := f.linkTo(u.Target.Addr())
		if !ok1 || !ok2 || from.Name != to.Name || f.own(u.Source) || f.own(u.Target.Addr()) || !wanted(from) ||
			u.Recent == 0 && f.reached(u.Dest.AddrPort) { // it was cured since
			continue
		}
		if !found {
			h = hairpin{link: from, example: u}
			for _, p := range from.Addresses {
				if p.IsValid() && p.Masked().Contains(u.Target.Addr()) {
					h.network = p.Masked()
				}
			}
		}
		h.entries, h.recents = saturate(h.entries, u.Entries), saturate(h.recents, u.Recent)
		found = true
	}
	return h, found && h.entries >= fewFailures
}

// evidence is what hairpin-missing and bridge-nf-missing have in common.
func (h hairpin) evidence(recent uint64) []Evidence {
	return []Evidence{
		{"connections within one network without a reply", strconv.FormatUint(h.entries, 10), fromDump + ": SYN_SENT"},
		{fmt.Sprintf("of these, tried in the last %d s", recent), strconv.FormatUint(h.recents, 10), fromDump + ": by their remaining timeout"},
		{"one of them", fmt.Sprintf("%s to %s, translated to %s", h.example.Source, h.example.Dest, h.example.Target), fromDump},
		{"both endpoints are on", fmt.Sprintf("%s, %s", h.link.Name, h.network), fromLinks},
	}
}

func (h hairpin) severity() Severity {
	if h.recents >= fewFailures {
		return Critical
	}
	return Warning
}

func judgeHairpin(f facts) *verdict {
	h, found := f.hairpins(func(l snapshot.Interface) bool { return !f.containerBridge(l) })
	if !found {
		return f.judgeOutsideOnly()
	}
	v := &verdict{impact: float64(h.entries)}
	v.Severity = h.severity()
	v.Title = fmt.Sprintf("%s from %s to %s saw no reply: no hairpinning", number(h.entries, "connection"), h.network, h.example.Dest)
	v.Evidence = h.evidence(f.recent())
	v.Why = "The service sees the client's own address and replies directly, not through this machine. The client gets a reply from an address that it never asked, and rejects it."
	v.Remedy = append([]string{"# translate the source of traffic that goes from this network back into it:"}, f.masqueradeWithin(h)...)
	v.Remedy = append(v.Remedy, "# connections that were tried before keep their old translation:",
		f.run(fmt.Sprintf("conntrack -D%s -p tcp -d %s --dport %d --state SYN_SENT", conntrackFamily(h.example.Dest.Addr()), h.example.Dest.Addr(), h.example.Dest.Port())))
	v.Verify = f.look(f.natkit("conntrack list --state SYN_SENT"))
	return v
}

// judgeOutsideOnly tells of a service that is published for what comes in by another
// interface: asked by its outside address from within, this machine answers for itself.
func (f facts) judgeOutsideOnly() *verdict {
	if f.Conntrack == nil {
		return nil
	}
	for _, r := range f.Conntrack.Refused {
		c, t, published := f.publishes("tcp", r.Dest.AddrPort)
		from, row, asked := f.askedFromWithin(r.Dest.AddrPort)
		if !published || !asked || r.Dest != r.Target || !f.own(r.Dest.Addr()) || r.Count < outsideOnlyFew || r.Count >= implausible {
			continue
		}
		to := netip.AddrPortFrom(t.First, cmp.Or(t.Ports.Min, r.Dest.Port()))
		v := &verdict{impact: float64(r.Count)}
		v.Severity = Warning
		v.Title = fmt.Sprintf("%s to %s refused here: no rule for %s translates to %s", number(r.Count, "connection"), r.Dest, from.Name, to)
		v.Evidence = append([]Evidence{
			{"connections refused to " + r.Dest.String(), strconv.FormatUint(r.Count, 10), fromEvents},
			{fmt.Sprintf("chain %s of table %s %s", c.Name, c.Family, c.Table), fmt.Sprintf("leads port %d to %s", r.Dest.Port(), to), fromRules + " (" + c.Backend + ")"},
		}, sampleEvidence([]snapshot.Drop{row})...)
		v.Why = "A rule publishes this port but did not match these connections, usually because it matches another ingress interface. No program here listens on the port itself."
		v.Remedy = []string{"# the rule that publishes the service; does it match an ingress interface or a source?", f.run(listChain(c)),
			"# a rule for internal clients, for the address that they ask:"}
		six := ""
		if r.Dest.Addr().Is6() {
			six = "6"
		}
		if tool := iptables(c); tool != "" {
			v.Remedy = append(v.Remedy, f.run(fmt.Sprintf("%s -t nat -A %s -i %s -d %s -p tcp --dport %d -j DNAT --to-destination %s", tool, quote(c.Name), quote(from.Name), r.Dest.Addr(), r.Dest.Port(), to)))
		} else {
			v.Remedy = append(v.Remedy, f.run("nft "+quote(fmt.Sprintf("add rule %s %s %s%s ip%s daddr %s tcp dport %d dnat ip%s to %s", c.Family, c.Table, c.Name, nftIface(" iifname ", from.Name), six, r.Dest.Addr(), r.Dest.Port(), six, to))))
		}
		for _, p := range from.Addresses {
			if p.IsValid() && p.Masked().Contains(to.Addr()) {
				v.Remedy = append(append(v.Remedy, "# the service is in the clients' own network: its replies must also return through this machine:"),
					f.masqueradeWithin(hairpin{link: from, network: p.Masked(), example: snapshot.UnansweredUse{Target: snapshot.EndpointOf(to)}})...)
			}
		}
		v.Verify = f.look()
		return v
	}
	return nil
}

// askedFromWithin is the interface by which clients of another network here asked for an
// address of this machine, and found nobody.
func (f facts) askedFromWithin(dest netip.AddrPort) (from snapshot.Interface, row snapshot.Drop, ok bool) {
	if f.Drops == nil {
		return from, row, false
	}
	outside, _ := f.linkTo(dest.Addr())
	for _, row := range f.Drops.Rows {
		for _, packet := range samples([]snapshot.Drop{row}) {
			from, near := f.linkTo(packet.source.Addr())
			if row.Reason == "NO_SOCKET" && f.here(row.Netns) && near && packet.dest == dest && from.Name != outside.Name && !f.own(packet.source.Addr()) {
				return from, row, true
			}
		}
	}
	return from, row, false
}

// masqueradeWithin is a rule that hides clients from a server of their own network.
func (f facts) masqueradeWithin(h hairpin) []string {
	server, port := h.example.Target.Addr(), h.example.Target.Port()
	for _, c := range f.Chains {
		if tool := iptables(c); tool != "" && c.Table == "nat" && c.Hook == "postrouting" && (c.Family == "ip6") == server.Is6() {
			return []string{f.run(fmt.Sprintf("%s -t nat -I %s -s %s -d %s -p tcp --dport %d -j MASQUERADE", tool, quote(c.Name), h.network, server, port))}
		}
	}
	family := "ip"
	if server.Is6() {
		family = "ip6"
	}
	return []string{
		f.run("nft add table " + family + " natkit-hairpin"),
		f.run("nft " + quote("add chain "+family+" natkit-hairpin postrouting { type nat hook postrouting priority srcnat - 1; }")),
		f.run("nft " + quote(fmt.Sprintf("add rule %s natkit-hairpin postrouting %s saddr %s %s daddr %s tcp dport %d masquerade", family, family, h.network, family, server, port))),
	}
}

// containerBridge says whether an interface is a bridge of containers, whose
// engine counts on bridged frames meeting the rules. Without the rules every
// bridge is taken for one.
func (f facts) containerBridge(l snapshot.Interface) bool {
	return l.Kind == "bridge" && (f.Chains == nil || f.kubernetes() || f.docker())
}
