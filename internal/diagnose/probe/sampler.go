// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// Sampler reads all namespaces of a machine, round after round, for years. Of each it reads in
// every round what is cheap, a sample; of those that its caller asks for it takes all facts in
// the same window. The drop tracer stays attached. It holds no namespace open between two
// rounds, but for those with a packet filter, whose changes it listens to. It is for one
// goroutine.
type Sampler struct {
	opts   Options
	shared *sharedSources
	traced time.Time // when the drop tracer was opened
	places []netns.Place
	most   int // places
	// unwatched is how many more places there are.
	unwatched int
	seen      map[uint64]*sampled
	rounds    int
	walks     walks
	// renewed are numbers that another namespace has got since the last round.
	renewed []uint64
	// sampledAt is when the last samples were taken.
	sampledAt time.Time
}

// RoundOptions is what a Sampler reads in one round.
type RoundOptions struct {
	Window time.Duration
	Looks  []Want // most urgent first
	// Close says of which namespaces the counters of the stack are read in each round, not in
	// one of stackEvery, and whose unconfirmed connections are counted.
	Close func(inode uint64) bool
	// Ask says for the addresses of which namespaces ARP probes are sent; nil: of none.
	Ask func(inode uint64) bool
}

// Want asks for all facts of a namespace.
type Want struct {
	Inode uint64
	Dump  bool            // the entries of its conntrack table, too
	ARP   bool            // ARPReplies of Options
	Table *snapshot.Table // what was read of them not long ago, in place of another reading; nil: nothing
}

// Round is what a Sampler saw in one window.
type Round struct {
	At      time.Time
	Seconds float64
	// Samples are of all namespaces, the caller's own first: Conntrack (the limits and counters),
	// Drops, Counters where they were read, with the EventSockets that lost events, of the Engine what an EngineSampler reads, and of
	// Frames the ARP requests for the namespace's own addresses that somebody repeats, or sends in a VLAN that it does not have,
	// and ARP of other machines with its addresses. What is not there was not read.
	Samples []*snapshot.Snapshot
	// Unconfirmed are the connections that clients do not confirm, by the namespace's number, where they were counted.
	Unconfirmed map[uint64]conntrack.Unconfirmed
	Looks       []*snapshot.Snapshot // those that were asked for and could be read
	// Idle are those asked for that have no interface but loopback.
	Idle []uint64
	// Renewed are numbers that another namespace has now: the one of the last round is gone. The kernel gives the lowest
	// free number, so that a container that is started again mostly has the one from before.
	Renewed []uint64
	Changes []Change
	// Unwatched is how many namespaces there are beyond those that can be watched at once.
	Unwatched int
	// NoDrops is why drops are not traced; nil if they are.
	NoDrops error
}

const (
	// stackEvery is in how many rounds the counters of the stack are read once, of namespaces that
	// nothing is wrong in. The tracer sees what they lose.
	stackEvery = 12

	// engineShare bounds how much of a processor's time reading samples of an engine takes: a large rule file is read with
	// them, and the ports of each of its addresses.
	engineShare = 400

	// socketsEvery is in how many rounds the sockets that get events are read once, of namespaces that nothing is wrong in
	// and that had none: to list those of one the kernel goes through those of all.
	socketsEvery = 3 * stackEvery

	// nameAgain is after how many rounds it is asked again whose a namespace is of which nothing told: it may have been
	// made before the processes of its pod.
	nameAgain = 3

	// retrace is how long a tracer lives. What it remembers of namespaces that are gone goes with it.
	retrace = time.Hour
	// retraceFailed is how long one is out of use that failed.
	retraceFailed = time.Minute
)

// sampled is what is remembered of a namespace from one round to the next.
type sampled struct {
	netns    snapshot.Netns
	ref      string
	cookie   uint64 // tells it from another one with its number; 0 before Linux 5.14
	namedAt  int    // the round in which it was asked last whose it is
	round    int    // in which it was seen last
	at       time.Time
	entries  *openNumber // the table's entries
	count    uint64
	known    bool // count and stats
	max      uint64
	buckets  uint64
	stats    conntrack.Stats
	counters map[string]uint64
	stackAt  time.Time
	lost     map[uint64]uint64 // events, by the socket's inode
	lostAt   int               // the round in which they were read
	changes  *changeListener
	arp      *framesTap // ARP with a tag, or with an own address; nil where changes is
	walked   walked
	engine   bool              // a look has shown that the eBPF engine is up
	packets  map[string]uint64 // of the engine; nil: not read yet
	rested   time.Time         // when they are read again
}

// close ends what is open of the namespace.
func (n *sampled) close() {
	n.entries.close()
	n.changes.close()
	if n.arp != nil {
		n.arp.close()
	}
}

