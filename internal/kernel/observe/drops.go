// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

// DropOptions say which dropped packets to count and how closely.
type DropOptions struct {
	Netns  uint64 // inode of the namespace; 0 for all of the host
	Stacks bool   // count kernel stacks too, which costs some 5 us a drop instead of 0.03
	Match  PacketMatch

	maxKeys uint32 // for tests: size of a window's table, 0 for the program's own
}

// Drops counts dropped packets from OpenDrops until Close. It is for one
// goroutine.
type Drops struct {
	objs    dropsObjects
	link    link.Link
	samples *ringbuf.Reader
	stacks  bool
	match   PacketMatch

	reasons    reasons
	symbols    *symbols
	namespaces *namespaces

	windows [2]dropWindow
	current int                        // the window that is being counted into
	ended   bool                       // the other one is over, and not read yet
	early   map[dropsDropKey]*kept     // samples of that window, which were in the ring already
	lost    uint64                     // as of the last Read
	counted map[uint64]conntrack.Stats // by the conntrack of each namespace, as of the last suspicion
}

// dropWindow is one window's tables, as bpf/trace/drops.bpf.c describes them.
type dropWindow struct{ front, counts *ebpf.Map }

// What a row shows of its packets and stacks.
const (
	maxSamples = 3
	maxStacks  = 3
)

// OpenDrops starts to count. The error wraps ErrUnavailable where the kernel
// does not allow it.
func OpenDrops(o DropOptions) (*Drops, error) {
	kernel, opts, err := kernelTypes()
	if err != nil {
		return nil, err
	}
	if err := checkDropArguments(kernel); err != nil {
		return nil, refused("trace drops", err)
	}
	d := &Drops{stacks: o.Stacks, match: o.Match, counted: map[uint64]conntrack.Stats{}, early: map[dropsDropKey]*kept{}}
	if d.reasons, err = loadReasons(kernel); err != nil {
		return nil, err
	}
	spec, err := loadDrops()
	if err != nil {
		return nil, err
	}
	if err := configureDrops(spec, o, d.reasons); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&d.objs, &ebpf.CollectionOptions{Programs: opts}); err != nil {
		return nil, refused("trace drops", err)
	}
	d.windows = [2]dropWindow{{d.objs.FrontA, d.objs.CountsA}, {d.objs.FrontB, d.objs.CountsB}}
	if err := d.nameSecond(); err != nil {
		d.Close()
		return nil, err
	}
	if d.samples, err = ringbuf.NewReader(d.objs.Samples); err != nil {
		d.Close()
		return nil, fmt.Errorf("read samples of drops: %w", err)
	}
	// Read needs them; their 0.1 s are better spent before than in the first window.
	d.symbols, _ = kernelSymbols()
	d.namespaces = newNamespaces()
	for inode := range d.namespaces.refs {
		if o.Netns == 0 || o.Netns == inode {
			if c, err := d.namespaces.counters(inode); err == nil {
				d.counted[inode] = c
			}
		}
	}
	if d.link, err = link.AttachTracing(link.TracingOptions{Program: d.objs.CountDrop}); err != nil {
		d.Close()
		return nil, refused("trace drops", err)
	}
	return d, nil
}

// configureDrops writes the options into the program's constants and maps.
func configureDrops(spec *ebpf.CollectionSpec, o DropOptions, r reasons) error {
	if o.Netns > 1<<32-1 {
		return fmt.Errorf("trace drops: %d is not the inode of a network namespace", o.Netns)
	}
	var vars dropsVariableSpecs
	if err := spec.Assign(&vars); err != nil {
		return err
	}
	stacks := uint8(0)
	if o.Stacks {
		stacks = 1
	} else {
		spec.Maps[dropsMapStacks].MaxEntries = 1
	}
	if o.maxKeys != 0 {
		spec.Maps[dropsMapCountsA].MaxEntries = o.maxKeys
		spec.Maps[dropsMapCountsB].MaxEntries = o.maxKeys
	}
	named := map[string]*ebpf.VariableSpec{"NOT_SPECIFIED": vars.NotSpecified, "NO_SOCKET": vars.NoSocket, "NETFILTER_DROP": vars.NetfilterDrop}
	for number, name := range r.core {
		if v := named[name]; v != nil {
			if err := v.Set(number); err != nil {
				return err
			}
		}
	}
	return errors.Join(vars.OnlyNetns.Set(uint32(o.Netns)), vars.WithStacks.Set(stacks))
}

