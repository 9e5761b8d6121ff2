// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"natkit/conntrack"
	"natkit/snapshot"
)

const conntrackSysctls = "proc/sys/net/netfilter/nf_conntrack_"

// conntrackLimits reads how full the table is, how full it may get, and what it
// takes of memory.
func conntrackLimits() source {
	var countStart uint64
	count := func(v *view) (uint64, error) {
		n, err := v.number(conntrackSysctls + "count")
		if errors.Is(err, fs.ErrNotExist) {
			return 0, errors.New("connection tracking is not loaded in this kernel")
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

// conntrackStats reads the table's counters. Beware of them: on today's kernels
// insert does not count new flows, drop alone means a full table, drop together
// with insert_failed means that no place or port was found for a flow.
func conntrackStats() source {
	var before []map[string]uint64
	read := func(v *view) ([]map[string]uint64, error) {
		text, err := v.readNet("stat/nf_conntrack")
		if err != nil {
			return nil, err
		}
		rows, err := parseConntrackStats(text)
		if err != nil {
			return nil, fmt.Errorf("read /proc/net/stat/nf_conntrack: %w", err)
		}
		return rows, nil
	}
	return source{
		name:  snapshot.CanConntrackStats,
		costs: "flows that the table refused are not counted",
		start: func(v *view) (err error) {
			before, err = read(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := read(v)
			if err != nil || s.Conntrack == nil {
				return err
			}
			s.Conntrack.Stats = map[string]uint64{}
			for cpu := range min(len(before), len(after)) {
				for name, n := range after[cpu] {
					if b, ok := before[cpu][name]; ok {
						s.Conntrack.Stats[name] += increase32(b, n)
					}
				}
			}
			return nil
		},
	}
}

// parseConntrackStats reads /proc/net/stat/nf_conntrack: a line of names, then a
// line of hexadecimal values a processor. Columns came and went with the years,
// so that only the names count. The column entries is the same on each line, a
// level and not a counter, and is left out.
func parseConntrackStats(text string) ([]map[string]uint64, error) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	names := strings.Fields(lines[0])
	if len(names) == 0 || len(lines) < 2 {
		return nil, errors.New("no line of names and of values")
	}
	var rows []map[string]uint64
	for i, line := range lines[1:] {
		fields := strings.Fields(line)
		if len(fields) != len(names) {
			return nil, fmt.Errorf("line %d has %d values for %d names", i+2, len(fields), len(names))
		}
		row := make(map[string]uint64, len(names))
		for j, name := range names {
			if name == "entries" {
				continue
			}
			n, err := strconv.ParseUint(fields[j], 16, 64)
			if err != nil {
				return nil, fmt.Errorf("line %d: %s is %q", i+2, name, short(fields[j]))
			}
			row[name] = n
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// maxDump is how long a dump of the table may take; a million entries take some
// one and a half seconds.
const maxDump = 30 * time.Second

// conntrackTable reads the entries themselves and counts them by state, source,
// destination and use of outside ports.
func conntrackTable(ctx context.Context, opts Options) source {
	return source{
		name:  snapshot.CanConntrackDump,
		costs: "what fills the table, and how near source translation is to its last port, is not told",
		live:  true,
		start: func(*view) error {
			if !opts.Dump {
				return errors.New("not asked for")
			}
			return nil
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			if s.Conntrack == nil { // asking would load connection tracking
				return errors.New("connection tracking is not loaded in this kernel")
			}
			// The dump belongs to a window that was ended early as well.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxDump)
			defer cancel()
			var err error
			s.Conntrack.Table, err = dumpTable(ctx, v)
			return err
		},
	}
}

// dumpTable asks ctnetlink, or reads the file in /proc when ctnetlink is a module
// that is not loaded: on old kernels, once loaded, it makes every flow larger.
func dumpTable(ctx context.Context, v *view) (*snapshot.Table, error) {
	if !v.loaded("nf_conntrack_netlink") {
		if f, err := os.Open(filepath.Join(v.root, v.net, "nf_conntrack")); err == nil {
			defer f.Close()
			began := time.Now()
			t, _, err := conntrack.TabulateText(ctx, f, conntrack.TableOptions{}, func(*conntrack.LineError) {})
			if err != nil {
				return nil, err
			}
			t.DumpSeconds = time.Since(began).Seconds()
			return t, nil
		}
	}
	return conntrack.Tabulate(ctx, conntrack.TableOptions{})
}
