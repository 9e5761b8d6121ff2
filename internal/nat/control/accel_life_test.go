// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// tcpLife is how many seconds the entry of the one TCP connection has.
func (b *testbed) tcpLife() uint32 {
	b.t.Helper()
	entries := b.entries()
	i := slices.IndexFunc(entries, func(f *netlink.ConntrackFlow) bool { return f.Forward.Protocol == unix.IPPROTO_TCP })
	if i < 0 {
		b.t.Fatal("no entry of a TCP connection")
	}
	return entries[i].TimeOut
}

// acceleratedTCP is a connection that has used the fast path: the client's end and the
// server's. Connection tracking has lost it, and believes that data of the client, if so
// asked, is unacknowledged.
func (b *testbed) acceleratedTCP(unacknowledged bool) (client, server *net.TCPConn) {
	b.t.Helper()
	var l net.Listener
	b.in(b.server, func() (err error) { l, err = net.Listen("tcp4", "198.51.100.9:0"); return err })
	b.t.Cleanup(func() { l.Close() })
	var c, s net.Conn
	b.in(b.client, func() (err error) { c, err = net.DialTimeout("tcp4", l.Addr().String(), 10*time.Second); return err })
	b.t.Cleanup(func() { c.Close() })
	s, err := l.Accept()
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { s.Close() })
	for _, end := range []net.Conn{c, s} { // what is transferred is more than a window
		if err := end.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
			b.t.Fatal(err)
		}
	}
	transfer := func(from, to net.Conn, bytes int) {
		b.t.Helper()
		to.SetDeadline(time.Now().Add(30 * time.Second))
		go from.Write(make([]byte, bytes))
		if _, err := io.ReadFull(to, make([]byte, bytes)); err != nil {
			b.t.Fatal(err)
		}
	}
	ktest.Wait(b.t, 30*time.Second, "both directions use the fast path", func() bool {
		for range 10 {
			transfer(c, s, 1)
			transfer(s, c, 1)
		}
		return b.validEntries() == 2
	})
	if unacknowledged {
		// The byte that is seen is acknowledged with the one after it, which is not.
		ktest.Wait(b.t, 10*time.Second, "the next packet goes through the stack", func() bool { return b.validEntries() == 0 })
		raw, err := s.(*net.TCPConn).SyscallConn()
		if err != nil {
			b.t.Fatal(err)
		}
		raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) })
		if err != nil {
			b.t.Fatal(err)
		}
		for range 2 {
			if _, err := c.Write(make([]byte, 1)); err != nil {
				b.t.Fatal(err)
			}
		}
		if _, err := io.ReadFull(s, make([]byte, 2)); err != nil {
			b.t.Fatal(err)
		}
	}
	transfer(c, s, 8<<20)
	transfer(s, c, 8<<20)
	ktest.Wait(b.t, 20*time.Second, "the entry has the life of an idle connection", func() bool { return b.tcpLife() > 100000 })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// validEntries is how many directions bypass the stack.
func (b *testbed) validEntries() (n int) {
	b.t.Helper()
	if err := accelEntries(b.gateway, func(s *rulefile.AccelEntry) bool {
		if s.Valid {
			n++
		}
		return true
	}); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// Of a connection one end of which has vanished, the entry does not outlive what the
// kernel gives it, though the other end goes on repeating itself: whether it was busy until
// then, or was silent, so that its packets are below the threshold.
func TestAccelVanished(t *testing.T) {
	t.Run("busy", func(t *testing.T) { accelVanished(t, func(*testbed, net.Conn, net.Conn) {}) })
	t.Run("silent", func(t *testing.T) {
		accelVanished(t, func(b *testbed, client, server net.Conn) {
			b.untilSilent()
			for range 3 { // the flow cache knows of few packets
				if _, err := server.Write([]byte("!")); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
			}
			b.untilSilent()
		})
	})
}

// untilSilent waits until no direction is valid, nor was looked up lately.
func (b *testbed) untilSilent() {
	b.t.Helper()
	since := time.Now()
	ktest.Wait(b.t, 10*time.Second, "no direction uses the fast path", func() bool {
		if b.validEntries() > 0 {
			since = time.Now()
		}
		return time.Since(since) > 1500*time.Millisecond
	})
}

func accelVanished(t *testing.T, before func(b *testbed, client, server net.Conn)) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	client, server := b.acceleratedTCP(false)
	before(b, client, server)
	// Connection tracking believes what it often does: that everything is acknowledged. If not,
	// it would give the entry five minutes by itself.
	b.in(b.gateway, func() error { _, err := conntrack.IgnoreWindows(t.Context()); return err })
	b.nftIn(b.client, `table ip gone { chain i { type filter hook input priority 0; policy drop; }; chain o { type filter hook output priority 0; policy drop; }; }`)
	server.SetDeadline(time.Time{})
	if _, err := server.Write([]byte("is there anybody?")); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 40*time.Second, "the entry has the life of a connection that is not answered", func() bool { return b.tcpLife() <= 300 })
}

// An idle connection lives as long as the kernel lets one live, also if the table has
// forgotten since that it was accelerated.
func TestAccelForgotten(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	client, server := b.acceleratedTCP(true)
	b.forgetEntries()
	if _, err := client.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	server.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := server.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 10*time.Second, "the entry has the life of an idle connection", func() bool { return b.tcpLife() > 100000 })
}

func (b *testbed) forgetEntries() {
	b.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(pinsOf(b.gateway.Inode()), "maps", "accel_entries"), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer m.Close()
	for key := make([]byte, m.KeySize()); ; {
		err := m.NextKey(nil, key)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return
		}
		if err := errors.Join(err, m.Delete(key)); err != nil {
			b.t.Fatal(err)
		}
	}
}
