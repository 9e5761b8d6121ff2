// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"net/netip"
	"testing"
)

const statelessBeside = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - {map: 10.0.12.0/24 <-> 198.18.12.0/24, stateless: true}
  - {snat: 10.0.12.9, to: 203.0.113.9}
  - {map: 10.0.12.20 <-> 198.18.12.20}
  - {map: 10.0.12.21 <-> 203.0.113.21}
  - {dnat: "udp 198.18.12.5:80", to: "10.0.12.7:8080"}
  - {dnat: "udp 203.0.113.1:443", to: 10.0.12.8}
  - {map: 10.0.32.0/20 <-> 198.18.32.0/20}
  - {map: 10.0.48.0/24 <-> 198.18.41.0/24, stateless: true}
  - {map: 10.0.49.1 <-> 203.0.113.49, stateless: true}
  - {dnat: "udp 203.0.113.49:80", to: "10.0.0.7:8080"}
`

// Rules with sessions beside stateless maps: the more special one is met, on both engines, and
// replies come back by it.
func TestStatelessBeside(t *testing.T) {
	onEveryWay(t, statelessBeside, func(t *testing.T, c *crossing) {
		const far, stranger = "198.51.100.9", "198.51.100.77"
		for _, one := range []struct{ what, host, seenAs string }{
			{"a host of the map", "10.0.12.4", "198.18.12.4"},
			{"a host with a longer source rule", "10.0.12.9", "203.0.113.9"},
			{"a host with a map of its own", "10.0.12.20", "198.18.12.20"},
			{"a host with a map elsewhere", "10.0.12.21", "203.0.113.21"},
			{"a host with a port that is forwarded", "10.0.12.5", "198.18.12.5"},
			{"a target of a forward", "10.0.12.8", "198.18.12.8"},
			{"a host of a stateless map in a map with sessions", "10.0.48.5", "198.18.41.5"},
			{"a host of the map with sessions", "10.0.33.5", "198.18.33.5"},
			{"a host with a stateless map alone", "10.0.49.1", "203.0.113.49"},
		} {
			out := c.becomes(t, one.what, c.in, c.out, udp(one.host+":5000", far+":53"), one.seenAs, far)
			c.becomes(t, "the reply to "+one.what, c.out, c.in, replyTo(out), far, one.host)
		}
		for i, one := range []struct{ what, to, host string }{
			{"a host of the map", "198.18.12.4:80", "10.0.12.4"},
			{"a port that is forwarded", "198.18.12.5:80", "10.0.12.7"},
			{"another port of that address", "198.18.12.5:81", "10.0.12.5"},
			{"a forward to a host of the map", "203.0.113.1:443", "10.0.12.8"},
			{"that host by the map", "198.18.12.8:443", "10.0.12.8"},
			{"a host with a map of its own", "198.18.12.20:80", "10.0.12.20"},
			{"a host with a map elsewhere", "203.0.113.21:80", "10.0.12.21"},
			{"a host of a stateless map in a map with sessions", "198.18.41.6:80", "10.0.48.6"},
			{"a port of a host with a stateless map alone", "203.0.113.49:80", "10.0.0.7"},
			{"a host with a stateless map alone", "203.0.113.49:81", "10.0.49.1"},
		} {
			in := c.becomes(t, "a stranger to "+one.what, c.out, c.in, udp(fmt.Sprintf("%s:%d", stranger, 900+i), one.to), stranger, one.host)
			c.becomes(t, "the reply of "+one.what, c.in, c.out, replyTo(in), netip.MustParseAddrPort(one.to).Addr().String(), stranger)
		}
	})
}
