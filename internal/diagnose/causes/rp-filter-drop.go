// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
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
	Proof:         fmt.Sprintf("Packets were dropped because of the route to their source (TcpExt.IPReversePathFilter, IP_RPFILTER), at least %s of what the interface received: critical from %d packets, a warning from %d. A smaller share of as many packets is advice.", percent.Whole(rpFilterShare), rpFilterMany, rpFilterFew),
	FalsePositive: "rp_filter=1 is the default of many distributions and is harmless if routes are symmetric. A few drops beside much traffic show that the filter works.",
	Cure:          "Set loose filtering (2) on that interface: the source must be reachable by any path. The kernel uses the larger of the interface's value and conf.all, so 2 on the interface is enough.",
	judge:         judgeRPFilter,
}

// filteredSources are packets that reverse-path filtering dropped.
type filteredSources struct {
	rows            []snapshot.Drop
	traced, counted uint64
	mode            map[string]int64 // of each interface: the larger of its own and of all
	wrong           []string         // interfaces that lost packets or, if that is not known, that filter strictly
	part            float64          // of what arrived
	known           bool
}

func (s filteredSources) lost() uint64 { return max(s.traced, s.counted) }

func (f facts) filteredSources() (s filteredSources) {
	s.traced, s.rows, _ = f.dropped(snapshot.CauseReversePath)
	s.counted, _ = f.counter("TcpExt.IPReversePathFilter")
	all, _ := f.conf("all", "rp_filter")
	s.mode = map[string]int64{}
	var strict []string
	for _, l := range f.links() {
		own, known := f.conf(l.Name, "rp_filter")
		if !known {
			continue
		}
		s.mode[l.Name] = max(all, own)
		if s.mode[l.Name] == 1 {
			strict = append(strict, l.Name)
		}
	}
	if s.wrong = devices(s.rows); len(s.wrong) == 0 {
		s.wrong = strict
	}
	s.part, s.known = f.receivedShare(s.lost(), s.rows, s.wrong)
	if !s.known {
		received, _ := f.counter("Ip.InReceives")
		s.part, s.known = share(s.lost(), received), received > 0
	}
	return s
}

func judgeRPFilter(f facts) *verdict {
	s := f.filteredSources()
	lost := s.lost()
	v := &verdict{impact: float64(lost)}
	v.Title = fmt.Sprintf("reverse-path filtering dropped %s %s", number(lost, "packet"), f.window())
	switch {
	case lost < rpFilterFew, !s.known && lost < rpFilterMany, s.known && s.part < rpFilterShare && lost < rpFilterMany:
		return nil
	case s.known && s.part < rpFilterShare:
		v.Severity = Advice
		v.Title += fmt.Sprintf(", %s of what arrived", percent.Whole(s.part))
	case s.known && lost >= rpFilterMany:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = titled(v.Title, ", arriving on "+strings.Join(s.wrong, ", "))
	v.Evidence = s.evidence()
	v.Why = "A strict filter drops a packet if its reply would leave by another interface. With asymmetric routes, several providers or policy routing that is every packet of the flows concerned."
	v.Settings, v.Remedy = f.loosen(s)
	if v.Severity < Warning { // a filter that drops a trickle is not loosened unasked
		for i := range v.Settings {
			v.Settings[i].If = "packets from there are meant to arrive on this interface"
		}
	}
	v.Verify = f.look(f.run("nstat -az TcpExtIPReversePathFilter"))
	return v
}

func (s filteredSources) evidence() (out []Evidence) {
	if s.counted > 0 {
		out = append(out, Evidence{"packets dropped because of the route to their source", strconv.FormatUint(s.counted, 10), fromNetstat + ": TcpExt IPReversePathFilter"})
	}
	if s.traced > 0 {
		out = append(out, Evidence{"packets dropped with reason IP_RPFILTER", strconv.FormatUint(s.traced, 10) + cameInBy(s.rows), fromTracer})
	}
	out = append(out, sampleEvidence(s.rows)...)
	if s.known {
		out = append(out, Evidence{"share of the packets received", percent.Whole(s.part), fromLinks})
	}
	for _, name := range s.wrong {
		if m, ok := s.mode[name]; ok {
			word := map[int64]string{0: "off", 1: "strict", 2: "loose"}[m]
			out = append(out, Evidence{"rp_filter of " + name, fmt.Sprintf("%d (%s)", m, word), fromSettings + ": the larger of conf.all and the interface"})
		}
	}
	return out
}

// loosen is how to have the filter let these packets in.
func (f facts) loosen(s filteredSources) (settings []snapshot.Setting, remedy []string) {
	loose := false
	for _, name := range s.wrong {
		loose = loose || s.mode[name] == 2
		if s.mode[name] == 1 {
			settings = append(settings, f.local(snapshot.SysctlName("net", "ipv4", "conf", name, "rp_filter"), 2))
		}
	}
	switch {
	case len(settings) > 0:
		remedy = []string{"# loose: the source must be reachable by any interface; or add a route to it through its ingress interface:"}
		for _, s := range settings {
			remedy = append(remedy, f.set(s))
		}
		return settings, remedy
	case loose:
		return nil, []string{"# the filter is already loose, so there is no route back to these sources: add one", f.run("ip route show table all")}
	}
	return nil, []string{"# find the interface, then loosen its filter:", f.run("sysctl -ar '\\.rp_filter$'"), f.natkit("drops --for 10s")}
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
