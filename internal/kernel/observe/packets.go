// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// PacketEnd is one end of the connections to follow. The zero value is any.
type PacketEnd struct {
	Addresses netip.Prefix
	Port      uint16
}

// PacketFilter says which connections to follow: those between A and B, in either direction. A
// connection is found by its first packet that matches and followed by its tuples from there on.
type PacketFilter struct {
	A, B     PacketEnd
	Port     uint16 // of either end
	Protocol uint8
	Netns    uint64 // where the matching packet is seen; 0: anywhere
	Ifindex  uint32 // in that namespace
	Rate     uint32 // packets in a second that are followed at most; more are counted
}

// Packets follows packets, from Attach until Detach or Close. Read is for one goroutine.
type Packets struct {
	objs       packetsObjects
	hooks      bool                   // the kernel has programs of that type
	onDevice   bool                   // the filter names an interface
	links      []link.Link            // of tracepoints
	hung       map[uint64][]link.Link // on the hooks of a namespace
	reader     *ringbuf.Reader
	reasons    reasons
	symbols    *symbols
	namespaces *namespaces
	places     map[placeKey][]int // priorities of the checkpoints, in their order
	passes     map[uint64]pass    // packets in a hook
	lacking    []Missing          // of this kernel
	missing    []Missing          // where it is attached
	looks      map[uint64]*look
	// hangs puts programs on the hooks of the calling thread's namespace.
	hangs func(HookedPlace, []snapshot.Hook) error
}

// HookedPlace is a namespace in which something hangs on the hooks of netfilter.
type HookedPlace struct {
	netns.Place
	NFTables, Legacy bool // whose rules are there
	Tracks4, Tracks6 bool // connection tracking is on, of IPv4 and of IPv6
	NAT4, NAT6       bool // so is NAT
}

// Tracks says whether connection tracking is on in a namespace for connections of the filter.
func (f PacketFilter) Tracks(place HookedPlace) bool {
	return len(f.families(place.Tracks4, place.Tracks6)) > 0
}

// families are those that a namespace has and the filter may be about.
func (f PacketFilter) families(has4, has6 bool) (out []uint8) {
	four, known := f.family4()
	if has4 && (four || !known) {
		out = append(out, unix.NFPROTO_IPV4)
	}
	if has6 && (!four || !known) {
		out = append(out, unix.NFPROTO_IPV6)
	}
	return out
}

// family4 says whether the filter is about IPv4, if it is about one family.
func (f PacketFilter) family4() (four, known bool) {
	for _, end := range []PacketEnd{f.A, f.B} {
		if end.Addresses.IsValid() {
			return end.Addresses.Addr().Is4(), true
		}
	}
	return false, false
}

// Missing is a part of a trace that can't be seen, and where.
type Missing struct {
	Namespace string `json:"netns,omitempty"` // "" for the whole machine
	What      string `json:"what"`
	Why       string `json:"reason"`
}

type placeKey struct {
	netns        uint64
	family, hook uint8
}

// pass is a packet on its way through a hook: how many checkpoints it has met.
type pass struct {
	at   placeKey
	seen int
}

// maxPasses bounds what is remembered of packets that ended in a hook.
const maxPasses = 4096

// PacketCounts are totals since LoadPackets.
type PacketCounts struct {
	Packets uint64 // followed; a packet counts once in each namespace
	Capped  uint64 // matched, but beyond the rate
	Lost    uint64 // steps that found no room on their way to natkit
}

// LoadPackets loads the programs, which see nothing before Attach. The error wraps ErrUnavailable where the
// kernel does not allow it; what less than all is not possible is in Missing.
func LoadPackets(f PacketFilter) (*Packets, error) {
	kernel, opts, err := kernelTypes()
	if err != nil {
		return nil, err
	}
	if err := checkDropArguments(kernel); err != nil {
		return nil, refused(followPackets, err)
	}
	p := &Packets{onDevice: f.Ifindex != 0}
	p.clear()
	if p.reasons, err = loadReasons(kernel); err != nil {
		return nil, err
	}
	spec, err := loadPackets()
	if err != nil {
		return nil, err
	}
	if err := f.configure(spec); err != nil {
		return nil, err
	}
	if err := p.load(spec, opts); err != nil {
		p.Close()
		return nil, err
	}
	p.symbols, _ = kernelSymbols()
	return p, nil
}

