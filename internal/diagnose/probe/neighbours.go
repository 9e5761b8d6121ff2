// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// neighbourTables are the families' tables: how the kernel calls their
// statistics and their settings.
var neighbourTables = []struct {
	family, stat, sysctl string
	af                   int
}{
	{"ipv4", "arp_cache", "ipv4", netlink.FAMILY_V4},
	{"ipv6", "ndisc_cache", "ipv6", netlink.FAMILY_V6},
}

// neighbours reads how full the neighbour tables are. They, their limits and
// their statistics are the host's, and shown in the initial namespace alone.
func neighbours() source {
	before := map[string]neighbourStats{}
	// Opened by a thread that is not yet in the namespace to be looked at.
	own, err := netns.Open("/proc/thread-self/ns/net")
	if err != nil {
		own = nil
	}
	return source{
		name:  snapshot.CanNeighbours,
		costs: "a neighbour table that is too small for the network is not found",
		start: func(v *view) (err error) {
			before, err = readNeighbours(v, own)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readNeighbours(v, own)
			if err != nil {
				return err
			}
			for _, t := range neighbourTables {
				now, ok := after[t.family]
				if !ok {
					continue
				}
				was := before[t.family]
				n := snapshot.Neighbours{
					Family: t.family, Entries: now.entries, Thresh2: now.thresh2, Thresh3: now.thresh3,
					TableFulls: increase(was.tableFulls, now.tableFulls),
					ForcedRuns: increase(was.forcedRuns, now.forcedRuns),
					Failed:     increase(was.failed, now.failed),
				}
				if v.live {
					if err := countNeighbours(&n, t.af); err != nil {
						return err
					}
				}
				s.Neighbours = append(s.Neighbours, n)
			}
			return nil
		},
		stop: func() {
			if own != nil {
				own.Close()
			}
		},
	}
}

// readNeighbours reads the statistics and limits of the tables by family; own is the namespace of
// natkit itself.
func readNeighbours(v *view, own *netns.Handle) (map[string]neighbourStats, error) {
	out := map[string]neighbourStats{}
	err := inHostNetns(v, own, func() error {
		for _, t := range neighbourTables {
			text, err := v.readNet("stat/" + t.stat)
			if err != nil {
				continue // a kernel without that family
			}
			stats, err := parseNeighbourStats(text)
			if err != nil {
				return fmt.Errorf("read /proc/net/stat/%s: %w", t.stat, err)
			}
			for i, limit := range []*uint64{&stats.thresh2, &stats.thresh3} {
				*limit, _ = v.number(fmt.Sprintf("proc/sys/net/%s/neigh/default/gc_thresh%d", t.sysctl, i+2))
			}
			out[t.family] = stats
		}
		return nil
	})
	if err == nil && len(out) == 0 {
		err = errors.New("no statistics of neighbours in /proc/net/stat")
	}
	return out, err
}

// inHostNetns runs fn in the initial namespace, where natkit itself (own) or
// process 1 is.
func inHostNetns(v *view, own *netns.Handle, fn func() error) error {
	if !v.live || v.initialNetns() {
		return fn()
	}
	first, err := netns.Open("pid:1")
	if err == nil {
		defer first.Close()
	}
	found := false
	for _, h := range []*netns.Handle{own, first} {
		if h == nil || found {
			continue
		}
		err = h.Do(func() error {
			if found = v.initialNetns(); found {
				return fn()
			}
			return errors.New("neither natkit nor process 1 is in the initial network namespace")
		})
	}
	return err
}

// countNeighbours counts the namespace's own.
func countNeighbours(n *snapshot.Neighbours, af int) error {
	list, err := listWhole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, af) })
	if err != nil {
		return fmt.Errorf("list neighbours: %w", err)
	}
	byLink, busiest := map[int]int{}, 0
	for _, neigh := range list {
		if neigh.State&netlink.NUD_NOARP != 0 {
			continue // multicast and loopback
		}
		n.Here++
		byLink[neigh.LinkIndex]++
		if byLink[neigh.LinkIndex] > byLink[busiest] {
			busiest = neigh.LinkIndex
		}
	}
	if link, err := netlink.LinkByIndex(busiest); err == nil && busiest != 0 {
		n.Busiest = link.Attrs().Name
	}
	return nil
}

type neighbourStats struct {
	entries, tableFulls, forcedRuns, failed uint64
	thresh2, thresh3                        uint64
}

// parseNeighbourStats reads /proc/net/stat/arp_cache: a line of names, then a line
// of hexadecimal numbers for each processor, of which entries is the whole
// table's in each. Columns that an old kernel does not have stay zero.
func parseNeighbourStats(text string) (out neighbourStats, err error) {
	head, rows, _ := strings.Cut(text, "\n")
	names := strings.Fields(head)
	if len(names) == 0 || names[0] != "entries" {
		return out, fmt.Errorf("no line of names in %q", short(text))
	}
	for row := range strings.Lines(rows) {
		for i, field := range strings.Fields(row) {
			if i >= len(names) {
				break
			}
			n, err := strconv.ParseUint(field, 16, 64)
			if err != nil {
				return out, fmt.Errorf("%s is %q", names[i], short(field))
			}
			switch names[i] {
			case "entries":
				out.entries = uint64(uint32(n))
			case "table_fulls":
				out.tableFulls += n
			case "forced_gc_runs":
				out.forcedRuns += n
			case "res_failed":
				out.failed += n
			}
		}
	}
	return out, nil
}
