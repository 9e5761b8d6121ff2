// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"natkit/internal/kernel/netns"
)

// LocalAddresses are the IPv4 addresses that interfaces of the namespace of h have.
func LocalAddresses(h *netns.Handle, links []string) ([]netip.Addr, error) {
	var addresses []netip.Addr
	err := h.Do(func() error {
		for _, name := range links {
			l, err := net.InterfaceByName(name)
			if err != nil {
				return fmt.Errorf("interface %q: %w", name, err)
			}
			list, err := l.Addrs()
			if err != nil {
				return fmt.Errorf("addresses of %q: %w", name, err)
			}
			for _, a := range list {
				if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
					addresses = append(addresses, netip.AddrFrom4([4]byte(n.IP.To4())))
				}
			}
		}
		return nil
	})
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses), err
}
