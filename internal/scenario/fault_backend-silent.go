// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var backendFault = Fault{
	Code:    "backend-silent",
	Healthy: "web traffic to a published port, behind which a program listens",
	Broken:  "the rule translates to a port of the backend on which no program listens any more",
	Cured:   "a rule with the right port",
	Note:    "only the backend knows the right port, so the cure is not a command of the finding",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.serve(ctx, lab.HTTPServerOptions{}); err != nil {
			return err
		}
		if err := s.serviceAt(ctx, s.lab.ServerNode().Addr.String()+":80"); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.service(), 100))
		return nil
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.serviceAt(ctx, s.lab.ServerNode().Addr.String()+":8081")
	},
	cure: func(ctx context.Context, s *faultRun, _ causes.Finding) error {
		return s.serviceAt(ctx, s.lab.ServerNode().Addr.String()+":80")
	},
}

// service is a published port of the gateway's inside address.
func (s *faultRun) service() string {
	return fmt.Sprintf("http://%s:8080/", s.lab.Options().Addresses.Near)
}

// serviceAt has the published port lead to a backend, and to no other.
func (s *faultRun) serviceAt(ctx context.Context, backend string) error {
	return s.run(ctx, s.watched,
		"nft 'add chain ip nat PREROUTING { type nat hook prerouting priority dstnat; }'",
		"nft flush chain ip nat PREROUTING",
		fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr %s tcp dport 8080 dnat to %s", s.lab.Options().Addresses.Near, backend))
}
