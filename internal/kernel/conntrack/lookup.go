// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Lookup asks for single entries of the calling thread's namespace, by family, protocol and the tuple of their original
// direction: it costs the kernel no walk through the table. The result has an element for each that is wanted, nil where
// there is no such entry.
func Lookup(ctx context.Context, wanted []Flow) ([]*Flow, error) {
	s, err := openSocket(ctx, 0)
	if err != nil {
		return nil, fmt.Errorf("look up conntrack entries: %w", err)
	}
	defer s.close()
	found := make([]*Flow, len(wanted))
	for i := range wanted {
		var m message
		s.seq++
		m.begin(msgGet, 0, s.seq, wanted[i].Family)
		m.name(&wanted[i])
		m.end()
		if err = s.send(m.b); err == nil {
			found[i], err = s.readOne()
		}
		if err != nil {
			return nil, fmt.Errorf("look up conntrack entries: %w", err)
		}
	}
	return found, nil
}

// readOne reads the answer to what message s.seq asked for, nil if there is no such entry.
func (s *socket) readOne() (found *Flow, err error) {
	for over := false; !over && err == nil; {
		var b []byte
		if b, err = s.receive(); err != nil {
			return nil, err
		}
		failure := eachMessage(b, func(typ, _ uint16, seq uint32, payload []byte) bool {
			switch {
			case seq != s.seq:
			case typ == msgNew:
				f := &Flow{}
				if err, over = f.parse(payload), true; err == nil {
					found = f
				}
			case typ == unix.NLMSG_ERROR:
				over = true
				if errno, ok := errorOf(payload); ok && errno != 0 && errno != unix.ENOENT {
					err = explain(errno)
				}
			}
			return !over
		})
		err = errors.Join(err, failure)
	}
	return found, err
}
