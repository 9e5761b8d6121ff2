// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"slices"

	"natkit/internal/snapshot"
)

// Unjudged is a cause that may be at work unseen: what would show it could not be read.
type Unjudged struct {
	Code  string   `json:"code"`
	Title string   `json:"title"`
	Lacks []string `json:"missing"` // names of capabilities
}

// NotJudged are the causes of the catalogue that s can't show, without those that were
// found all the same. A source that was waived is not missed (snapshot.Capability).
func NotJudged(s *snapshot.Snapshot, findings []Finding) []Unjudged {
	out := []Unjudged{}
	for _, c := range catalogue {
		if lacks := c.lacks(s); len(lacks) > 0 && !found(findings, c.Code) {
			out = append(out, Unjudged{c.Code, c.Title, lacks})
		}
	}
	return out
}

func found(findings []Finding, code string) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Code == code || found(f.Consequences, code) })
}

// lacks are the sources of those groups that have none which could be read. A source that
// an older natkit did not know of is not missed; a Snapshot without any shows nothing.
func (c *Cause) lacks(s *snapshot.Snapshot) (names []string) {
	missing := func(name string) bool {
		return len(s.Capabilities) == 0 || slices.ContainsFunc(s.Capabilities, func(c snapshot.Capability) bool { return c.Name == name && !c.OK && !c.Waived })
	}
	for _, group := range decisive(c) {
		if !slices.ContainsFunc(group, func(name string) bool { return !missing(name) }) {
			names = append(names, group...)
		}
	}
	return names
}

// decisive are the sources without which a cause can't be judged: one of each group is
// enough. What else is in its Needs adds to the evidence, or keeps it silent about what
// only looks like it.
func decisive(c *Cause) [][]string {
	if groups, ok := sourcesOf[c.Code]; ok {
		return groups
	}
	return [][]string{c.Needs}
}

type groups = [][]string

var (
	each = func(names ...string) (g groups) { // each of these
		for _, n := range names {
			g = append(g, []string{n})
		}
		return g
	}
	either = func(names ...string) groups { return groups{names} }
)

