// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/lab"
)

var martianFault = Fault{
	Code:    "martian-drop",
	Healthy: "web traffic through the gateway, on which a server listens on 127.0.0.1",
	Broken:  "the gateway's port 8080 is forwarded to that server, and nothing arrives",
	Cured:   "packets that a rule translates to 127.0.0.1 are accepted, and those sent there directly are not",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		server, err := s.watched.ServeHTTP(ctx, "127.0.0.1:80", lab.HTTPServerOptions{})
		if err != nil {
			return err
		}
		s.closers = append(s.closers, func() { server.Close() })
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		for _, line := range []string{
			"nft add table ip published",
			"nft 'add chain ip published prerouting { type nat hook prerouting priority dstnat; }'",
			"nft add rule ip published prerouting tcp dport 8080 dnat to 127.0.0.1:80",
		} {
			if err := s.shell(ctx, line); err != nil {
				return err
			}
		}
		s.traffic = append(s.traffic, s.requests("http://"+s.watched.Addr.String()+":8080/", 50))
		return nil
	},
	cure: follow("natkit-localnet", "route_localnet=1"),
}
