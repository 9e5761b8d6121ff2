// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// mappingsOf reads all mappings: the slot of each, by its internal endpoint.
func mappingsOf(t testing.TB, maps map[string]*ebpf.Map) map[abiNatMappingKey]abiNatSlot {
	t.Helper()
	out := map[abiNatMappingKey]abiNatSlot{}
	err := engineOn(t, maps).eachMapping(func(id slotID, _ netip.Addr, slot *abiNatSlot) bool {
		key := abiNatMappingKey{Addr: slot.Addr, Port: slot.Port, Class: uint8(id.class()), Pool: slot.Pool}
		if before, twice := out[key]; twice {
			t.Errorf("%+v has two mappings: %+v and %+v", key, before, slot)
		}
		out[key] = *slot
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// writable lays an array map open to be changed in place.
func writable(t testing.TB, m *ebpf.Map) (bytes []byte, close func()) {
	t.Helper()
	bytes, err := unix.Mmap(m.FD(), 0, int(m.MaxEntries())*roundUp8(int(m.ValueSize())), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	return bytes, func() {
		if err := unix.Munmap(bytes); err != nil {
			t.Error(err)
		}
	}
}

// zero makes an array map as it was when it was new.
func zero(t testing.TB, m *ebpf.Map) {
	t.Helper()
	bytes, close := writable(t, m)
	defer close()
	clear(bytes)
}

// fillTable fills a table of bpf/lib/table.h with entries that lead nowhere. The function that it
// returns empties it.
func fillTable(t testing.TB, m *ebpf.Map) (empty func()) {
	t.Helper()
	bytes, close := writable(t, m)
	defer close()
	for i := range bytes {
		if i%64 >= 8 { // not the bucket's lock
			bytes[i] = 0xff
		}
	}
	return func() { zero(t, m) }
}

// forgetMappings takes all mappings out of their table. Slots and ports are not its to reset.
func forgetMappings(t testing.TB, maps map[string]*ebpf.Map) {
	t.Helper()
	zero(t, maps["mapping_table"])
	var c abiNatCounts
	if err := maps["counts"].Lookup(uint32(0), &c); err != nil {
		t.Fatal(err)
	}
	c.Mappings = 0
	if err := maps["counts"].Put(uint32(0), &c); err != nil {
		t.Fatal(err)
	}
}

// limitMappings lets there be so many mappings.
func (g *gateway) limitMappings(t testing.TB, n uint32) {
	t.Helper()
	var c abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &c); err != nil {
		t.Fatal(err)
	}
	c.MappingsMax = n
	g.put(t, "control", uint32(0), &c)
}

// What natkit shows of mappings is what packets made.
func TestMappings(t *testing.T) {
	g := aGateway(t)
	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.1:5000", "198.51.100.9:53"))
	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "198.51.100.8:53"), sent, ends("203.0.113.1:5000", "198.51.100.8:53"))
	g.want(t, inside, "tcp", pktbuild.SYN, ends("192.168.1.2:5000", "198.51.100.9:80"), sent, ends("203.0.113.1:5000", "198.51.100.9:80"))
	g.want(t, inside, "ping", 0, ends("192.168.1.2:5000", "198.51.100.9:0"), sent, ends("203.0.113.1:5000", "198.51.100.9:0"))
	g.want(t, inside, "udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.18:5000", "198.51.100.9:53"))
	g.want(t, inside, "udp", 0, ends("192.168.4.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.19:5000", "198.51.100.9:53")) // has none
	_, whole := g.send(t, inside, "udp", 0, ends("192.168.5.2:5000", "198.51.100.9:53"))
	var got []string
	show := func(m *rulefile.Mapping) string {
		return strings.Join([]string{m.Class, m.Inside.String(), m.Outside.String(), strings.Repeat("I", m.Sessions), m.Filtering}, " ")
	}
	e := engineOn(t, g.maps)
	err := e.Mappings(func(m *rulefile.Mapping) bool {
		got = append(got, show(m))
		if m.HoldDown {
			t.Errorf("%s rests", show(m))
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"udp 192.168.1.2:5000 203.0.113.1:5000 II address-and-port-dependent",
		"tcp 192.168.1.2:5000 203.0.113.1:5000 I address-and-port-dependent",
		"icmp 192.168.1.2:5000 203.0.113.1:5000 I address-and-port-dependent",
		"udp 192.168.3.2:5000 203.0.113.18:5000 I address-dependent",
		"other 192.168.5.2:0 " + whole.src.String() + ":0 I endpoint-independent",
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	n := 0
	if err := e.Mappings(func(*rulefile.Mapping) bool { n++; return n < 2 }); err != nil || n != 2 {
		t.Errorf("%d mappings were told to who wanted two (%v)", n, err)
	}
}

// There are as many mappings as the limit says; the next is refused, and takes nothing. Who
// has one is served, and there is room again when one has ended and its port has rested.
func TestMappingLimit(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, short)
	g.limitMappings(t, 3)
	e := ends("192.168.2.2:5000", "198.51.100.9:53")
	for range 3 {
		e.sport++
		if reason, _ := g.send(t, inside, "udp", 0, e); reason != sent {
			t.Fatalf("%v: %v", e, reason)
		}
	}
	other := ends("192.168.2.3:6000", "198.51.100.9:53")
	free := func() int {
		return g.freePorts(t, fullAddress, abiNatClassNAT_UDP) + g.freePorts(t, fullAddress2, abiNatClassNAT_UDP)
	}
	for range 2 {
		g.refused(t, inside, "udp", 0, other, abiNatReasonNAT_DROP_MAPPINGS_FULL)
		g.refused(t, inside, "udp", 0, ends("192.168.5.2:1", "198.51.100.9:53"), abiNatReasonNAT_DROP_MAPPINGS_FULL)
	}
	if n := free(); n != 2*8976-3 {
		t.Errorf("three mappings, but %d of %d ports are free", n, 2*8976)
	}
	e.dport++
	if reason, _ := g.send(t, inside, "udp", 0, e); reason != sent {
		t.Errorf("another session of a mapping: %v", reason)
	}
	defer g.startGC(t)()
	ktest.Wait(t, 60*time.Second, "room for another mapping", func() bool {
		reason, _ := g.send(t, inside, "udp", 0, other)
		return reason == sent
	})
}

// A mapping that is being made or removed is not held; one that another CPU has removed, and
// whose port is another host's by now, is not found.
func TestMappingChanging(t *testing.T) {
	g := aGateway(t)
	e := ends("192.168.1.2:5000", "198.51.100.9:53")
	out := ends("203.0.113.1:5000", "198.51.100.9:53")
	g.want(t, inside, "udp", 0, e, sent, out)
	var slots *ebpf.Map
	if err := g.maps["slots"].Lookup(uint32(ownAddress), &slots); err != nil {
		t.Fatal(err)
	}
	defer slots.Close()
	index := uint32(abiNatClassNAT_UDP)*8976 + 5000 - 1024
	var mapping abiNatSlot
	if err := slots.Lookup(index, &mapping); err != nil || mapping.Used != uint8(abiNatSlotUseNAT_SLOT_MAPPING) {
		t.Fatalf("the slot is %+v (%v)", mapping, err)
	}
	write := func(s abiNatSlot) {
		t.Helper()
		if err := slots.Put(index, &s); err != nil {
			t.Fatal(err)
		}
	}
	read := func() (s abiNatSlot) {
		t.Helper()
		if err := slots.Lookup(index, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	e.dport, out.dport = 54, 54

	gone := mapping
	gone.Refs |= uint32(abiNatRefsNAT_REFS_GONE)
	write(gone)
	g.refused(t, inside, "udp", 0, e, abiNatReasonNAT_DROP_RACE)
	if now := read(); now != gone {
		t.Errorf("a mapping that is being removed was changed: %+v, was %+v", now, gone)
	}
	write(mapping)
	g.want(t, inside, "udp", 0, e, sent, out)

	others := mapping
	others.Addr = addr(netip.MustParseAddr("192.168.1.77"))
	write(others)
	e.dport = 55
	reason, got := g.send(t, inside, "udp", 0, e)
	if reason != sent || got.sport == 5000 {
		t.Errorf("behind an entry that leads to another host's slot: %v %v, want a port of its own", reason, got)
	}
	if now := read(); now != others {
		t.Errorf("another host's mapping was changed: %+v, was %+v", now, others)
	}
}

// What it takes to read 459 776 sessions with a mapping each. Likewise with 1x.
func BenchmarkRead(b *testing.B) {
	c := newCrowd(b)
	c.open(b, crowdNew, crowdHeld)
	all := maps.Clone(c.maps)
	maps.Copy(all, c.Maps)
	e := engineOn(b, all)
	read := func(what string, all func(count func() bool) error) {
		n := 0
		begun := time.Now()
		if err := all(func() bool { n++; return true }); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(time.Since(begun).Nanoseconds())/float64(n), "ns/"+what)
		if n != crowdHeld/crowdBatch*crowdBatch {
			b.Errorf("read %d %ss of %d", n, what, crowdHeld)
		}
	}
	read("session", func(count func() bool) error {
		return e.Sessions(func(*rulefile.Session) bool { return count() })
	})
	read("mapping", func(count func() bool) error {
		return e.Mappings(func(*rulefile.Mapping) bool { return count() })
	})
	var some rulefile.Session
	if err := e.Sessions(func(s *rulefile.Session) bool { some = *s; return false }); err != nil {
		b.Fatal(err)
	}
	f, err := e.FindSessions()
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for b.Loop() {
		if found, err := f.Of(some.Protocol, some.Source.AddrPort, some.Destination.AddrPort); err != nil || len(found) != 1 {
			b.Fatal(found, err)
		}
	}
}
