// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
)

// What an engine believes of the machine it runs on: natkit writes it, and packets don't
// find out by themselves.

// Link reads what the engine knows of the interface of an index. Ifindex 0: it is not
// there. Name and addresses are not in the engine.
func (e *Engine) Link(index int) (Link, error) {
	var v abiNatLink
	if err := e.m.Links.Lookup(uint32(index), &v); err != nil {
		return Link{}, fmt.Errorf("read interface %d: %w", index, err)
	}
	return Link{
		Index: index, Ifindex: int(v.Ifindex), MAC: v.Mac, MTU: int(v.Mtu),
		Inside:   v.Flags&uint16(abiNatLinkFlagNAT_LINK_INSIDE) != 0,
		Outside:  v.Flags&uint16(abiNatLinkFlagNAT_LINK_OUTSIDE) != 0,
		Transmit: v.Flags&uint16(abiNatLinkFlagNAT_LINK_XDP) != 0,
		Ethernet: v.Flags&uint16(abiNatLinkFlagNAT_LINK_NO_ETHERNET) == 0,
	}, nil
}

// Idle reports whether no mapping and no session has a port of an external address. Of one
// that is leaving it stays so. An address that is given whole is never idle.
func (e *Engine) Idle(a ExternalAddress) (bool, error) {
	if a.OneToOne || a.Ports[0] == 0 {
		return !a.OneToOne, nil
	}
	v := addressOf(a)
	slots, close, err := e.slotsOf(uint32(a.Index), &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, nil // forgotten, by a natkit that was killed then
	}
	if err != nil {
		return false, fmt.Errorf("ports of %s: %w", a.Addr, err)
	}
	used := slices.ContainsFunc(slots, func(s slotMemory) bool { return s[0] != 0 })
	return !used, close()
}

// Forget gives back the room of addresses that are leaving and idle. Their indices may be
// given to others.
func (e *Engine) Forget(addresses []ExternalAddress) error {
	missing := func(err error) error {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return err
	}
	for _, a := range addresses {
		index := uint32(a.Index)
		err := errors.Join(
			missing(e.m.AddressIndices.Delete(abiNatAddr{Octet: a.Addr.As4()})),
			e.m.Addresses.Put(index, &abiNatAddress{}),
			missing(e.m.Slots.Delete(index)),
			missing(e.m.FreePorts.Delete(index)),
			missing(e.m.Blocks.Delete(index)),
		)
		if err != nil {
			return fmt.Errorf("forget external address %s: %w", a.Addr, err)
		}
	}
	return nil
}
