// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/testutil/pktbuild"
)

const neighbourRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: 10.0.0.0/16
  - dnat: udp 203.0.113.30
    to: 10.0.255.77
`

// The first datagram to a host whose MAC nobody has asked for yet arrives whole, in whatever order
// its fragments come.
func TestFragmentsAwaitNeighbour(t *testing.T) {
	const size = 512
	for name, order := range matrixOrders {
		t.Run(name, func(t *testing.T) {
			onEveryWay(t, neighbourRules, func(t *testing.T, c *crossing) {
				err := c.far.Do(func() error { // it answers ARP
					l, err := netlink.LinkByName("in")
					if err != nil {
						return err
					}
					a, err := netlink.ParseAddr("10.0.255.77/24")
					if err != nil {
						return err
					}
					return netlink.AddrAdd(l, a)
				})
				if err != nil {
					t.Fatal(err)
				}
				p := udp("198.51.100.9:53", "203.0.113.30:5000")
				p.Payload = pktbuild.UDP{Src: 53, Dst: 5000, Data: matrixData(3*size + 100)}
				whole := p.Bytes()[20:]
				for _, n := range order {
					f := p
					f.ID, f.Protocol, f.Fragment = 77, pktbuild.UDPProtocol, uint16(n*size/8)
					f.Payload = pktbuild.Bytes(whole[n*size : min((n+1)*size, len(whole))])
					if n < 3 {
						f.Fragment |= pktbuild.MF
					}
					c.out.put(t, c.out.frame(f))
				}
				for missing := len(whole); missing > 0; {
					got := c.in.arrives(t)
					if got == nil {
						t.Fatalf("%d bytes of %d are missing", missing, len(whole))
					}
					if destinationOf(got) == netip.MustParseAddr("10.0.255.77") && binary.BigEndian.Uint16(got[4:]) == 77 {
						missing -= len(got) - 20
					}
				}
			})
		})
	}
}
