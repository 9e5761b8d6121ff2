// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Accelerator is the programs by which packets of the kernel's own NAT bypass the stack,
// in one network namespace. Like Engine it is not a process.
type Accelerator struct {
	engine *Engine // its maps, programs and pins
	m      accelTcMaps
}

// AccelOptions fix what an accelerator is.
type AccelOptions struct {
	AccelEntries int // directions of flows that it remembers
	// TCPTimeout is that of established connections, nf_conntrack_tcp_timeout_established.
	// 0: TCP is left alone, as it must be while connection tracking is strict about windows.
	TCPTimeout time.Duration
}

// Programs of an accelerator.
const (
	accelXDP    = "accel_xdp"
	accelTC     = "accel_tc"
	accelTCRest = "accel_tc_rest" // where XDP comes before it
	accelEgress = "accel_egress"
)

// accelTCPVariable is where the programs have AccelOptions.TCPTimeout.
const accelTCPVariable = "learn_tcp_milliseconds"

// MemoryBytes is what the table takes in the kernel, and its flow cache: struct learn_cached
// of bpf/accel/learn.h, by 1 << LEARN_CACHE_BITS.
func (o AccelOptions) MemoryBytes() int64 { return hashBytes(o.AccelEntries, 16, 64) + 64<<16 }

