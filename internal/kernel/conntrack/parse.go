// SPDX-License-Identifier: Apache-2.0

package conntrack

// Reading of a ctnetlink message into a Flow: attributes are read where they
// lie, nothing is copied but numbers and addresses.

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"unsafe"
)

var (
	errShort   = errors.New("read conntrack message: an attribute is longer or shorter than what holds it")
	errNoTuple = errors.New("read conntrack message: addresses of a direction are missing")
)

// nextAttr splits the first attribute off b. It is not ok at the end of b, and
// when the attribute does not fit into b; then rest is not empty.
func nextAttr(b []byte) (typ uint16, value, rest []byte, ok bool) {
	if len(b) < 4 {
		return 0, nil, b, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < 4 || n > len(b) {
		return 0, nil, b, false
	}
	return binary.NativeEndian.Uint16(b[2:]) & nlTypeMask, b[4:n], b[min((n+3)&^3, len(b)):], true
}

// parse sets f from the payload of a message: struct nfgenmsg and attributes.
// Attributes that it does not know are passed over.
func (f *Flow) parse(payload []byte) error {
	*f = Flow{}
	if len(payload) < nfHeaderLen {
		return errShort
	}
	f.Family = payload[0]
	attrs := payload[nfHeaderLen:]
	good := true
	for {
		typ, v, rest, ok := nextAttr(attrs)
		if !ok {
			if len(rest) > 0 {
				return errShort
			}
			break
		}
		attrs = rest
		switch typ {
		case ctaTupleOrig:
			good = f.parseTuple(v, &f.Orig, &f.ZoneOrig, HasZoneOrig) && good
		case ctaTupleReply:
			good = f.parseTuple(v, &f.Reply, &f.ZoneReply, HasZoneReply) && good
		case ctaStatus:
			good = be32(v, (*uint32)(&f.Status)) && good
		case ctaTimeout:
			good = be32(v, &f.Timeout) && good
			f.Has |= HasTimeout
		case ctaMark:
			good = be32(v, &f.Mark) && good
			f.Has |= HasMark
		case ctaUse:
			good = be32(v, &f.Use) && good
			f.Has |= HasUse
		case ctaID:
			good = be32(v, &f.ID) && good
			f.Has |= HasID
		case ctaZone:
			good = be16(v, &f.Zone) && good
			f.Has |= HasZone
		case ctaProtoinfo:
			good = f.parseState(v) && good
		case ctaCountersOrig:
			good = parsePair(v, ctaCountersPackets, ctaCountersBytes, &f.OrigCounters.Packets, &f.OrigCounters.Bytes) && good
			f.Has |= HasCounters
		case ctaCountersReply:
			good = parsePair(v, ctaCountersPackets, ctaCountersBytes, &f.ReplyCounters.Packets, &f.ReplyCounters.Bytes) && good
		case ctaTimestamp:
			good = f.parseTimes(v) && good
		case ctaHelp:
			f.Helper, ok = parseString(v, ctaHelpName)
			f.Has |= HasHelper
			good = good && ok
		case ctaSecctx:
			f.Secctx, ok = parseString(v, ctaSecctxName)
			f.Has |= HasSecctx
			good = good && ok
		case ctaLabels:
			f.Labels = v
			f.Has |= HasLabels
		}
	}
	if !good {
		return errShort
	}
	if !f.Orig.Src.IsValid() || !f.Orig.Dst.IsValid() || !f.Reply.Src.IsValid() || !f.Reply.Dst.IsValid() {
		return errNoTuple
	}
	return nil
}

func (f *Flow) parseTuple(b []byte, t *Tuple, zone *uint16, hasZone Fields) bool {
	good := true
	for {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return good && len(rest) == 0
		}
		b = rest
		switch typ {
		case ctaTupleIP:
			good = parseAddrs(v, t) && good
		case ctaTupleProto:
			good = f.parsePorts(v, t) && good
		case ctaTupleZone:
			good = be16(v, zone) && good
			f.Has |= hasZone
		}
	}
}

