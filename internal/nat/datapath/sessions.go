// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Sessions calls fn with every session until it returns false. They are read in place and
// never held; one that comes or goes during the call may be missed.
func (e *Engine) Sessions(fn func(*rulefile.Session) bool) (err error) {
	config, err := e.config()
	if err != nil {
		return err
	}
	now := clock()
	return e.eachSession(func(one *abiNatSession) bool {
		owner, peer := &one.Flows[abiNatDirectionNAT_OWNER], &one.Flows[abiNatDirectionNAT_PEER]
		s := session(&one.Keys[abiNatDirectionNAT_OWNER], owner)
		s.Age = snapshot.Seconds(sinceTick(now, owner.Created))
		s.Packets = [2]uint64{owner.Packets, peer.Packets}
		s.Bytes = [2]uint64{owner.Bytes, peer.Bytes}
		since, left := idle(owner, peer, config, now)
		s.Idle, s.Expires = snapshot.Seconds(since), snapshot.Seconds(left)
		if s.Expires <= 0 { // a packet that comes now begins another
			s.State = rulefile.StateDead
		}
		return fn(&s)
	})
}

// eachSession calls fn with a copy of every session until it returns false.
func (e *Engine) eachSession(fn func(*abiNatSession) bool) (err error) {
	sessions, closeSessions, err := memoryOf[abiNatSession](e.m.Sessions)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeSessions()) }()
	used, closeUsed, err := memoryOf[uint64](e.m.SessionBits)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeUsed()) }()
	for word := range used {
		for left := atomic.LoadUint64(&used[word]); left != 0; left &= left - 1 {
			number := word*64 + bits.TrailingZeros64(left)
			if number >= len(sessions) {
				break
			}
			if one, whole := readSession(&sessions[number]); whole && !fn(&one) {
				return nil
			}
		}
	}
	return nil
}

// readSession copies a session. It is whole if it was not removed, and its number not used
// for another one, in between: that takes NAT_DEAD_TICKS from when it died.
func readSession(s *abiNatSession) (out abiNatSession, whole bool) {
	const gone = uint32(abiNatFlowStateNAT_FLOW_GONE)
	state := &s.Flows[abiNatDirectionNAT_OWNER].State
	keys := s.Keys
	if atomic.LoadUint32(state)&gone != 0 {
		return out, false
	}
	out = *s
	return out, atomic.LoadUint32(state)&gone == 0 && s.Keys == keys && out.Keys == keys
}

// session is what the owner's flow alone has.
func session(key *abiNatFlowKey, flow *abiNatFlow) rulefile.Session {
	s := rulefile.Session{
		Protocol: rulefile.Protocol(key.Protocol), From: "inside", Rule: rulefile.RuleID(flow.Rule),
		Source: snapshot.EndpointOf(endpoint(key.Src, key.Sport)), Destination: snapshot.EndpointOf(endpoint(key.Dst, key.Dport)),
		SourceAfter: snapshot.EndpointOf(endpoint(flow.Src, flow.Sport)), DestinationAfter: snapshot.EndpointOf(endpoint(flow.Dst, flow.Dport)),
		State: rulefile.Timeout(flow.State & uint32(abiNatFlowStateNAT_FLOW_TIMEOUT)).String(),
	}
	if key.Side == uint8(abiNatSideNAT_OUTSIDE) {
		s.From = "outside"
	}
	if flow.State&uint32(abiNatFlowStateNAT_FLOW_DEAD|abiNatFlowStateNAT_FLOW_GONE) != 0 {
		s.State = rulefile.StateDead
	}
	return s
}

// idle is how long nothing has come that keeps the session alive, and how long it has
// left: what state_expired of bpf/nat/state.h decides.
func idle(owner, peer *abiNatFlow, config *abiNatConfig, now uint32) (idle, left time.Duration) {
	outbound := uint32(abiNatFlowStateNAT_FLOW_OUTBOUND)
	all := config.Flags&uint32(abiNatConfigFlagNAT_CONFIG_INBOUND_REFRESH) != 0 || (owner.State|peer.State)&outbound == 0
	ticks := int32(-1)
	for _, f := range []*abiNatFlow{owner, peer} {
		if silent := int32(now - f.Seen); (all || f.State&outbound != 0) && (ticks < 0 || silent < ticks) {
			ticks = silent
		}
	}
	timeout := config.Timeouts[owner.State&uint32(abiNatFlowStateNAT_FLOW_TIMEOUT)%uint32(len(config.Timeouts))]
	return ticksToDuration(ticks), ticksToDuration(int32(timeout) - ticks)
}

