// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// LeaseRequest asks for an explicit mapping, or for its end.
type LeaseRequest struct {
	Inside   netip.AddrPort
	Remote   netip.AddrPort // whom it is for; the zero value: everybody
	Protocol uint8          // TCP or UDP
	Nonce    [12]byte       // proves who asks; ignored with Open
	Open     bool           // without a nonce: NAT-PMP
	In, Out  int            // interfaces: that the host is behind, and by which its packets leave
	Lifetime time.Duration
	Limit    int // explicit mappings of the subscriber, 0 as many as it likes
	// Outside is what is wanted: an address, a port, both or neither.
	Outside netip.AddrPort
	Strict  bool // that or none
	// Filters, if Restate, replace those of the mapping: who is let in. None: everybody.
	Filters []LeaseFilter
	Restate bool
}

// LeaseFilter lets in a remote prefix, from one port or (0) any.
type LeaseFilter struct {
	Prefix netip.Prefix
	Port   uint16
}

// LeaseFilters is how many filters a mapping may have.
const LeaseFilters = int(abiNatLimitNAT_LEASE_FILTERS)

// LeaseResult says what became of a request.
type LeaseResult uint32

// Results. Others are the reasons for which a packet would have been dropped.
const (
	LeaseDone         = LeaseResult(abiNatLeaseResultNAT_LEASE_DONE)
	LeaseNone         = LeaseResult(abiNatLeaseResultNAT_LEASE_NONE)         // to end: there is none
	LeaseNonce        = LeaseResult(abiNatLeaseResultNAT_LEASE_NONCE)        // another client's
	LeaseExternal     = LeaseResult(abiNatLeaseResultNAT_LEASE_EXTERNAL)     // the external endpoint can't be given
	LeaseQuota        = LeaseResult(abiNatLeaseResultNAT_LEASE_QUOTA)        // Limit
	LeaseStatic       = LeaseResult(abiNatLeaseResultNAT_LEASE_STATIC)       // a rule maps the host, and always does
	LeaseUntranslated = LeaseResult(abiNatLeaseResultNAT_LEASE_UNTRANSLATED) // no rule is about it
	LeaseUnsupported  = LeaseResult(abiNatLeaseResultNAT_LEASE_UNSUPPORTED)  // neither TCP nor UDP
)

// Reason is the drop reason that a result is, if it is one.
func (r LeaseResult) Reason() (rulefile.Reason, bool) {
	if r == LeaseDone || r >= LeaseNone {
		return 0, false
	}
	return rulefile.Reason(r), true
}

// leaseFrame is where the request lies in the packet of a test run.
const leaseFrame = 14

// Lease makes or extends an explicit mapping: outside is its external endpoint. On an address that
// drains there is no new one, and one that is there keeps its end: q.Lifetime becomes what is left. Requests are
// made one at a time. The calling thread must be in the engine's namespace.
func (e *Engine) Lease(q *LeaseRequest) (outside netip.AddrPort, result LeaseResult, err error) {
	return e.askLease(q, abiNatLeaseOpNAT_LEASE_MAKE)
}

// EndLease ends one; its port is in hold-down then, as that of any mapping without sessions.
func (e *Engine) EndLease(q *LeaseRequest) (LeaseResult, error) {
	_, result, err := e.askLease(q, abiNatLeaseOpNAT_LEASE_END)
	return result, err
}

// ReadyForLeases loads what makes and ends explicit mappings, so that the first request does not
// wait for it. The program is this process's and lasts as long as e: packets don't need it.
func (e *Engine) ReadyForLeases() error {
	if e.programs[leaseAsk] != nil {
		return nil
	}
	return e.load(e.Size(), []string{leaseAsk})
}