// clear forgets where programs were attached, and what they saw there.
func (p *Packets) clear() {
	p.links, p.hung, p.missing = nil, map[uint64][]link.Link{}, nil
	p.places, p.passes, p.looks = map[placeKey][]int{}, map[uint64]pass{}, map[uint64]*look{}
	p.namespaces = newNamespaces()
}

// Begin has the programs follow packets of the filter: when Refresh has added what hangs on hooks, the first of them
// is seen on all of its path.
func (p *Packets) Begin() error {
	if err := p.objs.Begun.Set(uint32(1)); err != nil {
		return fmt.Errorf("%s: begin: %w", followPackets, err)
	}
	return nil
}

// Cross has the programs find a packet again that is sent from one namespace and, translated by an XDP program between them, received
// in another.
func (p *Packets) Cross() error {
	if err := p.objs.Crosses.Set(uint32(1)); err != nil {
		return fmt.Errorf("%s: behind XDP: %w", followPackets, err)
	}
	return nil
}

// Attach has the programs see packets. Refresh adds what hangs on hooks.
func (p *Packets) Attach() error {
	p.hangs = func(hooked HookedPlace, hooks []snapshot.Hook) error {
		for _, c := range checkpoints(hooks) {
			key := placeKey{hooked.Inode, c.family, c.hook}
			for i, priority := range c.priorities {
				program := p.objs.PacketHook
				if key.hook == uint8(link.NetfilterInetLocalOut) && i == 0 {
					program = p.objs.PacketMade
				}
				if err := p.hang(program, key, priority); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return p.trace(p.objs.PacketDropped, p.objs.PacketSent, p.objs.PacketQueued, p.objs.PacketReceived)
}

// Wait has the programs see only what costs the packets of established connections nothing: packets of the filter that are
// dropped, and, where Refresh adds it, new connections of a family that a namespace tracks and does not translate. For
// those that it translates, see OpenWaiting.
func (p *Packets) Wait() error {
	p.hangs = func(hooked HookedPlace, hooks []snapshot.Hook) error {
		for _, c := range checkpoints(hooks) {
			if tracks, nat := hooked.Tracks4, hooked.NAT4; c.family == unix.NFPROTO_IPV4 && (!tracks || nat) {
				continue
			}
			if tracks, nat := hooked.Tracks6, hooked.NAT6; c.family == unix.NFPROTO_IPV6 && (!tracks || nat) {
				continue
			}
			key := placeKey{hooked.Inode, c.family, c.hook}
			priority := conntrackPriority + 1
			switch link.NetfilterInetHook(c.hook) {
			case link.NetfilterInetPreRouting, link.NetfilterInetLocalOut:
			case link.NetfilterInetPostRouting: // where it is known which interface a packet leaves by
				if !p.onDevice {
					continue
				}
				priority = lastPriority
			default:
				continue
			}
			if err := p.hang(p.objs.PacketNew, key, priority); err != nil {
				return err
			}
		}
		return nil
	}
	return p.trace(p.objs.PacketLost)
}

// trace attaches tracing programs.
func (p *Packets) trace(programs ...*ebpf.Program) error {
	for _, program := range programs {
		l, err := link.AttachTracing(link.TracingOptions{Program: program})
		if err != nil {
			return refused(followPackets, err)
		}
		p.links = append(p.links, l)
	}
	return nil
}

// Detach has the programs see nothing. Counts go on.
func (p *Packets) Detach() error {
	errs := p.unhook()
	p.clear()
	// Of the packets that are under way nothing more is known.
	return errors.Join(append(errs, p.objs.Followed.Set(make([]uint64, p.objs.Followed.Size()/8)))...)
}

// unhook takes the programs from wherever they are attached.
func (p *Packets) unhook() (errs []error) {
	for inode := range p.hung {
		errs = append(errs, p.leave(inode))
	}
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	return errs
}

// leave takes the programs from the hooks of a namespace.
func (p *Packets) leave(inode uint64) error {
	var errs []error
	for _, l := range p.hung[inode] {
		errs = append(errs, l.Close())
	}
	delete(p.hung, inode)
	maps.DeleteFunc(p.places, func(key placeKey, _ []int) bool { return key.netns == inode })
	return errors.Join(errs...)
}

// Forget has the programs follow no connection but those that they find from now on. It is for a time in which
// they are detached.
func (p *Packets) Forget() error {
	var c packetsCounts
	if err := p.objs.Counts.Get(&c); err != nil {
		return fmt.Errorf("%s: read counts: %w", followPackets, err)
	}
	c.Tuples = 0
	if err := p.objs.Counts.Set(c); err != nil {
		return fmt.Errorf("%s: write counts: %w", followPackets, err)
	}
	var key packetsPacketTuple
	for p.objs.Tuples.NextKey(nil, &key) == nil {
		if err := p.objs.Tuples.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("%s: forget connections: %w", followPackets, err)
		}
	}
	return nil
}

const followPackets = "follow packets"

// load loads the programs, those at netfilter hooks only where the kernel has that type.
func (p *Packets) load(spec *ebpf.CollectionSpec, opts ebpf.ProgramOptions) error {
	err := spec.LoadAndAssign(&p.objs, &ebpf.CollectionOptions{Programs: opts})
	if err != nil && spec.Programs["packet_hook"] != nil {
		refusal := refused("watch "+insideHooks, err)
		var some struct {
			packetsMaps
			packetsVariables
			PacketDropped  *ebpf.Program `ebpf:"packet_dropped"`
			PacketLost     *ebpf.Program `ebpf:"packet_lost"`
			PacketQueued   *ebpf.Program `ebpf:"packet_queued"`
			PacketReceived *ebpf.Program `ebpf:"packet_received"`
			PacketSent     *ebpf.Program `ebpf:"packet_sent"`
		}
		if spec.LoadAndAssign(&some, &ebpf.CollectionOptions{Programs: opts}) != nil {
			return refused(followPackets, err)
		}
		p.objs = packetsObjects{packetsMaps: some.packetsMaps, packetsVariables: some.packetsVariables}
		p.objs.PacketDropped, p.objs.PacketQueued = some.PacketDropped, some.PacketQueued
		p.objs.PacketReceived, p.objs.PacketSent = some.PacketReceived, some.PacketSent
		p.objs.PacketLost = some.PacketLost
		p.lacking = append(p.lacking, Missing{What: "packets between the functions of a netfilter hook (needs Linux 6.4 and CONFIG_NETFILTER_BPF_LINK)", Why: refusal.Error()})
	}
	p.hooks = p.objs.PacketHook != nil
	if p.reader, err = ringbuf.NewReader(p.objs.Steps); err != nil {
		return fmt.Errorf("%s: %w", followPackets, err)
	}
	return nil
}

// configure writes the filter into the program's constants.
func (f PacketFilter) configure(spec *ebpf.CollectionSpec) error {
	var vars packetsVariableSpecs
	if err := spec.Assign(&vars); err != nil {
		return err
	}
	if f.Netns > math.MaxUint32 {
		return fmt.Errorf("%s: %d is not the inode of a network namespace", followPackets, f.Netns)
	}
	k := packetsPacketFilter{
		A_port: swap16(f.A.Port), B_port: swap16(f.B.Port), Port: swap16(f.Port),
		Protocol: f.Protocol, Netns: uint32(f.Netns), Ifindex: f.Ifindex, Rate: f.Rate,
	}
	for _, end := range []struct {
		prefix        netip.Prefix
		address, mask *[16]uint8
	}{{f.A.Addresses, &k.A, &k.A_mask}, {f.B.Addresses, &k.B, &k.B_mask}} {
		if !end.prefix.IsValid() {
			continue
		}
		k.Family = unix.AF_INET6
		if end.prefix.Addr().Is4() {
			k.Family = unix.AF_INET
		}
		copy(end.address[:], end.prefix.Masked().Addr().AsSlice())
		for i := range end.prefix.Bits() {
			end.mask[i/8] |= 0x80 >> (i % 8)
		}
	}
	return vars.Filter.Set(k)
}

// look is how often a namespace without hooks is looked at again: often when it is new, rarely later.
type look struct {
	by    reference
	done  bool // it is attached to, or can't be
	next  time.Time
	pause time.Duration
}

// reference is what leads to a namespace. The number of one that has gone is soon that of another, which something else
// leads to; one that natkit is attached to keeps its number.
type reference struct {
	ref     string
	process int
	cookie  uint64 // of one with no process
}

func referenceOf(place netns.Place) reference {
	r := reference{ref: place.Ref}
	if len(place.Processes) > 0 {
		r.process = place.Processes[0]
		return r
	}
	if h, err := netns.Open(place.Ref); err == nil {
		defer h.Close()
		id, _ := h.ID() // without it the name must do
		r.cookie = id.Cookie
	}
	return r
}

const (
	firstLookAgain = time.Second
	lastLookAgain  = time.Minute
)

// Refresh looks for namespaces in which something hangs on the hooks, and puts programs there. It returns those that it did not
// know: all at first, later those that were made or got rules since; and those that nothing leads to any more, which the
// programs have left: a namespace lasts as long as something hangs on its hooks.
func (p *Packets) Refresh() (added []HookedPlace, gone []uint64) {
	lister := OpenHooks()
	defer lister.Close()
	all, err := netns.All()
	if err != nil {
		p.missing = append(p.missing, Missing{What: insideHooks, Why: err.Error()})
		return nil, nil
	}
	there, now := map[uint64]bool{}, time.Now()
	for _, place := range all {
		there[place.Inode] = true
	}
	for inode := range p.looks {
		if !there[inode] {
			gone = append(gone, inode)
			delete(p.looks, inode)
			p.namespaces.forget(inode)
			_ = p.leave(inode) // with the namespace all of it goes
		}
	}
	for _, place := range all {
		l := p.looks[place.Inode]
		if l != nil && l.done {
			continue
		}
		if by := referenceOf(place); l == nil || l.by != by {
			if l != nil {
				p.namespaces.forget(place.Inode)
			}
			l = &look{by: by, pause: firstLookAgain}
			p.looks[place.Inode] = l
		}
		if now.Before(l.next) {
			continue
		}
		l.next, l.pause = now.Add(l.pause), min(2*l.pause, lastLookAgain)
		hooked, err := p.lookAt(lister, place)
		if err != nil {
			p.missing = append(p.missing, Missing{place.Ref, insideHooks, err.Error()})
		}
		if hooked != nil {
			added = append(added, *hooked)
		}
		l.done = err != nil || hooked != nil
	}
	return added, gone
}

const insideHooks = "packets inside netfilter hooks"

// lookAt puts programs into a namespace if something hangs on its hooks; otherwise it returns nil.
func (p *Packets) lookAt(lister *HookLister, place netns.Place) (*HookedPlace, error) {
	h, err := netns.Open(place.Ref)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	hooks, err := lister.List(h)
	if err != nil || len(hooks) == 0 {
		return nil, err
	}
	hooked := &HookedPlace{Place: place}
	for _, hook := range hooks {
		hooked.NFTables = hooked.NFTables || hook.Owner == "nf_tables"
		hooked.Legacy = hooked.Legacy || hook.Owner == "iptables"
		if hook.Priority == conntrackPriority && strings.Contains(hook.Function, "conntrack") {
			hooked.Tracks4 = hooked.Tracks4 || hook.Family == familyName(unix.NFPROTO_IPV4)
			hooked.Tracks6 = hooked.Tracks6 || hook.Family == familyName(unix.NFPROTO_IPV6)
		}
		hooked.NAT4 = hooked.NAT4 || strings.HasPrefix(hook.Function, "nf_nat_ipv4_")
		hooked.NAT6 = hooked.NAT6 || strings.HasPrefix(hook.Function, "nf_nat_ipv6_")
	}
	if !p.hooks {
		return hooked, nil
	}
	return hooked, h.Do(func() error { return p.hangs(*hooked, hooks) })
}

// hang attaches a program to one hook of the calling thread's namespace.
func (p *Packets) hang(program *ebpf.Program, key placeKey, priority int) error {
	l, err := attachNear(link.NetfilterOptions{
		Program: program, ProtocolFamily: link.NetfilterProtocolFamily(key.family),
		Hook: link.NetfilterInetHook(key.hook), Priority: int32(priority),
	})
	if err != nil {
		return refused("watch "+insideHooks, err)
	}
	p.hung[key.netns] = append(p.hung[key.netns], l)
	p.places[key] = append(p.places[key], priority)
	return nil
}

// attachNear attaches at a priority, or beside it: no two programs may have the same, and another
// trace may have it.
func attachNear(o link.NetfilterOptions) (l link.Link, err error) {
	const traces = 16 // at once
	step := int32(1)
	if o.Priority == lastPriority || o.Priority == conntrackPriority-1 {
		step = -1
	}
	for range traces {
		if l, err = link.AttachNetfilter(o); !errors.Is(err, unix.EBUSY) {
			return l, err
		}
		o.Priority += step
	}
	return l, err
}

// checkpoint is where to look at packets on one hook.
type checkpoint struct {
	family, hook uint8
	priorities   []int
}

// First and last priority that a program may have.
const (
	firstPriority = math.MinInt32 + 1
	lastPriority  = math.MaxInt32 - 1
)

// NF_IP_PRI_CONNTRACK_DEFRAG and NF_IP_PRI_CONNTRACK.
const defragPriority, conntrackPriority = -400, -200

// checkpoints are the places where it shows what the functions of a hook do to a packet: behind
// connection tracking, where the entry is as it was before translation, and behind all that
// translates and filters. A function that is registered later comes before one of the same priority.
func checkpoints(hooks []snapshot.Hook) []checkpoint {
	var out []checkpoint
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		for number := range uint8(5) {
			c := checkpoint{family: family, hook: number}
			var raw, tracked, some bool
			for _, h := range hooks {
				if h.Family != familyName(family) || h.Hook != hookName(family, uint32(number)) || h.Via != "" {
					continue
				}
				some = true
				tracked = tracked || h.Priority == conntrackPriority
				raw = raw || h.Priority > defragPriority && h.Priority < conntrackPriority
			}
			if !some {
				continue
			}
			if number == uint8(link.NetfilterInetLocalOut) {
				c.priorities = append(c.priorities, firstPriority)
			}
			if raw {
				c.priorities = append(c.priorities, conntrackPriority-1)
			}
			if tracked {
				c.priorities = append(c.priorities, conntrackPriority+1)
			}
			c.priorities = append(c.priorities, lastPriority)
			out = append(out, c)
		}
	}
	return out
}

// Follow follows packets of a tuple, both directions, as if an entry had led there.
func (p *Packets) Follow(t snapshot.TraceTuple) error {
	for number := range uint8(255) {
		if protocolName(number) != t.Protocol {
			continue
		}
		for _, t := range []snapshot.TraceTuple{t, t.Turned()} {
			k := packetsPacketTuple{Family: unix.AF_INET6, Protocol: number}
			if t.Source.Addr().Is4() {
				k.Family = unix.AF_INET
			}
			copy(k.Src[:], t.Source.Addr().AsSlice())
			copy(k.Dst[:], t.Destination.Addr().AsSlice())
			if hasPorts(number) {
				k.Sport, k.Dport = swap16(t.Source.Port()), swap16(t.Destination.Port())
			}
			if err := p.objs.Tuples.Put(k, uint8(1)); err != nil {
				return fmt.Errorf("%s: %w", followPackets, err)
			}
		}
		return nil
	}
	return fmt.Errorf("%s: protocol %q is not known", followPackets, t.Protocol)
}

// Missing is what this trace can't see.
func (p *Packets) Missing() []Missing { return slices.Concat(p.lacking, p.missing) }

// packetsCounts is counts of packets.bpf.c.
type packetsCounts struct{ Packets, Capped, Lost, Second, InSecond, Tuples uint64 }

// Counts returns the totals.
func (p *Packets) Counts() (PacketCounts, error) {
	var c packetsCounts
	if err := p.objs.Counts.Get(&c); err != nil {
		return PacketCounts{}, fmt.Errorf("%s: read counts: %w", followPackets, err)
	}
	return PacketCounts{c.Packets, c.Capped, c.Lost}, nil
}

// Close detaches everything.
func (p *Packets) Close() error {
	errs := p.unhook()
	if p.reader != nil {
		errs = append(errs, p.reader.Close())
	}
	if p.objs.PacketReceived != nil {
		errs = append(errs, p.objs.Close())
	}
	return errors.Join(errs...)
}

// Read returns the next event; os.ErrDeadlineExceeded when there is none until then.
func (p *Packets) Read(until time.Time) (snapshot.TraceEvent, error) {
	p.reader.SetDeadline(until)
	record, err := p.reader.Read()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return snapshot.TraceEvent{}, os.ErrDeadlineExceeded
	}
	if err != nil {
		return snapshot.TraceEvent{}, fmt.Errorf("%s: %w", followPackets, err)
	}
	var s packetsPacketStep
	if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &s); err != nil {
		return snapshot.TraceEvent{}, fmt.Errorf("%s: %w", followPackets, err)
	}
	return p.event(&s), nil
}

