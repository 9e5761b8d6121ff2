// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

const computedFile = `inside: eth1
outside: eth0
pools:
  cgn: {addresses: [203.0.113.0/30, 198.51.100.7], ports: 1024-65535, blocks: {size: 512, extra: 512, at_most: 1, deterministic: all}}
subscribers: {by: /30}
rules:
  - {snat: 10.0.0.0/24, to: cgn}
  - {snat: 10.0.2.0/25, to: cgn}
  - {snat: 10.0.0.64/26, to: cgn, in: eth1}
`

// Every subscriber's blocks lead back to it, and no two overlap.
func TestComputedBlocks(t *testing.T) {
	f := must(Parse("f", []byte(computedFile)))
	taken := map[netip.AddrPort]netip.Prefix{}
	for _, source := range []string{"10.0.0.0/24", "10.0.2.0/25"} {
		prefix := netip.MustParsePrefix(source)
		for host := prefix.Addr(); prefix.Contains(host); host = host.Next() {
			blocks := f.ComputedBlocks(host)
			if len(blocks) != 2 || blocks[0].Address != blocks[1].Address {
				t.Fatalf("%s: %v", host, blocks)
			}
			for _, b := range blocks {
				if !b.Subscriber.Contains(host) || b.LastPort-b.FirstPort != 511 || b.FirstPort%512 != 0 {
					t.Fatalf("%s: %v", host, b)
				}
				if had, ok := taken[netip.AddrPortFrom(b.Address, b.FirstPort)]; ok && had != b.Subscriber {
					t.Fatalf("%v is also of %v", b, had)
				}
				taken[netip.AddrPortFrom(b.Address, b.FirstPort)] = b.Subscriber
				end := netip.AddrPortFrom(b.Address, b.FirstPort+uint16(rand.IntN(512)))
				if got, ok := f.ComputedOwner(end); !ok || got != b {
					t.Fatalf("%v is of %v (%t), want %v", end, got, ok, b)
				}
			}
		}
	}
	if want := 2 * (64 + 32); len(taken) != want {
		t.Errorf("%d blocks, want %d", len(taken), want)
	}
	for _, end := range []string{"203.0.113.0:1023", "203.0.113.0:65535", "203.0.113.9:2048"} {
		if got, ok := f.ComputedOwner(netip.MustParseAddrPort(end)); ok {
			t.Errorf("%s is of %v", end, got)
		}
	}
	if got := f.ComputedBlocks(netip.MustParseAddr("10.0.2.128")); got != nil {
		t.Errorf("a host of no rule has %v", got)
	}
}

func TestComputedProblems(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"10.0.2.0/25", "10.1.0.0/16", "f:4:3: pool cgn is too small for 2 computed blocks of 512 ports for each subscriber: the sources of its rules are 16448 subscribers, 3290 for each of its addresses, which have room for 63 (1024-65535): take a smaller size, more addresses, or rules for fewer subscribers"},
		{"extra: 512", "extra: 256", "f:4:3: pool cgn: with deterministic: all the blocks of a subscriber are of one size: extra is 256, and size 512"},
		{"blocks:", "drain: 203.0.113.9, blocks:", "f:4:78: pool cgn drains 203.0.113.9, which is not among its addresses"},
	} {
		_, err := Parse("f", []byte(strings.Replace(computedFile, c.old, c.new, 1)))
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v\nwant %s", c.new, err, c.want)
		}
	}
	f := must(Parse("f", []byte(strings.Replace(computedFile, "blocks:", "drain: [203.0.113.0/30, 198.51.100.7], blocks:", 1))))
	if w := f.Warnings(); len(w) != 1 || !strings.Contains(w[0].String(), "all addresses of pool cgn are being drained") {
		t.Errorf("warnings %v", w)
	}
}