// OpenSampler begins. It needs root.
func OpenSampler(opts Options) (*Sampler, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("watch all network namespaces: needs root")
	}
	if opts.Progress == nil {
		opts.Progress = func(string, float64) {}
	}
	p := &Sampler{opts: opts, shared: openShared(), traced: time.Now(), seen: map[uint64]*sampled{}, most: MaxNamespaces}
	p.opts.shared = p.shared
	p.opts.NoSeries = true
	if err := p.find(); err != nil {
		p.Close()
		return nil, err
	}
	p.samples(func(uint64) bool { return true }, nil) // what the first round's increases begin with
	p.shared.drops.begin()
	return p, nil
}

// Close ends it.
func (p *Sampler) Close() {
	p.shared.close()
	for _, n := range p.seen {
		n.close()
	}
}

// Namespaces are those of the last round, the caller's own first.
func (p *Sampler) Namespaces() (out []snapshot.Netns) {
	for _, place := range p.places {
		if n := p.seen[place.Inode]; n != nil {
			out = append(out, n.netns)
		}
	}
	return out
}

// find looks which namespaces there are, and forgets those that are gone.
func (p *Sampler) find() error {
	places, err := netns.All()
	if err != nil {
		return fmt.Errorf("look for network namespaces: %w", err)
	}
	p.places = places[:min(len(places), p.most)]
	p.unwatched = len(places) - len(p.places)
	p.rounds++
	for _, place := range p.places {
		n := p.seen[place.Inode]
		if n == nil || n.ref != place.Ref && !slices.ContainsFunc(place.Processes, func(pid int) bool { return n.ref == fmt.Sprintf("pid:%d", pid) }) {
			n = p.begin(place)
		}
		n.round = p.rounds
	}
	for inode, n := range p.seen {
		if n.round != p.rounds {
			n.close()
			delete(p.seen, inode)
		}
	}
	return nil
}

// begin forgets what is known of a number, and begins with the namespace that has it now.
func (p *Sampler) begin(place netns.Place) *sampled {
	n := &sampled{ref: place.Ref, round: p.rounds}
	if before := p.seen[place.Inode]; before != nil {
		before.close()
		n.cookie = before.cookie // it may be the same, by another reference: samples tells
	}
	p.seen[place.Inode] = n
	if t := p.shared.drops.tracer; t != nil {
		t.Forget(place.Inode)
	}
	return n
}

// Round lets a window pass and says what was in it.
func (p *Sampler) Round(ctx context.Context, t RoundOptions) (*Round, error) {
	if p.retraceDue() {
		p.retrace()
	}
	if err := p.find(); err != nil {
		return nil, err
	}
	out := &Round{Unwatched: p.unwatched}
	began := time.Now()
	var early snapshot.Drops
	readings := p.beginLooks(ctx, t, out)
	if len(readings) > 0 {
		// The looks' window begins now; what was dropped before is of the samples alone.
		p.shared.drops.end()
		early = p.shared.drops.rows
	}
	opts := p.opts
	if opts.Window = t.Window - time.Since(began) - askBefore; opts.Window > 0 && t.Ask != nil {
		opts.watch(ctx)
	}
	p.askForOwn(t.Ask)
	opts.Window = max(0, t.Window-time.Since(began))
	opts.watch(ctx)
	p.shared.endWindow()
	out.At = time.Now()
	out.Seconds = out.At.Sub(began).Seconds()
	out.Unconfirmed = map[uint64]conntrack.Unconfirmed{}
	out.Samples = p.samples(t.Close, out.Unconfirmed)
	out.Renewed, p.renewed = p.renewed, nil
	p.sortDrops(out, early)
	p.sampleEngines(out.Samples)
	for _, r := range readings {
		if s, err := r.finish(); err == nil { // else it is gone
			if n := p.seen[s.Netns.Inode]; n != nil {
				s.Netns = n.netns
				n.watchChanges(r.opts.Netns, s)
				n.engine = s.Engine != nil && s.Engine.Kind == snapshot.EngineEBPF
			}
			out.Looks = append(out.Looks, s)
		}
		r.release()
	}
	for _, n := range p.seen {
		for _, c := range n.changes.take() {
			c.Netns = n.netns
			out.Changes = append(out.Changes, c)
		}
	}
	slices.SortFunc(out.Changes, func(a, b Change) int { return a.At.Compare(b.At) })
	out.NoDrops = p.shared.drops.err
	return out, nil
}

