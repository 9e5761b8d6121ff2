// SPDX-License-Identifier: Apache-2.0

package control

import (
	"net/netip"
	"testing"

	"natkit/internal/testutil/pktbuild"
)

const clashRules = `
inside: [in]
outside: [out]
pools:
  two: {addresses: [203.0.113.32/31]}
limits: {sessions: 8192, sources: 256}
rules:
  - {snat: 10.0.0.0/24, to: two}
  - {dnat: udp 203.0.113.30:80, to: 10.0.0.2:8080}
  - {dnat: udp 203.0.113.31:80, to: 10.0.0.2:8080}
  - {dnat: udp 203.0.113.30:81, to: 10.0.0.2:8080}
  - {dnat: udp 203.0.113.40:80, to: ["10.0.0.3:8080", "10.0.0.4:8080"]}
  - {dnat: udp 203.0.113.41:80, to: ["10.0.0.3:8080", "10.0.0.4:8080"]}
  - map: 10.0.1.0/24 <-> 198.18.1.0/24
  - {dnat: udp 203.0.113.50:80, to: 10.0.1.2:8080}
`

// However one client port comes to one target, each of its sessions arrives by a source port of its
// own, and is answered from where it went: on engine ebpf as on the kernel's NAT.
func TestOneTargetByManyWays(t *testing.T) {
	ways := [][]string{
		{"203.0.113.30:80", "203.0.113.31:80", "203.0.113.30:81"},
		{"203.0.113.40:80", "203.0.113.41:80"},
		{"198.18.1.2:8080", "203.0.113.50:80"},
	}
	onEveryWay(t, clashRules, func(t *testing.T, c *crossing) {
		udp := func(e pktEnds) pktbuild.IPv4 {
			return pktbuild.IPv4{Src: e.src.Addr(), Dst: e.dst.Addr(), TTL: 64, Payload: pktbuild.UDP{Src: e.src.Port(), Dst: e.dst.Port(), Data: []byte("x")}}
		}
		lost := 0
		for n := range 100 {
			client := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.9"), uint16(5000+n))
			for _, same := range ways {
				known := map[pktEnds]string{}
				for _, way := range same {
					e := pktEnds{client, netip.MustParseAddrPort(way)}
					c.out.put(t, c.out.frame(udp(e)))
					ip := c.in.arrives(t)
					if ip == nil {
						lost++
						continue
					}
					there := endsOf(ip)
					if known[there] != "" {
						t.Fatalf("%v and that to %s both arrive as %v", e, known[there], there)
					}
					if there.src.Addr() != client.Addr() || there.src.Port() < 1024 {
						t.Errorf("%v arrives as %v", e, there)
					}
					known[there] = way
				}
				for there, way := range known {
					c.in.put(t, c.in.frame(udp(there.turned())))
					ip := c.out.arrives(t)
					if want := (pktEnds{netip.MustParseAddrPort(way), client}); ip == nil || endsOf(ip) != want {
						t.Errorf("the answer to %v leaves as %v, want %v", there, ip, want)
					}
				}
			}
		}
		if lost > 0 {
			t.Errorf("%d of 700 sessions are lost", lost)
		}
	})
}
