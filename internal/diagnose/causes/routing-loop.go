// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

const (
	// traceroute and mtr let packets expire on purpose, a few a second for each that
	// runs. A loop uses up the hops of everything that is sent into it.
	ttlFew       = 3    // packets whose route leads back, from which it is a loop
	ttlMany      = 10   // the same, critical
	ttlPerSecond = 10.0 // without the route, packets a second that no traceroute makes
	ttlShare     = 0.01 // and of those forwarded; a looping packet is forwarded up to 32 times by each of two routers
	ttlMost      = 0.50 // of ttlMany packets or more: of what mtr sends, one in as many as there are routers expires here
)

var circlesFew = many(3, "packets that arrived more than once")

var routingLoop = Cause{
	Code:     "routing-loop",
	Title:    "Packets loop between two routers",
	Headline: "Time to live exceeded: a routing loop between two routers",
	Search: []string{
		"Time to live exceeded",
		"TTL expired in transit",
		"nstat IpInHdrErrors",
		"reason: IP_INHDR",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{circlesFew},
	Explains:      []string{"qdisc-drop"},
	Needs:         []string{snapshot.CanDrops, snapshot.CanFrames, snapshot.CanRoutes, snapshot.CanCounters},
	Symptom:       "Some addresses cannot be reached, traceroute shows the same two routers in turn, and a little traffic to them fills the line between.",
	Proof:         fmt.Sprintf("The TTL of packets was exceeded here (IP_INHDR at ip_forward, Ip.InHdrErrors), and the route of one of them leads out by its ingress interface: a loop, critical from %d packets. The same if packets return by the egress interface of their route with one of this machine's own addresses as source (IP_LOCAL_SOURCE): packets that a gateway has masqueraded end this way. The same if a packet arrives repeatedly on one interface with a smaller TTL each time: packets expire at either of the two routers, depending on the sender's first TTL. If routes cannot be asked, %.0f exceeded packets a second and %s of the forwarded packets are a warning; so are %d packets that are %s of all packets to forward.", ttlMany, ttlPerSecond, percent(ttlShare), ttlMany, percent(ttlMost)),
	FalsePositive: "traceroute and mtr, with a few probes a second; a single packet from far away. A rule that sets the TTL, or drops by it: this is rule-drop.",
	Cure:          "Add a route on one of the two routers that leads on or ends: on the gateway, give the unused part of a routed network a route of type unreachable.",
	judge:         judgeTTL,
}

func judgeTTL(f facts) *verdict {
	expired, rows, tracing := f.dropped(snapshot.CauseTTL)
	counted, _ := f.counter("Ip.InHdrErrors") // broken headers included
	_, martians, _ := f.dropped(snapshot.CauseMartian)
	back := slices.DeleteFunc(martians, func(row snapshot.Drop) bool { return !f.cameBack(row) })
	lost := expired
	if !tracing {
		lost = counted
	}
	lost = saturate(lost, total(back))
	if v := f.judgeCircles(lost); v != nil {
		return v
	}
	if lost < ttlFew {
		return nil
	}
	rows = append(rows, back...)
	var loop []snapshot.RouteAnswer
	for _, r := range f.Routes {
		sampled := slices.ContainsFunc(samples(rows), func(t tuple) bool { return t.dest.Addr() == r.Dest })
		// A gateway with one interface has such routes, too, and traceroute goes by it.
		if sampled && r.Answer == snapshot.RouteFound && r.Out != "" && r.Out == r.In && (f.Frames == nil || len(back) > 0) {
			loop = append(loop, r)
		}
	}
	if _, ruled := f.ttlRule(); ruled && len(loop) == 0 {
		return nil // rule-drop tells of it
	}
	forwarded, known := f.counter("Ip.ForwDatagrams")
	v := &verdict{impact: float64(lost)}
	switch {
	case len(loop) > 0 && lost >= ttlMany:
		v.Severity = Critical
	case len(loop) > 0:
		v.Severity = Warning
	case tracing && lost >= ttlMany && known && share(lost, saturate(lost, forwarded)) >= ttlMost:
		v.Severity = Warning
	case f.perSecond(lost) < ttlPerSecond:
		return nil
	case known && share(lost, forwarded) < ttlShare:
		v.Severity = Advice
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("the TTL of %s%s was exceeded here %s", number(lost, "packet"), destinations(rows), f.window())
	if len(loop) > 0 {
		v.Title = fmt.Sprintf("routing loop: packets to %s enter and leave by %s; %s lost %s", loop[0].Dest, loop[0].In, number(lost, "packet"), f.window())
	}
	if expired > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped with TTL exceeded", strconv.FormatUint(expired, 10) + cameInBy(rows), fromTracer})
	}
	if len(back) > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets that returned to their sender", strconv.FormatUint(total(back), 10) + cameInBy(back), fromTracer})
	}
	if counted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets with TTL exceeded or a broken header", strconv.FormatUint(counted, 10), fromSnmp + ": Ip InHdrErrors"})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	if known {
		v.Evidence = append(v.Evidence, Evidence{"packets forwarded, including each turn of a loop", strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"})
	}
	for _, r := range loop {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("route from %s, received on %s, to %s", r.Source, r.In, r.Dest), routeAnswer(r), fromRoutes})
	}
	v.Why = whyLoop
	if len(loop) > 0 {
		v.Remedy = f.endLoop(loop[0])
	} else {
		v.Why = "A packet whose TTL is used up is dropped, and its sender gets an ICMP error. Many of them mean a loop elsewhere, or a TTL that was set too low: by the sender (some providers allow one host only, TTL 1), or by a rule here."
		v.Remedy = []string{"# see which packets, where they come from and where they are sent:", f.natkit("drops --for 10s"), f.run("ip route show"),
			"# rules that set the TTL:", f.run("iptables-legacy-save -t mangle | grep -i -e ttl -e hl-"), f.run("nft -a list ruleset | grep -i -e ttl -e hoplimit")}
	}
	v.Verify = f.look(f.run("nstat -az IpInHdrErrors"))
	return v
}

