// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// hooks reads which functions a packet of the namespace walks through.
func hooks(opts Options) source {
	return source{
		name:  snapshot.CanHooks,
		costs: "the functions that each packet passes are unknown",
		live:  true,
		end: func(_ *view, s *snapshot.Snapshot) (err error) {
			switch {
			case opts.shared != nil:
				s.Hooks, err = opts.shared.hooks(opts.Netns)
			case opts.Hooks != nil:
				s.Hooks, err = opts.Hooks.List(opts.Netns)
			default:
				s.Hooks, err = observe.Hooks(opts.Netns)
			}
			return err
		},
	}
}
