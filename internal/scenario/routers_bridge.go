// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/lab"
	"natkit/internal/nat/nft"
)

// bridgeRouter has a bridge in the middle of the testbed. Two of them that differ in shows
// alone tell what br_netfilter costs.
//
//	routed:   InsideDev ═ bridge ── routed, translated ── OutsideDev   as a container's frames
//	switched: InsideDev ═ bridge ═ OutsideDev                          as between two of them
type bridgeRouter struct {
	name, describe string
	switched       bool
	shows          bool // frames of the bridge to the hooks of IP
}

const measuredBridge = "br0"

func (r bridgeRouter) Name() string     { return r.name }
func (r bridgeRouter) Describe() string { return r.describe }
func (r bridgeRouter) NAT() bool        { return !r.switched }

func (r bridgeRouter) Install(_ context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	rules := gateway(b, o).Compile()
	if r.switched {
		rules = nft.IdleNAT() // so that its frames are tracked, where they are shown
	}
	node := b.Node(lab.RoleGateway)
	// Every namespace has its own setting. Nothing is loaded for a measurement: the
	// bridges of the machine would have br_netfilter, too.
	switch _, err := node.SysctlValue(callIPTables); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &bench.UnsupportedError{Router: r.name, Reason: "br_netfilter is not loaded"}
	case err != nil:
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	if err := node.Sysctl(callIPTables, map[bool]string{false: "0", true: "1"}[r.shows]); err != nil {
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	var inside netlink.Link
	remove := func() error {
		return errors.Join(rules.Remove(b.Router), b.Router.Do(func() error {
			err := netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: measuredBridge}})
			if inside != nil {
				err = errors.Join(err, netlink.LinkSetHardwareAddr(inside, inside.Attrs().HardwareAddr))
			}
			return err
		}))
	}
	err := b.Router.Do(func() (err error) {
		if inside, err = netlink.LinkByName(b.InsideDev); err != nil {
			return err
		}
		return r.bridge(inside, b.OutsideDev)
	})
	if err == nil {
		err = rules.Apply(b.Router)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("router %s: %w", r.name, err), remove())
	}
	return remove, nil
}

// bridge makes the bridge in the calling thread's namespace. The frames' destination is
// the address that inside has had.
func (r bridgeRouter) bridge(inside netlink.Link, outside string) error {
	to := inside.Attrs().HardwareAddr
	own := to
	if r.switched { // else a port's own address, which frames go up for
		own = net.HardwareAddr{0x02, 0, 0, 0, 0, 1}
		if err := netlink.LinkSetHardwareAddr(inside, own); err != nil {
			return err
		}
	}
	snooping := false // or it joins a group, by packets of its own that are tracked
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: measuredBridge, HardwareAddr: own}, MulticastSnooping: &snooping}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make bridge: %w", err)
	}
	if err := errors.Join(netlink.LinkSetMaster(inside, bridge), netlink.LinkSetUp(bridge)); err != nil || !r.switched {
		return err
	}
	port, err := netlink.LinkByName(outside)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetMaster(port, bridge); err != nil {
		return err
	}
	return netlink.NeighSet(&netlink.Neigh{LinkIndex: port.Attrs().Index, Family: unix.AF_BRIDGE,
		Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: to})
}
