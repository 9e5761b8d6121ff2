// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Every network has clients that ask for addresses which nobody has; a gateway
	// without a route for them drops them rightly. A route is missing when such
	// packets are a good part of what is to be forwarded.
	noRouteFew   = 3
	noRouteShare = 0.01 // of all packets to forward, these included: a warning
	noRouteMost  = 0.10 // critical
	noRouteMany  = 10   // packets from which a smaller share is worth advice
)

var noRoute = Cause{
	Code:     "no-route",
	Title:    "There is no route for packets to forward",
	Headline: "Network is unreachable: no route to forward packets",
	Search: []string{
		"Network is unreachable",
		"connect: Network is unreachable",
		"Destination Net Unreachable",
		"nstat IpExtInNoRoutes",
		"reason: IP_INNOROUTES",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(noRouteFew, "packets without a route"), portion(noRouteShare, "of all packets to forward")},
	Needs:         []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanRoutes, snapshot.CanSysctls},
	Symptom:       `One network cannot be reached, or only the gateway itself can. Clients report "Network is unreachable", or wait.`,
	Proof:         fmt.Sprintf("Packets were dropped because there was no route to their destination (IpExt.InNoRoutes, IP_INNOROUTES at ip_error), at least %s of all packets to forward: a warning; from %s critical. Packets dropped by a route of type blackhole, unreachable or prohibit are one severity lower, since an administrator may want that; replies and packets for a published service are not. No counter of Linux 6.18 counts them; the tracer sees them at ip_error without a reason. natkit asks the routing tables, including policy routing, about the packets that it saw.", percent.Whole(noRouteShare), percent.Whole(noRouteMost)),
	FalsePositive: "A few packets for unused addresses, such as scans and printers that moved, also while a rule that drops most packets makes them a larger share of the rest; multicast without a route; blackhole routes that keep unused networks from looping.",
	Cure:          "Add the missing route. If a route of type unreachable, blackhole or prohibit drops the packets and is not wanted, delete it.",
	judge:         judgeNoRoute,
}

// unrouted are packets that were dropped because of their route.
type unrouted struct {
	rows            []snapshot.Drop // traced, without multicast alone
	traced, counted uint64
	refusing        []snapshot.RouteAnswer // routes of a type that refuses
	deliberate      bool                   // they alone: somebody put them there
	wanted          bool                   // replies to connections, or packets for what is published
}

func (u unrouted) lost() uint64 { return max(u.traced, u.counted) }

func (f facts) unrouted() (u unrouted) {
	_, rows, _ := f.dropped(snapshot.CauseNoRoute)
	u.rows = slices.DeleteFunc(rows, func(row snapshot.Drop) bool {
		seen := samples([]snapshot.Drop{row})
		return len(seen) > 0 && !slices.ContainsFunc(seen, func(t tuple) bool { return !t.dest.Addr().IsMulticast() })
	})
	u.traced = total(u.rows)
	u.counted, _ = f.counter("IpExt.InNoRoutes")
	// A route that refuses is no missing route: somebody put it there.
	missing := u.counted > 0
	for _, r := range f.Routes {
		if !slices.ContainsFunc(samples(u.rows), func(t tuple) bool { return t.dest.Addr() == r.Dest }) {
			continue
		}
		switch r.Answer {
		case snapshot.RouteNone:
			missing = true
		case snapshot.RouteBlackhole, snapshot.RouteUnreachable, snapshot.RouteProhibited:
			u.refusing = append(u.refusing, r)
		}
	}
	u.deliberate = !missing && len(u.refusing) > 0
	// Nobody lets connections out and wants their answers refused, or publishes what is refused.
	u.wanted = slices.ContainsFunc(u.rows, func(row snapshot.Drop) bool {
		return slices.ContainsFunc(row.Samples, func(sample string) bool {
			_, led := ledBy(sample)
			return led || isAnswer(sample)
		})
	})
	return u
}

