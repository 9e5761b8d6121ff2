// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"natkit/internal/netns"
)

// sink takes a generator's frames off a device and counts them.
type sink struct {
	objects sinkObjects
	attach  link.Link
}

// receiveCount is what a sink saw since its last reset.
type receiveCount struct {
	frames, bytes uint64
	foreign       uint64 // other frames, which went to the stack
	latency       latencies
}

// newSink attaches a sink to a device.
func newSink(ns *netns.Handle, device string) (s *sink, err error) {
	s = &sink{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make packet sink on %s: %w", device, err), s.close())
		}
	}()
	if err := loadSinkObjects(&s.objects, nil); err != nil {
		return s, explainBPF(err)
	}
	return s, ns.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		s.attach, err = link.AttachXDP(link.XDPOptions{
			Program: s.objects.Sink, Interface: l.Attrs().Index, Flags: link.XDPDriverMode,
		})
		return explainBPF(err)
	})
}

func (s *sink) close() error {
	var errs []error
	if s.attach != nil {
		errs = append(errs, s.attach.Close())
	}
	return errors.Join(append(errs, s.objects.Close())...)
}

// reset begins a new count.
func (s *sink) reset() error {
	var receivers [maxCPUs]sinkReceiver
	var buckets [maxCPUs]latencies
	if err := errors.Join(s.objects.Receivers.Set(&receivers), s.objects.Latencies.Set(&buckets)); err != nil {
		return fmt.Errorf("reset packet sink: %w", err)
	}
	return nil
}

// read returns the count so far.
func (s *sink) read() (receiveCount, error) {
	var receivers [maxCPUs]sinkReceiver
	var buckets [maxCPUs]latencies
	if err := errors.Join(s.objects.Receivers.Get(&receivers), s.objects.Latencies.Get(&buckets)); err != nil {
		return receiveCount{}, fmt.Errorf("read packet sink: %w", err)
	}
	var c receiveCount
	for i := range receivers {
		c.frames += receivers[i].Frames
		c.bytes += receivers[i].Bytes
		c.foreign += receivers[i].Foreign
		for b, n := range buckets[i] {
			c.latency[b] += n
		}
	}
	return c, nil
}

// latencies is the distribution of frames' times in the sink's buckets: exact
// below 32 ns, then 16 for each power of two.
type latencies [generatorBenchLimitBENCH_BUCKETS]uint32

// bucketOf is the program's bucket_of.
func bucketOf32(ns uint64) int {
	if ns >= 1<<32 {
		return len(latencies{}) - 1
	}
	shift := bits.Len64(ns) - 1
	if shift < 5 {
		return int(ns)
	}
	return (shift-3)*16 + int(ns>>(shift-4))&15
}

// floorOf is the least time of a bucket.
func floorOf(bucket int) time.Duration {
	if bucket < 32 {
		return time.Duration(bucket)
	}
	shift := bucket/16 + 3
	return time.Duration((16 + bucket%16) << (shift - 4))
}

// count is how many frames were timed.
func (l *latencies) count() (n uint64) {
	for _, c := range l {
		n += uint64(c)
	}
	return n
}

// quantile is the time below which the share q of the frames stayed: within 1/16,
// and at q 0 and 1 the least and the greatest bucket. 0 when nothing was timed.
func (l *latencies) quantile(q float64) time.Duration {
	rank := uint64(q * float64(l.count()))
	var seen uint64
	last := 0
	for b, n := range l {
		if n == 0 {
			continue
		}
		last = b
		if seen += uint64(n); seen > rank {
			return floorOf(b)
		}
	}
	return floorOf(last)
}
