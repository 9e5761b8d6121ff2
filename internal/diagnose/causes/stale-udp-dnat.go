// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

var staleUDPDNAT = Cause{
	Code:     "stale-udp-dnat",
	Title:    "UDP flows continue to an address that the service has left",
	Headline: "UDP service dead for some clients after a container or pod restart: stale conntrack entries",
	Search: []string{
		"stale UDP conntrack entries",
		"conntrack -D -p udp",
		"conntrack: [UNREPLIED]",
	},
	Severities:    []Severity{Warning, Critical},
	Explains:      []string{"next-hop-silent"},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces, snapshot.CanCounters, snapshot.CanDrops},
	Symptom:       "After a container, pod or backend was replaced, some clients get no reply, while clients that start again do: DNS, syslog, SIP, QUIC, VPNs. It heals when a client pauses or restarts.",
	Proof:         fmt.Sprintf("One of these holds. UDP flows that sent in the last %d s without a reply are translated to an address that no rule names any more. Or they are for an address of this machine and not translated, although a rule would translate them now, and found no socket. Or the tracer saw packets of such flows that found no neighbour or route at their translated address. From %d flows or lost packets it is critical.", snapshot.RecentSeconds, fewFailures),
	FalsePositive: "A backend that is dead but still named by the rules is backend-silent. Flows with replies whose packets are not lost: the old backend may be finishing them. natkit does not judge rules whose targets cannot be read (maps), or what IPVS translates.",
	Cure:          "Delete exactly these entries, after every change of the rules. kube-proxy and Docker try to do it themselves.",
	judge:         judgeStaleDNAT,
}

func judgeStaleDNAT(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Table == nil || f.Interfaces == nil || !f.rulesKnown() {
		return nil
	}
	stale, flows, untranslated := f.staleFlows()
	lost, rows, traced := f.lostOnTheWay()
	for _, u := range traced {
		same := func(o snapshot.UnansweredUse) bool {
			return o.Source == u.Source && o.Dest == u.Dest && o.Target == u.Target
		}
		if !slices.ContainsFunc(stale, same) {
			stale = append(stale, u)
			flows = saturate(flows, 1)
		}
	}
	if len(stale) == 0 {
		return nil
	}
	v := &verdict{impact: float64(max(flows, lost))}
	v.Severity = Warning
	if max(flows, lost) >= fewFailures {
		v.Severity = Critical
	}
	first := stale[0]
	if first.Target == first.Dest {
		v.Title = fmt.Sprintf("%s to %s, untranslated: older than the rule for it", goesOn(flows), first.Dest)
	} else {
		v.Title = fmt.Sprintf("%s to %s via %s, which no rule names any more", goesOn(flows), first.Dest, first.Target)
	}
	v.Evidence = []Evidence{{"such flows at least", strconv.FormatUint(flows, 10), fmt.Sprintf("%s: without a reply, with a packet in the last %d s; samples of the tracer", fromDump, f.recent())}}
	if lost > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets without a neighbour or route there", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	}
	for _, u := range stale[:min(len(stale), 3)] {
		v.Evidence = append(v.Evidence, Evidence{"from " + u.Source.String(), fmt.Sprintf("%s, goes to %s", u.Dest, u.Target), fromDump})
	}
	if n, _ := f.counter("Udp.NoPorts"); untranslated && n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"UDP packets for which there was no socket", strconv.FormatUint(n, 10), fromSnmp + ": Udp NoPorts"})
	}
	v.Why = "Only the first packet of a flow passes the NAT rules; the entry keeps the result. UDP has no end that connection tracking could see: while the client keeps sending, each packet renews the entry and goes to the old address."
	v.Remedy = []string{"# remove these entries; the rules then translate the next packet again:"}
	v.Remedy = append(v.Remedy, f.removeFlows(stale)...)
	v.Verify = f.look(f.natkit("conntrack list --proto udp --dst " + first.Dest.Addr().String()))
	return v
}

// staleFlows are flows whose entry leads elsewhere than the rules would now; untranslated: one of
// them to this machine itself.
func (f facts) staleFlows() (stale []snapshot.UnansweredUse, flows uint64, untranslated bool) {
	for _, u := range f.Conntrack.Table.Unanswered {
		if u.Protocol != "udp" || u.Recent == 0 || u.Recent >= implausible || !u.Source.IsValid() || !u.Dest.IsValid() || !u.Target.IsValid() {
			continue
		}
		if u.Target == u.Dest {
			if !f.own(u.Dest.Addr()) || !f.wouldTranslate(u.Dest.AddrPort) || !f.nobodyListens(u.Dest.AddrPort) {
				continue
			}
			untranslated = true
		} else if f.own(u.Target.Addr()) || !f.targetGone(u.Target.AddrPort) || !f.wouldTranslate(u.Dest.AddrPort) && !f.onlyRulesTranslate() {
			continue
		}
		stale = append(stale, u)
		flows = saturate(flows, u.Recent)
	}
	return stale, flows, untranslated
}

