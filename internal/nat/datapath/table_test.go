// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/bits"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
)

// elementsOf lays an array map open to be changed in place, as its elements.
func elementsOf[T any](t testing.TB, m *ebpf.Map) (elements []T, close func()) {
	t.Helper()
	bytes, close := writable(t, m)
	return unsafe.Slice((*T)(unsafe.Pointer(&bytes[0])), m.MaxEntries()), close
}

// tableTag is TABLE_TAG of bpf/lib/table.h.
const tableTag = 1 << (tableValueBits + 4)

// tables is what a test sees of sessions, and changes.
type tables struct {
	control abiNatControl
	counts  abiNatCounts
	flows   []abiNatFlow
	details []abiNatFlowRest
	bits    []uint64
	buckets []abiNatBucket
}

// inTables calls fn with the maps of sessions.
func inTables(t testing.TB, maps map[string]*ebpf.Map, fn func(*tables)) {
	t.Helper()
	var s tables
	if err := maps["control"].Lookup(uint32(0), &s.control); err != nil {
		t.Fatal(err)
	}
	if err := maps["counts"].Lookup(uint32(0), &s.counts); err != nil {
		t.Fatal(err)
	}
	before := s.counts
	var close1, close2, close3, close4 func()
	s.flows, close1 = elementsOf[abiNatFlow](t, maps["flows"])
	defer close1()
	s.details, close2 = elementsOf[abiNatFlowRest](t, maps["flow_details"])
	defer close2()
	s.bits, close3 = elementsOf[uint64](t, maps["flow_bits"])
	defer close3()
	s.buckets, close4 = elementsOf[abiNatBucket](t, maps["flow_table"])
	defer close4()
	fn(&s)
	if s.counts != before {
		if err := maps["counts"].Put(uint32(0), &s.counts); err != nil {
			t.Fatal(err)
		}
	}
}

// each calls fn with every flow that there is.
func (s *tables) each(fn func(flow *abiNatFlow)) {
	for word := range s.bits {
		for left := atomic.LoadUint64(&s.bits[word]); left != 0; left &= left - 1 {
			flow := &s.flows[word*64+bits.TrailingZeros64(left)]
			if atomic.LoadUint32(&flow.State)&uint32(abiNatFlowStateNAT_FLOW_MADE) != 0 {
				fn(flow)
			}
		}
	}
}

// find is the flow of the key, nil if there is none, and its number.
func (s *tables) find(key *abiNatFlowKey) (flow *abiNatFlow, number uint32) {
	hash := tableHash(s.control.Seed, key)
	for distance := range uint32(tableReach) {
		for _, entry := range s.buckets[tableBucket(hash, distance)&s.control.FlowMask].Entries {
			number := uint32(entry & (1<<tableValueBits - 1))
			if entry != 0 && packetKey(&s.flows[number]) == *key {
				return &s.flows[number], number
			}
		}
	}
	return nil, 0
}

// put makes the flow of its key that; new ones go with the other direction's, if that is there.
func (s *tables) put(t testing.TB, flow *abiNatFlow) {
	t.Helper()
	key := packetKey(flow)
	flow.State |= uint32(abiNatFlowStateNAT_FLOW_MADE)
	if old, _ := s.find(&key); old != nil {
		flow.Other = old.Other
		*old = *flow
		return
	}
	otherKey := otherKey(&key, flow)
	other, number := s.find(&otherKey)
	if other == nil {
		number = 2 * s.counts.Sessions
		s.counts.Sessions++
		s.flows[number], s.flows[number+1] = abiNatFlow{}, abiNatFlow{}
		if flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0 {
			number++
		}
	}
	flow.Other = number
	number ^= 1
	s.flows[flow.Other].Other = number
	s.flows[number], s.details[number] = *flow, abiNatFlowRest{}
	s.bits[number/64] |= 3 << (number & 62)
	hash := tableHash(s.control.Seed, &key)
	home := &s.buckets[hash&uint64(s.control.FlowMask)]
	for i := range home.Entries {
		if home.Entries[i] == 0 {
			home.Entries[i] = hash&^(tableTag-1) | tableTag | uint64(number)
			return
		}
	}
	t.Fatal("the flow's bucket is full")
}

// flowsOf reads both flows of every session, by their keys.
func flowsOf(t testing.TB, maps map[string]*ebpf.Map) map[abiNatFlowKey]abiNatFlow {
	t.Helper()
	out := map[abiNatFlowKey]abiNatFlow{}
	inTables(t, maps, func(s *tables) {
		s.each(func(flow *abiNatFlow) { out[packetKey(flow)] = *flow })
	})
	return out
}

// flowOf reads the flow of the key.
func flowOf(t testing.TB, maps map[string]*ebpf.Map, key abiNatFlowKey) (flow abiNatFlow, known bool) {
	t.Helper()
	inTables(t, maps, func(s *tables) {
		if f, _ := s.find(&key); f != nil {
			flow, known = *f, true
		}
	})
	return flow, known
}

// changeFlows lets change change every flow.
func changeFlows(t testing.TB, maps map[string]*ebpf.Map, change func(*abiNatFlow)) {
	t.Helper()
	inTables(t, maps, func(s *tables) { s.each(change) })
}

// forgetSessions makes the engine one that has never had a session.
func forgetSessions(t testing.TB, maps map[string]*ebpf.Map) {
	t.Helper()
	inTables(t, maps, func(s *tables) {
		clear(s.bits)
		for i := range s.buckets {
			if s.buckets[i] != (abiNatBucket{}) {
				s.buckets[i] = abiNatBucket{}
			}
		}
		clear(s.flows[:2*min(int(s.counts.Sessions), len(s.flows)/2)])
		s.counts.Sessions = 0
	})
	for maps["free_flows"].LookupAndDelete(nil, new(uint32)) == nil {
	}
}

// useUp leaves no number for a session, until the function that it returns is called.
func useUp(t testing.TB, counts *ebpf.Map) (empty func()) {
	t.Helper()
	set := func(sessions uint32) {
		var c abiNatCounts
		if err := counts.Lookup(uint32(0), &c); err != nil {
			t.Fatal(err)
		}
		c.Sessions = sessions
		if err := counts.Put(uint32(0), &c); err != nil {
			t.Fatal(err)
		}
	}
	set(1 << 30)
	return func() { set(0) }
}
