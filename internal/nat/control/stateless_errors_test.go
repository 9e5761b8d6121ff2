// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

const statelessRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - {map: 10.0.12.0/24 <-> 198.18.12.0/24, stateless: true}
  - {map: 10.0.13.7 <-> 203.0.113.40, stateless: true}
  - masquerade: 10.0.1.0/24
  - exclude: udp 10.0.12.0/24 -> 192.0.2.7:53
`

// ICMP errors about packets of stateless maps: both engines make the same of them, checksums inside
// included.
func TestStatelessErrors(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			m := &matrix{crossing: newCrossing(t, run.engine, run.attach, statelessRules), engine: run.engine}
			m.far = end("198.51.100.9:0")
			for _, host := range []string{"10.0.12.2", "10.0.13.7"} {
				for _, q := range statelessQuotes {
					for _, e := range statelessErrorsOf(netip.MustParseAddr(host)) {
						if e.name == "excluded" && q.name != "UDP" { // the exclusion is of UDP
							continue
						}
						t.Run(fmt.Sprintf("%s/%s/%s", host, q.name, e.name), func(t *testing.T) {
							m.t = t
							m.translated(e, q, run.engine)
						})
					}
				}
			}
			m.t = t
		})
	}
}

// statelessQuote is how much of what an error quotes.
type statelessQuote struct {
	name    string
	payload func(src, dst uint16) pktbuild.Payload
	options int
	quoted  int // 0: all
}

var statelessQuotes = []statelessQuote{
	{name: "UDP", payload: udpOf},
	{name: "8 bytes of UDP", payload: udpOf, quoted: 28},
	{name: "UDP without checksum", payload: func(src, dst uint16) pktbuild.Payload {
		return pktbuild.UDP{Src: src, Dst: dst, NoChecksum: true, Data: []byte("question")}
	}},
	{name: "UDP-Lite", payload: func(src, dst uint16) pktbuild.Payload {
		return pktbuild.UDP{Lite: true, Src: src, Dst: dst, Data: []byte("question")}
	}},
	{name: "TCP", payload: tcpOf},
	{name: "8 bytes of TCP", payload: tcpOf, quoted: 28},
	{name: "TCP to its checksum", payload: tcpOf, quoted: 38},
	{name: "odd", payload: tcpOf, quoted: 43},
	{name: "echo request", payload: func(src, _ uint16) pktbuild.Payload { return pktbuild.Echo(8, src, 1, []byte("ping")) }},
	{name: "options", payload: udpOf, options: 8},
}

func udpOf(src, dst uint16) pktbuild.Payload {
	return pktbuild.UDP{Src: src, Dst: dst, Data: []byte("question")}
}

func tcpOf(src, dst uint16) pktbuild.Payload {
	return pktbuild.TCP{Src: src, Dst: dst, Seq: 7, Flags: pktbuild.ACK, Data: []byte("question")}
}

// statelessError is an error: who sends it to whom, about a packet of whom to whom, and all four as
// they are to arrive.
type statelessError struct {
	name         string
	inside, to   bool // where it comes from, where it arrives
	kind, code   uint8
	sent, arrive [4]netip.Addr
}

func statelessErrorsOf(host netip.Addr) []statelessError {
	address := netip.MustParseAddr
	outside := address("203.0.113.40")
	if host == address("10.0.12.2") {
		outside = address("198.18.12.2")
	}
	world, router, within := address("198.51.100.9"), address("192.0.2.200"), address("10.0.99.1")
	excluded, other, otherOutside := address("192.0.2.7"), address("10.0.12.9"), address("198.18.12.9")
	all := []statelessError{
		{"a router outside", false, true, 11, 0, [4]netip.Addr{router, outside, outside, world}, [4]netip.Addr{router, host, host, world}},
		{"the receiver outside", false, true, 3, 3, [4]netip.Addr{world, outside, outside, world}, [4]netip.Addr{world, host, host, world}},
		{"fragmentation needed", false, true, 3, 4, [4]netip.Addr{router, outside, outside, world}, [4]netip.Addr{router, host, host, world}},
		{"the host", true, false, 3, 3, [4]netip.Addr{host, world, world, host}, [4]netip.Addr{outside, world, world, outside}},
		{"a router inside", true, false, 12, 0, [4]netip.Addr{within, world, world, host}, [4]netip.Addr{outside, world, world, outside}},
		{"hairpin", true, true, 3, 3, [4]netip.Addr{other, outside, outside, other}, [4]netip.Addr{otherOutside, host, host, otherOutside}},
	}
	if host == address("10.0.12.2") {
		all = append(all, statelessError{"excluded", true, false, 3, 3, [4]netip.Addr{host, excluded, excluded, host}, [4]netip.Addr{host, excluded, excluded, host}})
	}
	return all
}

func (m *matrix) translated(e statelessError, q statelessQuote, engine Engine) {
	m.t.Helper()
	src, dst := uint16(5000), uint16(53) // of a packet of the host
	if e.inside && !e.to {
		src, dst = dst, src
	}
	about := func(a [4]netip.Addr) pktbuild.IPv4 {
		inner := pktbuild.IPv4{Src: a[2], Dst: a[3], TTL: 1, ID: 9, Options: bytes.Repeat([]byte{1}, q.options), Payload: q.payload(src, dst)}
		data := inner.Bytes()
		if q.quoted > 0 {
			data = data[:q.quoted]
		}
		return pktbuild.IPv4{Src: a[0], Dst: a[1], TTL: 64, Payload: pktbuild.ICMP{Type: e.kind, Code: e.code, Rest: 1280, Data: data}}
	}
	sent, want := about(e.sent), about(e.arrive).Bytes()
	got, err := m.pass(e.inside, e.to, sent)
	if err != nil {
		m.t.Fatal(err)
	}
	ends := [2]netip.Addr{netip.AddrFrom4([4]byte(got[12:16])), netip.AddrFrom4([4]byte(got[16:20]))}
	if ends != [2]netip.Addr(e.arrive[:2]) {
		m.t.Errorf("it arrives from %v to %v, want %v", ends[0], ends[1], e.arrive[:2])
	}
	got, want = got[20:], want[20:]
	if engine == EngineNFT && q.options > 0 { // where that is, nft can't say: docs/rules.md
		at := 8 + 20 + q.options + 6
		copy(want[at:at+2], got[at:at+2])
		copy(want[2:4], got[2:4])
	}
	if !bytes.Equal(got, want) {
		m.t.Errorf("arrives as\n%x, want\n%x", got, want)
	}
}
