// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"math/bits"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// blockFile is hosts behind a pool of four addresses.
func blockFile(blocks rulefile.Blocks, addresses int) *rulefile.File {
	f := rulefile.New()
	f.Name = "blocks"
	f.Inside, f.Outside = []string{"in", "in2"}, []string{"out"}
	first := netip.MustParseAddr("203.0.113.16")
	last := first
	for range addresses - 1 {
		last = last.Next()
	}
	f.Pools = []rulefile.Pool{{Name: "cgn", Addresses: []rulefile.AddressRange{{First: first, Last: last}}, Ports: rulefile.PortRange{First: 1024, Last: 65535}, Blocks: blocks}}
	f.Rules = []rulefile.Rule{{Action: rulefile.SNAT{Source: netip.MustParsePrefix("192.168.0.0/16"), Pool: "cgn"}}}
	for i := range f.Defaults.Timeouts {
		f.Defaults.Timeouts[i] = 300 * time.Millisecond
	}
	return f
}

// blocksIn reads the blocks of an address.
func (r *modelRig) blocksIn(t *testing.T, index uint32) *abiNatBlocks {
	t.Helper()
	var id ebpf.MapID
	if err := r.maps["blocks"].Lookup(index, &id); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b := &abiNatBlocks{}
	if err := m.Lookup(uint32(0), b); err != nil {
		t.Fatal(err)
	}
	return b
}

func (r *modelRig) applied(t *testing.T, f *rulefile.File, before []ExternalAddress) []ExternalAddress {
	t.Helper()
	facts := r.facts
	facts.Addresses = before
	tables, err := Compile(f, facts)
	if err != nil {
		t.Fatal(err)
	}
	r.do(t, func() error { return r.engine.Apply(tables) })
	return tables.Addresses
}

// collects runs GC for the time of the test.
func (r *modelRig) collects(t *testing.T) {
	t.Helper()
	coll := r.load(t, loadGc)
	run := func(name string) {
		if code, err := coll.Programs[name].Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil || int32(code) < 0 {
			t.Fatalf("%s: %d, %v", name, int32(code), err)
		}
	}
	run("gc_start")
	t.Cleanup(func() { run("gc_stop") })
}

// udp sends a packet of a host and gives the external endpoint that it left from.
func (r *modelRig) udp(t *testing.T, src netip.AddrPort, dport uint16) modelOutcome {
	t.Helper()
	p := modelPacket{modelKey: modelKey{true, rulefile.UDP, modelEnds{src, netip.AddrPortFrom(world, dport)}}, link: "in", ttl: 64, length: 60}
	saw, err := r.send(t, p)
	if err != nil {
		t.Fatalf("%v: %v", p, err)
	}
	return saw
}

// whole checks that an address has all of its blocks again.
func (r *modelRig) whole(t *testing.T, index uint32) error {
	b := r.blocksIn(t, index)
	granules, ports := 0, [3]int{}
	for _, word := range b.Free {
		granules += bits.OnesCount64(word)
	}
	for class := range b.Ports {
		for g, word := range b.Ports[class].Words {
			if ports[class] += bits.OnesCount64(word); word != b.Given[class][g] {
				return fmt.Errorf("granule %d of class %d has ports %#x of %#x", g, class, word, b.Given[class][g])
			}
		}
		if uint64(ports[class]) != b.Ports[class].Free {
			return fmt.Errorf("class %d: %d ports are free, counted are %d", class, ports[class], b.Ports[class].Free)
		}
	}
	if want := (65536 - 1024) / granulePorts; granules != want || int(b.Count) != want {
		return fmt.Errorf("%d granules are free, %d are counted, of %d", granules, b.Count, want)
	}
	return nil
}

type hadPort struct {
	by netip.AddrPort
	at time.Time
}

