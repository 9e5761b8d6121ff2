// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/observe"
	"natkit/snapshot"
)

// drops counts what the kernel drops in the window, by place and reason.
func drops(opts Options) source {
	out := source{
		name:  snapshot.CanDrops,
		costs: "where the kernel drops packets and why is not told; counters tell of some of it",
		live:  true,
	}
	if opts.shared != nil {
		out.end = func(_ *view, s *snapshot.Snapshot) (err error) {
			s.Drops, err = opts.shared.drops.of(s.Netns.Inode, opts.Netns.Name() == "")
			return err
		}
		return out
	}
	var tracer *observe.Drops
	out.start = func(*view) (err error) {
		tracer, err = observe.OpenDrops(observe.DropOptions{Netns: opts.Netns.Inode()})
		return err
	}
	out.end = func(_ *view, s *snapshot.Snapshot) error {
		d, err := tracer.Read()
		if err != nil {
			return err
		}
		s.Drops = &d
		return nil
	}
	out.stop = func() {
		if tracer != nil {
			tracer.Close()
		}
	}
	return out
}

// dropTracer counts the drops of all namespaces at once and gives each its own.
// A tracer more costs each drop of the machine its time again.
type dropTracer struct {
	tracer *observe.Drops
	rows   *snapshot.Drops // of all namespaces, once they were read
	err    error
}

func traceAll() *dropTracer {
	d := &dropTracer{}
	d.tracer, d.err = observe.OpenDrops(observe.DropOptions{})
	return d
}

// of is what was dropped in the namespace with this number, and for own in none
// that could be told. The first call ends the counting.
func (d *dropTracer) of(inode uint64, own bool) (*snapshot.Drops, error) {
	if d.rows == nil && d.err == nil {
		all, err := d.tracer.Read()
		d.rows, d.err = &all, err
	}
	if d.err != nil {
		return nil, d.err
	}
	out := &snapshot.Drops{Rows: []snapshot.Drop{}, LostEvents: d.rows.LostEvents}
	for _, row := range d.rows.Rows {
		if row.Netns == inode || own && row.Netns == 0 {
			out.Rows = append(out.Rows, row)
		}
	}
	return out, nil
}

func (d *dropTracer) close() {
	if d.tracer != nil {
		d.tracer.Close()
	}
}
