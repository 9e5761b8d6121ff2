// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"

	"natkit/internal/lab"
)

var hairpinFault = Fault{
	Code:    "hairpin-missing",
	Healthy: "a port of the gateway's external address is forwarded to a server in the clients' network; a client of that network uses the server's own address",
	Broken:  "a client of the server's own network uses the gateway's external address",
	Cured:   "the source of traffic back into this network is also translated",

	topology: "routed", clients: 2,
	healthy: func(ctx context.Context, s *faultRun) error {
		server := s.lab.Node(lab.RoleClient + "2")
		http, err := server.ServeHTTP(ctx, ":80", lab.HTTPServerOptions{})
		if err != nil {
			return err
		}
		s.closers = append(s.closers, func() { http.Close() })
		if err := s.run(ctx, s.watched,
			"nft 'add chain ip nat PREROUTING { type nat hook prerouting priority dstnat; }'",
			fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr %s tcp dport 8080 dnat to %s:80", s.lab.Options().Addresses.Far.Addr(), server.Addr)); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(fmt.Sprintf("http://%s/", server.Addr), 50))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic[:0], s.requests(fmt.Sprintf("http://%s:8080/", s.lab.Options().Addresses.Far.Addr()), 50))
		return nil
	},
	cure: follow("MASQUERADE", "hairpin", "conntrack -D"),
}
