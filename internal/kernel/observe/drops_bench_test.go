// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
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

// median sorts v.
func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// BenchmarkForwardingBesideDrops measures what counting drops takes from packets
// that are forwarded on the same core: one thread sends nine packets that the
// gateway drops and one that it forwards, over and over, and all of their way up
// to the server is walked on its core. Windows of 0.2 s with and without the
// tracer take turns; each pair gives one loss. Reported are the quartiles of the
// losses, in percent, and the median rate of forwarded packets without tracer.
func BenchmarkForwardingBesideDrops(b *testing.B) {
	const window, pairs = 200 * time.Millisecond, 50
	l := routed(b, lab.RulesNone)
	gateway, server := l.NATNode(), l.ServerNode()
	run(b, gateway, "nft -f -", "table ip t {\nchain c {\ntype filter hook forward priority 0;\nct state new udp dport 9 drop\n}\n}\n")
	out, in := device(b, gateway, "10.1.0.1"), device(b, server, "10.1.0.2")
	if err := gateway.Do(func() error { // the sink answers no question for its address
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: out.Index, IP: net.IPv4(10, 1, 0, 2), HardwareAddr: in.HardwareAddr, State: netlink.NUD_PERMANENT,
		})
	}); err != nil {
		b.Fatal(err)
	}
	sinkAll(b, server, in)

	stop := make(chan struct{})
	defer close(stop)
	go sendMix(b, l.Node(lab.RoleClient).Handle(), stop)

	d, err := OpenDrops(DropOptions{Netns: gateway.Handle().Inode()})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	rate := func() float64 {
		start, before := time.Now(), sent(b, gateway, out)
		time.Sleep(window)
		return float64(sent(b, gateway, out)-before) / time.Since(start).Seconds()
	}
	b.ResetTimer()
	var losses, rates []float64
	for i := range pairs {
		var with, without float64
		for turn := range 2 {
			if (i+turn)%2 == 0 { // each goes first in every other pair
				with = rate()
				continue
			}
			if err := d.link.Close(); err != nil {
				b.Fatal(err)
			}
			without = rate()
			if d.link, err = link.AttachTracing(link.TracingOptions{Program: d.objs.CountDrop}); err != nil {
				b.Fatal(err)
			}
		}
		losses = append(losses, 100*(1-with/without))
		rates = append(rates, without)
	}
	b.ReportMetric(0, "ns/op") // the number of operations means nothing here
	b.ReportMetric(median(losses), "%lost")
	b.ReportMetric(losses[len(losses)/4], "%lost-q1")
	b.ReportMetric(losses[3*len(losses)/4], "%lost-q3")
	b.ReportMetric(median(rates), "forwarded/s")
}

// sendMix sends nine packets to port 9 and one to port 10 of the server, from one
// core, until stop is closed.
func sendMix(t testing.TB, ns *netns.Handle, stop <-chan struct{}) {
	err := ns.Do(func() error {
		var cpus unix.CPUSet
		cpus.Set(0)
		var before unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return err
		}
		if err := unix.SchedSetaffinity(0, &cpus); err != nil {
			return err
		}
		defer unix.SchedSetaffinity(0, &before)
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		dropped := &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 1, 0, 2}}
		forwarded := &unix.SockaddrInet4{Port: 10, Addr: [4]byte{10, 1, 0, 2}}
		for {
			select {
			case <-stop:
				return nil
			default:
			}
			for range 20 {
				for range 9 {
					_ = unix.Sendto(fd, []byte("dropped"), 0, dropped)
				}
				_ = unix.Sendto(fd, []byte("forwarded"), 0, forwarded)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// sinkAll ends all packets that arrive at a device by XDP, which is no drop of
// the stack's.
func sinkAll(t testing.TB, node *lab.Node, dev *net.Interface) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, // XDP_DROP
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	if err := node.Do(func() error {
		at, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: dev.Index})
		if err == nil {
			t.Cleanup(func() { at.Close() })
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// sent is how many packets left by the device.
func sent(t testing.TB, node *lab.Node, dev *net.Interface) (packets uint64) {
	t.Helper()
	if err := node.Do(func() error {
		l, err := netlink.LinkByIndex(dev.Index)
		if err == nil {
			packets = l.Attrs().Statistics.TxPackets
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return packets
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
