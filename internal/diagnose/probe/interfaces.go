// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// interfaces reads the network devices of the namespace and what they lost.
func interfaces() source {
	before := map[int]netlink.LinkStatistics{} // by index: a name may be used again
	return source{
		name:  snapshot.CanInterfaces,
		costs: "MTU differences, bridges and losses of devices are not judged",
		live:  true,
		start: func(*view) error {
			links, err := listWhole(netlink.LinkList)
			if err != nil {
				return fmt.Errorf("list interfaces: %w", err)
			}
			for _, l := range links {
				if a := l.Attrs(); a.Statistics != nil {
					before[a.Index] = *a.Statistics
				}
			}
			return nil
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			links, err := listWhole(netlink.LinkList)
			if err != nil {
				return fmt.Errorf("list interfaces: %w", err)
			}
			addrs, err := listWhole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
			if err != nil {
				return fmt.Errorf("list addresses: %w", err)
			}
			names := map[int]string{}
			for _, l := range links {
				names[l.Attrs().Index] = l.Attrs().Name
			}
			prefixes := map[int][]netip.Prefix{}
			for _, a := range addrs {
				if p, ok := prefixOf(a.IPNet); ok {
					prefixes[a.LinkIndex] = append(prefixes[a.LinkIndex], p)
				}
			}
			outward := defaultRoutes()
			for _, l := range links[:min(len(links), maxInterfaces)] {
				a := l.Attrs()
				i := snapshot.Interface{
					Default:   outward[a.Index],
					Name:      a.Name,
					Index:     a.Index,
					Kind:      l.Type(),
					Master:    names[a.MasterIndex],
					MTU:       a.MTU,
					Up:        a.Flags&net.FlagUp != 0,
					NoCarrier: a.Flags&net.FlagUp != 0 && a.RawFlags&unix.IFF_LOWER_UP == 0,
					Addresses: prefixes[a.Index],

					QueueLength: a.TxQLen,
				}
				if a.Statistics != nil { // a device that is younger than the window has counted from zero
					addStatistics(&i, before[a.Index], *a.Statistics)
				}
				s.Interfaces = append(s.Interfaces, i)
			}
			return nil
		},
	}
}

// addStatistics adds what a device counted in the window.
func addStatistics(i *snapshot.Interface, was, now netlink.LinkStatistics) {
	i.RxPackets = increase(was.RxPackets, now.RxPackets)
	i.TxPackets = increase(was.TxPackets, now.TxPackets)
	i.RxDropped = increase(was.RxDropped, now.RxDropped)
	i.TxDropped = increase(was.TxDropped, now.TxDropped)
	i.RxErrors = increase(was.RxErrors, now.RxErrors)
	i.TxErrors = increase(was.TxErrors, now.TxErrors)
	i.RxMissed = increase(missed(was), missed(now))
}

// missed is what a device had no room for. Drivers count it in one of these.
func missed(s netlink.LinkStatistics) uint64 {
	return s.RxMissedErrors + s.RxFifoErrors + s.RxOverErrors
}

// listWhole lists until nothing changed in that time, a few times; on a host whose
// containers come and go all the time, the last list has to do.
func listWhole[T any](list func() ([]T, error)) (out []T, err error) {
	err = whole(func() error {
		if out, err = list(); errors.Is(err, netlink.ErrDumpInterrupted) {
			return errInterrupted
		}
		return err
	})
	if errors.Is(err, errInterrupted) {
		err = nil
	}
	return out, err
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(addr.Unmap(), ones), true
}

// defaultRoutes are the interfaces, by their index, that default routes lead out by. The route
// to an address is asked for: a router may have a million of them.
func defaultRoutes() map[int]bool {
	out := map[int]bool{}
	for _, documentation := range []string{"192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1"} { // RFC 5737, RFC 3849: mostly nobody's
		routes, err := netlink.RouteGetWithOptions(net.ParseIP(documentation), &netlink.RouteGetOptions{FIBMatch: true})
		if err != nil {
			continue
		}
		for _, r := range routes {
			if r.Dst != nil && !r.Dst.IP.IsUnspecified() {
				continue
			}
			if out[r.LinkIndex] = true; len(r.MultiPath) > 0 {
				for _, hop := range r.MultiPath {
					out[hop.LinkIndex] = true
				}
			}
		}
	}
	delete(out, 0)
	return out
}
