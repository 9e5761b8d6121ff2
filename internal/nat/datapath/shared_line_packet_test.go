// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/pktbuild"
)

// line is the size of a cache line.
const line = 64

// A memory is what maps hold that processors share: by map, its elements one behind the other. Maps
// that have a copy for each processor are not in it, nor queues, which can't be read
// without taking out of them.
type memory map[string][]byte

// sharedMemory reads it.
func sharedMemory(t *testing.T, byName map[string]*ebpf.Map) memory {
	t.Helper()
	out := memory{}
	var read func(name string, m *ebpf.Map)
	read = func(name string, m *ebpf.Map) {
		switch m.Type() {
		case ebpf.Array, ebpf.Hash, ebpf.LRUHash:
			if mapped, err := m.Memory(); err == nil {
				b := make([]byte, m.MaxEntries()*((m.ValueSize()+7)&^7))
				if _, err := mapped.ReadAt(b, 0); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				out[name] = b
				return
			}
			if m.Type() == ebpf.Array {
				_, out[name] = elements(t, name, m)
				return
			}
			var key, value []byte // where an element lies is not to be seen
			for entries := m.Iterate(); entries.Next(&key, &value); {
				out[fmt.Sprintf("%s %x", name, key)] = bytes.Clone(value)
			}
		case ebpf.ArrayOfMaps:
			keys, ids := elements(t, name, m)
			for i, key := range keys {
				inner, err := ebpf.NewMapFromID(ebpf.MapID(binary.NativeEndian.Uint32(ids[4*i:])))
				if err != nil {
					t.Fatalf("%s %d: %v", name, key, err)
				}
				defer inner.Close()
				read(fmt.Sprintf("%s %d", name, key), inner)
			}
		case ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.Queue, ebpf.DevMap, ebpf.RingBuf:
		default:
			t.Fatalf("%s: how is a %s read?", name, m.Type())
		}
	}
	for name, m := range byName {
		read(name, m)
	}
	return out
}

// elements of an array, each filled up to eight bytes as they lie in memory; of an array of maps those
// that are there.
func elements(t *testing.T, name string, m *ebpf.Map) (keys []uint32, values []byte) {
	t.Helper()
	size := int(m.ValueSize())
	keys = make([]uint32, m.MaxEntries())
	all := reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(size, reflect.TypeFor[byte]())), len(keys), len(keys))
	var at ebpf.MapBatchCursor
	n, err := m.BatchLookup(&at, keys, all.Interface(), nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatalf("%s: %v", name, err)
	}
	values = unsafe.Slice((*byte)(all.UnsafePointer()), n*size)
	if fill := -size & 7; fill > 0 && m.Type() == ebpf.Array {
		packed := values
		values = make([]byte, 0, n*(size+fill))
		for i := range n {
			values = append(append(values, packed[i*size:(i+1)*size]...), make([]byte, fill)...)
		}
	}
	return keys[:n], values
}

// written are the bytes in which two readings of the memory differ.
func (m memory) written(after memory) map[string][]int {
	out := map[string][]int{}
	for name, b := range after {
		before := m[name]
		if bytes.Equal(before, b) {
			continue
		}
		for i := range b {
			if i >= len(before) || before[i] != b[i] {
				out[name] = append(out[name], i)
			}
		}
	}
	return out
}

// sameLine names the lines that both have written. How a map's memory lies to the lines is known
// of maps that begin with a page; of others any two bytes less than a line apart count.
func sameLine(a, b map[string][]int, byName map[string]*ebpf.Map) (out []string) {
	for name, places := range a {
		m := byName[name]
		page := m != nil && m.Flags()&unix.BPF_F_MMAPABLE != 0
		for _, i := range places {
			for _, j := range b[name] {
				if page && i/line == j/line || !page && max(i-j, j-i) < line {
					out = append(out, fmt.Sprintf("%s, bytes %d and %d", name, i, j))
				}
			}
		}
	}
	return out
}

// onProcessor runs fn on a processor.
func onProcessor(t *testing.T, processor int, fn func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, only unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	only.Set(processor)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		t.Fatal(err)
	}
	defer unix.SchedSetaffinity(0, &before)
	fn()
}