func (e *Engine) askLease(q *LeaseRequest, op abiNatLeaseOp) (netip.AddrPort, LeaseResult, error) {
	r := abiNatLeaseRequest{
		Key:      abiNatLeaseKey{Internal: abiNatMappingKey{Addr: octets(q.Inside.Addr()), Port: bigEndian(q.Inside.Port())}},
		Nonce:    q.Nonce,
		In:       uint32(q.In),
		Out:      uint32(q.Out),
		Ticks:    Ticks(q.Lifetime),
		Limit:    uint32(q.Limit),
		Protocol: q.Protocol,
		Op:       uint8(op),
	}
	if q.Remote.IsValid() {
		r.Key.Remote, r.Key.RemotePort = octets(q.Remote.Addr()), bigEndian(q.Remote.Port())
	}
	if q.Outside.Addr().IsValid() {
		r.External = octets(q.Outside.Addr())
	}
	r.ExternalPort = bigEndian(q.Outside.Port())
	if q.Strict {
		r.Flags |= uint32(abiNatLeaseRequestFlagNAT_LEASE_STRICT)
	}
	if q.Open {
		r.Flags |= uint32(abiNatLeaseRequestFlagNAT_LEASE_NO_NONCE)
	}
	if q.Restate {
		r.Flags |= uint32(abiNatLeaseRequestFlagNAT_LEASE_RESTATE)
	}
	for i, f := range q.Filters[:min(len(q.Filters), LeaseFilters)] {
		r.Filter[i] = abiNatLeaseFilter{Addr: octets(f.Prefix.Addr()), Port: bigEndian(f.Port), Used: 1}
		binary.BigEndian.PutUint32(r.Filter[i].Mask.Octet[:], ^(1<<(32-f.Prefix.Bits()) - 1))
		if f.Port != 0 {
			r.Filter[i].PortMask = 0xffff
		}
		r.Filters++
	}
	data := make([]byte, leaseFrame, leaseFrame+binary.Size(r))
	data, err := binary.Append(data, binary.NativeEndian, &r)
	if err != nil {
		return netip.AddrPort{}, 0, err
	}
	if err := e.ReadyForLeases(); err != nil {
		return netip.AddrPort{}, 0, err
	}
	back := make([]byte, len(data))
	result, err := e.run(leaseAsk, &ebpf.RunOptions{Data: data, DataOut: back})
	if err != nil {
		return netip.AddrPort{}, 0, fmt.Errorf("ask for an explicit mapping: %w", err)
	}
	if _, err := binary.Decode(back[leaseFrame:], binary.NativeEndian, &r); err != nil {
		return netip.AddrPort{}, 0, err
	}
	if op == abiNatLeaseOpNAT_LEASE_MAKE && LeaseResult(result) == LeaseDone {
		e.leases.add(&r.Key, time.Now())
	}
	if r.Ticks < Ticks(q.Lifetime) {
		q.Lifetime = time.Duration(r.Ticks) << uint(abiNatLimitNAT_TICK_SHIFT)
	}
	return endpoint(r.External, r.ExternalPort), LeaseResult(result), nil
}

// Lease is an explicit mapping as it is.
type Lease struct {
	Protocol uint8
	Inside   netip.AddrPort
	Zone     uint8          // of Inside: Engine.Zone
	Remote   netip.AddrPort // the zero value: everybody, or whom Filters have
	Outside  netip.AddrPort
	Nonce    [12]byte
	Open     bool
	Left     time.Duration // until it expires; not positive: GC has not come by yet
	Filters  []LeaseFilter
}

// Leases calls fn with every explicit mapping until it returns false. Those that come or go
// during the call may be missed.
func (e *Engine) Leases(fn func(*Lease) bool) error {
	now := clock()
	return eachEntry(e.m.Leases, func(key *abiNatLeaseKey, l *abiNatLease) bool {
		if l.Expires == 0 {
			return true
		}
		return fn(leaseOf(key, l, now))
	})
}

// leaseIndex has the keys of leases by host, for LeasesOf: all that there were when it was made, and
// those that this process has made since. Some of them have ended since.
type leaseIndex struct {
	made time.Time
	keys map[leaseHost]map[abiNatLeaseKey]struct{} // nil: it is not made
}

