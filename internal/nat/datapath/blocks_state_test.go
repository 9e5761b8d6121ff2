// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"math/bits"
	"net/netip"
	"strings"
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
	m := r.inner(t, "blocks", index)
	defer m.Close()
	b := &abiNatBlocks{}
	if err := m.Lookup(uint32(0), b); err != nil {
		t.Fatal(err)
	}
	return b
}

func (r *modelRig) applied(t testing.TB, f *rulefile.File, before []ExternalAddress) []ExternalAddress {
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

// Blocks have the sizes of the file, and begin at multiples of them. Their ports come in random order, at first of
// the internal port's parity if that is wanted. Who has used up its blocks gets no more.
func TestBlockSizes(t *testing.T) {
	r := aModelRig(t)
	r.seed(14)
	for size, parity := 64, false; size <= 4096; size, parity = 2*size, !parity {
		blocks := rulefile.Blocks{Size: size, Extra: 64 * 4096 / size, AtMost: 1}
		f := blockFile(blocks, 1)
		f.Pools[0].Ports = rulefile.PortRange{First: 32768, Last: 65535} // none is a host's own port
		f.Defaults.Timeouts, f.Defaults.PortParity = rulefile.DefaultTimeouts(), parity
		r.forget(t, f)
		r.model = newModel(f, r.facts, r.route)
		r.applied(t, f, nil)
		given := map[uint16]bool{}
		sequel, last := 0, uint16(0)
		open := func(from, count int) {
			t.Helper()
			first := uint16(0)
			for i := range count {
				src := uint16(2000 + 2*(from+i))
				saw := r.udp(t, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, 2}), src), 53)
				port := saw.ends.src.Port()
				if i == 0 {
					first = port / uint16(count) * uint16(count)
				}
				if !isTranslated(saw) || given[port] || port < first || int(port) >= int(first)+count {
					t.Fatalf("%+v: endpoint %d, in a block from %d on: %v", blocks, i, first, saw)
				}
				if parity && i < count/4 && port%2 == 1 { // near the end, eight words are looked at and may have none
					t.Fatalf("%+v: endpoint %d, internal port %d, has port %d", blocks, i, src, port)
				}
				if port == last+1 || parity && port == last+2 {
					sequel++
				}
				given[port], last = true, port
			}
		}
		open(0, blocks.Size)
		open(blocks.Size, blocks.Extra)
		if sequel > len(given)/8 {
			t.Errorf("%+v: %d of %d ports follow the one before", blocks, sequel, len(given))
		}
		if saw := r.udp(t, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, 2}), 1999), 53); saw.reason != abiNatReasonNAT_DROP_PORT_LIMIT {
			t.Errorf("%+v: with all ports in use: %v", blocks, saw)
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
		blockFile(rulefile.Blocks{Size: 512, Extra: 64, AtMost: 2}, 3), // a pool that grows at once
		blockFile(rulefile.Blocks{Size: 64, Extra: 1024, AtMost: 7}, 3),
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
	changeFlows(t, r.maps, func(flow *abiNatFlow) { flow.Seen -= Ticks(time.Hour) })
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

// An address that is drained gives nothing new, by one port or by blocks: sessions that it has go on
// from it, and mappings that it has serve further sessions of their internal endpoint. When it is
// not drained any more it gives ports again.
func TestDrain(t *testing.T) {
	for _, blocks := range []rulefile.Blocks{{}, {Size: 64, Extra: 64, AtMost: 7}} {
		r := aModelRig(t)
		r.seed(9)
		f := blockFile(blocks, 3)
		f.Defaults.Timeouts = rulefile.DefaultTimeouts()
		r.forget(t, f)
		r.model = newModel(f, r.facts, r.route)
		addresses := r.applied(t, f, nil)
		host := func(i int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, byte(2 + i%60)}), uint16(2000+i))
		}
		kept := map[netip.AddrPort]netip.AddrPort{}
		open := func(from, to int) map[netip.Addr]int {
			t.Helper()
			at := map[netip.Addr]int{}
			for i := from; i < to; i++ {
				saw := r.udp(t, host(i), 53)
				if !isTranslated(saw) {
					t.Fatalf("%v: %v", host(i), saw)
				}
				kept[host(i)] = saw.ends.src
				at[saw.ends.src.Addr()]++
			}
			return at
		}
		drained := f.Pools[0].At(0)
		if at := open(0, 300); at[drained] == 0 {
			t.Fatalf("sessions are at %v", at)
		}
		f.Pools[0].Drain = []rulefile.AddressRange{{First: drained, Last: drained}}
		addresses = r.applied(t, f, addresses)
		if at := open(300, 900); at[drained] != 0 {
			t.Errorf("%v: the drained address gave ports: %v", blocks, at)
		}
		for src, end := range kept {
			for _, dport := range []uint16{53, 54} {
				if saw := r.udp(t, src, dport); saw.ends.src != end {
					t.Fatalf("%v to port %d has had %v: %v", src, dport, end, saw)
				}
			}
		}
		f.Pools[0].Drain = []rulefile.AddressRange{f.Pools[0].Addresses[0]}
		addresses = r.applied(t, f, addresses)
		if saw := r.udp(t, host(5000), 53); saw.reason != abiNatReasonNAT_DROP_NO_ADDRESS {
			t.Errorf("with all addresses drained: %v", saw)
		}
		f.Pools[0].Drain = nil
		r.applied(t, f, addresses)
		fresh := map[netip.Addr]int{}
		for i := range 60 {
			saw := r.udp(t, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 3, byte(2 + i)}), 4000), 53)
			fresh[saw.ends.src.Addr()]++
		}
		if fresh[drained] == 0 {
			t.Errorf("%v: the address gives no ports after it was drained: %v", blocks, fresh)
		}
	}
}

