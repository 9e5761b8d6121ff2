// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
)

// sink takes a generator's frames off a device and counts them.
type sink struct {
	objects sinkObjects
	attach  link.Link
}

// receiveCount is what a sink saw since its last reset.
type receiveCount struct {
	frames, bytes uint64 // of TCP: segments of open connections; at a client, complete connections
	strays        uint64 // segments that are of no connection
	latency       latencies
}

// newTranslations makes the map by which a sink tells a generator what the router
// made of each flow.
func newTranslations(flows int) (*ebpf.Map, error) {
	spec, err := loadSink()
	if err != nil {
		return nil, err
	}
	m := spec.Maps[sinkMapTranslations]
	m.MaxEntries = uint32(flows)
	translations, err := ebpf.NewMap(m)
	if err != nil {
		return nil, fmt.Errorf("make map of %d translations: %w", flows, explainBPF(err))
	}
	return translations, nil
}

// loadWith loads a program that uses translations into objects.
func loadWith(spec *ebpf.CollectionSpec, translations *ebpf.Map, objects any) error {
	spec.Maps[sinkMapTranslations].MaxEntries = translations.MaxEntries()
	return explainBPF(spec.LoadAndAssign(objects, &ebpf.CollectionOptions{
		MapReplacements: map[string]*ebpf.Map{sinkMapTranslations: translations}}))
}

// newSink attaches a sink to a device.
func newSink(ns *netns.Handle, device string, translations *ebpf.Map) (s *sink, err error) {
	s = &sink{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make packet sink on %s: %w", device, err), s.close())
		}
	}()
	spec, err := loadSink()
	if err != nil {
		return s, err
	}
	if err := loadWith(spec, translations, &s.objects); err != nil {
		return s, err
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

// attend makes the sink one of these programs of its own, which it stays: Sink, or
// for TCP connections Server or Client.
func (s *sink) attend(program *ebpf.Program, c sinkSetup) error {
	if err := errors.Join(s.objects.Connections.Set(c), s.attach.Update(program)); err != nil {
		return fmt.Errorf("change packet sink: %w", explainBPF(err))
	}
	return nil
}

// reset begins a new count, in which the sink learns what the flows' sources were
// made of, or does not.
func (s *sink) reset(learn bool) error {
	var receivers [maxCPUs]sinkReceiver
	var buckets [maxCPUs][latencyBuckets]uint32
	var learning uint32
	if learn {
		learning = 1
	}
	if err := errors.Join(s.objects.Receivers.Set(&receivers), s.objects.Latencies.Set(&buckets),
		s.objects.Learn.Set(learning)); err != nil {
		return fmt.Errorf("reset packet sink: %w", err)
	}
	return nil
}

// read returns the count so far.
func (s *sink) read() (receiveCount, error) {
	var receivers [maxCPUs]sinkReceiver
	var buckets [maxCPUs][latencyBuckets]uint32
	if err := errors.Join(s.objects.Receivers.Get(&receivers), s.objects.Latencies.Get(&buckets)); err != nil {
		return receiveCount{}, fmt.Errorf("read packet sink: %w", err)
	}
	var c receiveCount
	for i, r := range receivers {
		c.frames += r.Frames
		c.bytes += r.Bytes
		c.strays += r.Strays
		c.latency.merge(&latencies{
			buckets: buckets[i], min: time.Duration(r.ShortestNs), max: time.Duration(r.LongestNs),
		})
	}
	return c, nil
}

const latencyBuckets = int(generatorBenchLimitBENCH_BUCKETS)

// latencies is the distribution of frames' times in the sink's buckets: exact
// below 32 ns, then 16 for each power of two. min and max are exact, and 0 when
// nothing was timed.
type latencies struct {
	buckets  [latencyBuckets]uint32
	min, max time.Duration
}

func (l *latencies) merge(o *latencies) {
	if l.min == 0 || o.min != 0 && o.min < l.min {
		l.min = o.min
	}
	l.max = max(l.max, o.max)
	for b, n := range o.buckets {
		l.buckets[b] += n
	}
}

// latencyNote says it to readers of a result.
const latencyNote = "Delays above 32 ns are in buckets of a sixteenth: a median or percentile is the least of its bucket. The longest is exact."

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
	for _, c := range l.buckets {
		n += uint64(c)
	}
	return n
}

// quantile is the time below which the share q of the frames stayed, at most 1/16
// too short. 0 when nothing was timed.
func (l *latencies) quantile(q float64) time.Duration {
	rank := uint64(q * float64(l.count()))
	var seen uint64
	for b, n := range l.buckets {
		if seen += uint64(n); seen > rank {
			return max(floorOf(b), l.min)
		}
	}
	return l.max
}
