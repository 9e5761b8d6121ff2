// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// MaxNamespaces is how many namespaces are watched at once: each takes some
// milliseconds to read, and holds its start values during the window.
const MaxNamespaces = 500

// atOnce is how many namespaces are read at once. Much of the time the kernel waits, until no
// processor looks at a packet socket that is closed; and each that is read holds a Snapshot
// until it is its turn.
const atOnce = 16

// All is what TakeAll left out.
type All struct {
	// Idle have no interface but loopback, so that no packet of others comes there.
	// Skipped could not be entered or were too many, with the reason.
	Idle    int
	Skipped []string
}

// sharedSources are those that the namespaces of one window have in common: what
// would be read, loaded or traced again for each of them, and is the same.
type sharedSources struct {
	drops  *dropTracer
	log    logReader
	memory func() (conntrack.Memory, error)

	mu     sync.Mutex // of what follows
	lister *observe.HookLister
	owners []snapshot.Owner
	known  bool // owners were read
}

// openShared begins to read what is shared. What fails each namespace's Snapshot says.
func openShared() *sharedSources {
	s := &sharedSources{drops: traceAll(), memory: sync.OnceValues(conntrack.ReadMemory), lister: observe.OpenHooks(), log: logReader{kmsg: kmsg{fd: -1}}}
	_ = s.log.begin()
	return s
}

// endWindow reads what belongs to the window of all.
func (s *sharedSources) endWindow() {
	s.drops.end()
	s.log.goOn()
}

// ownersOf reads the owners once.
func (s *sharedSources) ownersOf(read func() []snapshot.Owner) []snapshot.Owner {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.known {
		s.owners, s.known = read(), true
	}
	return slices.Clone(s.owners)
}

// hooks lists a namespace's hooks.
func (s *sharedSources) hooks(ns *netns.Handle) ([]snapshot.Hook, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lister.List(ns)
}

func (s *sharedSources) close() {
	s.drops.close()
	s.lister.Close()
	s.log.close()
}

// TakeAll is Take for every namespace of the machine that can be found, in one
// window: the start values of all are read, then it waits once, then their end values
// are. opts.Netns is not looked at. found, if not nil, gets before the window
// what is watched, the caller's own first, and the networks that are there; each gets their Snapshots in this order
// after it, one by one, so that few have to be in memory, and ends
// TakeAll by an error. A namespace that is gone at the end of the window is left out.
func TakeAll(ctx context.Context, opts Options, found func([]snapshot.Netns, []netip.Prefix), each func(*snapshot.Snapshot) error) (*All, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("examine all network namespaces: needs root")
	}
	if opts.Progress == nil {
		opts.Progress = func(string, float64) {}
	}
	places, err := netns.All()
	if err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	opts.shared = openShared()
	defer opts.shared.close()

	a := &allReadings{opts: opts}
	defer a.release()
	a.begin(ctx, places)
	opts.shared.drops.begin()
	if found != nil {
		found(a.watched, a.networks)
	}
	// However many there are, the looks at all of them together cost little.
	step := max(seriesStep, opts.Window/seriesMost, seriesStep/4*time.Duration(len(a.readings)))
	stopSeries := watchSeries(a.readings, step)
	opts.watch(ctx)
	series := stopSeries()
	opts.shared.endWindow()
	if err := a.finish(series, each); err != nil {
		return nil, err
	}
	return &a.out, nil
}

// allReadings are the namespaces of one window.
type allReadings struct {
	opts     Options
	out      All
	readings []*reading // nil: released
	watched  []snapshot.Netns
	networks []netip.Prefix // of the interfaces of all
}

// begin reads the start values of all.
func (a *allReadings) begin(ctx context.Context, places []netns.Place) {
	inOrder(len(places), func(i int) begun {
		return beginAt(ctx, a.opts, places[i], i > 0)
	}, func(i int, b begun) bool {
		full := len(a.readings) >= MaxNamespaces
		switch {
		case full && b.reading != nil:
			b.reading.release()
		case b.err != nil:
			a.out.Skipped = append(a.out.Skipped, fmt.Sprintf("%s: %v", places[i].Ref, b.err))
		case b.reading == nil:
			a.out.Idle++
		default:
			a.readings, a.watched, a.networks = append(a.readings, b.reading), append(a.watched, b.netns), append(a.networks, b.networks...)
		}
		a.opts.Progress(fmt.Sprintf("reading start values: namespace %d of %d", i+1, len(places)), 0)
		if more := len(places) - i - 1; !full && len(a.readings) == MaxNamespaces && more > 0 {
			a.out.Skipped = append(a.out.Skipped, fmt.Sprintf("%d more: no more than %d are watched at once, use --netns for one of them", more, MaxNamespaces))
		}
		return len(a.readings) < MaxNamespaces && ctx.Err() == nil
	})
}

