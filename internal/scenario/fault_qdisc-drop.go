// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"

	"github.com/vishvananda/netlink"

	"natkit/internal/lab"
)

var qdiscFault = Fault{
	Code:    "qdisc-drop",
	Healthy: "the gateway shapes what it sends to the clients to 100 Mbit/s, and web traffic takes some of that",
	Broken:  "the shaper is set to 4 Mbit/s with room for two packets",
	Cured:   "the shaper passes what arrives, with room for bursts",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.serve(ctx, lab.HTTPServerOptions{Body: bytes.Repeat([]byte("natkit lab\n"), 500)}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.lab.URL(), 100))
		return s.shape(100e6, 256<<10)
	},
	broken: func(_ context.Context, s *faultRun) error {
		return s.shape(4e6, 4000)
	},
	cure: follow("tc qdisc replace"),
}

// shape puts a token bucket in place of what the gateway sends to the clients by.
func (s *faultRun) shape(bits, limit uint64) error {
	return s.watched.Do(func() error {
		eth1, err := netlink.LinkByName("eth1")
		if err != nil {
			return err
		}
		// veth hands over what TCP made in one piece: without this the bucket would
		// have to hold 64 KiB at once.
		const burst = 16 << 10
		rate := bits / 8
		return netlink.QdiscReplace(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: eth1.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			Rate:       rate, Limit: uint32(limit), Buffer: uint32(float64(burst) / float64(rate) * netlink.TickInUsec() * 1e6),
		})
	})
}