func ticksToDuration(ticks int32) time.Duration {
	return time.Duration(ticks) << uint(abiNatLimitNAT_TICK_SHIFT)
}

func sinceTick(now, then uint32) time.Duration { return ticksToDuration(int32(now - then)) }

// otherKey is the key of the other direction: state_other_key of bpf/nat/state.h.
func otherKey(key *abiNatFlowKey, flow *abiNatFlow) abiNatFlowKey {
	other := abiNatFlowKey{Src: flow.Dst, Dst: flow.Src, Sport: flow.Dport, Dport: flow.Sport, Protocol: key.Protocol}
	if flow.State&uint32(abiNatFlowStateNAT_FLOW_PEER_OUTSIDE) != 0 {
		other.Side = uint8(abiNatSideNAT_OUTSIDE)
	}
	return other
}

func endpoint(a abiNatAddr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(a.Octet), bits.ReverseBytes16(port))
}

// Stats reads the counters, summed over CPUs.
func (e *Engine) Stats() (*rulefile.Stats, error) {
	var perCPU []abiNatStats
	if err := e.m.Stats.Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	s := &rulefile.Stats{Reasons: map[string]uint64{}}
	for _, c := range perCPU {
		for reason, n := range c.Packets {
			s.Reasons[rulefile.Reason(reason).String()] += n
		}
		s.BytesIn += c.BytesIn
		s.BytesOut += c.BytesOut
		s.GCTime += snapshot.Seconds(c.GcNs)
		s.GCExamined += c.GcExamined
		s.EventsLost += c.EventsLost
	}
	s.Sessions = int(s.Reasons["created"] - s.Reasons["expired"])
	s.Mappings = int(s.Reasons["mapped"] - s.Reasons["unmapped"])
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return nil, fmt.Errorf("read the time of the last garbage collection: %w", err)
	}
	s.GCAge = snapshot.Seconds(sinceTick(clock(), control.GcRan))
	return s, nil
}

// FreePorts reports how many ports an external address has left, by class.
func (e *Engine) FreePorts(index int) (free [rulefile.PortClasses]int, err error) {
	var id ebpf.MapID
	if err := e.m.FreePorts.Lookup(uint32(index), &id); err != nil {
		return free, fmt.Errorf("free ports of address %d: %w", index, err)
	}
	ports, err := ebpf.NewMapFromID(id)
	if err != nil {
		return free, fmt.Errorf("free ports of address %d: %w", index, err)
	}
	defer ports.Close()
	for class := range free {
		var p abiNatPorts
		if err := ports.Lookup(uint32(class), &p); err != nil {
			return free, fmt.Errorf("free ports of address %d: %w", index, err)
		}
		free[class] = int(p.Free)
	}
	_, err = e.blocksOf(uint32(index), func(b *abiNatBlocks) {
		for class := range free {
			free[class] += int(atomic.LoadUint64(&b.Ports[class].Free))
		}
	})
	return free, err
}

// config is the configuration in use.
func (e *Engine) config() (*abiNatConfig, error) {
	var control abiNatControl
	var config abiNatConfig
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return nil, fmt.Errorf("read generation: %w", err)
	}
	if err := e.m.Config.Lookup(control.Generation%uint32(abiNatLimitNAT_GENERATIONS), &config); err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return &config, nil
}

// monotonic is CLOCK_MONOTONIC in nanoseconds.
func monotonic() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano())
}

// clock is the engine's, in ticks.
func clock() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return 0
	}
	return uint32(uint64(ts.Nano()) >> uint(abiNatLimitNAT_TICK_SHIFT))
}
