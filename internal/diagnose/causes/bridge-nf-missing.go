// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"

	"natkit/internal/snapshot"
)

var bridgeNFMissing = Cause{
	Code:     "bridge-nf-missing",
	Title:    "Replies between containers of one bridge bypass NAT",
	Headline: "Pod cannot reach a service whose backend is on the same node: bridge-nf-call-iptables is 0",
	Search: []string{
		"net.bridge.bridge-nf-call-iptables",
		"bridge-nf-call-iptables does not exist",
		"/proc/sys/net/bridge/bridge-nf-call-iptables: No such file or directory",
		"WARNING: bridge-nf-call-iptables is disabled",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanSysctls, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "A pod reaches a service if its backend is on another node, but not if it is on its own. A container cannot reach a neighbour by the port that the host publishes.",
	Proof:         fmt.Sprintf("At least %d TCP connections between two containers of one bridge saw no reply although their destination was translated, and net.bridge.bridge-nf-call-iptables is 0 or missing. Critical if they were tried in the last %d s.", fewFailures, snapshot.RecentSeconds),
	FalsePositive: "br_netfilter off on a host without Kubernetes or Docker, or with a network plugin that routes between pods instead of bridging: nothing is missing there, and no connection lacks replies.",
	Cure:          "Load br_netfilter: bridged frames then pass connection tracking, which translates the replies back.",
	judge:         judgeBridgeNF,
}

func judgeBridgeNF(f facts) *verdict {
	const key = "net.bridge.bridge-nf-call-iptables"
	on, known := f.sysctl(key)
	if known && on != 0 || f.Sysctls == nil {
		return nil
	}
	h, found := f.hairpins(f.containerBridge)
	if !found || h.example.Target.Addr().Is6() {
		return nil
	}
	v := &verdict{impact: float64(h.entries)}
	v.Severity = h.severity()
	v.Title = fmt.Sprintf("%s on %s to %s saw no reply: bridged replies bypass NAT", number(h.entries, "connection"), h.link.Name, h.example.Dest)
	state := "0"
	if !known {
		state = "missing: br_netfilter is not loaded"
	}
	v.Evidence = append(h.evidence(f.recent()), Evidence{key, state, fromSettings})
	v.Why = "The request is routed and its destination translated. The reply is bridged from port to port and never routed; without br_netfilter it bypasses connection tracking, " +
		"and arrives from an address that the client did not ask."
	setting := f.local(key, 1)
	if !known {
		v.Remedy = append(v.Remedy, "# load it now and at each boot:", "modprobe br_netfilter", "echo br_netfilter > /etc/modules-load.d/br_netfilter.conf")
	}
	v.Settings = []snapshot.Setting{setting}
	v.Remedy = append(v.Remedy, f.set(setting))
	v.Verify = f.look(f.natkit("conntrack list --state SYN_SENT"))
	return v
}
