// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"net/netip"

	"natkit/internal/natlog"
)

// NAT events: values of information element 230 (RFC 8158, section 4.3). There are none for
// IPv6 on both sides: those are what RFC 8158 calls historic.
const (
	natCreate           = 1
	natDelete           = 2
	natAddressExhausted = 3
	nat44SessionCreate  = 4
	nat44SessionDelete  = 5
	nat64SessionCreate  = 6
	nat64SessionDelete  = 7
	nat44BIBCreate      = 8
	nat44BIBDelete      = 9
	nat64BIBCreate      = 10
	nat64BIBDelete      = 11
	natPortsExhausted   = 12
	natQuotaExceeded    = 13
	natBindingCreate    = 14
	natBindingDelete    = 15
	natBlockAllocate    = 16
	natBlockFree        = 17
	natThreshold        = 18
)

// quotaPerUser is the value of natQuotaExceededEvent for a limit of one subscriber.
const quotaPerUser = 3

// Values of natThresholdEvent: much of a pool, or of what one subscriber may have, is in use.
const (
	thresholdOfPool = 1
	thresholdOfUser = 4
)

// topic is what a record's template is made for.
type topic uint8

const (
	ofTranslation topic = iota
	ofBlock
	ofLimit // exhausted, quota
	ofGap
	ofThreshold // the approach of a limit
)

// family of an address: none, 4 or 6.
type family uint8

const (
	none family = iota
	four
	six
)

func familyOf(a netip.AddrPort) family {
	switch {
	case !a.IsValid():
		return none
	case a.Addr().Is4():
		return four
	}
	return six
}

// shape is what decides which fields a record has.
type shape struct {
	topic                           topic
	internal, external, destination family
	since, network, subscriber      bool
	pool, quota                     bool
}

func shapeOf(r *natlog.Record) shape {
	s := shape{internal: familyOf(r.Internal), external: familyOf(r.External), destination: familyOf(r.Destination),
		network: r.VLAN != 0 || r.Zone != 0, subscriber: r.Subscriber != ""}
	switch {
	case r.Event == natlog.Gap:
		return shape{topic: ofGap}
	case r.Nearly():
		s.topic, s.pool, s.quota = ofThreshold, r.Pool() != "", r.Event == natlog.Quota
	case r.Event == natlog.Exhausted || r.Event == natlog.Quota:
		s.topic, s.pool, s.quota = ofLimit, r.Pool() != "", r.Event == natlog.Quota
	case r.Kind == natlog.Block:
		s.topic = ofBlock
	}
	s.since = s.topic < ofLimit && r.Since != 0 && r.Event != natlog.Created
	return s
}

// id of the template: the same after a restart, as collectors keep templates for longer.
func (s shape) id() uint16 {
	n := uint16(s.topic)
	for _, f := range []family{s.internal, s.external, s.destination} {
		n = n<<2 | uint16(f)
	}
	for _, yes := range []bool{s.since, s.network, s.subscriber, s.pool, s.quota} {
		n <<= 1
		if yes {
			n |= 1
		}
	}
	return 256 + n
}

// natEvent is what happened in RFC 8158's numbers.
func natEvent(r *natlog.Record) byte {
	pick := func(create, free byte) byte {
		if r.Event == natlog.Ended {
			return free
		}
		return create
	}
	in, out := familyOf(r.Internal), familyOf(r.External)
	switch {
	case r.Nearly():
		return natThreshold
	case r.Event == natlog.Exhausted && out != none:
		return natPortsExhausted
	case r.Event == natlog.Exhausted:
		return natAddressExhausted
	case r.Event == natlog.Quota:
		return natQuotaExceeded
	case r.Kind == natlog.Block:
		return pick(natBlockAllocate, natBlockFree)
	case r.Protocol == 0:
		return pick(natBindingCreate, natBindingDelete)
	case r.Kind == natlog.Session && in == four && out == four:
		return pick(nat44SessionCreate, nat44SessionDelete)
	case r.Kind == natlog.Session && in == six && out == four:
		return pick(nat64SessionCreate, nat64SessionDelete)
	case in == four && out == four:
		return pick(nat44BIBCreate, nat44BIBDelete)
	case in == six && out == four:
		return pick(nat64BIBCreate, nat64BIBDelete)
	}
	return pick(natCreate, natDelete)
}

// nelEvent is what happened in the numbers of NetFlow v9 NEL, which nfdump has names for.
func nelEvent(r *natlog.Record) byte {
	switch r.Event {
	case natlog.Ended:
		return natDelete
	case natlog.Exhausted:
		return natAddressExhausted
	}
	return natCreate
}

// field is an information element of a template.
type field struct {
	id, length uint16 // length: variableLength has it before each value
	put        func(b []byte, r *natlog.Record) []byte
}

const variableLength = 65535

func u8(id uint16, of func(*natlog.Record) byte) field {
	return field{id, 1, func(b []byte, r *natlog.Record) []byte { return append(b, of(r)) }}
}

func u16(id uint16, of func(*natlog.Record) uint16) field {
	return field{id, 2, func(b []byte, r *natlog.Record) []byte { return binary.BigEndian.AppendUint16(b, of(r)) }}
}

func u32(id uint16, of func(*natlog.Record) uint32) field {
	return field{id, 4, func(b []byte, r *natlog.Record) []byte { return binary.BigEndian.AppendUint32(b, of(r)) }}
}

func u64(id uint16, of func(*natlog.Record) uint64) field {
	return field{id, 8, func(b []byte, r *natlog.Record) []byte { return binary.BigEndian.AppendUint64(b, of(r)) }}
}

