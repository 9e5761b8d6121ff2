// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"time"

	"natkit/internal/lab"
)

var clientsFault = Fault{
	Code:    "clients-unreached",
	Healthy: "web traffic through the gateway",
	Broken:  "the gateway has a permanent entry with another hardware address for the client",
	Cured:   "the entry is deleted, and the gateway resolves the address again",

	topology: "routed",
	healthy:  browse,
	broken: func(ctx context.Context, s *faultRun) error {
		s.least = 3 * time.Second // a client and its server try again after one, and then after two more
		return s.shell(ctx, fmt.Sprintf("ip neigh replace %s lladdr 02:00:00:00:00:99 nud permanent dev eth1", s.lab.Node(lab.RoleClient).Addr))
	},
	cure: follow("neigh del"),
}
