// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
)

// What the kernel's NAT has nothing like is refused by its name.
func TestRefused(t *testing.T) {
	for keys, want := range map[string]string{
		"drain: 203.0.113.1": "f:3:9: pool p: the kernel's NAT drains no address",
		"blocks: {size: 64}": "f:3:9: pool p: the kernel's NAT gives no blocks of ports",
	} {
		f, err := rulefile.Parse("f", []byte("inside: a\noutside: b\npools: {p: {addresses: 203.0.113.0/30, "+keys+"}}\nrules: [{snat: 10.0.0.0/24, to: p}]\n"))
		if err != nil {
			t.Fatal(err)
		}
		if err := refused(f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", keys, err, want)
		}
	}
}
