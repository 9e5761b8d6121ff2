// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// maxNamespaces is how many namespaces are watched at once: each takes some
// milliseconds to read, and holds its start values during the window.
const maxNamespaces = 500

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
	hooks  *observe.HookLister
	log    logReader
	owners []snapshot.Owner
	known  bool // owners were read
}

// ownersOf reads the owners once.
func (s *sharedSources) ownersOf(read func() []snapshot.Owner) []snapshot.Owner {
	if !s.known {
		s.owners, s.known = read(), true
	}
	return slices.Clone(s.owners)
}

func (s *sharedSources) close() {
	s.drops.close()
	s.hooks.Close()
	s.log.close()
}

// TakeAll is Take for every namespace of the machine that can be found, in one
// window. opts.Netns is not looked at. found, if not nil, is told before the window
// what is watched, the caller's own first; each gets their Snapshots in this order
// after it, one by one, so that no more than one has to be in memory, and ends
// TakeAll by an error. A namespace that is gone at the end of the window is left out.
func TakeAll(ctx context.Context, opts Options, found func([]snapshot.Netns), each func(*snapshot.Snapshot) error) (*All, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("look into all network namespaces: needs root")
	}
	progress := opts.Progress
	if progress == nil {
		progress = func(string, float64) {}
	}
	places, err := netns.All()
	if err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	opts.shared = &sharedSources{drops: traceAll(), hooks: observe.OpenHooks(), log: logReader{kmsg: kmsg{fd: -1}}}
	defer opts.shared.close()
	_ = opts.shared.log.begin() // each namespace's Snapshot says what failed

	out := &All{}
	var readings []*reading
	release := func(r *reading) {
		r.stop()
		r.opts.Netns.Close()
	}
	defer func() {
		for _, r := range readings {
			release(r)
		}
	}()
	var watched []snapshot.Netns
	for i, place := range places {
		if ctx.Err() != nil {
			break
		}
		if len(readings) >= maxNamespaces {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%d more: no more than %d are watched at once, use --netns for one of them", len(places)-i, maxNamespaces))
			break
		}
		progress(fmt.Sprintf("reading start values of %d namespaces", len(places)), 0)
		h, err := openPlace(place)
		if err != nil {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %v", place.Ref, err))
			continue
		}
		if i > 0 && onlyLoopback(h) {
			out.Idle++
			h.Close()
			continue
		}
		o := opts
		o.Netns = h
		r, err := begin(ctx, o)
		if err != nil {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %v", place.Ref, err))
			h.Close()
			continue
		}
		readings = append(readings, r)
		watched = append(watched, netnsOf(r, place))
	}
	if found != nil {
		found(watched)
	}

	// However many there are, the looks at all of them together cost little.
	step := max(seriesStep, opts.Window/seriesMost, seriesStep/4*time.Duration(len(readings)))
	stops := make([]func() *snapshot.Series, len(readings))
	for i, r := range readings {
		stops[i] = watchSeries(r.opts, r.view, step)
	}
	wait(ctx, opts.Window, progress)
	series := make([]*snapshot.Series, len(stops))
	for i, stop := range stops {
		series[i] = stop()
	}
	for i := 0; len(readings) > 0; i++ {
		progress("reading end values", 1)
		r := readings[0]
		readings = readings[1:]
		s, err := r.finish()
		release(r)
		if err != nil {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %v", r.opts.Netns.Name(), err))
			continue
		}
		s.Netns.Container = watched[i].Container
		if s.Drops != nil {
			nameContainers(s.Drops.Elsewhere, watched)
		}
		s.Series = series[i]
		if err := each(s); err != nil {
			return nil, err
		}
	}
	return out, nil
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
		s.Netns.Container = containerOf(r.view, pids)
	}
	snapshot.Clean(&s)
	return s.Netns
}

// openPlace opens a namespace, by another of its processes when the first has
// ended meanwhile. A number that belongs to another namespace by now is an error.
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
