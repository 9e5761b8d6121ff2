// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// maxRouteQuestions bounds how many packets are looked up: a few tell which
// route is wrong.
const maxRouteQuestions = 8

// routes asks the routing tables about packets that were dropped for their
// route or for having gone too many hops: rules of policy routing included, and
// however many routes there are. Nothing is sent.
func routes() source {
	return source{
		name:  snapshot.CanRoutes,
		costs: "the routes of dropped packets are unknown",
		live:  true,
		end: func(_ *view, s *snapshot.Snapshot) error {
			s.Routes = []snapshot.RouteAnswer{}
			onward(s)
			answers(s)
			circling(s)
			if s.Drops == nil {
				return errors.New("dropped packets are not known")
			}
			questions := 0
			asked := map[snapshot.RouteAnswer]bool{}
			for _, row := range s.Drops.Rows {
				if !routeCauses[row.Cause] || row.Interface == "" ||
					row.Netns != 0 && s.Netns.Inode != 0 && row.Netns != s.Netns.Inode {
					continue
				}
				for _, sample := range row.Samples {
					question, ok := routeQuestion(sample, row.Interface)
					if !ok || asked[question] || questions >= maxRouteQuestions {
						continue
					}
					asked[question] = true
					questions++
					answer, err := askRoute(question, row.Cause != snapshot.CauseMartian)
					if err == nil {
						s.Routes = append(s.Routes, answer)
					}
				}
			}
			return nil
		},
	}
}

// routeCauses are the drops that routes have to do with. Of a martian it is asked
// where this machine would send it: it may be its own, come back.
var routeCauses = map[snapshot.NATCause]bool{snapshot.CauseNoRoute: true, snapshot.CauseTTL: true, snapshot.CauseMartian: true}

// onward asks for the way to addresses that packets were sent to and nothing came back
// from: those whose next hop did not answer, and of unanswered flows that no rule
// translated. What came in by which interface is not known of them.
func onward(s *snapshot.Snapshot) {
	var to []netip.Addr
	silent, sources := map[netip.Addr]bool{}, map[netip.Addr]netip.Addr{}
	if s.Drops != nil {
		for _, row := range s.Drops.Rows {
			if row.Cause != snapshot.CauseNeighbour || row.Netns != 0 && s.Netns.Inode != 0 && row.Netns != s.Netns.Inode {
				continue
			}
			for _, sample := range row.Samples {
				if q, ok := routeQuestion(sample, ""); ok {
					to = append(to, q.Dest)
					silent[q.Dest] = true
					if sources[q.Dest] = q.Source; strings.Contains(sample, "(flow ") {
						_, flow, _ := strings.Cut(sample, "(flow ")
						if before, ok := routeQuestion("flow "+strings.TrimSuffix(flow, ")"), ""); ok {
							sources[q.Dest] = before.Source
						}
					}
				}
			}
		}
	}
	if s.Conntrack != nil && s.Conntrack.Table != nil {
		for _, u := range s.Conntrack.Table.Unanswered {
			if !u.SNAT && u.Target == u.Dest && u.Dest.IsValid() && !u.Dest.Addr().IsMulticast() {
				to = append(to, u.Dest.Addr())
			}
		}
	}
	asked := map[netip.Addr]bool{}
	for _, addr := range to {
		if asked[addr] || len(asked) >= maxRouteQuestions {
			continue
		}
		asked[addr] = true
		answer, err := askRoute(snapshot.RouteAnswer{Dest: addr}, false)
		if err != nil {
			continue
		}
		if silent[addr] {
			if other, ok := forwardedRoute(addr, sources[addr]); ok && !failed(answer) && failed(other) {
				answer = other
			}
			if answer.Via.IsValid() {
				chooseSilent(&answer)
			}
		}
		s.Routes = append(s.Routes, answer)
	}
}

// forwardedRoute asks where a packet from a source goes that comes in from there: rules of policy
// routing may be about either.
func forwardedRoute(dest, source netip.Addr) (snapshot.RouteAnswer, bool) {
	if !source.IsValid() {
		return snapshot.RouteAnswer{}, false
	}
	from, err := askRoute(snapshot.RouteAnswer{Dest: source}, false)
	if err != nil || from.Answer != snapshot.RouteFound || from.Out == "" || from.Out == "lo" {
		return snapshot.RouteAnswer{}, false
	}
	answer, err := askRoute(snapshot.RouteAnswer{Dest: dest, Source: source, In: from.Out}, true)
	return answer, err == nil && answer.Answer == snapshot.RouteFound
}

// failed says whether the next hop of a route was asked for its hardware address and did not answer.
func failed(answer snapshot.RouteAnswer) bool {
	hop := answer.Dest
	if answer.Via.IsValid() {
		hop = answer.Via
	}
	link, err := netlink.LinkByName(answer.Out)
	if err != nil {
		return false
	}
	family := netlink.FAMILY_V4
	if hop.Is6() {
		family = netlink.FAMILY_V6
	}
	neighbours, _ := netlink.NeighList(link.Attrs().Index, family) // an interrupted list has still most of them
	for _, n := range neighbours {
		if n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0 && n.IP.Equal(hop.AsSlice()) {
			return true
		}
	}
	return false
}

// answers asks for the way of answers that passed here and were not confirmed.
func answers(s *snapshot.Snapshot) {
	if s.Conntrack == nil || s.Conntrack.Table == nil {
		return
	}
	asked := map[snapshot.RouteAnswer]bool{}
	for _, u := range s.Conntrack.Table.Halfway {
		question := snapshot.RouteAnswer{Source: u.Target.Addr(), Dest: u.Source}
		if !question.Source.IsValid() || !question.Dest.IsValid() || asked[question] || len(asked) >= maxRouteQuestions {
			continue
		}
		asked[question] = true
		from, err := askRoute(snapshot.RouteAnswer{Dest: question.Source}, false)
		if err != nil {
			continue
		}
		if question.In = from.Out; from.Out == "lo" { // this machine answers itself
			question.In = ""
		}
		if answer, err := askRoute(question, question.In != ""); err == nil {
			s.Routes = append(s.Routes, answer)
		}
	}
}

