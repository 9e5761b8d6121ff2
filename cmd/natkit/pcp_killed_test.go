// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// What natkit serve has answered by PCP holds when it is killed among the answers: strangers come
// in without it, and the next one gives the same ports and lets no epoch go back (RFC 6887, 8.5).
func TestPCPKilled(t *testing.T) {
	w := newWire(t)
	asked := 50 + w.random.IntN(50) // before it is killed
	file := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(file, []byte("inside: [in]\noutside: [out]\npcp: {on: [in]}\nrules:\n  - masquerade: 10.0.0.0/24\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, kill := w.runs("serve", "--attach", "tc", "-f", file)
	if _, err := askPCP(w.client, netip.MustParseAddrPort("10.0.0.2:7999"), 300); err != nil { // it begins
		t.Fatal(err)
	}
	answers := make(chan pcpAnswer, 10_000)
	go func() { // of one host after the other: each may ask a few times a second
		defer close(answers)
		for i := range cap(answers) {
			internal := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + i%99)}), uint16(8000+i/99))
			a, err := askPCP(w.client, internal, 10)
			if err != nil {
				return
			}
			answers <- a
		}
	}()
	var got []pcpAnswer
	for a := range answers {
		if got = append(got, a); len(got) == asked {
			kill(unix.SIGKILL)
		}
	}
	if len(got) < asked {
		t.Fatalf("%d requests were answered", len(got))
	}
	for i := len(got) - 1; i >= 0; i -= len(got)/10 + 1 {
		if !w.letsIn(got[i]) {
			t.Errorf("%v was given port %d, and after the kill no stranger comes in there", got[i].internal, got[i].port)
		}
	}
	_, end := w.runs("serve", "--attach", "tc", "-f", file)
	for i := len(got) - 1; i >= 0; i -= len(got)/30 + 1 {
		again, err := askPCP(w.client, got[i].internal, 100)
		if err != nil {
			t.Fatal(err)
		}
		if again.result != 0 || again.port != got[i].port || again.epoch < got[len(got)-1].epoch {
			t.Errorf("%+v was answered, and after the kill %+v; the last epoch was %d", got[i], again, got[len(got)-1].epoch)
		}
	}
	end(unix.SIGTERM)
}

// pcpAnswer is what a host was told of its mapping.
type pcpAnswer struct {
	internal netip.AddrPort
	result   byte
	port     uint16
	epoch    uint32
}

// askPCP asks for a mapping of UDP for an hour, up to so many times.
func askPCP(ns *netns.Handle, internal netip.AddrPort, tries int) (a pcpAnswer, err error) {
	q := make([]byte, 60) // RFC 6887, sections 7.1 and 11.1
	q[0], q[1] = 2, 1
	binary.BigEndian.PutUint32(q[4:], 3600)
	from := netip.AddrFrom16(internal.Addr().As16()).As16()
	copy(q[8:], from[:])
	q[24], q[36] = 7, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(q[40:], internal.Port())
	err = ns.Do(func() error {
		// Not connected: while nobody is there, it waits, and does not read ICMP errors.
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(internal.Addr(), 0)))
		if err != nil {
			return err
		}
		defer conn.Close()
		b := make([]byte, 1100)
		for range tries {
			if _, err := conn.WriteToUDP(q, &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 5351}); err != nil {
				return err
			}
			_ = conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			n, err := conn.Read(b)
			if err == nil && n >= 60 {
				a = pcpAnswer{internal, b[3], binary.BigEndian.Uint16(b[42:]), binary.BigEndian.Uint32(b[8:])}
				return nil
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("%d bytes, %w", n, err)
			}
		}
		return fmt.Errorf("%v has no answer", internal)
	})
	return a, err
}

// letsIn reports whether what a stranger sends to the outside port arrives inside.
func (w *wire) letsIn(a pcpAnswer) (in bool) {
	w.t.Helper()
	var inside *net.UDPConn
	if err := w.client.Do(func() (err error) {
		inside, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(a.internal))
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	defer inside.Close()
	if err := w.server.Do(func() error {
		conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(203, 0, 113, 1), Port: int(a.port)})
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte("x"))
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	_ = inside.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, _, err := inside.ReadFrom(make([]byte, 10))
	return err == nil
}