// sourcesOf is decisive by a cause's code; a test holds it against what the causes do.
var sourcesOf = map[string]groups{
	"conntrack-table-full":         each(snapshot.CanConntrack),
	"snat-ports-exhausted":         append(each(snapshot.CanConntrackDump, snapshot.CanNFTables), []string{snapshot.CanConntrackStats, snapshot.CanDrops}),
	"ip-forward-off":               append(each(snapshot.CanInterfaces, snapshot.CanNFTables), []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanSysctls}),
	"forward-policy-drop":          either(snapshot.CanDrops, snapshot.CanNFTables),
	"rp-filter-drop":               either(snapshot.CanCounters, snapshot.CanDrops),
	"no-route":                     either(snapshot.CanCounters, snapshot.CanDrops),
	"next-hop-silent":              each(snapshot.CanDrops),
	"link-down":                    each(snapshot.CanInterfaces),
	"duplicate-address":            each(snapshot.CanFrames, snapshot.CanInterfaces),
	"wrong-destination-mac":        each(snapshot.CanFrames, snapshot.CanInterfaces),
	"vlan-mismatch":                each(snapshot.CanFrames),
	"arp-refused":                  each(snapshot.CanFrames, snapshot.CanInterfaces),
	"conntrack-helper-missing":     each(snapshot.CanConntrackDump, snapshot.CanDrops),
	"rule-drop":                    each(snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanNFTables),
	"answers-lost":                 each(snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy),
	"clients-unreached":            each(snapshot.CanConntrackDump),
	"neighbour-table-full":         each(snapshot.CanNeighbours),
	"routing-loop":                 append(each(snapshot.CanRoutes), []string{snapshot.CanFrames, snapshot.CanDrops}),
	"ttl-exceeded":                 either(snapshot.CanCounters, snapshot.CanDrops),
	"martian-drop":                 each(snapshot.CanDrops),
	"mtu-drop":                     either(snapshot.CanCounters, snapshot.CanDrops),
	"fragments-lost":               either(snapshot.CanCounters, snapshot.CanDrops),
	"checksum-errors":              either(snapshot.CanCounters, snapshot.CanDrops),
	"qdisc-drop":                   append(each(snapshot.CanInterfaces), []string{snapshot.CanDrops, snapshot.CanQdiscs}),
	"softirq-one-cpu":              each(snapshot.CanCPUs),
	"softirq-all-cpus":             each(snapshot.CanCPUs, snapshot.CanCounters),
	"nic-ring-full":                each(snapshot.CanInterfaces),
	"cpu-backlog-full":             either(snapshot.CanCPUs, snapshot.CanDrops),
	"napi-budget":                  each(snapshot.CanCPUs),
	"softirq-delayed":              each(snapshot.CanCPUs, snapshot.CanSoftirqWait),
	"listen-overflow":              either(snapshot.CanCounters, snapshot.CanListeners),
	"receive-buffer-full":          either(snapshot.CanCounters, snapshot.CanDrops),
	"local-ports-exhausted":        each(snapshot.CanLocalPorts, snapshot.CanSysctls),
	"unreplied-flood":              each(snapshot.CanConntrack, snapshot.CanConntrackDump),
	"conntrack-table-nearly-full":  each(snapshot.CanConntrack),
	"time-wait-heavy":              each(snapshot.CanConntrack, snapshot.CanConntrackDump),
	"conntrack-hash-too-small":     each(snapshot.CanConntrack),
	"conntrack-no-memory":          each(snapshot.CanConntrackStats),
	"snat-port-race":               append(each(snapshot.CanConntrackDump, snapshot.CanNFTables), []string{snapshot.CanConntrackStats, snapshot.CanDrops}),
	"dns-race":                     each(snapshot.CanDrops),
	"conntrack-invalid-reset":      each(snapshot.CanConntrackStats, snapshot.CanCounters),
	"stale-snat":                   each(snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy),
	"stale-udp-dnat":               each(snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy),
	"answered-from-elsewhere":      each(snapshot.CanConntrackDump),
	"backend-silent":               either(snapshot.CanRefused, snapshot.CanConntrackDump),
	"hairpin-missing":              each(snapshot.CanConntrackDump, snapshot.CanInterfaces),
	"bridge-nf-missing":            each(snapshot.CanConntrackDump, snapshot.CanInterfaces, snapshot.CanSysctls),
	"asymmetric-routing":           each(snapshot.CanConntrackDump, snapshot.CanConntrackStats),
	"established-timeout-short":    each(snapshot.CanSysctls),
	"syn-flood":                    each(snapshot.CanConntrack, snapshot.CanConntrackDump),
	"conntrack-early-drop":         each(snapshot.CanConntrackStats),
	"conntrack-chain-too-long":     each(snapshot.CanConntrack, snapshot.CanConntrackStats),
	"established-timeout-long":     each(snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanSysctls),
	"close-wait-heavy":             each(snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanSysctls),
	"event-listener-lag":           each(snapshot.CanEventSockets),
	"conntrack-limit-in-container": each(snapshot.CanConntrack, snapshot.CanOwners),
	"iptables-two-backends":        each(snapshot.CanNFTables, snapshot.CanIPTablesLegacy),
	"rule-chain-long":              each(snapshot.CanInterfaces, snapshot.CanNFTables),
	"conntrack-helper":             each(snapshot.CanConntrackDump),
	"conntrack-accounting":         each(snapshot.CanConntrack, snapshot.CanSysctls),
	"br-netfilter-overhead":        each(snapshot.CanInterfaces, snapshot.CanSysctls),
	"needless-hooks":               each(snapshot.CanHooks, snapshot.CanInterfaces, snapshot.CanNFTables),
	"ipsec-policies-many":          each(snapshot.CanInterfaces, snapshot.CanXfrm),
	"port-blocks-exhausted":        each(snapshot.CanEngine),
	"port-block-too-small":         each(snapshot.CanEngine),
	"engine-source-limit":          each(snapshot.CanEngine),
	"engine-drift":                 each(snapshot.CanEngine),
	"accel-slow-path":              each(snapshot.CanEngine),
	"log-gap":                      each(snapshot.CanLog),
	"sink-behind":                  each(snapshot.CanLog),
	"other-drops":                  each(snapshot.CanDrops, snapshot.CanInterfaces),
}