func judgeNoRoute(f facts) *verdict {
	u := f.unrouted()
	lost := u.lost()
	if lost < f.few(noRouteFew) || !f.forwards() {
		return nil
	}
	forwarded, known := f.counter("Ip.ForwDatagrams")
	part := share(lost, saturate(lost, forwarded))
	if u.counted == 0 && onlySix(u.rows) {
		part, known = f.receivedShare(lost, u.rows, devices(u.rows))
	}
	v := &verdict{impact: float64(lost)}
	switch {
	case known && part < f.part(noRouteShare) && (u.deliberate || lost < noRouteMany):
		return nil
	case known && part >= f.part(noRouteShare) && u.wanted:
		v.Severity = Warning
		if part >= noRouteMost {
			v.Severity = Critical
		}
	case known && part < f.part(noRouteShare), u.deliberate && part < noRouteMost:
		v.Severity = Advice
	case part < noRouteMost && f.mostRefused(forwarded):
		v.Severity = Advice
	case known && part >= noRouteMost && !u.deliberate:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	to := destinations(u.rows)
	v.Title = fmt.Sprintf("%s had no route%s %s", number(lost, "packet"), to, f.window())
	v.Why = "A packet without a route is dropped before any forwarding rule sees it; its sender may get an ICMP message, or none. If the default route is missing, that is everything that leaves for the Internet."
	if u.deliberate {
		what := "route"
		if !u.refusing[0].Match.IsValid() {
			what = "policy routing rule"
		}
		v.Title = titled(fmt.Sprintf("a %s of type %s dropped %s", what, u.refusing[0].Answer, number(lost, "packet")), to, " "+f.window())
		v.Why = fmt.Sprintf("The %s matches these packets and drops them before any forwarding rule sees them. The sender gets an ICMP message unless the type is blackhole.", what)
	}
	v.Evidence = f.noRouteEvidence(u)
	if down := f.downLink(u.rows); down != "" && !u.deliberate {
		v.Title += ": " + down + " is down"
		v.Evidence = append(v.Evidence, Evidence{"state of " + down, "down", fromLinks})
		v.Remedy = append(v.Remedy, "# bring the interface up; the route of its own network returns with it, others must be added again:", f.run("ip link set dev "+quote(down)+" up"))
	}
	v.Remedy = f.unrefuse(v.Remedy, u.refusing)
	if !u.deliberate {
		v.Remedy = append(v.Remedy, f.addRoute(u.rows)...)
	}
	v.Verify = f.look(f.run("nstat -az IpExtInNoRoutes"))
	return v
}

// mostRefused says whether rules dropped most of what was to be forwarded. Its senders then send less, so that a few
// packets without a route become a larger share of it than they were.
func (f facts) mostRefused(forwarded uint64) bool {
	refused, _, known := f.dropped(snapshot.CauseRule)
	return known && forwarded > 0 && refused >= forwarded/2
}

func (f facts) noRouteEvidence(u unrouted) (out []Evidence) {
	if u.counted > 0 {
		out = append(out, Evidence{"packets without a route", strconv.FormatUint(u.counted, 10), fromNetstat + ": IpExt InNoRoutes"})
	}
	if u.traced > 0 {
		out = append(out, Evidence{"packets dropped because of their route", strconv.FormatUint(u.traced, 10) + cameInBy(u.rows), fromTracer})
	}
	out = append(out, sampleEvidence(u.rows)...)
	out = append(out, f.wholeEvidence(u.rows, u.counted, "packets forwarded in that time")...)
	return append(out, f.askedRoutes()...)
}

// wholeEvidence is what lost packets are a part of: those that were forwarded, or of IPv6 those that came in where they did.
func (f facts) wholeEvidence(rows []snapshot.Drop, counted uint64, what string) (out []Evidence) {
	if counted > 0 || !onlySix(rows) {
		return f.forwardedEvidence(what)
	}
	for _, name := range devices(rows) {
		if l, ok := f.link(name); ok && l.RxPackets < implausible {
			out = append(out, Evidence{"packets received on " + name, strconv.FormatUint(l.RxPackets, 10), fromLinks})
		}
	}
	return out
}

// askedRoutes are the answers of the routing tables that are no route, each once for all the packets that have it.
func (f facts) askedRoutes() (out []Evidence) {
	type answer struct {
		source netip.Addr
		in     string
		text   string
	}
	var order []answer
	dests := map[answer][]string{}
	for _, r := range f.Routes {
		if r.Answer == snapshot.RouteFound || r.In == "" {
			continue
		}
		a := answer{r.Source, r.In, routeAnswer(r)}
		if dests[a] == nil {
			order = append(order, a)
		}
		if name := r.Dest.String(); !slices.Contains(dests[a], name) {
			dests[a] = append(dests[a], name)
		}
	}
	for _, a := range order {
		out = append(out, Evidence{fmt.Sprintf("route from %s, received on %s, to %s", a.source, a.in, strings.Join(dests[a], ", ")), a.text, fromRoutes})
	}
	return out
}

// unrefuse adds to a remedy how to delete the routes that refuse.
func (f facts) unrefuse(remedy []string, refusing []snapshot.RouteAnswer) []string {
	for _, r := range refusing {
		comment := "# if " + r.Match.String() + " must be reachable, delete the route that refuses it (a routing daemon would add it again: look there):"
		line := f.run(fmt.Sprintf("ip%s route del %s %s table %d", sixFlag(r.Dest), r.Answer, r.Match, r.Table))
		if !r.Match.IsValid() {
			comment = fmt.Sprintf("# a policy routing rule is of type %s; see which, and delete it if this traffic is wanted: ip%s rule del pref NUMBER", r.Answer, sixFlag(r.Dest))
			line = f.run(fmt.Sprintf("ip%s rule show", sixFlag(r.Dest)))
		}
		if !slices.Contains(remedy, line) {
			remedy = append(remedy, comment, line)
		}
	}
	return remedy
}

// addRoute is how to find out what is missing, and to add it.
func (f facts) addRoute(rows []snapshot.Drop) (remedy []string) {
	example, six := "", ""
	for _, t := range samples(rows) {
		if t.dest.Addr().IsMulticast() {
			continue
		}
		example, six = t.dest.Addr().String(), sixFlag(t.dest.Addr())
		if rows[0].Interface != "" {
			remedy = append(remedy, "# which route one of them has:",
				f.run(fmt.Sprintf("ip%s route get %s from %s iif %s", sixFlag(t.dest.Addr()), t.dest.Addr(), t.source.Addr(), quote(rows[0].Interface))))
		}
		break
	}
	remedy = append(remedy, "# the routes (is there a default route?), and the policy routing rules, which come first and may be of type unreachable:",
		f.run("ip"+six+" route show"), f.run("ip"+six+" rule show"))
	if example != "" {
		return append(remedy, "# add the missing route through the router that reaches it: ip route add "+example+" via ROUTER; or a default route: ip route add default via ROUTER")
	}
	return append(remedy, "# add the missing route through the router that reaches it: ip route add default via ROUTER")
}

// downLink is an interface that is down and has the network that dropped packets
// wanted to go to; "" for none.
func (f facts) downLink(rows []snapshot.Drop) string {
	for _, t := range samples(rows) {
		if down := f.downLinkTo(t.dest.Addr()); down != "" {
			return down
		}
	}
	return ""
}

// downLinkTo is an interface that is down and has the network of addr; "" for none.
func (f facts) downLinkTo(addr netip.Addr) string {
	if _, up := f.linkTo(addr); up {
		return ""
	}
	for _, i := range f.Interfaces {
		if !i.Up && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.IsValid() && p.Masked().Contains(addr) }) {
			return i.Name
		}
	}
	return ""
}

