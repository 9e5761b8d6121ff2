// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"

	"natkit/internal/nat/rulefile"
)

// SessionFinder finds the session of a packet by the packet's ends, as the engine does: without
// reading the others. Close must be called, before that of the engine.
type SessionFinder struct {
	e       *Engine
	control abiNatControl
	memory  *flowMemory
	buckets []abiNatBucket
	close   func() error // of buckets
}

// FindSessions opens a finder.
func (e *Engine) FindSessions() (f *SessionFinder, err error) {
	f = &SessionFinder{e: e}
	if err := e.m.Control.Lookup(uint32(0), &f.control); err != nil {
		return nil, fmt.Errorf("read the seed of tables: %w", err)
	}
	if f.memory, err = e.flowMemory(); err != nil {
		return nil, err
	}
	if f.buckets, f.close, err = memoryOf[abiNatBucket](e.m.FlowTable); err != nil {
		return nil, errors.Join(err, f.memory.close())
	}
	return f, nil
}

// Close lets go of the engine's memory.
func (f *SessionFinder) Close() error { return errors.Join(f.memory.close(), f.close()) }

// Of are the sessions that a packet with these ends may belong to: from outside, from inside, and where
// interfaces have subscribers of their own, from inside by each of them.
func (f *SessionFinder) Of(protocol rulefile.Protocol, source, destination netip.AddrPort) (out []rulefile.Session, err error) {
	key, ok := keyOf(protocol, source, destination)
	if !ok {
		return nil, nil
	}
	config, err := f.e.config()
	if err != nil {
		return nil, err
	}
	now := clock()
	find := func() {
		if one, found := f.find(&key); found {
			out = append(out, f.e.whole(&one, config, now))
		}
	}
	find()
	for key.Zone = range f.e.zones {
		find()
	}
	key.Zone, key.Side = 0, uint8(abiNatSideNAT_OUTSIDE)
	find()
	return out, nil
}

// keyOf is the key of a packet from inside. False: no packet with these ends has one.
func keyOf(protocol rulefile.Protocol, source, destination netip.AddrPort) (key abiNatFlowKey, ok bool) {
	if !source.Addr().Is4() || !destination.Addr().Is4() {
		return key, false
	}
	key.Src.Octet, key.Dst.Octet = source.Addr().As4(), destination.Addr().As4()
	key.Sport, key.Dport = bits.ReverseBytes16(source.Port()), bits.ReverseBytes16(destination.Port())
	key.Protocol = uint8(protocol)
	return key, true
}

// find copies the session of which a flow has the key: table_find of bpf/lib/table.h.
func (f *SessionFinder) find(key *abiNatFlowKey) (s sessionCopy, found bool) {
	hash := tableHash(f.control.Seed, key)
	for distance := range uint32(tableReach) {
		bucket := &f.buckets[tableBucket(hash, distance)&f.control.FlowMask]
		for i := range bucket.Entries {
			entry := atomic.LoadUint64(&bucket.Entries[i])
			number := uint32(entry & (1<<tableValueBits - 1))
			if entry == 0 || int(number) >= len(f.memory.flows) {
				continue
			}
			flow := &f.memory.flows[number]
			if packetKey(flow) != *key {
				continue
			}
			if atomic.LoadUint32(&flow.State)&uint32(abiNatFlowStateNAT_FLOW_OWNER) == 0 {
				number = atomic.LoadUint32(&flow.Other)
			}
			if s, found = f.memory.session(number); found {
				return s, true
			}
		}
	}
	return s, false
}

// tableHash is table_hash of bpf/lib/table.h, of a flow's key without its link.
func tableHash(seed [2]uint64, key *abiNatFlowKey) uint64 {
	var words [16]byte
	copy(words[0:], key.Src.Octet[:])
	copy(words[4:], key.Dst.Octet[:])
	binary.NativeEndian.PutUint16(words[8:], key.Sport)
	binary.NativeEndian.PutUint16(words[10:], key.Dport)
	words[12], words[13], words[14] = key.Protocol, key.Side, key.Zone
	a := (binary.NativeEndian.Uint64(words[0:]) ^ seed[0]) * 0x9e3779b97f4a7c15
	b := (binary.NativeEndian.Uint64(words[8:]) ^ seed[1]) * 0xd6e8feb86659fd93
	a ^= a >> 32
	b ^= b >> 29
	a = (a + b) * 0xff51afd7ed558ccd
	return a ^ a>>32
}

// tableBucket is the number of the bucket that is that far from the hash's home, without the table's mask: table_bucket.
func tableBucket(hash uint64, distance uint32) uint32 {
	return uint32(hash) ^ distance ^ (distance>>1)*0x9e3779b1
}