// circling asks where packets go that were seen to come by again and again.
func circling(s *snapshot.Snapshot) {
	if s.Frames == nil {
		return
	}
	for _, c := range s.Frames.Circles[:min(len(s.Frames.Circles), maxRouteQuestions)] {
		if answer, err := askRoute(snapshot.RouteAnswer{In: c.Interface, Source: c.Source, Dest: c.Dest}, true); err == nil {
			s.Routes = append(s.Routes, answer)
		}
	}
}

// chooseSilent names the router that did not answer where a route has several: which
// one a packet takes depends on its ports, too, and the answer may have another.
func chooseSilent(answer *snapshot.RouteAnswer) {
	found, err := netlink.RouteGetWithOptions(answer.Dest.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(found) == 0 || len(found[0].MultiPath) < 2 {
		return
	}
	family := netlink.FAMILY_V4
	if answer.Dest.Is6() {
		family = netlink.FAMILY_V6
	}
	for _, hop := range found[0].MultiPath {
		// An interrupted list has still most of them.
		neighbours, _ := netlink.NeighList(hop.LinkIndex, family)
		for _, n := range neighbours {
			if n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) == 0 || !n.IP.Equal(nextHop(hop)) {
				continue
			}
			link, err := netlink.LinkByIndex(hop.LinkIndex)
			via, ok := netip.AddrFromSlice(n.IP)
			if err == nil && ok {
				answer.Out, answer.Via = link.Attrs().Name, via.Unmap()
				return
			}
		}
	}
}

// nextHop is the router of one of several ways, of whichever family it is.
func nextHop(hop *netlink.NexthopInfo) net.IP {
	if via, ok := hop.Via.(*netlink.Via); ok && via != nil {
		return via.Addr
	}
	return hop.Gw
}

// routeQuestion reads "udp 10.0.0.2:53 -> 10.0.1.2:53 ...".
func routeQuestion(sample, in string) (q snapshot.RouteAnswer, ok bool) {
	fields := strings.Fields(sample)
	if len(fields) < 4 || fields[2] != "->" {
		return q, false
	}
	source, ok1 := hostOf(fields[1])
	dest, ok2 := hostOf(fields[3])
	return snapshot.RouteAnswer{In: in, Source: source, Dest: dest}, ok1 && ok2 && !dest.IsMulticast() && !dest.IsLoopback()
}

func hostOf(s string) (netip.Addr, bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr(), true
	}
	a, err := netip.ParseAddr(s)
	return a, err == nil
}

// askRoute answers a question as the kernel does for a packet that comes in, or
// for one that this machine sends.
func askRoute(q snapshot.RouteAnswer, comesIn bool) (snapshot.RouteAnswer, error) {
	o := &netlink.RouteGetOptions{}
	if q.Source.IsValid() {
		o.SrcAddr = q.Source.AsSlice()
	}
	if comesIn {
		o.Iif = q.In
	}
	found, err := netlink.RouteGetWithOptions(q.Dest.AsSlice(), o)
	switch {
	case errors.Is(err, unix.ENETUNREACH):
		q.Answer = snapshot.RouteNone
	case errors.Is(err, unix.EHOSTUNREACH):
		q.Answer = snapshot.RouteUnreachable
	case errors.Is(err, unix.EINVAL):
		q.Answer = snapshot.RouteBlackhole
	case errors.Is(err, unix.EACCES):
		q.Answer = snapshot.RouteProhibited
	case err != nil:
		return q, fmt.Errorf("ask for route to %s: %w", q.Dest, err)
	case len(found) == 0:
		return q, fmt.Errorf("ask for route to %s: no answer", q.Dest)
	default:
		q.Answer = snapshot.RouteFound
		if link, err := netlink.LinkByIndex(found[0].LinkIndex); err == nil {
			q.Out = link.Attrs().Name
		}
		if via, ok := netip.AddrFromSlice(found[0].Gw); ok {
			q.Via = via.Unmap()
		}
		q.Table = found[0].Table
	}
	if kind, ok := refusingRoutes[q.Answer]; ok {
		q.Match, q.Table = refusingRoute(kind, q.Dest)
	}
	return q, nil
}

var refusingRoutes = map[snapshot.RouteKind]int{
	snapshot.RouteUnreachable: unix.RTN_UNREACHABLE,
	snapshot.RouteBlackhole:   unix.RTN_BLACKHOLE,
	snapshot.RouteProhibited:  unix.RTN_PROHIBIT,
}

// refusingRoute finds the most specific route of a type that matches. It is asked
// for only when a packet met one: the kernel walks all its routes for it.
func refusingRoute(kind int, dest netip.Addr) (match netip.Prefix, table int) {
	family := netlink.FAMILY_V4
	if dest.Is6() {
		family = netlink.FAMILY_V6
	}
	filter := &netlink.Route{Type: kind, Table: unix.RT_TABLE_UNSPEC}
	// An interrupted list has still most of them.
	_ = netlink.RouteListFilteredIter(family, filter, netlink.RT_FILTER_TYPE|netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
		p, ok := prefixOf(r.Dst)
		if r.Dst == nil {
			p, ok = netip.PrefixFrom(dest, 0).Masked(), true
		}
		if ok && p.Contains(dest) && (!match.IsValid() || p.Bits() > match.Bits()) {
			match, table = p, r.Table
		}
		return true
	})
	return match, table
}
