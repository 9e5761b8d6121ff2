// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/observe"
	"natkit/snapshot"
)

// drops counts what the kernel drops in the window, by place and reason.
func drops(opts Options) source {
	var tracer *observe.Drops
	return source{
		name:  snapshot.CanDrops,
		costs: "where the kernel drops packets and why is not told; counters tell of some of it",
		live:  true,
		start: func(*view) (err error) {
			tracer, err = observe.OpenDrops(observe.DropOptions{Netns: opts.Netns.Inode()})
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			d, err := tracer.Read()
			if err != nil {
				return err
			}
			s.Drops = &d
			return nil
		},
		stop: func() {
			if tracer != nil {
				tracer.Close()
			}
		},
	}
}