// removeFlows are commands that remove the entries of flows.
func (f facts) removeFlows(flows []snapshot.UnansweredUse) (remedy []string) {
	seen := map[string]bool{}
	for _, u := range flows {
		command := fmt.Sprintf("conntrack -D%s -p udp -d %s --dport %d", conntrackFamily(u.Dest.Addr()), u.Dest.Addr(), u.Dest.Port())
		if u.Target != u.Dest {
			command += fmt.Sprintf(" -r %s", u.Target.Addr())
		}
		if !seen[command] {
			seen[command] = true
			remedy = append(remedy, f.run(command))
		}
	}
	return remedy
}

// lostOnTheWay is UDP packets that were translated to a target that no rule names any
// more and found no neighbour or no route there, and their flows: those that
// were answered once are seen in no other way.
func (f facts) lostOnTheWay() (lost uint64, rows []snapshot.Drop, flows []snapshot.UnansweredUse) {
	for _, cause := range []snapshot.NATCause{snapshot.CauseNeighbour, snapshot.CauseNoRoute} {
		_, dropped, _ := f.dropped(cause)
		for _, row := range dropped {
			stale := false
			for _, sample := range row.Samples {
				packet, ok1 := parseSample(sample)
				flow, ok2 := parseFlow(sample)
				target, dest := packet.dest, flow.dest
				if !ok1 || !ok2 || packet.protocol != "udp" || target == dest || isAnswer(sample) ||
					f.own(target.Addr()) || !f.targetGone(target) || !f.wouldTranslate(dest) && !f.onlyRulesTranslate() {
					continue
				}
				stale = true
				flows = append(flows, snapshot.UnansweredUse{Protocol: "udp", Source: flow.source.Addr(), Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(target)})
			}
			if stale {
				lost = saturate(lost, row.Count)
				rows = append(rows, row)
			}
		}
	}
	return lost, rows, flows
}

// parseFlow reads the flow, as it began, that a sampled packet belongs to:
// "udp 10.0.0.2:4000 -> 172.17.0.2:53 (flow 10.0.0.2:4000 -> 10.0.0.1:53)".
func parseFlow(sample string) (tuple, bool) {
	protocol, _, _ := strings.Cut(sample, " ")
	_, flow, ok := strings.Cut(sample, "(flow ")
	flow, _, closed := strings.Cut(flow, ")")
	if !ok || !closed {
		return tuple{}, false
	}
	return parseSample(protocol + " " + flow)
}

func goesOn(flows uint64) string {
	if flows == 1 {
		return "1 UDP flow continues"
	}
	return fmt.Sprintf("%d UDP flows continue", flows)
}

// targetGone says whether surely no rule leads to a target any more.
func (f facts) targetGone(target netip.AddrPort) bool {
	for _, c := range f.Chains {
		if c.DNATUnknown && concerns(c, target.Addr()) {
			return false
		}
		for _, t := range c.DNATTo {
			ports := t.Ports == (snapshot.PortRange{}) || t.Ports.Min <= target.Port() && target.Port() <= t.Ports.Max
			if t.First.Compare(target.Addr()) <= 0 && target.Addr().Compare(t.Last) <= 0 && ports {
				return false
			}
		}
	}
	return true
}

// onlyRulesTranslate says whether destinations are translated by rules here, and
// surely not by IPVS, which leaves the same entries without a rule.
func (f facts) onlyRulesTranslate() bool {
	return f.translatesDestinations() && f.Hooks != nil &&
		!slices.ContainsFunc(f.Hooks, func(h snapshot.Hook) bool { return strings.HasPrefix(h.Function, "ip_vs_") })
}

// wouldTranslate says whether a rule with plain conditions translates UDP packets for dest.
func (f facts) wouldTranslate(dest netip.AddrPort) bool {
	_, _, ok := f.publishes("udp", dest)
	return ok
}

// publishes finds a rule with plain conditions that translates packets of a protocol for
// dest: one that names the address, or any of this machine's own. By which interface they
// must come in is not known.
func (f facts) publishes(protocol string, dest netip.AddrPort) (snapshot.Chain, snapshot.Target, bool) {
	for _, c := range f.Chains {
		for _, t := range c.DNATTo {
			if t.Protocol == protocol && t.DestPorts.Min > 0 && t.DestPorts.Min <= dest.Port() && dest.Port() <= t.DestPorts.Max &&
				(t.Dest == dest.Addr() || !t.Dest.IsValid() && t.First.Is6() == dest.Addr().Is6() && f.own(dest.Addr())) {
				return c, t, true
			}
		}
	}
	return snapshot.Chain{}, snapshot.Target{}, false
}

// nobodyListens says whether UDP packets for dest met no socket: as the tracer
// saw, or, without it, by the counter of all such packets.
func (f facts) nobodyListens(dest netip.AddrPort) bool {
	if f.Drops == nil {
		n, _ := f.counter("Udp.NoPorts")
		return n > 0
	}
	for _, row := range f.Drops.Rows {
		if row.Reason != "NO_SOCKET" || !f.here(row.Netns) {
			continue
		}
		for _, t := range samples([]snapshot.Drop{row}) {
			if t.protocol == "udp" && t.dest == dest {
				return true
			}
		}
	}
	return false
}