// Sessions of many subscribers come and go, with GC beside: no port has two owners, and none is
// in a block of which another has a port. At the end every block is free. NATKIT_SESSIONS is how
// many sessions there are.
func TestPortBlocks(t *testing.T) {
	const rest = 2 * time.Second // a port is held longer than that after a packet
	r := aModelRig(t)
	r.seed(7)
	f := blockFile(rulefile.Blocks{Size: 128, Extra: 64, AtMost: 3}, 4)
	f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Sessions: 2000}}
	r.forget(t, f)
	r.model = newModel(f, r.facts, r.route)
	r.collects(t)
	ports, granules := map[netip.AddrPort]hadPort{}, map[netip.AddrPort]hadPort{}
	counts, sessions := map[abiNatReason]int{}, number(t, "NATKIT_SESSIONS", 20000)
	began := time.Now()
	for n := range sessions {
		host := r.random.IntN(1200)
		if n%3 == 0 {
			host = r.random.IntN(4) // who opens everything
		}
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(2 + host/250), byte(2 + host%250)}), uint16(1+r.random.IntN(65535)))
		saw := r.udp(t, src, uint16(1+r.random.IntN(65535)))
		counts[saw.reason]++
		if !isTranslated(saw) {
			continue
		}
		now, end := time.Now(), saw.ends.src
		granule := netip.AddrPortFrom(end.Addr(), end.Port()&^uint16(granulePorts-1))
		if had := ports[end]; had.by.IsValid() && had.by != src && now.Sub(had.at) < rest {
			t.Fatalf("session %d: %v gets %v, which %v has had %v ago", n, src, end, had.by, now.Sub(had.at))
		}
		if had := granules[granule]; had.by.IsValid() && had.by.Addr() != src.Addr() && now.Sub(had.at) < rest {
			t.Fatalf("session %d: %v gets %v, in a block of which %v has got a port %v ago", n, src, end, had.by, now.Sub(had.at))
		}
		ports[end], granules[granule] = hadPort{src, now}, hadPort{src, now}
	}
	t.Logf("%d sessions in %v: %v", sessions, time.Since(began).Round(time.Millisecond), counts)
	if counts[abiNatReasonNAT_TRANSLATED_OUT] == 0 || counts[abiNatReasonNAT_DROP_PORT_LIMIT] == 0 {
		t.Errorf("ends were %v", counts)
	}
	ktest.Wait(t, time.Minute, "all subscribers to end", func() bool {
		return len(entries[abiNatSourceKey, abiNatSource](t, r.maps["sources"])) == 0
	})
	for index := range uint32(4) {
		if err := r.whole(t, index); err != nil {
			t.Errorf("address %d: %v", index, err)
		}
	}
}

// A pool gets blocks, then others, then more addresses, while sessions are open: every one of them
// keeps its external endpoint, new ones are of blocks in which nobody else has a port, and what is
// not in blocks becomes one when it is free.
func TestBlocksChange(t *testing.T) {
	r := aModelRig(t)
	r.seed(8)
	steps := []*rulefile.File{
		blockFile(rulefile.Blocks{}, 2),
		blockFile(rulefile.Blocks{Size: 512, Extra: 64, AtMost: 2}, 2),
		blockFile(rulefile.Blocks{Size: 64, Extra: 1024, AtMost: 7}, 2),
		blockFile(rulefile.Blocks{Size: 256, Extra: 128, AtMost: 1}, 4),
	}
	for _, f := range steps {
		f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	}
	steps[3].Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Ports: 300}}
	r.forget(t, steps[0])
	r.model = newModel(steps[0], r.facts, r.route)
	addresses := r.applied(t, steps[0], nil)
	kept := map[netip.AddrPort]netip.AddrPort{}
	owners := map[netip.AddrPort]netip.Addr{} // of granules, by what was given in blocks
	for n, f := range steps {
		addresses = r.applied(t, f, addresses)
		for src, end := range kept {
			if saw := r.udp(t, src, 53); saw.ends.src != end {
				t.Fatalf("step %d: %v has had %v: %v", n, src, end, saw)
			}
		}
		for i := range 600 {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, byte(2 + i%60)}), uint16(2000+n*1000+i))
			saw := r.udp(t, src, 53)
			if !isTranslated(saw) {
				t.Fatalf("step %d: %v: %v", n, src, saw)
			}
			granule := netip.AddrPortFrom(saw.ends.src.Addr(), saw.ends.src.Port()&^uint16(granulePorts-1))
			if owner := owners[granule]; owner.IsValid() && owner != src.Addr() {
				t.Fatalf("step %d: %v gets %v of a block of %v", n, src, saw.ends.src, owner)
			}
			if n > 0 {
				owners[granule] = src.Addr()
				for other, end := range kept {
					if end.Addr() == granule.Addr() && end.Port()&^uint16(granulePorts-1) == granule.Port() && other.Addr() != src.Addr() {
						t.Fatalf("step %d: %v gets %v beside %v of %v", n, src, saw.ends.src, end, other)
					}
				}
			}
			kept[src] = saw.ends.src
		}
	}
	free, err := r.engine.FreePorts(addresses[0].Index)
	if most := 65536 - 1024; err != nil || free[rulefile.ClassUDP] <= most/2 || free[rulefile.ClassUDP] >= most || free[rulefile.ClassTCP] != most {
		t.Errorf("free ports are %v (%v)", free, err)
	}
	// All end.
	last := blockFile(steps[3].Pools[0].Blocks, 4)
	r.applied(t, last, addresses)
	changeFlows(t, r.maps, func(_ *abiNatFlowKey, flow *abiNatFlow) { flow.Seen -= Ticks(time.Hour) })
	r.collects(t)
	ktest.Wait(t, time.Minute, "all subscribers to end", func() bool {
		return len(entries[abiNatSourceKey, abiNatSource](t, r.maps["sources"])) == 0
	})
	for _, a := range addresses {
		if a.Leaving {
			continue
		}
		ktest.Wait(t, 20*time.Second, "all ports of "+a.Addr.String()+" to be in blocks", func() bool { return r.whole(t, uint32(a.Index)) == nil })
		if err := r.whole(t, uint32(a.Index)); err != nil {
			t.Error(a.Addr, err)
		}
	}
}
