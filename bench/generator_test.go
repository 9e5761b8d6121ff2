// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"testing"
	"time"

	"natkit/internal/ktest"
)

func TestDBG(t *testing.T) {
	ktest.Root(t)
	bed, err := NewBed(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer bed.Close()
	g, err := newGenerator(bed, false)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	s, err := newSink(bed.Right, bed.RightDev)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for _, l := range []frameLoad{
		{frames: []int{64}, flows: 1, duration: time.Second, cpus: []int{0}},
		{frames: []int{64}, flows: 1000, random: true, duration: time.Second, cpus: []int{0}, pps: 100000, stampEvery: 16},
		{frames: IMIX, flows: 1000, random: true, duration: time.Second, cpus: []int{0}, pps: 10000, stampEvery: 16},
		{frames: []int{64}, flows: 1000, random: true, duration: time.Second, cpus: []int{0, 1}, pps: 100000, stampEvery: 16},
	} {
		s.reset()
		c, err := g.send(context.Background(), l)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Millisecond)
		r, err := s.read()
		t.Logf("%+v", c)
		t.Logf("%d %d %d, %d p50 %v p99 %v max %v %v", r.frames, r.bytes, r.foreign, r.latency.count(), r.latency.quantile(0.5), r.latency.quantile(0.99), r.latency.quantile(1), err)
	}
}