// CreateAccelerator makes an accelerator with these interfaces, pinned as dir, whole or not at
// all. Nothing is attached yet. The calling thread must be in the interfaces' namespace.
func CreateAccelerator(dir string, o AccelOptions, links []Link) (*Accelerator, error) {
	a, err := NewAccelerator(o, links)
	if err != nil {
		return nil, err
	}
	a.engine.dir = dir
	if err := a.engine.pin(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// NewAccelerator is CreateAccelerator without pins: it ends with Close or with the process.
func NewAccelerator(o AccelOptions, links []Link) (_ *Accelerator, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	a := &Accelerator{engine: &Engine{maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make accelerator: %w", err), a.Close())
		}
	}()
	for _, object := range accelObjects {
		spec, err := accelSpec(object, o)
		if err != nil {
			return nil, err
		}
		err = a.engine.loadSpec(object.name, spec)
		if errors.Is(err, ebpf.ErrNotSupported) {
			err = fmt.Errorf("this kernel's connection tracking can't be asked from XDP and tc (that needs Linux 6.1, CONFIG_DEBUG_INFO_BTF_MODULES where nf_conntrack is a module): %w", err)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := a.assign(); err != nil {
		return nil, err
	}
	if err := a.m.Control.Put(uint32(0), &abiNatControl{Abi: abi}); err != nil {
		return nil, err
	}
	for _, l := range links {
		if err := a.engine.putLink(l, nil); err != nil {
			return nil, fmt.Errorf("interface %s: %w", l.Name, err)
		}
	}
	return a, nil
}

// accelSpec is one of the accelerator's objects, with the options in it.
func accelSpec(object object, o AccelOptions) (*ebpf.CollectionSpec, error) {
	spec, err := object.load()
	if err != nil {
		return nil, err
	}
	if err := setClock(spec); err != nil {
		return nil, err
	}
	milliseconds := uint32(min(o.TCPTimeout.Milliseconds(), math.MaxUint32))
	if err := spec.Variables[accelTCPVariable].Set(milliseconds); err != nil {
		return nil, err
	}
	spec.Maps[accelTcMapAccelEntries].MaxEntries = uint32(o.AccelEntries)
	return spec, nil
}

// OpenAccelerator opens the one that is pinned as dir. The error is os.ErrNotExist when
// there is none, and an *ABIError when it is of another make.
func OpenAccelerator(dir string) (*Accelerator, error) {
	e, err := openPins(dir)
	if err != nil {
		return nil, err
	}
	a := &Accelerator{engine: e}
	if err := a.assign(); err != nil {
		return nil, errors.Join(fmt.Errorf("open accelerator: %w", err), a.Close())
	}
	return a, nil
}

func (a *Accelerator) assign() error { return a.engine.assign(&a.engine.common, &a.m) }

// Attach puts the programs on the interfaces: what sees packets leave before what keeps
// them from the stack. The calling thread must be in their namespace. xdp says on which
// XDP comes before tc; tc has nothing to do where XDP may send by every one of them.
func (a *Accelerator) Attach(links []Link, xdp func(Link) bool) error {
	rest := slices.ContainsFunc(links, func(l Link) bool { return !l.Transmit })
	for _, l := range links {
		if _, err := a.engine.attach(l.Name, l.Ifindex, HookEgress, accelEgress); err != nil {
			return err
		}
	}
	for _, l := range links {
		tc := accelTC
		if xdp(l) {
			tc = accelTCRest
		}
		if xdp(l) && !rest {
			continue
		}
		if _, err := a.engine.attach(l.Name, l.Ifindex, HookTC, tc); err != nil {
			return err
		}
	}
	for _, l := range links {
		if !xdp(l) {
			continue
		}
		if _, err := a.engine.attach(l.Name, l.Ifindex, HookXDP, accelXDP); err != nil {
			return err
		}
	}
	return nil
}

// MakeAccel distinguishes the programs of this natkit from those of another: a hash of its objects.
func MakeAccel() string { return hashOf(_AccelTcBytes, _AccelXdpBytes) }

// Close lets go of the accelerator. What is pinned works on.
func (a *Accelerator) Close() error { return a.engine.Close() }

// Capacity is how many fast-path entries it remembers.
func (a *Accelerator) Capacity() int { return int(a.m.AccelEntries.MaxEntries()) }

// Stats reads the counters, summed over CPUs, and counts the fast-path entries.
func (a *Accelerator) Stats() (*rulefile.AccelStats, error) {
	var perCPU []abiNatAccelStats
	if err := a.m.AccelStats.Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	s := &rulefile.AccelStats{Reasons: map[string]uint64{}}
	for _, c := range perCPU {
		for reason, n := range c.Packets {
			s.Reasons[rulefile.AccelReasons[reason].Name] += n
		}
		s.Bytes += c.Bytes
	}
	err := a.AccelEntries(func(c *rulefile.AccelEntry) bool {
		s.Known++
		if c.Valid {
			s.Valid++
		}
		return true
	})
	return s, err
}

// AccelEntries calls fn with every direction of a flow in the table until it returns false.
func (a *Accelerator) AccelEntries(fn func(*rulefile.AccelEntry) bool) error {
	now := clock()
	return eachEntry(a.m.AccelEntries, func(key *abiNatFlowKey, s *abiNatAccelEntry) bool {
		out := accelEntry(key, s, now)
		return fn(&out)
	})
}

// AccelEntry is the entry of packets with these ends, nil if there is none.
func (a *Accelerator) AccelEntry(protocol rulefile.Protocol, source, destination netip.AddrPort) (*rulefile.AccelEntry, error) {
	key, ok := keyOf(protocol, source, destination)
	if !ok {
		return nil, nil
	}
	var s abiNatAccelEntry
	err := a.m.AccelEntries.Lookup(&key, &s)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read a fast-path entry: %w", err)
	}
	out := accelEntry(&key, &s, clock())
	return &out, nil
}

func accelEntry(key *abiNatFlowKey, s *abiNatAccelEntry, now uint32) rulefile.AccelEntry {
	left := int32(s.Until - now)
	out := rulefile.AccelEntry{
		Protocol: rulefile.Protocol(key.Protocol), Packets: s.Packets,
		Source: snapshot.EndpointOf(endpoint(key.Src, key.Sport)), Destination: snapshot.EndpointOf(endpoint(key.Dst, key.Dport)),
		SourceAfter: snapshot.EndpointOf(endpoint(s.Src, s.Sport)), DestinationAfter: snapshot.EndpointOf(endpoint(s.Dst, s.Dport)),
		Valid: left > 0 && s.Reason == 0,
	}
	if s.Reason != 0 && left > 0 {
		out.Refused = rulefile.AccelReasons[s.Reason].Name
		out.SourceAfter, out.DestinationAfter = snapshot.Endpoint{}, snapshot.Endpoint{}
	}
	return out
}