// Blocks that follow from the file are those that its reader computes; what comes beside them is in
// none of anybody's. A change of the layout moves no session.
func TestComputedBlocks(t *testing.T) {
	r := aModelRig(t)
	r.seed(10)
	network := netip.MustParsePrefix("192.168.2.0/24")
	file := func(blocks rulefile.Blocks, addresses int) *rulefile.File {
		f := blockFile(blocks, addresses)
		f.Defaults.Timeouts = rulefile.DefaultTimeouts()
		f.Rules = []rulefile.Rule{{Action: rulefile.SNAT{Source: network, Pool: "cgn"}}}
		if err := f.Validate(); err != nil {
			t.Fatal(err)
		}
		return f
	}
	steps := []struct {
		file     *rulefile.File
		computed int // blocks of a host
	}{
		{file(rulefile.Blocks{Size: 64, Extra: 128, AtMost: 2, Deterministic: rulefile.DeterministicFirst}, 3), 1},
		{file(rulefile.Blocks{Size: 64, Extra: 64, AtMost: 1, Deterministic: rulefile.DeterministicAll}, 3), 2},
	}
	for n, step := range steps {
		r.forget(t, step.file)
		r.model = newModel(step.file, r.facts, r.route)
		addresses := r.applied(t, step.file, nil)
		kept := map[netip.AddrPort]netip.AddrPort{}
		for i := range 40 * 100 {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, byte(2 + i/100*6)}), uint16(3000+i%100))
			saw := r.udp(t, src, 53)
			if !isTranslated(saw) {
				t.Fatalf("step %d: %v: %v", n, src, saw)
			}
			kept[src] = saw.ends.src
			owner, computed := step.file.ComputedOwner(saw.ends.src)
			if computed && !owner.Subscriber.Contains(src.Addr()) {
				t.Fatalf("step %d: %v is at %v, which is of %v", n, src, saw.ends.src, owner)
			}
			if want := i%100 < 64*step.computed; computed != want {
				t.Fatalf("step %d: %v, endpoint %d of its host, is at %v: in a computed block %t, want %t", n, src, i%100, saw.ends.src, computed, want)
			}
			if home := step.file.ComputedBlocks(src.Addr())[0].Address; home != saw.ends.src.Addr() {
				t.Fatalf("step %d: %v is at %v, want address %v", n, src, saw.ends.src, home)
			}
		}
		// What is kept for computed blocks is neither free nor in use: BlockUse is about the rest.
		layout := step.file.Layout(&step.file.Pools[0])
		var use BlockUse
		for i := range addresses {
			one, err := r.engine.BlockUse(&addresses[i])
			if err != nil {
				t.Fatal(err)
			}
			use.Used, use.Free = use.Used+one.Used, use.Free+one.Free
		}
		extra := []int{40, 0}[n] * step.file.Pools[0].Blocks.Extra / granulePorts
		if want := 3*(1008-layout.Rows*layout.Each) - extra; use.Free != want || use.Used != []int{40, 0}[n] {
			t.Errorf("step %d: %+v, want %d free", n, use, want)
		}
		for _, next := range []*rulefile.File{file(rulefile.Blocks{Size: 128, Extra: 64, AtMost: 3, Deterministic: rulefile.DeterministicFirst}, 4), file(rulefile.Blocks{Size: 64, Extra: 64}, 4)} {
			addresses = r.applied(t, next, addresses)
			for src, end := range kept {
				if saw := r.udp(t, src, 53); saw.ends.src != end {
					t.Fatalf("step %d: %v has had %v: %v", n, src, end, saw)
				}
			}
		}
	}
}

