// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
)

var ipForwardFault = Fault{
	Code:    "ip-forward-off",
	Healthy: "the doctor watches the web server behind the gateway: a host with forwarding off, which is normal for hosts",
	Broken:  "forwarding is off on the gateway",
	Cured:   "forwarding is turned on",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		s.watched = s.lab.ServerNode()
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.watched = s.lab.NATNode()
		return s.watched.Sysctl("net.ipv4.ip_forward", "0")
	},
	cure: follow("sysctl -w"),
}
