// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// FillOptions says which entries Fill makes. The zero value of everything but
// Count is a table full of established TCP connections.
type FillOptions struct {
	Count int // entries to add

	Protocol uint8 // unix.IPPROTO_TCP (default) or unix.IPPROTO_UDP
	// State of TCP entries, TCPEstablished by default. TCPSynSent makes unreplied
	// ones and TCPSynRecv such as are not assured; all other states are assured.
	// Above 95 % of nf_conntrack_max the kernel's garbage collector throws away
	// what is not assured, and TCP entries that are closing (TIME_WAIT and the
	// like) even if they are: only TCPEstablished holds a table full.
	State     State
	Unreplied bool          // UDP entries that saw no reply; otherwise they are assured
	Timeout   time.Duration // by default the kernel's own default for the state

	// Sources are taken in turn from this prefix, each with ports from 1024 up;
	// 198.18.0.0/24 by default. All entries go to Dest, 198.19.0.1:80 by default.
	Sources netip.Prefix
	Dest    netip.AddrPort

	// Outside, where valid, is the address that sources are translated to; each
	// entry takes the next port of OutsidePorts, 1024-65535 by default.
	Outside      netip.Addr
	OutsidePorts snapshot.PortRange
	// Inside, where valid, is what Dest is translated to, as for a published port.
	Inside netip.AddrPort

	Mark uint32
	Zone uint16

	Progress func(done, total int) // called after each batch, where not nil
}

// FillResult is what Fill did.
type FillResult struct {
	Added    int
	Existing int  // tuples passed over because they were in the table already
	Full     bool // it stopped because the table is full
}

// fillBatch is how many entries one send makes; one message takes about 220
// bytes, and a send may be as large as the socket's send buffer (208 KiB).
const fillBatch = 256

// Fill adds entries to the connection tracking table of the calling thread's
// namespace. It is for namespaces that the caller owns: the entries stay until
// they expire, the namespace ends, or Flush.
//
// It ends early, without error, at a full table, and with ctx's error when ctx
// ends; the result says what was added until then.
func Fill(ctx context.Context, o FillOptions) (FillResult, error) {
	var res FillResult
	capacity, err := o.complete()
	if err != nil {
		return res, fmt.Errorf("fill conntrack table: %w", err)
	}
	s, err := openSocket(ctx, 0)
	if err != nil {
		return res, fmt.Errorf("fill conntrack table: %w", err)
	}
	defer s.close()
	for next := 0; res.Added < o.Count && !res.Full; {
		if err := ctx.Err(); err != nil {
			return res, fmt.Errorf("fill conntrack table: %w", err)
		}
		limits, err := ReadLimits()
		if err != nil {
			return res, fmt.Errorf("fill conntrack table: %w", err)
		}
		// Never run against the limit: the kernel would throw out entries that are
		// not assured and log that the table is full.
		if limits.Max > 0 && limits.Count >= limits.Max {
			res.Full = true
			break
		}
		n := min(fillBatch, o.Count-res.Added, capacity-next)
		if limits.Max > 0 {
			n = int(min(uint64(n), limits.Max-limits.Count))
		}
		if n == 0 {
			return res, fmt.Errorf("fill conntrack table: %d of %d entries added, then all %d tuples of these addresses and ports were used: take a larger prefix of sources or more ports",
				res.Added, o.Count, capacity)
		}
		if err := o.fillBatch(s, next, n, &res); err != nil {
			return res, fmt.Errorf("fill conntrack table: after %s: %w", plural.Count(res.Added, "entry"), err)
		}
		next += n
		if o.Progress != nil {
			o.Progress(res.Added, o.Count)
		}
	}
	return res, nil
}

