// SPDX-License-Identifier: Apache-2.0

package natproof

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// The router's own reply to a ping is not the ping sent on, whatever its identification is.
func TestSendIgnoresOwnReplies(t *testing.T) {
	ktest.Root(t)
	router := NewRouter(t)
	ping := rulefile.Packet{In: "eth0", Protocol: rulefile.ICMP, Source: netip.MustParseAddr("192.0.2.77"), Destination: Options.Local[0]}
	tun := int(router.tuns[ping.In].Fd())
	const tries = 100 // the kernel counts identifications up, by more where time has passed
	same := 0
	for range tries {
		if _, err := unix.Write(tun, rawPacket(ping, 0)); err != nil {
			t.Fatal(err)
		}
		reply := make([]byte, 2048)
		n, err := unix.Read(tun, reply)
		if err != nil || n < 20 {
			t.Fatalf("no reply to a ping of the router's own address: %d bytes, %v", n, err)
		}
		next := (uint16(reply[4])<<8 | uint16(reply[5])) + 1
		got, err := router.Send(ping, next)
		if err != nil {
			t.Fatal(err)
		}
		if !got.Gone() {
			same++
		}
	}
	if same > 0 {
		t.Errorf("%d of %d replies were taken for the ping", same, tries)
	}
}
