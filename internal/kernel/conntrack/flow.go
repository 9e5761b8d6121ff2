// SPDX-License-Identifier: Apache-2.0

// Package conntrack is the kernel's connection tracking table as a stream of
// flows: read from ctnetlink or from the text that conntrack(8) and /proc
// print, aggregated, watched by its events, measured in bytes. It also fills
// and empties the table of a namespace that the caller owns, for the lab.
//
// Functions that talk to the kernel work in the network namespace of the
// calling thread; see [natkit/internal/netns.Handle.Do].
//
// Nothing is kept: a reader hands every entry to a function in one [Flow] that
// it uses again for the next, so a table of any size takes the same memory.
package conntrack

import (
	"encoding/binary"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// Flow is one entry of the table. Fields that the source of the entry need not
// have are valid only where Has says so.
type Flow struct {
	Family uint8 // unix.AF_INET or unix.AF_INET6
	Proto  uint8 // unix.IPPROTO_TCP, ...
	State  State
	Has    Fields
	Status Status

	Timeout   uint32 // seconds until the entry expires
	Mark      uint32
	Secmark   uint32 // printed by kernels before 2.6.37
	Use       uint32 // references
	ID        uint32
	Zone      uint16
	ZoneOrig  uint16
	ZoneReply uint16

	Orig, Reply                 Tuple
	OrigCounters, ReplyCounters Counters

	Start, Stop  int64 // nanoseconds since 1970
	DeltaSeconds uint64

	// These alias the reader's buffer: valid until the function that got the Flow
	// returns.
	Secctx []byte
	Helper []byte
	Labels []byte // the bit mask (netlink); see Label
	Names  []byte // the labels by name, separated by commas (text)
}

// Tuple is one direction of a flow.
type Tuple struct {
	Src, Dst netip.Addr
	// SrcPort is the identifier of an ICMP flow and the source key of a GRE flow.
	SrcPort, DstPort   uint16
	ICMPType, ICMPCode uint8
}

// Counters is what a flow carried in one direction (nf_conntrack_acct).
type Counters struct{ Packets, Bytes uint64 }

// Fields says which of a Flow's fields are set.
type Fields uint32

const (
	HasTimeout Fields = 1 << iota // an offloaded flow has none
	HasState                      // TCP, SCTP, DCCP
	HasCounters
	HasMark
	HasSecmark
	HasSecctx
	HasZone // zone of both directions; HasZoneOrig, HasZoneReply: of one
	HasZoneOrig
	HasZoneReply
	HasDelta // seconds since the start (nf_conntrack_timestamp)
	HasStart
	HasStop
	HasHelper
	HasUse
	HasID
	HasLabels // bit mask
	HasNames  // labels by name
)

// Status is the kernel's enum ip_conntrack_status. A text dump shows
// StatusSeenReply, StatusAssured, StatusOffload and StatusHWOffload only, and
// does not show StatusAssured of an offloaded flow.
type Status uint32

const (
	StatusExpected  Status = 1 << 0
	StatusSeenReply Status = 1 << 1
	StatusAssured   Status = 1 << 2
	StatusConfirmed Status = 1 << 3
	StatusSrcNAT    Status = 1 << 4
	StatusDstNAT    Status = 1 << 5
	StatusOffload   Status = 1 << 14
	StatusHWOffload Status = 1 << 15
)

// State is the state of a TCP, SCTP or DCCP flow: the kernel's number, counted
// from where the protocol's states begin here.
type State uint8

// The kernel's enum tcp_conntrack.
const (
	TCPNone State = iota
	TCPSynSent
	TCPSynRecv
	TCPEstablished
	TCPFinWait
	TCPCloseWait
	TCPLastAck
	TCPTimeWait
	TCPClose
	TCPSynSent2 // simultaneous open; LISTEN in old headers
)

const (
	sctpStates State = 16
	dccpStates State = 32
	maxState         = 48
)

var stateNames = [maxState]string{
	"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "SYN_SENT2",

	sctpStates: "NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED",
	"SHUTDOWN_SENT", "SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT", "HEARTBEAT_ACKED",

	dccpStates: "NONE", "REQUEST", "RESPOND", "PARTOPEN", "OPEN", "CLOSEREQ", "CLOSING", "TIMEWAIT", "IGNORE", "INVALID",
}

// String is the name that conntrack(8) prints.
func (s State) String() string {
	if int(s) < len(stateNames) && stateNames[s] != "" {
		return stateNames[s]
	}
	return "NONE"
}

// firstState is where the states of a protocol begin, false for a protocol
// without states.
func firstState(proto uint8) (State, bool) {
	switch proto {
	case unix.IPPROTO_TCP:
		return 0, true
	case unix.IPPROTO_SCTP:
		return sctpStates, true
	case unix.IPPROTO_DCCP:
		return dccpStates, true
	}
	return 0, false
}

// ProtoName is the name of a transport protocol as conntrack(8) prints it, or as ParseProto
// reads it; the number for one that has no name in either.
func ProtoName(proto uint8) string {
	if name := protoName(proto); name != "" {
		return name
	}
	for name, n := range otherProtos {
		if n == proto {
			return name
		}
	}
	return strconv.Itoa(int(proto))
}

func protoName(proto uint8) string {
	switch proto {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	case unix.IPPROTO_GRE:
		return "gre"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_DCCP:
		return "dccp"
	case unix.IPPROTO_UDPLITE:
		return "udplite"
	}
	return ""
}

// Unreplied says that no packet of the reply direction was seen yet.
func (f *Flow) Unreplied() bool { return f.Status&StatusSeenReply == 0 }

// SNAT says that the source is translated: replies do not go to where the flow
// came from. It is told from the tuples, so it is the same for every reader.
func (f *Flow) SNAT() bool {
	return f.Reply.Dst != f.Orig.Src || f.hasPorts() && f.Reply.DstPort != f.Orig.SrcPort ||
		f.isICMP() && f.Reply.SrcPort != f.Orig.SrcPort
}

// DNAT says that the destination is translated.
func (f *Flow) DNAT() bool {
	return f.Reply.Src != f.Orig.Dst || f.hasPorts() && f.Reply.SrcPort != f.Orig.DstPort
}

// Label says whether the label with this number is set. The mask is 32-bit words
// in the host's byte order.
func (f *Flow) Label(bit int) bool {
	word := bit / 32 * 4
	return bit >= 0 && word+4 <= len(f.Labels) && binary.NativeEndian.Uint32(f.Labels[word:])>>(bit%32)&1 != 0
}

func (f *Flow) isICMP() bool { return f.Proto == unix.IPPROTO_ICMP || f.Proto == unix.IPPROTO_ICMPV6 }

// hasPorts: the protocols whose two 16-bit fields change sides in the reply.
func (f *Flow) hasPorts() bool {
	switch f.Proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_GRE:
		return true
	}
	return false
}