// complete sets the defaults, checks the options, and returns how many
// different tuples they allow.
func (o *FillOptions) complete() (capacity int, err error) {
	if o.Protocol == 0 {
		o.Protocol = unix.IPPROTO_TCP
	}
	if o.Protocol != unix.IPPROTO_TCP && o.Protocol != unix.IPPROTO_UDP {
		return 0, fmt.Errorf("protocol %d: only TCP (%d) and UDP (%d)", o.Protocol, unix.IPPROTO_TCP, unix.IPPROTO_UDP)
	}
	if o.Protocol == unix.IPPROTO_TCP && o.State == TCPNone {
		o.State = TCPEstablished
	}
	if o.State > TCPSynSent2 || o.Protocol != unix.IPPROTO_TCP && o.State != 0 {
		return 0, fmt.Errorf("state %d: not a state of protocol %s", o.State, ProtoName(o.Protocol))
	}
	if o.State == TCPSynSent || o.State == TCPSynSent2 {
		o.Unreplied = true
	}
	if o.Timeout == 0 {
		o.Timeout = o.defaultTimeout()
	}
	if o.Timeout < time.Second || o.Timeout > math.MaxInt32*time.Second {
		return 0, fmt.Errorf("timeout %v: want 1s or more", o.Timeout)
	}
	if !o.Sources.IsValid() {
		o.Sources = netip.MustParsePrefix("198.18.0.0/24")
	}
	if !o.Dest.IsValid() {
		o.Dest = netip.MustParseAddrPort("198.19.0.1:80")
	}
	o.Sources = o.Sources.Masked()
	v4 := o.Sources.Addr().Is4()
	for _, a := range []netip.Addr{o.Dest.Addr(), o.Outside, o.Inside.Addr()} {
		if a.IsValid() && a.Is4() != v4 {
			return 0, fmt.Errorf("address %v is not of the family of the sources %v", a, o.Sources)
		}
	}
	// 2^20 sources are more than any table needs, and keep the sums in range.
	hosts := 1 << min(o.Sources.Addr().BitLen()-o.Sources.Bits(), 20)
	capacity = hosts * (math.MaxUint16 - fillFirstPort + 1)
	if o.Outside.IsValid() {
		if o.OutsidePorts == (snapshot.PortRange{}) {
			o.OutsidePorts = snapshot.PortRange{Min: fillFirstPort, Max: math.MaxUint16}
		}
		if o.OutsidePorts.Min == 0 || o.OutsidePorts.Max < o.OutsidePorts.Min {
			return 0, fmt.Errorf("outside ports %d-%d: not a range", o.OutsidePorts.Min, o.OutsidePorts.Max)
		}
		capacity = min(capacity, int(o.OutsidePorts.Max)-int(o.OutsidePorts.Min)+1)
	}
	if o.Count > capacity {
		return 0, fmt.Errorf("%s wanted, but these addresses and ports make only %d: take a larger prefix of sources or more ports", plural.Count(o.Count, "entry"), capacity)
	}
	return capacity, nil
}

const fillFirstPort = 1024

// defaultTimeout is the kernel's default, nf_conntrack_proto_tcp.c and
// nf_conntrack_proto_udp.c.
func (o *FillOptions) defaultTimeout() time.Duration {
	if o.Protocol == unix.IPPROTO_UDP {
		if o.Unreplied {
			return 30 * time.Second
		}
		return 120 * time.Second
	}
	switch o.State {
	case TCPEstablished:
		return 432000 * time.Second
	case TCPSynRecv, TCPCloseWait:
		return 60 * time.Second
	case TCPLastAck:
		return 30 * time.Second
	case TCPClose:
		return 10 * time.Second
	}
	return 120 * time.Second
}

// fillBatch makes the entries number first to first+n-1 and counts what the
// kernel answered.
func (o *FillOptions) fillBatch(s *socket, first, n int, res *FillResult) error {
	m := message{b: make([]byte, 0, n*256)}
	for i := first; i < first+n; i++ {
		s.seq++
		o.entry(&m, s.seq, i)
	}
	m.requestAck() // errors come unasked; this says that all were done
	if err := s.send(m.b); err != nil {
		return err
	}
	refused, err := s.answers(s.seq, func(errno unix.Errno) error {
		switch errno {
		case unix.EEXIST:
			res.Existing++
		case unix.ENOMEM: // the kernel's word for a full table
			res.Full = true
		default:
			return explain(errno)
		}
		return nil
	})
	res.Added += n - refused
	return err
}

