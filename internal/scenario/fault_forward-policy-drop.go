// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"github.com/google/nftables"

	"natkit/internal/nat/nft"
)

var forwardPolicyFault = Fault{
	Code:    "forward-policy-drop",
	Healthy: "a published port as Docker sets it up: the FORWARD chain drops by policy, and Docker's rules accept what is published",
	Broken:  "the rules of the FORWARD chain are flushed, as a reloaded firewall does it; the policy stays",
	Cured:   "a rule accepts this traffic again",

	topology: "published",
	healthy:  browse,
	broken: func(_ context.Context, s *faultRun) error {
		return nft.Ruleset{{Name: "filter", Chains: []nft.Chain{{Name: "FORWARD", Base: &nft.Base{
			Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookForward,
			Priority: nftables.ChainPriorityFilter, Policy: nftables.ChainPolicyDrop,
		}}}}}.Apply(s.watched.Handle())
	},
	cure: follow("ACCEPT"),
}
