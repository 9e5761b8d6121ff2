// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["ipsec-policies-many"] = func(s *snapshot.Snapshot) { s.Xfrm = &snapshot.Xfrm{Policies: 1200, Prefixes: 1000} }
}

func TestPolicies(t *testing.T) {
	run(t, []row{
		{"a thousand tunnels", examples["ipsec-policies-many"], "advice ipsec-policies-many"},
		{"a few tunnels", func(s *snapshot.Snapshot) { s.Xfrm = &snapshot.Xfrm{Policies: 12, Prefixes: 12} }, ""},
		{"single addresses", func(s *snapshot.Snapshot) { s.Xfrm = &snapshot.Xfrm{Policies: 1200} }, ""},
		{"few packets", func(s *snapshot.Snapshot) {
			examples["ipsec-policies-many"](s)
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 400, 500
		}, ""},
		{"absurd", func(s *snapshot.Snapshot) { s.Xfrm = &snapshot.Xfrm{Policies: -5, Prefixes: -5} }, ""},
	})
}
