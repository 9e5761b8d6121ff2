// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

func TestTrend(t *testing.T) {
	// levelling is a load whose entries live for so many seconds.
	levelling := func(rate, life float64, seconds int) (out []uint64) {
		for i := range seconds {
			out = append(out, uint64(rate*life*(1-math.Exp(-float64(i)/life))))
		}
		return out
	}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name   string
		counts []uint64 // one a second
		max    uint64
		rate   float64
		fullIn float64 // -1: never
	}{
		{"two are no trend", []uint64{0, 100}, 1000, math.NaN(), -1},
		{"rising", []uint64{100, 200, 300, 400}, 1000, 100, 6},
		{"a jagged rise", []uint64{0, 120, 180, 320, 400}, 1000, 100, 6},
		{"falling", []uint64{400, 300, 200}, 1000, -100, -1},
		{"no limit", []uint64{100, 200, 300}, 0, 100, -1},
		{"above a limit that was lowered", []uint64{100, 200, 300}, 50, 100, 0},
		{"levels off below the limit", levelling(100, 10, 20), 1500, 42.5, -1},
		{"levels off above it", levelling(100, 10, 12), 900, 59.8, 11.8},
		{"has levelled off", append(levelling(100, 3, 15), 300, 300, 300, 300, 300, 300, 300, 300, 300, 300), 500, 7.5, -1},
		{"a burst longer ago than a trend", append([]uint64{0, 50000}, make([]uint64, 40)...), 100000, 0, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			var tr fillTrend
			var f *Fill
			for i, n := range c.counts {
				f = tr.add(at.Add(time.Duration(i)*time.Second), conntrack.Limits{Count: n, Max: c.max})
			}
			rate, fullIn := math.NaN(), -1.0
			if f.PerSecond != nil {
				rate = *f.PerSecond
			}
			if f.FullIn != nil {
				fullIn = *f.FullIn
			}
			if math.IsNaN(rate) != math.IsNaN(c.rate) || math.Abs(rate-c.rate) > 2 || math.Abs(fullIn-c.fullIn) > max(0.3, c.fullIn/4) {
				t.Errorf("%g/s, full in %g; want %g/s, %g", rate, fullIn, c.rate, c.fullIn)
			}
		})
	}
}

func TestPortsFor(t *testing.T) {
	chains := []snapshot.Chain{
		{SNATRanges: []snapshot.PortRange{{}, {Min: 5000, Max: 5999}}},
		{SNATRanges: []snapshot.PortRange{{Min: 4000, Max: 9999}}},
	}
	for _, c := range []struct {
		low, high uint16
		want      int
	}{{5000, 5003, 1000}, {4500, 5003, 6000}, {1024, 65535, allPorts}} {
		u := snapshot.SNATUse{Outside: netip.MustParseAddr("192.0.2.1"), MinPort: c.low, MaxPort: c.high}
		if got := portsFor(chains, u); got != c.want {
			t.Errorf("%d-%d: of %d ports, want %d", c.low, c.high, got, c.want)
		}
	}
}

// Every window is judged with the same tracer of drops.
func TestJudgeKeepsTheTracer(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var first *probe.DropMeter
	windows := 0
	w := &watcher{o: Options{Window: time.Second}, take: func(_ context.Context, o probe.Options) (*snapshot.Snapshot, error) {
		if windows++; windows == 1 {
			first = o.Drops
		}
		if o.Drops == nil || o.Drops != first || o.Hooks == nil {
			t.Errorf("window %d has a tracer of its own", windows)
		}
		if windows == 3 {
			cancel()
		}
		return &snapshot.Snapshot{}, nil
	}}
	broken := make(chan error, 1)
	w.judge(ctx, broken)
	if windows != 3 || len(broken) != 0 {
		t.Errorf("%d windows, %d errors; want 3 without", windows, len(broken))
	}
}

// A table that takes a second to read is read every hundredth window of a second, and its
// last reading judged in between.
func TestJudgeReadsTheTableSeldom(t *testing.T) {
	began := time.Now()
	var d dumped
	if d.inUse(began) != nil {
		t.Error("a table before it was read")
	}
	table := &snapshot.Table{DumpSeconds: 1}
	if at := d.read(table, began); !at.Equal(began) {
		t.Errorf("read at %v, want %v", at, began)
	}
	if d.inUse(began.Add(99*time.Second)) != table || d.inUse(began.Add(100*time.Second)) != nil {
		t.Error("want the table in use for a hundred seconds")
	}
	if at := d.read(table, began.Add(50*time.Second)); !at.Equal(began) {
		t.Errorf("judged again: read at %v, want %v", at, began)
	}
	if at := d.read(&snapshot.Table{}, began.Add(time.Minute)); !at.Equal(began.Add(time.Minute)) {
		t.Errorf("read again: at %v", at)
	}

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	windows := 0
	w := &watcher{o: Options{Window: time.Second, Dump: true}}
	w.take = func(_ context.Context, o probe.Options) (*snapshot.Snapshot, error) {
		if windows++; windows == 1 != o.Dump || o.Dump != (o.Table == nil) || o.Table != nil && o.Table != table {
			t.Errorf("window %d: dump %v, table %v", windows, o.Dump, o.Table)
		}
		if windows == 3 {
			cancel()
		}
		return &snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Table: table}}, nil
	}
	broken := make(chan error, 1)
	w.judge(ctx, broken)
	if j := w.judged.Load(); windows != 3 || len(broken) != 0 || j.Table != table || j.TableAt.Before(began) {
		t.Errorf("%d windows, %d errors, last judgement %+v", windows, len(broken), j)
	}
}

// One namespace with one flow: counted, judged, and no moment after the end.
func TestWatch(t *testing.T) {
	ktest.Root(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	seen := errors.New("seen")
	var m *Moment
	err = Watch(ctx, Options{Netns: h, Interval: 100 * time.Millisecond, Window: 200 * time.Millisecond, Dump: true, Events: true}, func(now *Moment) error {
		if m = now; m.Judged != nil {
			return seen
		}
		return nil
	})
	if !errors.Is(err, seen) {
		t.Fatalf("%v; last %+v", err, m)
	}
	if m.Netns.Inode != h.Inode() || m.Host.Kernel == "" || m.Host.CPUs == 0 || m.Host.MemoryBytes == 0 || len(m.CPUs) == 0 || m.Seconds <= 0 {
		t.Errorf("%+v", m)
	}
	if m.Drops == nil && len(m.Unseen) == 0 {
		t.Error("drops are neither there nor said to be missing")
	}
	for _, f := range m.Judged.Findings {
		t.Errorf("found %s in an empty namespace", f.Code)
	}

	// The end of the context is no error, without conntrack's clock either.
	ctx, cancel = context.WithCancel(ctx)
	n := 0
	err = Watch(ctx, Options{Netns: h, Interval: 100 * time.Millisecond, Window: time.Second}, func(*Moment) error {
		if n++; n == 2 {
			cancel()
		}
		return nil
	})
	if err != nil || n != 2 {
		t.Errorf("%d moments, %v", n, err)
	}
}
