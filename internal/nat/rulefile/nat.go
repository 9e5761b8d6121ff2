// SPDX-License-Identifier: Apache-2.0

// Package rulefile is the language of natkit's NAT: the rule file with its rules, pools,
// defaults and limits, which rule a packet meets, and the words in which an engine
// reports what it did: sessions, mappings, reasons, events. It is pure: no engine, no
// kernel.
//
// A rule file is YAML; docs/rules.md explains every key. Which of several rules a
// packet meets does not depend on their order in the file (see Explain); two rules that
// would tie are refused by Parse.
package rulefile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// File is a rule file. Make one by Parse, or start from New.
type File struct {
	Name    string   // what messages call it
	Inside  []string // interfaces of internal hosts
	Outside []string // interfaces towards the world
	Pools   []Pool   // by name
	Rules   []Rule   // as in the file; the order means nothing

	Defaults    Defaults
	Limits      Limits
	Subscribers Subscribers
	Log         Log
	PCP         PCP

	positions map[string]Position // of everything but pools and rules, by key: "limits.sessions"
}

// New gives a file without interfaces and rules, with every default set.
func New() *File {
	return &File{
		Defaults: Defaults{
			Mapping:        PerClass[MappingMode]{EndpointIndependent, EndpointIndependent, EndpointIndependent},
			Filtering:      PerClass[FilteringMode]{FilterAddressAndPort, FilterAddressAndPort, FilterAddressAndPort},
			Timeouts:       DefaultTimeouts(),
			MSS:            MSSKeep,
			InboundRefresh: true,
		},
		Limits: DefaultLimits(),
	}
}

// Position is a place in a rule file, counted from 1; zero is unknown.
type Position struct {
	Line   int `json:"line"` // from 1
	Column int `json:"column"`
}

// Pool is a set of external addresses under a name.
type Pool struct {
	Name      string
	Addresses []AddressRange
	// Ports of each address that may be given to internal endpoints. Zero is DefaultPorts,
	// and on addresses of the gateway itself what is left beside its own ports.
	Ports PortRange
	// OneToOne is `ports: none`: an internal host gets an address of its own, with all
	// ports and protocols, for as long as it has sessions.
	OneToOne bool
	// Blocks: ports are given in blocks, each to one subscriber.
	Blocks Blocks
	// Drain are addresses of the pool that nothing new is given from; what there is goes on.
	Drain []AddressRange
	// Silent is `arp: none`: nobody answers for the addresses on a connected network.
	Silent   bool
	Position Position
}

// DefaultPorts are given where a rule file names none: the well-known ones are not.
var DefaultPorts = PortRange{1024, 65535}

// Count is the number of addresses.
func (p *Pool) Count() int {
	n := 0
	for _, r := range p.Addresses {
		n += r.Count()
	}
	return n
}

// Contains reports whether the pool has the address.
func (p *Pool) Contains(a netip.Addr) bool {
	for _, r := range p.Addresses {
		if r.Contains(a) {
			return true
		}
	}
	return false
}

// Pool gives the pool of that name, nil if there is none.
func (f *File) Pool(name string) *Pool {
	for i := range f.Pools {
		if f.Pools[i].Name == name {
			return &f.Pools[i]
		}
	}
	return nil
}

func (f *File) poolNames() (names []string) {
	for i := range f.Pools {
		names = append(names, f.Pools[i].Name)
	}
	return names
}

// AddressRange is IPv4 addresses from First to Last, both included.
type AddressRange struct{ First, Last netip.Addr }

// RangeOf gives the addresses of a prefix, all of them: those that are network and
// broadcast address on a link are addresses like others in a pool.
func RangeOf(p netip.Prefix) AddressRange {
	first := number(p.Masked().Addr())
	return AddressRange{p.Masked().Addr(), address(first | ^mask(p.Bits()))}
}

// Count is the number of addresses.
func (r AddressRange) Count() int { return int(number(r.Last)-number(r.First)) + 1 }

// At gives the address that is i behind the first.
func (r AddressRange) At(i int) netip.Addr { return address(number(r.First) + uint32(i)) }

