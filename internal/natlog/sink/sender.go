// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/words/plural"
)

// output is a connection to a sink.
type output interface {
	// send sends records, in order. It gives how many were sent.
	send(ctx context.Context, records []natlog.Record) (int, error)
	// confirmed is how long ago something must have been sent to count as received, and how many calls
	// of send, from the first one on, were received whole, as far as the other end tells. An error is
	// that the connection is broken.
	confirmed() (after time.Duration, sends int, err error)
	// close closes it.
	close()
}

// allSends is what confirmed gives where the other end does not tell.
const allSends = math.MaxInt

// mark is what was sent when, with which call of send.
type mark struct {
	end      store.Position // zero: the log does not have it
	when     time.Time
	sends    int
	unlogged int // records that the log does not have
}

// sender sends the log to one sink.
type sender struct {
	sinks  *Sinks
	to     natlog.Sink
	wake   chan struct{}
	ending atomic.Bool

	// Those of its goroutine alone.
	marks   []mark
	sends   int // on this connection
	records []natlog.Record
	backoff time.Duration

	// Under Sinks.mu.
	placed    bool           // it has a position
	confirmed store.Position // everything before it was received
	reading   store.Position // everything before it was sent
	first     uint64         // the hour at which it began: what was alive then is new to it
	live      bool           // its queue has all that is behind reading
	queue     []store.Batch
	queued    int // records in queue
	sent      uint64
	lost      uint64
	formless  uint64
	connected bool
	since     time.Time // of connected, or of not
	lastError string
	errorTime time.Time
	moved     time.Time // when it was last all sent
}

func newSender(s *Sinks, to natlog.Sink) *sender {
	return &sender{sinks: s, to: to, wake: make(chan struct{}, 1), backoff: leastBackoff}
}

// resume takes over where an earlier run was.
func (w *sender) resume(had State) {
	// Hours are numbered from 1: a log that never began has left it no position.
	w.placed, w.confirmed, w.reading, w.first = had.Position.Hour > 0, had.Position, had.Position, had.FirstHour
	w.sent, w.lost, w.formless = had.Sent, had.Lost, had.Formless
}

// start begins with the running hour, which begins with all that is alive. So does a sink whose
// position no hour has had yet: the files that it was about were removed, and hours are counted from 1 again.
func (w *sender) start(part store.Position) {
	if w.placed && w.confirmed.Hour < part.Hour {
		return
	}
	if w.placed {
		w.sinks.o.Say(fmt.Sprintf("sink %s: the log has no such hour as it was sent last: it begins again with what is alive", w.to.URL))
	}
	w.placed, w.confirmed, w.reading, w.first, w.live = true, part, part, part.Hour, true
}

// push queues a batch, if the sink keeps up. Under Sinks.mu.
func (w *sender) push(b store.Batch) bool {
	if !w.live {
		return false
	}
	if w.queued+len(b.Records) > queueRecords && len(w.queue) > 0 {
		w.live = false // the log has it
		return false
	}
	w.queue = append(w.queue, b)
	w.queued += len(b.Records)
	w.poke()
	return true
}

func (w *sender) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// state is how it is, under Sinks.mu.
func (w *sender) state() State {
	st := State{URL: w.to.URL, Position: w.confirmed, FirstHour: w.first, Connected: w.connected, Since: w.since, Sent: w.sent, Lost: w.lost,
		Formless: w.formless, LastError: w.lastError, ErrorTime: w.errorTime}
	if w.placed && w.sinks.begun {
		st.Waiting = max(0, w.sinks.between(w.confirmed, w.sinks.end))
		st.Unsent = max(0, w.sinks.between(w.reading, w.sinks.end))
	}
	if st.Unsent > 0 {
		st.Behind = time.Since(w.moved).Seconds()
		if w.moved.IsZero() {
			st.Behind = 0
		}
	}
	return st
}

func (w *sender) locked(do func()) {
	w.sinks.mu.Lock()
	defer w.sinks.mu.Unlock()
	do()
}

