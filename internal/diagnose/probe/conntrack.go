// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

const errNoConntrack = waived("connection tracking is not loaded in this kernel")

const conntrackSysctls = "proc/sys/net/netfilter/nf_conntrack_"

// conntrackLimits reads how full the table is, how full it may get, and what it
// takes of memory.
func conntrackLimits() source {
	var countStart uint64
	count := func(v *view) (uint64, error) {
		n, err := v.number(conntrackSysctls + "count")
		if _, hidden := os.Stat(filepath.Join(v.root, "proc/sys/net")); errors.Is(err, fs.ErrNotExist) && hidden == nil {
			return 0, errNoConntrack
		}
		return n, err
	}
	return source{
		name:  snapshot.CanConntrack,
		costs: "the connection tracking table is not judged; without it there is no NAT by netfilter either",
		start: func(v *view) (err error) {
			countStart, err = count(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			ct := snapshot.Conntrack{CountStart: countStart}
			var err error
			if ct.Count, err = count(v); err != nil {
				return err
			}
			if ct.Max, err = v.number(conntrackSysctls + "max"); err != nil {
				return err
			}
			if ct.Buckets, err = v.number(conntrackSysctls + "buckets"); err != nil {
				return err
			}
			s.Conntrack = &ct
			return nil
		},
	}
}

// conntrackMemory reads what the table takes: of one entry, of one bucket, and how
// many entries there are in all namespaces, which share the hash.
func conntrackMemory(opts Options) source {
	read := conntrack.ReadMemory
	if opts.shared != nil {
		read = opts.shared.memory
	}
	return source{
		name:  snapshot.CanConntrackMemory,
		costs: "memory use and chain lengths of the table are estimated from this namespace only",
		live:  true,
		end: func(_ *view, s *snapshot.Snapshot) error {
			if s.Conntrack == nil {
				return errNoConntrack
			}
			m, err := read()
			if err != nil {
				return err
			}
			s.Conntrack.ObjectBytes, s.Conntrack.ExtensionBytes, s.Conntrack.BucketBytes = m.ObjectBytes, m.ExtensionBytes, m.BucketBytes
			s.Conntrack.HostObjects = m.HostEntries
			if len(m.Unknown) > 0 {
				return errors.New(strings.Join(m.Unknown, "; "))
			}
			return nil
		},
	}
}

// ConntrackCounters reads the table's counters in a namespace, of all processors and since
// they came up, by the names of conntrack -S. Each processor's wraps at 32 bits.
func ConntrackCounters(ns *netns.Handle) (total map[string]uint64, err error) {
	err = ns.Do(func() error {
		rows, err := conntrack.ReadStats()
		total = rows.Sum()
		return err
	})
	return total, err
}

// conntrackStats reads the table's counters. Beware of them: on today's kernels
// insert does not count new flows, drop alone means a full table, drop together
// with insert_failed means that no place or port was found for a flow.
func conntrackStats() source {
	var before conntrack.Stats
	return source{
		name:  snapshot.CanConntrackStats,
		costs: "flows that the table refused are not counted",
		start: func(v *view) (err error) {
			before, err = readConntrackStats(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readConntrackStats(v)
			if err != nil || s.Conntrack == nil {
				return err
			}
			s.Conntrack.Stats = after.Since(before)
			return nil
		},
	}
}

// readConntrackStats reads the counters of the files' machine or of the calling thread's namespace.
func readConntrackStats(v *view) (conntrack.Stats, error) {
	if v.live {
		rows, err := conntrack.ReadStats()
		if _, errMax := os.Stat(filepath.Join(v.root, conntrackSysctls+"max")); err != nil && errMax != nil {
			return nil, errNoConntrack
		}
		return rows, err
	}
	text, err := v.readNet("stat/nf_conntrack")
	if err != nil {
		return nil, err
	}
	return conntrack.ParseStats(text)
}

// maxDump is how long a dump of the table may take; a million entries take some
// one and a half seconds.
const maxDump = 30 * time.Second

// conntrackTable reads the entries themselves and counts them by state, source,
// destination and use of outside ports.
func conntrackTable(ctx context.Context, opts Options) source {
	return source{
		name:  snapshot.CanConntrackDump,
		costs: "what fills the table, and how many ports source NAT has left, is unknown",
		live:  true,
		start: func(*view) error {
			if !opts.Dump && opts.Table == nil {
				return waived("not requested")
			}
			return nil
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			if s.Conntrack == nil { // asking would load connection tracking
				return errNoConntrack
			}
			if opts.Table != nil {
				s.Conntrack.Table = opts.Table
				return nil
			}
			// The dump belongs to a window that was ended early as well.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxDump)
			defer cancel()
			var err error
			o := conntrack.TableOptions{Recent: recentSeconds(opts.Window), Each: opts.EachFlow}
			if opts.shared != nil && s.Conntrack.Count == 0 {
				// Of many namespaces most have no entry, and each walk is through the hash of all.
				s.Conntrack.Table, _, err = conntrack.TabulateText(ctx, strings.NewReader(""), o, nil)
				return err
			}
			s.Conntrack.Table, err = dumpTable(ctx, v, o)
			return err
		},
	}
}

// refusals counts connections that were refused in the window.
func refusals() source {
	var r *conntrack.Refusals
	stop := func() {
		if r != nil {
			r.Close()
			r = nil
		}
	}
	return source{
		name:  snapshot.CanRefused,
		costs: "published services that refuse connections are not found",
		live:  true,
		start: func(v *view) (err error) {
			if _, err := os.Stat(filepath.Join(v.root, conntrackSysctls+"max")); err != nil {
				return errNoConntrack
			}
			if !v.loaded("nf_conntrack_netlink") {
				return errors.New("nf_conntrack_netlink is not loaded in this kernel")
			}
			r, err = conntrack.OpenRefusals()
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			if s.Conntrack == nil {
				return errNoConntrack
			}
			var err error
			s.Conntrack.Refused, err = r.Read(snapshot.TopN)
			stop() // so that it is not told as one who listens to events
			return err
		},
		stop: stop,
	}
}

// dumpTable asks ctnetlink, or reads the file in /proc when ctnetlink is a module
// that is not loaded: on old kernels, once loaded, it makes every flow larger.
func dumpTable(ctx context.Context, v *view, o conntrack.TableOptions) (*snapshot.Table, error) {
	if !v.loaded("nf_conntrack_netlink") {
		if f, err := os.Open(filepath.Join(v.root, v.net, "nf_conntrack")); err == nil {
			defer f.Close()
			began := time.Now()
			t, _, err := conntrack.TabulateText(ctx, f, o, func(*conntrack.LineError) {})
			if err != nil {
				return nil, err
			}
			t.DumpSeconds = time.Since(began).Seconds()
			return t, nil
		}
	}
	return conntrack.Tabulate(ctx, o)
}

// leastRecent is long enough for a sender to have tried again.
const leastRecent = 3

// recentSeconds is how young a packet is that tells of now: one of the window, and of the
// last seconds of a long one.
func recentSeconds(window time.Duration) uint64 {
	return min(max(uint64(math.Ceil(window.Seconds())), leastRecent), snapshot.RecentSeconds)
}