func parseAddrs(b []byte, t *Tuple) bool {
	good := true
	for {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return good && len(rest) == 0
		}
		b = rest
		var a netip.Addr
		switch typ {
		case ctaIPv4Src, ctaIPv4Dst:
			if len(v) != 4 {
				return false
			}
			a = netip.AddrFrom4([4]byte(v))
		case ctaIPv6Src, ctaIPv6Dst:
			if len(v) != 16 {
				return false
			}
			a = netip.AddrFrom16([16]byte(v))
		default:
			continue
		}
		if typ == ctaIPv4Src || typ == ctaIPv6Src {
			t.Src = a
		} else {
			t.Dst = a
		}
	}
}

func (f *Flow) parsePorts(b []byte, t *Tuple) bool {
	good := true
	for {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return good && len(rest) == 0
		}
		b = rest
		switch typ {
		case ctaProtoNum:
			good = byte1(v, &f.Proto) && good
		case ctaProtoSrcPort, ctaProtoICMPID, ctaProtoICMPv6ID:
			good = be16(v, &t.SrcPort) && good
		case ctaProtoDstPort:
			good = be16(v, &t.DstPort) && good
		case ctaProtoICMPType, ctaProtoICMPv6Type:
			good = byte1(v, &t.ICMPType) && good
		case ctaProtoICMPCode, ctaProtoICMPv6Code:
			good = byte1(v, &t.ICMPCode) && good
		}
	}
}

func (f *Flow) parseState(b []byte) bool {
	typ, v, _, ok := nextAttr(b)
	if !ok {
		return len(b) == 0 // a protocol without information of its own
	}
	var first State
	switch typ {
	case ctaProtoinfoTCP:
	case ctaProtoinfoSCTP:
		first = sctpStates
	case ctaProtoinfoDCCP:
		first = dccpStates
	default:
		return true
	}
	for {
		typ, value, rest, ok := nextAttr(v)
		if !ok {
			return len(rest) == 0
		}
		v = rest
		if typ != ctaProtoinfoState {
			continue
		}
		var n uint8
		if !byte1(value, &n) {
			return false
		}
		if n >= uint8(sctpStates) {
			n = 0 // a state newer than this program: shown as NONE, as conntrack(8) does
		}
		f.State = first + State(n)
		f.Has |= HasState
	}
}

func (f *Flow) parseTimes(b []byte) bool {
	var start, stop uint64
	if !parsePair(b, ctaTimestampStart, ctaTimestampStop, &start, &stop) {
		return false
	}
	f.Start, f.Stop = int64(start), int64(stop)
	if start != 0 {
		f.Has |= HasStart
	}
	if stop != 0 {
		f.Has |= HasStop
	}
	return true
}

// parsePair reads two 64-bit numbers out of a nest.
func parsePair(b []byte, typ1, typ2 uint16, to1, to2 *uint64) bool {
	for {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return len(rest) == 0
		}
		b = rest
		if typ != typ1 && typ != typ2 {
			continue
		}
		if len(v) != 8 {
			return false
		}
		if typ == typ1 {
			*to1 = binary.BigEndian.Uint64(v)
		} else {
			*to2 = binary.BigEndian.Uint64(v)
		}
	}
}

// parseString reads a zero-terminated string out of a nest.
func parseString(b []byte, want uint16) ([]byte, bool) {
	for {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return nil, len(rest) == 0
		}
		b = rest
		if typ == want {
			for i, c := range v {
				if c == 0 {
					return v[:i], true
				}
			}
			return v, true
		}
	}
}

func byte1(v []byte, to *uint8) bool {
	if len(v) != 1 {
		return false
	}
	*to = v[0]
	return true
}

func be16(v []byte, to *uint16) bool {
	if len(v) != 2 {
		return false
	}
	*to = binary.BigEndian.Uint16(v)
	return true
}

func be32(v []byte, to *uint32) bool {
	if len(v) != 4 {
		return false
	}
	*to = binary.BigEndian.Uint32(v)
	return true
}

// stringOf is b as a string without a copy; it must not outlive b.
func stringOf(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
