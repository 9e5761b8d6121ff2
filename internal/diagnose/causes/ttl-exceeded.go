// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// traceroute and mtr let packets expire on purpose, a few a second for each that runs.
	ttlPerSecond = 10.0 // packets a second that no traceroute makes
	ttlShare     = 0.01 // and of those forwarded
	ttlMost      = 0.50 // of ttlMany packets or more: of what mtr sends, one in as many as there are routers expires here
)

var ttlExceeded = Cause{
	Code:     "ttl-exceeded",
	Title:    "The TTL of packets is exceeded at this router, and no loop was seen",
	Headline: "Time to live exceeded without a routing loop: packets reach this router with TTL 1",
	Search: []string{
		"Time to live exceeded",
		"ping: Time to live exceeded on the first hop",
		"nstat IpInHdrErrors",
		"reason: IP_INHDR",
	},
	Severities:    []Severity{Advice, Warning},
	Needs:         []string{snapshot.CanDrops, snapshot.CanFrames, snapshot.CanRoutes, snapshot.CanCounters},
	Symptom:       "Some hosts reach this router and nothing behind it. ping to the Internet shows Time to live exceeded from the router's own address.",
	Proof:         fmt.Sprintf("The TTL of packets was exceeded here (IP_INHDR at ip_forward, Ip.InHdrErrors), and none of them was seen to arrive again. %.0f packets a second that are %s of the forwarded packets are a warning, a smaller share is advice; %d packets that are %s of all packets to forward are a warning.", ttlPerSecond, percent.Whole(ttlShare), ttlMany, percent.Whole(ttlMost)),
	FalsePositive: "traceroute and mtr, with a few probes a second; a single packet from far away. A loop: this is routing-loop. A rule that sets the TTL, or drops by it: this is rule-drop.",
	Cure:          "Raise the TTL at the sender. If the sender is a provider that lets one host pass, set the TTL of what comes from it by a rule.",
	judge:         judgeTTLExceeded,
}

func judgeTTLExceeded(f facts) *verdict {
	t := f.ttl()
	if _, ruled := f.ttlRule(); ruled || len(t.back) > 0 {
		return nil // rule-drop or martian-drop reports it
	}
	lost := t.lost()
	forwarded, known := f.counter("Ip.ForwDatagrams")
	part, whole := share(lost, forwarded), share(lost, saturate(lost, forwarded))
	if t.counted == 0 && onlySix(t.rows) {
		part, known = f.receivedShare(lost, t.rows, devices(t.rows))
		whole = part
	}
	v := &verdict{impact: float64(lost)}
	switch {
	case lost < ttlFew:
		return nil
	case t.tracing && lost >= ttlMany && known && whole >= ttlMost:
		v.Severity = Warning
	case f.perSecond(lost) < ttlPerSecond:
		return nil
	case known && part < ttlShare:
		v.Severity = Advice
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("the TTL of %s%s was exceeded here %s", number(lost, "packet"), cmp.Or(onlySource(t.rows), destinations(t.rows)), f.window())
	v.Evidence = append(t.evidence(), f.wholeEvidence(t.rows, t.counted, "packets forwarded")...)
	if f.Frames != nil {
		v.Evidence = append(v.Evidence, Evidence{"packets seen more than once", "none: no loop was seen", fromFrames})
	}
	v.Why = "A packet whose TTL is used up is dropped, and its sender gets an ICMP error. The sender set a low TTL (some providers allow one host only, TTL 1), or there is a loop elsewhere."
	v.Remedy = []string{"# see which packets, where they come from and where they are sent:", f.natkit("drops --for 10s"), f.run("ip route show"),
		"# on the sender, if it is a Linux host: its first TTL, 64 by default", "sysctl net.ipv4.ip_default_ttl"}
	v.Verify = f.look(f.run("nstat -az IpInHdrErrors"))
	return v
}

// onlySource names the source of all packets that were sampled, if it is one.
func onlySource(rows []snapshot.Drop) string {
	var source netip.Addr
	for _, t := range samples(rows) {
		if source.IsValid() && t.source.Addr() != source {
			return ""
		}
		source = t.source.Addr()
	}
	if !source.IsValid() {
		return ""
	}
	return " from " + source.String()
}