// address is one of two elements, by family.
func address(f family, id4, id6 uint16, of func(*natlog.Record) netip.AddrPort) field {
	id, length := id4, uint16(4)
	if f == six {
		id, length = id6, 16
	}
	return field{id, length, func(b []byte, r *natlog.Record) []byte { return append(b, of(r).Addr().AsSlice()...) }}
}

func text(id uint16, of func(*natlog.Record) string) field {
	return field{id, variableLength, func(b []byte, r *natlog.Record) []byte {
		s := cut(of(r), mostText)
		if len(s) < 255 {
			b = append(b, byte(len(s)))
		} else {
			b = binary.BigEndian.AppendUint16(append(b, 255), uint16(len(s)))
		}
		return append(b, s...)
	}}
}

// mostText keeps a record below the smallest message.
const mostText = 160

// cut shortens text, between characters.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && s[most]&0xc0 == 0x80 {
		most--
	}
	return s[:most]
}

func milliseconds(m natlog.Micros) uint64 { return uint64(max(0, m) / 1000) }

// ntp is a time as RFC 7011, section 6.1.9, has microseconds: seconds since 1900, and a
// fraction whose lowest 11 bits are zero. It is the next one above, so that whoever cuts to
// microseconds gets the same.
func ntp(m natlog.Micros) uint64 {
	const since1900 = 2_208_988_800
	m = max(0, m)
	seconds, micros := uint64(m)/1e6, uint64(m)%1e6
	fraction := (micros<<32/1e6 + 1<<11) &^ (1<<11 - 1)
	if micros == 0 {
		fraction = 0
	}
	return (seconds+since1900)<<32 | fraction
}

// Accessors of a record.
func internal(r *natlog.Record) netip.AddrPort    { return r.Internal }
func external(r *natlog.Record) netip.AddrPort    { return r.External }
func destination(r *natlog.Record) netip.AddrPort { return r.Destination }
func protocol(r *natlog.Record) byte              { return r.Protocol }

// fields of a record of a shape. Elements that only IPFIX has are left out where it is
// NetFlow, whose texts also have no length.
func (s shape) fields(ipfix bool) []field {
	list := []field{u64(323, func(r *natlog.Record) uint64 { return milliseconds(r.Time) })} // observationTimeMilliseconds
	if ipfix {
		list = append(list, u64(324, func(r *natlog.Record) uint64 { return ntp(r.Time) })) // observationTimeMicroseconds
	}
	event := natEvent
	if !ipfix {
		event = nelEvent
	}
	list = append(list, u8(230, event))
	if ipfix {
		list = append(list, s.limit()...)
	}
	if s.internal != none {
		list = append(list, address(s.internal, 8, 27, internal)) // sourceIPv4Address, sourceIPv6Address
	}
	if s.external != none {
		list = append(list, address(s.external, 225, 281, external)) // postNATSourceIPv4Address, postNATSourceIPv6Address
	}
	port := func(id uint16, of func(*natlog.Record) netip.AddrPort) field {
		return u16(id, func(r *natlog.Record) uint16 { return of(r).Port() })
	}
	switch s.topic {
	case ofBlock:
		list = append(list, port(361, external), // portRangeStart
			u16(362, func(r *natlog.Record) uint16 { return r.LastPort })) // portRangeEnd
	case ofTranslation:
		list = append(list, u8(4, protocol), // protocolIdentifier
			port(7, internal), port(227, external)) // sourceTransportPort, postNAPTSourceTransportPort
		if s.destination == s.internal && s.destination != none { // NAT64 has another one before
			list = append(list, address(s.destination, 12, 28, destination), // destinationIPv4Address, destinationIPv6Address
				port(11, destination)) // destinationTransportPort
		}
		if s.destination != none {
			list = append(list, address(s.destination, 226, 282, destination), // postNATDestinationIPv4Address, postNATDestinationIPv6Address
				port(228, destination)) // postNAPTDestinationTransportPort
		}
	case ofLimit, ofThreshold:
		list = append(list, u8(4, protocol))
	}
	if s.since {
		list = append(list, u64(152, func(r *natlog.Record) uint64 { return milliseconds(r.Since) }), // flowStartMilliseconds
			u64(153, func(r *natlog.Record) uint64 { return milliseconds(r.Time) })) // flowEndMilliseconds
	}
	if s.network {
		list = append(list, u16(58, func(r *natlog.Record) uint16 { return r.VLAN }), // vlanId
			u32(234, func(r *natlog.Record) uint32 { return uint32(r.Zone) })) // ingressVRFID
	}
	if s.subscriber && ipfix {
		list = append(list, text(371, func(r *natlog.Record) string { return r.Subscriber })) // userName
	}
	if s.pool && ipfix {
		list = append(list, text(284, (*natlog.Record).Pool)) // natPoolName
	}
	return list
}

// limit is which limit was reached, or nearly.
func (s shape) limit() []field {
	value := func(id uint16, n uint32) []field { return []field{u32(id, func(*natlog.Record) uint32 { return n })} }
	switch {
	case s.topic == ofThreshold && s.quota:
		return value(467, thresholdOfUser) // natThresholdEvent
	case s.topic == ofThreshold:
		return value(467, thresholdOfPool)
	case s.quota:
		return value(466, quotaPerUser) // natQuotaExceededEvent
	}
	return nil
}

// gapFields are those of the options record that says which events are missing: of which
// exporting process (the scope), from when, to when.
func gapFields() []field {
	return []field{
		u32(144, func(*natlog.Record) uint32 { return 1 }),                                          // exportingProcessId
		u64(272, func(r *natlog.Record) uint64 { return milliseconds(min(r.Since, r.Time)) }),       // minFlowStartMilliseconds
		u64(269, func(r *natlog.Record) uint64 { return milliseconds(max(r.Since, r.Time) + 999) }), // maxFlowEndMilliseconds
	}
}
