// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/causes"
)

var policiesFault = Fault{
	Code:    "ipsec-policies-many",
	Healthy: "a gateway with one IPsec policy, and web traffic that does not match it",
	Broken:  "the gateway has two hundred policies, one for each small network of a site",
	Cured:   "one policy covers the whole site",
	Note:    "only their owner knows which policies may become one, so the cure follows the finding's description",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.lab.URL(), 300))
		return s.policies(16, 1)
	},
	broken: func(_ context.Context, s *faultRun) error { return s.policies(24, 200) },
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.commands = append(s.commands, "ip xfrm policy flush",
			"ip xfrm policy add src 192.168.0.0/24 dst 10.20.0.0/16 dir out tmpl src 203.0.113.1 dst 203.0.113.2 proto esp mode tunnel")
		return s.policies(16, 1)
	},
}

// policies puts so many policies, each for a network of that size of a site, in
// place of all.
func (s *faultRun) policies(bits, n int) error {
	return s.watched.Do(func() error {
		if err := netlink.XfrmPolicyFlush(); err != nil {
			return err
		}
		for i := range n {
			site := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 20, byte(i), 0}), bits)
			err := netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{
				Src: ipNet(netip.MustParsePrefix("192.168.0.0/24")), Dst: ipNet(site), Dir: netlink.XFRM_DIR_OUT,
				Tmpls: []netlink.XfrmPolicyTmpl{{
					Src: s.watched.Addr.AsSlice(), Dst: s.lab.ServerNode().Addr.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL,
				}},
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}
