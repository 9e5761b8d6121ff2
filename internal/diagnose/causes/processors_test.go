// SPDX-License-Identifier: Apache-2.0

package causes

// Causes before the stack: cards, their processors, and the queues between.

import (
	"math"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["softirq-one-cpu"] = func(s *snapshot.Snapshot) {
		s.CPUs = []snapshot.CPU{
			{Number: 0, Busy: 0.2, Softirq: 0.02, Packets: 9000}, {Number: 1, Busy: 1, Softirq: 0.97, Packets: 1_900_000, Squeezed: 400},
			{Number: 2, Busy: 0.1, Softirq: 0.01, Packets: 3000}, {Number: 3, Busy: 0.3, Softirq: 0.01, Packets: 4000},
		}
		link(s, "eth0").NIC = &snapshot.NIC{Driver: "ixgbe", RxRing: 512, RxRingMax: 4096, Channels: 1, ChannelsMax: 16, RxQueues: 1}
	}
	examples["nic-ring-full"] = func(s *snapshot.Snapshot) {
		link(s, "eth0").RxMissed = 30_000
		link(s, "eth0").NIC = &snapshot.NIC{Driver: "ixgbe", RxRing: 512, RxRingMax: 4096, RxQueues: 4, Lost: map[string]uint64{"rx_missed_errors": 30_000}}
	}
	examples["cpu-backlog-full"] = func(s *snapshot.Snapshot) {
		s.CPUs = []snapshot.CPU{{Number: 0, Busy: 0.5, Softirq: 0.3, Packets: 100_000, BacklogDropped: 9000}, {Number: 1, Busy: 0.4, Softirq: 0.3, Packets: 90_000}}
		s.Sysctls["net.core.netdev_max_backlog"] = "1000"
		s.Drops.Rows = append(s.Drops.Rows, drop(8000, snapshot.CauseBacklog, "eth1", sample("udp 192.168.1.20:4000 -> 203.0.113.80:53")))
	}
	examples["napi-budget"] = func(s *snapshot.Snapshot) {
		s.CPUs = []snapshot.CPU{{Number: 0, Busy: 0.5, Softirq: 0.4, Packets: 900_000, Squeezed: 2500}, {Number: 1, Busy: 0.4, Softirq: 0.3, Packets: 900_000, Squeezed: 3}}
		s.Sysctls["net.core.netdev_budget"], s.Sysctls["net.core.netdev_budget_usecs"] = "300", "2000"
	}
	examples["softirq-delayed"] = func(s *snapshot.Snapshot) {
		s.CPUs = []snapshot.CPU{{Number: 0, Busy: 1, Softirq: 0.2, Packets: 900_000, KsoftirqdRuns: ptr(uint64(700)), KsoftirqdWait: ptr(6.2)},
			{Number: 1, Busy: 0.4, Softirq: 0.2, Packets: 900_000, KsoftirqdRuns: ptr(uint64(90)), KsoftirqdWait: ptr(0.01)}}
		link(s, "eth0").NIC = &snapshot.NIC{Driver: "ixgbe", RxQueues: 4}
	}
}

func ptr[T any](v T) *T { return &v }

