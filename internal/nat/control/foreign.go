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

	"natkit/internal/nat/datapath"
	"natkit/internal/snapshot"
)

// What others have on the interfaces where natkit meets packets.

// goneBefore reports whether a chain on devices has rules that natkit's packets do not meet:
// those at ingress come after it, and XDP sends past those at egress.
func goneBefore(c snapshot.Chain, links []datapath.Link) bool {
	return c.Rules > 0 && slices.ContainsFunc(links, func(l datapath.Link) bool {
		return slices.Contains(c.Devices, l.Name) && (c.Hook == "ingress" || c.Hook == "egress" && l.Transmit)
	})
}

// foreignPrograms lists programs of others on an interface that natkit's packets do not
// meet, with what that means for them: at tc's ingress natkit's comes first, and XDP comes
// before everything else. The calling thread is in the namespace.
func foreignPrograms(l datapath.Link, effect string) (out []Bypassed, err error) {
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
			if name := programName(p.ID); !datapath.IsProgram(name) {
				out = append(out, Bypassed{fmt.Sprintf("program %s at %s of %s", name, hook, l.Name), effect})
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
		out = append(out, Bypassed{what, effect})
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
	if name := programName(ebpf.ProgramID(have.ProgId)); !datapath.IsProgram(name) {
		return name
	}
	return ""
}
