// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WatchOptions says what Watch counts and when it tells.
type WatchOptions struct {
	Interval time.Duration // one second by default
	For      time.Duration // 0: until the context ends
	Filter   Filter        // State and Unreplied of an event are those at its time
}

// Rates is what happened to the table in one interval.
type Rates struct {
	Seconds   float64
	New       uint64
	Destroyed uint64
	// Entered counts the events that showed a TCP flow in a new state, Ended in
	// which state TCP flows were destroyed.
	Entered, Ended map[State]uint64
	// Lost is how many events the kernel could not deliver: all numbers above are
	// too low by some of these.
	Lost   uint64
	Limits // at the end of the interval; zero when not readable
}

// Multicast groups of nfnetlink, as a mask for bind: NFNLGRP_CONNTRACK_NEW,
// _UPDATE and _DESTROY.
const eventGroups = 1<<0 | 1<<1 | 1<<2

// EventsMode is net.netfilter.nf_conntrack_events of the calling thread's
// namespace: what its entries tell to those who watch.
type EventsMode uint64

const (
	EventsOff  EventsMode = 0 // nothing
	EventsOn   EventsMode = 1 // everything
	EventsAuto EventsMode = 2 // entries that begin while somebody watches; since Linux 5.19 the default
)

// ReadEventsMode reads it.
func ReadEventsMode() (EventsMode, error) {
	n, err := readNumber(sysctlDir + "nf_conntrack_events")
	if err != nil {
		return 0, fmt.Errorf("read whether conntrack events are on: %w", err)
	}
	return EventsMode(n), nil
}

// Watch counts the events of the calling thread's namespace and gives the rates
// of every interval to fn, until ctx ends, which is no error, or fn returns an
// error. It needs CAP_NET_ADMIN.
func Watch(ctx context.Context, o WatchOptions, fn func(*Rates) error) error {
	if o.Interval <= 0 {
		o.Interval = time.Second
	}
	s, err := openSocket(ctx, eventGroups)
	if err != nil {
		return fmt.Errorf("watch conntrack events: %w", err)
	}
	defer s.close()
	if err := s.watch(ctx, o, fn); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

func (s *socket) watch(ctx context.Context, o WatchOptions, fn func(*Rates) error) error {
	began := time.Now()
	last, lostBefore := began, s.lost()
	r := newRates()
	var f Flow
	each := func(typ, flags uint16, _ uint32, payload []byte) bool {
		r.add(&f, &o.Filter, typ, flags, payload)
		return true
	}
	for {
		tick := last.Add(o.Interval)
		if o.For > 0 && tick.After(began.Add(o.For)) {
			tick = began.Add(o.For)
		}
		s.file.SetReadDeadline(tick)
		if err := ctx.Err(); err != nil { // before the deadline it had set was replaced
			return err
		}
		for {
			b, err := s.receive()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if errors.Is(err, unix.ENOBUFS) { // events were lost: s.lost knows how many
				continue
			}
			if err != nil {
				return fmt.Errorf("watch conntrack events: %w", err)
			}
			if err := eachMessage(b, each); err != nil {
				return fmt.Errorf("watch conntrack events: %w", err)
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		now, lost := time.Now(), s.lost()
		r.Seconds = now.Sub(last).Seconds()
		r.Lost, last, lostBefore = uint64(lost-lostBefore), now, lost
		r.Limits, _ = ReadLimits()
		if err := fn(r); err != nil {
			return err
		}
		if o.For > 0 && now.Sub(began) >= o.For {
			return nil
		}
		r = newRates()
	}
}

func newRates() *Rates { return &Rates{Entered: map[State]uint64{}, Ended: map[State]uint64{}} }

func (r *Rates) add(f *Flow, w *Filter, typ, flags uint16, payload []byte) {
	if typ != msgNew && typ != msgDelete || f.parse(payload) != nil || !w.Match(f) {
		return
	}
	byState := r.Entered
	switch {
	case typ == msgDelete:
		r.Destroyed++
		byState = r.Ended
	case flags&unix.NLM_F_CREATE != 0:
		r.New++
	}
	if f.Has&HasState != 0 && f.Proto == unix.IPPROTO_TCP {
		byState[f.State]++
	}
}

// lost is the number of messages that the kernel dropped because this socket's
// buffer was full, since it was opened: SK_MEMINFO_DROPS.
func (s *socket) lost() uint32 {
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return info[8]
}