var packetPoints = map[packetsPacketPoint]snapshot.TracePoint{
	packetsPacketPointPACKET_RECEIVED: snapshot.PointReceived,
	packetsPacketPointPACKET_MADE:     snapshot.PointMade,
	packetsPacketPointPACKET_HOOK:     snapshot.PointHook,
	packetsPacketPointPACKET_QUEUED:   snapshot.PointQueued,
	packetsPacketPointPACKET_SENT:     snapshot.PointSent,
	packetsPacketPointPACKET_DROPPED:  snapshot.PointDropped,
}

func (p *Packets) event(s *packetsPacketStep) snapshot.TraceEvent {
	inode := uint64(s.At.Netns)
	e := snapshot.TraceEvent{
		TimeNS: s.TimeNs, Source: snapshot.TraceTracepoint, Point: packetPoints[s.At.Point], Packet: s.Skb, CPU: s.Cpu,
		Netns: inode, Interface: p.namespaces.device(inode, s.At.Ifindex),
		Length: s.Length, Mark: s.Mark, Entry: s.entry(),
	}
	readHead(&e, slices.Clone(s.Packet[:min(int(s.Captured), len(s.Packet))]))
	var known bool
	if e.Namespace, known = p.namespaces.ref(inode); !known { // "" would be natkit's own
		e.Namespace = fmt.Sprintf("inode:%d", inode)
	}
	if s.In != 0 {
		e.In = p.namespaces.device(inode, s.In)
	}
	switch e.Point {
	case snapshot.PointMade, snapshot.PointHook:
		key := placeKey{inode, s.At.Family, s.At.Hook}
		e.Source, e.Family, e.Hook = snapshot.TraceHookBPF, familyName(s.At.Family), hookName(s.At.Family, uint32(s.At.Hook))
		e.Priority = p.priority(s.Skb, key)
	case snapshot.PointDropped:
		function, _ := p.symbols.function(s.At.Location)
		e.Drop = &snapshot.TraceDrop{Location: p.symbols.place(s.At.Location), Function: baseName(function), Reason: p.reasons.name(s.At.Reason)}
		if e.Drop.Function != "nf_hook_slow" { // there it depends on how far the packet had come
			e.Drop.Cause = causeOf(function, e.Drop.Reason, 0)
		}
		e.Drop.Tracking = p.tracksNext(s)
		delete(p.passes, s.Skb)
	default:
		delete(p.passes, s.Skb)
	}
	if e.Drop != nil {
		var class dropsDropClass
		if strings.Contains(e.Kind, "FIN") || strings.Contains(e.Kind, "RST") {
			class = dropsDropClassDROP_TCP_END
		}
		e.Drop.Benign = benign(e.Drop.Function, e.Drop.Reason, class)
	}
	if s.Route != 0 {
		function, _ := p.symbols.function(s.Route)
		e.Route = &snapshot.TraceRoute{Function: baseName(function), Interface: p.namespaces.device(inode, s.Out), Gateway: address(s.GwFamily, s.Gateway)}
	}
	return e
}

