// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// accelBypassed lists what packets would go past if flows between these interfaces were
// accelerated. What decides for a flow as a whole is not among it, be it a filter or a
// mark: one packet a second of each direction goes through the stack, and the others go
// where that was seen to go. What does something to *each* packet is. VLAN filtering and
// the chains of a bridge are none: its own packets meet them in the bridge.
func accelBypassed(ns *netns.Handle, chains []snapshot.Chain, links []datapath.Link) ([]Bypassed, error) {
	out := bypassedChains(chains, links)
	err := ns.Do(func() error {
		var names []string
		for _, l := range links {
			names = append(names, l.Name)
		}
		policies, err := bypassedPolicies()
		if err != nil {
			return err
		}
		rules, err := netlink.RuleList(unix.AF_INET)
		if err != nil {
			return fmt.Errorf("list routing rules: %w", err)
		}
		out = append(append(out, policies...), bypassedTOS(rules)...)
		qdiscs, err := bypassedQdiscs(names)
		if err != nil {
			return err
		}
		out = append(out, qdiscs...)
		for _, l := range links {
			programs, err := foreignPrograms(l, "it does not see packets that are accelerated")
			if err != nil {
				return err
			}
			out = append(out, programs...)
		}
		if v, err := readSetting(settingAccounting); err == nil && v == "1" {
			out = append(out, Bypassed{settingAccounting, "packets and bytes of connections are counted for somebody, who misses those that are accelerated"})
		}
		return nil
	})
	return out, err
}

// bypassedChains finds chains whose rules do something to each packet of a flow, and those
// before tc's ingress or after the stack.
func bypassedChains(chains []snapshot.Chain, links []datapath.Link) (out []Bypassed) {
	for _, c := range chains {
		name := fmt.Sprintf("chain %s %s/%s", c.Family, c.Table, c.Name)
		switch {
		case c.Hook == "ingress" || c.Hook == "egress": // of family netdev, or inet
			if goneBefore(c, links) {
				out = append(out, Bypassed{name, "its rules do not see packets that are accelerated"})
			}
		case (c.Family == "ip" || c.Family == "inet") && len(c.PerPacket) > 0:
			out = append(out, Bypassed{name, "its rules with " + strings.Join(c.PerPacket, ", ") + " see one packet a second of each flow, not every one"})
		}
	}
	return out
}

// bypassedPolicies finds IPsec for what is forwarded. What is to leave encrypted never
// leaves in clear, so it is not accelerated; but of what came in nobody asks any more
// whether it was encrypted.
func bypassedPolicies() (out []Bypassed, err error) {
	policies, err := xfrmPolicies()
	n := 0
	for _, p := range policies {
		if p.Dir == netlink.XFRM_DIR_FWD {
			n++
		}
	}
	if n > 0 {
		out = append(out, Bypassed{plural.Count(n, "IPsec policy") + " for forwarded packets", "packets that should have come encrypted, and did not, are let in with those of a flow that did"})
	}
	return out, err
}

// bypassedTOS finds policy routing that packets of one flow may meet differently.
func bypassedTOS(rules []netlink.Rule) (out []Bypassed) {
	for _, r := range rules {
		if r.Tos != 0 {
			out = append(out, Bypassed{fmt.Sprintf("routing rule %d (tos %#x, table %d)", r.Priority, r.Tos, r.Table), "packets of a flow go the way of the one a second that is asked for, whatever their own TOS"})
		}
	}
	return out
}

// accelUseless reports what keeps flows from being accelerated though nothing is wrong.
func accelUseless(chains []snapshot.Chain, rules []netlink.Rule) (out []string) {
	for _, c := range chains {
		if c.Offloads > 0 {
			out = append(out, fmt.Sprintf("chain %s %s/%s gives flows to the kernel's flowtable: those are not accelerated, and take that instead", c.Family, c.Table, c.Name))
		}
	}
	for _, r := range rules {
		if r.Mark != 0 {
			out = append(out, fmt.Sprintf("routing rule %d (fwmark %#x, table %d): flows whose mark sends them another way than the main routes are left to the stack", r.Priority, r.Mark, r.Table))
		}
	}
	return out
}
