// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"

	"natkit/internal/lab"
)

var wrongMACFault = Fault{
	Code:    "wrong-destination-mac",
	Healthy: "web traffic through the gateway",
	Broken:  "the client's ARP entry for the gateway has the hardware address of a card that is gone",
	Cured:   "the gateway announces its own address",

	topology: "routed",
	healthy:  browse,
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.lab.Node(lab.RoleClient), fmt.Sprintf("ip neigh replace %s lladdr 02:00:00:00:0e:ad nud reachable dev eth0", s.lab.Options().Addresses.Near))
	},
	cure: follow("arping -U"),
}