// priority is that of the checkpoint a packet has come to: they are met in their order.
func (p *Packets) priority(skb uint64, at placeKey) int {
	now := p.passes[skb]
	if now.at != at {
		now = pass{at: at}
	}
	if len(p.passes) >= maxPasses {
		clear(p.passes)
	}
	p.passes[skb] = pass{at, now.seen + 1}
	all := p.places[at]
	if len(all) == 0 {
		return 0
	}
	return all[now.seen%len(all)]
}

// tracksNext says whether connection tracking is what came behind the last checkpoint that a dropped
// packet had passed: before it rules may stand only where there is a checkpoint between.
func (p *Packets) tracksNext(s *packetsPacketStep) bool {
	now, met := p.passes[s.Skb]
	if !met {
		now.at = placeKey{uint64(s.At.Netns), unix.NFPROTO_IPV4, uint8(link.NetfilterInetPreRouting)}
		if swap16(s.Ethertype) == unix.ETH_P_IPV6 {
			now.at.family = unix.NFPROTO_IPV6
		}
	}
	all := p.places[now.at]
	return now.seen < len(all) && all[now.seen] == conntrackPriority+1
}

// entry is the packet's conntrack entry.
func (s *packetsPacketStep) entry() *snapshot.TraceEntry {
	if s.Ct == 0 {
		return nil
	}
	e := &snapshot.TraceEntry{
		ID: s.Ct, State: ctStates[uint32(s.Ctinfo)], IsReply: s.Ctinfo >= ctReply && s.Ctinfo != ctUntracked,
		Original: s.tuple(s.OrigSrc, s.OrigDst, s.OrigSport, s.OrigDport),
		Reply:    s.tuple(s.ReplySrc, s.ReplyDst, s.ReplySport, s.ReplyDport),
	}
	for bit, name := range ctStatuses {
		if s.CtStatus&(1<<bit) != 0 {
			e.Status = append(e.Status, name)
		}
	}
	e.Confirmed = slices.Contains(e.Status, "confirmed")
	return e
}