// nameSecond tells the second front, of every CPU, which table belongs to it.
func (d *Drops) nameSecond() error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count processors: %w", err)
	}
	fronts := make([]dropsDropFront, cpus)
	for i := range fronts {
		fronts[i].Second = 1
	}
	if err := d.windows[1].front.Put(uint32(0), fronts); err != nil {
		return fmt.Errorf("prepare counts of drops: %w", err)
	}
	return nil
}

// Forget forgets how the namespace with this number is found and what its interfaces are called: another one has got the
// number, or it is found by another name.
func (d *Drops) Forget(inode uint64) { d.namespaces.forget(inode) }

// Close stops counting.
func (d *Drops) Close() error {
	var errs []error
	if d.link != nil {
		errs = append(errs, d.link.Close())
	}
	if d.samples != nil {
		errs = append(errs, d.samples.Close())
	}
	return errors.Join(append(errs, d.objs.Close())...)
}

// Read returns what was dropped since the last Read, or since OpenDrops, most
// first. Every drop is in exactly one answer, as a row or in LostEvents.
func (d *Drops) Read() (snapshot.Drops, error) {
	counts, err := d.nextWindow()
	if err != nil {
		return snapshot.Drops{}, err
	}
	lost, err := d.readLost()
	if err != nil {
		return snapshot.Drops{}, err
	}
	samples, err := d.readSamples()
	if err != nil {
		return snapshot.Drops{}, err
	}
	// Without symbols places are shown by address, and that is worth something still.
	d.symbols, _ = kernelSymbols()
	out := snapshot.Drops{LostEvents: lost - d.lost, Rows: d.rows(d.judge(counts), samples)}
	d.lost = lost
	snapshot.Clean(&snapshot.Snapshot{Drops: &out}) // an interface may be called anything
	return out, nil
}

// Watch calls fn with what was dropped in each interval, until total has passed
// (0: for ever) or ctx ends; the last interval may be shorter. The end of ctx is
// no error.
func (d *Drops) Watch(ctx context.Context, every, total time.Duration, fn func(at time.Time, interval time.Duration, drops snapshot.Drops) error) error {
	if total > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, total)
		defer stop()
	}
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
		case <-ticks.C:
			// The last tick and the end are due at once, and either may come first:
			// together they are one interval, not one and a sliver.
			if end, ok := ctx.Deadline(); ok && time.Until(end) < every/10 {
				<-ctx.Done()
			}
		}
		drops, err := d.Read()
		if err != nil {
			return err
		}
		now := time.Now()
		if err := fn(now, now.Sub(last), drops); err != nil || ctx.Err() != nil {
			return err
		}
		last = now
	}
}

// Begin forgets what was dropped until now.
func (d *Drops) Begin() error {
	if _, err := d.nextWindow(); err != nil {
		return err
	}
	var err error
	if d.lost, err = d.readLost(); err != nil {
		return err
	}
	_, err = d.readSamples()
	return err
}

// End makes the next Read tell of what was dropped until now, however late it comes: reading
// takes some time, and other counters end here.
func (d *Drops) End() error {
	if d.ended {
		return nil
	}
	d.current = 1 - d.current
	if err := d.objs.Windows.Update(uint32(0), d.windows[d.current].front, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("begin a window of drops: %w", err)
	}
	d.ended = true
	return nil
}

