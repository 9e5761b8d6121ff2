// SPDX-License-Identifier: Apache-2.0

// Package pcp answers hosts that ask a NAT for explicit mappings, by PCP (RFC 6887) and NAT-PMP
// (RFC 6886): what they ask for, and what becomes of it. It has no sockets and makes no mappings:
// an Engine does.
package pcp

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// Port is where servers of both protocols listen, and ClientPort where clients hear announcements.
const (
	Port       = 5351
	ClientPort = 5350
)

// MaxMessage is how long a message may be, of all protocols: RFC 6887 section 7.
const MaxMessage = 1100

const (
	version      = 2
	headerBytes  = 24
	mapBytes     = 36
	peerBytes    = 56
	optionBytes  = 4 // of its header
	filterBytes  = 20
	response     = 0x80
	mandatoryMax = 127 // of options that may not be ignored
)

// Opcode is what a request is about.
type Opcode uint8

// Opcodes.
const (
	Announce Opcode = 0
	Map      Opcode = 1
	Peer     Opcode = 2
)

func (o Opcode) String() string {
	switch o {
	case Announce:
		return "announce"
	case Map:
		return "map"
	case Peer:
		return "peer"
	}
	return "unknown"
}

// Result is a result code of PCP.
type Result uint8

// Result codes: RFC 6887 section 7.4.
const (
	Success Result = iota
	UnsuppVersion
	NotAuthorized
	MalformedRequest
	UnsuppOpcode
	UnsuppOption
	MalformedOption
	NetworkFailure
	NoResources
	UnsuppProtocol
	UserExQuota
	CannotProvideExternal
	AddressMismatch
	ExcessiveRemotePeers

	results
)

var resultNames = [results]string{
	"success", "unsupp-version", "not-authorized", "malformed-request", "unsupp-opcode", "unsupp-option", "malformed-option",
	"network-failure", "no-resources", "unsupp-protocol", "user-ex-quota", "cannot-provide-external", "address-mismatch",
	"excessive-remote-peers",
}

func (r Result) String() string {
	if r < results {
		return resultNames[r]
	}
	return "unknown"
}

// How long a client is to believe an error: what may be otherwise soon, and what hardly will.
const (
	shortError = 30 * time.Second
	longError  = 30 * time.Minute
)

func (r Result) lifetime() time.Duration {
	switch r {
	case NetworkFailure, NoResources, UserExQuota, CannotProvideExternal:
		return shortError
	}
	return longError
}

// Options: RFC 6887 section 13, but for THIRD_PARTY (1).
const (
	optionPreferFailure = 2
	optionFilter        = 3
)

// Protocols that can be asked for.
const (
	TCP = 6
	UDP = 17
)

// Nonce proves that who extends or ends a mapping is who asked for it.
type Nonce [12]byte

// Filter lets in a remote prefix, from one port or (0) any.
type Filter struct {
	Prefix netip.Prefix
	Port   uint16
}

// request is a PCP request as it came.
type request struct {
	opcode   Opcode
	lifetime time.Duration
	nonce    Nonce
	protocol uint8
	internal uint16         // port
	external netip.AddrPort // wanted: an address and a port; either may be zero
	foreign  bool           // the wanted address is none of IPv4
	remote   netip.AddrPort // PEER

	preferFailure bool
	filters       []Filter
	filtered      bool   // there was an option FILTER
	reset         bool   // the first filters that count come after one that removes those before
	options       []byte // those that are processed, as they came
}

// parse reads a request of version 2 from that client. A result other than Success is the answer.
func parse(data []byte, client netip.Addr) (*request, Result) {
	if len(data) < headerBytes || len(data) > MaxMessage || len(data)%4 != 0 {
		return nil, MalformedRequest
	}
	q := &request{opcode: Opcode(data[1]), lifetime: time.Duration(binary.BigEndian.Uint32(data[4:])) * time.Second}
	body := 0
	switch q.opcode {
	case Announce:
	case Map:
		body = mapBytes
	case Peer:
		body = peerBytes
	default:
		return nil, UnsuppOpcode
	}
	if len(data) < headerBytes+body {
		return nil, MalformedRequest
	}
	if addr(data[8:24]) != client {
		return nil, AddressMismatch
	}
	if body > 0 {
		q.body(data[headerBytes:])
	}
	if r := q.readOptions(data[headerBytes+body:]); r != Success {
		return nil, r
	}
	return q, q.check()
}

// addr reads an address; one of IPv4 is what stands behind the prefix ::ffff:0:0/96.
func addr(b []byte) netip.Addr { return netip.AddrFrom16([16]byte(b[:16])).Unmap() }

func (q *request) body(b []byte) {
	q.nonce = Nonce(b[:12])
	q.protocol = b[12]
	q.internal = binary.BigEndian.Uint16(b[16:])
	wanted := addr(b[20:])
	q.foreign = !wanted.Is4() && !wanted.IsUnspecified()
	if !wanted.Is4() || wanted.IsUnspecified() {
		wanted = netip.Addr{}
	}
	q.external = netip.AddrPortFrom(wanted, binary.BigEndian.Uint16(b[18:]))
	if q.opcode == Peer {
		q.remote = netip.AddrPortFrom(addr(b[40:]), binary.BigEndian.Uint16(b[36:]))
	}
}

// readOptions reads them in their order.
func (q *request) readOptions(b []byte) Result {
	for len(b) > 0 {
		if len(b) < optionBytes {
			return MalformedOption
		}
		code, length := b[0], int(binary.BigEndian.Uint16(b[2:]))
		whole := optionBytes + (length+3)&^3
		if whole > len(b) {
			return MalformedOption
		}
		known, r := q.option(code, b[optionBytes:optionBytes+length])
		if r != Success {
			return r
		}
		if known {
			q.options = append(q.options, b[:whole]...)
		}
		b = b[whole:]
	}
	return Success
}