// judgeCircles tells of packets that were seen to come by again and again. expired is what of them, and
// of others, ended here.
func (f facts) judgeCircles(expired uint64) *verdict {
	if f.Frames == nil {
		return nil
	}
	var seen uint64
	var worst *snapshot.Circle
	var route snapshot.RouteAnswer
	for i := range f.Frames.Circles {
		c := &f.Frames.Circles[i]
		at := slices.IndexFunc(f.Routes, func(r snapshot.RouteAnswer) bool {
			return r.Dest == c.Dest && r.In == c.Interface && r.Answer == snapshot.RouteFound && r.Out == r.In
		})
		if at < 0 || c.Packets >= implausible {
			continue
		}
		if seen = saturate(seen, c.Packets); worst == nil {
			worst, route = c, f.Routes[at]
		}
	}
	if worst == nil || !f.reaches(seen, circlesFew) {
		return nil
	}
	v := &verdict{impact: float64(max(seen, expired))}
	v.Severity = Warning
	if seen >= ttlMany || expired >= ttlMany {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("routing loop: packets to %s repeatedly enter and leave by %s", worst.Dest, worst.Interface)
	v.Evidence = []Evidence{
		{"packets seen more than once, with a smaller TTL each time", fmt.Sprintf("at least %d", seen), fromFrames},
		{"one of them", worst.Sample, fromFrames},
		{fmt.Sprintf("route from %s, received on %s, to %s", route.Source, route.In, route.Dest), routeAnswer(route), fromRoutes},
	}
	if expired > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets whose TTL was exceeded here", strconv.FormatUint(expired, 10), fromTracer})
	} else {
		v.Evidence = append(v.Evidence, Evidence{"packets whose TTL was exceeded here", "0: they expire on the other router", fromTracer})
	}
	if forwarded, known := f.counter("Ip.ForwDatagrams"); known {
		v.Evidence = append(v.Evidence, Evidence{"packets forwarded, including each turn of a loop", strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"})
	}
	v.Why = whyLoop
	v.Remedy = f.endLoop(route)
	v.Verify = f.look(f.run(fmt.Sprintf("ip%s route get %s from %s iif %s", sixFlag(route.Dest), route.Dest, route.Source, quote(route.In))))
	return v
}

const whyLoop = "Two routers whose routes point at each other exchange a packet until its TTL is used up: it is lost, and uses the bandwidth of dozens of packets on the link between them."

// endLoop is how to end a circle.
func (f facts) endLoop(r snapshot.RouteAnswer) []string {
	return []string{
		"# this router's route; check the same on the other router:",
		f.run(fmt.Sprintf("ip%s route get %s from %s iif %s", sixFlag(r.Dest), r.Dest, r.Source, quote(r.In))),
		fmt.Sprintf("# correct the route to %s where it is wrong. If no host has this address, end the loop here:", r.Dest),
		f.run(fmt.Sprintf("ip%s route add unreachable %s", sixFlag(r.Dest), r.Dest)),
	}
}

// cameBack says whether packets of row, dropped for their source, are this
// machine's own that a router sent back.
func (f facts) cameBack(row snapshot.Drop) bool {
	for _, t := range samples([]snapshot.Drop{row}) {
		if !f.own(t.source.Addr()) || f.own(t.dest.Addr()) {
			continue
		}
		for _, r := range f.Routes {
			if r.Dest == t.dest.Addr() && r.In == row.Interface && r.Answer == snapshot.RouteFound && r.Out == r.In {
				return true
			}
		}
	}
	return false
}