// nextWindow makes the other window current and empties the one that was. The
// kernel comes back from changing the map of maps only when no program is running
// that may still count into the old one.
func (d *Drops) nextWindow() (map[dropsDropKey]uint64, error) {
	if err := d.End(); err != nil {
		return nil, err
	}
	d.ended = false
	old := d.windows[1-d.current]
	counts := map[dropsDropKey]uint64{}
	var fronts []dropsDropFront // of each possible CPU
	if err := old.front.Lookup(uint32(0), &fronts); err != nil {
		return nil, fmt.Errorf("read counts of drops: %w", err)
	}
	for i := range fronts {
		for j := range fronts[i].Slots {
			if slot := &fronts[i].Slots[j]; slot.Count != 0 {
				counts[slot.Key] += slot.Count
				*slot = dropsDropSlot{}
			}
		}
	}
	if err := old.front.Put(uint32(0), fronts); err != nil {
		return nil, fmt.Errorf("empty counts of drops: %w", err)
	}
	cpus := len(fronts)
	keys := make([]dropsDropKey, old.counts.MaxEntries())
	values := make([]uint64, len(keys)*cpus)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := old.counts.BatchLookupAndDelete(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read counts of drops: %w", err)
		}
		for i, key := range keys[:n] {
			for _, count := range values[i*cpus : (i+1)*cpus] {
				counts[key] += count
			}
		}
		if err != nil {
			return counts, nil
		}
	}
}

// readLost returns how many drops were not counted since OpenDrops: no room in
// the table, or dropped while the program was at work on the same processor.
func (d *Drops) readLost() (uint64, error) {
	var perCPU []uint64
	if err := d.objs.Losses.Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read lost drops: %w", err)
	}
	stats, err := d.objs.CountDrop.Stats()
	if err != nil {
		return 0, fmt.Errorf("read lost drops: %w", err)
	}
	lost := stats.RecursionMisses
	for _, n := range perCPU {
		lost += n
	}
	return lost, nil
}

// readSamples takes all samples out of the ring, and returns those of the window
// that has just ended, by key.
func (d *Drops) readSamples() (map[dropsDropKey]*kept, error) {
	ended := d.early
	d.early = map[dropsDropKey]*kept{}
	d.samples.SetDeadline(time.Now())
	var record ringbuf.Record
	for {
		err := d.samples.ReadInto(&record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return ended, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read samples of drops: %w", err)
		}
		var s dropsDropSample
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &s); err != nil {
			return nil, fmt.Errorf("read samples of drops: %w", err)
		}
		samples := ended
		if int(s.Second) == d.current {
			samples = d.early
		}
		if samples[s.Key] == nil {
			samples[s.Key] = &kept{}
		}
		samples[s.Key].add(s, d.match.wants(&s))
	}
}

// swap16 reads a field in network order.
func swap16(v uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], v)
	return binary.BigEndian.Uint16(b[:])
}

// judged is one key of the kernel's table and what it means.
type judged struct {
	dropsDropKey
	count    uint64
	function string
	reason   string
	cause    snapshot.NATCause
}

// judge names the causes, and takes back suspicions against conntrack that its
// own counters do not confirm.
func (d *Drops) judge(counts map[dropsDropKey]uint64) []judged {
	type suspicion struct {
		netns uint64
		cause snapshot.NATCause
	}
	all := make([]judged, 0, len(counts))
	suspected := map[suspicion]uint64{}
	for key, count := range counts {
		j := judged{dropsDropKey: key, count: count, reason: d.reasons.name(key.Reason)}
		j.function, _ = d.symbols.function(key.Location)
		j.cause = causeOf(j.function, j.reason, key.Class)
		if j.cause == snapshot.CauseTableFull || j.cause == snapshot.CauseConfirm {
			suspected[suspicion{uint64(key.Netns), j.cause}] += count
		}
		all = append(all, j)
	}
	increases := map[uint64]refusals{}
	for s := range suspected {
		if _, done := increases[s.netns]; done {
			continue
		}
		now, err := d.namespaces.counters(s.netns)
		if err != nil { // not known: the suspicion stands
			for _, cause := range []snapshot.NATCause{snapshot.CauseTableFull, snapshot.CauseConfirm} {
				delete(suspected, suspicion{s.netns, cause})
			}
			continue
		}
		if before, ok := d.counted[s.netns]; ok {
			increases[s.netns] = refusalsOf(now.Since(before))
		} else { // a namespace younger than d began with none
			increases[s.netns] = refusalsOf(now.Sum())
		}
		d.counted[s.netns] = now
	}
	for i := range all {
		s := suspicion{uint64(all[i].Netns), all[i].cause}
		counted := increases[s.netns].create
		if s.cause == snapshot.CauseConfirm {
			counted = increases[s.netns].confirm
		}
		// The counters are read a moment after the window ended, and a rule may drop
		// beside conntrack: the majority decides.
		if suspected[s] > 0 && 2*counted < suspected[s] {
			all[i].cause = snapshot.CauseRule
		}
	}
	return all
}

