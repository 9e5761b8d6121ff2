// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Listener hears of every entry that begins and ends.
type Listener struct {
	ctx context.Context
	s   *socket
}

// Listen begins to listen in the calling thread's namespace; the Listener works in any
// thread, until ctx ends. It needs CAP_NET_ADMIN.
func Listen(ctx context.Context) (*Listener, error) {
	s, err := openSocket(ctx, eventGroups&^updateGroup)
	if err != nil {
		return nil, fmt.Errorf("listen to conntrack events: %w", err)
	}
	return &Listener{ctx, s}, nil
}

// Close ends it.
func (l *Listener) Close() { l.s.close() }

// Next waits for events and gives those that are there to fn. lost reports that the kernel
// could not deliver some since the last call. The Flow is used again for the next event.
// The error is that of the context when it has ended.
func (l *Listener) Next(fn func(ended bool, f *Flow)) (lost bool, err error) {
	var f Flow
	each := func(typ, flags uint16, _ uint32, payload []byte) bool {
		if (typ == msgDelete || typ == msgNew && flags&unix.NLM_F_CREATE != 0) && f.parse(payload) == nil {
			fn(typ == msgDelete, &f)
		}
		return true
	}
	b, err := l.s.receive()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return false, l.ctx.Err()
	case errors.Is(err, unix.ENOBUFS):
		lost = true
	case err != nil:
		return false, fmt.Errorf("listen to conntrack events: %w", err)
	default:
		if err := eachMessage(b, each); err != nil {
			return false, fmt.Errorf("listen to conntrack events: %w", err)
		}
	}
	before := l.s.lost()
	if err := l.s.drain(time.Now().Add(gather), each); err != nil {
		return lost, fmt.Errorf("listen to conntrack events: %w", err)
	}
	return lost || l.s.lost() != before, nil
}
