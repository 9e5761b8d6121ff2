// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

const (
	ttlFew  = 3  // packets whose route leads back, from which it is a loop
	ttlMany = 10 // the same, critical
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
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{circlesFew},
	Explains:      []string{"ttl-exceeded", "qdisc-drop"},
	Needs:         []string{snapshot.CanDrops, snapshot.CanFrames, snapshot.CanRoutes, snapshot.CanCounters},
	Symptom:       "Some addresses cannot be reached, traceroute shows the same two routers in turn, and a little traffic to them fills the line between.",
	Proof:         fmt.Sprintf("A packet arrives repeatedly on one interface with a smaller TTL each time, and its route leaves by the same interface: packets expire at either of the two routers, depending on the sender's first TTL. Or packets return by the egress interface of their route with one of this machine's own addresses as source (IP_LOCAL_SOURCE): packets that a gateway has masqueraded end this way. Where frames cannot be read: the TTL of packets was exceeded here (IP_INHDR at ip_forward), and the route of one of them leaves by its ingress interface. Critical from %d packets. Packets whose TTL is exceeded without any of these are ttl-exceeded.", ttlMany),
	FalsePositive: "traceroute and mtr, with a few probes a second; a client that sends with TTL 1. A gateway with one interface. A rule that sets the TTL, or drops by it: this is rule-drop.",
	Cure:          "On one of the two routers, add a route that continues to the destination, or one that ends the loop: on the gateway, give the unused part of a routed network a route of type unreachable.",
	judge:         judgeLoop,
}

// ttlFacts are packets whose TTL was exceeded here, and those that a router sent back.
type ttlFacts struct {
	expired, counted uint64          // by the tracer, and by the stack's counter, broken headers included
	rows             []snapshot.Drop // of expired
	back             []snapshot.Drop // this machine's own, that came back
	tracing          bool
}

func (f facts) ttl() (t ttlFacts) {
	t.expired, t.rows, t.tracing = f.dropped(snapshot.CauseTTL)
	t.counted, _ = f.counter("Ip.InHdrErrors")
	_, martians, _ := f.dropped(snapshot.CauseMartian)
	t.back = slices.DeleteFunc(martians, func(row snapshot.Drop) bool { return !f.cameBack(row) })
	return t
}

// lost is how many packets ended here.
func (t ttlFacts) lost() uint64 {
	if !t.tracing {
		return saturate(t.counted, total(t.back))
	}
	return saturate(t.expired, total(t.back))
}

// evidence is the counts, and some of the packets.
func (t ttlFacts) evidence() (out []Evidence) {
	if t.expired > 0 {
		out = append(out, Evidence{"packets dropped with TTL exceeded", strconv.FormatUint(t.expired, 10) + cameInBy(t.rows), fromTracer})
	}
	if len(t.back) > 0 {
		out = append(out, Evidence{"packets that returned to their sender", strconv.FormatUint(total(t.back), 10) + cameInBy(t.back), fromTracer})
	}
	if t.counted > 0 {
		out = append(out, Evidence{"packets with TTL exceeded or a broken header", strconv.FormatUint(t.counted, 10), fromSnmp + ": Ip InHdrErrors"})
	}
	return append(out, sampleEvidence(slices.Concat(t.rows, t.back))...)
}

// forwardedEvidence is how many packets were forwarded, where that is known.
func (f facts) forwardedEvidence(what string) []Evidence {
	forwarded, known := f.counter("Ip.ForwDatagrams")
	if !known {
		return nil
	}
	return []Evidence{{what, strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"}}
}

const eachTurn = "packets forwarded, including each turn of a loop"

func judgeLoop(f facts) *verdict {
	t := f.ttl()
	if v := f.judgeCircles(t.lost()); v != nil {
		return v
	}
	loop := f.leadBack(t)
	if len(loop) == 0 || t.lost() < ttlFew {
		return nil
	}
	v := &verdict{impact: float64(t.lost())}
	v.Severity = Warning
	if t.lost() >= ttlMany {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("routing loop: packets to %s enter and leave by %s; %s lost %s", loop[0].Dest, loop[0].In, number(t.lost(), "packet"), f.window())
	v.Evidence = append(t.evidence(), f.forwardedEvidence(eachTurn)...)
	for _, r := range loop {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("route from %s, received on %s, to %s", r.Source, r.In, r.Dest), routeAnswer(r), fromRoutes})
	}
	v.Why = whyLoop
	v.Remedy = f.endLoop(loop[0])
	v.Verify = f.look(f.run("nstat -az IpInHdrErrors"))
	return v
}

// leadBack are the routes of packets that ended here which lead out where these came in. A gateway
// with one interface has such routes too, and traceroute goes by it: where frames were read, they
// decide, unless packets came back.
func (f facts) leadBack(t ttlFacts) (loop []snapshot.RouteAnswer) {
	if f.Frames != nil && len(t.back) == 0 {
		return nil
	}
	seen := samples(slices.Concat(t.rows, t.back))
	for _, r := range f.Routes {
		sampled := slices.ContainsFunc(seen, func(t tuple) bool { return t.dest.Addr() == r.Dest })
		if sampled && r.Answer == snapshot.RouteFound && r.Out != "" && r.Out == r.In {
			loop = append(loop, r)
		}
	}
	return loop
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
	v.Evidence = append(v.Evidence, f.forwardedEvidence(eachTurn)...)
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
