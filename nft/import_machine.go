// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"natkit/internal/netns"
)

// Listers are the programs that can be asked for the rules of a machine, and how.
var Listers = map[string][]string{
	"iptables": {"iptables-save", "-t", "nat"},
	"nft":      {"nft", "-j", "list", "ruleset"},
}

// ReadRules asks one of the Listers for the rules of the namespace of h.
func ReadRules(ctx context.Context, h *netns.Handle, lister string) ([]byte, error) {
	command := Listers[lister]
	if command == nil {
		return nil, fmt.Errorf("no program %q lists rules", lister)
	}
	var out, complaint bytes.Buffer
	err := h.Do(func() error {
		cmd := exec.CommandContext(ctx, command[0], command[1:]...)
		cmd.Stdout, cmd.Stderr = &out, &complaint
		return cmd.Run()
	})
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("list rules: %w (or give its output from elsewhere with --from FILE)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("run %s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(complaint.String()))
	}
	return out.Bytes(), nil
}

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
