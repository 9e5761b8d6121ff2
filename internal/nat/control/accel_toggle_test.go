// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// manyDatagrams are a flow to a parrot, numbered, of which some are always under way.
type manyDatagrams struct {
	conn            net.Conn
	stop            atomic.Bool
	ended           chan error
	answered, again uint64
}

const (
	datagramsUnderWay = 32               // datagrams under way: no buffer of a socket or a device is short of room
	datagramsPause    = time.Millisecond // after them: the processors are for what turns it on and off
	datagramLost      = time.Minute
)

func (b *testbed) manyDatagrams(ns *netns.Handle, from, to string) *manyDatagrams {
	s := &manyDatagrams{conn: b.dialogue(ns, from, to).conn, ended: make(chan error, 1)}
	go func() { s.ended <- s.run() }()
	return s
}

// run sends until it is to stop, and then waits for the last answers. An error is a datagram
// whose answer does not come.
func (s *manyDatagrams) run() error {
	var next uint64
	under := map[uint64]bool{}
	p := make([]byte, 2048)
	for oldest := uint64(1); !s.stop.Load() || len(under) > 0; {
		for ; !s.stop.Load() && next-oldest+1 < datagramsUnderWay; under[next] = true {
			next++
			binary.BigEndian.PutUint64(p, next)
			if _, err := s.conn.Write(p[:8]); err != nil {
				return fmt.Errorf("number %d: %w", next, err)
			}
		}
		time.Sleep(datagramsPause)
		s.conn.SetReadDeadline(time.Now().Add(datagramLost))
		n, err := s.conn.Read(p)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%d of %d datagrams are lost, the first is number %d", len(under), next, oldest)
		}
		if err != nil {
			return err
		}
		if n < 8 {
			return fmt.Errorf("an answer of %d bytes", n)
		}
		number := binary.BigEndian.Uint64(p)
		if !under[number] {
			s.again++
			continue
		}
		delete(under, number)
		s.answered++
		for ; oldest <= next && !under[oldest]; oldest++ {
		}
	}
	return nil
}

// Acceleration is turned on and off twenty times under flows of numbered datagrams, by
// masquerade and to a published port: each comes back, and once.
func TestAccelToggledOften(t *testing.T) {
	b := newAccelTestbed(t)
	b.parrot(b.server, "198.51.100.9:7000")
	b.parrot(b.client, "10.0.0.2:80")
	// Before a neighbour is found, and a device's queue is there, the kernel may lose packets.
	for to, from := range map[string]*netns.Handle{"198.51.100.9:7000": b.client, "198.51.100.1:8080": b.server} {
		first := b.dialogue(from, "", to)
		ktest.Wait(t, 30*time.Second, "an answer of "+to, func() bool { return first.ask(time.Second) != "" })
	}
	streams := []*manyDatagrams{b.manyDatagrams(b.client, "10.0.0.2:6000", "198.51.100.9:7000"), b.manyDatagrams(b.server, "198.51.100.9:6000", "198.51.100.1:8080")}
	var forwarded, cycles uint64
	for range 20 {
		if _, err := AccelOn(t.Context(), b.accelOptions()); err != nil {
			t.Fatal(err)
		}
		var now uint64
		ktest.Wait(t, 20*time.Second, "packets use the fast path", func() bool {
			for _, s := range streams {
				select {
				case err := <-s.ended:
					t.Fatalf("cycle %d: %v", cycles, err)
				default:
				}
			}
			now = b.accelStats().Reasons["forwarded"]
			return now > 4*datagramsUnderWay
		})
		if _, err := AccelOff(b.gateway); err != nil {
			t.Fatal(err)
		}
		forwarded += now
		cycles++
	}
	for _, s := range streams {
		s.stop.Store(true)
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
		if s.again > 0 {
			t.Errorf("%d of %d answers came more than once", s.again, s.answered)
		}
		t.Logf("%d datagrams came back", s.answered)
	}
	t.Logf("more than %d packets used the fast path", forwarded)
	if _, err := ReadAccelStatus(b.gateway); !errors.Is(err, ErrAccelOff) {
		t.Errorf("after the last off: %v", err)
	}
}
