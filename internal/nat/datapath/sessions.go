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
	return e.eachSession(func(one *sessionCopy) bool {
		s := e.whole(one, config, now)
		return fn(&s)
	})
}

// whole is all of a session.
func (e *Engine) whole(one *sessionCopy, config *abiNatConfig, now uint32) rulefile.Session {
	s := e.session(&one.owner, one.rule)
	s.Age = snapshot.Seconds(sinceTick(now, one.created))
	s.Packets = one.packets
	s.Bytes = [2]uint64{one.owner.Bytes, one.peer.Bytes}
	since, left := idle(&one.owner, &one.peer, config, now)
	s.Idle, s.Expires = snapshot.Seconds(since), snapshot.Seconds(left)
	if s.Expires <= 0 { // a packet that comes now begins another
		s.State = rulefile.StateDead
	}
	return s
}

// eachSession calls fn with a copy of every session until it returns false.
func (e *Engine) eachSession(fn func(*sessionCopy) bool) (err error) {
	m, err := e.flowMemory()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	for word := range m.used {
		for left := atomic.LoadUint64(&m.used[word]); left != 0; left &= left - 1 {
			number := uint32(word*64 + bits.TrailingZeros64(left))
			if one, whole := m.session(number); whole && !fn(&one) {
				return nil
			}
		}
	}
	return nil
}

// flowMemory is the memory of sessions: bpf/nat/flows.h.
type flowMemory struct {
	flows   []abiNatFlow
	details []abiNatFlowRest
	used    []uint64
	close   func() error
}

func (e *Engine) flowMemory() (m *flowMemory, err error) {
	m = &flowMemory{}
	var closes [3]func() error
	m.close = func() error {
		var errs []error
		for _, c := range closes {
			if c != nil {
				errs = append(errs, c())
			}
		}
		return errors.Join(errs...)
	}
	if m.flows, closes[0], err = memoryOf[abiNatFlow](e.m.Flows); err == nil {
		m.details, closes[1], err = memoryOf[abiNatFlowRest](e.m.FlowDetails)
	}
	if err == nil {
		m.used, closes[2], err = memoryOf[uint64](e.m.FlowBits)
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// sessionCopy is a session as it was at one moment.
type sessionCopy struct {
	owner, peer   abiNatFlow
	rule, created uint32
	packets       [2]uint64 // of the owner, the peer
}

// session copies the session whose owner has that number. It is whole if there is one, and it was
// not removed, and its number not used for another one, in between: that takes NAT_DEAD_TICKS from
// when it died.
func (m *flowMemory) session(number uint32) (s sessionCopy, whole bool) {
	const (
		made  = uint32(abiNatFlowStateNAT_FLOW_MADE)
		there = made | uint32(abiNatFlowStateNAT_FLOW_OWNER)
		of    = there | uint32(abiNatFlowStateNAT_FLOW_GONE)
	)
	if int(number) >= len(m.flows) {
		return s, false
	}
	owner := &m.flows[number]
	if atomic.LoadUint32(&owner.State)&of != there {
		return s, false
	}
	key, other := packetKey(owner), atomic.LoadUint32(&owner.Other)
	if int(other) >= len(m.flows) {
		return s, false
	}
	peer := &m.flows[other]
	s.owner, s.peer = *owner, *peer
	first, second := m.details[number], m.details[other]
	s.rule, s.created = first.Rule, first.Created
	s.packets = [2]uint64{flowPackets(&s.owner, uint16(second.Created)), flowPackets(&s.peer, uint16(second.Created>>16))}
	whole = atomic.LoadUint32(&owner.State)&of == there && packetKey(owner) == key && packetKey(&s.owner) == key &&
		atomic.LoadUint32(&owner.Other) == other && s.peer.Other == number && s.peer.State&there == made
	return s, whole
}

// packetKey is the key of a flow as packets have it.
func packetKey(flow *abiNatFlow) abiNatFlowKey {
	key := flow.Key
	key.Link = 0
	return key
}

// flowPackets is flow_packets of bpf/nat/flows.h.
func flowPackets(flow *abiNatFlow, carried uint16) uint64 {
	carries := uint64(carried)
	if uint32(carried&1) != flow.Packets>>31 {
		carries++
	}
	return carries>>1<<32 | uint64(flow.Packets)
}

// session is what the owner's flow and its rule say.
func (e *Engine) session(flow *abiNatFlow, rule uint32) rulefile.Session {
	key := &flow.Key
	s := rulefile.Session{
		Protocol: rulefile.Protocol(key.Protocol), From: "inside", Rule: rulefile.RuleID(rule),
		Source: snapshot.EndpointOf(endpoint(key.Src, key.Sport)), Destination: snapshot.EndpointOf(endpoint(key.Dst, key.Dport)),
		SourceAfter: snapshot.EndpointOf(endpoint(flow.Src, flow.Sport)), DestinationAfter: snapshot.EndpointOf(endpoint(flow.Dst, flow.Dport)),
		State:           rulefile.Timeout(flow.State & uint32(abiNatFlowStateNAT_FLOW_TIMEOUT)).String(),
		SourceInterface: e.ZoneName(key.Zone), DestinationInterface: e.ZoneName(zoneTo(flow)),
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
	} else {
		other.Zone = zoneTo(flow)
	}
	return other
}

func endpoint(a abiNatAddr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(a.Octet), bits.ReverseBytes16(port))
}

// Stats reads the counters, summed over CPUs.
func (e *Engine) Stats() (*rulefile.Stats, error) {
	perCPU, packets, err := e.counters()
	if err != nil {
		return nil, err
	}
	s := &rulefile.Stats{Reasons: packets}
	for _, c := range perCPU {
		s.BytesIn += c.BytesIn
		s.BytesOut += c.BytesOut
		s.GCTime += snapshot.Seconds(c.GcNs)
		s.GCExamined += c.GcExamined
		s.EventsLost += c.EventsLost
	}
	sessions, mappings := InUse(packets)
	s.Sessions, s.Mappings = int(sessions), int(mappings)
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return nil, fmt.Errorf("read the time of the last garbage collection: %w", err)
	}
	s.GCAge = snapshot.Seconds(sinceTick(clock(), control.GcRan))
	if s.Explicit, err = e.LeaseCount(); err != nil {
		return nil, fmt.Errorf("count explicit mappings: %w", err)
	}
	return s, nil
}

// Packets reads the counters of packets alone, summed over CPUs.
func (e *Engine) Packets() (map[string]uint64, error) {
	_, packets, err := e.counters()
	return packets, err
}

// InUse says how many sessions and mappings there are by the counters of packets. Those of an end may be read before those
// of its beginning.
func InUse(packets map[string]uint64) (sessions, mappings uint64) {
	since := func(began, ended string) uint64 { return packets[began] - min(packets[began], packets[ended]) }
	return since("created", "expired"), since("mapped", "unmapped")
}

// counters reads those of each CPU, and those of packets summed over all.
func (e *Engine) counters() (perCPU []abiNatStats, packets map[string]uint64, err error) {
	if err := e.m.Stats.Lookup(uint32(0), &perCPU); err != nil {
		return nil, nil, fmt.Errorf("read counters: %w", err)
	}
	packets = map[string]uint64{}
	for _, c := range perCPU {
		for reason, n := range c.Packets {
			packets[rulefile.Reason(reason).String()] += n
		}
	}
	return perCPU, packets, nil
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
