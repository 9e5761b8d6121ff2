// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
)

// Who gets no reply asks once a second; one request may be lost, or answered when the window is over.
var arpFew = many(3, "ARP requests of one host without a reply")

var arpRefused = Cause{
	Code:     "arp-refused",
	Title:    "This machine does not reply to ARP for one of its own addresses",
	Headline: "Clients cannot reach their gateway: it does not reply to ARP requests",
	Search: []string{
		"Destination Host Unreachable",
		"No route to host",
		"ip neigh: FAILED",
		"net.ipv4.conf.all.arp_ignore",
		"net.ipv4.conf.all.arp_filter",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{arpFew},
	Explains:      []string{"clients-unreached"},
	Needs:         []string{snapshot.CanFrames, snapshot.CanInterfaces, snapshot.CanSysctls, snapshot.CanNFTables},
	Symptom:       "A network of clients has no gateway. They report \"No route to host\" and `ip neigh` shows FAILED or INCOMPLETE, while this machine has the address, the link is up, and it reaches others.",
	Proof:         fmt.Sprintf("At least %.0f ARP requests of one host arrived for an address that an interface here has, and no reply left. Settings (arp_ignore, arp_filter, rp_filter), rules of the families arp and bridge, and the route back to the client show why. Critical if the address belongs to the ingress interface of the requests.", arpFew.Enter),
	FalsePositive: "Addresses on loopback or a dummy interface that are silent on purpose (arp_ignore on the servers behind a load balancer). Requests that another interface of this machine replied to.",
	Cure:          "Change the setting, rule or route that keeps the reply back.",
	judge:         judgeARPRefused,
}

func judgeARPRefused(f facts) *verdict {
	if f.Frames == nil {
		return nil
	}
	var worst *snapshot.ARPQuestion
	var direct bool
	for i := range f.Frames.Asked {
		q := &f.Frames.Asked[i]
		holder := f.holder(q.Addr)
		if q.VLAN != 0 || q.Count >= implausible || q.Answered > 0 || !f.reaches(q.Count, arpFew) || holder == "" || f.quietHolder(holder) || f.own(q.Asker) {
			continue
		}
		here := holder == q.Interface
		if !here && !f.sharesNetwork(q.Interface, q.Asker) {
			continue // who is on none of that interface's networks is not kept waiting by this machine
		}
		if worst == nil || here && !direct || here == direct && q.Count > worst.Count {
			worst, direct = q, here
		}
	}
	if worst == nil {
		return nil
	}
	v := &verdict{impact: float64(worst.Count)}
	v.Severity = Warning
	if direct {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s asked %s by ARP for %s on %s and got no reply", worst.Asker, number(worst.Count, "time"), worst.Addr, worst.Interface)
	v.Evidence = []Evidence{
		{fmt.Sprintf("ARP requests of %s (%s) for %s", worst.Asker, worst.MAC, worst.Addr), strconv.FormatUint(worst.Count, 10), fromFrames},
		{"replies that left", strconv.FormatUint(worst.Answered, 10), fromFrames},
		{"interface with " + worst.Addr.String(), f.holder(worst.Addr), fromLinks},
	}
	f.whyARPRefused(v, worst)
	v.Verify = f.look()
	return v
}

// whyARPRefused finds what keeps the reply back: the kernel looks at these in this order.
func (f facts) whyARPRefused(v *verdict, q *snapshot.ARPQuestion) {
	v.Why = "Without a reply the client has no hardware address to send to; its packets never leave."
	found := false
	setting := func(key, what string, refuses func(value int64) bool) {
		for _, device := range []string{"all", q.Interface} {
			if value, ok := f.conf(device, key); ok && refuses(value) {
				name := snapshot.SysctlName("net", "ipv4", "conf", device, key)
				v.Evidence = append(v.Evidence, Evidence{name, strconv.FormatInt(value, 10), fromSettings})
				v.Why += " " + what
				off := provided(snapshot.Setting{Name: name, Value: "0", Netns: f.Netns.Name}, "no load balancer or second machine is meant to reply in its place")
				v.Settings = append(v.Settings, off)
				v.Remedy = append(v.Remedy, f.set(off))
				found = true
			}
		}
	}
	setting("arp_ignore", "arp_ignore sets which requests get no reply (1: for an address of another interface, 2: also from outside the address's network, 8: all).", func(value int64) bool {
		// 1 and 2 do not keep the reply back where both are of one network of the interface.
		return value > 2 || value > 0 && f.holder(q.Addr) != q.Interface || value == 2 && !f.sharesNetwork(q.Interface, q.Asker)
	})
	setting("arp_filter", "With arp_filter=1 this machine replies only if the route back to the sender uses the interface on which the request arrived.", func(value int64) bool { return value == 1 })
	for _, c := range f.Chains {
		if c.Family != "arp" && c.Family != "bridge" || c.Policy != "drop" && len(c.DropRules) == 0 {
			continue
		}
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("chain %s of table %s %s", c.Name, c.Family, c.Table), "drops", fromRules})
		v.explains = []string{"rule-drop"}
		v.Why += " Rules of that family see ARP: a rule that drops requests or replies makes the machine unreachable."
		v.Remedy = append(v.Remedy, "# have the rules accept ARP for "+q.Addr.String()+":", f.run(listChain(c)))
		found = true
	}
	if l, ok := f.linkTo(q.Asker); ok && l.Name != q.Interface {
		v.Evidence = append(v.Evidence, Evidence{q.Asker.String() + " is on the network of", l.Name, fromLinks})
	}
	for _, device := range []string{"all", q.Interface} {
		if value, ok := f.conf(device, "rp_filter"); ok && value == 1 && !found {
			v.Why += " With rp_filter=1 a request is also refused if the route back to its sender uses another interface."
			v.Remedy = append(v.Remedy, "# does the route back to the sender use "+q.Interface+"?",
				f.run("ip route get "+q.Asker.String()), f.run("sysctl net.ipv4.conf."+device+".rp_filter"))
			found = true
		}
	}
	if !found {
		v.Remedy = append(v.Remedy, "# does the route back to the sender use "+q.Interface+"? Has the interface ARP (no NOARP)?",
			f.run("ip route get "+q.Asker.String()), f.run("ip link show dev "+quote(q.Interface)))
	}
	v.Remedy = append(v.Remedy, "# rules for ARP of nftables; those of the old back end are listed by arptables-legacy -L -n -v:", f.run("nft list ruleset arp"))
}

// holder is the interface that has an address, "" for none.
func (f facts) holder(addr netip.Addr) string {
	for _, i := range f.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr() == addr {
				return i.Name
			}
		}
	}
	return ""
}

// quietHolder says whether an interface is one on which addresses are kept that others answer for.
func (f facts) quietHolder(name string) bool {
	l, _ := f.link(name)
	return name == "lo" || l.Kind == "dummy" || l.Kind == "loopback"
}

// sharesNetwork says whether an address is of a network of an interface.
func (f facts) sharesNetwork(link string, addr netip.Addr) bool {
	for _, p := range f.addressesOf(link) {
		if p.Masked().Contains(addr) {
			return true
		}
	}
	return false
}
