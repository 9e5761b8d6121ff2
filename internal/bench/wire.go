// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// Wire is two interfaces of this machine with a router between them that natkit
// did not make: frames leave by TX, addressed to the router, and are awaited at RX.
// Nothing is set on the interfaces but XDP programs, which end with the process.
type Wire struct {
	TX, RX           Port
	Sources, Targets netip.Prefix     // whose addresses frames have, from the one given on
	RouterMAC        net.HardwareAddr // where TX sends to; nil: as the route to Targets has it
	Force            bool             // also an interface that has a default route
}

// Port is an interface in a namespace.
type Port struct {
	Netns  *netns.Handle
	Device string
}

// The networks that a wire's frames come from and go to when nobody says otherwise.
var (
	DefaultSources = testbedSources
	DefaultTargets = testbedTargets
)

// ParsePlayed reads a network such as "192.0.2.10/24", of which addresses are
// played from the one given on.
func ParsePlayed(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if a := p.Addr(); err != nil || !a.Is4() || a.IsMulticast() || a.IsLoopback() || a.IsUnspecified() {
		return p, fmt.Errorf("%q: want an IPv4 network such as 192.0.2.0/24, whose addresses are used from the one given on", text)
	}
	return p, nil
}

// addressesOf is how many addresses a network has, from the one given on.
func addressesOf(p netip.Prefix) int {
	return int(uint64(1)<<(32-p.Bits()) - uint64(ipv4(p.Addr())-ipv4(p.Masked().Addr())))
}

// complete checks what does not depend on the machine.
func (w *Wire) complete(flows int) error {
	hosts := (flows + flowsPerSource - 1) / flowsPerSource
	targets := (flows + flowsPerTarget - 1) / flowsPerTarget
	switch {
	case w.TX.Device == "" || w.RX.Device == "":
		return refuseAll([]string{"TX", "RX"}, "want both")
	case w.TX.Device == w.RX.Device && w.TX.Netns.Inode() == w.RX.Netns.Inode():
		return refuse("RX", "%q is also {TX}: want two interfaces, with the router between them", w.RX.Device)
	case hosts > addressesOf(w.Sources):
		return refuse("Sources", "%v: %d flows want %d addresses, %d ports each", w.Sources, flows, hosts, flowsPerSource)
	case targets > addressesOf(w.Targets):
		return refuse("Targets", "%v: %d flows want %d addresses, %d flows each", w.Targets, flows, targets, flowsPerTarget)
	case w.Sources.Overlaps(w.Targets):
		return refuse("Targets", "%v overlaps with {Sources} %v", w.Targets, w.Sources)
	}
	return nil
}

// newWireDUT equips both interfaces, for loads of at most so many flows, and says
// what they are.
func newWireDUT(ctx context.Context, w *Wire, flows int) (l *dut, describe string, err error) {
	l = &dut{name: "external", lost: map[string]int64{}, sessionsLast: wireFor}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	var drivers [2]string
	for i, port := range []Port{w.TX, w.RX} {
		if drivers[i], err = port.check(w.Force); err != nil {
			return l, "", err
		}
	}
	mac := w.RouterMAC
	if mac == nil {
		if mac, err = w.findRouter(ctx); err != nil {
			return l, "", err
		}
	}
	testbed := &Testbed{
		Left: w.TX.Netns, LeftDev: w.TX.Device, Right: w.RX.Netns, RightDev: w.RX.Device,
		Sources: w.Sources, Targets: w.Targets, toRouter: [2]net.HardwareAddr{mac},
	}
	if l.tester, err = newTester(testbed, flows); err != nil {
		return l, "", err
	}
	l.undo = append(l.undo, l.tester.close)
	if err := l.tester.attachSinks(); err != nil {
		return l, "", explainAttach(err)
	}
	if err := l.tryWire(ctx, w); err != nil {
		return l, "", err
	}
	return l, fmt.Sprintf("a router elsewhere, from %s (%s) by way of %v to %s (%s)", w.TX.Device, drivers[0], mac, w.RX.Device, drivers[1]), nil
}

