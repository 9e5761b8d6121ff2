// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WatchOptions says what Watch counts and when it tells.
type WatchOptions struct {
	Interval time.Duration // one second by default
	For      time.Duration // 0: until the context ends
	Filter   Filter        // State and Unreplied of an event are those at its time
	// NoStates need not fill Entered and Ended: the kernel is not asked for changes of
	// flows, of which one of TCP has half a dozen. Without a Filter, events are then
	// counted in the kernel where that is possible, which costs the watcher nothing.
	NoStates bool
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
const (
	updateGroup = 1 << 1
	eventGroups = 1<<0 | updateGroup | 1<<2
)

// gather is how long events lie in the socket's buffer before they are read
// together: to be woken by each of them would cost far more than they do. The
// buffer, 8 MiB as the kernel counts, has room for those of a hundred thousand
// flows a second in that time.
const gather = 20 * time.Millisecond

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
	open := func(groups uint32) (*socket, error) { return openSocket(ctx, groups) }
	s, counter, err := openCounted(&o, open)
	switch {
	case err == nil:
		defer counter.close()
	case errors.Is(err, errNoCounter):
		groups := uint32(eventGroups)
		if o.NoStates {
			groups &^= updateGroup
		}
		s, err = open(groups)
	}
	if err != nil {
		return fmt.Errorf("watch conntrack events: %w", err)
	}
	defer s.close()
	if err := s.watch(ctx, o, counter, fn); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

func (s *socket) watch(ctx context.Context, o WatchOptions, counter *eventCounter, fn func(*Rates) error) error {
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
		for {
			pause := gather
			if counter != nil {
				pause = o.Interval
			} else if err := s.drain(tick, each); err != nil {
				return fmt.Errorf("watch conntrack events: %w", err)
			}
			left := time.Until(tick)
			if left <= 0 {
				break
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(min(pause, left)):
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		now, lost := time.Now(), s.lost()
		if counter != nil {
			var err error
			if r.New, r.Destroyed, err = counter.read(); err != nil {
				return err
			}
		}
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

// drain reads all that is in the socket's buffer, or until it is time to stop where
// that comes as fast as it is read.
func (s *socket) drain(until time.Time, each func(typ, flags uint16, seq uint32, payload []byte) bool) error {
	for n := 1; n%256 != 0 || time.Now().Before(until); n++ {
		read, err := unix.Read(s.fd, s.buf) // it does not block
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS): // events were lost: s.lost knows how many
			continue
		case err != nil:
			return err
		}
		if err := eachMessage(s.buf[:read], each); err != nil {
			return err
		}
	}
	return nil
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