// finish reads the end values of all, and gives each its Snapshot.
func (a *allReadings) finish(series []*snapshot.Series, each func(*snapshot.Snapshot) error) error {
	type finished struct {
		snapshot *snapshot.Snapshot
		err      error
	}
	var failed error
	inOrder(len(a.readings), func(i int) finished {
		s, err := a.readings[i].finish()
		a.readings[i].release()
		a.readings[i] = nil
		return finished{s, err}
	}, func(i int, f finished) bool {
		a.opts.Progress(fmt.Sprintf("reading end values: namespace %d of %d", i+1, len(a.readings)), 1)
		switch {
		case failed != nil:
		case f.err != nil:
			a.out.Skipped = append(a.out.Skipped, fmt.Sprintf("%s: %v", a.watched[i].Name, f.err))
		default:
			s := f.snapshot
			s.Netns.Container, s.Netns.PodUID, s.Series = a.watched[i].Container, a.watched[i].PodUID, series[i]
			if s.Drops != nil {
				nameContainers(s.Drops.Elsewhere, a.watched)
			}
			failed = each(s)
		}
		return failed == nil
	})
	return failed
}

// release lets go of what was not finished.
func (a *allReadings) release() {
	for _, r := range a.readings {
		if r != nil {
			r.release()
		}
	}
}

// inOrder calls do for each of 0 to n-1, some at once, and gives take what it returned, one by
// one and in order. Once take returns false no more are begun; it still gets those that were.
func inOrder[T any](n int, do func(int) T, take func(int, T) bool) {
	slots := make(chan struct{}, atOnce)
	queue := make(chan chan T, n)
	var enough atomic.Bool
	go func() {
		defer close(queue)
		for i := range n {
			slots <- struct{}{}
			if enough.Load() {
				return
			}
			result := make(chan T, 1)
			queue <- result
			go func() { result <- do(i) }()
		}
	}()
	i := 0
	for result := range queue {
		if !take(i, <-result) {
			enough.Store(true)
		}
		<-slots
		i++
	}
}

// begun is a namespace whose start values are read; one without a reading and an error is idle.
type begun struct {
	reading  *reading
	netns    snapshot.Netns
	networks []netip.Prefix
	err      error
}

// beginAt reads the start values of a namespace.
func beginAt(ctx context.Context, opts Options, place netns.Place, mayBeIdle bool) begun {
	h, err := openPlace(place)
	if err != nil {
		return begun{err: err}
	}
	if mayBeIdle && onlyLoopback(h) {
		h.Close()
		return begun{}
	}
	opts.Netns = h
	r, err := begin(ctx, opts)
	if err != nil {
		h.Close()
		return begun{err: err}
	}
	return begun{reading: r, netns: netnsOf(r, place), networks: networksOf(h)}
}

// networksOf are the networks that a namespace's interfaces are in.
func networksOf(h *netns.Handle) (out []netip.Prefix) {
	_ = h.Do(func() error { // entered a moment ago
		addresses, err := net.InterfaceAddrs()
		for _, a := range addresses {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				out = append(out, p.Masked())
			}
		}
		return err
	})
	return out
}

// nameContainers writes into drops of other namespaces whose they are.
func nameContainers(rows []snapshot.Drop, watched []snapshot.Netns) {
	for i := range rows {
		for _, n := range watched {
			if n.Inode == rows[i].Netns {
				rows[i].Container = n.Container
			}
		}
	}
}

// netnsOf says what a namespace is and what it belongs to, safe to print.
func netnsOf(r *reading, place netns.Place) snapshot.Netns {
	s := snapshot.Snapshot{Netns: snapshot.Netns{Name: r.opts.Netns.Name(), Inode: place.Inode}}
	initial := false
	_ = r.opts.Netns.Do(func() error { // entered a moment ago
		initial = r.view.initialNetns()
		return nil
	})
	if s.Netns.Init = initial; !initial {
		var pids []string
		for _, pid := range place.Processes {
			pids = append(pids, strconv.Itoa(pid))
		}
		owner := ownerOf(r.view, pids)
		s.Netns.Container, s.Netns.PodUID = owner.Name, owner.PodUID
	}
	snapshot.Clean(&s)
	return s.Netns
}

// openPlace opens a namespace, by another of its processes when the first has
// ended in that time. A number that belongs to another namespace by now is an error.
func openPlace(p netns.Place) (*netns.Handle, error) {
	refs := []string{p.Ref}
	for _, pid := range p.Processes {
		refs = append(refs, fmt.Sprintf("pid:%d", pid))
	}
	var last error
	for _, ref := range refs {
		h, err := netns.Open(ref)
		if err != nil {
			last = err
			continue
		}
		if h.Inode() == p.Inode {
			return h, nil
		}
		h.Close()
		last = errors.New("it is another namespace by now")
	}
	return nil, last
}

// onlyLoopback says whether a namespace has no interface besides lo.
func onlyLoopback(h *netns.Handle) bool {
	only := false
	_ = h.Do(func() error {
		list, err := net.Interfaces()
		only = err == nil && len(list) <= 1
		return err
	})
	return only
}
