// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// rooms are settings of which more is more room.
var rooms = []string{"net.core.rmem_max", "net.core.netdev_max_backlog", "net.core.netdev_budget", "net.core.netdev_budget_usecs", "net.core.somaxconn",
	"net.ipv4.ipfrag_high_thresh", "net.ipv4.tcp_max_syn_backlog", "net.netfilter.nf_conntrack_expect_max", "vm.min_free_kbytes"}

var sysctlSet = regexp.MustCompile(`sysctl -w '?([a-z0-9_./]+)=(\d+)`)

// What a finding sets is never less room than there is, by its settings and by its commands.
func TestNeverLessRoom(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	met := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		for _, present := range []uint64{90_112, 1 << 24, 2_000_000_000} {
			s := gateway()
			cases[name](s)
			for _, room := range rooms {
				s.Sysctls[room] = strconv.FormatUint(present, 10)
			}
			check := func(code, setting, value string) {
				if n, err := strconv.ParseUint(value, 10, 64); slices.Contains(rooms, setting) && (err != nil || n < present) {
					t.Errorf("%s: %s=%s, and it is %d", code, setting, value, present)
				}
			}
			for _, f := range flat(Judge(s)) {
				met[f.Code] = true
				for _, w := range f.Settings {
					check(f.Code, w.Name, w.Value)
				}
				for _, line := range f.Remedy {
					for _, m := range sysctlSet.FindAllStringSubmatch(line, -1) {
						check(f.Code, m[1], m[2])
					}
				}
			}
		}
	}
	for _, code := range []string{"event-listener-lag", "conntrack-no-memory", "cpu-backlog-full", "napi-budget", "fragments-lost", "listen-overflow"} {
		if !met[code] {
			t.Errorf("%s was not judged", code)
		}
	}
}

// What is reserved or given to waiting fragments leaves a small machine most of its memory, and a hash is not sized
// for memory that is not known.
func TestRoomFitsMemory(t *testing.T) {
	s := gateway()
	examples["conntrack-no-memory"](s)
	s.Host.MemoryBytes, s.Host.AvailableBytes = 128<<20, 1<<20
	checked := 0
	for _, f := range flat(Judge(s)) {
		for _, w := range f.Settings {
			if w.Name == "vm.min_free_kbytes" {
				checked++
				if n, _ := strconv.ParseUint(w.Value, 10, 64); n<<10 > s.Host.MemoryBytes/10 {
					t.Errorf("%s kB of 128 MiB", w.Value)
				}
			}
		}
	}
	if checked == 0 {
		t.Error("no reserve")
	}
	s = gateway()
	examples["conntrack-hash-too-small"](s)
	s.Host.MemoryBytes, s.Conntrack.Max = 0, 1<<30
	for _, f := range flat(Judge(s)) {
		for _, w := range f.Settings {
			if n, _ := strconv.ParseUint(w.Value, 10, 64); w.Name == "net.netfilter.nf_conntrack_buckets" && n > 1<<20 {
				t.Errorf("%s buckets in memory that is not known", w.Value)
			}
		}
	}
}

// Only pfifo_fast gets as long as its interface's txqueuelen; the others were given their length when they were made.
func TestQueueOfItsOwnLength(t *testing.T) {
	for _, kind := range []string{"pfifo", "bfifo"} {
		s := gateway()
		examples["qdisc-drop"](s)
		link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: kind, Packets: 900_000, Dropped: 300_000}
		if got := Judge(s)[0]; !slices.Contains(got.Remedy, "tc qdisc show dev eth0") || strings.Contains(strings.Join(got.Remedy, "\n"), "txqueuelen ") || len(got.Settings) > 0 {
			t.Errorf("%s: %q, settings %v", kind, got.Remedy, got.Settings)
		}
	}
}
