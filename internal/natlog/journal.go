// SPDX-License-Identifier: Apache-2.0

package natlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
)

// The journal's form: JournalHeader, then frames
//
//	mark(2) length(4) crc(4) payload(length)
//
// A payload is records, each with times as differences from the record before. A frame
// stands for itself, so damage costs one frame, and a torn end what was being written.

// JournalHeader begins a journal.
const JournalHeader = "natkit log 1\n"

const (
	frameMark  = 0x4c6e
	frameBytes = 2 + 4 + 4
	mostFrame  = 16 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// AppendFrame appends records as one frame.
func AppendFrame(b []byte, records []Record) []byte {
	at := len(b)
	b = append(b, make([]byte, frameBytes)...)
	last := Micros(0)
	for i := range records {
		b = appendRecord(b, &records[i], &last)
	}
	payload := b[at+frameBytes:]
	binary.LittleEndian.PutUint16(b[at:], frameMark)
	binary.LittleEndian.PutUint32(b[at+2:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(b[at+6:], crc32.Checksum(payload, castagnoli))
	return b
}

// Flags of a record say which of its fields follow.
const (
	hasSince = 1 << iota
	hasInternal
	hasExternal
	hasDestination
	hasLastPort
	hasNetwork
	hasSubscriber
	hasNote
)

func appendRecord(b []byte, r *Record, last *Micros) []byte {
	at := len(b)
	b = append(b, 0, byte(r.Event)|byte(r.Kind)<<4, byte(r.Source), r.Protocol)
	b = binary.AppendVarint(b, int64(r.Time-*last))
	*last = r.Time
	flags := byte(0)
	if r.Since != 0 {
		flags |= hasSince
		b = binary.AppendVarint(b, int64(r.Time-r.Since))
	}
	for i, a := range []netip.AddrPort{r.Internal, r.External, r.Destination} {
		if a.IsValid() {
			flags |= hasInternal << i
			b = appendEndpoint(b, a)
		}
	}
	if r.LastPort != 0 {
		flags |= hasLastPort
		b = binary.BigEndian.AppendUint16(b, r.LastPort)
	}
	if r.Zone != 0 || r.VLAN != 0 {
		flags |= hasNetwork
		b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, r.Zone), r.VLAN)
	}
	for i, s := range []string{r.Subscriber, r.Note} {
		if s != "" {
			flags |= hasSubscriber << i
			b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
		}
	}
	b[at] = flags
	return b
}

func appendEndpoint(b []byte, a netip.AddrPort) []byte {
	raw := a.Addr().AsSlice()
	b = append(append(b, byte(len(raw))), raw...)
	return binary.BigEndian.AppendUint16(b, a.Port())
}

// ErrTorn is that a journal ends within a frame: its writer was killed, or still writes.
var ErrTorn = errors.New("the journal ends within a frame")

// ErrDamagedFrame is that a frame is not what was written.
var ErrDamagedFrame = errors.New("a frame of the journal is damaged")

// NextFrame reads the records of the frame that b begins with, appends them to records and
// gives what follows the frame. After ErrDamagedFrame what follows the damage is given.
func NextFrame(b []byte, records []Record) (out []Record, rest []byte, err error) {
	if len(b) < frameBytes {
		return records, nil, ErrTorn
	}
	length := binary.LittleEndian.Uint32(b[2:])
	if binary.LittleEndian.Uint16(b) != frameMark || length > mostFrame {
		return records, resume(b), ErrDamagedFrame
	}
	if uint64(len(b)-frameBytes) < uint64(length) {
		if rest := resume(b); rest != nil { // its length is what is damaged
			return records, rest, ErrDamagedFrame
		}
		return records, nil, ErrTorn
	}
	payload, rest := b[frameBytes:frameBytes+length], b[frameBytes+length:]
	if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(b[6:]) {
		return records, resume(b), ErrDamagedFrame
	}
	had, last := len(records), Micros(0)
	for len(payload) > 0 {
		var r Record
		if payload = r.read(payload, &last); payload == nil {
			return records[:had], rest, fmt.Errorf("%w: its checksum is right, but not its records (a newer natkit?)", ErrDamagedFrame)
		}
		records = append(records, r)
	}
	return records, rest, nil
}

// FrameLength is how long the frame is that b begins with, or how much of b tells that.
func FrameLength(b []byte) int {
	if len(b) < frameBytes {
		return frameBytes
	}
	if length := binary.LittleEndian.Uint32(b[2:]); length <= mostFrame {
		return frameBytes + int(length)
	}
	return frameBytes // it is damaged
}

// resume finds the next whole frame behind the first byte of b, nil if there is none.
func resume(b []byte) []byte {
	for i := 1; i+frameBytes <= len(b); i++ {
		if binary.LittleEndian.Uint16(b[i:]) != frameMark {
			continue
		}
		length := binary.LittleEndian.Uint32(b[i+2:])
		if length > mostFrame || uint64(len(b)-i-frameBytes) < uint64(length) {
			continue
		}
		if crc32.Checksum(b[i+frameBytes:][:length], castagnoli) == binary.LittleEndian.Uint32(b[i+6:]) {
			return b[i:]
		}
	}
	return nil
}

// read reads a record from b and gives what follows, never nil unless it can't be read.
func (r *Record) read(b []byte, last *Micros) []byte {
	c := cursor{b: b}
	head := c.bytes(4)
	if c.bad || head[2] > byte(Engine) || head[1]&15 > byte(Applied) || head[1]>>4 > byte(Block) {
		return nil
	}
	flags := head[0]
	r.Event, r.Kind, r.Source, r.Protocol = Event(head[1]&15), Kind(head[1]>>4), Source(head[2]), head[3]
	r.Time = *last + Micros(c.varint())
	*last = r.Time
	if flags&hasSince != 0 {
		r.Since = r.Time - Micros(c.varint())
	}
	for i, to := range []*netip.AddrPort{&r.Internal, &r.External, &r.Destination} {
		if flags&(hasInternal<<i) != 0 {
			*to = c.endpoint()
		}
	}
	if flags&hasLastPort != 0 {
		r.LastPort = c.uint16()
	}
	if flags&hasNetwork != 0 {
		r.Zone, r.VLAN = c.uint16(), c.uint16()
	}
	for i, to := range []*string{&r.Subscriber, &r.Note} {
		if flags&(hasSubscriber<<i) != 0 {
			*to = string(c.bytes(c.uvarint()))
		}
	}
	if c.bad {
		return nil
	}
	return c.b
}

// cursor reads values; what is missing is zero and bad.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) bytes(n uint64) []byte {
	if c.bad || n > uint64(len(c.b)) {
		c.bad = true
		return make([]byte, min(n, 16))
	}
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) uint16() uint16 { return binary.BigEndian.Uint16(c.bytes(2)) }

func (c *cursor) varint() int64 {
	v, n := binary.Varint(c.b)
	c.skip(n)
	return v
}

func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	c.skip(n)
	return v
}

func (c *cursor) skip(n int) {
	if n <= 0 {
		c.bad = true
		return
	}
	c.b = c.b[n:]
}

func (c *cursor) endpoint() netip.AddrPort {
	size := c.bytes(1)[0]
	addr, ok := netip.AddrFromSlice(c.bytes(uint64(size)))
	c.bad = c.bad || !ok
	return netip.AddrPortFrom(addr, c.uint16())
}