func TestOneCPU(t *testing.T) {
	like := func(change func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { examples["softirq-one-cpu"](s); change(s) }
	}
	const full, warn, advice = "critical softirq-one-cpu", "warning softirq-one-cpu", "advice softirq-one-cpu"
	run(t, []row{
		{"saturated", examples["softirq-one-cpu"], warn},
		{"saturated, and the card loses packets", like(func(s *snapshot.Snapshot) { link(s, "eth0").RxMissed = 500 }), full},
		{"saturated, and the backlog overflows", like(func(s *snapshot.Snapshot) { s.CPUs[1].BacklogDropped = 50_000 }), full},
		{"nearly", like(func(s *snapshot.Snapshot) { s.CPUs[1].Busy = 0.85 }), advice},
		{"cards not known", like(func(s *snapshot.Snapshot) { link(s, "eth0").NIC = nil }), warn},
		{"a namespace that most packets are of", like(func(s *snapshot.Snapshot) { s.Netns.Init = false }), warn},

		{"all alike", like(func(s *snapshot.Snapshot) {
			for i := range s.CPUs {
				s.CPUs[i].Busy, s.CPUs[i].Softirq = 1, 0.95
			}
		}), "warning softirq-all-cpus"},
		{"busy with programs", like(func(s *snapshot.Snapshot) { s.CPUs[1].Softirq = 0.3 }), ""},
		{"has time left", like(func(s *snapshot.Snapshot) { s.CPUs[1].Busy = 0.7 }), ""},
		{"few packets", like(func(s *snapshot.Snapshot) { s.CPUs[1].Packets, s.CPUs[1].Squeezed = 500, 0 }), ""},
		{"one processor", like(func(s *snapshot.Snapshot) { s.CPUs = s.CPUs[1:2] }), "warning softirq-all-cpus"},
		{"a gateway between two other namespaces", like(func(s *snapshot.Snapshot) {
			s.Netns.Init = false
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 480_000, 480_000
		}), ""},
		{"a namespace beside others", like(func(s *snapshot.Snapshot) {
			s.Netns.Init = false
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 50_000, 50_000
		}), ""},
		{"not a number", like(func(s *snapshot.Snapshot) { s.CPUs[0].Softirq = math.NaN() }), ""},
		{"absurd", like(func(s *snapshot.Snapshot) { s.CPUs[1].Softirq = 1e300 }), ""},
	})
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"the card has more queues", func(s *snapshot.Snapshot) {}, "ethtool -L eth0 combined 4"},
		{"one queue, no RPS", func(s *snapshot.Snapshot) {}, `sh -c 'for q in /sys/class/net/eth0/queues/rx-*/rps_cpus; do echo d > "$q"; done'`},
		{"several queues", func(s *snapshot.Snapshot) { link(s, "eth0").NIC.RxQueues = 8 }, "grep -E 'CPU|eth0' /proc/interrupts"},
		{"all is done", func(s *snapshot.Snapshot) {
			*link(s, "eth0").NIC = snapshot.NIC{RxQueues: 1, RPSQueues: 1}
		}, "natkit conntrack top"},
	} {
		s := gateway()
		examples["softirq-one-cpu"](s)
		r.change(s)
		if got := Judge(s)[0].Remedy; !slices.Contains(got, r.want) {
			t.Errorf("%s: remedy\n%s\nwant %s", r.name, strings.Join(got, "\n"), r.want)
		}
	}
	var many []snapshot.CPU
	for n := range 40 {
		many = append(many, snapshot.CPU{Number: n})
	}
	if got := cpuMask(many, 33); got != "fd,ffffffff" {
		t.Errorf("mask of 40 processors without 33: %s", got)
	}
	if got := cpuMask([]snapshot.CPU{{Number: 0}, {Number: -7}, {Number: 1 << 30}}, 5); got != "1" {
		t.Errorf("mask of absurd processors: %s", got)
	}
}

func TestRing(t *testing.T) {
	lost := func(n, received uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["nic-ring-full"](s)
			link(s, "eth0").RxMissed, link(s, "eth0").RxPackets = n, received
			link(s, "eth0").NIC.Lost = nil
		}
	}
	const full, warn, advice = "critical nic-ring-full", "warning nic-ring-full", "advice nic-ring-full"
	run(t, []row{
		{"a part of what comes", examples["nic-ring-full"], full},
		{"a small part", lost(300, 1_000_000), warn},
		{"few of many", lost(30, 1_000_000), advice},
		{"only the driver counts it", func(s *snapshot.Snapshot) { examples["nic-ring-full"](s); link(s, "eth0").RxMissed = 0 }, full},
		{"drivers not known", func(s *snapshot.Snapshot) { lost(300, 1_000_000)(s); link(s, "eth0").NIC = nil }, warn},

		{"a handful", lost(9, 1_000_000), ""},
		{"absurd", lost(1<<60, 1_000_000), ""},
	})
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"room for a longer ring", func(s *snapshot.Snapshot) {}, "ethtool -G eth0 rx 4096"},
		{"the longest ring", func(s *snapshot.Snapshot) { link(s, "eth0").NIC.RxRing = 4096 }, "ethtool -c eth0"},
		{"a limit of the cloud", func(s *snapshot.Snapshot) {
			link(s, "eth0").RxMissed, link(s, "eth0").NIC.Lost = 0, map[string]uint64{"conntrack_allowance_exceeded": 800}
		}, "ethtool -S eth0"},
	} {
		s := gateway()
		examples["nic-ring-full"](s)
		r.change(s)
		if got := Judge(s)[0].Remedy; !slices.Contains(got, r.want) {
			t.Errorf("%s: remedy\n%s\nwant %s", r.name, strings.Join(got, "\n"), r.want)
		}
	}
	// A saturated processor explains its card's loss.
	s := gateway()
	examples["softirq-one-cpu"](s)
	link(s, "eth0").RxMissed = 30_000
	if found := Judge(s); len(found) != 1 || found[0].Code != "softirq-one-cpu" || len(found[0].Consequences) != 1 || found[0].Consequences[0].Code != "nic-ring-full" {
		t.Errorf("a saturated processor and a full ring: %+v", found)
	}
}