// beginLooks reads the start values of what is wanted.
func (p *Sampler) beginLooks(ctx context.Context, t RoundOptions, out *Round) (readings []*reading) {
	if len(t.Looks) == 0 {
		return nil
	}
	p.shared.again()
	opts := p.opts
	opts.Window = t.Window
	inOrder(len(t.Looks), func(i int) begun {
		at := slices.IndexFunc(p.places, func(place netns.Place) bool { return place.Inode == t.Looks[i].Inode })
		if at < 0 {
			return begun{err: errors.New("it is gone")}
		}
		o := opts
		o.Dump, o.Table, o.ARPReplies = t.Looks[i].Dump, t.Looks[i].Table, t.Looks[i].ARP
		return beginAt(ctx, o, p.places[at], at > 0)
	}, func(i int, b begun) bool {
		switch {
		case b.reading != nil:
			readings = append(readings, b.reading)
		case b.err == nil:
			out.Idle = append(out.Idle, t.Looks[i].Inode)
		}
		return ctx.Err() == nil
	})
	return readings
}

// samples reads what is cheap, of all namespaces; unconfirmed, if not nil, gets the connections that clients do not confirm.
func (p *Sampler) samples(near func(inode uint64) bool, unconfirmed map[uint64]conntrack.Unconfirmed) (out []*snapshot.Snapshot) {
	v := newView("")
	var walks map[uint64]bool
	if unconfirmed != nil {
		walks = p.walks.choose(p.seen, near, time.Since(p.sampledAt))
	}
	p.sampledAt = time.Now()
	i := 0
	// A thread that can't learn where it is can't go anywhere: then there are no samples.
	_ = netns.Visit(p.places, func(place netns.Place) {
		n := p.there(place)
		if n.at.IsZero() || n.unnamed() && p.rounds-n.namedAt >= nameAgain {
			n.name(v, place)
			n.namedAt = p.rounds
		}
		closely := n.stackAt.IsZero() || near != nil && near(place.Inode)
		stack := closely || (p.rounds+i)%stackEvery == 0
		sockets := stack && (closely || len(n.lost) > 0 || p.rounds-n.lostAt >= socketsEvery)
		if sockets {
			n.lostAt = p.rounds
		}
		s := n.sample(v, stack, sockets)
		out = append(out, s)
		if walks[place.Inode] {
			if found, err := p.walks.walk(n, s); err == nil {
				unconfirmed[place.Inode] = found
			}
		}
		i++
	}, nil)
	return out
}

// there is what is remembered of the namespace that the thread is in, which is at a place.
func (p *Sampler) there(place netns.Place) *sampled {
	n := p.seen[place.Inode]
	cookie, err := netns.Cookie()
	if err != nil {
		return n
	}
	if n.cookie != 0 && n.cookie != cookie {
		p.renewed = append(p.renewed, place.Inode)
		if !n.at.IsZero() {
			n = p.begin(place)
		}
	}
	n.cookie = cookie
	return n
}

// unnamed says whether nothing has told whose the namespace is.
func (n *sampled) unnamed() bool { return !n.netns.Init && n.netns.Container == "" }

// name says whose the namespace is.
func (n *sampled) name(v *view, place netns.Place) {
	if n.namedAt == 0 {
		n.netns.Init = v.initialNetns()
	}
	n.netns = snapshot.Netns{Name: place.Ref, Inode: place.Inode, Init: n.netns.Init}
	if !n.netns.Init {
		owner := OwnerOf(place.Processes)
		n.netns.Container, n.netns.PodUID = owner.Name, owner.PodUID
	}
	s := snapshot.Snapshot{Netns: n.netns}
	snapshot.Clean(&s)
	n.netns = s.Netns
}

// sample reads what is cheap of the namespace that the thread is in.
func (n *sampled) sample(v *view, stack, sockets bool) *snapshot.Snapshot {
	now := time.Now()
	s := &snapshot.Snapshot{TakenAt: now.UTC().Truncate(time.Millisecond), Netns: n.netns}
	if !n.at.IsZero() {
		s.WindowSeconds = now.Sub(n.at).Seconds()
	}
	n.at = now
	if count, err := n.readEntries(v); err == nil {
		n.sampleConntrack(v, s, count, stack)
	} else {
		n.known = false
	}
	if stack {
		n.sampleStack(v, s, now)
	}
	if sockets {
		n.sampleEventSockets(v, s)
	}
	n.sampleARP(s)
	return s
}

// openNumber is a file that holds a number and stays open.
type openNumber struct{ fd int }

func (o *openNumber) close() {
	if o != nil {
		unix.Close(o.fd)
	}
}

// readEntries reads how many entries the table has. The file stays open, which holds nothing of the namespace, for to
// find it takes the kernel longer than the rest of a sample where there are many namespaces. When the namespace or
// the module is gone it can't be read any more.
func (n *sampled) readEntries(v *view) (uint64, error) {
	const path = conntrackSysctls + "count"
	if n.entries != nil {
		if count, err := v.readNumber(n.entries.fd, path); err == nil {
			return count, nil
		}
		n.entries.close()
		n.entries = nil
	}
	fd, err := v.openNumber(path)
	if err != nil {
		return 0, err
	}
	n.entries = &openNumber{fd}
	return v.readNumber(fd, path)
}

