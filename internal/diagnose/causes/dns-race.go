// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"

	"natkit/internal/snapshot"
)

var dnsRace = Cause{
	Code:     "dns-race",
	Title:    "DNS queries sent at the same time are dropped",
	Headline: "DNS lookups take 5 seconds in Docker or Kubernetes: conntrack race",
	Search: []string{
		"conntrack -S: insert_failed",
		"DNS 5 second delay",
		"options single-request-reopen",
		"conntrack -S: clash_resolve",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrackStats, snapshot.CanDrops, snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "A name lookup sometimes takes 5 seconds, mostly in containers whose resolver is a translated service address.",
	Proof:         fmt.Sprintf("At least %d flows, and one every two seconds, could not be inserted during the window. They were UDP to port 53: the tracer's samples show it. Without samples, port 53 must hold most of the table's UDP flows while nothing translates sources, which could also be the reason. From %.0f a second it is critical.", manyFailures, raceMany),
	FalsePositive: "Clashes that the kernel resolves (clash_resolve): nothing is lost. Linux 6.18 resolved all of 11 000 made on purpose, with and without translation to two backends.",
	Cure:          "Use a newer kernel, a resolver on the node that needs no translation, sequential queries (single-request-reopen), or TCP (use-vc).",
	NoLab:         "Linux 6.18 resolves such clashes without loss; the counters of a kernel that loses them are tested",
	judge:         judgeDNSRace,
}

func judgeDNSRace(f facts) *verdict {
	lost, rows, ok := f.raced()
	if !ok || lost < manyFailures || f.perSecond(lost) < raceSome || judgeSNATPorts(f) != nil {
		return nil
	}
	switch {
	case len(samples(rows)) > 0:
		if !mostlyDNS(rows) {
			return nil
		}
	case f.Conntrack == nil || f.Conntrack.Table == nil || f.Chains == nil || f.translatesSources():
		return nil // it may as well be source translation
	default:
		t := f.Conntrack.Table
		i := slices.IndexFunc(t.DestPorts, func(p snapshot.PortUse) bool { return p.Protocol == "udp" && p.Port == 53 })
		if i < 0 || share(t.DestPorts[i].Entries, t.ByProtocol["udp"]) < 0.5 {
			return nil
		}
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	if f.perSecond(lost) >= raceMany {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s dropped %s because another packet of the flow was faster", number(lost, "DNS packet"), f.window())
	v.Evidence = append(f.raceEvidence(lost, rows), Evidence{"kernel", orUnknown(f.Host.Kernel), "/proc/sys/kernel/osrelease"})
	if n, known := f.stat("clash_resolve"); known {
		v.Evidence = append(v.Evidence, Evidence{"clashes that the kernel resolved", fmt.Sprint(n), fromStats + ": clash_resolve"})
	}
	v.Why = "A resolver sends its queries for A and AAAA from one socket at the same time. Each creates an entry for the same flow; only one can be inserted, and an old kernel drops the other packet. The resolver then waits 5 seconds."
	v.Remedy = []string{
		"# in /etc/resolv.conf of the clients (glibc; musl has no such option), or dnsConfig.options of a pod:",
		"# options single-request-reopen",
		"# better: a DNS cache on each node that needs no translation (NodeLocal DNSCache), and a recent kernel",
	}
	v.Verify = f.look(f.run("conntrack -S"))
	return v
}

// mostlyDNS says whether most of the packets that the tracer kept are UDP to port 53.
func mostlyDNS(rows []snapshot.Drop) bool {
	packets, queries := samples(rows), 0
	for _, t := range packets {
		if t.protocol == "udp" && t.dest.Port() == 53 {
			queries++
		}
	}
	return 2*queries > len(packets)
}
