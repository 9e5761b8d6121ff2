// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
)

// What the scenarios send that no socket would: TCP segments of nobody's
// connection, or with wrong numbers.

// segment is a TCP segment without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
}

const (
	tcpSYN = 0x02
	tcpACK = 0x10
)

// packet is the segment with its IPv4 header; the kernel fills in the header's
// length and checksum.
func (s segment) packet() []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(b[12:], s.from.Addr().AsSlice())
	copy(b[16:], s.to.Addr().AsSlice())
	tcp := b[20:]
	binary.BigEndian.PutUint16(tcp, s.from.Port())
	binary.BigEndian.PutUint16(tcp[2:], s.to.Port())
	binary.BigEndian.PutUint32(tcp[4:], s.seq)
	binary.BigEndian.PutUint32(tcp[8:], s.ack)
	tcp[12], tcp[13] = 5<<4, s.flags
	binary.BigEndian.PutUint16(tcp[14:], 64240)
	sum := uint32(unix.IPPROTO_TCP + len(tcp)) // with the pseudo header
	for i := 12; i < 40; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return b
}

// segments sends what next makes from a node, so many a second, until the
// context ends. A segment to nowhere is not sent.
func (s *faultRun) segments(node *lab.Node, perSecond int, next func(n int) segment) func(context.Context) error {
	return func(ctx context.Context) error {
		fd := -1
		err := node.Do(func() (err error) {
			fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			return err
		})
		if err != nil {
			return fmt.Errorf("open raw socket: %w", err)
		}
		defer unix.Close(fd)
		ticks := min(perSecond, 50) // a second
		tick := time.NewTicker(time.Second / time.Duration(ticks))
		defer tick.Stop()
		for n := 0; ; {
			for range perSecond / ticks {
				seg := next(n)
				if !seg.to.IsValid() {
					continue
				}
				// A queue that is full on the way is part of a flood.
				_ = unix.Sendto(fd, seg.packet(), 0, &unix.SockaddrInet4{Addr: seg.to.Addr().As4()})
				n++
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}
