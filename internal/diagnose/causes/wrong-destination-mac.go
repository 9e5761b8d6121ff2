// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// A switch floods a frame now and then whose receiver it has forgotten.
var (
	astrayFew  = many(10, "frames for a hardware address that nobody has")
	astrayMost = portion(0.20, "of the frames received on that interface, critical")
)

var wrongDestinationMAC = Cause{
	Code:     "wrong-destination-mac",
	Title:    "Frames arrive for a hardware address that no machine here has: the sender's ARP entry is stale",
	Headline: "Some clients get no replies after the router or NIC was replaced: stale ARP entry",
	Search: []string{
		"reason: OTHERHOST",
		"stale ARP entry after failover",
		"ip -s neigh: STALE",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{astrayFew, astrayMost},
	Explains:      []string{"clients-unreached", "asymmetric-routing"},
	Needs:         []string{snapshot.CanFrames, snapshot.CanInterfaces, snapshot.CanDrops},
	Symptom:       "Some clients get no reply from anywhere, while others on the same network do. It began when this machine, its network card or its virtual address was replaced. A capture shows their packets arriving; the stack drops them (OTHERHOST).",
	Proof:         fmt.Sprintf("At least %.0f frames arrived for a hardware address that is not this machine's, from which no frame came during the window and which no neighbour has. They carried packets for this machine's own addresses or for networks behind it. From %s of what arrived on that interface it is critical.", astrayFew.Enter, percent.Whole(astrayMost.Enter)),
	FalsePositive: "A mirror port, a hub, or a switch that floods frames for a host that is there: some machine has that hardware address. Frames between two other hosts of the network. Ports of bridges and bonds.",
	Cure:          "Delete the ARP entry on the sender, or send a gratuitous ARP from here. A static entry must be changed where it is configured.",
	judge:         judgeWrongMAC,
}

func judgeWrongMAC(f facts) *verdict {
	if f.Frames == nil {
		return nil
	}
	type group struct {
		link, to string
		n        uint64
		rows     []snapshot.AstrayFrames
	}
	var groups []*group
	for _, a := range f.Frames.Astray {
		if a.VLAN != 0 || a.Known || a.Count >= implausible || !f.forHere(a) {
			continue
		}
		i := slices.IndexFunc(groups, func(g *group) bool { return g.link == a.Interface && g.to == a.To })
		if i < 0 {
			groups = append(groups, &group{link: a.Interface, to: a.To})
			i = len(groups) - 1
		}
		groups[i].n = saturate(groups[i].n, a.Count)
		groups[i].rows = append(groups[i].rows, a)
	}
	if len(groups) == 0 {
		return nil
	}
	worst := slices.MaxFunc(groups, func(a, b *group) int { return cmp.Compare(a.n, b.n) })
	n := max(worst.n, f.droppedAsOthers(worst.link, worst.n))
	if !f.reaches(n, astrayFew) {
		return nil
	}
	first := worst.rows[0]
	link, _ := f.link(worst.link)
	came := max(link.RxPackets, n)
	v := &verdict{impact: float64(n)}
	v.Severity = Warning
	if share(n, came) >= astrayMost.Enter {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s on %s for %s, which no machine here was seen to have", number(n, "frame"), worst.link, worst.to)
	v.Evidence = []Evidence{
		{"frames for " + worst.to, fmt.Sprintf("%d of the %d that came in by %s", n, came, worst.link), fromFrames},
	}
	for _, a := range worst.rows[:min(len(worst.rows), 3)] {
		v.Evidence = append(v.Evidence, Evidence{"sent by " + a.From, fmt.Sprintf("%s -> %s", a.Source, a.Dest), fromFrames})
	}
	v.Why = "The sender most likely has this hardware address for its gateway, in an ARP entry that is static or older than the replacement of a card or machine. The stack accepts only frames for its own address; it drops the others, and no IP counter shows them."
	gateway := f.addressNear(first.Source, worst.link)
	v.Remedy = []string{fmt.Sprintf("# on the sender (%s, %s): which hardware address does it have for its gateway? Delete the entry with %s:", f.senderName(first), first.From, worst.to),
		"#   ip neigh show | grep -i " + worst.to}
	if gateway.IsValid() {
		v.Remedy = append(v.Remedy, fmt.Sprintf("#   ip neigh del %s dev INTERFACE", gateway),
			"# or announce the right one from here to all hosts, which updates entries that are not static:",
			f.run(fmt.Sprintf("arping -U -c 3 -I %s %s", quote(worst.link), gateway)))
	}
	v.Verify = f.look()
	return v
}

// forHere says whether a frame's packet is for this machine, or for where it leads to: not for another
// host of the interface's own network.
func (f facts) forHere(a snapshot.AstrayFrames) bool {
	if !a.Dest.IsValid() || f.manifold(a.Dest) {
		return false
	}
	if f.own(a.Dest) {
		return true
	}
	to, near := f.linkTo(a.Dest)
	if near && to.Name == a.Interface {
		return false
	}
	forwards, _ := f.sysctl("net.ipv4.ip_forward")
	return (forwards == 1 || f.translatesSources()) && len(f.addressesOf(a.Interface)) > 0
}

// droppedAsOthers is what the tracer counted of frames for others on an interface: the sockets that
// see whose they are keep the first few hundred.
func (f facts) droppedAsOthers(link string, seen uint64) uint64 {
	if f.Drops == nil || seen < frameSample {
		return 0
	}
	var n uint64
	for _, row := range f.Drops.Rows {
		if row.Reason == "OTHERHOST" && row.Interface == link && row.Count < implausible && f.here(row.Netns) {
			n = saturate(n, row.Count)
		}
	}
	return n
}

// frameSample is so many frames that there may be more than were looked at.
const frameSample = 200

// addressesOf are the IPv4 addresses of an interface.
func (f facts) addressesOf(link string) (out []netip.Prefix) {
	l, _ := f.link(link)
	for _, p := range l.Addresses {
		if p.Addr().Is4() {
			out = append(out, p)
		}
	}
	return out
}

// addressNear is this machine's address on the network of a neighbour.
func (f facts) addressNear(neighbour netip.Addr, link string) netip.Addr {
	addrs := f.addressesOf(link)
	for _, p := range addrs {
		if p.Contains(neighbour) {
			return p.Addr()
		}
	}
	if len(addrs) > 0 {
		return addrs[0].Addr()
	}
	return netip.Addr{}
}

// senderName is the sender's address where it is of the interface's network: a router on it sends packets
// of others.
func (f facts) senderName(a snapshot.AstrayFrames) string {
	if l, ok := f.linkTo(a.Source); ok && l.Name == a.Interface {
		return a.Source.String()
	}
	return "the router before " + a.Source.String()
}

const fromFrames = "frames, by a packet socket"
