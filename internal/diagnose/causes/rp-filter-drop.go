// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

const (
	// Strict reverse-path filtering is right on many machines: it drops what claims
	// to come from somewhere else. It is at fault when it drops a good part of what
	// an interface receives; spoofed packets are a trickle beside real traffic.
	rpFilterShare = 0.05
	rpFilterFew   = 2  // packets below which nothing is said
	rpFilterMany  = 10 // packets from which it is critical, or at least worth advice
)

var rpFilterDrop = Cause{
	Code:     "rp-filter-drop",
	Title:    "Reverse-path filtering drops packets that arrive by another path than their replies take",
	Headline: "Packets arrive but are not forwarded: rp_filter drops them",
	Search: []string{
		"nstat TcpExtIPReversePathFilter",
		"reason: IP_RPFILTER",
		"net.ipv4.conf.all.rp_filter",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanSysctls, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces},
	Symptom:       "Packets from some networks vanish, in one direction only. A capture shows them arriving and nothing leaving.",
	Proof:         fmt.Sprintf("Packets were dropped because of the route to their source (TcpExt.IPReversePathFilter, IP_RPFILTER), at least %s of what the interface received: critical from %d packets, a warning from %d. A smaller share of as many packets is advice.", percent(rpFilterShare), rpFilterMany, rpFilterFew),
	FalsePositive: "rp_filter=1 is the default of many distributions and is harmless if routes are symmetric. A few drops beside much traffic show that the filter works.",
	Cure:          "Set loose filtering (2) on that interface: the source must be reachable by any path. The kernel uses the larger of the interface's value and conf.all, so 2 on the interface is enough.",
	judge:         judgeRPFilter,
}

func judgeRPFilter(f facts) *verdict {
	traced, rows, _ := f.dropped(snapshot.CauseReversePath)
	counted, _ := f.counter("TcpExt.IPReversePathFilter")
	lost := max(traced, counted)
	if lost < rpFilterFew {
		return nil
	}

	// Which interfaces filter, and which of them lost packets.
	all, _ := f.conf("all", "rp_filter")
	mode := map[string]int64{}
	var strict []string
	for _, l := range f.links() {
		own, known := f.conf(l.Name, "rp_filter")
		if !known {
			continue
		}
		mode[l.Name] = max(all, own)
		if mode[l.Name] == 1 {
			strict = append(strict, l.Name)
		}
	}
	wrong := devices(rows)
	if len(wrong) == 0 {
		wrong = strict
	}

	v := &verdict{impact: float64(lost)}
	part, known := f.receivedShare(lost, rows, wrong)
	if !known {
		received, _ := f.counter("Ip.InReceives")
		part, known = share(lost, received), received > 0
	}
	switch {
	case !known && lost < rpFilterMany:
		return nil
	case known && part < rpFilterShare && lost < rpFilterMany:
		return nil
	case known && part < rpFilterShare:
		v.Severity = Advice
		v.Title = fmt.Sprintf("reverse-path filtering dropped %s %s, %s of what arrived", number(lost, "packet"), f.window(), percent(part))
	case known && lost >= rpFilterMany:
		v.Severity = Critical
		v.Title = fmt.Sprintf("reverse-path filtering dropped %s %s", number(lost, "packet"), f.window())
	default:
		v.Severity = Warning
		v.Title = fmt.Sprintf("reverse-path filtering dropped %s %s", number(lost, "packet"), f.window())
	}
	v.Title = titled(v.Title, ", arriving on "+strings.Join(wrong, ", "))
	if counted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped because of the route to their source", strconv.FormatUint(counted, 10), fromNetstat + ": TcpExt IPReversePathFilter"})
	}
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped with reason IP_RPFILTER", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	if known {
		v.Evidence = append(v.Evidence, Evidence{"share of the packets received", percent(part), fromLinks})
	}
	loose := false
	var settings []snapshot.Setting
	for _, name := range wrong {
		m, ok := mode[name]
		if !ok {
			continue
		}
		word := map[int64]string{0: "off", 1: "strict", 2: "loose"}[m]
		v.Evidence = append(v.Evidence, Evidence{"rp_filter of " + name, fmt.Sprintf("%d (%s)", m, word), fromSettings + ": the larger of conf.all and the interface"})
		loose = loose || m == 2
		if m == 1 {
			settings = append(settings, f.local(snapshot.SysctlName("net", "ipv4", "conf", name, "rp_filter"), 2))
		}
	}
	v.Why = "A strict filter drops a packet if its reply would leave by another interface. With asymmetric routes, several providers or policy routing that is every packet of the flows concerned."
	switch {
	case len(settings) > 0:
		v.Remedy = append(v.Remedy, "# loose: the source must be reachable by any interface; or add a route to it through its ingress interface:")
		for _, s := range settings {
			v.Remedy = append(v.Remedy, f.set(s))
		}
	case loose:
		v.Remedy = append(v.Remedy, "# the filter is already loose, so there is no route back to these sources: add one", f.run("ip route show table all"))
	default:
		v.Remedy = append(v.Remedy, "# find the interface, then loosen its filter:", f.run("sysctl -ar '\\.rp_filter$'"), f.natkit("drops --for 10s"))
	}
	v.Settings = settings
	if v.Severity < Warning { // a filter that drops a trickle is not loosened unasked
		for i := range v.Settings {
			v.Settings[i].If = "packets from there are meant to arrive on this interface"
		}
	}
	v.Verify = f.look(f.run("nstat -az TcpExtIPReversePathFilter"))
	return v
}

// receivedShare is the largest share that lost packets have of what one of the interfaces
// received; known is false when it is not known what they received. What was
// lost is taken from rows by interface; without rows all of it is held against
// the packets of all interfaces named.
func (f facts) receivedShare(lost uint64, rows []snapshot.Drop, names []string) (part float64, known bool) {
	byName := map[string]uint64{}
	for _, row := range rows {
		if slices.Contains(names, row.Interface) {
			byName[row.Interface] = saturate(byName[row.Interface], row.Count)
		}
	}
	if len(byName) == 0 {
		var received uint64
		for _, name := range names {
			if l, ok := f.link(name); ok {
				received = saturate(received, l.RxPackets)
			}
		}
		return share(lost, received), received > 0
	}
	for name, n := range byName {
		if l, ok := f.link(name); ok && l.RxPackets > 0 {
			part, known = max(part, share(n, l.RxPackets)), true
		}
	}
	return part, known
}