func TestBacklog(t *testing.T) {
	lost := func(n, taken uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.CPUs = []snapshot.CPU{{Packets: taken, BacklogDropped: n}} }
	}
	const full, warn, advice = "critical cpu-backlog-full", "warning cpu-backlog-full", "advice cpu-backlog-full"
	run(t, []row{
		{"bursts", examples["cpu-backlog-full"], full},
		{"a part", lost(50, 20_000), warn},
		{"few of many", lost(50, 2_000_000), advice},
		{"tracer only", func(s *snapshot.Snapshot) { examples["cpu-backlog-full"](s); s.CPUs = nil }, warn},
		{"another namespace's own packets", func(s *snapshot.Snapshot) { examples["cpu-backlog-full"](s); s.Netns.Init = false }, full},

		{"a handful", lost(4, 5), ""},
		{"another namespace, none of its own packets", func(s *snapshot.Snapshot) { lost(5000, 20_000)(s); s.Netns.Init = false }, ""},
		{"absurd", lost(1<<60, 1), ""},
	})
	s := gateway()
	examples["cpu-backlog-full"](s)
	s.Netns.Name = "blue" // the setting is the host's all the same
	want := []snapshot.Setting{{Name: "net.core.netdev_max_backlog", Value: "16384"}}
	if f := Judge(s)[0]; !slices.Equal(f.Settings, want) || !slices.Contains(f.Remedy, "sysctl -w net.core.netdev_max_backlog=16384") {
		t.Errorf("settings %v, remedy %q", f.Settings, f.Remedy)
	}
}

func TestBudget(t *testing.T) {
	like := func(change func(c *snapshot.CPU)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { examples["napi-budget"](s); change(&s.CPUs[0]) }
	}
	const warn, advice = "warning napi-budget", "advice napi-budget"
	run(t, []row{
		{"most packets", examples["napi-budget"], warn},
		{"some", like(func(c *snapshot.CPU) { c.Squeezed = 900 }), advice},
		{"no time left anyway", like(func(c *snapshot.CPU) { c.Busy = 1 }), advice},
		{"settings not known", func(s *snapshot.Snapshot) { examples["napi-budget"](s); s.Sysctls = nil }, warn},

		{"some rounds", like(func(c *snapshot.CPU) { c.Squeezed = 90 }), ""},
		{"a small part of the packets", like(func(c *snapshot.CPU) { c.Squeezed, c.Packets = 200, 9_000_000 }), ""},
		{"another namespace", func(s *snapshot.Snapshot) {
			examples["napi-budget"](s)
			s.Netns.Init = false
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 50_000, 50_000
		}, ""},
		{"a slow machine whose rounds the time ends", like(func(c *snapshot.CPU) { c.Squeezed, c.Packets = 200, 15_000 }), ""},
		{"window not known", func(s *snapshot.Snapshot) { examples["napi-budget"](s); s.WindowSeconds = 0 }, ""},
		{"absurd", like(func(c *snapshot.CPU) { c.Squeezed = 1 << 60 }), ""},
	})
}

func TestDelayed(t *testing.T) {
	like := func(runs uint64, wait float64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["softirq-delayed"](s)
			s.CPUs[0].KsoftirqdRuns, s.CPUs[0].KsoftirqdWait = &runs, &wait
		}
	}
	const warn, advice = "warning softirq-delayed", "advice softirq-delayed"
	run(t, []row{
		{"most of the time", examples["softirq-delayed"], warn},
		{"a good part", like(600, 3), advice},
		{"most of the time, few packets", func(s *snapshot.Snapshot) { examples["softirq-delayed"](s); s.CPUs[0].Packets = 90 }, advice},

		{"short waits, many", like(9000, 6), ""},
		{"long waits, seldom", like(20, 6), ""},
		{"a small part", like(100, 1), ""},
		{"all packets", func(s *snapshot.Snapshot) {
			examples["softirq-delayed"](s)
			s.CPUs[0].Softirq, s.CPUs[1].Softirq = 0.9, 0.8
		}, ""},
		{"not known", func(s *snapshot.Snapshot) { examples["softirq-delayed"](s); s.CPUs[0].KsoftirqdWait = nil }, ""},
		{"longer than the window", like(900, 1e12), ""},
		{"not a number", like(900, math.NaN()), ""},
	})
}
