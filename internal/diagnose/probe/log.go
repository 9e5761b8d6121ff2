// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// LogReader reads how the log of translations of a namespace is kept, nil for none. Lost records are
// totals.
type LogReader func(ns *netns.Handle) (*snapshot.Log, error)

// translationLog reads that before the window and after it.
func translationLog(opts Options) source {
	var before *snapshot.Log
	return source{
		name:  snapshot.CanLog,
		costs: "whether the log of translations has gaps, and whether its sinks keep up, is unknown",
		live:  true,
		start: func(*view) (err error) {
			before, err = opts.Log(opts.Netns)
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			now, err := opts.Log(opts.Netns)
			if now == nil {
				return err
			}
			was := snapshot.Log{Lost: now.Lost, Sinks: now.Sinks}
			if before != nil {
				was = *before
			}
			lost := map[string]uint64{}
			for i := range was.Sinks {
				lost[was.Sinks[i].URL] = was.Sinks[i].Lost
			}
			now.Lost = increase(was.Lost, now.Lost)
			for i := range now.Sinks {
				now.Sinks[i].Lost = increase(lost[now.Sinks[i].URL], now.Sinks[i].Lost)
			}
			s.Log = now
			return err
		},
	}
}
