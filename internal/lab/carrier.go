// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// subscriberBits is the length of the carrier's network of subscribers: 1024 of them.
const subscriberBits = 22

// planCarrier is routed with the network of a carrier: a node of it has the addresses of 1024
// subscribers besides its own, and sockets of it can have any of them.
//
//	┌──────────────────────────┐     ┌─────────────────────────────────────┐     ┌────────────────┐
//	│ client                   │     │ gateway                             │     │ server         │
//	│ eth0                     ├─────┤ eth1                eth0            ├─────┤ eth0           │
//	│ 100.64.0.2/20            │     │ 100.64.0.1/20       203.0.113.1/24  │     │ 203.0.113.2/24 │
//	│ subscribers 100.64.4.0/22│     │                                     │     │                │
//	└──────────────────────────┘     └─────────────────────────────────────┘     └────────────────┘
func planCarrier(o Options) (plan, error) {
	if o.Clients > 1 {
		return plan{}, errors.New("it has one client namespace, which has all subscribers: leave out --clients")
	}
	defaults := Addresses{Client: netip.MustParsePrefix("100.64.0.2/20"), Near: netip.MustParseAddr("100.64.0.1")}
	if o.Addresses.Client == (netip.Prefix{}) {
		o.Addresses.Client = defaults.Client
	}
	if o.Addresses.Near == (netip.Addr{}) {
		o.Addresses.Near = defaults.Near
	}
	p, err := planRouted(o)
	if err != nil {
		return plan{}, err
	}
	a := p.options.Addresses
	subscribers, err := subscribersIn(a.Client.Masked())
	if err != nil {
		return plan{}, err
	}
	for _, host := range []netip.Addr{a.Client.Addr(), a.Near} {
		if subscribers.Contains(host) {
			return plan{}, fmt.Errorf("address %s: of the subscribers, which are %s", host, subscribers)
		}
	}
	p.owned = append(p.owned, ownedPlan{RoleClient, subscribers})
	p.drawing += fmt.Sprintf("subscribers: %s, all in the namespace of the client\n", subscribers)
	return p, nil
}

// subscribersIn are the addresses after the first 1024 of the network. Its last one, the broadcast address, is none of them.
func subscribersIn(network netip.Prefix) (netip.Prefix, error) {
	const longest = subscriberBits - 2
	if network.Bits() > longest {
		return netip.Prefix{}, fmt.Errorf("network %s: no room for a /%d of subscribers, want /%d or shorter", network, subscriberBits, longest)
	}
	b := network.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+1<<(32-subscriberBits))
	return netip.PrefixFrom(netip.AddrFrom4(b), subscriberBits), nil
}

// Subscribers are the addresses of the lab's subscribers; not valid where the topology has none.
func (l *Lab) Subscribers() netip.Prefix {
	for _, o := range l.plan.owned {
		return o.network
	}
	return netip.Prefix{}
}