type leaseHost struct {
	addr abiNatAddr
	zone uint8
}

// leaseIndexAge is after how long it is made again, without those that have ended.
const leaseIndexAge = time.Minute

// add adds a lease, if there is an index.
func (x *leaseIndex) add(key *abiNatLeaseKey, now time.Time) {
	if now.Sub(x.made) > leaseIndexAge {
		x.keys = nil
	}
	if x.keys == nil {
		return
	}
	host := leaseHost{key.Internal.Addr, key.Internal.Zone}
	if x.keys[host] == nil {
		x.keys[host] = map[abiNatLeaseKey]struct{}{}
	}
	x.keys[host][*key] = struct{}{}
}

// LeasesOf gives the explicit mappings of a host in a zone that Lease of this Engine has made, or
// that were there before. It looks at those of everybody once a minute at most. Like Lease it is for
// one caller at a time.
func (e *Engine) LeasesOf(host netip.Addr, zone uint8) (out []*Lease, err error) {
	x, now := &e.leases, time.Now()
	if x.keys == nil || now.Sub(x.made) > leaseIndexAge {
		*x = leaseIndex{made: now, keys: map[leaseHost]map[abiNatLeaseKey]struct{}{}}
		err := eachEntry(e.m.Leases, func(key *abiNatLeaseKey, _ *abiNatLease) bool { x.add(key, now); return true })
		if err != nil {
			x.keys = nil
			return nil, err
		}
	}
	keys := x.keys[leaseHost{octets(host), zone}]
	for key := range keys {
		var l abiNatLease
		err := e.m.Leases.Lookup(&key, &l)
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && l.Expires == 0:
			delete(keys, key)
		case err != nil:
			return nil, fmt.Errorf("read an explicit mapping: %w", err)
		default:
			out = append(out, leaseOf(&key, &l, clock()))
		}
	}
	return out, nil
}

// FindLease gives the explicit mapping of an internal endpoint in a zone, of whatever pool; nil: there is
// none.
func (e *Engine) FindLease(inside, remote netip.AddrPort, protocol, zone uint8) (*Lease, error) {
	key := abiNatLeaseKey{Internal: abiNatMappingKey{
		Addr: octets(inside.Addr()), Port: bigEndian(inside.Port()), Class: uint8(abiNatClassNAT_UDP), Zone: zone,
	}}
	if protocol == unix.IPPROTO_TCP {
		key.Internal.Class = uint8(abiNatClassNAT_TCP)
	}
	if remote.IsValid() {
		key.Remote, key.RemotePort = octets(remote.Addr()), bigEndian(remote.Port())
	}
	for pool := range uint32(abiNatLimitNAT_MAX_POOLS) + 1 {
		key.Internal.Pool = uint8(pool)
		var l abiNatLease
		err := e.m.Leases.Lookup(&key, &l)
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && l.Expires == 0 {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read an explicit mapping: %w", err)
		}
		return leaseOf(&key, &l, clock()), nil
	}
	return nil, nil
}

// leaseTick is the unit of time in a lease.
const leaseTick = time.Duration(1) << uint(abiNatLimitNAT_TICK_SHIFT)

func leaseOf(key *abiNatLeaseKey, l *abiNatLease, now uint32) *Lease {
	out := &Lease{
		Protocol: l.Protocol, Inside: endpoint(key.Internal.Addr, key.Internal.Port), Zone: key.Internal.Zone, Outside: endpoint(l.External, l.ExternalPort),
		Nonce: l.Nonce, Open: l.Flags&uint32(abiNatLeaseFlagNAT_LEASE_OPEN) != 0,
		Left: time.Duration(int32(l.Expires-now)) * leaseTick,
	}
	if key.Remote != (abiNatAddr{}) {
		out.Remote = endpoint(key.Remote, key.RemotePort)
	}
	if l.Flags&uint32(abiNatLeaseFlagNAT_LEASE_FILTERED) == 0 {
		return out
	}
	for _, f := range l.Filters {
		if f.Used != 0 {
			out.Filters = append(out.Filters, LeaseFilter{netip.PrefixFrom(netip.AddrFrom4(f.Addr.Octet), bits.OnesCount32(binary.BigEndian.Uint32(f.Mask.Octet[:]))), bigEndian(f.Port)})
		}
	}
	return out
}

