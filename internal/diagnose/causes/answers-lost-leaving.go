// SPDX-License-Identifier: Apache-2.0

package causes

// Packets that were seen to leave with a source that nobody outside can reply to.

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Of TCP single packets that connection tracking takes for invalid leave untranslated
	// everywhere.
	leavingFew  = 5
	leavingSome = 0.05 // of what leaves for the Internet by that interface
	leavingMost = 0.20 // critical
	leavingBack = 0.10 // of them: so many answers show that they find their way
)

const fromTap = "packets captured on the interface"

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
		v.Title = fmt.Sprintf("%s of Internet traffic leaving by %s has an untranslated private source", percent.Whole(part), l.Interface)
		if gone {
			v.Title += ": NAT rules are gone"
			v.Evidence = append(v.Evidence, Evidence{"older entries whose source was translated", strconv.FormatUint(f.translatedSources(), 10), fromDump})
			v.Why = "No rule here translates sources, but entries in the table show that one did. Most likely an administrator, or a firewall that started, flushed the rules, and the NAT rules with them."
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
		v.Title = fmt.Sprintf("%s of IPv6 Internet traffic leaving by %s has a unique local source (fc00::/7)", percent.Whole(part), l.Interface)
		v.Why = "Container and guest networks often have unique local IPv6 addresses, which are not routed on the Internet. Programs prefer IPv6, wait for a reply that cannot come, and fall back to IPv4 late or never: everything is slow there, or fails. IPv4 rules do not translate this traffic."
		v.Remedy = []string{`# give that network addresses of the provider's prefix. Or translate them: Docker does with "ip6tables": true in /etc/docker/daemon.json (the default since 27.0); or as a rule:`,
			f.run("nft add table ip6 natkit-masquerade"),
			f.run("nft 'add chain ip6 natkit-masquerade postrouting { type nat hook postrouting priority srcnat; }'"),
			f.run("nft " + quote("add rule ip6 natkit-masquerade postrouting ip6 saddr fc00::/7"+nftIface(" oifname ", l.Interface)+" masquerade")),
			"# or disable IPv6 there; the current rules:", f.run("nft list ruleset ip6")}
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
