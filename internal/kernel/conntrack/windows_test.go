// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"maps"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestIgnoreWindows: connections that are open are marked, whatever their zone, and
// nothing else of them is changed; others are left alone.
func TestIgnoreWindows(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		makeZoo(t) // ESTABLISHED and TIME_WAIT are to be marked, and what is IPv6, opens or is closed is not
		for _, o := range []FillOptions{
			{Count: 1000, State: TCPEstablished},
			{Count: 1000, Dest: netip.MustParseAddrPort("198.19.0.2:80"), Zone: 9, State: TCPFinWait, Timeout: time.Hour},
			{Count: 10, Dest: netip.MustParseAddrPort("198.19.0.3:80"), Protocol: unix.IPPROTO_UDP},
		} {
			if _, err := Fill(context.Background(), o); err != nil {
				return err
			}
		}
		_, _, err := change(context.Background(), Filter{Proto: unix.IPPROTO_TCP}, nil, func(f *Flow, m *message, seq uint32) {
			f.appendLiberal(m, seq)
			for at := len(m.b) - 16; at < len(m.b); at += 8 { // in place of what it sets: sent, and not acknowledged
				m.b[at+4], m.b[at+5] = tcpFlagUnacknowledged, tcpFlagLiberal|tcpFlagUnacknowledged
			}
		})
		if err != nil {
			return err
		}
		before := conntrackTool(t, "-L", "-o", "extended")
		n, err := IgnoreWindows(context.Background())
		if err != nil {
			return err
		}
		if n != 2002 {
			t.Errorf("marked %d", n)
		}
		sameLines(t, "the table", conntrackTool(t, "-L", "-o", "extended"), before)
		got := tcpFlags(t)
		want := map[[2]uint8]int{{tcpFlagLiberal, tcpFlagLiberal}: 2002, {tcpFlagUnacknowledged, tcpFlagUnacknowledged}: 4}
		if !maps.Equal(got, want) {
			t.Errorf("flags of both directions, and how many have them: %v, want %v", got, want)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := IgnoreWindows(ctx); err == nil {
			t.Error("no error when canceled")
		}
		return nil
	})
}

// tcpFlags counts the TCP entries of the table by the flags of their two directions.
func tcpFlags(t *testing.T) map[[2]uint8]int {
	t.Helper()
	s, err := openSocket(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	var m message
	m.begin(msgGet, unix.NLM_F_DUMP, 1, 0)
	m.end()
	if err := s.send(m.b); err != nil {
		t.Fatal(err)
	}
	attr := func(b []byte, want uint16) []byte {
		for {
			typ, value, rest, ok := nextAttr(b)
			if !ok || typ == want {
				return value
			}
			b = rest
		}
	}
	out := map[[2]uint8]int{}
	for done := false; !done; {
		b, err := s.receive()
		if err != nil {
			t.Fatal(err)
		}
		err = eachMessage(b, func(typ, _ uint16, _ uint32, payload []byte) bool {
			if done = typ == unix.NLMSG_DONE; done {
				return false
			}
			tcp := attr(attr(payload[nfHeaderLen:], ctaProtoinfo), ctaProtoinfoTCP)
			if orig, reply := attr(tcp, ctaProtoinfoTCPFlagsOrig), attr(tcp, ctaProtoinfoTCPFlagsReply); orig != nil && reply != nil {
				const of = tcpFlagLiberal | tcpFlagUnacknowledged
				out[[2]uint8{orig[0] & of, reply[0] & of}]++
			}
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}