// LeaseCount is how many explicit mappings there are.
func (e *Engine) LeaseCount() (n int, err error) {
	err = eachEntry(e.m.LeaseCounts, func(_ *abiNatSourceKey, have *uint32) bool { n += int(*have); return true })
	return n, err
}

func (e *Engine) leaseState() (s abiNatLeaseState, err error) {
	if err = e.m.LeaseState.Lookup(uint32(0), &s); err != nil {
		err = fmt.Errorf("read the state of explicit mappings: %w", err)
	}
	return s, err
}

// Epoch is the time since which no explicit mapping has ended before its time. It is as old as
// the maps, not as who asks. lost: it begins with this call, because there are new maps, or
// because mappings were lost since the last call.
func (e *Engine) Epoch() (age time.Duration, lost bool, err error) {
	s, err := e.leaseState()
	if err != nil {
		return 0, false, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, false, fmt.Errorf("read the clock: %w", err)
	}
	var have abiNatLeaseEpoch
	if err := e.m.LeaseEpoch.Lookup(uint32(0), &have); err != nil {
		return 0, false, fmt.Errorf("read the epoch of explicit mappings: %w", err)
	}
	if have.SinceNs != 0 && have.Lost == s.Lost {
		return time.Duration(now.Nano() - int64(have.SinceNs)), false, nil
	}
	have.SinceNs, have.Lost = uint64(now.Nano()), s.Lost
	if err := e.m.LeaseEpoch.Put(uint32(0), &have); err != nil {
		return 0, false, fmt.Errorf("write the epoch of explicit mappings: %w", err)
	}
	return 0, true, nil
}

// leaseOwner is the mapping that a lease holds.
type leaseOwner struct {
	class uint32
	pool  uint8
	zone  uint8
	at    netip.AddrPort
}

// explicit gives leases as they are shown, by mapping.
func (e *Engine) explicit() (map[leaseOwner][]rulefile.ExplicitMapping, error) {
	now, out := clock(), map[leaseOwner][]rulefile.ExplicitMapping{}
	err := eachEntry(e.m.Leases, func(key *abiNatLeaseKey, l *abiNatLease) bool {
		if l.Expires == 0 || l.Flags&uint32(abiNatLeaseFlagNAT_LEASE_SESSION) != 0 {
			return true
		}
		owner := leaseOwner{uint32(key.Internal.Class), key.Internal.Pool, key.Internal.Zone, endpoint(key.Internal.Addr, key.Internal.Port)}
		if l.Flags&uint32(abiNatLeaseFlagNAT_LEASE_WHOLE) != 0 {
			owner.class, owner.at = uint32(abiNatClassNAT_OTHER), netip.AddrPortFrom(owner.at.Addr(), 0)
		}
		out[owner] = append(out[owner], leaseOf(key, l, now).shown())
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("read explicit mappings: %w", err)
	}
	return out, nil
}

func (l *Lease) shown() rulefile.ExplicitMapping {
	out := rulefile.ExplicitMapping{By: "pcp", Left: snapshot.Seconds(max(l.Left, 0))}
	if l.Open {
		out.By = "nat-pmp"
	}
	if l.Remote.IsValid() {
		out.Remote = snapshot.EndpointOf(l.Remote)
	}
	for _, f := range l.Filters {
		text := f.Prefix.String()
		if f.Port != 0 {
			text = fmt.Sprintf("%s port %d", f.Prefix, f.Port)
		}
		out.Filters = append(out.Filters, text)
	}
	return out
}
