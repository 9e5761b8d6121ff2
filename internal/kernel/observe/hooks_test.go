// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// someRules hang on hooks of four families.
const someRules = `
add table ip gw
add chain ip gw early { type filter hook prerouting priority -310; }
add chain ip gw nat-in { type nat hook prerouting priority dstnat; }
add chain ip gw nat-out { type nat hook postrouting priority srcnat; }
add chain ip gw through { type filter hook forward priority filter; }
add rule ip gw through ct state new accept
add table inet both
add chain inet both in { type filter hook input priority 7; }
add table bridge br
add chain bridge br b { type filter hook forward priority 3; }
add table netdev dev
add chain netdev dev lo-in { type filter hook ingress device lo priority 5; }
`

func line(h snapshot.Hook) string {
	return strings.Join(strings.Fields(fmt.Sprintln(h.Family, h.Device, h.Hook, h.Priority, h.Function, h.Owner, h.Chain, h.Via)), " ")
}

func TestHooks(t *testing.T) {
	l := routed(t, lab.RulesNone)
	gateway := l.NATNode()
	run(t, gateway, "nft -f -", someRules)
	hooks, err := Hooks(gateway.Handle())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, h := range hooks {
		got = append(got, line(h))
	}
	t.Log("\n" + strings.Join(got, "\n"))
	for _, want := range []string{
		"ipv4 prerouting -310 nft_do_chain_ipv4 nf_tables gw/early",
		"ipv4 prerouting -200 ipv4_conntrack_in",
		"ipv4 prerouting -100 nf_nat_ipv4_pre_routing",
		"ipv4 prerouting -100 nft_nat_do_chain nf_tables gw/nat-in nf_nat_ipv4_pre_routing",
		"ipv4 postrouting 100 nft_nat_do_chain nf_tables gw/nat-out nf_nat_ipv4_out",
		"ipv4 forward 0 nft_do_chain_ipv4 nf_tables gw/through",
		"ipv4 input 7 nft_do_chain_inet nf_tables both/in",
		"ipv6 input 7 nft_do_chain_inet nf_tables both/in",
		"bridge forward 3 nft_do_chain_bridge nf_tables br/b",
		"netdev lo ingress 5 nft_do_chain_netdev nf_tables dev/lo-in",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("not listed: %s", want)
		}
	}
	// On each hook the order is that of the priorities.
	for i := 1; i < len(hooks); i++ {
		a, b := hooks[i-1], hooks[i]
		if a.Family == b.Family && a.Device == b.Device && a.Hook == b.Hook && a.Priority > b.Priority {
			t.Errorf("%s comes before %s", got[i-1], got[i])
		}
	}
	if !slices.ContainsFunc(got, func(line string) bool { // ipv4_confirm until Linux 6.2
		return strings.HasPrefix(line, "ipv4 postrouting 2147483647 ") && strings.HasSuffix(line, "_confirm")
	}) {
		t.Error("no confirmation at the end of postrouting")
	}
	others, err := Hooks(l.Node(lab.RoleClient).Handle())
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range others {
		if !strings.HasPrefix(h.Function, "apparmor_") && !strings.HasPrefix(h.Function, "selinux_") { // in every namespace
			t.Errorf("in a namespace without rules: %s", line(h))
		}
	}
}

// Where the kernel can tell its hooks by netlink it tells the same ones.
func TestHooksByNetlink(t *testing.T) {
	l := routed(t, lab.RulesNone)
	gateway := l.NATNode()
	run(t, gateway, "nft -f -", someRules)
	told, err := netlinkHooks(gateway.Handle())
	if errors.Is(err, ErrUnavailable) {
		ktest.Unsupported(t, "%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	read, err := Hooks(gateway.Handle())
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, h := range told {
		got = append(got, line(h))
	}
	for _, h := range read {
		if h.Via == "" { // the NAT core's own chains are not told
			want = append(want, line(h))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("by netlink\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// answer encodes one answer of nfnetlink_hook as the kernel does.
func answer(t testing.TB, priority int32, function string, chainInfo func(*netlink.AttributeEncoder) error) []byte {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.Uint32(nfnlaHookNum, 0)
	ae.Uint32(nfnlaHookPrio, uint32(priority))
	ae.String(nfnlaHookFunc, function)
	if chainInfo != nil {
		ae.Nested(nfnlaHookChain, chainInfo)
	}
	attrs, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, attrs...)
}

func TestParseHook(t *testing.T) {
	chain := func(ae *netlink.AttributeEncoder) error {
		ae.Nested(nfnlaInfoDesc, func(ae *netlink.AttributeEncoder) error {
			ae.String(nfnlaChainTable, "gw")
			ae.String(nfnlaChainName, "through")
			return nil
		})
		ae.Uint32(nfnlaInfoType, hookOpNFTables)
		return nil
	}
	for _, tt := range []struct {
		data []byte
		want string
	}{
		{answer(t, -200, "ipv4_conntrack_in", nil), "ipv4 prerouting -200 ipv4_conntrack_in"},
		{answer(t, 0, "nft_do_chain_ipv4", chain), "ipv4 prerouting 0 nft_do_chain_ipv4 nf_tables gw/through"},
		{answer(t, 10, "nf_flow_offload_ip_hook", nil), "ipv4 prerouting 10 nf_flow_offload_ip_hook flowtable"},
	} {
		h, err := parseHook(tt.data, unix.NFPROTO_IPV4, 0, "")
		if err != nil || line(h) != tt.want {
			t.Errorf("%q, %v; want %q", line(h), err, tt.want)
		}
	}
	for _, data := range [][]byte{nil, {2, 0, 0}, append(answer(t, 0, "f", nil), 200, 0, 1, 0)} {
		if h, err := parseHook(data, unix.NFPROTO_IPV4, 0, ""); err == nil {
			t.Errorf("%x was read as %+v", data, h)
		}
	}
}

func FuzzParseHook(f *testing.F) {
	f.Add(answer(f, -200, "ipv4_conntrack_in", nil))
	f.Fuzz(func(t *testing.T, data []byte) { _, _ = parseHook(data, unix.NFPROTO_IPV4, 0, "") })
}

// The hooks of natkit's own namespace can be listed too.
func TestHooksOfOwn(t *testing.T) {
	ktest.Root(t)
	var own *netns.Handle
	if _, err := Hooks(own); err != nil {
		t.Fatal(err)
	}
}
