// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/snapshot"
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
		costs: "which route a dropped packet has, or lacks, is not told",
		live:  true,
		end: func(_ *view, s *snapshot.Snapshot) error {
			if s.Drops == nil {
				return errors.New("dropped packets are not known")
			}
			s.Routes = []snapshot.RouteAnswer{}
			asked := map[snapshot.RouteAnswer]bool{}
			for _, row := range s.Drops.Rows {
				if row.Cause != snapshot.CauseNoRoute && row.Cause != snapshot.CauseTTL || row.Interface == "" ||
					row.Netns != 0 && s.Netns.Inode != 0 && row.Netns != s.Netns.Inode {
					continue
				}
				for _, sample := range row.Samples {
					question, ok := routeQuestion(sample, row.Interface)
					if !ok || asked[question] || len(s.Routes) >= maxRouteQuestions {
						continue
					}
					asked[question] = true
					if answer, err := askRoute(question); err == nil {
						s.Routes = append(s.Routes, answer)
					}
				}
			}
			return nil
		},
	}
}

// routeQuestion reads "udp 10.0.0.2:53 -> 10.0.1.2:53 ...".
func routeQuestion(sample, in string) (q snapshot.RouteAnswer, ok bool) {
	fields := strings.Fields(sample)
	if len(fields) < 4 || fields[2] != "->" {
		return q, false
	}
	source, ok1 := hostOf(fields[1])
	dest, ok2 := hostOf(fields[3])
	return snapshot.RouteAnswer{In: in, Source: source, Dest: dest}, ok1 && ok2 && !dest.IsMulticast()
}

func hostOf(s string) (netip.Addr, bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr(), true
	}
	a, err := netip.ParseAddr(s)
	return a, err == nil
}

// askRoute answers a question as the kernel does for a packet that comes in.
func askRoute(q snapshot.RouteAnswer) (snapshot.RouteAnswer, error) {
	found, err := netlink.RouteGetWithOptions(q.Dest.AsSlice(), &netlink.RouteGetOptions{Iif: q.In, SrcAddr: q.Source.AsSlice()})
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
	}
	return q, nil
}