// entry appends the message that makes entry number i.
func (o *FillOptions) entry(m *message, seq uint32, i int) {
	hosts := 1 << min(o.Sources.Addr().BitLen()-o.Sources.Bits(), 20)
	orig := Tuple{
		Src:     addToAddr(o.Sources.Addr(), i%hosts),
		SrcPort: fillFirstPort + uint16(i/hosts),
		Dst:     o.Dest.Addr(),
		DstPort: o.Dest.Port(),
	}
	reply := Tuple{Src: orig.Dst, SrcPort: orig.DstPort, Dst: orig.Src, DstPort: orig.SrcPort}
	status := StatusConfirmed
	if !o.Unreplied {
		status |= StatusSeenReply
		if o.State != TCPSynRecv {
			status |= StatusAssured
		}
	}
	family := uint8(unix.AF_INET)
	if orig.Src.Is6() {
		family = unix.AF_INET6
	}
	m.begin(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, seq, family)
	m.tuple(ctaTupleOrig, o.Protocol, &orig)
	m.tuple(ctaTupleReply, o.Protocol, &reply) // before translation: the kernel does that, so that it knows
	if o.Outside.IsValid() {
		m.natRange(ctaNATSrc, o.Outside, o.OutsidePorts.Min+uint16(i))
	}
	if o.Inside.IsValid() {
		m.natRange(ctaNATDst, o.Inside.Addr(), o.Inside.Port())
	}
	m.attr32(ctaStatus, uint32(status))
	m.attr32(ctaTimeout, uint32(o.Timeout/time.Second))
	if o.Protocol == unix.IPPROTO_TCP {
		info := m.nest(ctaProtoinfo)
		tcp := m.nest(ctaProtoinfoTCP)
		m.attr(ctaProtoinfoState, byte(o.State))
		m.endNest(tcp)
		m.endNest(info)
	}
	if o.Mark != 0 {
		m.attr32(ctaMark, o.Mark)
	}
	if o.Zone != 0 {
		m.attr16(ctaZone, o.Zone)
	}
	m.end()
}

// natRange asks for a translation to exactly this address and port.
func (m *message) natRange(typ uint16, a netip.Addr, port uint16) {
	at := m.nest(typ)
	m.attrAddr(ctaNATv4Min, ctaNATv6Min, a)
	m.attrAddr(ctaNATv4Max, ctaNATv6Max, a)
	pr := m.nest(ctaNATProto)
	m.attr16(ctaProtoNATPortLo, port)
	m.attr16(ctaProtoNATPortHi, port)
	m.endNest(pr)
	m.endNest(at)
}

// addToAddr returns the address n after a.
func addToAddr(a netip.Addr, n int) netip.Addr {
	b := a.AsSlice()
	for i := len(b) - 1; i >= 0 && n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	sum, _ := netip.AddrFromSlice(b)
	return sum
}

// answers reads the kernel's answers up to the acknowledgement of message last,
// gives each error to fn, and returns how many there were. An error of fn is
// returned when all answers are read.
func (s *socket) answers(last uint32, fn func(unix.Errno) error) (refused int, err error) {
	for done, late := false, false; !done; {
		b, rerr := s.receive()
		switch {
		case errors.Is(rerr, os.ErrDeadlineExceeded) && !late:
			// The context ended; the kernel did its work already and its answers are
			// here. Read them all the same, so that the counts are true.
			late = true
			s.file.SetReadDeadline(time.Now().Add(time.Second))
			continue
		case rerr != nil:
			return refused, fmt.Errorf("read the kernel's answers: %w", rerr)
		}
		merr := eachMessage(b, func(typ, _ uint16, seq uint32, payload []byte) bool {
			if typ != unix.NLMSG_ERROR {
				return true
			}
			done = done || seq == last
			if errno, ok := errorOf(payload); ok && errno != 0 {
				refused++
				if e := fn(errno); e != nil && err == nil {
					err = e
				}
			}
			return true
		})
		if merr != nil {
			return refused, merr
		}
	}
	return refused, err
}
