// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"os/exec"
	"reflect"
	"strings"
	"testing"

	"natkit/internal/nat/nft"
	"natkit/internal/testutil/ktest"
)

func TestBaseRules(t *testing.T) {
	h := namespace(t)
	if err := h.Do(func() error {
		cmd := exec.Command(ktest.Tool(t, "nft"), "-f", "-")
		cmd.Stdin = strings.NewReader(`
add table inet t
add chain inet t in { type filter hook input priority 0; }
add chain inet t user
add rule inet t user accept
add rule inet t in tcp dport 22 accept
add rule inet t in counter packets 7 bytes 100 drop
add table bridge b
add chain bridge b empty { type filter hook forward priority 0; }
`)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Logf("%s", out)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	got, err := nft.BaseRules(h)
	if err != nil {
		t.Fatal(err)
	}
	rules := got[nft.ChainName{Family: "inet", Table: "t", Chain: "in"}]
	if len(got) != 2 || len(rules) != 2 || rules[0].Packets != nil || rules[1].Packets == nil || *rules[1].Packets != 7 || rules[0].Handle == rules[1].Handle {
		t.Errorf("%+v", got)
	}
	if empty, ok := got[nft.ChainName{Family: "bridge", Table: "b", Chain: "empty"}]; !ok || len(empty) != 0 {
		t.Errorf("the empty chain: %v, %v", empty, ok)
	}
}

func TestSince(t *testing.T) {
	name := nft.ChainName{Family: "ip", Table: "t", Chain: "c"}
	use := func(handle, packets uint64) nft.RuleUse { return nft.RuleUse{Handle: handle, Packets: &packets} }
	before := map[nft.ChainName][]nft.RuleUse{name: {use(1, 10), use(2, 5), {Handle: 3}, use(5, 9)}}
	after := map[nft.ChainName][]nft.RuleUse{name: {use(4, 6), use(1, 17), use(2, 3), {Handle: 3}}} // the second was reset
	nft.Since(before, after)
	want := []nft.RuleUse{use(4, 6), use(1, 7), use(2, 3), {Handle: 3}}
	if !reflect.DeepEqual(after[name], want) {
		t.Errorf("%+v, want %+v", after[name], want)
	}
}
