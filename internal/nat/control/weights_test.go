// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"math"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// everyWay is each engine, and each hook of engine ebpf.
var everyWay = []struct {
	name   string
	engine Engine
	attach Attach
}{{"nft", EngineNFT, ""}, {"tc", EngineEBPF, AttachTC}, {"xdp", EngineEBPF, AttachXDP}}

// onEveryWay runs a test of the same rules on each.
func onEveryWay(t *testing.T, rules string, test func(t *testing.T, c *crossing)) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, way := range everyWay {
		t.Run(way.name, func(t *testing.T) { test(t, newCrossing(t, way.engine, way.attach, rules)) })
	}
}

// arrives gives the next packet that the gateway sends there, nil if none comes.
func (w *wire) arrives(t testing.TB) []byte {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		if ip := w.take(t); ip != nil {
			return ip
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(w.socket), Events: unix.POLLIN}}, 100)
	}
	return nil
}

func sourceOf(ip []byte) netip.Addr      { return netip.AddrFrom4([4]byte(ip[12:16])) }
func destinationOf(ip []byte) netip.Addr { return netip.AddrFrom4([4]byte(ip[16:20])) }

const weightedRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - dnat: udp 203.0.113.1:80
    to: [10.0.0.2:8080, 10.0.0.3:8080]
    weights: [9, 1]
`

const weightedAgain = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - dnat: udp 203.0.113.1:80
    to: [10.0.0.2:8080, 10.0.0.4:8080, 10.0.0.3:8080]
    weights: [9, 2, 1]
`

// Targets have as many clients as their weights say, each client keeps its own, and when a
// target comes hardly anybody moves but to that.
func TestWeights(t *testing.T) {
	const clients = 1500
	first, second, third := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.4")
	onEveryWay(t, weightedRules, func(t *testing.T, c *crossing) {
		target := func(client, port int) netip.Addr {
			var src [4]byte
			binary.BigEndian.PutUint32(src[:], 0xc6120000+uint32(client)) // 198.18.0.0/15
			c.out.put(t, c.out.frame(pktbuild.IPv4{Src: netip.AddrFrom4(src), Dst: crossingOut, TTL: 64, Payload: pktbuild.UDP{Src: uint16(port), Dst: 80}}))
			ip := c.in.arrives(t)
			if ip == nil {
				t.Fatalf("nothing of client %d arrives", client)
			}
			if port := binary.BigEndian.Uint16(ip[22:]); port != 8080 {
				t.Fatalf("it arrives at port %d", port)
			}
			return destinationOf(ip)
		}
		near := func(what string, n int, want float64) {
			t.Helper()
			// Four standard deviations of so many draws, and one part of a hundred for the table.
			if off := math.Abs(float64(n)/clients - want); off > 4*math.Sqrt(want*(1-want)/clients)+0.01 {
				t.Errorf("%s is %d of %d, want %.3f", what, n, clients, want)
			}
		}
		had := make([]netip.Addr, clients)
		count := map[netip.Addr]int{}
		for client := range clients {
			had[client] = target(client, 1000)
			count[had[client]]++
			if again := target(client, 1001); again != had[client] {
				t.Fatalf("client %d met %s, then %s", client, had[client], again)
			}
		}
		near("the first target's share", count[first], 0.9)
		near("the second target's share", count[second], 0.1)

		file, err := rulefile.Parse("test.yaml", []byte(weightedAgain))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Apply(t.Context(), file, weightedAgain, Options{Namespace: c.gateway}); err != nil {
			t.Fatal(err)
		}
		came, moved := 0, 0
		for client := range clients {
			if old := target(client, 1000); old != had[client] {
				t.Fatalf("the session of client %d went on at %s, and was at %s", client, old, had[client])
			}
			switch now := target(client, 1002); {
			case now == third:
				came++
			case now != had[client]:
				moved++
			}
		}
		near("the share of the target that came", came, 2.0/12)
		if moved > clients/20 {
			t.Errorf("%d of %d clients moved between the other two", moved, clients)
		}
	})
}
