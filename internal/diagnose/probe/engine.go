// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// EngineReader reads what natkit has up in a namespace, nil for nothing. Packets are
// totals; what takes long is read only if the whole is wanted. Of subscribers and pools it knows
// what they were refused since before, the reading at the start of the window; nil: none.
type EngineReader func(ns *netns.Handle, before *snapshot.Engine, whole bool) (*snapshot.Engine, error)

// EngineSampler reads what a Sampler looks at of the eBPF engine in a namespace, nil where it is not up: the totals of its
// packets, and how full its tables, its addresses and the port blocks of its pools are.
type EngineSampler func(ns *netns.Handle) (*snapshot.Engine, error)

// engine reads the counters of natkit's own engine before the window, and all of it after.
func engine(opts Options) source {
	var before *snapshot.Engine
	return source{
		name:  snapshot.CanEngine,
		costs: "whether a natkit engine runs here, and what it refuses, is unknown",
		live:  true,
		start: func(*view) (err error) {
			if opts.Engine == nil {
				return waived("not requested")
			}
			before, err = opts.Engine(opts.Netns, nil, false)
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			now, err := opts.Engine(opts.Netns, before, true)
			if err != nil || now == nil {
				return err
			}
			for name, n := range now.Packets {
				if before != nil && before.Kind == now.Kind {
					n = increase(before.Packets[name], n)
				}
				if now.Packets[name] = n; n == 0 {
					delete(now.Packets, name)
				}
			}
			s.Engine = now
			return nil
		},
	}
}
