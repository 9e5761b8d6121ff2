// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"natkit/internal/netns"
	"natkit/lab"
)

// flood sends small UDP packets from the node as fast as one thread can, until
// stop is closed.
func flood(t testing.TB, ns *netns.Handle, to *unix.SockaddrInet4, stop <-chan struct{}) {
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for {
			select {
			case <-stop:
				return nil
			default:
			}
			for range 100 {
				_ = unix.Sendto(fd, []byte("flood"), 0, to) // a full queue is no reason to end
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// BenchmarkDrop measures what one drop costs, as the kernel counts the run time
// of the program. The kernel's two clock readings are in that figure: an empty
// program at the same tracepoint, measured in the same windows, tells how much
// they are. Each window is 10 ms; the medians are reported, so that windows in
// which the processor was taken away do not count.
func BenchmarkDrop(b *testing.B) {
	for _, bb := range []struct {
		name, hook string
		o          DropOptions
	}{
		{"no entry", "filter hook prerouting priority -300", DropOptions{}},
		{"with entry", "filter hook forward priority 0", DropOptions{}},
		{"other namespace", "filter hook forward priority 0", DropOptions{Netns: 1}},
		{"with stacks", "filter hook forward priority 0", DropOptions{Stacks: true}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			l := routed(b, lab.RulesNone)
			run(b, l.NATNode(), "nft -f -", "table ip t {\nchain c {\ntype "+bb.hook+";\nudp dport 9 drop\n}\n}\n")
			d, err := OpenDrops(bb.o)
			if err != nil {
				b.Fatal(err)
			}
			defer d.Close()
			empty := emptyTracer(b)
			stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
			if err != nil {
				b.Fatal(err)
			}
			defer stats.Close()
			stop := make(chan struct{})
			defer close(stop)
			go flood(b, l.Node(lab.RoleClient).Handle(), &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 1, 0, 2}}, stop)

			var full, bare []float64
			drops := uint64(0)
			for last := [2]*ebpf.ProgramStats{}; drops < uint64(b.N) || len(full) < 100; time.Sleep(10 * time.Millisecond) {
				var now [2]*ebpf.ProgramStats
				for i, p := range []*ebpf.Program{d.objs.CountDrop, empty} {
					if now[i], err = p.Stats(); err != nil {
						b.Fatal(err)
					}
				}
				if last[0] != nil && now[0].RunCount > last[0].RunCount+100 {
					n := now[0].RunCount - last[0].RunCount
					drops += n
					full = append(full, float64(now[0].Runtime-last[0].Runtime)/float64(n))
					bare = append(bare, float64(now[1].Runtime-last[1].Runtime)/float64(now[1].RunCount-last[1].RunCount))
				}
				last = now
			}
			b.ReportMetric(median(full)-median(bare), "ns/drop")
			b.ReportMetric(median(bare), "clock-ns")
		})
	}
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// emptyTracer attaches a program that does nothing to kfree_skb.
func emptyTracer(t testing.TB) *ebpf.Program {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "kfree_skb", License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	at, err := link.AttachTracing(link.TracingOptions{Program: prog})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		at.Close()
		prog.Close()
	})
	return prog
}
