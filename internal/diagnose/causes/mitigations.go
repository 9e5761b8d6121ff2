// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"natkit/internal/diagnose/trim"
	"natkit/internal/snapshot"
)

// perPacketCost says whether what a packet costs is the limit here, or near it: a
// processor spends most of its time in softirq, and packets of this namespace are what
// it does there.
func (f facts) perPacketCost() bool {
	if !f.ownsCPUs() {
		return false
	}
	return slices.ContainsFunc(f.CPUs, func(c snapshot.CPU) bool {
		return plausibleShare(c.Softirq) && c.Softirq >= oneCPUSoftirq && c.Packets < implausible && f.perSecond(c.Packets) >= manyPackets
	})
}

// cheaperPackets are remedy lines that name what makes a forwarded packet cheaper here,
// the mildest first.
func (f facts) cheaperPackets() []string {
	return append([]string{"# which hooks each packet passes, which of them no rule needs, and what they cost here:", f.natkit("hooks --cost")}, f.beyondNetfilter()...)
}

// beyondNetfilter are remedy lines about what lets packets bypass netfilter: fast-path entries
// for the kernel's NAT, whose rules stay, and natkit's own engine in its place. Who
// keeps the rules decides whether the second fits.
func (f facts) beyondNetfilter() []string {
	if !f.translates() {
		return nil
	}
	lines := []string{"# forward established flows before the kernel stack; rules and connection tracking stay as they are, and TCP also needs --tcp-liberal. See what would be done, and what packets would bypass:",
		f.natkit("accel on " + strings.Join(f.routed(), " ") + " --dry-run")}
	const measured = "# what that gains on this machine, measured in separate namespaces:"
	if owner := f.rulesOwner(); owner != "" {
		return append(lines, fmt.Sprintf("# natkit up, which replaces the kernel's NAT, is not for this machine: its rules are managed by %s, which would write them again", owner),
			measured, "natkit bench udp --router nft,accel --both-ways")
	}
	lines = append(lines, "# or replace the kernel's NAT with the eBPF engine. Import the rules here into a rule file (add --inside and --outside if it asks), read it, and see what would be done:",
		f.importRules(), f.natkit("up --engine ebpf -f nat.yaml --dry-run"))
	if past := f.past(); len(past) > 0 {
		lines = append(lines, "# its packets would bypass what is configured for them here, which natkit up refuses without --bypass: "+strings.Join(past, "; "))
	}
	return append(lines, measured, "natkit bench udp --router nft,accel,ebpf --both-ways")
}

// routed are the two interfaces that most packets come in by, of those that packets are
// routed between; names to fill in where they are not known.
func (f facts) routed() []string {
	links := slices.DeleteFunc(f.links(), func(l snapshot.Interface) bool { return l.Master != "" || l.RxPackets >= implausible })
	slices.SortStableFunc(links, func(a, b snapshot.Interface) int { return cmp.Compare(b.RxPackets, a.RxPackets) })
	if len(links) < 2 {
		return []string{"INSIDE", "OUTSIDE"}
	}
	return []string{quote(links[0].Name), quote(links[1].Name)}
}

// translates says whether rules here translate what is forwarded.
func (f facts) translates() bool {
	return slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool {
		return c.NATRules["masquerade"] > 0 || c.NATRules["snat"] > 0 || c.NATRules["dnat"] > 0
	})
}

// rulesOwner is who keeps the rules here, "" for nobody that can be told.
func (f facts) rulesOwner() string {
	if who := trim.Keeper(f.Chains); who != "" {
		return who
	}
	for _, o := range f.Owners {
		switch o.Who {
		case "kube-proxy", "firewalld":
			return o.Who
		case "docker", "dockerd":
			return "Docker"
		}
	}
	return ""
}

// importRules is the command that makes a rule file of the rules here.
func (f facts) importRules() string {
	from := "nft"
	for _, c := range f.Chains {
		switch {
		case len(c.NATRules) == 0:
		case c.Backend == "iptables-legacy":
			return f.run("iptables-legacy-save") + " | natkit import --from - > nat.yaml"
		case c.Table == "nat" && (c.Name == "PREROUTING" || c.Name == "POSTROUTING"):
			from = "iptables"
		}
	}
	return f.natkit("import --from "+from) + " > nat.yaml"
}

// maxPast is how many things a remark names that packets would go past.
const maxPast = 5

// past names what packets of natkit's own engine would not meet.
func (f facts) past() (out []string) {
	for _, p := range trim.PastChains(f.Chains) {
		out = append(out, p.What+" ("+p.Effect+")")
	}
	if x := f.Xfrm; x != nil && x.Policies > 0 {
		out = append(out, number(uint64(x.Policies), "IPsec policy"))
	}
	for _, l := range f.links() {
		if l.Qdisc != nil && slices.Contains(trim.Shaping, l.Qdisc.Kind) {
			out = append(out, cmp.Or(l.Qdisc.Kind, "a queue")+" on "+l.Name)
		}
	}
	if len(out) > maxPast {
		out = append(out[:maxPast], fmt.Sprintf("and %d more", len(out)-maxPast))
	}
	return out
}
