// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/lab"
)

// spoofed is where the flood pretends to come from; the gateway's route for it
// leads to the client, so that answers to it vanish there.
var spoofed = netip.MustParsePrefix("198.51.100.0/24")

var synFloodFault = Fault{
	Code:    "syn-flood",
	Healthy: "web traffic through a gateway, two hundred connections a second",
	Broken:  "twelve thousand SYNs to the web server, from addresses that never reply",
	Cured:   "the kernel's SYNPROXY replies to SYNs with cookies, half-open connections are removed; the flood continues",
	Note:    "the flood has a source network of its own, which the gateway routes to the client",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		client := s.lab.Node(lab.RoleClient).Addr
		if err := s.watched.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(spoofed), Gw: client.AsSlice()})
		}); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		server := netip.AddrPortFrom(s.lab.ServerNode().Addr, 80)
		flood := s.segments(s.lab.Node(lab.RoleClient), 12000, func(n int) segment {
			from := spoofed.Addr().As4()
			from[3] = byte(1 + n%250)
			return segment{from: netip.AddrPortFrom(netip.AddrFrom4(from), uint16(1024+n/250)), to: server, seq: uint32(n), flags: tcpSYN}
		})
		s.traffic = append(s.traffic, flood)
		begun, stop := context.WithTimeout(ctx, time.Second) // the doctor comes later
		defer stop()
		return flood(begun)
	},
	cure: follow("tcp_loose", "nft add", "nft 'add", "conntrack -D"),
}
