// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/testutil/ktest"
)

// The engine's kin of faults whose scenario is about the kernel's NAT: the same codes.
var engineFaults = map[string]Fault{
	"ports": {
		Code: "snat-ports-exhausted", topology: "routed",
		healthy: func(ctx context.Context, s *faultRun) error { return s.engine(ctx, s.engineRules("", "5000-5029")) },
		broken:  func(ctx context.Context, s *faultRun) error { return s.engine(ctx, s.engineRules("", "5000-5009")) },
		cure:    followAll,
	},
	"sessions": {
		Code: "conntrack-table-full", topology: "routed",
		healthy: func(ctx context.Context, s *faultRun) error {
			return s.engine(ctx, s.engineRules(fmt.Sprintf("sessions: %d", engineFlows+1), ""))
		},
		broken: func(ctx context.Context, s *faultRun) error {
			return s.engine(ctx, s.engineRules(fmt.Sprintf("sessions: %d", engineFlows-5), ""))
		},
		cure: followAll,
	},
	"an interface made again": {
		Code: "engine-drift", topology: "routed",
		healthy: func(ctx context.Context, s *faultRun) error {
			if err := s.run(ctx, s.watched, "ip link add inside9 type veth peer name peer9", "ip link set inside9 up"); err != nil {
				return err
			}
			if err := s.engine(ctx, "inside: [eth1, inside9]\noutside: [eth0]\n"+s.engineRules("", "")); err != nil {
				return err
			}
			return s.run(ctx, s.watched, "ip link set inside9 down", "ip link set inside9 up")
		},
		broken: func(ctx context.Context, s *faultRun) error {
			return s.run(ctx, s.watched, "ip link del inside9", "ip link add inside9 type veth peer name peer9", "ip link set inside9 up")
		},
		cure: followAll,
	},
	"the table of engine nft removed": {
		Code: "engine-drift", topology: "routed",
		healthy: func(ctx context.Context, s *faultRun) error {
			s.kind = "nft"
			return s.engine(ctx, s.engineRules("", ""))
		},
		broken: func(ctx context.Context, s *faultRun) error { return s.run(ctx, s.watched, "nft flush ruleset") },
		cure:   followAll,
	},
}

func followAll(ctx context.Context, s *faultRun, f causes.Finding) error {
	return s.follow(ctx, f, "sed -i", "natkit")
}

// The doctor sees natkit's engine: what it refuses has the code of the kernel's kin, and
// the printed commands cure it, from the host and from inside.
func TestEngineFaults(t *testing.T) {
	ktest.Root(t)
	for name, f := range engineFaults {
		for _, inside := range []bool{false, true} {
			if inside && testing.Short() {
				continue
			}
			t.Run(fmt.Sprintf("%s, inside %v", name, inside), func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
				defer cancel()
				printed := newPrinted(t, inside)
				_, err := f.Run(ctx, FaultOptions{inside: inside, command: printed.command, check: printed.check, Step: func(s *FaultStep) error {
					t.Logf("%s: %s", s.Name, titles(s.Findings))
					for _, c := range s.Commands {
						t.Logf("  %s", c)
					}
					checkPrinted(t, s.Findings)
					return nil
				}})
				if err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}