// routeAnswer is the end of a look-up in words.
func routeAnswer(r snapshot.RouteAnswer) string {
	switch {
	case r.Answer == snapshot.RouteNone:
		return "none"
	case r.Answer == snapshot.RouteFound:
		text := "out by " + r.Out
		if r.Via.IsValid() {
			text += ", to router " + r.Via.String()
		}
		return text
	case r.Match.IsValid():
		return fmt.Sprintf("%s, by route %s of table %d", r.Answer, r.Match, r.Table)
	}
	return string(r.Answer) + ", by a rule"
}

// forwards says whether this machine is meant to forward, as far as is known.
func (f facts) forwards() bool {
	if f.Sysctls == nil || f.translatesSources() {
		return true
	}
	if on, known := f.sysctl("net.ipv4.ip_forward"); !known || on != 0 {
		return true
	}
	for _, l := range f.links() {
		if on, _ := f.conf(l.Name, "forwarding"); on != 0 {
			return true
		}
	}
	on, _ := f.sysctl("net.ipv6.conf.all.forwarding")
	return on != 0
}

// destinations names where dropped packets wanted to go, for a title: "" when
// that is not known.
func destinations(rows []snapshot.Drop) string {
	var names []string
	for _, t := range samples(rows) {
		if name := t.dest.Addr().String(); !t.dest.Addr().IsMulticast() && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) > 3:
		return " to " + strings.Join(names[:2], ", ") + " and others"
	}
	return " to " + strings.Join(names, ", ")
}

// total is how many packets rows are.
func total(rows []snapshot.Drop) (n uint64) {
	for _, row := range rows {
		n = saturate(n, row.Count)
	}
	return n
}

// onlySix says whether all packets of rows that were sampled are of IPv6. What of it is forwarded is not among
// Ip.ForwDatagrams.
func onlySix(rows []snapshot.Drop) bool {
	seen := samples(rows)
	return len(seen) > 0 && !slices.ContainsFunc(seen, func(t tuple) bool { return t.dest.Addr().Is4() })
}

// scoped is an address for a command that sends to it: a link-local one needs its interface.
func scoped(addr netip.Addr, link string) string {
	if addr.Is6() && addr.IsLinkLocalUnicast() && link != "" {
		return quote(addr.String() + "%" + link)
	}
	return addr.String()
}

// sixFlag makes a command of ip(8) one about IPv6 where addr is.
func sixFlag(addr netip.Addr) string {
	if addr.Is6() {
		return " -6"
	}
	return ""
}
