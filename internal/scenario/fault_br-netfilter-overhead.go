// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"

	"natkit/internal/lab"
)

var brNetfilterFault = Fault{
	Code:    "br-netfilter-overhead",
	Healthy: "a published port gets twenty requests a second: br_netfilter is on, and costs almost nothing",
	Broken:  "a published port gets a thousand requests a second, and bridged frames go through the IP packet filter",
	Cured:   "bridged frames no longer go through the IP packet filter",

	topology: "published",
	healthy: func(ctx context.Context, s *faultRun) error {
		const key = "net.bridge.bridge-nf-call-iptables"
		if _, err := s.watched.SysctlValue(key); err != nil {
			return errors.New("br_netfilter is not loaded in this kernel (modprobe br_netfilter): bridged frames bypass the packet filter")
		}
		if err := s.serve(ctx, lab.HTTPServerOptions{}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.lab.URL(), 20))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic[:0], s.requests(s.lab.URL(), 1000))
		return nil
	},
	cure: follow("bridge-nf-call-iptables=0"),
}
