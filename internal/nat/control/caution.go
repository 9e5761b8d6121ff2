// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// What a rule file may say, and most likely does not mean on this machine.

// cautions names rules by which connections to the gateway go elsewhere, or nowhere. local
// are its addresses.
func cautions(file *rulefile.File, local []netip.Addr) (warnings []string) {
	masquerades := slices.ContainsFunc(file.Rules, func(r rulefile.Rule) bool { _, ok := r.Action.(rulefile.Masquerade); return ok })
	for i := range file.Rules {
		r := &file.Rules[i]
		at := fmt.Sprintf("%s:%d:%d", file.Name, r.Position.Line, r.Position.Column)
		switch a := r.Action.(type) {
		case rulefile.Map:
			if a.IsIdentity() {
				continue // what is for the gateway stays the gateway's
			}
			if a.Inside.IsSingleIP() && slices.Contains(local, a.Inside.Addr()) {
				warnings = append(warnings, fmt.Sprintf("%s: %s is the gateway itself: engine ebpf sends to hosts only, and drops these packets", at, a.Inside.Addr()))
			}
			for _, own := range local {
				if !a.Outside.Contains(own) {
					continue
				}
				also := ""
				if masquerades {
					also = "; hosts that are masqueraded behind it get no session where the host of the map has one with the same ports"
				}
				warnings = append(warnings, fmt.Sprintf("%s: %s is the gateway's own: connections to itself there, and answers to its own, go to a host inside%s", at, own, also))
			}
		case rulefile.DNAT:
			if a.Ports.IsZero() && a.Protocol == rulefile.AnyProtocol && slices.Contains(local, a.Address) {
				warnings = append(warnings, fmt.Sprintf("%s: %s is the gateway's own: connections to itself there go to a host inside", at, a.Address))
			}
			for _, t := range a.Targets {
				if slices.Contains(local, t.Address) {
					warnings = append(warnings, fmt.Sprintf("%s: target %s is the gateway itself: engine ebpf sends to hosts only, and drops these packets", at, t.Address))
				}
			}
		}
	}
	return warnings
}

// zoneCautions names inside interfaces behind which the kernel would not answer ARP, as their hosts'
// addresses may be routed to another one. The calling thread is in the namespace.
func zoneCautions(file *rulefile.File) (warnings []string, err error) {
	if !file.Subscribers.ByInterface || len(file.Inside) < 2 {
		return nil, nil
	}
	for _, name := range file.Inside {
		l, missing := netlink.LinkByName(name)
		if missing != nil || l.Attrs().MasterIndex != 0 { // a VRF has routes of its own
			continue
		}
		setting := snapshot.SysctlName("net", "ipv4", "conf", name, "rp_filter")
		own, err := readSetting(setting)
		if err != nil {
			return nil, err
		}
		all, err := readSetting("net.ipv4.conf.all.rp_filter")
		if err != nil {
			return nil, err
		}
		if max(own, all) == "1" {
			warnings = append(warnings, fmt.Sprintf("%s: with rp_filter 1 the kernel answers ARP for hosts only behind the interface that their address is routed to: `sysctl -w %s=2`", name, setting))
		}
	}
	return warnings, nil
}

// foreign looks for addresses that natkit is to answer for and that are others': the next
// hop of a route is refused, because the gateway itself would lose it. Hosts that the gateway
// has heard of, and addresses that no host can have there, are reported. The calling thread
// is in the namespace.
func foreign(proxies []datapath.ProxyNeighbour) (warnings []string, err error) {
	if len(proxies) == 0 {
		return nil, nil
	}
	hops, err := nextHops()
	if err != nil {
		return nil, err
	}
	heard := map[datapath.ProxyNeighbour]string{}
	edges := map[datapath.ProxyNeighbour]bool{}
	for _, name := range linksOf(proxies) {
		if err := hearsay(name, heard, edges); err != nil {
			return nil, err
		}
	}
	var taken, others, unfit []string
	for _, n := range proxies {
		text := n.Addr.String()
		switch {
		case hops[n.Addr]:
			taken = append(taken, text)
		case heard[n] != "":
			others = append(others, text+" ("+heard[n]+" on "+n.Link+")")
		case edges[n]:
			unfit = append(unfit, text)
		}
	}
	if len(taken) > 0 {
		return nil, fmt.Errorf("external address %s is the next hop of a route of this machine: a rule file that gives it to hosts inside cuts the machine off; leave it out", listed(taken))
	}
	if len(others) > 0 {
		warnings = append(warnings, fmt.Sprintf("external addresses that other hosts have: %s: both would answer for them; leave them out", listed(others)))
	}
	if len(unfit) > 0 {
		warnings = append(warnings, fmt.Sprintf("external addresses %s are the first or last of the network they are on, which routers may take for broadcasts: hosts behind them may get no answers", listed(unfit)))
	}
	return warnings, nil
}

// listed names some.
func listed(names []string) string {
	const most = 5
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

func linksOf(proxies []datapath.ProxyNeighbour) (names []string) {
	for _, n := range proxies {
		if !slices.Contains(names, n.Link) {
			names = append(names, n.Link)
		}
	}
	return names
}

// nextHops lists the gateways of routes.
func nextHops() (map[netip.Addr]bool, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	hops := map[netip.Addr]bool{}
	for _, r := range routes {
		if addr, ok := netip.AddrFromSlice(r.Gw.To4()); ok {
			hops[addr] = true
		}
		for _, path := range r.MultiPath {
			if addr, ok := netip.AddrFromSlice(path.Gw.To4()); ok {
				hops[addr] = true
			}
		}
	}
	return hops, nil
}

// hearsay adds the hosts on an interface's network whose MAC addresses are known, and the
// first and last address of its networks.
func hearsay(name string, heard map[datapath.ProxyNeighbour]string, edges map[datapath.ProxyNeighbour]bool) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %q: %w", name, err)
	}
	neighbours, err1 := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_V4)
	addrs, err2 := netlink.AddrList(l, netlink.FAMILY_V4)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("neighbours and addresses of %q: %w", name, err)
	}
	const known = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT
	for _, n := range neighbours {
		if addr, ok := netip.AddrFromSlice(n.IP.To4()); ok && n.State&known != 0 && len(n.HardwareAddr) > 0 {
			heard[datapath.ProxyNeighbour{Link: name, Addr: addr}] = n.HardwareAddr.String()
		}
	}
	for _, a := range addrs {
		ones, _ := a.Mask.Size()
		first, ok := netip.AddrFromSlice(a.IP.Mask(a.Mask).To4())
		if !ok || ones > 30 {
			continue
		}
		network := rulefile.RangeOf(netip.PrefixFrom(first, ones))
		edges[datapath.ProxyNeighbour{Link: name, Addr: network.First}] = true
		edges[datapath.ProxyNeighbour{Link: name, Addr: network.Last}] = true
	}
	return nil
}