func (q *request) option(code uint8, value []byte) (known bool, r Result) {
	switch {
	case code == optionPreferFailure && q.opcode != Map, code == optionFilter && q.opcode != Map:
		return false, MalformedRequest
	case code == optionPreferFailure:
		if len(value) != 0 || q.preferFailure {
			return false, MalformedOption
		}
		q.preferFailure = true
		return true, Success
	case code == optionFilter:
		return true, q.filter(value)
	case code <= mandatoryMax: // THIRD_PARTY is one of them: nobody asks for another host
		return false, UnsuppOption
	}
	return false, Success
}

// filter reads an option FILTER: a prefix of length 0 removes those before it.
func (q *request) filter(value []byte) Result {
	if len(value) != filterBytes {
		return MalformedOption
	}
	q.filtered = true
	length := int(value[1])
	if length == 0 {
		q.filters, q.reset = nil, true
		return Success
	}
	remote := addr(value[4:])
	if !remote.Is4() || length < 96 || length > 128 {
		return MalformedOption
	}
	f := Filter{netip.PrefixFrom(remote, length-96).Masked(), binary.BigEndian.Uint16(value[2:])}
	q.filters = append(q.filters, f)
	return Success
}

// check refuses what can't be meant.
func (q *request) check() Result {
	switch q.opcode {
	case Map:
		if q.protocol == 0 && q.internal != 0 {
			return MalformedRequest
		}
		if q.lifetime > 0 && (q.internal == 0 || q.protocol == 0) {
			return UnsuppProtocol // all ports, or all protocols: a NAT that gives ports has none left then
		}
		if q.protocol != 0 && q.protocol != TCP && q.protocol != UDP {
			return UnsuppProtocol
		}
	case Peer:
		if q.protocol == 0 || q.internal == 0 || q.remote.Port() == 0 || q.remote.Addr().IsUnspecified() || !q.remote.Addr().Is4() {
			return MalformedRequest
		}
		if q.protocol != TCP && q.protocol != UDP {
			return UnsuppProtocol
		}
	}
	return Success
}

// --- answers -------------------------------------------------------------------------

// header writes that of an answer.
func header(opcode uint8, r Result, lifetime, epoch time.Duration) []byte {
	b := make([]byte, headerBytes, headerBytes+peerBytes)
	b[0], b[1], b[3] = version, opcode|response, uint8(r)
	binary.BigEndian.PutUint32(b[4:], uint32(lifetime/time.Second))
	binary.BigEndian.PutUint32(b[8:], uint32(epoch/time.Second))
	return b
}

// refusal answers a request that could not be read, or was refused: what came, with the header of
// an answer. whole: it could be read, so the bits after the epoch are free.
func refusal(data []byte, r Result, epoch time.Duration, whole bool) []byte {
	b := make([]byte, max(headerBytes, min(len(data), MaxMessage)), MaxMessage+3)
	copy(b, data)
	b = b[:(len(b)+3)&^3]
	h := header(b[1], r, r.lifetime(), epoch)
	if !whole {
		h = h[:12] // the last twelve octets of the client's address stay
	}
	copy(b, h)
	return b[:min(len(b), MaxMessage)]
}

// answer tells of a mapping.
func (q *request) answer(external netip.AddrPort, lifetime, epoch time.Duration) []byte {
	b := header(uint8(q.opcode), Success, lifetime, epoch)
	if q.opcode == Announce {
		return b
	}
	b = append(b, q.nonce[:]...)
	b = append(b, q.protocol, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, q.internal)
	b = binary.BigEndian.AppendUint16(b, external.Port())
	b = append(b, mapped(external.Addr())...)
	if q.opcode == Peer {
		b = binary.BigEndian.AppendUint16(b, q.remote.Port())
		b = append(b, 0, 0)
		b = append(b, mapped(q.remote.Addr())...)
	}
	return append(b, q.options...)
}

// mapped writes an address of IPv4 as one of IPv6; none is zero.
func mapped(a netip.Addr) []byte {
	if !a.IsValid() {
		a = netip.IPv4Unspecified()
	}
	b := a.As16()
	return b[:]
}

// --- NAT-PMP -------------------------------------------------------------------------

// Opcodes of NAT-PMP, and how long its messages are.
const (
	pmpAddress = 0
	pmpUDP     = 1
	pmpTCP     = 2

	pmpRequestBytes = 12
)

// pmpResult is a result code of NAT-PMP: RFC 6886 section 3.5.
type pmpResult uint16

const (
	pmpSuccess pmpResult = iota
	_
	pmpNotAuthorized
	pmpNetworkFailure
	pmpNoResources
	pmpUnsuppOpcode
)

func (r Result) pmp() pmpResult {
	switch r {
	case Success:
		return pmpSuccess
	case NotAuthorized:
		return pmpNotAuthorized
	case NoResources, UserExQuota, CannotProvideExternal:
		return pmpNoResources
	}
	return pmpNetworkFailure
}

func pmpHeader(opcode uint8, r pmpResult, epoch time.Duration) []byte {
	b := []byte{0, opcode | response}
	b = binary.BigEndian.AppendUint16(b, uint16(r))
	return binary.BigEndian.AppendUint32(b, uint32(epoch/time.Second))
}

// pmpAddressAnswer tells the external address, asked for or not.
func pmpAddressAnswer(r pmpResult, epoch time.Duration, external netip.Addr) []byte {
	b := pmpHeader(pmpAddress, r, epoch)
	if !external.Is4() {
		external = netip.IPv4Unspecified()
	}
	return append(b, external.AsSlice()...)
}
