// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// Bypassed is something that the machine does with packets it forwards, and that
// packets of engine ebpf do not meet: they leave before routing.
type Bypassed struct {
	What   string `json:"what"`   // "chain ip filter/FORWARD"
	Effect string `json:"effect"` // what no longer happens
}

// bypassed lists what engine ebpf would go past on packets between these
// interfaces, which are there. chains are those of a snapshot of the namespace; the rest is asked.
func bypassed(ns *netns.Handle, chains []snapshot.Chain, links []datapath.Link) ([]Bypassed, error) {
	var out []Bypassed
	for _, p := range trim.PastChains(chains) {
		out = append(out, Bypassed(p))
	}
	for _, c := range chains {
		if goneBefore(c, links) {
			out = append(out, Bypassed{fmt.Sprintf("chain %s %s/%s", c.Family, c.Table, c.Name), fmt.Sprintf("packets that natkit translates bypass its %s", plural.Count(c.Rules, "rule"))})
		}
	}
	err := ns.Do(func() error {
		rules, err1 := netlink.RuleList(unix.AF_INET)
		policies, err2 := xfrmPolicies()
		out = append(out, bypassedRules(rules)...)
		if len(policies) > 0 {
			out = append(out, Bypassed{plural.Count(len(policies), "IPsec policy"), "packets of the flows are neither encrypted nor checked against them"})
		}
		var names []string
		var err4 error
		for _, l := range links {
			names = append(names, l.Name)
			programs, err := foreignPrograms(l, "it does not see packets that natkit translates")
			out, err4 = append(out, programs...), errors.Join(err4, err)
		}
		qdiscs, err3 := bypassedQdiscs(names)
		out = append(out, qdiscs...)
		return errors.Join(err1, err2, err3, err4)
	})
	return out, err
}

// kernelNAT reports chains by which the kernel translates as well. The engine meets
// packets first, so where both have an address or an internal host, one undoes the other.
func kernelNAT(chains []snapshot.Chain) (warnings []string) {
	for _, c := range chains {
		if c.Family != "ip" && c.Family != "inet" {
			continue
		}
		name := fmt.Sprintf("chain %s %s/%s", c.Family, c.Table, c.Name)
		if n := c.NATRules["dnat"] + c.NATRules["redirect"] + c.NATRules["netmap"]; n > 0 {
			warnings = append(warnings, fmt.Sprintf("%s has %s by which the kernel sends connections to another address or port: answers of hosts inside go to the engine, "+
				"which knows nothing of these connections; `natkit import` makes rules of a rule file of them", name, plural.Count(n, "rule")))
		}
		if n := c.NATRules["snat"] + c.NATRules["masquerade"]; n > 0 {
			warnings = append(warnings, fmt.Sprintf("%s has %s by which the kernel translates sources: packets that the rule file is about do not meet them, "+
				"and others may get ports of an address that the engine gives to hosts inside", name, plural.Count(n, "rule")))
		}
	}
	return warnings
}

// xfrmPolicies lists the IPsec policies for IPv4.
func xfrmPolicies() ([]netlink.XfrmPolicy, error) {
	policies, err := netlink.XfrmPolicyList(unix.AF_INET)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil // a kernel without IPsec
	}
	if err != nil {
		return nil, fmt.Errorf("list IPsec policies: %w", err)
	}
	return policies, nil
}

// bypassedRules finds policy routing that asks for what only the stack knows: a
// mark. Other rules are asked by the FIB look-up of the engine as well.
func bypassedRules(rules []netlink.Rule) (out []Bypassed) {
	for _, r := range rules {
		if r.Mark != 0 {
			out = append(out, Bypassed{
				fmt.Sprintf("routing rule %d (fwmark %#x, table %d)", r.Priority, r.Mark, r.Table),
				"no chain marks the packets any more, so they are routed without it",
			})
		}
	}
	return out
}

// bypassedQdiscs finds those that shape.
func bypassedQdiscs(interfaces []string) (out []Bypassed, err error) {
	for _, name := range interfaces {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return nil, fmt.Errorf("interface %q: %w", name, err)
		}
		qdiscs, err := netlink.QdiscList(l)
		if err != nil {
			return nil, fmt.Errorf("list queueing disciplines of %q: %w", name, err)
		}
		for _, q := range qdiscs {
			if slices.Contains(trim.Shaping, q.Type()) {
				out = append(out, Bypassed{
					fmt.Sprintf("qdisc %s on %s", q.Type(), name),
					"classes by mark or socket no longer match; on XDP packets are not queued there at all",
				})
			}
		}
	}
	return out, nil
}

// BypassError refuses what packets would go past that somebody set up.
type BypassError struct {
	Packets   string // that go past it: which, and how
	Otherwise string // what may be done instead of accepting it, after that
	Bypassed  []Bypassed
	// Accept and Instead are command lines to type next: one that accepts it, one that does
	// without; "" is not known.
	Accept, Instead string
}

func (e *BypassError) Error() string {
	remedy := "accept it with --bypass" + e.Otherwise
	if e.Accept != "" {
		remedy = "to accept that:\n  " + e.Accept
		if e.Instead != "" {
			remedy += "\nto go on through them:\n  " + e.Instead
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s, and here that means:\n", e.Packets)
	for _, p := range e.Bypassed {
		fmt.Fprintf(&b, "  %s: %s\n", p.What, p.Effect)
	}
	b.WriteString(remedy)
	return b.String()
}
