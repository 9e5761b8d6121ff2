// SPDX-License-Identifier: Apache-2.0

package live

import (
	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
)

// Namespace is one that can be watched.
type Namespace struct {
	Ref   string // as for netns.Open; "" for the caller's own
	About string // the container or pod that it belongs to, where that can be told
}

// Namespaces are those of this machine that a name or a process leads to, the
// caller's own first.
func Namespaces() ([]Namespace, error) {
	places, err := netns.All()
	if err != nil {
		return nil, err
	}
	out := make([]Namespace, len(places))
	for i, p := range places {
		out[i] = Namespace{Ref: p.Ref}
		if i > 0 {
			out[i].About = probe.OwnerOf(p.Processes).Name
		}
	}
	return out, nil
}
