// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

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

// awaitUp waits until an interface of the current namespace is operational.
func awaitUp(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, fmt.Errorf("interface %s is not up after 10 s", name))
	defer cancel()
	for {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
