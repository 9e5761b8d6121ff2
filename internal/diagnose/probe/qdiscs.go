// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"natkit/internal/snapshot"
)

// qdiscs reads the root queue of each interface: what it dropped, and how long it
// is. The root's numbers include those of its classes. It adds to what
// interfaces read.
func qdiscs() source {
	type key struct {
		index  int
		handle uint32
	}
	before := map[key]netlink.QdiscStatistics{}
	return source{
		name:  snapshot.CanQdiscs,
		costs: "queues that drop outgoing packets are not found",
		live:  true,
		start: func(*view) error {
			roots, err := rootQdiscs()
			for _, q := range roots {
				if a := q.Attrs(); a.Statistics != nil {
					before[key{a.LinkIndex, a.Handle}] = *a.Statistics
				}
			}
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			roots, err := rootQdiscs()
			if err != nil {
				return err
			}
			byIndex := map[int]netlink.Qdisc{}
			for _, q := range roots {
				byIndex[q.Attrs().LinkIndex] = q
			}
			for i := range s.Interfaces {
				q := byIndex[s.Interfaces[i].Index]
				if q == nil {
					continue
				}
				a := q.Attrs()
				out := describeQdisc(q)
				// One that was put there in the window has counted from zero.
				was, now := before[key{a.LinkIndex, a.Handle}], a.Statistics
				if now != nil && now.Basic != nil {
					b := was.Basic
					if b == nil {
						b = &netlink.GnetStatsBasic{}
					}
					out.Packets = increase32(uint64(b.Packets), uint64(now.Basic.Packets))
				}
				if now != nil && now.Queue != nil {
					b := was.Queue
					if b == nil {
						b = &netlink.GnetStatsQueue{}
					}
					out.Dropped = increase32(uint64(b.Drops), uint64(now.Queue.Drops))
					out.Overlimits = increase32(uint64(b.Overlimits), uint64(now.Queue.Overlimits))
				}
				s.Interfaces[i].Qdisc = &out
			}
			return nil
		},
	}
}

func rootQdiscs() ([]netlink.Qdisc, error) {
	all, err := listWhole(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list queues of interfaces: %w", err)
	}
	var out []netlink.Qdisc
	for _, q := range all {
		if q.Attrs().Parent == netlink.HANDLE_ROOT && q.Type() != "noqueue" && q.Type() != "noop" {
			out = append(out, q)
		}
	}
	return out, nil
}

// describeQdisc tells the length and the rate of the kinds that have one of
// their own.
func describeQdisc(q netlink.Qdisc) snapshot.Qdisc {
	out := snapshot.Qdisc{Kind: q.Type()}
	switch q := q.(type) {
	case *netlink.Tbf:
		out.LimitBytes, out.RateBytes = uint64(q.Limit), q.Rate
		// The burst is kept as the time that it takes, in ticks.
		out.BurstBytes = uint64(netlink.Xmitsize(q.Rate, q.Buffer))
	case *netlink.FqCodel:
		out.LimitPackets = uint64(q.Limit)
	case *netlink.Fq:
		out.LimitPackets = uint64(q.PacketLimit)
	case *netlink.Sfq:
		out.LimitPackets = uint64(q.Limit)
	}
	return out
}
