// SPDX-License-Identifier: Apache-2.0

package pktbuild

import (
	"encoding/hex"
	"net"
	"net/netip"
	"testing"
)

// The checksums were worked out by other means than this package's.
func TestFrames(t *testing.T) {
	a, b := netip.MustParseAddr("192.168.0.2"), netip.MustParseAddr("203.0.113.5")
	tests := []struct {
		name string
		in   Frame
		want string
	}{
		{"echo request", Frame{
			To: net.HardwareAddr{2, 0, 0, 0, 0, 1}, From: net.HardwareAddr{2, 0, 0, 0, 0, 2},
			IP: IPv4{Src: a, Dst: b, TTL: 64, ID: 0x1234, Fragment: DF, Payload: Echo(8, 7, 1, []byte("abcd"))},
		}, "0200000000010200000000020800450000201234400040012bf9c0a80002cb0071050800" + "3331" + "0007000161626364"},
		{"UDP, odd length, without Ethernet", Frame{
			IP: IPv4{Src: a, Dst: b, TTL: 1, Payload: UDP{Src: 1024, Dst: 53, Data: []byte{1, 2, 3}}},
		}, "4500001f00000000" + "0111" + "bd1e" + "c0a80002cb00710504000035000b" + "faf0" + "010203"},
		{"UDP without checksum", Frame{
			IP: IPv4{Src: a, Dst: b, TTL: 1, Payload: UDP{Src: 1024, Dst: 53, NoChecksum: true}},
		}, "4500001c00000000" + "0111" + "bd21" + "c0a80002cb007105040000350008" + "0000"},
	}
	for _, test := range tests {
		if got := hex.EncodeToString(test.in.Bytes()); got != test.want {
			t.Errorf("%s:\n got %s\nwant %s", test.name, got, test.want)
		}
	}
}
