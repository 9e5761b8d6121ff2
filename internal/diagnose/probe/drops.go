// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// drops counts what the kernel drops in the window, by place and reason.
func drops(opts Options) source {
	out := source{
		name:  snapshot.CanDrops,
		costs: "where and why the kernel drops packets is unknown, except for a few counters",
		live:  true,
	}
	if opts.shared != nil {
		out.end = func(_ *view, s *snapshot.Snapshot) (err error) {
			s.Drops, err = opts.shared.drops.of(s.Netns.Inode, opts.Netns.Name() == "")
			return err
		}
		return out
	}
	meter := opts.Drops
	if meter == nil {
		meter = &DropMeter{}
		out.stop = meter.Close
	}
	out.start = func(*view) error { return meter.start(opts.Netns.Inode()) }
	out.mark = meter.mark
	out.end = func(_ *view, s *snapshot.Snapshot) error {
		d, err := meter.read()
		if err != nil {
			return err
		}
		s.Drops = &d
		return nil
	}
	return out
}

// DropMeter is a tracer of one namespace's drops that stays from one Take to the
// next, for those who Take again and again: to load it costs far more than to read
// it. The zero value is ready to use, by one Take at a time.
type DropMeter struct {
	tracer dropReader                                    // nil: not loaded
	open   func(observe.DropOptions) (dropReader, error) // for tests; nil is the kernel's
}

type dropReader interface {
	Begin() error
	End() error
	Read() (snapshot.Drops, error)
	Close() error
}

// start counts from now on. A tracer that fails is replaced by another.
func (m *DropMeter) start(inode uint64) error {
	if m.tracer != nil {
		if _, err := m.read(); err == nil { // what was dropped between two windows belongs to neither
			return nil
		}
	}
	open := m.open
	if open == nil {
		open = func(o observe.DropOptions) (dropReader, error) { return observe.OpenDrops(o) }
	}
	tracer, err := open(observe.DropOptions{Netns: inode})
	if err != nil {
		return err
	}
	m.tracer = tracer
	return nil
}

// mark begins or ends the window.
func (m *DropMeter) mark(ends bool) error {
	if ends {
		return m.tracer.End()
	}
	return m.tracer.Begin()
}

func (m *DropMeter) read() (snapshot.Drops, error) {
	d, err := m.tracer.Read()
	if err != nil {
		m.Close()
	}
	return d, err
}

// Close ends the counting.
func (m *DropMeter) Close() {
	if m.tracer != nil {
		m.tracer.Close()
		m.tracer = nil
	}
}

// dropTracer counts the drops of all namespaces at once and gives each its own, and
// those of the others that may be of what it sent there.
// A tracer more costs each drop of the machine its time again.
type dropTracer struct {
	tracer *observe.Drops
	rows   snapshot.Drops // of all namespaces, once the window is over
	err    error
}

func traceAll() *dropTracer {
	d := &dropTracer{}
	d.tracer, d.err = observe.OpenDrops(observe.DropOptions{})
	return d
}

// begin begins the window, inside of those of all namespaces: see source.mark.
func (d *dropTracer) begin() {
	if d.err == nil {
		d.err = d.tracer.Begin()
	}
}

// end ends the window.
func (d *dropTracer) end() {
	if d.err == nil {
		d.err = d.tracer.End()
	}
	if d.err == nil {
		d.rows, d.err = d.tracer.Read()
	}
}

// of is what was dropped in the namespace with this number, and for own in none
// that could be told.
func (d *dropTracer) of(inode uint64, own bool) (*snapshot.Drops, error) {
	if d.err != nil {
		return nil, d.err
	}
	out := &snapshot.Drops{Rows: []snapshot.Drop{}, LostEvents: d.rows.LostEvents}
	for _, row := range d.rows.Rows {
		switch {
		case row.Netns == inode || own && row.Netns == 0:
			out.Rows = append(out.Rows, row)
		case row.Netns != 0 && !row.Benign && row.Cause != snapshot.CauseNone && len(out.Elsewhere) < snapshot.MaxElsewhere:
			out.Elsewhere = append(out.Elsewhere, row)
		}
	}
	return out, nil
}

func (d *dropTracer) close() {
	if d.tracer != nil {
		d.tracer.Close()
	}
}