// explainAttach says what to do about an interface that takes no XDP program.
func explainAttach(err error) error {
	switch {
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: its driver has no native XDP; use an interface of one that has, or a veth pair into this one's bridge", err)
	case errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%w: another XDP program is on it; take that off first (ip link set dev INTERFACE xdp off)", err)
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ERANGE):
		return fmt.Errorf("%w: its driver refuses XDP as it is set up; most want an MTU of at most 3500 and no LRO", err)
	}
	return err
}

// check tells whether the interface can be used, and returns its driver.
func (p Port) check(force bool) (driver string, err error) {
	err = p.Netns.Do(func() error {
		l, err := netlink.LinkByName(p.Device)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return fmt.Errorf("interface %q: not found%s", p.Device, p.where())
		}
		if err != nil {
			return fmt.Errorf("interface %q: %w", p.Device, err)
		}
		a := l.Attrs()
		switch {
		case a.Flags&net.FlagUp == 0:
			return fmt.Errorf("interface %q is down%s: bring it up first (ip link set dev %s up)", p.Device, p.where(), p.Device)
		case a.OperState == netlink.OperDown || a.OperState == netlink.OperLowerLayerDown || a.OperState == netlink.OperNotPresent:
			return fmt.Errorf("interface %q has no carrier%s: is its cable plugged, or its peer up?", p.Device, p.where())
		case a.EncapType != "ether" || len(a.HardwareAddr) != 6:
			return fmt.Errorf("interface %q is no Ethernet interface (%s)", p.Device, a.EncapType)
		}
		isDefault, err := hasDefaultRoute(a)
		switch {
		case err != nil:
			return fmt.Errorf("read routes of interface %q: %w", p.Device, err)
		case isDefault && !force:
			return hint("interface %q has this machine's default route%s: a load on it may cut off who works here; use another, or {Force}",
				p.Device, p.where())
		}
		driver = "unknown driver"
		return withEthtool(func(e *ethtool.Ethtool) error {
			if name, err := e.DriverName(p.Device); err == nil { // the loopback device has none
				driver = name
			}
			return nil
		})
	})
	return driver, err
}

func (p Port) where() string {
	if p.Netns.Name() == "" {
		return ""
	}
	return fmt.Sprintf(" in network namespace %q", p.Netns.Name())
}

// hasDefaultRoute tells whether a default route of the calling thread's namespace
// leads through the device, or through a bridge or bond that it is part of.
func hasDefaultRoute(device *netlink.LinkAttrs) (bool, error) {
	through := map[int]bool{device.Index: true}
	for a := device; a.MasterIndex != 0 && !through[a.MasterIndex]; {
		through[a.MasterIndex] = true
		master, err := netlink.LinkByIndex(a.MasterIndex)
		if err != nil {
			return false, err
		}
		a = master.Attrs()
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netlink.RouteList(nil, family)
		if err != nil {
			return false, err
		}
		for _, r := range routes {
			if r.Dst != nil {
				if bits, _ := r.Dst.Mask.Size(); bits > 0 {
					continue
				}
			}
			found := through[r.LinkIndex]
			for _, hop := range r.MultiPath {
				found = found || through[hop.LinkIndex]
			}
			if found {
				return true, nil
			}
		}
	}
	return false, nil
}

// resolveFor is how long a neighbour has to answer.
const resolveFor = 3 * time.Second