// A subscriber has eight blocks at most, wherever they are: with all of them on a drained address it
// gets no port elsewhere. Others do.
func TestDrainOfAllBlocks(t *testing.T) {
	r := aModelRig(t)
	r.seed(12)
	f := blockFile(rulefile.Blocks{Size: 64, Extra: 64, AtMost: rulefile.MaxExtraBlocks}, 2)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	r.forget(t, f)
	r.model = newModel(f, r.facts, r.route)
	addresses := r.applied(t, f, nil)
	busy, fresh := netip.MustParseAddr("192.168.2.2"), netip.MustParseAddr("192.168.2.3")
	var at netip.Addr
	for i := range 8 * 64 {
		saw := r.udp(t, netip.AddrPortFrom(busy, uint16(2000+i)), 53)
		if !isTranslated(saw) {
			t.Fatalf("session %d: %v", i, saw)
		}
		at = saw.ends.src.Addr()
	}
	f.Pools[0].Drain = []rulefile.AddressRange{{First: at, Last: at}}
	r.applied(t, f, addresses)
	if saw := r.udp(t, netip.AddrPortFrom(busy, 1999), 53); saw.reason != abiNatReasonNAT_DROP_PORT_LIMIT {
		t.Errorf("with eight blocks on a drained address: %v", saw)
	}
	if saw := r.udp(t, netip.AddrPortFrom(fresh, 1999), 53); !isTranslated(saw) || saw.ends.src.Addr() == at {
		t.Errorf("a new subscriber: %v", saw)
	}
}

// An address does not go back from blocks to single ports while it has sessions. Other addresses take over, on
// which ports are given one by one: 10 000 sessions go on by the ports that they have, and when they have ended
// the first addresses give all of their ports one by one.
func TestFromBlocksByOtherAddresses(t *testing.T) {
	const hosts, each = 50, 200
	r := aModelRig(t)
	r.seed(14)
	f := blockFile(rulefile.Blocks{Size: 512, Extra: 512, AtMost: 1}, 4)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	r.forget(t, f)
	before := r.applied(t, f, nil)
	kept, owner := map[netip.AddrPort]netip.AddrPort{}, map[netip.AddrPort]netip.AddrPort{}
	open := func(port uint16) {
		t.Helper()
		for n := range hosts {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 3, byte(2 + n)}), port)
			saw := r.udp(t, src, 53)
			if by, had := owner[saw.ends.src]; !isTranslated(saw) || had && by != src {
				t.Fatalf("%v: %v, which %v has", src, saw, by)
			}
			kept[src], owner[saw.ends.src] = saw.ends.src, src
		}
	}
	for port := range uint16(each) {
		open(3000 + port)
	}

	single := blockFile(rulefile.Blocks{}, 4)
	single.Defaults.Timeouts = f.Defaults.Timeouts
	facts := r.facts
	facts.Addresses = before
	if _, err := Compile(single, facts); err == nil || !strings.Contains(err.Error(), "give the rule other addresses") {
		t.Fatalf("blocks to single ports: %v", err)
	}
	other := blockFile(rulefile.Blocks{}, 4)
	other.Defaults.Timeouts = f.Defaults.Timeouts
	other.Pools[0].Addresses = []rulefile.AddressRange{{First: netip.MustParseAddr("203.0.113.32"), Last: netip.MustParseAddr("203.0.113.35")}}
	after := r.applied(t, other, before)
	for src, end := range kept {
		if saw := r.udp(t, src, 53); saw.ends.src != end {
			t.Fatalf("%v has had %v: %v", src, end, saw)
		}
	}
	open(4000)
	for _, a := range after {
		if a.Leaving == other.Pools[0].Addresses[0].Contains(a.Addr) {
			t.Errorf("%s: leaving is %t", a.Addr, a.Leaving)
		}
	}

	for i := range other.Defaults.Timeouts {
		other.Defaults.Timeouts[i] = 100 * time.Millisecond
	}
	after = r.applied(t, other, after)
	r.collects(t)
	var gone, stay []ExternalAddress
	ktest.Wait(t, 60*time.Second, "the sessions to end", func() bool {
		gone, stay = nil, nil
		for _, a := range after {
			idle, err := r.engine.Idle(a)
			if err != nil {
				t.Fatal(err)
			}
			if a.Leaving && idle {
				gone = append(gone, a)
			} else {
				stay = append(stay, a)
			}
		}
		return len(gone) == len(before)
	})
	if err := r.engine.Forget(gone); err != nil {
		t.Fatal(err)
	}
	for _, a := range r.applied(t, single, stay) {
		if a.Leaving {
			continue
		}
		for class := range rulefile.Class(rulefile.PortClasses) {
			if n := r.freePorts(t, uint32(a.Index), abiNatClass(class)); n != 65536-1024 {
				t.Errorf("%s has %d ports of class %d", a.Addr, n, class)
			}
		}
	}
}