// rows joins the keys that look the same to a reader, most first.
func (d *Drops) rows(all []judged, samples map[dropsDropKey]*kept) []snapshot.Drop {
	type row struct {
		drop   snapshot.Drop
		stacks map[uint32]uint64
	}
	type look struct {
		location uint64
		reason   uint32
		device   deviceKey
		cause    snapshot.NATCause
		benign   bool
		data     bool // of FTP: few beside others, with a row and samples of their own
	}
	rows := map[look]*row{}
	var where []uint64
	for _, j := range all {
		where = append(where, uint64(j.Netns))
	}
	d.namespaces.learn(where)
	for _, j := range all {
		benign := benign(j.function, j.reason, j.Class)
		key := look{j.Location, j.Reason, deviceKey{uint64(j.Netns), j.Ifindex}, j.cause, benign, j.Class&dropsDropClassDROP_FTP_DATA != 0}
		r := rows[key]
		if r == nil {
			r = &row{stacks: map[uint32]uint64{}}
			r.drop = snapshot.Drop{
				Location:  d.symbols.place(j.Location),
				Reason:    j.reason,
				Netns:     uint64(j.Netns),
				Interface: d.namespaces.device(uint64(j.Netns), j.Ifindex),
				Cause:     j.cause,
				Benign:    benign,
			}
			r.drop.Namespace, _ = d.namespaces.ref(r.drop.Netns)
			rows[key] = r
		}
		r.drop.Count += j.count
		r.stacks[j.Stack] += j.count
		d.show(&r.drop, j, samples[j.dropsDropKey])
	}
	out := make([]snapshot.Drop, 0, len(rows))
	for key, r := range rows {
		settle(&r.drop)
		if d.stacks {
			r.drop.Stacks = d.topStacks(r.stacks, key.location)
		}
		out = append(out, r.drop)
	}
	slices.SortFunc(out, func(a, b snapshot.Drop) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Location, b.Location),
			cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Netns, b.Netns),
			cmp.Compare(a.Interface, b.Interface), cmp.Compare(a.Cause, b.Cause), slices.Compare(a.Samples, b.Samples))
	})
	return out
}

// topStacks names the most frequent stacks, from the place of the drop outwards:
// what lies inside of it is the tracing itself.
func (d *Drops) topStacks(counts map[uint32]uint64, location uint64) []snapshot.Stack {
	var out []snapshot.Stack
	for id, count := range counts {
		frames := make([]uint64, d.objs.Stacks.ValueSize()/8)
		if id == 0 || d.objs.Stacks.Lookup(id-1, frames) != nil {
			continue // counted, but there was no room for its stack
		}
		if end := slices.Index(frames, 0); end >= 0 {
			frames = frames[:end]
		}
		frames = frames[max(slices.Index(frames, location), 0):]
		stack := snapshot.Stack{Count: count}
		for _, addr := range frames {
			stack.Frames = append(stack.Frames, d.symbols.place(addr))
		}
		out = append(out, stack)
	}
	slices.SortFunc(out, func(a, b snapshot.Stack) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), slices.Compare(a.Frames, b.Frames))
	})
	return out[:min(len(out), maxStacks)]
}