// Packets of established flows that two processors forward, each its own, change no cache line that the
// other changes: neither flows of different hosts nor the two ways of one flow. A
// write of what was there already does not show.
func TestNoLineIsWrittenByTwo(t *testing.T) {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"xdp": loadXdp, "tc": loadTc, "accel xdp": loadAccelXdp, "accel tc": loadAccelTc} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		for n := range spec.Maps {
			if strings.HasPrefix(n, ".") && !strings.HasPrefix(n, ".rodata") {
				t.Errorf("%s: its programs write variables, %s, which this test does not see", name, n)
			}
		}
	}
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	var processors []int
	for i := 0; len(processors) < 2 && i < 1024; i++ {
		if allowed.IsSet(i) {
			processors = append(processors, i)
		}
	}
	if len(processors) < 2 {
		processors = append(processors, processors[0]) // the lines are the same by one
	}

	r := aRig(t)
	a := r.accelerator(t)
	type way struct {
		side     abiNatSide
		from, to endpoints
	}
	var sent, back [2]way // of two hosts
	for i := range 2 {
		host, port := netip.AddrFrom4([4]byte{192, 168, 1, byte(2 + i)}), uint16(40000+i)
		sent[i] = way{abiNatSideNAT_INSIDE, endpoints{host, world, 5000, 53}, endpoints{gatewayOut, world, port, 53}}
		back[i] = way{abiNatSideNAT_OUTSIDE, endpoints{world, gatewayOut, 53, port}, endpoints{world, host, 53, 5000}}
	}
	frame := func(w way, protocol uint8) []byte {
		p := pktbuild.IPv4{Src: w.from.src, Dst: w.from.dst, TTL: 64}
		if protocol == pktbuild.TCPProtocol {
			p.Payload = pktbuild.TCP{Src: w.from.sport, Dst: w.from.dport, Seq: 1, Ack: 1, Flags: pktbuild.ACK, Window: 100, Data: []byte("data")}
		} else {
			p.Payload = pktbuild.UDP{Src: w.from.sport, Dst: w.from.dport, Data: []byte("data")}
		}
		return r.sidePort(w.side).arriving(p).Bytes()
	}
	// What the engine or accel has of both ways of both hosts, and how it forwards a packet.
	routers := []struct {
		name    string
		maps    map[string]*ebpf.Map
		put     func(protocol uint8)
		forward func(h hook, p port, frame []byte) uint32
	}{
		{"engine", r.maps, func(protocol uint8) {
			for i := range sent {
				r.putSession(t, protocol, sent[i].from, sent[i].to, func(*abiNatFlow) {})
			}
		}, nil},
		{"accel", a.engine.maps, func(protocol uint8) {
			for i := range sent {
				a.put(t, protocol, sent[i].from, sent[i].to, func(*abiNatAccelEntry) {})
				a.put(t, protocol, back[i].from, back[i].to, func(s *abiNatAccelEntry) {
					s.Hop, s.InLink, s.Mtu = r.in.hop(), r.out.link+1, insideMTU
				})
			}
		}, func(h hook, p port, frame []byte) uint32 {
			verdict, _ := a.runAt(t, h, p, frame)
			return verdict
		}},
	}
	// wrote is what a processor writes that forwards some packets of each way. What a flow knows of its
	// neighbour is soon looked up again, for which a packet leaves XDP: then it was too late, once more.
	wrote := func(t *testing.T, processor int, h hook, protocol uint8, router int, ways []way) (places map[string][]int) {
		what := routers[router]
		onProcessor(t, processor, func() {
			for begun, late := now(), true; late; begun = now() {
				what.put(protocol)
				before := sharedMemory(t, what.maps)
				ended := h.redirect
				for range 3 {
					for _, w := range ways {
						verdict := uint32(0)
						if what.forward != nil {
							verdict = what.forward(h, r.sidePort(w.side), frame(w, protocol))
						} else if v, _, err := r.run(t, h, w.side, r.sidePort(w.side), frame(w, protocol), 0); err == nil {
							verdict = v
						}
						if verdict != h.redirect {
							ended = verdict
						}
					}
				}
				places = before.written(sharedMemory(t, what.maps))
				late = ended != h.redirect && now()-begun > ticks(1)/4
				if ended != h.redirect && !late {
					t.Fatalf("verdict %d", int32(ended))
				}
			}
		})
		if len(places) == 0 {
			t.Fatalf("processor %d wrote nothing that is seen", processor)
		}
		return places
	}
	for _, h := range hooks {
		for protocol, protocolName := range map[uint8]string{pktbuild.UDPProtocol: "udp", pktbuild.TCPProtocol: "tcp"} {
			for router, what := range routers {
				for _, c := range []struct {
					name string
					does [2][]way // what each processor forwards
				}{
					{"flows shared out", [2][]way{{sent[0], back[0]}, {sent[1], back[1]}}},
					{"a way on each", [2][]way{{sent[0], sent[1]}, {back[0], back[1]}}},
				} {
					t.Run(strings.Join([]string{what.name, h.name, protocolName, c.name}, " "), func(t *testing.T) {
						first := wrote(t, processors[0], h, protocol, router, c.does[0])
						for _, both := range sameLine(first, wrote(t, processors[1], h, protocol, router, c.does[1]), what.maps) {
							t.Errorf("both wrote %s", both)
						}
					})
				}
			}
		}
	}
}
