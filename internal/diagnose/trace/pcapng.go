// SPDX-License-Identifier: Apache-2.0

package trace

// Captures for Wireshark: each step of a packet that has its content is one frame, with the step as
// its comment. The last one of a packet has a second comment: what became of it. The format is that of draft-ietf-opsawg-pcapng.

import (
	"encoding/binary"
	"io"
	"math"
	"strings"
)

// Pcapng writes packets as a capture: an interface block for each place where a packet was seen.
type Pcapng struct {
	w          io.Writer
	boot       int64 // when CLOCK_MONOTONIC was 0, nanoseconds since 1970
	interfaces map[capturePlace]uint32
}

// capturePlace is an interface of the capture.
type capturePlace struct {
	name string
	link uint16
}

// Block types and options of the format.
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockPacket    = 6
	byteOrderMagic = 0x1a2b3c4d
	linkIPv4       = 228 // an IP packet without a frame around it. libpcap reads no second
	linkIPv6       = 229 // interface of LINKTYPE_RAW, which would do for both
	optEnd         = 0
	optComment     = 1
	optName        = 2
	optResolution  = 9
	nanoseconds    = 9 // 10 to the power of minus this
	maxComment     = math.MaxUint16 - 3
)

// NewPcapng begins a capture; boot is when CLOCK_MONOTONIC was 0, in nanoseconds since 1970.
func NewPcapng(w io.Writer, boot int64) (*Pcapng, error) {
	p := &Pcapng{w: w, boot: boot, interfaces: map[capturePlace]uint32{}}
	var body []byte
	body = binary.LittleEndian.AppendUint32(body, byteOrderMagic)
	body = binary.LittleEndian.AppendUint16(body, 1) // version 1.0
	body = binary.LittleEndian.AppendUint16(body, 0)
	body = binary.LittleEndian.AppendUint64(body, math.MaxUint64) // length not given
	return p, p.block(blockSection, body)
}

// Packet writes the steps of one packet that have its content, and its end.
func (p *Pcapng) Packet(packet Packet, describe func(*Step) string, end string) error {
	last := packet.StartNS
	final := len(packet.Steps) - 1
	for final >= 0 && len(packet.Steps[final].Head) == 0 {
		final--
	}
	for i := range packet.Steps {
		s := &packet.Steps[i]
		if s.TimeNS != 0 {
			last = s.TimeNS
		}
		if len(s.Head) == 0 {
			continue
		}
		id, err := p.at(s)
		if err != nil {
			return err
		}
		comments := []string{describe(s)}
		if i == final {
			comments = append(comments, end)
		}
		if err := p.frame(id, last, s, comments); err != nil {
			return err
		}
	}
	return nil
}

// at is the number of the interface block of a step's place.
func (p *Pcapng) at(s *Step) (uint32, error) {
	place := capturePlace{strings.TrimPrefix(s.Namespace+"/"+s.Interface, "/"), linkIPv4}
	if s.Head[0]>>4 == 6 {
		place.link = linkIPv6
	}
	if id, known := p.interfaces[place]; known {
		return id, nil
	}
	id := uint32(len(p.interfaces))
	p.interfaces[place] = id
	var body []byte
	body = binary.LittleEndian.AppendUint16(body, place.link)
	body = binary.LittleEndian.AppendUint16(body, 0)
	body = binary.LittleEndian.AppendUint32(body, 0) // no limit on what is kept
	body = option(body, optName, []byte(place.name))
	body = option(body, optResolution, []byte{nanoseconds})
	return id, p.block(blockInterface, option(body, optEnd, nil))
}

func (p *Pcapng) frame(id uint32, at uint64, s *Step, comments []string) error {
	when := uint64(p.boot) + at
	var body []byte
	body = binary.LittleEndian.AppendUint32(body, id)
	body = binary.LittleEndian.AppendUint32(body, uint32(when>>32))
	body = binary.LittleEndian.AppendUint32(body, uint32(when))
	body = binary.LittleEndian.AppendUint32(body, uint32(len(s.Head)))
	body = binary.LittleEndian.AppendUint32(body, max(s.Length, uint32(len(s.Head))))
	body = pad(append(body, s.Head...))
	for _, c := range comments {
		body = option(body, optComment, []byte(c[:min(len(c), maxComment)]))
	}
	return p.block(blockPacket, option(body, optEnd, nil))
}

// block writes a block: its type, its length before and behind it.
func (p *Pcapng) block(kind uint32, body []byte) error {
	length := uint32(len(body) + 12)
	out := binary.LittleEndian.AppendUint32(nil, kind)
	out = binary.LittleEndian.AppendUint32(out, length)
	out = append(out, body...)
	_, err := p.w.Write(binary.LittleEndian.AppendUint32(out, length))
	return err
}

func option(b []byte, code uint16, value []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return pad(append(b, value...))
}

// pad fills up to a multiple of 4 bytes.
func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}
