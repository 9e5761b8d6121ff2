// SPDX-License-Identifier: Apache-2.0

package causes

// Flows that leave with a source that only this machine knows.

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

// untranslated are flows without a reply that no rule translated: those like the first of them, to
// public addresses or to others.
type untranslated struct {
	flows, recent uint64
	example       snapshot.UnansweredUse
	public        bool
}

// untranslated adds up what the dump has of them.
func (f facts) untranslated() (out untranslated) {
	t := f.Conntrack.Table
	for _, u := range t.Unanswered {
		if !f.leavesInside(u) {
			continue
		}
		public := !onlyInside(u.Dest.Addr())
		if !public && (!f.translatesSources() || t.ByStatus["SNAT"] > 0) {
			continue // networks that are routed here know each other
		}
		if out.example.Source.IsValid() && out.public != public {
			continue
		}
		if !out.example.Source.IsValid() {
			out.example, out.public = u, public
		}
		out.flows, out.recent = saturate(out.flows, u.Entries), saturate(out.recent, u.Recent)
	}
	return out
}

// leavesInside says whether untranslated flows of a network here, without a reply, lead out of it.
func (f facts) leavesInside(u snapshot.UnansweredUse) bool {
	if u.SNAT || u.Target != u.Dest || u.Entries >= implausible || u.Recent > u.Entries || !u.Source.IsValid() || !u.Dest.IsValid() ||
		f.own(u.Source) || f.own(u.Dest.Addr()) || !onlyInside(u.Source) || u.Dest.Addr().IsMulticast() || f.answers(u.Dest.Addr()) {
		return false
	}
	from, ok := f.linkTo(u.Source)
	to, known := f.linkTo(u.Dest.Addr())
	return ok && (!known || to.Name != from.Name)
}

// judgeUntranslated tells of flows that leave with a source that only this machine knows.
func judgeUntranslated(f facts) *verdict {
	t := f.Conntrack.Table
	if t == nil || t.Entries == 0 {
		return nil
	}
	u := f.untranslated()
	// Without rules that translate, a router further on may: then others are answered.
	like := t.Entries - min(t.Entries, f.inward())
	if u.flows < lostFew || (!u.public || !f.translatesSources()) && share(min(u.flows, like), like) < lostMost {
		return nil
	}
	v := &verdict{impact: float64(u.recent)}
	v.Severity = Warning
	switch {
	case u.recent >= lostFew && u.public && f.translatesSources():
		v.Severity = Critical
	case !u.public && u.recent < lostFew:
		v.Severity = Advice
	}
	from, _ := f.linkTo(u.example.Source)
	network := netip.PrefixFrom(u.example.Source, u.example.Source.BitLen())
	for _, p := range from.Addresses {
		if p.IsValid() && p.Masked().Contains(u.example.Source) {
			network = p.Masked()
		}
	}
	v.Evidence = []Evidence{
		{"flows without a reply whose source no rule translated", fmt.Sprintf("%d, %d with a packet in the last %d s", u.flows, u.recent, f.recent()), fromDump},
		{"one of them", fmt.Sprintf("%s %s to %s", u.example.Protocol, u.example.Source, u.example.Dest), fromDump},
		{"flows of all kinds whose source is translated", strconv.FormatUint(t.ByStatus["SNAT"], 10), fromDump},
	}
	out, dest := f.wayOut(u.example.Dest.Addr(), from.Name), u.example.Dest.Addr()
	if out == from.Name {
		v.Title = fmt.Sprintf("%s from %s saw no reply: the route to %s leads back to them", number(u.flows, "flow"), network, dest)
		v.Why = "The packets leave by the interface on which they arrived, to a host or router of the network that they came from, which did not reply. Rules that translate sources usually match another egress interface."
		v.Remedy = []string{"# the route; correct it, or delete it if another one is meant:",
			f.run(fmt.Sprintf("ip%s route get %s from %s iif %s", sixFlag(dest), dest, u.example.Source, quote(from.Name))),
			f.run(fmt.Sprintf("ip%s route show table all to match %s", sixFlag(dest), dest))}
		return v
	}
	v.Title = fmt.Sprintf("%s from %s left untranslated and saw no reply", number(u.flows, "flow"), network)
	v.Why = "The receiver of a packet with a private source sends the reply into its own network, or nowhere. A rule for another interface or another network does not match these packets."
	v.Remedy = append(f.translateFrom(u.example.Source, network, out), "# existing flows keep leaving untranslated; remove their entries:",
		f.run(fmt.Sprintf("conntrack -D%s -s %s", conntrackFamily(u.example.Source), u.example.Source)))
	return v
}

// translateFrom is how to have a network's sources translated: in the first chain that does so for
// others, or else in one of its own.
func (f facts) translateFrom(source netip.Addr, network netip.Prefix, out string) (remedy []string) {
	if source.Is4() && slices.ContainsFunc(f.Chains, f.ofEngine) {
		return []string{"# the rules of the engine; is one for this network, and for that egress interface?", f.natkit("rules"),
			fmt.Sprintf("# if not, add one to %s (- masquerade: %s), and apply it:", f.Engine.File, network), f.apply()}
	}
	var chain snapshot.Chain
	for _, c := range f.Chains {
		if c.Hook == "postrouting" && c.Type == "nat" && concerns(c, source) {
			remedy = append(remedy, f.run(listChain(c)))
			if chain.Name == "" {
				chain = c
			}
		}
	}
	if chain.Name == "" {
		return append([]string{"# no chain here translates sources. If this machine is meant to, and not a router behind it:"}, f.newMasquerade(network, out)...)
	}
	remedy = append([]string{"# the rules that translate sources, if any; look for one with another interface or network than the one above:"}, remedy...)
	translating := 0
	for _, n := range chain.NATRules {
		translating += n
	}
	verb, option := "add", "-A"
	if chain.Rules > translating { // an accept or a return may end the search before the last rule
		verb, option = "insert", "-I"
		remedy = append(remedy, "# if none matches this network, or an earlier one accepts these packets, insert one first (where your firewall keeps its own; exceptions for a VPN must stay before it):")
	} else {
		remedy = append(remedy, "# if none matches this network, add one (where your firewall keeps its own):")
	}
	if tool := iptables(chain); tool != "" {
		remedy = append(remedy, f.run(fmt.Sprintf("%s -t nat %s %s -s %s -o %s -j MASQUERADE", tool, option, quote(chain.Name), network, quote(out))))
	} else {
		remedy = append(remedy, f.run("nft "+quote(fmt.Sprintf("%s rule %s %s %s %s saddr %s%s masquerade", verb, chain.Family, chain.Table, chain.Name, familyOf(network), network, nftIface(" oifname ", out)))))
	}
	return append(remedy, "# if one exists already, the packets leave by another interface than the one it matches: policy routing may send marked packets elsewhere:",
		f.run(fmt.Sprintf("ip%s rule show", sixFlag(source))))
}

// newMasquerade makes a chain that translates a network's sources.
func (f facts) newMasquerade(network netip.Prefix, out string) []string {
	family := familyOf(network)
	return []string{f.run("nft add table " + family + " natkit-masquerade"),
		f.run("nft " + quote("add chain "+family+" natkit-masquerade postrouting { type nat hook postrouting priority srcnat; }")),
		f.run("nft " + quote(fmt.Sprintf("add rule %s natkit-masquerade postrouting %s saddr %s%s masquerade", family, family, network, nftIface(" oifname ", out))))}
}

// familyOf is nft's word for the version of IP.
func familyOf(p netip.Prefix) string {
	if p.Addr().Is6() {
		return "ip6"
	}
	return "ip"
}

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
