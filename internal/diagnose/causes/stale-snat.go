// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"

	"natkit/internal/snapshot"
)

var staleSNAT = Cause{
	Code:     "stale-snat",
	Title:    "Flows still leave with an external address that this machine no longer has",
	Headline: "VPN or SIP stays dead after the WAN address changed: stale conntrack entries",
	Search: []string{
		"conntrack -D after IP change",
		"SIP registration fails after WAN IP change",
		"ppp reconnect stale conntrack",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Needs:      []string{snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:    "After the external address or the egress interface changed, some flows stay dead until they pause for minutes: VPNs, SIP registrations, games, DNS forwarders. Others work.",
	Proof: fmt.Sprintf("Entries translate sources to an address that no interface here has and no rule gives. Flows that sent in the last %d s are critical from %d, fewer are a warning; without any it is advice.",
		snapshot.RecentSeconds, fewFailures),
	FalsePositive: "A pool of addresses that is routed here without being on an interface: its rule names it. natkit does not judge rules whose addresses cannot be read (maps), or flows in zones. Masquerading removes its entries when an address goes (it does on Linux 6.18). Flows translated to a fixed address stay, also after a masquerade rule became a fixed address.",
	Cure:          "Delete these entries. The next packet of each flow gets the current address.",
	judge:         judgeStaleSNAT,
}

func judgeStaleSNAT(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Table == nil || f.Interfaces == nil || len(f.Interfaces) >= snapshot.MaxInterfaces || !f.rulesKnown() {
		return nil
	}
	var flows, recent uint64
	var gone []snapshot.OutsideUse
	for _, u := range f.Conntrack.Table.Outsides {
		if u.Entries >= implausible || u.Recent > u.Entries || !u.Addr.IsValid() || f.own(u.Addr) || f.given(u.Addr) {
			continue
		}
		gone = append(gone, u)
		flows, recent = saturate(flows, u.Entries), saturate(recent, u.Recent)
	}
	if len(gone) == 0 {
		return nil
	}
	v := &verdict{impact: float64(recent)}
	switch {
	case recent >= fewFailures:
		v.Severity = Critical
	case recent > 0:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Title = fmt.Sprintf("%s translated to %s, which this machine does not have", number(flows, "flow"), gone[0].Addr)
	for _, u := range gone {
		v.Evidence = append(v.Evidence, Evidence{"translated to " + u.Addr.String(), fmt.Sprintf("%s, %d with a packet in the last %d s", number(u.Entries, "flow"), u.Recent, f.recent()), fromDump})
	}
	for _, l := range f.links() {
		for _, p := range l.Addresses {
			if p.Addr().Is4() == gone[0].Addr.Is4() && !p.Addr().IsLinkLocalUnicast() {
				v.Evidence = append(v.Evidence, Evidence{"address of " + l.Name, p.String(), fromLinks})
			}
		}
	}
	v.Evidence = v.Evidence[:min(len(v.Evidence), 20)]
	v.Evidence = append(v.Evidence, Evidence{"rules that translate to it", "none", fromRules})
	v.Why = "The translation of a flow is chosen with its first packet. Replies to the old address most likely no longer arrive here, but the flow's own packets keep its entry alive."
	v.Remedy = []string{"# remove these entries; the rules then translate the next packet again:"}
	for _, u := range gone {
		v.Remedy = append(v.Remedy, f.run("conntrack -D"+conntrackFamily(u.Addr)+" -q "+u.Addr.String()))
	}
	v.Verify = f.look(f.run("conntrack -L" + conntrackFamily(gone[0].Addr) + " -q " + gone[0].Addr.String()))
	return v
}

// conntrackFamily is the option of conntrack(8) for entries with such an address;
// without one it takes those of IPv4.
func conntrackFamily(a netip.Addr) string {
	if a.Is6() {
		return " -f ipv6"
	}
	return ""
}

// concerns says whether packets with such an address meet a chain.
func concerns(c snapshot.Chain, a netip.Addr) bool {
	return c.Family != "ip" && a.Is6() || c.Family != "ip6" && a.Is4()
}

// rulesKnown says whether surely all rules were read.
func (f facts) rulesKnown() bool {
	if f.Chains == nil || len(f.Chains) >= snapshot.MaxChains {
		return false
	}
	for _, c := range f.Capabilities {
		if !c.OK && (c.Name == snapshot.CanNFTables || c.Name == snapshot.CanIPTablesLegacy) {
			return false
		}
	}
	return true
}

// given says whether a rule here may give sources an address.
func (f facts) given(addr netip.Addr) bool {
	for _, c := range f.Chains {
		if c.SNATUnknown && concerns(c, addr) {
			return true
		}
		for _, r := range c.SNATTo {
			if r.First.Compare(addr) <= 0 && addr.Compare(r.Last) <= 0 {
				return true
			}
		}
	}
	return false
}
