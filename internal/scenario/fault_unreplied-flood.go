// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
)

var unrepliedFault = Fault{
	Code:    "unreplied-flood",
	Healthy: "a client sends to a few hundred ports without a reply, as a monitor does",
	Broken:  "a client scans ten thousand ports, and none replies",
	Cured:   "the gateway limits the client's packets before they cost an entry, and removes the present entries",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.spray(s.lab.ServerNode().Addr, 300, 10000))
		return nil
	},
	broken: func(ctx context.Context, s *faultRun) error {
		scan := s.spray(s.lab.ServerNode().Addr, 10000, 20000)
		s.traffic = append(s.traffic[:0], scan)
		return scan(ctx) // has begun before the doctor comes
	},
	cure: follow("nft add", "nft 'add", "conntrack -D"),
}