// run sends until the context ends, or all is sent after Close.
func (w *sender) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-w.sinks.ready:
	}
	w.locked(func() { w.moved = time.Now() })
	for ctx.Err() == nil {
		err := w.session(ctx)
		if ctx.Err() != nil || err == nil {
			return
		}
		w.failed(err)
		if w.ending.Load() {
			return
		}
		timer := time.NewTimer(w.backoff)
		w.backoff = min(2*w.backoff, mostBackoff)
		for waiting := true; waiting && !w.ending.Load(); {
			select {
			case <-timer.C:
				waiting = false
			case <-ctx.Done():
				waiting = false
			case <-w.wake: // only Close ends the wait
			}
		}
		timer.Stop()
	}
}

// failed notes an error, and goes back to what was confirmed.
func (w *sender) failed(err error) {
	said, lost := "", 0
	for _, m := range w.marks {
		lost += m.unlogged
	}
	w.locked(func() {
		for i := range w.queue {
			lost += unlogged(&w.queue[i])
		}
		w.lost += uint64(lost)
		if text := err.Error(); w.connected || w.lastError != text || w.since.IsZero() {
			said = text
		}
		if w.connected || w.since.IsZero() {
			w.since = time.Now().UTC()
		}
		w.connected, w.lastError, w.errorTime = false, err.Error(), time.Now().UTC()
		w.live, w.queue, w.queued = false, nil, 0
		w.reading = w.confirmed
	})
	w.marks = nil
	if said != "" {
		w.sinks.o.Say(fmt.Sprintf("sink %s: %s; what is missing is sent from the log later", w.to.URL, said))
	}
	if lost > 0 {
		w.sinks.o.Say(fmt.Sprintf("sink %s: %s lost: they could not be written to the log, either", w.to.URL, plural.Count(lost, "record")))
	}
}

// unlogged is how many records of a batch the log does not have.
func unlogged(b *store.Batch) int {
	if b.End != (store.Position{}) {
		return 0
	}
	return len(b.Records)
}

// session is one connection. It returns nil when all is sent after Close.
func (w *sender) session(ctx context.Context) error {
	out, err := w.sinks.o.dial(w.to, w.sinks.o.Node)
	if err != nil {
		return err
	}
	defer out.close()
	w.sends = 0
	unblock := context.AfterFunc(ctx, out.close)
	defer unblock()
	var at store.Position
	was := false
	w.locked(func() { at, was = w.reading, w.lastError != "" && !w.connected })
	tail := store.NewTail(w.sinks.o.Dir, at)
	defer tail.Close()
	idle := time.NewTicker(idleEvery)
	defer idle.Stop()
	said := false
	for {
		b, more, err := w.next(tail)
		if err != nil {
			w.sinks.o.Say(fmt.Sprintf("sink %s: %v", w.to.URL, err))
		}
		if more {
			if err := w.send(ctx, out, b); err != nil {
				return err
			}
		}
		some, err := w.confirm(out)
		if err != nil {
			return err
		}
		// Datagrams are refused a moment after they are sent, so the first confirmed ones tell.
		if !said && (some || len(w.marks) == 0) {
			said = true
			w.backoff = leastBackoff
			w.locked(func() {
				if !w.connected {
					w.connected, w.since = true, time.Now().UTC()
				}
			})
			if was {
				w.sinks.o.Say(fmt.Sprintf("sink %s is reached again", w.to.URL))
			}
		}
		if more {
			continue
		}
		if w.ending.Load() && w.done() {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.wake:
		case <-idle.C:
		}
	}
}

// done tells whether all is sent. It need not be confirmed: it is sent again after the next
// start, unless it is confirmed until Close gives up waiting.
func (w *sender) done() (done bool) {
	w.locked(func() { done = len(w.marks) == 0 && w.reading.Compare(w.sinks.end) >= 0 })
	return done
}

