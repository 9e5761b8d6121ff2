// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

var vlanFew = many(5, "frames with that tag")

var vlanMismatch = Cause{
	Code:     "vlan-mismatch",
	Title:    "Frames for this machine arrive with a VLAN tag that no interface here has",
	Headline: "A new VLAN does not work: tagged frames arrive and nothing replies",
	Search: []string{
		"native VLAN mismatch",
		"tcpdump: ethertype 802.1Q, vlan",
		"reason: OTHERHOST",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{vlanFew},
	Needs:         []string{snapshot.CanFrames, snapshot.CanInterfaces},
	Symptom:       "A new network or trunk is dead. A capture shows tagged requests arriving, and no reply.",
	Proof:         fmt.Sprintf("At least %.0f frames during the window carried a VLAN tag for which there is no interface. They were for this machine's hardware address, or ARP requests for its own addresses that it did not reply to. The stack drops them. Critical from %s of what arrived on that interface.", vlanFew.Enter, percent.Whole(astrayMost.Enter)),
	FalsePositive: "A trunk that carries VLANs this machine has no part in: their broadcasts arrive here too, and are for others. Priority tags (VLAN 0).",
	Cure:          "Add an interface of that VLAN with the address, or let the switch port send this network untagged.",
	judge:         judgeVLAN,
}

func judgeVLAN(f facts) *verdict {
	if f.Frames == nil {
		return nil
	}
	worst := f.worstTag()
	n := worst.count
	if n == 0 || !f.reaches(n, vlanFew) {
		return nil
	}
	link, _ := f.link(worst.link)
	came := max(link.RxPackets, n)
	v := &verdict{impact: float64(n)}
	v.Severity = Warning
	if share(n, came) >= astrayMost.Enter {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s for this machine on %s with VLAN tag %d: no interface has it", number(n, "frame"), worst.link, worst.vlan)
	v.Evidence = []Evidence{
		{fmt.Sprintf("frames with tag %d", worst.vlan), strconv.FormatUint(n, 10), fromFrames},
		{"one of them", worst.example, fromFrames},
		{"frames received on " + worst.link, strconv.FormatUint(came, 10), fromLinks},
	}
	v.Why = "A tagged frame belongs to the interface of its VLAN. If there is none, the stack drops it as a frame for another host; the address of the untagged interface cannot be reached from that VLAN."
	address := "ADDRESS/BITS"
	if worst.asked.IsValid() {
		address = worst.asked.String() + "/BITS"
	}
	name := fmt.Sprintf("%s.%d", worst.link, worst.vlan)
	v.Remedy = []string{"# the current VLAN interfaces:", f.run("ip -d link show type vlan"),
		"# if this machine belongs in that VLAN, create the interface and move the address there:",
		"#   " + f.run(fmt.Sprintf("ip link add link %s name %s type vlan id %d", quote(worst.link), quote(name), worst.vlan)),
		"#   " + f.run(fmt.Sprintf("ip addr add %s dev %s", address, quote(name))),
		"#   " + f.run("ip link set dev "+quote(name)+" up"),
		"# if not, let the switch port send this network untagged (its native or access VLAN)"}
	v.Verify = f.look()
	return v
}

// taggedFrames are frames with a tag that no interface here has.
type taggedFrames struct {
	link    string
	vlan    uint16
	count   uint64
	example string
	asked   netip.Addr // that they ask for
}

// worstTag is the tag with most frames.
func (f facts) worstTag() (worst taggedFrames) {
	type tag struct {
		link string
		vlan uint16
	}
	tags := map[tag]taggedFrames{}
	add := func(link string, vlan uint16, count uint64, example string, asked netip.Addr) {
		if vlan == 0 || count >= implausible {
			return
		}
		t := tags[tag{link, vlan}]
		t.link, t.vlan, t.count, t.example = link, vlan, saturate(t.count, count), cmp.Or(t.example, example)
		if asked.IsValid() {
			t.asked = asked
		}
		tags[tag{link, vlan}] = t
	}
	for _, a := range f.Frames.Astray {
		add(a.Interface, a.VLAN, a.Count, fmt.Sprintf("%s -> %s, from %s", a.Source, a.Dest, a.From), netip.Addr{})
	}
	for _, q := range f.Frames.Asked {
		if q.Answered == 0 {
			add(q.Interface, q.VLAN, q.Count, fmt.Sprintf("%s asks who has %s, from %s", q.Asker, q.Addr, q.MAC), q.Addr)
		}
	}
	for _, t := range tags {
		if t.count > worst.count || t.count == worst.count && t.vlan < worst.vlan {
			worst = t
		}
	}
	return worst
}
