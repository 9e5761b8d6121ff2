// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
)

// LogBytes is the size of the ring of the log: 699 050 records, more than those of ten minutes of
// a thousand a second. Tests have smaller ones.
var LogBytes = 32 << 20

// logRecordBytes is what a record takes in the ring.
const logRecordBytes = ringHeader + int(unsafe.Sizeof(abiNatLogRecord{}))

const (
	logBlocks       = uint32(abiNatLogWhatNAT_LOG_BLOCKS)
	logLoose        = uint32(abiNatLogWhatNAT_LOG_LOOSE)
	logMappings     = uint32(abiNatLogWhatNAT_LOG_MAPPINGS)
	logSessions     = uint32(abiNatLogWhatNAT_LOG_SESSIONS)
	logDestinations = uint32(abiNatLogWhatNAT_LOG_DESTINATIONS)
	logLimits       = uint32(abiNatLogWhatNAT_LOG_LIMITS)
	logAsked        = uint32(abiNatLogWhatNAT_LOG_ASKED)
	// logHidden is natkit's alone: destinations tell one session from another, and are not to be kept.
	logHidden = uint32(1) << 31
)

// logWhat is what a rule file has recorded, as the maps have it; 0 is nothing.
func logWhat(record rulefile.LogRecord, destinations bool) (what uint32) {
	switch record {
	case rulefile.LogBlocks:
		what = logBlocks | logLoose | logLimits
	case rulefile.LogMappings:
		what = logBlocks | logMappings | logLimits
	case rulefile.LogSessions:
		what = logBlocks | logSessions | logLimits | logDestinations
	}
	if what != 0 && !destinations {
		what |= logHidden
	}
	return what
}

// Records tells whether the engine is to record something.
func (t *Tables) Records() bool { return t.Log != 0 }

// setLog has these recorded, in a ring that is made if there is none. Nothing that is in it is
// lost: what it has when nothing is recorded any more can be read until the reader closes it.
func (e *Engine) setLog(what uint32) (err error) {
	if what != 0 {
		if err := e.makeLogRing(); err != nil {
			return err
		}
	}
	state, unmap, err := e.logState()
	if err != nil {
		return err
	}
	atomic.StoreUint32(&state.Record, what)
	if what == 0 {
		if err := e.m.LogRings.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return errors.Join(fmt.Errorf("remove the ring of the log: %w", err), unmap())
		}
	}
	return unmap()
}

func (e *Engine) makeLogRing() error {
	var id ebpf.MapID
	if err := e.m.LogRings.Lookup(uint32(0), &id); err == nil {
		return nil
	} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("look for the ring of the log: %w", err)
	}
	specs, err := mapSpecs()
	if err != nil {
		return err
	}
	ring, err := makeInner(specs.LogRings, LogBytes)
	if err != nil {
		return fmt.Errorf("make the ring of the log: %w", err)
	}
	defer ring.Close()
	if err := e.m.LogRings.Put(uint32(0), ring); err != nil {
		return fmt.Errorf("make the ring of the log: %w", err)
	}
	return nil
}

