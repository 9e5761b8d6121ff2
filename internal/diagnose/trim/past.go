// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"fmt"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// Past is something that the machine does with packets it forwards, and that packets
// don't meet which an engine of natkit's own forwards: they leave before routing.
type Past struct {
	What   string // "chain ip filter/FORWARD"
	Effect string // what no longer happens
}

// PastChains finds the chains that forwarded packets walk through and that do more
// than let pass: those at forward, and what mangles or filters at prerouting and
// postrouting. Chains of type nat are what the engine replaces.
func PastChains(chains []snapshot.Chain) (out []Past) {
	for _, c := range chains {
		if c.Family != "ip" && c.Family != "inet" || c.Type == "nat" {
			continue
		}
		if c.Hook != "forward" && c.Hook != "prerouting" && c.Hook != "postrouting" {
			continue
		}
		name := fmt.Sprintf("chain %s %s/%s", c.Family, c.Table, c.Name)
		switch {
		case c.Policy == "drop":
			out = append(out, Past{name, "its policy drop no longer applies to what a natkit rule translates"})
		case c.Rules > 0:
			out = append(out, Past{name, fmt.Sprintf("packets that natkit translates bypass its %s", plural.Count(c.Rules, "rule"))})
		}
	}
	return out
}

// Shaping names the queueing disciplines that treat packets by what the stack knows of
// them. The others only queue, and packets of the engine queue as well: on tc; XDP goes
// past every one.
var Shaping = []string{"htb", "hfsc", "tbf", "cbq", "drr", "prio", "cake", "dsmark", "multiq", "ets", "qfq", "mqprio", "taprio"}
