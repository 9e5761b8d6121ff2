// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
)

var linkDownFault = Fault{
	Code:    "link-down",
	Healthy: "web traffic through the gateway",
	Broken:  "the gateway's interface to the clients is set down",
	Cured:   "it is set up",

	topology: "routed",
	healthy:  func(ctx context.Context, s *faultRun) error { return s.browse(ctx) },
	broken: func(ctx context.Context, s *faultRun) error {
		return s.shell(ctx, "ip link set dev eth1 down")
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		return s.follow(ctx, f, "ip link set")
	},
}