// findRouter asks the routing table by whom the first target is reached through TX,
// and the neighbour table for that one's MAC, which the kernel resolves if need be.
func (w *Wire) findRouter(ctx context.Context) (mac net.HardwareAddr, err error) {
	target := w.Targets.Addr()
	const remedy = "name the router's MAC by {RouterMAC}, or add a route (ip route add %v via ROUTER dev %s)"
	err = w.TX.Netns.Do(func() error {
		tx, err := netlink.LinkByName(w.TX.Device)
		if err != nil {
			return err
		}
		routes, err := netlink.RouteGetWithOptions(target.AsSlice(), &netlink.RouteGetOptions{Oif: w.TX.Device})
		if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST || routes[0].LinkIndex != tx.Attrs().Index {
			return hint("no route to %v through %s%s: "+remedy, target, w.TX.Device, w.TX.where(), w.Targets.Masked(), w.TX.Device)
		}
		hop := routes[0].Gw
		if hop == nil {
			hop = target.AsSlice() // on the link itself
		}
		for asked, deadline := false, time.Now().Add(resolveFor); ; {
			neighbours, err := netlink.NeighList(tx.Attrs().Index, unix.AF_INET)
			if err != nil {
				return fmt.Errorf("read neighbours of %s: %w", w.TX.Device, err)
			}
			for _, n := range neighbours {
				if n.IP.Equal(hop) && len(n.HardwareAddr) == 6 && n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) == 0 {
					mac = n.HardwareAddr
					return nil
				}
			}
			if !asked {
				asked = true
				if err := netlink.NeighSet(&netlink.Neigh{
					LinkIndex: tx.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_NONE, Flags: netlink.NTF_USE, IP: hop,
				}); err != nil {
					return fmt.Errorf("ask for neighbour %v on %s: %w", hop, w.TX.Device, err)
				}
			}
			if time.Now().After(deadline) {
				return hint("nobody answers for %v on %s%s: "+remedy, hop, w.TX.Device, w.TX.where(), w.Targets.Masked(), w.TX.Device)
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return mac, err
}

// tryWire sends some frames and says what may be wrong when none of them arrives.
func (l *dut) tryWire(ctx context.Context, w *Wire) error {
	before, err := w.TX.sent()
	if err != nil {
		return err
	}
	try := frameLoad{frames: []int{MinFrame}, flows: 1, pps: 1000, duration: 100 * time.Millisecond, cpus: []int{l.tester.generatorCPU}}
	var t *trial
	for range 3 { // the router may have to find out where RX is
		if t, err = l.tester.run(ctx, try); err != nil {
			return err
		}
		if t.received.frames > 0 {
			return nil
		}
	}
	after, err := w.TX.sent()
	if err != nil {
		return err
	}
	if after == before {
		return fmt.Errorf("interface %q sent none of natkit's frames: its driver must send for XDP (ndo_xdp_xmit), and a veth's peer must receive by NAPI (ethtool -K PEER gro on)",
			w.TX.Device)
	}
	return fmt.Errorf("of %d frames sent none came to %q: the router must have %v as its own MAC, forward from %v, and reach %v by way of %s; "+
		"look at both interfaces with tcpdump, and at the router for a source filter (rp_filter) or an unresolved neighbour",
		after-before, w.RX.Device, l.tester.testbed.toRouter[0], w.Sources.Masked(), w.Targets.Masked(), w.RX.Device)
}

// sent is how many packets the interface counts as sent.
func (p Port) sent() (packets uint64, err error) {
	err = p.Netns.Do(func() error {
		l, err := netlink.LinkByName(p.Device)
		if err != nil {
			return fmt.Errorf("read statistics of %s: %w", p.Device, err)
		}
		packets = l.Attrs().Statistics.TxPackets
		return nil
	})
	return packets, err
}

// wirePlaces reads what the two interfaces say of lost frames.
func (s *tester) wirePlaces() (map[string]int64, error) {
	places := map[string]int64{}
	for _, d := range s.devices() {
		if err := d.ns.Do(func() error {
			l, err := netlink.LinkByName(d.name)
			if err != nil {
				return err
			}
			if n := l.Attrs().Statistics; d == s.devices()[0] {
				places[LostBeforeRouter] += int64(n.TxDropped + n.TxErrors)
			} else {
				places[LostBeforeSink] += int64(n.RxDropped + n.RxMissedErrors)
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("account for lost frames: %w", err)
		}
	}
	return places, nil
}
