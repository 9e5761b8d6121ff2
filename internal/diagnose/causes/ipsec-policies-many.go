// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

const (
	manyPolicies = 100 // of networks: those of single addresses are found by a hash
	busyPolicies = 1000
)

var ipsecPoliciesMany = Cause{
	Code:     "ipsec-policies-many",
	Title:    "Every packet is compared with many IPsec policies",
	Headline: "IPsec with many policies slows all packets: xfrm_lookup in perf",
	Search: []string{
		"perf: xfrm_lookup",
		"perf: __xfrm_decode_session",
		"ip xfrm policy count",
	},
	Severities:    []Severity{Advice},
	Needs:         []string{snapshot.CanXfrm, snapshot.CanInterfaces},
	Symptom:       "CPUs spend time in xfrm_lookup and __xfrm_decode_session for packets that belong to no tunnel.",
	Proof:         fmt.Sprintf("At least %d outbound policies concern networks (policies of single addresses are found by a hash), and %d packets a second arrive. Policies of xfrm interfaces do not count. NAT looks up the policies again for each packet whose source it changed (nf_xfrm_me_harder), but that is not what costs: on Linux 6.18, datagrams through a gateway in namespaces, three runs of 60000 each, took 8.1 to 9.0 us of CPU time with masquerading and no policies, and 9.3 to 10.1 with 1000 network policies; without NAT, 7.2 to 7.3 and 8.5 to 8.7. Without policies the lookup ends at once.", manyPolicies, busyPolicies),
	FalsePositive: "A gateway with few tunnels, whatever its traffic.",
	Cure:          "Use fewer and wider policies, or tunnels with their own interfaces (xfrm interfaces, if_id), whose policies only their packets meet.",
	judge:         judgePolicies,
}

func judgePolicies(f facts) *verdict {
	if f.Xfrm == nil || f.Xfrm.Prefixes < manyPolicies {
		return nil
	}
	var packets uint64
	for _, l := range f.links() {
		if l.RxPackets < implausible {
			packets = saturate(packets, l.RxPackets)
		}
	}
	if f.perSecond(packets) < busyPolicies {
		return nil
	}
	v := &verdict{impact: float64(f.Xfrm.Prefixes)}
	v.Severity = Advice
	v.Title = fmt.Sprintf("each of %.0f packets a second is compared with %d IPsec policies", f.perSecond(packets), f.Xfrm.Prefixes)
	v.Evidence = []Evidence{
		{"outbound policies", fmt.Sprintf("%d, %d of them for networks", f.Xfrm.Policies, f.Xfrm.Prefixes), "IPsec policies, by netlink"},
		{"packets received", strconv.FormatUint(packets, 10), fromLinks},
	}
	v.Why = "For every packet that leaves, the kernel must find out whether it belongs to a tunnel, so it searches the policies, also for traffic that no policy concerns."
	v.Remedy = []string{
		"# the current policies; adjacent networks with the same tunnel may become one:",
		f.run("ip xfrm policy"),
		"# with strongSwan: fewer and wider local_ts and remote_ts; or if_id_in and if_id_out with an xfrm interface and a route, so that only the tunnels' own packets meet policies",
	}
	v.Verify = []string{f.run("ip xfrm policy count"), "natkit profile --for 10s"}
	return v
}
