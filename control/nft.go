// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"natkit/datapath"
	"natkit/nat"
	"natkit/nft"
)

// planNFT compiles the file for the kernel's NAT. The calling thread is in the
// namespace.
func (p *Plan) planNFT(file *nat.File, o Options, made []Change) error {
	facts, err := nft.ReadFacts(o.Namespace)
	if err != nil {
		return err
	}
	var warnings []nft.Warning
	if p.ruleset, warnings, err = nft.CompileRules(file, facts); err != nil {
		return err
	}
	for _, w := range warnings {
		p.Warnings = append(p.Warnings, fmt.Sprintf("%s: %s", file.Name, w))
	}
	proxies, err := kernelProxies(file)
	if err != nil {
		return err
	}
	_, reserved, err := localPorts()
	if err != nil {
		return err
	}
	return p.planChanges(nil, proxies, reserved, made)
}

// kernelProxies are the addresses of the file that nobody else has on the networks of
// its outside interfaces. The interfaces need not be there: nftables knows them by name.
func kernelProxies(file *nat.File) (out []datapath.ProxyNeighbour, err error) {
	var ranges []nat.AddressRange
	for i := range file.Pools {
		if !file.Pools[i].Silent {
			ranges = append(ranges, file.Pools[i].Addresses...)
		}
	}
	for i := range file.Rules {
		if !file.Rules[i].Silent {
			ranges = append(ranges, file.Rules[i].OutsideAddresses()...)
		}
	}
	local, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	own := func(a netip.Addr) bool {
		return slices.ContainsFunc(local, func(l netlink.Addr) bool { return l.IP.Equal(a.AsSlice()) })
	}
	for _, name := range file.Outside {
		l, err := netlink.LinkByName(name)
		if err != nil {
			continue
		}
		for _, at := range local {
			if at.LinkIndex != l.Attrs().Index {
				continue
			}
			for _, r := range ranges {
				for i := range min(r.Count(), maxProxies) {
					n := datapath.ProxyNeighbour{Link: name, Addr: r.At(i)}
					if at.IPNet.Contains(n.Addr.AsSlice()) && !own(n.Addr) && !slices.Contains(out, n) {
						out = append(out, n)
					}
				}
			}
		}
	}
	return out, nil
}

// maxProxies bounds the proxy neighbours of one range: a network that large is routed.
const maxProxies = 4096
