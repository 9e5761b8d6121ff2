// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// The engine's kin of faults whose scenario is about the kernel's NAT: the same codes.
var engineFaults = map[string]Fault{
	"ports": {
		Code:    "snat-ports-exhausted",
		healthy: engine(masquerade + "    ports: 5000-5029\n"),
		broken:  engine(masquerade + "    ports: 5000-5009\n"),
		cure:    followEngine,
	},
	"sessions": {
		Code:    "conntrack-table-full",
		healthy: engine(fmt.Sprintf("limits: {sessions: %d}\n", engineFlows+1) + masquerade),
		broken:  engine(fmt.Sprintf("limits: {sessions: %d}\n", engineFlows-5) + masquerade),
		cure:    followEngine,
	},
	"an interface made again": {
		Code: "engine-drift",
		healthy: do(onGateway("ip link add inside9 type veth peer name peer9", "ip link set inside9 up"),
			engine("inside: [eth1, inside9]\noutside: [eth0]\n"+masquerade), onGateway("ip link set inside9 down", "ip link set inside9 up")),
		broken: onGateway("ip link del inside9", "ip link add inside9 type veth peer name peer9", "ip link set inside9 up"),
		cure:   followEngine,
	},
	"the table of engine nft removed": {
		Code: "engine-drift",
		healthy: func(ctx context.Context, s *faultRun) error {
			s.kind = "nft"
			return engine(masquerade)(ctx, s)
		},
		broken: onGateway("nft flush ruleset"),
		cure:   followEngine,
	},
}

var followEngine = follow("sed -i", "natkit")

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
