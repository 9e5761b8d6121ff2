// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/datapath"
	"natkit/internal/netns"
	"natkit/snapshot"
)

// accelBypassed lists what packets would go past if flows between these interfaces were
// accelerated. What decides for a flow as a whole is not among it, be it a filter, a mark
// or IPsec: one packet a second of each direction goes through the stack, and the others
// go where that was seen to go. What does something to *each* packet is.
func accelBypassed(ns *netns.Handle, chains []snapshot.Chain, links []datapath.Link) ([]Bypassed, error) {
	out := bypassedPerPacket(chains)
	err := ns.Do(func() error {
		var names []string
		for _, l := range links {
			names = append(names, l.Name)
		}
		qdiscs, err := bypassedQdiscs(names)
		if err != nil {
			return err
		}
		out = append(out, qdiscs...)
		for _, l := range links {
			programs, err := foreignPrograms(l)
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

// bypassedPerPacket finds chains whose rules do something to each packet of a flow.
func bypassedPerPacket(chains []snapshot.Chain) (out []Bypassed) {
	on := func(c snapshot.Chain) bool {
		return c.Type != "nat" && (c.Hook == "forward" || c.Hook == "prerouting" || c.Hook == "postrouting")
	}
	forwards := map[string]bool{} // tables that forwarded packets meet with other chains than nat's
	for _, c := range chains {
		if on(c) {
			forwards[c.Family+" "+c.Table] = true
		}
	}
	for _, c := range chains {
		name := fmt.Sprintf("chain %s %s/%s", c.Family, c.Table, c.Name)
		if c.Hook == "ingress" && c.Rules > 0 { // of family netdev, or inet
			out = append(out, Bypassed{name, "its rules do not see packets that are accelerated"})
			continue
		}
		if c.Family != "ip" && c.Family != "inet" || c.Table == "nat" || len(c.PerPacket) == 0 {
			continue
		}
		if on(c) || c.Hook == "" && forwards[c.Family+" "+c.Table] {
			out = append(out, Bypassed{name, "its rules with " + strings.Join(c.PerPacket, ", ") + " see one packet a second of each flow, not every one"})
		}
	}
	return out
}

// foreignPrograms lists programs of others on an interface that accelerated packets do
// not meet: at tc's ingress natkit's comes first, and XDP comes before everything else.
func foreignPrograms(l datapath.Link) (out []Bypassed, err error) {
	for hook, at := range map[string]ebpf.AttachType{"tc ingress": ebpf.AttachTCXIngress, "tc egress": ebpf.AttachTCXEgress} {
		if at == ebpf.AttachTCXEgress && !l.Transmit {
			continue // what tc sends meets it
		}
		result, err := link.QueryPrograms(link.QueryOptions{Target: l.Ifindex, Attach: at})
		if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
			continue // Linux 6.5 and older
		}
		if err != nil {
			return nil, fmt.Errorf("list programs at %s of %q: %w", hook, l.Name, err)
		}
		for _, p := range result.Programs {
			if name := programName(p.ID); !datapath.IsAccelProgram(name) {
				out = append(out, Bypassed{fmt.Sprintf("program %s at %s of %s", name, hook, l.Name), "it does not see packets that are accelerated"})
			}
		}
	}
	filters := map[string]bool{}
	for hook, parent := range map[string]uint32{"tc ingress": netlink.HANDLE_MIN_INGRESS, "tc egress": netlink.HANDLE_MIN_EGRESS} {
		if hook == "tc egress" && !l.Transmit {
			continue
		}
		have, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: l.Ifindex}}, parent)
		if err != nil {
			return nil, fmt.Errorf("list tc filters of %q: %w", l.Name, err)
		}
		for _, f := range have {
			if datapath.IsFilter(f) {
				continue
			}
			filters[fmt.Sprintf("tc filter %s at %s of %s", f.Type(), strings.TrimPrefix(hook, "tc "), l.Name)] = true
		}
	}
	for _, what := range slices.Sorted(maps.Keys(filters)) {
		out = append(out, Bypassed{what, "it does not see packets that are accelerated"})
	}
	slices.SortStableFunc(out, func(a, b Bypassed) int { return strings.Compare(a.What, b.What) })
	return out, nil
}

// programName is the name of a program, its number if it has none to be read.
func programName(id ebpf.ProgramID) string {
	if p, err := ebpf.NewProgramFromID(id); err == nil {
		defer p.Close()
		if info, err := p.Info(); err == nil {
			return info.Name
		}
	}
	return fmt.Sprint(id)
}

// foreignXDP is the name of somebody else's XDP program on an interface, "" if there is
// none: only one can be there.
func foreignXDP(l netlink.Link) string {
	have := l.Attrs().Xdp
	if have == nil || !have.Attached {
		return ""
	}
	if name := programName(ebpf.ProgramID(have.ProgId)); !datapath.IsAccelProgram(name) {
		return name
	}
	return ""
}

// AccelBypassError refuses to accelerate where packets would go past what somebody set up.
type AccelBypassError struct{ Bypassed []Bypassed }

func (e *AccelBypassError) Error() string {
	var b strings.Builder
	b.WriteString("most packets would not go through the stack any more, and here that means:\n")
	for _, p := range e.Bypassed {
		fmt.Fprintf(&b, "  %s: %s\n", p.What, p.Effect)
	}
	b.WriteString("accept it with --bypass")
	return b.String()
}