// Contains reports whether a is in the range.
func (r AddressRange) Contains(a netip.Addr) bool {
	return a.Is4() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// Within is the part of the range that is in another, if there is one.
func (r AddressRange) Within(o AddressRange) (part AddressRange, ok bool) {
	part = AddressRange{r.First, r.Last}
	if part.First.Less(o.First) {
		part.First = o.First
	}
	if o.Last.Less(part.Last) {
		part.Last = o.Last
	}
	return part, !part.Last.Less(part.First)
}

// String writes an address, a prefix if the range is one, or first-last.
func (r AddressRange) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	if size := uint64(r.Count()); size&(size-1) == 0 && uint64(number(r.First))%size == 0 {
		bits := 32
		for ; size > 1; size >>= 1 {
			bits--
		}
		return netip.PrefixFrom(r.First, bits).String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// PortRange is ports from First to Last, both included. The zero value is no port.
type PortRange struct{ First, Last uint16 }

// IsZero reports whether no port is named.
func (r PortRange) IsZero() bool { return r == PortRange{} }

// Count is the number of ports.
func (r PortRange) Count() int {
	if r.IsZero() {
		return 0
	}
	return int(r.Last) - int(r.First) + 1
}

// Contains reports whether port is in the range.
func (r PortRange) Contains(port uint16) bool {
	return !r.IsZero() && r.First <= port && port <= r.Last
}

// Overlaps reports whether both have a port in common.
func (r PortRange) Overlaps(o PortRange) bool {
	return !r.IsZero() && !o.IsZero() && r.First <= o.Last && o.First <= r.Last
}

func (r PortRange) String() string {
	switch {
	case r.IsZero():
		return ""
	case r.First == r.Last:
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Protocol is an IP protocol number; AnyProtocol stands for all.
type Protocol uint8

// Protocols with names in a rule file. Others are written by number.
const (
	AnyProtocol Protocol = 0
	ICMP        Protocol = 1
	TCP         Protocol = 6
	UDP         Protocol = 17
	GRE         Protocol = 47
	ESP         Protocol = 50
	AH          Protocol = 51
	SCTP        Protocol = 132
	UDPLite     Protocol = 136
)

var protocolNames = map[Protocol]string{
	AnyProtocol: "any", ICMP: "icmp", TCP: "tcp", UDP: "udp", GRE: "gre", ESP: "esp", AH: "ah", SCTP: "sctp", UDPLite: "udplite",
}

func (p Protocol) String() string {
	if name := protocolNames[p]; name != "" {
		return name
	}
	return strconv.Itoa(int(p))
}

// MarshalText gives the name, or the number of a protocol that has none here.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText gives.
func (p *Protocol) UnmarshalText(text []byte) (err error) {
	*p, err = ParseProtocol(string(text))
	return err
}

// ParseProtocol reads a protocol's name or number.
func ParseProtocol(s string) (Protocol, error) {
	for p, name := range protocolNames {
		if s == name {
			return p, nil
		}
	}
	if n, err := strconv.ParseUint(s, 10, 8); err == nil && n > 0 && s[0] != '0' {
		return Protocol(n), nil
	}
	known := slices.Sorted(maps.Values(protocolNames))
	return 0, fmt.Errorf("unknown protocol %q: write any, tcp, udp, udplite, icmp, gre, esp, ah, sctp or a number from 1 to 255%s", s, didYouMean(s, known))
}

// HasPorts reports whether ports of the protocol can be translated.
func (p Protocol) HasPorts() bool { return p == TCP || p == UDP || p == UDPLite }

// Class is what shares a space of external ports (enum nat_class of bpf/nat/abi.h).
type Class uint8

// UDP-Lite lives in UDP's space. ICMP queries use their identifier as port. Every
// other protocol is ClassOther, and translated by address.
const (
	ClassTCP Class = iota
	ClassUDP
	ClassICMP
	ClassOther

	PortClasses = 3
)

// Class of a protocol.
func (p Protocol) Class() Class {
	switch p {
	case TCP:
		return ClassTCP
	case UDP, UDPLite:
		return ClassUDP
	case ICMP:
		return ClassICMP
	}
	return ClassOther
}

func (c Class) String() string { return [...]string{"tcp", "udp", "icmp", "other"}[c] }

// PerClass is a choice for each class that has ports, indexed by Class.
type PerClass[T comparable] [PortClasses]T

// MappingMode says when an internal endpoint keeps its external endpoint (RFC 4787,
// section 4.1). Zero in a rule is the file's default.
type MappingMode uint8

// Mapping modes.
const (
	EndpointIndependent     MappingMode = iota + 1 // whatever it sends to; RFC 4787 REQ-1
	AddressAndPortDependent                        // towards one remote endpoint
)

var mappingNames = []string{"", "endpoint-independent", "address-and-port-dependent"}

func (m MappingMode) String() string { return mappingNames[m] }

// FilteringMode says whom a mapping lets in (RFC 4787, section 5). Zero in a rule is
// the file's default.
type FilteringMode uint8

// Filtering modes.
const (
	FilterEndpointIndependent FilteringMode = iota + 1 // everybody
	FilterAddress                                      // addresses that the endpoint has sent to
	FilterAddressAndPort                               // endpoints that it has sent to
)

var filteringNames = []string{"", "endpoint-independent", "address-dependent", "address-and-port-dependent"}

func (m FilteringMode) String() string { return filteringNames[m] }

// MSSMode says what becomes of the maximum segment size that TCP's SYN packets offer.
// Zero in a rule is the file's default.
type MSSMode uint8

// MSS modes.
const (
	MSSKeep  MSSMode = iota + 1
	MSSClamp         // lowered to what fits the egress interface's MTU
)

var mssNames = []string{"", "keep", "clamp"}

func (m MSSMode) String() string { return mssNames[m] }

// Defaults hold for every rule that does not say otherwise, and for the whole file.
type Defaults struct {
	Mapping   PerClass[MappingMode]
	Filtering PerClass[FilteringMode]
	MSS       MSSMode
	// InboundRefresh: packets from outside keep a session alive too, not only those from
	// inside (RFC 4787 REQ-6 leaves it open; the kernel's NAT does).
	InboundRefresh bool
	// PortParity: an even port becomes an even one, an odd an odd (RFC 4787 REQ-4; RFC
	// 7857 lets it be off, which leaves twice the choice).
	PortParity bool
	Timeouts   Timeouts
}

// Timeout is a class of time-out (enum nat_timeout of bpf/nat/abi.h).
type Timeout uint8

// Time-outs: how long a session lives without a packet, and two that are not a session's.
const (
	TimeoutUDP            Timeout = iota
	TimeoutTCPOpening             // SYN of one side only
	TimeoutTCPEstablished         // SYN of both sides
	TimeoutTCPClosing             // FIN of both sides
	TimeoutTCPReset               // RST seen
	TimeoutICMP                   // queries
	TimeoutOther                  // protocols without ports
	TimeoutFragment               // how long the rest of a fragmented datagram is waited for
	TimeoutHoldDown               // how long an external port is in hold-down before another endpoint gets it

	timeoutCount
)

// Timeouts are durations by class.
type Timeouts [timeoutCount]time.Duration

// timeoutClass is what the rule file calls a time-out, and where its value comes from.
// Below minimum it gets a warning: the RFC forbids it.
type timeoutClass struct {
	key             string
	value           time.Duration
	minimum         time.Duration
	source          string
	setByTransitory bool
}

var timeoutClasses = [timeoutCount]timeoutClass{
	TimeoutUDP:            {key: "udp", value: 300 * time.Second, minimum: 120 * time.Second, source: "RFC 4787 REQ-5"},
	TimeoutTCPOpening:     {key: "tcp_opening", value: 240 * time.Second, minimum: 240 * time.Second, source: "RFC 5382 REQ-5", setByTransitory: true},
	TimeoutTCPEstablished: {key: "tcp_established", value: 7440 * time.Second, minimum: 7440 * time.Second, source: "RFC 5382 REQ-5"},
	TimeoutTCPClosing:     {key: "tcp_closing", value: 240 * time.Second, minimum: 240 * time.Second, source: "RFC 5382 REQ-5", setByTransitory: true},
	TimeoutTCPReset:       {key: "tcp_reset", value: 240 * time.Second, minimum: 240 * time.Second, source: "RFC 7857 section 2.2", setByTransitory: true},
	TimeoutICMP:           {key: "icmp", value: 60 * time.Second, minimum: 60 * time.Second, source: "RFC 5508 REQ-2"},
	TimeoutOther:          {key: "other", value: 300 * time.Second},
	TimeoutFragment:       {key: "fragment", value: 15 * time.Second},
	TimeoutHoldDown:       {key: "port_hold_down", value: 120 * time.Second, minimum: 120 * time.Second, source: "RFC 6888 REQ-8"},
}

func (t Timeout) String() string { return timeoutClasses[t].key }

// Bounds of a time-out. The engine's clock wraps after 52 days.
const (
	MinTimeout = time.Second
	MaxTimeout = 14 * 24 * time.Hour
)

// DefaultTimeouts are those that the RFCs ask for or recommend.
func DefaultTimeouts() Timeouts {
	var t Timeouts
	for i, class := range timeoutClasses {
		t[i] = class.value
	}
	return t
}

// Limits bound what an engine holds. All but the last two fix memory, and change only
// when the engine is created again.
type Limits struct {
	Sessions            int // at once
	Mappings            int // internal endpoints with an external port; 0 is as many as sessions
	Sources             int // internal hosts
	SessionsPerSource   int // of one internal host; 0 is no limit (RFC 6888 REQ-4)
	ICMPErrorsPerSecond int // that the engine itself sends, of all kinds together
}

// DefaultLimits are those of a file that names none.
func DefaultLimits() Limits {
	return Limits{Sessions: 262144, Sources: 65536, ICMPErrorsPerSecond: 100}
}

// MappingLimit is Mappings, or what stands for it.
func (l Limits) MappingLimit() int {
	if l.Mappings == 0 {
		return l.Sessions
	}
	return l.Mappings
}

// MappingMode that applies to a rule's sessions.
func (f *File) MappingMode(r *Rule, c Class) MappingMode {
	if m := r.Mapping[c]; m != 0 {
		return m
	}
	return f.Defaults.Mapping[c]
}

// FilteringMode that applies to a rule's sessions.
func (f *File) FilteringMode(r *Rule, c Class) FilteringMode {
	if m := r.Filtering[c]; m != 0 {
		return m
	}
	return f.Defaults.Filtering[c]
}

// ClampsMSS reports whether a rule's sessions have their MSS clamped.
func (f *File) ClampsMSS(r *Rule) bool {
	if r.MSS != 0 {
		return r.MSS == MSSClamp
	}
	return f.Defaults.MSS == MSSClamp
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

func mask(bits int) uint32 { return ^uint32(0) << (32 - bits) }

// nameOf finds a value by its name in a list such as mappingNames; 0 is not found.
func nameOf(names []string, s string) int {
	for i, name := range names {
		if i > 0 && name == s {
			return i
		}
	}
	return 0
}

func choices(names []string) string { return strings.Join(names[1:], " or ") }
