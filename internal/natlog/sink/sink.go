// SPDX-License-Identifier: Apache-2.0

// Package sink sends the log of translations on to other programs. Each sink is a goroutine
// with a position in the log. While it keeps up, it has a queue of what was just written. When
// its queue is full, or after an error, it reads the log from its position until it has caught
// up. So a sink that is down or slow costs neither packets, nor the log, nor other sinks.
//
//	store ── Written ──► queue ──────────► encoder ──► connection
//	journal, hourly files ──► store.Tail ──┘ (behind)     │
//	sinks.json ◄── position ◄── confirmed ◄───────────────┘
//
// A record is sent at least once: what was not confirmed when a connection broke is sent again.
package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/words/plural"
)

// Options of Open.
type Options struct {
	Dir   string // of the log
	Node  string
	Sinks []natlog.Sink
	// Say reports what an administrator wants to know. Any goroutine may call it.
	Say func(text string)

	dial func(natlog.Sink, string) (output, error) // for tests; nil: the real ones
}

// queueRecords is how many records wait for a sink in memory; some 200 bytes each.
const queueRecords = 1 << 14

// Times of a sink. Variables, as tests have no time.
var (
	leastBackoff = time.Second
	mostBackoff  = 30 * time.Second
	saveEvery    = time.Second
	idleEvery    = 200 * time.Millisecond // a look at what was confirmed
	closeWithin  = 5 * time.Second        // what waits is sent
)

// Sinks are all sinks of a log. They are opened before the store and closed after it.
type Sinks struct {
	o       Options
	senders []*sender
	idle    []State // sinks of an earlier run that are not configured now

	mu    sync.Mutex
	end   store.Position // of the log
	sizes []store.PartSize
	ready chan struct{} // closed with the first record
	begun bool

	cancel context.CancelFunc
	work   sync.WaitGroup
	saved  chan struct{}
}

// Open begins to send. Nothing is sent before the store has written.
func Open(o Options) (*Sinks, error) {
	if o.dial == nil {
		o.dial = dial
	}
	seen := map[string]bool{}
	for _, s := range o.Sinks {
		if seen[s.URL] {
			return nil, fmt.Errorf("sink %s is given twice", s.URL)
		}
		seen[s.URL] = true
		if err := check(s); err != nil {
			return nil, fmt.Errorf("sink %s: %w", s.URL, err)
		}
	}
	f, err := Read(o.Dir)
	if errors.Is(err, store.ErrDamaged) { // a log that is not kept is worse
		o.Say(fmt.Sprintf("%v: positions are lost, and all sinks begin again with what is alive", err))
		err = nil
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Sinks{o: o, ready: make(chan struct{}), cancel: cancel, saved: make(chan struct{})}
	var first *store.Position
	for _, to := range o.Sinks {
		w := newSender(s, to)
		if at := slices.IndexFunc(f.Sinks, func(had State) bool { return had.URL == to.URL }); at >= 0 {
			w.resume(f.Sinks[at])
			f.Sinks = slices.Delete(f.Sinks, at, at+1)
			if w.placed && (first == nil || w.confirmed.Compare(*first) < 0) {
				first = &w.confirmed
			}
		}
		s.senders = append(s.senders, w)
	}
	for _, had := range f.Sinks {
		had.Unused, had.Connected = true, false
		s.idle = append(s.idle, had)
	}
	if first != nil {
		s.sizes, _ = store.Sizes(o.Dir, *first) // a log without a folder has none
	}
	for _, w := range s.senders {
		s.work.Go(func() { w.run(ctx) })
	}
	go s.save(ctx)
	return s, nil
}

// Written is to be store.Options.Written. It never waits.
func (s *Sinks) Written(b store.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.End == (store.Position{}) { // the log could not take them; who keeps up has them all the same
		for _, w := range s.senders {
			if !w.push(b) {
				w.lost += uint64(len(b.Records))
			}
		}
		return
	}
	if !s.begun {
		s.begun = true
		for _, w := range s.senders {
			w.start(b.End.PartOf())
		}
		close(s.ready)
	}
	s.end = b.End
	s.grow(b)
	for _, w := range s.senders {
		w.push(b)
	}
}

// grow counts the records of the part that is written. A journal that was counted at the
// start has grown by what it took since.
func (s *Sinks) grow(b store.Batch) {
	part := b.End.PartOf()
	if n := len(s.sizes); n > 0 && s.sizes[n-1].Part == part {
		s.sizes[n-1].Records += len(b.Records)
		return
	}
	s.sizes = append(s.sizes, store.PartSize{Part: part, Records: len(b.Records)})
	for len(s.sizes) > 1 && !slices.ContainsFunc(s.senders, func(w *sender) bool { return w.confirmed.Compare(s.sizes[0].Part) <= 0 }) {
		s.sizes = s.sizes[1:]
	}
}

// Needed is to be store.Options.Needed.
func (s *Sinks) Needed(part store.Position) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.ContainsFunc(s.idle, func(had State) bool { return had.Position.Compare(part) == 0 }) {
		return true
	}
	return slices.ContainsFunc(s.senders, func(w *sender) bool {
		return w.placed && w.confirmed.Compare(part) <= 0 && w.reading.Compare(part) >= 0
	})
}

// between counts the records between two positions.
func (s *Sinks) between(from, to store.Position) (n int) {
	for _, size := range s.sizes {
		if from.Compare(size.Part) <= 0 && to.Compare(size.Part) > 0 {
			n += size.Records
		}
	}
	return n + to.Records - from.Records
}

// State is how each sink is.
func (s *Sinks) State() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []State
	for _, w := range s.senders {
		list = append(list, w.state())
	}
	return list
}

// save writes the positions once a second, until the context ends.
func (s *Sinks) save(ctx context.Context) {
	defer close(s.saved)
	ticker := time.NewTicker(saveEvery)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := s.write()
		if err != nil && !failing {
			s.o.Say(fmt.Sprintf("the positions of sinks cannot be written: %v", err))
		}
		failing = err != nil
	}
}

func (s *Sinks) write() error {
	list := append(s.State(), s.idle...)
	return writeFile(s.o.Dir, File{Time: time.Now().UTC(), Sinks: list})
}

// Close waits a little for what still has to be sent, and writes the positions. The store is
// closed before.
func (s *Sinks) Close() error {
	if s == nil { // there are none
		return nil
	}
	done := make(chan struct{})
	timer := time.AfterFunc(closeWithin, s.cancel)
	defer timer.Stop()
	for _, w := range s.senders {
		w.ending.Store(true)
		w.poke()
	}
	s.mu.Lock()
	if !s.begun { // they wait for a store that never was
		s.cancel()
	}
	s.mu.Unlock()
	go func() { s.work.Wait(); close(done) }()
	<-done
	s.cancel()
	<-s.saved
	waiting := 0
	for _, st := range s.State() {
		waiting += st.Waiting
	}
	if waiting > 0 {
		s.o.Say(plural.Count(waiting, "record") + " not sent yet: the next start sends them from the log")
	}
	return s.write()
}
