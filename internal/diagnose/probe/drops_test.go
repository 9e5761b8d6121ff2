// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"testing"

	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// fakeTracer has seen a drop more at each Read.
type fakeTracer struct {
	reads  uint64
	broken bool
	closed bool
}

func (f *fakeTracer) Read() (snapshot.Drops, error) {
	if f.broken {
		return snapshot.Drops{}, errors.New("broken")
	}
	f.reads++
	return snapshot.Drops{LostEvents: f.reads}, nil
}

func (f *fakeTracer) Begin() error { return nil }
func (f *fakeTracer) End() error   { return nil }

func (f *fakeTracer) Close() error {
	f.closed = true
	return nil
}

// A window after the other is counted by one tracer, each without what was dropped
// between them. One that fails is closed, and the next window has another.
func TestDropMeterKeepsItsTracer(t *testing.T) {
	var opened []*fakeTracer
	var refuse error
	m := &DropMeter{open: func(o observe.DropOptions) (dropReader, error) {
		if o.Netns == 0 {
			t.Error("all namespaces are traced")
		}
		if refuse != nil {
			return nil, refuse
		}
		opened = append(opened, &fakeTracer{})
		return opened[len(opened)-1], nil
	}}
	window := func() (*snapshot.Drops, error) {
		src := drops(Options{Drops: m})
		if src.stop != nil {
			t.Fatal("what another holds is closed")
		}
		if err := src.start(nil); err != nil {
			return nil, err
		}
		var s snapshot.Snapshot
		err := src.end(nil, &s)
		return s.Drops, err
	}

	refuse = errors.New("refused")
	if _, err := window(); !errors.Is(err, refuse) {
		t.Errorf("error %v, want that the tracer is refused", err)
	}
	refuse = nil
	for i, want := range []uint64{1, 3, 5} {
		d, err := window()
		if err != nil || d.LostEvents != want {
			t.Fatalf("window %d: %+v, %v; want read %d of the tracer", i, d, err, want)
		}
	}
	if len(opened) != 1 || opened[0].closed {
		t.Fatalf("%d tracers were opened, want one that is open still", len(opened))
	}

	opened[0].broken = true // between two windows
	if _, err := window(); err != nil || len(opened) != 2 || !opened[0].closed {
		t.Fatalf("%v, %d tracers; want a new one instead of the broken one", err, len(opened))
	}
	src := drops(Options{Drops: m})
	if err := src.start(nil); err != nil {
		t.Fatal(err)
	}
	opened[1].broken = true // within a window
	if err := src.end(nil, &snapshot.Snapshot{}); err == nil || !opened[1].closed {
		t.Errorf("error %v, closed %v: want the error and an end", err, opened[1].closed)
	}
	if _, err := window(); err != nil || len(opened) != 3 {
		t.Errorf("%v, %d tracers; want a third one", err, len(opened))
	}
	m.Close()
	if m.Close(); !opened[2].closed {
		t.Error("still open")
	}
}
