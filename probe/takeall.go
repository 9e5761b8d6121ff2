// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"natkit/internal/netns"
	"natkit/snapshot"
)

// maxNamespaces is how many namespaces are watched at once: each takes some
// milliseconds to read, and holds its start values during the window.
const maxNamespaces = 500

// All is what TakeAll found: a Snapshot of each namespace that was watched, the
// caller's own first.
type All struct {
	Snapshots []*snapshot.Snapshot
	// Idle have no interface but loopback, so that no packet of others comes there.
	// Skipped could not be entered or were too many, with the reason.
	Idle    int
	Skipped []string
}

// TakeAll is Take for every namespace of the machine that can be found, in one
// window. opts.Netns is not looked at. A namespace that is gone at the end of the
// window is left out.
func TakeAll(ctx context.Context, opts Options) (*All, error) {
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
	tracer := traceAll()
	defer tracer.close()

	out := &All{}
	var readings []*reading
	processes := map[uint64][]int{}
	defer func() {
		for _, r := range readings {
			r.stop()
			r.opts.Netns.Close()
		}
	}()
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
		o.Netns, o.sharedDrops = h, func() (*snapshot.Drops, error) { return tracer.of(place.Inode, i == 0) }
		r, err := begin(ctx, o)
		if err != nil {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %v", place.Ref, err))
			h.Close()
			continue
		}
		readings = append(readings, r)
		processes[place.Inode] = place.Processes
	}

	wait(ctx, opts.Window, progress)
	progress("reading end values", 1)
	for _, r := range readings {
		s, err := r.finish()
		if err != nil {
			out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %v", r.opts.Netns.Name(), err))
			continue
		}
		if !s.Netns.Init {
			var pids []string
			for _, pid := range processes[s.Netns.Inode] {
				pids = append(pids, strconv.Itoa(pid))
			}
			s.Netns.Container = containerOf(r.view, pids)
			snapshot.Clean(s)
		}
		out.Snapshots = append(out.Snapshots, s)
	}
	return out, nil
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
