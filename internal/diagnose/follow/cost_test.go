// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/testutil/beside"
)

// BenchmarkNothingMatches is what a trace costs packets that it is not about.
func BenchmarkNothingMatches(b *testing.B) {
	for _, how := range []string{attached, waiting} {
		b.Run(how, func(b *testing.B) { beside.Benchmark(b, how) })
	}
}

// Waiting costs a packet of an established connection that nobody drops nothing: no program sees it.
// Counted, because no clock of a shared machine tells one per cent.
func TestWaitingSeesNothing(t *testing.T) {
	round := beside.Datagrams(t)
	round(1) // the entry of the flow is there
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stats.Close() })
	for _, wait := range []bool{true, false} {
		r, err := Open(Options{Flow: flowOf(t, "tcp 198.18.0.1 -> 198.18.0.2:9"), Rate: 100, Wait: wait})
		if err != nil {
			t.Fatal(err)
		}
		const n = 1000
		before := runs(t)
		round(n)
		after := runs(t)
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		delete(after, "packet_lost") // sees what anybody on the machine drops
		all := uint64(0)
		for name, count := range after {
			all += count - before[name]
		}
		if wait && all >= n { // below it new connections of other namespaces
			t.Errorf("waiting: programs ran %d times for %d datagrams: %v", all, n, after)
		}
		if !wait && all < n {
			t.Errorf("attached: programs ran %d times for %d datagrams: they are not counted", all, n)
		}
	}
}

// runs is how often each program has run that this process has open.
func runs(t *testing.T) map[string]uint64 {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fdinfo")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, entry := range entries {
		data, err := os.ReadFile("/proc/self/fdinfo/" + entry.Name())
		if err != nil {
			continue // of reading the folder
		}
		_, line, found := strings.Cut(string(data), "prog_id:\t")
		id, err := strconv.ParseUint(strings.TrimSpace(strings.SplitN(line, "\n", 2)[0]), 10, 32)
		if !found || err != nil {
			continue
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
		if err != nil {
			t.Fatal(err)
		}
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		s, err := p.Stats()
		if err != nil {
			t.Fatal(err)
		}
		out[info.Name] = s.RunCount
		p.Close()
	}
	return out
}

// besideBenchmark is what runs beside a benchmark: a trace of a flow that never comes.
var besideBenchmark = beside.Programs{
	attached: func(begun func(), done <-chan struct{}) error { return neverComes(false, begun, done) },
	waiting:  func(begun func(), done <-chan struct{}) error { return neverComes(true, begun, done) },
}

const (
	attached = "attached"
	waiting  = "waiting"
)

func neverComes(wait bool, begun func(), done <-chan struct{}) error {
	flow, err := trace.ParseFlow("tcp 198.18.0.1 -> 198.18.0.2:9")
	if err != nil {
		return err
	}
	r, err := Open(Options{Flow: flow, Rate: 100, Wait: wait})
	if err != nil {
		return err
	}
	begun()
	<-done
	return r.Close()
}
