// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
)

// Testbed is where routers are measured: three namespaces in a row, joined by two
// pairs of veth devices, with plain forwarding in the middle and no netfilter.
//
//	left ── LeftDev ═ InsideDev ── router ── OutsideDev ═ RightDev ── right
//
// The router has routes to Sources by way of the left end and to Targets by way
// of the right end, with permanent neighbours, so that frames from and to any
// address of these networks pass without ARP; the ends own all of them.
type Testbed struct {
	Left, Router, Right     *netns.Handle
	LeftDev, RightDev       string // the ends'
	InsideDev               string // the router's, towards left
	OutsideDev              string // the router's, towards right
	LeftAddr, RightAddr     netip.Addr
	InsideAddr, OutsideAddr netip.Addr // the router's

	lab      *lab.Lab
	toRouter [2]net.HardwareAddr // the router's, towards left and right; nil: nothing is sent from there

	Sources netip.Prefix // 198.18.0.0/16, RFC 2544: hosts that the left end plays
	Targets netip.Prefix // 198.19.0.0/16: servers that the right end plays
}

// The networks that RFC 2544 sets aside for measurements, appendix C.2.2.
var (
	testbedSources = netip.MustParsePrefix("198.18.0.0/16")
	testbedTargets = netip.MustParsePrefix("198.19.0.0/16")
)

// NewTestbed makes a testbed of a lab: the topology routed without rules, with routes to
// the networks that generators play and permanent neighbours. It belongs to this
// process; Close ends it.
func NewTestbed(ctx context.Context) (*Testbed, error) {
	l, err := lab.Up(ctx, "routed", lab.Options{Rules: lab.RulesNone, Owned: true})
	if err != nil {
		return nil, err
	}
	left, router, right := l.Node(lab.RoleClient), l.Node(lab.RoleGateway), l.Node(lab.RoleServer)
	a := l.Options().Addresses
	testbed := &Testbed{
		Left: left.Handle(), Router: router.Handle(), Right: right.Handle(),
		LeftDev: "eth0", RightDev: "eth0", InsideDev: "eth1", OutsideDev: "eth0",
		LeftAddr: left.Addr, RightAddr: right.Addr, InsideAddr: a.Near, OutsideAddr: a.Far.Addr(),
		Sources: testbedSources, Targets: testbedTargets, lab: l,
	}
	toLeft, err3 := hardwareAddr(router, testbed.InsideDev)
	toRight, err4 := hardwareAddr(router, testbed.OutsideDev)
	testbed.toRouter = [2]net.HardwareAddr{toLeft, toRight}
	leftMAC, err1 := hardwareAddr(left, testbed.LeftDev)
	rightMAC, err2 := hardwareAddr(right, testbed.RightDev)
	err = errors.Join(err1, err2, err3, err4, router.Do(func() error {
		return errors.Join(
			leadTo(testbed.InsideDev, testbed.Sources, testbed.LeftAddr, leftMAC),
			leadTo(testbed.OutsideDev, testbed.Targets, testbed.RightAddr, rightMAC),
			receiveByNAPI(testbed.InsideDev), receiveByNAPI(testbed.OutsideDev))
	}), left.Do(func() error { return lab.Own(testbed.Sources) }), right.Do(func() error { return lab.Own(testbed.Targets) }))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare testbed: %w", err), l.Down())
	}
	return testbed, nil
}

// Close removes the testbed and all that is in it.
func (b *Testbed) Close() error { return b.lab.Down() }

// elsewhere tells whether the router between the ends is none of natkit's: there is
// no namespace of it, and the ends are other people's.
func (b *Testbed) elsewhere() bool { return b.lab == nil }

// Node is the testbed's namespace of that role, for routers that run programs in it.
func (b *Testbed) Node(role string) *lab.Node { return b.lab.Node(role) }

func hardwareAddr(n *lab.Node, device string) (mac net.HardwareAddr, err error) {
	err = n.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		mac = l.Attrs().HardwareAddr
		return nil
	})
	return mac, err
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

// leadTo routes a network by way of a neighbour that needs no ARP.
func leadTo(device string, to netip.Prefix, via netip.Addr, mac net.HardwareAddr) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	index := l.Attrs().Index
	if err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: via.AsSlice(), HardwareAddr: mac,
	}); err != nil {
		return fmt.Errorf("set neighbour %s: %w", via, err)
	}
	if err := netlink.RouteReplace(&netlink.Route{LinkIndex: index, Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("set route to %s: %w", to, err)
	}
	return nil
}
