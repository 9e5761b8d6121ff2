// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
)

var snatPortsFault = Fault{
	Code:    "snat-ports-exhausted",
	Healthy: "twenty programs of the client send to one port of the server through masquerading",
	Broken:  "the rule that translates twenty flows to one destination allows four ports",
	Cured:   "a rule before it allows all ports",

	topology: "routed",
	healthy: func(_ context.Context, s *faultRun) error {
		const port = 5353
		server := s.lab.ServerNode()
		if err := s.swallow(server, port); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, port), 20, 20))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		a := s.lab.Options().Addresses
		return nft.Gateway{
			Inside: a.Client.Masked(), Outside: "eth0",
			Address: a.Far.Addr(), Ports: snapshot.PortRange{Min: 5000, Max: 5003},
		}.Compile().Apply(s.watched.Handle())
	},
	cure: follow("1024-65535"),
}
