// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// What connections of the namespace's own hold, against ss.
func TestLocalPorts(t *testing.T) {
	h := newNetns(t)
	var served net.Listener
	var held []net.Conn
	dial := func(n int) {
		t.Helper()
		in(t, h, func() error {
			for range n {
				c, err := net.Dial("tcp4", served.Addr().String())
				if err != nil {
					return err
				}
				t.Cleanup(func() { c.Close() })
				held = append(held, c)
			}
			return nil
		})
	}
	in(t, h, func() (err error) {
		if err = os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40199"), 0); err != nil {
			return err
		}
		served, err = net.Listen("tcp4", "127.0.0.1:40100") // connections that it takes hold that port, not one each
		return err
	})
	t.Cleanup(func() { served.Close() })
	go func() {
		for {
			c, err := served.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
	uses := func() []snapshot.LocalPortUse {
		t.Helper()
		s, err := Take(t.Context(), Options{Netns: h, Window: 1})
		if err != nil {
			t.Fatal(err)
		}
		if s.LocalPorts == nil {
			t.Fatalf("not known: %+v", s.Capabilities)
		}
		return s.LocalPorts
	}
	dial(40) // with what answers them 80 sockets, of 200 ports
	if got := uses(); len(got) != 0 {
		t.Errorf("with 80 sockets: %+v", got)
	}
	dial(60)
	for _, c := range held[:10] {
		c.Close() // they wait: the other end has not closed
	}
	got := uses()
	if len(got) != 1 {
		t.Fatalf("uses %+v", got)
	}
	ss, err := strconv.Atoi(strings.TrimSpace(output(t, h, "", "sh", "-c", "ss -Htan 'dst = 127.0.0.1:40100' | wc -l")))
	if err != nil || uint64(ss) != got[0].Used || ss != 100 {
		t.Errorf("%d are used, ss says %d: %v", got[0].Used, ss, err)
	}
	if got[0].Inode == 0 || got[0].Process == "" || got[0].TimeWait != 0 {
		t.Errorf("of nobody: %+v", got[0])
	}
	if want := (snapshot.LocalPortUse{Source: netip.MustParseAddr("127.0.0.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("127.0.0.1:40100"))}); got[0].Source != want.Source || got[0].Dest != want.Dest {
		t.Errorf("from %s to %s", got[0].Source, got[0].Dest)
	}
}

// Sockets of IPv6, and those that are over, as the kernel's messages have them.
func TestPortCount(t *testing.T) {
	message := func(family, state byte, source, dest string, inode uint32) []byte {
		b := make([]byte, diagMessageLen)
		b[0], b[diagState] = family, state
		s, d := netip.MustParseAddrPort(source), netip.MustParseAddrPort(dest)
		copy(b[diagSourceAddr:], s.Addr().AsSlice())
		copy(b[diagDestAddr:], d.Addr().AsSlice())
		binary.BigEndian.PutUint16(b[diagSourcePort:], s.Port())
		binary.BigEndian.PutUint16(b[diagDestPort:], d.Port())
		binary.NativeEndian.PutUint32(b[diagInode:], inode)
		return b
	}
	c := portCount{low: 1000, high: 1999, listening: map[uint16]bool{1080: true}, uses: map[portUser]*snapshot.LocalPortUse{}}
	for _, b := range [][]byte{
		message(unix.AF_INET, tcpTimeWait, "10.0.0.1:1000", "10.0.0.2:80", 0),
		message(unix.AF_INET6, 1, "[::ffff:10.0.0.1]:1999", "[::ffff:10.0.0.2]:80", 7),
		message(unix.AF_INET6, 1, "[fd00::1]:1500", "[fd00::2]:80", 8),
		message(unix.AF_INET, 1, "10.0.0.1:999", "10.0.0.2:80", 9),
		message(unix.AF_INET, 1, "10.0.0.1:2000", "10.0.0.2:80", 9),
		message(unix.AF_INET, 1, "10.0.0.1:1080", "10.0.0.2:80", 9),
	} {
		c.add(b)
	}
	want := "[{10.0.0.1 10.0.0.2:80 2 1  7} {fd00::1 [fd00::2]:80 1 0  8}]"
	if got := fmt.Sprint(c.most()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func FuzzDiagMessages(f *testing.F) {
	whole := make([]byte, unix.NLMSG_HDRLEN+diagMessageLen)
	binary.NativeEndian.PutUint32(whole, uint32(len(whole)))
	binary.NativeEndian.PutUint16(whole[4:], sockDiagByFamily)
	f.Add(whole, uint32(0))
	f.Add(append(whole, 20, 0, 0, 0, unix.NLMSG_ERROR, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff), uint32(0))
	f.Add([]byte{16, 0, 0, 0, unix.NLMSG_DONE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, sequence uint32) {
		c := portCount{high: 65535, uses: map[portUser]*snapshot.LocalPortUse{}}
		sockets := 0
		_, _ = diagMessages(b, sequence, func(message []byte) {
			sockets++
			c.add(message)
		})
		if sockets > len(b)/diagMessageLen {
			t.Errorf("%d sockets in %d bytes", sockets, len(b))
		}
	})
}
