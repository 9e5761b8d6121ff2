// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/ethtool"
	"natkit/internal/snapshot"
)

// maxNICs is how many interfaces are asked for more than what every interface
// has: a host of a thousand containers has few that matter, the busiest.
const maxNICs = 32

// nics reads what the drivers of the busiest interfaces say: receive ring,
// queues, counters of loss; and how received packets are spread over processors.
// It adds to what interfaces read.
func nics(opts Options) source {
	before := map[string]map[string]uint64{}
	return source{
		name:  snapshot.CanNICs,
		costs: "packets lost by network cards, and how their queues are spread, are unknown",
		live:  true,
		start: func(*view) error {
			names, err := os.ReadFile("/proc/thread-self/net/dev")
			if err != nil {
				return err
			}
			return withEthtool(func(c *ethtool.Conn) error {
				for _, name := range parseDevices(string(names)) {
					if len(before) >= maxInterfaces {
						break
					}
					// A driver without counters has none.
					if stats, err := ethtoolStats(c, name); err == nil {
						before[name] = stats
					}
				}
				return nil
			})
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			var busy []*snapshot.Interface
			for i := range s.Interfaces {
				if l := &s.Interfaces[i]; l.Up && l.Name != "lo" {
					busy = append(busy, l)
				}
			}
			slices.SortStableFunc(busy, func(a, b *snapshot.Interface) int {
				return cmp.Or(cmp.Compare(b.RxMissed, a.RxMissed), cmp.Compare(b.RxPackets, a.RxPackets))
			})
			busy = busy[:min(len(busy), maxNICs)]
			err := withEthtool(func(c *ethtool.Conn) error {
				for _, l := range busy {
					nic := askDriver(c, l.Name)
					if now, err := ethtoolStats(c, l.Name); err == nil {
						nic.Lost = lostCounters(before[l.Name], now)
					}
					l.NIC = &nic
				}
				return nil
			})
			if err != nil {
				return err
			}
			// /sys shows the devices of the namespace that it was mounted in.
			return opts.Netns.DoWithSys(func() error {
				for _, l := range busy {
					readQueues("/sys/class/net", l.Name, l.NIC)
				}
				return nil
			})
		},
	}
}

// parseDevices are the names in /proc/net/dev, without loopback.
func parseDevices(text string) (names []string) {
	for line := range strings.Lines(text) {
		name, _, ok := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); ok && name != "lo" {
			names = append(names, name)
		}
	}
	return names
}

// readQueues reads how an interface's receive queues are spread over processors.
// What is not there is not known.
func readQueues(dir, name string, nic *snapshot.NIC) {
	queues, _ := filepath.Glob(filepath.Join(escapeGlob(filepath.Join(dir, name)), "queues", "rx-*"))
	nic.RxQueues, nic.RPSQueues = len(queues), 0
	for _, q := range queues {
		mask, err := os.ReadFile(filepath.Join(q, "rps_cpus"))
		if err == nil && strings.Trim(string(mask), "0,\n") != "" {
			nic.RPSQueues++
		}
	}
	threaded, err := os.ReadFile(filepath.Join(dir, name, "threaded"))
	nic.Threaded = err == nil && strings.TrimSpace(string(threaded)) != "0"
}

// Drivers call what they had no room for by many names. Totals are wanted and
// not each queue's share of them; what an XDP program dropped was meant to be. "pkts rx
// OOB" (out of buffers) is all that VMware's vmxnet3 says: no error of the interface.
var (
	lostCounter  = regexp.MustCompile(`(?i)missed|no_?buf|out_of_buf|no_dma|no_desc|alloc_fail|rx OOB|rx.*(fifo|overrun|discards_phy|steer_missed)|^rx_drop(s|ped)?$|allowance_exceeded`)
	queueCounter = regexp.MustCompile(`(?i)xdp|(rx|tx|queue|ring|q|ch)[_\[]?\d|^tx`)
)

func lostCounters(before, after map[string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for name, n := range after {
		if !lostCounter.MatchString(name) || queueCounter.MatchString(name) {
			continue
		}
		if d := increase(before[name], n); d > 0 {
			out[name] = d
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// withEthtool calls fn with a socket of the thread's namespace, on which drivers
// can be asked.
func withEthtool(fn func(*ethtool.Conn) error) error {
	c, err := ethtool.Open()
	if err != nil {
		return err
	}
	defer c.Close()
	return fn(c)
}

// The kernel's ethtool.h.
const (
	ethtoolNameBytes = 32 // ETH_GSTRING_LEN
	ethtoolStatsSet  = 1  // ETH_SS_STATS
	maxDriverStats   = 16384
)

type ethtoolSets struct {
	cmd, reserved uint32
	mask          uint64
	size          uint32
	_             uint32
}

// askDriver reads what a driver has; what it has not stays zero.
func askDriver(c *ethtool.Conn, name string) (nic snapshot.NIC) {
	nic.Driver, _ = c.Driver(name)
	if length, longest, err := c.RxRing(name); err == nil {
		nic.RxRing, nic.RxRingMax = length, longest
	}
	if ch, err := c.Channels(name); err == nil {
		nic.Channels, nic.ChannelsMax = ch.Rx+ch.Combined, max(ch.RxMax, ch.CombinedMax)
	}
	return nic
}

// ethtoolStats reads a driver's own counters, as ethtool -S shows them.
func ethtoolStats(c *ethtool.Conn, name string) (map[string]uint64, error) {
	sets := ethtoolSets{cmd: unix.ETHTOOL_GSSET_INFO, mask: 1 << ethtoolStatsSet}
	if err := c.Request(name, unsafe.Pointer(&sets)); err != nil {
		return nil, err
	}
	n := sets.size
	if sets.mask == 0 || n == 0 || n > maxDriverStats {
		return nil, errors.New("no counters")
	}
	// A command, a set, a length, then the names; a command, a length, the numbers.
	// In words of 8 bytes, which the numbers must be aligned to. Kernels of 2026 give
	// nothing unless the length is what they have; older ones write as many as they
	// have, whatever it is, so there is room for some that came in that time.
	room := 2*n + 64
	words := make([]uint64, 2+room*ethtoolNameBytes/8)
	head := (*[3]uint32)(unsafe.Pointer(&words[0]))
	head[0], head[1], head[2] = unix.ETHTOOL_GSTRINGS, ethtoolStatsSet, n
	if err := c.Request(name, unsafe.Pointer(&words[0])); err != nil {
		return nil, err
	}
	numbers := make([]uint64, 1+room)
	request := (*[2]uint32)(unsafe.Pointer(&numbers[0]))
	request[0], request[1] = unix.ETHTOOL_GSTATS, n
	if err := c.Request(name, unsafe.Pointer(&numbers[0])); err != nil {
		return nil, err
	}
	if head[2] != n || request[1] != n {
		return nil, errors.New("the driver changed its counters")
	}
	names := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 8*len(words))[12:]
	out := map[string]uint64{}
	for i := range n {
		name := names[i*ethtoolNameBytes : (i+1)*ethtoolNameBytes]
		name, _, _ = bytes.Cut(name, []byte{0})
		// vmxnet3 calls the counters of all its queues the same.
		out[strings.TrimSpace(string(name))] += numbers[1+i]
	}
	return out, nil
}