// sampleEngines counts what the eBPF engine did with packets, where it is up, and reads how full it is.
func (p *Sampler) sampleEngines(samples []*snapshot.Snapshot) {
	if p.opts.EngineSample == nil {
		return
	}
	for _, s := range samples {
		n := p.seen[s.Netns.Inode]
		at := slices.IndexFunc(p.places, func(place netns.Place) bool { return place.Inode == s.Netns.Inode })
		if n == nil || !n.engine || at < 0 || time.Now().Before(n.rested) {
			continue
		}
		before := n.packets
		n.packets = nil
		h, err := openPlace(p.places[at])
		if err != nil {
			continue
		}
		began := processTime()
		e, err := p.opts.EngineSample(h)
		h.Close()
		n.rested = time.Now().Add(engineShare * (processTime() - began))
		if err != nil || e == nil {
			continue
		}
		n.packets, s.Engine = e.Packets, e
		e.Packets = map[string]uint64{}
		for name, total := range n.packets {
			if more := increase(before[name], total); more > 0 && before != nil {
				e.Packets[name] = more
			}
		}
	}
}

// processTime is the processor time that this process has taken. Reading lasts longer where others have the processors.
func processTime() time.Duration {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func (n *sampled) sampleConntrack(v *view, s *snapshot.Snapshot, count uint64, stack bool) {
	if stack || n.max == 0 {
		n.max, _ = v.number(conntrackSysctls + "max")
		n.buckets, _ = v.number(conntrackSysctls + "buckets")
	}
	s.Conntrack = &snapshot.Conntrack{Count: count, CountStart: count, Max: n.max, Buckets: n.buckets}
	if n.known {
		s.Conntrack.CountStart = n.count
	}
	// Without entries now and before, what the counters show is refusals alone, which are traced.
	if count > 0 || n.count > 0 || stack || !n.known {
		if rows, err := readConntrackStats(v); err == nil {
			if n.known {
				s.Conntrack.Stats = rows.Since(n.stats)
			}
			n.stats = rows
		}
	}
	n.count, n.known = count, true
}

func (n *sampled) sampleStack(v *view, s *snapshot.Snapshot, now time.Time) {
	counters, err := readCounters(v)
	if err != nil {
		return
	}
	if !n.stackAt.IsZero() {
		s.Counters = map[string]uint64{}
		for name, after := range counters {
			if before, ok := n.counters[name]; ok && after != before {
				s.Counters[name] = increase(before, after)
			}
		}
	}
	n.counters, n.stackAt = counters, now
}

// sampleEventSockets counts the events of connection tracking that programs did not get.
func (n *sampled) sampleEventSockets(v *view, s *snapshot.Snapshot) {
	list, err := readEventSockets(v)
	if err != nil {
		return
	}
	lost := map[uint64]uint64{}
	for _, socket := range list {
		lost[socket.Inode] = socket.Drops
		// Of a socket that is new all were lost since.
		if socket.Drops = increase32(n.lost[socket.Inode], socket.Drops); n.lost != nil && socket.Drops > 0 {
			s.EventSockets = append(s.EventSockets, socket)
		}
	}
	n.lost = lost
}

// sortDrops gives each sample its drops: of the window and of the moment before it.
func (p *Sampler) sortDrops(out *Round, early snapshot.Drops) {
	d := p.shared.drops
	if d.err != nil {
		return
	}
	rows := append(slices.Clone(early.Rows), d.rows.Rows...)
	for i, s := range out.Samples {
		s.Drops = &snapshot.Drops{Rows: []snapshot.Drop{}}
		if i == 0 {
			s.Drops.LostEvents = early.LostEvents + d.rows.LostEvents
		}
		for _, row := range rows {
			if row.Netns == s.Netns.Inode || i == 0 && row.Netns == 0 {
				s.Drops.Rows = append(s.Drops.Rows, row)
			}
		}
	}
}

// retraceDue says whether another tracer is wanted.
func (p *Sampler) retraceDue() bool {
	age, err := time.Since(p.traced), p.shared.drops.err
	return age >= retrace || age >= retraceFailed && err != nil && !errors.Is(err, observe.ErrUnavailable)
}

// retrace opens another tracer before it closes the one that there is, which stays if the other
// can't be had: for want of memory or descriptors, say.
func (p *Sampler) retrace() {
	p.traced = time.Now()
	next := traceAll()
	next.begin()
	if next.err != nil && p.shared.drops.err == nil {
		next.close()
		return
	}
	p.shared.drops.close()
	p.shared.drops = next
}

// again makes what is shared ready for another window.
func (s *sharedSources) again() {
	s.memory = sync.OnceValues(conntrack.ReadMemory)
	s.known = false
	s.log.again()
}
