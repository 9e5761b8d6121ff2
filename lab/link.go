// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// setUp configures an interface of the current namespace: bridge it belongs to
// and address, where they are given, and up.
func setUp(name, master string, addr netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	if master != "" {
		bridge, err := netlink.LinkByName(master)
		if err != nil {
			return fmt.Errorf("interface %s: %w", master, err)
		}
		if err := netlink.LinkSetMaster(link, bridge); err != nil {
			return fmt.Errorf("put %s on %s: %w", name, master, err)
		}
	}
	if addr.IsValid() {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.Addr().AsSlice(), Mask: net.CIDRMask(addr.Bits(), 32)}}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("address %s on %s: %w", addr, name, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}