// next gives what is to be sent next: from the queue, or from the log until that is read.
func (w *sender) next(tail *store.Tail) (b store.Batch, more bool, err error) {
	var end store.Position
	w.locked(func() {
		if len(w.queue) > 0 {
			b, more = w.queue[0], true
			w.queue = w.queue[1:]
			w.queued -= len(b.Records)
		}
		end = w.sinks.end
	})
	if more {
		return b, true, nil
	}
	if w.caughtUp() {
		return b, false, nil
	}
	var at store.Position
	w.locked(func() { at = w.reading })
	if tail.At() != at { // the queue has gone on in between
		tail.Seek(at)
	}
	b, err = tail.Next(end)
	if err != nil {
		w.locked(func() { w.pass(b.End) })
		return b, false, err
	}
	if len(b.Records) == 0 {
		w.locked(func() { w.pass(b.End) })
		w.caughtUp()
	}
	return b, len(b.Records) > 0, nil
}

// caughtUp tells whether nothing is behind what was sent, and has the queue take what comes.
func (w *sender) caughtUp() (yes bool) {
	w.locked(func() {
		end := w.sinks.end
		if !w.live && w.reading.Compare(end) == 0 && w.reading.Offset >= end.Offset {
			w.live = true
		}
		if yes = w.live; yes && len(w.queue) == 0 {
			w.moved = time.Now()
		}
	})
	return yes
}

// pass notes that everything before a position was sent, and counts what of it was in no file
// any more. Under Sinks.mu.
func (w *sender) pass(to store.Position) {
	if to.Compare(w.reading) == 0 || to == (store.Position{}) {
		if to != (store.Position{}) {
			w.reading = to
		}
		return
	}
	missed := w.sinks.between(w.reading, to.PartOf())
	if missed > 0 {
		w.lost += uint64(missed)
	}
	w.reading = to
}

// send sends what of a batch this sink is to have.
func (w *sender) send(ctx context.Context, out output, b store.Batch) error {
	w.records = w.records[:0]
	var first uint64
	w.locked(func() { first = w.first })
	for i := range b.Records {
		if r := &b.Records[i]; r.Event != natlog.Tick && w.wants(r, &b, first) {
			w.records = append(w.records, *r)
		}
	}
	n, err := 0, error(nil)
	if len(w.records) > 0 {
		n, err = out.send(ctx, w.records)
		w.sends++
	}
	// Also of what could not be sent: failed counts it.
	if b.End != (store.Position{}) && err == nil || unlogged(&b) > 0 {
		w.marks = append(w.marks, mark{b.End, time.Now(), w.sends, unlogged(&b)})
	}
	missed := uint64(0)
	w.locked(func() {
		w.sent += uint64(n)
		if err != nil {
			return
		}
		w.formless += uint64(len(w.records) - n)
		before := w.lost
		if b.End != (store.Position{}) {
			begin := b.End
			begin.Records -= len(b.Records)
			w.pass(begin)
			w.reading = b.End
		}
		missed = w.lost - before
	})
	if err != nil {
		return err
	}
	if missed > 0 {
		w.sinks.o.Say(fmt.Sprintf("sink %s: %s lost: the log has no such hours any more", w.to.URL, plural.Count(int(missed), "record")))
	}
	return nil
}

// wants tells whether a sink is sent a record: what only repeats, if its URL says so.
func (w *sender) wants(r *natlog.Record, b *store.Batch, first uint64) bool {
	if !b.Repeats(r) || b.End.Hour == first {
		return true
	}
	switch w.to.Interim {
	case natlog.InterimAll:
		return true
	case natlog.InterimBlocks:
		return r.Kind == natlog.Block
	}
	return false
}

// confirm moves the position behind what was received. some: it has moved.
func (w *sender) confirm(out output) (some bool, err error) {
	after, sends, err := out.confirmed()
	if err != nil {
		return false, err
	}
	n := 0
	for n < len(w.marks) && w.marks[n].sends <= sends && time.Since(w.marks[n].when) >= after {
		n++
	}
	if n > 0 {
		w.locked(func() {
			for _, m := range w.marks[:n] {
				if m.unlogged == 0 {
					w.confirmed = m.end
				}
			}
		})
		w.marks = append(w.marks[:0], w.marks[n:]...)
	}
	return n > 0, nil
}

// errClosed is that the other end has closed a connection.
var errClosed = errors.New("the other end closed the connection")