// logState lays the state of the log open, to be read and written in place.
func (e *Engine) logState() (*abiNatLog, func() error, error) {
	b, err := unix.Mmap(e.m.LogStates.FD(), 0, int(unsafe.Sizeof(abiNatLog{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("read the state of the log: %w", err)
	}
	return (*abiNatLog)(unsafe.Pointer(&b[0])), func() error { return unix.Munmap(b) }, nil
}

// logRecorded is what is recorded now.
func (e *Engine) logRecorded() (uint32, error) {
	state, unmap, err := e.logState()
	if err != nil {
		return 0, err
	}
	return atomic.LoadUint32(&state.Record), unmap()
}

// nextLog is what is recorded by the rules to come: what they say, or, if that is nothing, what
// somebody who reads the log has asked for.
func (e *Engine) nextLog(t *Tables) (now, next uint32, err error) {
	now, err = e.logRecorded()
	if next = t.Log; next == 0 && now&logAsked != 0 {
		next = now
	}
	return now, next, err
}

// AskLog has the engine record, if its rules do not say what: natkit log does so. ForgetLog takes
// it back. began: nothing was recorded before.
func (e *Engine) AskLog(record rulefile.LogRecord, destinations bool) (began bool, err error) {
	now, err := e.logRecorded()
	if err != nil || now != 0 && now&logAsked == 0 {
		return false, err
	}
	return now == 0, e.setLog(logWhat(record, destinations) | logAsked)
}

// ForgetLog ends what AskLog has begun.
func (e *Engine) ForgetLog() error {
	now, err := e.logRecorded()
	if err != nil || now&logAsked == 0 {
		return err
	}
	return e.setLog(0)
}

// --- what began, ended or was refused ----------------------------------------------------

// LogKind is what a record is about.
type LogKind uint8

// Kinds.
const (
	LogNothing = LogKind(abiNatLogKindNAT_LOG_KIND_NONE)
	LogMapping = LogKind(abiNatLogKindNAT_LOG_KIND_MAPPING)
	LogSession = LogKind(abiNatLogKindNAT_LOG_KIND_SESSION)
	LogBlock   = LogKind(abiNatLogKindNAT_LOG_KIND_BLOCK)
)

// LogEvent is what happened.
type LogEvent uint8

// Events.
const (
	LogCreated   = LogEvent(abiNatLogEventNAT_LOG_CREATED)
	LogEnded     = LogEvent(abiNatLogEventNAT_LOG_ENDED)
	LogExhausted = LogEvent(abiNatLogEventNAT_LOG_EXHAUSTED)
	LogQuota     = LogEvent(abiNatLogEventNAT_LOG_QUOTA)
)

// LogKey is who had what: a beginning and its end have the same. It can be compared, and is small,
// because a million of them are held.
type LogKey struct {
	Internal, External, Destination                       [4]byte
	InternalPort, ExternalPort, LastPort, DestinationPort uint16
	Kind                                                  LogKind
	Protocol                                              uint8
	Zone                                                  uint8 // of Internal: Engine.ZoneName
}

// LogRecord is what a log's ring has. Times are in nanoseconds of CLOCK_MONOTONIC.
type LogRecord struct {
	LogKey
	Event    LogEvent
	Pool     uint8  // not known of sessions
	Reason   string // of LogExhausted and LogQuota
	Times    uint32 // of LogQuota: how often this subscriber was refused
	Time     uint64
	Since    uint64 // of LogEnded: about when it began; 0 not known
	Sequence uint32
}

// refusalNames are those of enum nat_refusal.
var refusalNames = [abiNatRefusalNAT_REFUSALS]string{
	abiNatRefusalNAT_REFUSED_SESSIONS: "source-limit", abiNatRefusalNAT_REFUSED_PORTS: "port-limit",
	abiNatRefusalNAT_REFUSED_RATE: "rate-limit", abiNatRefusalNAT_REFUSED_BLOCK: "no-block",
}

func logRecordOf(raw *abiNatLogRecord) LogRecord {
	r := LogRecord{Event: LogEvent(raw.What >> uint(abiNatLogLimitNAT_LOG_EVENT_SHIFT)), Time: raw.TimeNs, Sequence: raw.Sequence, Pool: raw.Pool}
	r.LogKey = LogKey{
		Internal: raw.Internal.Octet, External: raw.External.Octet, Destination: raw.Destination.Octet,
		InternalPort: bits.ReverseBytes16(raw.InternalPort), ExternalPort: bits.ReverseBytes16(raw.ExternalPort),
		LastPort: bits.ReverseBytes16(raw.LastPort), DestinationPort: bits.ReverseBytes16(raw.DestinationPort),
		Kind: LogKind(raw.What & (1<<uint(abiNatLogLimitNAT_LOG_EVENT_SHIFT) - 1)), Zone: raw.Zone,
	}
	switch r.Event {
	case LogExhausted:
		r.Reason = rulefile.Reason(raw.Protocol).String()
		return r
	case LogQuota:
		if int(raw.Protocol) < len(refusalNames) {
			r.Reason = refusalNames[raw.Protocol]
		}
		r.Times = raw.Age
		return r
	case LogEnded:
		if age := uint64(raw.Age) << uint(abiNatLimitNAT_TICK_SHIFT); age > 0 && age < r.Time {
			r.Since = r.Time - age
		}
	}
	r.Protocol = raw.Protocol
	return r
}

// --- the ring ------------------------------------------------------------------------------

// The form of a ring in memory: kernel/bpf/ringbuf.c.
const (
	ringHeader  = 8 // bytes before a record
	ringBusy    = 1 << 31
	ringDiscard = 1 << 30
)

// LogReader reads the log of an engine. What it has read is there for the next reader, too, until
// Release: who is killed before that loses nothing. One may read at a time.
type LogReader struct {
	e     *Engine
	state *abiNatLog
	unmap func() error
	ring  *logRing
}

// logRing is a ring that is open.
type logRing struct {
	id       ebpf.MapID
	ring     *ebpf.Map
	consumed *uint64 // position up to which records are released
	produced *uint64
	data     []byte
	at       uint64 // position up to which they are read
	mappings [][]byte
}

// OpenLog opens the log to be read. There may be nothing that is recorded yet.
func (e *Engine) OpenLog() (*LogReader, error) {
	r := &LogReader{e: e}
	var err error
	if r.state, r.unmap, err = e.logState(); err != nil {
		return nil, err
	}
	if err := r.reopen(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// reopen follows the engine to another ring.
func (r *LogReader) reopen() error {
	var id ebpf.MapID
	err := r.e.m.LogRings.Lookup(uint32(0), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil // what is open is read to its end
	}
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	if r.ring != nil && r.ring.id == id {
		return nil
	}
	ring, err := openLogRing(id)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	if r.ring != nil {
		err = r.ring.close()
	}
	r.ring = ring
	return err
}

func openLogRing(id ebpf.MapID) (_ *logRing, err error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, err
	}
	r := &logRing{id: id, ring: m}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	page, size := os.Getpagesize(), int(m.MaxEntries())
	consumer, err := unix.Mmap(m.FD(), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	r.mappings = append(r.mappings, consumer)
	producer, err := unix.Mmap(m.FD(), int64(page), page+2*size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	r.mappings = append(r.mappings, producer)
	r.consumed, r.produced = (*uint64)(unsafe.Pointer(&consumer[0])), (*uint64)(unsafe.Pointer(&producer[0]))
	r.data = producer[page:]
	r.at = atomic.LoadUint64(r.consumed)
	return r, nil
}

func (r *logRing) close() error {
	var errs []error
	for _, m := range r.mappings {
		errs = append(errs, unix.Munmap(m))
	}
	return errors.Join(append(errs, r.ring.Close())...)
}

// Read appends the records that follow those of the last Read, as far as they are whole, to out, up
// to its capacity.
func (r *LogReader) Read(out []LogRecord) ([]LogRecord, error) {
	for len(out) < cap(out) {
		if r.ring == nil || r.ring.at == atomic.LoadUint64(r.ring.produced) {
			had := r.ring
			if r.ring != nil && r.ring.at != atomic.LoadUint64(r.ring.consumed) {
				return out, nil // released first
			}
			if err := r.reopen(); err != nil || r.ring == had {
				return out, err
			}
			continue
		}
		raw, ok := r.ring.next()
		if !ok {
			break
		}
		if raw != nil {
			out = append(out, logRecordOf(raw))
		}
	}
	return out, nil
}

// next is the record at the reader's position, which it passes; nil is one that was given up. ok is
// false while it is being written.
func (r *logRing) next() (raw *abiNatLogRecord, ok bool) {
	at := r.data[r.at&uint64(r.ring.MaxEntries()-1):]
	head := atomic.LoadUint32((*uint32)(unsafe.Pointer(&at[0])))
	if head&ringBusy != 0 {
		return nil, false
	}
	length := head &^ ringDiscard
	r.at += uint64(roundUp8(int(length) + ringHeader))
	if head&ringDiscard != 0 || length != uint32(unsafe.Sizeof(abiNatLogRecord{})) {
		return nil, true
	}
	return (*abiNatLogRecord)(unsafe.Pointer(&at[ringHeader])), true
}

// Release gives the room of what was read back to packets.
func (r *LogReader) Release() {
	if r.ring != nil {
		atomic.StoreUint64(r.ring.consumed, r.ring.at)
	}
}

// Empty reports whether everything that there is was read.
func (r *LogReader) Empty() bool {
	return r.ring == nil || r.ring.at == atomic.LoadUint64(r.ring.produced)
}

// Next is the number that the next record will have.
func (r *LogReader) Next() uint32 { return atomic.LoadUint32(&r.state.Sequence) }

// LogLoss is records that found no room in the ring.
type LogLoss struct {
	Total       uint64 // since the engine was made
	First, Last uint64 // times of those since the last Recorded, CLOCK_MONOTONIC
}

// Lost is what was lost until now.
func (r *LogReader) Lost() LogLoss {
	return LogLoss{
		Total: atomic.LoadUint64(&r.state.Lost),
		First: atomic.LoadUint64(&r.state.LostFirstNs), Last: atomic.LoadUint64(&r.state.LostLastNs),
	}
}

// Recorded forgets when records were lost, up to that loss, which the reader has recorded.
func (r *LogReader) Recorded(l LogLoss) {
	atomic.CompareAndSwapUint64(&r.state.LostFirstNs, l.First, 0)
}

// Engine distinguishes an engine from any other, also of the same namespace.
func (r *LogReader) Engine() (string, error) {
	var control abiNatControl
	if err := r.e.m.Control.Lookup(uint32(0), &control); err != nil {
		return "", fmt.Errorf("read the engine's seed: %w", err)
	}
	return fmt.Sprintf("%016x", control.Seed[0]), nil
}

// What is recorded now: blocks and mappings, or mappings, or sessions; LogDefault is nothing. Records of
// sessions have their destinations in any case; destinations is whether they are to be kept.
func (r *LogReader) What() (record rulefile.LogRecord, destinations bool) {
	now := atomic.LoadUint32(&r.state.Record)
	destinations = now&logDestinations != 0 && now&logHidden == 0
	switch {
	case now&logSessions != 0:
		return rulefile.LogSessions, destinations
	case now&logMappings != 0:
		return rulefile.LogMappings, destinations
	case now&logBlocks != 0:
		return rulefile.LogBlocks, destinations
	}
	return rulefile.LogDefault, false
}

// Asked reports whether only AskLog has had it recorded: the rules do not say what.
func (r *LogReader) Asked() bool { return atomic.LoadUint32(&r.state.Record)&logAsked != 0 }

// Close lets go of the log, which packets go on to fill.
func (r *LogReader) Close() error {
	err := r.unmap()
	if r.ring != nil {
		err = errors.Join(err, r.ring.close())
	}
	return err
}

// --- what is alive ---------------------------------------------------------------------------

// Alive calls fn with all that is alive and recorded, as its end will have it, and since when: in
// nanoseconds of CLOCK_MONOTONIC, 0 where the engine does not know. What begins or ends during the
// call may be missed.
func (r *LogReader) Alive(fn func(LogKey, uint64)) error {
	now := atomic.LoadUint32(&r.state.Record)
	if now&logBlocks != 0 {
		if err := r.e.aliveBlocks(fn); err != nil {
			return err
		}
	}
	if now&(logMappings|logLoose) != 0 {
		if err := r.e.aliveMappings(now&logMappings == 0, fn); err != nil {
			return err
		}
	}
	if now&(logSessions|logMappings|logLoose) == 0 {
		return nil
	}
	return r.e.aliveSessions(now, fn)
}

// aliveBlocks gives the blocks of all addresses.
func (e *Engine) aliveBlocks(fn func(LogKey, uint64)) error {
	seen := map[[4]byte]bool{} // an address whose pool has grown has two indices
	return eachAddress(e.m.Addresses, func(index uint32, a *abiNatAddress) error {
		if seen[a.Addr.Octet] {
			return nil
		}
		there, err := e.blocksOf(index, func(b *abiNatBlocks) {
			for first := range b.Granules {
				g := &b.Granules[first]
				copied := *g
				if copied.Used == 0 || copied.SinceNs != atomic.LoadUint64(&g.SinceNs) {
					continue
				}
				port := uint16(first * granulePorts)
				fn(LogKey{
					Kind: LogBlock, Zone: copied.Zone, Internal: copied.Addr.Octet, External: a.Addr.Octet,
					ExternalPort: port, LastPort: port + uint16(granulePorts<<copied.Order) - 1,
				}, copied.SinceNs)
			}
		})
		seen[a.Addr.Octet] = there
		return err
	})
}

// eachAddress calls fn with the external addresses that an index leads to.
func eachAddress(m *ebpf.Map, fn func(index uint32, a *abiNatAddress) error) error {
	var failed error
	err := eachEntry(m, func(index *uint32, a *abiNatAddress) bool {
		if a.Addr.Octet != [4]byte{} {
			failed = fn(*index, a)
		}
		return failed == nil
	})
	return errors.Join(err, failed)
}

// protocolOf is the protocol of a class of ports; 0 is all of an address.
func protocolOf(class uint32) uint8 {
	return [...]uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, 0}[class&3]
}

func (e *Engine) aliveMappings(loose bool, fn func(LogKey, uint64)) error {
	inBlock := uint8(abiNatSlotHeldNAT_HELD_IN_BLOCK)
	return e.eachMapping(func(id slotID, outside netip.Addr, slot *abiNatSlot) bool {
		if loose && slot.Held&inBlock != 0 {
			return true
		}
		fn(LogKey{
			Kind: LogMapping, Zone: slot.Zone, Protocol: protocolOf(id.class()), Internal: slot.Addr.Octet, External: outside.As4(),
			InternalPort: bits.ReverseBytes16(slot.Port), ExternalPort: id.port(),
		}, 0)
		return true
	})
}

// aliveSessions gives sessions, or ports that sessions have without a mapping.
func (e *Engine) aliveSessions(what uint32, fn func(LogKey, uint64)) error {
	now, nowNs := clock(), monotonic()
	return e.eachSession(func(s *sessionCopy) bool {
		key, flow := &s.owner.Key, &s.owner
		since := nowNs - uint64(now-s.created)<<uint(abiNatLimitNAT_TICK_SHIFT)
		if what&logSessions != 0 {
			for _, k := range conversations(key, flow, what&logDestinations != 0) {
				fn(k, since)
			}
			return true
		}
		if flow.State&uint32(abiNatFlowStateNAT_FLOW_PORT) == 0 || what&logLoose != 0 && e.inBlock(flow) {
			return true
		}
		k := conversations(key, flow, false)
		if len(k) == 0 {
			return true
		}
		k[0].Kind = LogMapping
		if k[0].Protocol == protocolUDPLite {
			k[0].Protocol = unix.IPPROTO_UDP
		}
		fn(k[0], since)
		return true
	})
}

const protocolUDPLite = 136

// inBlock reports whether the external address of a session gives ports in blocks.
func (e *Engine) inBlock(flow *abiNatFlow) bool {
	var index uint32
	var a abiNatAddress
	return e.m.AddressIndices.Lookup(flow.Src, &index) == nil && e.m.Addresses.Lookup(index, &a) == nil && a.Block > 0
}

// conversations are the records of a session: log_session of bpf/nat/log.h.
func conversations(key *abiNatFlowKey, flow *abiNatFlow, destinations bool) (keys []LogKey) {
	add := func(zone uint8, internal abiNatAddr, internalPort uint16, external abiNatAddr, externalPort uint16, remote abiNatAddr, remotePort uint16) {
		k := LogKey{Kind: LogSession, Zone: zone, Protocol: key.Protocol, Internal: internal.Octet, External: external.Octet,
			InternalPort: bits.ReverseBytes16(internalPort), ExternalPort: bits.ReverseBytes16(externalPort)}
		if destinations {
			k.Destination, k.DestinationPort = remote.Octet, bits.ReverseBytes16(remotePort)
		}
		keys = append(keys, k)
	}
	query := key.Protocol == unix.IPPROTO_ICMP
	if key.Src != flow.Src || key.Sport != flow.Sport && !query {
		add(key.Zone, key.Src, key.Sport, flow.Src, flow.Sport, key.Dst, key.Dport)
	}
	if key.Dst == flow.Dst && key.Dport == flow.Dport {
		return keys
	}
	if query {
		add(zoneTo(flow), flow.Dst, flow.Sport, key.Dst, key.Sport, key.Src, 0)
	} else {
		add(zoneTo(flow), flow.Dst, flow.Dport, key.Dst, key.Dport, key.Src, key.Sport)
	}
	return keys
}

// --- how much is in use ------------------------------------------------------------------------

// SubscriberUse is what a subscriber has of what it may have; 0 is no limit.
type SubscriberUse struct {
	Subscriber, External netip.Addr // External is not valid for masquerade
	Pool, Zone           uint8
	Ports, MostPorts     int
	Blocks, MostBlocks   int
}

// AddressUse is how many ports of an external address are in use, or in blocks: of TCP or UDP, of
// which there are more.
type AddressUse struct {
	Address     netip.Addr
	Used, Total int
	Blocks      bool
}

// Use calls fn with every subscriber.
func (r *LogReader) Use(fn func(SubscriberUse)) error {
	config, err := r.e.config()
	if err != nil {
		return err
	}
	classes, err := r.e.limitsOfClasses()
	if err != nil {
		return err
	}
	return eachEntry(r.e.m.Sources, func(key *abiNatSourceKey, s *abiNatSource) bool {
		most := config.Limits
		if int(s.Class) < len(classes) && s.Class > 0 {
			most = classes[s.Class]
		}
		u := SubscriberUse{Subscriber: netip.AddrFrom4(key.Addr.Octet), Pool: s.Pool, Zone: s.Zone, MostPorts: int(most.Ports)}
		u.Ports = int(s.Use >> uint(abiNatUseNAT_USE_PORT_SHIFT) & uint64(abiNatUseNAT_USE_COUNT))
		for _, id := range s.Blocks {
			if id != 0 {
				u.Blocks++
			}
		}
		var a abiNatAddress
		if s.Placed != 0 && r.e.m.Addresses.Lookup(uint32(s.Address), &a) == nil {
			u.External = netip.AddrFrom4(a.Addr.Octet)
			if a.Block > 0 {
				u.MostBlocks = 1 + int(a.BlockMore)
			}
		}
		fn(u)
		return true
	})
}

// limitsOfClasses are those of the rules in use, by class.
func (e *Engine) limitsOfClasses() ([]abiNatLimits, error) {
	generation, err := e.Generation()
	if err != nil {
		return nil, err
	}
	var id ebpf.MapID
	if err := e.m.SubClasses.Lookup(generation%uint32(abiNatLimitNAT_GENERATIONS), &id); errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read the classes of subscribers: %w", err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, fmt.Errorf("read the classes of subscribers: %w", err)
	}
	defer m.Close()
	classes := make([]abiNatLimits, m.MaxEntries())
	for i := range classes {
		if err := m.Lookup(uint32(i), &classes[i]); err != nil {
			return nil, fmt.Errorf("read the classes of subscribers: %w", err)
		}
	}
	return classes, nil
}

// Addresses calls fn with every external address that gives ports.
func (r *LogReader) Addresses(fn func(AddressUse)) error {
	seen := map[[4]byte]bool{}
	return eachAddress(r.e.m.Addresses, func(index uint32, a *abiNatAddress) error {
		if a.PortCount == 0 || seen[a.Addr.Octet] {
			return nil
		}
		seen[a.Addr.Octet] = true
		u := AddressUse{Address: netip.AddrFrom4(a.Addr.Octet), Blocks: a.Block > 0}
		if u.Blocks {
			_, err := r.e.blocksOf(index, func(b *abiNatBlocks) {
				for g := range b.Given[rulefile.ClassTCP] {
					if b.Given[rulefile.ClassTCP][g] != 0 && b.Given[rulefile.ClassUDP][g] != 0 {
						u.Total += granulePorts
					}
				}
				u.Used = u.Total - int(atomic.LoadUint64(&b.Count))*granulePorts
			})
			fn(u)
			return err
		}
		free, err := r.e.FreePorts(int(index))
		if err != nil {
			return err
		}
		u.Total = int(a.PortCount)
		u.Used = u.Total - min(free[rulefile.ClassTCP], free[rulefile.ClassUDP])
		fn(u)
		return nil
	})
}

// LetGo closes what would keep an engine at work after its pins are gone: its programs and the
// timer of its garbage collection. It is for those who read only.
func (e *Engine) LetGo() error {
	err := closePrograms(e.programs)
	e.programs = nil
	if timers := e.maps[gcMapGcTimers]; timers != nil {
		err = errors.Join(err, timers.Close())
		delete(e.maps, gcMapGcTimers)
	}
	return err
}
