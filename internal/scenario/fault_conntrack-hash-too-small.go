// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"strconv"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

// smallHash is the number of buckets of a machine with 64 MB of memory; the
// kernel gives a bucket for each 16 KB.
const smallHash = 4096

var hashFault = Fault{
	Code:    "conntrack-hash-too-small",
	Healthy: "web traffic through a gateway with a tenth of its table in use, judged with the hash that this host has",
	Broken:  fmt.Sprintf("the same facts, judged as if the hash had %d buckets", smallHash),
	Cured:   "the same facts, judged with the number of buckets that the finding asks for",
	Note: "the hash belongs to the whole host, so it is not changed: the doctor judges its facts with another number of buckets, " +
		"and the cure is shown, not run",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.1, 0, "198.18.0.0/24", conntrack.FillOptions{})
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.reads = func(facts *snapshot.Snapshot) { facts.Conntrack.Buckets = smallHash }
		return nil
	},
	cure: func(_ context.Context, s *faultRun, f causes.Finding) error {
		for _, set := range f.Settings {
			if set.Name == "net.netfilter.nf_conntrack_buckets" {
				buckets, err := strconv.ParseUint(set.Value, 10, 64)
				s.reads = func(facts *snapshot.Snapshot) { facts.Conntrack.Buckets = buckets }
				return err
			}
		}
		return fmt.Errorf("the finding sets no number of buckets: %v", f.Settings)
	},
}
