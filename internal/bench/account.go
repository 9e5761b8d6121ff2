// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/conntrack"
)

// The places where a testbed's frames can be lost.
const (
	LostBeforeRouter = "ring to the router full"
	LostOnRouter     = "the router's devices, on receipt"
	LostInStack      = "the router's IP stack"
	LostInTable      = "connection tracking table"
	LostBacklog      = "CPU backlog (whole machine)"
	LostAfterRouter  = "ring from the router full"
	LostBeforeSink   = "the sinks' devices, on receipt"
	LostAstray       = "translated to no connection"
	LostElsewhere    = "between the two interfaces"
	Unexplained      = "unexplained"
)

// lossPlaces reads the kernel's counters of lost frames, by place.
func (s *tester) lossPlaces() (map[string]int64, error) {
	if s.testbed.elsewhere() {
		return s.wirePlaces()
	}
	places := map[string]int64{}
	b := s.testbed
	for _, d := range s.devices() {
		if err := d.ns.Do(func() error {
			l, err := netlink.LinkByName(d.name)
			if err != nil {
				return err
			}
			return withEthtool(func(e *ethtool.Ethtool) error {
				stats, err := e.Stats(d.name)
				if err != nil {
					return fmt.Errorf("read statistics of %s: %w", d.name, err)
				}
				received := int64(sumQueues(stats, "rx_queue_", "_drops"))
				if d.ns == b.Router {
					places[LostAfterRouter] += int64(l.Attrs().Statistics.TxDropped)
					places[LostOnRouter] += received + int64(sumQueues(stats, "rx_queue_", "_xdp_drops"))
				} else {
					places[LostBeforeRouter] += int64(sumQueues(stats, "tx_queue_", "_xdp_xmit_errors"))
					places[LostBeforeSink] += received // an XDP drop is the sink's way of taking a frame
				}
				return nil
			})
		}); err != nil {
			return nil, fmt.Errorf("account for lost frames: %w", err)
		}
	}
	err := b.Router.Do(func() error {
		snmp, err1 := os.ReadFile("/proc/thread-self/net/snmp")
		softnet, err2 := os.ReadFile("/proc/thread-self/net/softnet_stat")
		places[LostInStack] = ipDrops(string(snmp))
		for line := range strings.Lines(string(softnet)) {
			if f := strings.Fields(line); len(f) > 1 {
				places[LostBacklog] += hexadecimal(f[1])
			}
		}
		tracked, _ := conntrack.ReadStats() // without them, or connection tracking, they are not explained
		places[LostInTable] = int64(tracked.Sum()["drop"])
		return errors.Join(err1, err2)
	})
	if err != nil {
		return nil, fmt.Errorf("account for lost frames: %w", err)
	}
	return places, nil
}

// sumQueues adds up a statistic of a veth device over its queues: "rx_queue_0_drops"
// has the prefix "rx_queue_" and the suffix "_drops".
func sumQueues(stats map[string]uint64, prefix, suffix string) (sum uint64) {
	for name, n := range stats {
		if number, ok := strings.CutPrefix(name, prefix); ok {
			if number, ok = strings.CutSuffix(number, suffix); ok {
				if _, err := strconv.Atoi(number); err == nil {
					sum += n
				}
			}
		}
	}
	return sum
}

// ipDrops adds up what /proc/net/snmp says of packets that IP did not forward.
func ipDrops(snmp string) (sum int64) {
	var names []string
	for line := range strings.Lines(snmp) {
		fields, ok := strings.CutPrefix(line, "Ip: ")
		if !ok {
			continue
		}
		if names == nil {
			names = strings.Fields(fields)
			continue
		}
		for i, f := range strings.Fields(fields) {
			if i < len(names) && slices.Contains([]string{
				"InHdrErrors", "InAddrErrors", "InDiscards", "OutDiscards", "OutNoRoutes", "FragFails"}, names[i]) {
				n, _ := strconv.ParseInt(f, 10, 64)
				sum += n
			}
		}
	}
	return sum
}

func hexadecimal(text string) int64 {
	n, _ := strconv.ParseInt(text, 16, 64)
	return n
}

// activity is what the CPUs and threads of a tester have done so far.
type activity struct {
	total, stolen int64         // ticks, of all CPUs in use
	router        schedstat     // of its threads
	softirq       time.Duration // ran: ksoftirqd on the generator's CPUs
}

// activityShares is what they did between two readings.
type activityShares struct {
	steal   float64 // of the ticks
	router  schedstat
	softirq time.Duration
}

func (a activity) minus(b activity) activityShares {
	return activityShares{
		steal:   ratio(float64(a.stolen-b.stolen), float64(a.total-b.total)),
		router:  schedstat{ran: a.router.ran - b.router.ran, waited: a.router.waited - b.router.waited},
		softirq: a.softirq - b.softirq,
	}
}

func (s *tester) readActivity(cpus []int) (a activity, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return a, fmt.Errorf("read CPU times: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 9 || !strings.HasPrefix(f[0], "cpu") || f[0] == "cpu" {
			continue
		}
		cpu, err := strconv.Atoi(f[0][len("cpu"):])
		if err != nil || !slices.Contains(cpus, cpu) {
			continue
		}
		// user nice system idle iowait irq softirq steal
		for i, ticks := range f[1:9] {
			n, _ := strconv.ParseInt(ticks, 10, 64)
			a.total += n
			if i == 7 {
				a.stolen += n
			}
		}
	}
	for _, pid := range s.threads {
		t := readSchedstat(pid)
		a.router.ran += t.ran
		a.router.waited += t.waited
	}
	for _, cpu := range cpus {
		if pid := s.softirq[cpu]; pid != "" && (s.threads == nil || cpu != s.routerCPU) {
			a.softirq += readSchedstat(pid).ran
		}
	}
	return a, nil
}