func (s *packetsPacketStep) tuple(src, dst [16]uint8, sport, dport uint16) snapshot.TraceTuple {
	family := uint8(unix.AF_INET)
	if swap16(s.Ethertype) == unix.ETH_P_IPV6 {
		family = unix.AF_INET6
	}
	var id uint16
	switch {
	case s.Protocol == unix.IPPROTO_ICMP, s.Protocol == unix.IPPROTO_ICMPV6:
		id = swap16(sport)
		fallthrough
	case !hasPorts(s.Protocol):
		sport, dport = 0, 0
	}
	return snapshot.TraceTuple{
		Protocol:    protocolName(s.Protocol),
		ID:          id,
		Source:      netip.AddrPortFrom(address(family, src), swap16(sport)),
		Destination: netip.AddrPortFrom(address(family, dst), swap16(dport)),
	}
}

func address(family uint8, b [16]uint8) netip.Addr {
	switch family {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(b[:4]))
	case unix.AF_INET6:
		return netip.AddrFrom16(b)
	}
	return netip.Addr{}
}

// readHead fills in what the packet says of itself. head begins at the network header, and may be
// cut anywhere.
func readHead(e *snapshot.TraceEvent, head []byte) {
	e.Head = head
	ethertype := uint16(unix.ETH_P_IP)
	if len(head) > 0 && head[0]>>4 == 6 {
		ethertype = unix.ETH_P_IPV6
	}
	t, transport, note, ok := parsePacket(ethertype, head)
	if !ok {
		return
	}
	e.Tuple, e.Text, e.Fragment = t.trace(transport), describe(ethertype, head), isFragment(head)
	sum := fnv.New64a()
	sum.Write([]byte{t.protocol})
	if ethertype == unix.ETH_P_IP {
		sum.Write(head[4:6]) // identification
	}
	switch {
	case note != "":
		e.Kind = note
	case t.protocol == unix.IPPROTO_TCP && len(transport) >= 14:
		e.Kind = tcpFlags(transport[13])
		sum.Write(transport[4:14]) // sequence numbers and flags
	case t.protocol == unix.IPPROTO_UDP && len(transport) >= 8:
		sum.Write(transport[4:6]) // length
	case (t.protocol == unix.IPPROTO_ICMP || t.protocol == unix.IPPROTO_ICMPV6) && len(transport) >= 8:
		e.Kind = fmt.Sprintf("type %d code %d", transport[0], transport[1])
		sum.Write(transport[:2])
		if !icmpError(t.protocol, transport[0]) {
			sum.Write(transport[6:8]) // sequence number: NAT changes the identifier
		} else if about, transport, _, ok := parsePacket(ethertype, transport[8:]); ok {
			tuple := about.trace(transport)
			e.About = &tuple
		}
	}
	e.Identity = sum.Sum64()
}

func (t tuple) trace(transport []byte) snapshot.TraceTuple {
	out := snapshot.TraceTuple{Protocol: protocolName(t.protocol), Source: t.src, Destination: t.dst}
	if len(transport) >= 6 && icmpQuery(t.protocol, transport[0]) {
		out.ID = binary.BigEndian.Uint16(transport[4:])
	}
	return out
}

// icmpQuery: the message is a query that has an identifier, or its reply.
func icmpQuery(protocol, kind uint8) bool {
	switch protocol {
	case unix.IPPROTO_ICMP:
		return kind == 0 || kind == 8 || kind >= 13 && kind <= 18
	case unix.IPPROTO_ICMPV6:
		return kind == 128 || kind == 129
	}
	return false
}

// icmpError: the message holds the head of the packet that it is about.
func icmpError(protocol, kind uint8) bool {
	if protocol == unix.IPPROTO_ICMPV6 {
		return kind < 128
	}
	return kind == 3 || kind == 5 || kind == 11 || kind == 12
}
