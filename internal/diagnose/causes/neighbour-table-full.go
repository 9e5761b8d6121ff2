// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// neighbourNear is how full the table is, with the kernel clearing it on the
// spot, when it will soon refuse.
const neighbourNear = 0.90

var neighbourTableFull = Cause{
	Code:     "neighbour-table-full",
	Title:    "The neighbour table is full",
	Headline: "neighbour: arp_cache: neighbor table overflow!",
	Search: []string{
		"neighbour: arp_cache: neighbor table overflow!",
		"neighbour: ndisc_cache: neighbor table overflow!",
		"No buffer space available",
		"net.ipv4.neigh.default.gc_thresh3",
		"reason: NEIGH_CREATEFAIL",
	},
	Severities:    []Severity{Warning, Critical},
	Explains:      []string{"next-hop-silent"},
	Needs:         []string{snapshot.CanNeighbours},
	Symptom:       `Different hosts become unreachable in turn, in any namespace of the machine. The kernel logs "neighbor table overflow".`,
	Proof:         fmt.Sprintf("The kernel found no room for a neighbour (table_fulls of /proc/net/stat/arp_cache or ndisc_cache): critical. Or it ran forced garbage collection (forced_gc_runs) while %s of gc_thresh3 were in use: a warning. All namespaces of the host share one table, its limits and its counters, which only the initial namespace shows (checked on Linux 6.18): many containers share 1024 entries by default. Permanent entries are counted but not limited, so the count alone proves nothing.", percent.Whole(neighbourNear)),
	FalsePositive: "Many entries with none removed or refused; forced garbage collection far below the limit, which gc_thresh2 starts.",
	Cure:          "On the host, raise gc_thresh1 to 3 to what the networks on all interfaces and namespaces need.",
	Host:          true,
	NoLab:         "all namespaces of the host share the table: filling it would disconnect everything else there. It was reproduced, and found from two namespaces, in a virtual machine (Linux 6.12)",
	judge:         judgeNeighbours,
}

func judgeNeighbours(f facts) *verdict {
	worst := f.fullestNeighbours()
	if worst == nil || worst.Family != "ipv4" && worst.Family != "ipv6" {
		return nil
	}
	words := map[string]struct{ name, file, flag string }{
		"ipv4": {"ARP", "arp_cache", "-4"}, "ipv6": {"neighbour discovery", "ndisc_cache", "-6"},
	}[worst.Family]
	v := &verdict{impact: float64(worst.TableFulls)}
	v.Severity = Warning
	v.Title = fmt.Sprintf("the neighbour table (%s) is nearly full: %s of %d", words.name, plural.Count(worst.Entries, "entry"), worst.Thresh3)
	if worst.TableFulls > 0 {
		v.Severity = Critical
		v.Title = fmt.Sprintf("the neighbour table (%s) had no room %s", words.name, number(worst.TableFulls, "time")+" "+f.window())
	}
	source := "/proc/net/stat/" + words.file
	if worst.TableFulls > 0 {
		v.Evidence = append(v.Evidence, Evidence{"neighbours for which there was no room", strconv.FormatUint(worst.TableFulls, 10), source + ": table_fulls"})
	}
	if worst.ForcedRuns > 0 {
		v.Evidence = append(v.Evidence, Evidence{"forced garbage collections", strconv.FormatUint(worst.ForcedRuns, 10), source + ": forced_gc_runs"})
	}
	v.Evidence = append(v.Evidence, Evidence{"entries of all namespaces", strconv.FormatUint(worst.Entries, 10), source})
	here := strconv.FormatUint(worst.Here, 10)
	if worst.Busiest != "" {
		here += ", most of them on " + worst.Busiest
	}
	v.Evidence = append(v.Evidence, Evidence{"of them in this namespace", here, "neighbours, by netlink"})
	if worst.Thresh3 > 0 {
		v.Evidence = append(v.Evidence, Evidence{"gc_thresh3, the limit for all of them", strconv.FormatUint(worst.Thresh3, 10), fromSettings})
	}
	_, rows, _ := f.dropped(snapshot.CauseNeighbour)
	if n := total(rows); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped because the neighbour was unknown", strconv.FormatUint(n, 10), fromTracer})
	}
	v.Why = "To send a packet on a network the kernel must know the receiver's hardware address. When the table is full it cannot learn a new one: packets to hosts that are not in it are lost, in every namespace of the machine."
	// As large as twice what there is, and never less than the usual advice.
	limit := uint64(8192)
	for limit < 2*max(min(worst.Entries, 1<<24), min(worst.Thresh3, 1<<24)) {
		limit *= 2
	}
	v.Remedy = []string{"# on the host, room for all namespaces together (an entry takes about half a kilobyte):"}
	for i, share := range []uint64{limit, limit / 2, limit / 8} { // the limit first: each must not be below the next
		s := snapshot.Setting{Name: fmt.Sprintf("net.%s.neigh.default.gc_thresh%d", worst.Family, 3-i), Value: strconv.FormatUint(share, 10)}
		v.Settings = append(v.Settings, s)
		v.Remedy = append(v.Remedy, f.set(s))
	}
	v.Remedy = append(v.Remedy, "# which interfaces have the most; a scan of a large network, by one of its own hosts, fills any table:", f.run("ip "+words.flag+" neigh show"))
	v.Verify = f.look("cat "+source, "sysctl -a --pattern "+quote("net."+worst.Family+".neigh.default.gc_thresh"))
	return v
}

// fullestNeighbours is the table that had no room, or nearly none; nil for none.
func (f facts) fullestNeighbours() (worst *snapshot.Neighbours) {
	for i := range f.Neighbours {
		n := &f.Neighbours[i]
		if n.TableFulls >= implausible || n.ForcedRuns >= implausible || n.Entries >= implausible || n.Thresh3 >= implausible {
			continue
		}
		near := n.ForcedRuns > 0 && n.Thresh3 > 0 && float64(n.Entries) >= neighbourNear*float64(n.Thresh3)
		if (n.TableFulls > 0 || near) && (worst == nil || n.TableFulls > worst.TableFulls) {
			worst = n
		}
	}
	return worst
}
