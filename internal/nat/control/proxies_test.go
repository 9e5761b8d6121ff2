// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// Engine nft answers for all of a pool on a connected network, however large; a map that has too
// much of it is refused, as on engine ebpf.
func TestKernelProxies(t *testing.T) {
	ktest.Root(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	const head = "inside: in\noutside: out\n"
	for _, one := range []struct {
		rules, tooMany string
		want           int
	}{
		{"pools: {p: {addresses: 198.18.64.0/18}}\nrules: [{snat: 10.0.0.0/8, to: p}]\n", "", 1 << 14},
		{"rules: [{map: 10.0.0.0/15 <-> 198.18.0.0/15}]\n", "198.18.0.0/17 on a connected network are 32768 addresses", 0},
		{"rules: [{map: 10.0.0.0/8 <-> 203.0.0.0/8}]\n", "", 255},
	} {
		file, err := rulefile.Parse("f", []byte(head+one.rules))
		if err != nil {
			t.Fatal(err)
		}
		err = ns.Do(func() error {
			if _, err := netlink.LinkByName("out"); err != nil {
				out := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out"}, PeerName: "far"}
				first, err1 := netlink.ParseAddr("198.18.0.1/17")
				second, err2 := netlink.ParseAddr("203.0.113.1/24")
				if err := errors.Join(err1, err2, netlink.LinkAdd(out), netlink.AddrAdd(out, first), netlink.AddrAdd(out, second)); err != nil {
					return err
				}
			}
			proxies, tooMany, err := kernelProxies(file)
			if len(proxies) != one.want || (tooMany == "") != (one.tooMany == "") || !strings.Contains(tooMany, one.tooMany) {
				t.Errorf("%s: %d addresses, %q; want %d, %q", one.rules, len(proxies), tooMany, one.want, one.tooMany)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
