// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"natkit/snapshot"
	"natkit/trim"
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
	return append([]string{"# what each packet meets, what of it no rule needs, and what that costs here:", f.natkit("hooks --cost")}, f.replacement()...)
}

// replacement are remedy lines about an engine of natkit's own in the place of the
// kernel's NAT. Who keeps the rules decides whether it fits.
func (f facts) replacement() []string {
	if !f.translates() {
		return nil
	}
	if owner := f.rulesOwner(); owner != "" {
		return []string{fmt.Sprintf("# natkit up, an engine in the place of the kernel's NAT, is not for this machine: its rules are kept by %s, which writes them again", owner)}
	}
	lines := []string{"# natkit's own engine in the place of the kernel's NAT translates before the stack. Read the rules here into a rule file (add --inside and --outside if it asks), look at it, and see what would be done:",
		f.importRules(), f.natkit("up --engine ebpf -f nat.yaml --dry-run")}
	if past := f.past(); len(past) > 0 {
		lines = append(lines, "# packets would then go past what is set up for them here, which natkit up refuses without --bypass: "+strings.Join(past, "; "))
	}
	return append(lines, "# what that gains on this machine, in namespaces of its own:", "natkit bench udp --router nft,ebpf")
}

// translates says whether rules here translate what is forwarded.
func (f facts) translates() bool {
	return slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool {
		return c.NATRules["masquerade"] > 0 || c.NATRules["snat"] > 0 || c.NATRules["dnat"] > 0
	})
}

// ruleKeepers are programs that write the rules of a machine, and write them anew when
// they see fit, by what their chains or tables are called.
var ruleKeepers = []struct {
	who           string
	chains, table string // how the names begin
}{
	{"Kubernetes", "KUBE-", "kube-proxy"},
	{"Docker", "DOCKER", "docker-bridges"},
	{"Podman", "NETAVARK", "netavark"},
	{"a container network (CNI)", "CNI-", "cni_hostport"},
	{"libvirt", "LIBVIRT_", "libvirt_network"},
	{"Incus", "incusbr", "incus"},
	{"LXD", "lxdbr", "lxd"},
	{"firewalld", "FORWARD_IN_ZONES", "firewalld"},
}

// rulesOwner is who keeps the rules here, "" for nobody that can be told.
func (f facts) rulesOwner() string {
	for _, k := range ruleKeepers {
		if slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool {
			return strings.HasPrefix(c.Name, k.chains) || strings.HasPrefix(c.Table, k.table)
		}) {
			return k.who
		}
	}
	for _, o := range f.Owners {
		switch o.Who {
		case "kube-proxy":
			return "Kubernetes"
		case "docker", "dockerd":
			return "Docker"
		case "firewalld":
			return "firewalld"
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
