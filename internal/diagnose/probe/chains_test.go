// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// The messages of nftables, as the kernel sends them.

func attrs(t testing.TB, fn func(*netlink.AttributeEncoder)) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	fn(ae)
	b, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

type encoder = func(*netlink.AttributeEncoder)

func nest(ae *netlink.AttributeEncoder, typ uint16, fn encoder) {
	ae.Nested(typ, func(ae *netlink.AttributeEncoder) error { fn(ae); return nil })
}

// expression encodes one expression of a rule.
func expression(name string, fn encoder) encoder {
	return func(ae *netlink.AttributeEncoder) {
		nest(ae, unix.NFTA_LIST_ELEM, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_EXPR_NAME, name)
			nest(ae, unix.NFTA_EXPR_DATA, fn)
		})
	}
}

func verdict(code int32) encoder {
	return expression("immediate", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_IMMEDIATE_DREG, 0)
		nest(ae, unix.NFTA_IMMEDIATE_DATA, func(ae *netlink.AttributeEncoder) {
			nest(ae, unix.NFTA_DATA_VERDICT, func(ae *netlink.AttributeEncoder) { ae.Uint32(unix.NFTA_VERDICT_CODE, uint32(code)) })
		})
	})
}

func constant(register uint32, value ...byte) encoder {
	return expression("immediate", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_IMMEDIATE_DREG, register)
		nest(ae, unix.NFTA_IMMEDIATE_DATA, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.NFTA_DATA_VALUE, value) })
	})
}

func counter(packets uint64) encoder {
	return expression("counter", func(ae *netlink.AttributeEncoder) {
		ae.Uint64(unix.NFTA_COUNTER_BYTES, 1)
		ae.Uint64(unix.NFTA_COUNTER_PACKETS, packets)
	})
}

func compatTarget(name string, info []byte) encoder {
	return expression("target", func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_TARGET_NAME, name)
		ae.Bytes(unix.NFTA_TARGET_INFO, info)
	})
}

func ruleOf(t testing.TB, table, chain string, expressions ...encoder) []byte {
	return attrs(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, table)
		ae.String(unix.NFTA_RULE_CHAIN, chain)
		nest(ae, unix.NFTA_RULE_EXPRESSIONS, func(ae *netlink.AttributeEncoder) {
			for _, e := range expressions {
				e(ae)
			}
		})
	})
}

// natRange is a struct nf_nat_range, compatRange the older one of IPv4.
func natRange(flags uint32, low, high uint16) []byte {
	b := make([]byte, 40)
	binary.NativeEndian.PutUint32(b, flags)
	copy(b[4:], []byte{10, 0, 0, 7})
	copy(b[20:], []byte{10, 0, 0, 9})
	binary.BigEndian.PutUint16(b[36:], low)
	binary.BigEndian.PutUint16(b[38:], high)
	return b
}

func compatRange(flags uint32, low, high uint16) []byte {
	b := make([]byte, 24) // 20 and padding
	b[0] = 1
	binary.NativeEndian.PutUint32(b[4:], flags)
	copy(b[8:], []byte{10, 0, 0, 7})
	copy(b[12:], []byte{10, 0, 0, 9})
	binary.BigEndian.PutUint16(b[16:], low)
	binary.BigEndian.PutUint16(b[18:], high)
	return b
}

func TestNFTablesMessages(t *testing.T) {
	none := func(*netlink.AttributeEncoder) {}
	payload := expression("payload", func(ae *netlink.AttributeEncoder) { // tcp dport 80
		ae.Uint32(unix.NFTA_PAYLOAD_DREG, 1)
		ae.Uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_TRANSPORT_HEADER)
		ae.Uint32(unix.NFTA_PAYLOAD_OFFSET, 2)
		ae.Uint32(unix.NFTA_PAYLOAD_LEN, 2)
	})
	cmp := expression("cmp", func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_CMP_SREG, 1)
		ae.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		nest(ae, unix.NFTA_CMP_DATA, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.NFTA_DATA_VALUE, []byte{0, 80}) })
	})
	match := func(name string) encoder {
		return expression("match", func(ae *netlink.AttributeEncoder) { ae.String(unix.NFTA_MATCH_NAME, name) })
	}
	set := newNFTRuleset()
	for _, table := range []struct {
		name  string
		flags uint32
	}{{"filter", 0}, {"asleep", 1}} {
		if err := set.addTable(unix.NFPROTO_IPV4, attrs(t, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_TABLE_NAME, table.name)
			ae.Uint32(unix.NFTA_TABLE_FLAGS, table.flags)
		})); err != nil {
			t.Fatal(err)
		}
		if err := set.addChain(unix.NFPROTO_IPV4, attrs(t, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_CHAIN_TABLE, table.name)
			ae.String(unix.NFTA_CHAIN_NAME, "forward")
			ae.String(unix.NFTA_CHAIN_TYPE, "filter")
			ae.Uint32(unix.NFTA_CHAIN_POLICY, 0)
			nest(ae, unix.NFTA_CHAIN_HOOK, func(ae *netlink.AttributeEncoder) {
				ae.Uint32(unix.NFTA_HOOK_HOOKNUM, 2)
				ae.Uint32(unix.NFTA_HOOK_PRIORITY, 0xffffff6a) // -150
			})
			nest(ae, unix.NFTA_CHAIN_COUNTERS, func(ae *netlink.AttributeEncoder) { ae.Uint64(unix.NFTA_COUNTER_PACKETS, 77) })
		})); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range [][]byte{
		ruleOf(t, "filter", "forward", payload, cmp, counter(5), verdict(0)),      // 1 drop on a condition
		ruleOf(t, "filter", "forward", verdict(1)),                                // 2 accept
		ruleOf(t, "filter", "forward", verdict(-3)),                               // 3 jump
		ruleOf(t, "filter", "forward", match("comment"), verdict(0)),              // 4 a comment is no condition
		ruleOf(t, "filter", "forward", match("conntrack"), verdict(0)),            // 5
		ruleOf(t, "filter", "forward", counter(6), expression("reject", none)),    // 6
		ruleOf(t, "filter", "forward", payload, cmp, compatTarget("REJECT", nil)), // 7
		ruleOf(t, "filter", "forward", compatTarget("SNAT", natRange(3, 10, 20))), // 8
		ruleOf(t, "filter", "forward", compatTarget("MASQUERADE", compatRange(2, 30, 40))),
		ruleOf(t, "filter", "forward", compatTarget("DNAT", natRange(3, 80, 80))),
		ruleOf(t, "filter", "forward", constant(1, 10, 0, 0, 1), constant(2, 0x13, 0x88, 0, 0), constant(3, 0x13, 0x8b, 0, 0),
			expression("nat", func(ae *netlink.AttributeEncoder) {
				ae.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
				ae.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, 1)
				ae.Uint32(unix.NFTA_NAT_REG_PROTO_MIN, 2)
				ae.Uint32(unix.NFTA_NAT_REG_PROTO_MAX, 3)
			})),
		ruleOf(t, "filter", "forward", expression("masq", none)),
		ruleOf(t, "filter", "forward", constant(1, 0x1f, 0x90), expression("redir", func(ae *netlink.AttributeEncoder) {
			ae.Uint32(unix.NFTA_REDIR_REG_PROTO_MIN, 1)
		})),
		ruleOf(t, "filter", "unheard-of", verdict(0)),
		ruleOf(t, "asleep", "forward", verdict(0)),
	} {
		if err := set.addRule(unix.NFPROTO_IPV4, r); err != nil {
			t.Fatal(err)
		}
	}
	want := []snapshot.Chain{{
		Backend: "nft", Family: "ip", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Priority: -150,
		Policy: "drop", PolicyPackets: new(uint64(77)), Rules: 13,
		NATRules:   map[string]int{"snat": 2, "masquerade": 2, "dnat": 1, "redirect": 1},
		SNATRanges: []snapshot.PortRange{{Min: 10, Max: 20}, {Min: 30, Max: 40}, {Min: 5000, Max: 5003}, {}},
		SNATTo:     []snapshot.AddrRange{sevenToNine, {First: netip.MustParseAddr("10.0.0.1"), Last: netip.MustParseAddr("10.0.0.1")}},
		DNATTo:     []snapshot.Target{{AddrRange: sevenToNine, Ports: snapshot.PortRange{Min: 80, Max: 80}}},
		DropRules: []snapshot.DropRule{
			{Number: 1, Verdict: "drop", Packets: new(uint64(5))},
			{Number: 4, Verdict: "drop", All: true},
			{Number: 5, Verdict: "drop"},
			{Number: 6, Verdict: "reject", All: true, Packets: new(uint64(6))},
			{Number: 7, Verdict: "reject"},
		},
	}}
	if !reflect.DeepEqual(set.out, want) {
		t.Errorf("got  %+v\nwant %+v", set.out, want)
	}
}

func TestHookName(t *testing.T) {
	for _, c := range []struct {
		family string
		number uint32
		want   string
	}{
		{"ip", 2, "forward"}, {"inet", 5, "ingress"}, {"bridge", 4, "postrouting"},
		{"netdev", 0, "ingress"}, {"netdev", 1, "egress"}, {"arp", 1, "output"},
		{"ip", 6, "hook 6"}, {"netdev", 1<<32 - 1, "hook 4294967295"},
	} {
		if got := hookName(c.family, c.number); got != c.want {
			t.Errorf("hook %d of %s is %q, want %q", c.number, c.family, got, c.want)
		}
	}
}

var sevenToNine = snapshot.AddrRange{First: netip.MustParseAddr("10.0.0.7"), Last: netip.MustParseAddr("10.0.0.9")}

func TestXTNATRange(t *testing.T) {
	some, none := snapshot.PortRange{Min: 1000, Max: 2000}, snapshot.AddrRange{}
	for _, c := range []struct {
		name  string
		info  []byte
		addrs snapshot.AddrRange
		ports snapshot.PortRange
	}{
		{"range", natRange(3, 1000, 2000), sevenToNine, some},
		{"range, ports only", natRange(2, 1000, 2000), none, some},
		{"range, addresses only", natRange(1, 1000, 2000), sevenToNine, snapshot.PortRange{}},
		{"old range", compatRange(3, 1000, 2000), sevenToNine, some},
		{"old range, addresses only", compatRange(1, 1000, 2000), sevenToNine, snapshot.PortRange{}},
		{"newest, with a base port", append(natRange(2, 7, 8), make([]byte, 8)...), none, snapshot.PortRange{Min: 7, Max: 8}},
		{"nothing", nil, none, snapshot.PortRange{}},
		{"cut", natRange(2, 1, 2)[:19], none, snapshot.PortRange{}},
	} {
		if addrs, ports := xtNATRange("ip", c.info); addrs != c.addrs || ports != c.ports {
			t.Errorf("%s: %v %v, want %v %v", c.name, addrs, ports, c.addrs, c.ports)
		}
	}
	if addrs, _ := xtNATRange("ip6", natRange(1, 0, 0)); addrs.First != netip.MustParseAddr("a00:7::") {
		t.Errorf("IPv6 address %v", addrs.First)
	}
}

// A table of iptables-legacy, as the kernel hands it over.

type iptRule struct {
	source  byte // a condition on the source, if not 0
	matches []string
	target  string // "" is the standard target
	info    []byte
	packets uint64
}

func standard(verdict int32) []byte {
	return binary.NativeEndian.AppendUint32(nil, uint32(verdict))
}

func (r iptRule) bytes() []byte {
	b := make([]byte, ipt4.entry)
	if b[0] = r.source; r.source != 0 {
		b[8] = 255 // its mask
	}
	binary.NativeEndian.PutUint64(b[ipt4.counters:], r.packets)
	extension := func(name string, info []byte) {
		e := make([]byte, xtTargetLen, xtTargetLen+len(info)+8)
		copy(e[xtNameOffset:], name)
		e = append(e, info...)
		for len(e)%8 != 0 {
			e = append(e, 0)
		}
		binary.NativeEndian.PutUint16(e, uint16(len(e)))
		b = append(b, e...)
	}
	for _, m := range r.matches {
		extension(m, make([]byte, 16))
	}
	binary.NativeEndian.PutUint16(b[ipt4.target:], uint16(len(b)))
	extension(r.target, r.info)
	binary.NativeEndian.PutUint16(b[ipt4.next:], uint16(len(b)))
	return b
}

// iptTable returns a filter table: INPUT, FORWARD with rules, OUTPUT, a chain of
// the user's.
func iptTable() (iptInfo, []byte) {
	var b []byte
	add := func(r iptRule) uint32 {
		at := uint32(len(b))
		b = append(b, r.bytes()...)
		return at
	}
	info := iptInfo{validHooks: 1<<1 | 1<<2 | 1<<3}
	info.hookEntry[1] = add(iptRule{info: standard(-2), packets: 11})
	info.underflow[1] = info.hookEntry[1] // an empty chain is its policy
	info.hookEntry[2] = add(iptRule{source: 10, info: standard(-1), packets: 3})
	add(iptRule{matches: []string{"comment"}, info: standard(-1), packets: 4})
	add(iptRule{matches: []string{"comment", "conntrack"}, target: "REJECT", info: make([]byte, 4), packets: 9})
	add(iptRule{target: "SNAT", info: compatRange(3, 1000, 2000)})
	add(iptRule{target: "MARK", info: make([]byte, 12)})
	info.underflow[2] = add(iptRule{info: standard(-1), packets: 12})
	info.hookEntry[3] = add(iptRule{info: standard(-2), packets: 13})
	info.underflow[3] = info.hookEntry[3]
	add(iptRule{target: "ERROR", info: append([]byte("mine"), make([]byte, 28)...)})
	add(iptRule{info: standard(-1), packets: 1}) // DROP
	add(iptRule{info: standard(-5)})             // the RETURN that ends it
	add(iptRule{target: "ERROR", info: append([]byte("empty"), make([]byte, 27)...)})
	add(iptRule{info: standard(-5)})
	add(iptRule{target: "ERROR", info: append([]byte("ERROR"), make([]byte, 27)...)})
	info.size = uint32(len(b))
	return info, b
}

func TestParseIPTable(t *testing.T) {
	info, entries := iptTable()
	got, err := ipt4.parse("filter", info, entries, false)
	if err != nil {
		t.Fatal(err)
	}
	base := func(name, hook, policy string, packets uint64) snapshot.Chain {
		return snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: name, Hook: hook, Type: "filter", Policy: policy, PolicyPackets: &packets}
	}
	forward := base("FORWARD", "forward", "drop", 12)
	forward.Rules = 5
	forward.NATRules = map[string]int{"snat": 1}
	forward.SNATRanges = []snapshot.PortRange{{Min: 1000, Max: 2000}}
	forward.SNATTo = []snapshot.AddrRange{sevenToNine}
	forward.DropRules = []snapshot.DropRule{
		{Number: 1, Verdict: "drop", Packets: new(uint64(3))},
		{Number: 2, Verdict: "drop", All: true, Packets: new(uint64(4))},
		{Number: 3, Verdict: "reject", Packets: new(uint64(9))},
	}
	user := snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "mine", Rules: 1,
		DropRules: []snapshot.DropRule{{Number: 1, Verdict: "drop", All: true, Packets: new(uint64(1))}}}
	empty := snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "empty"}
	for i, texts := range [][]string{1: {"-A FORWARD -s 10.0.0.0/8 -j DROP", "-A FORWARD -j DROP", "-A FORWARD -m conntrack -j REJECT", "-A FORWARD -j SNAT --to-source 10.0.0.7-10.0.0.9:1000-2000", "-A FORWARD -j MARK"}} {
		var walked []string
		for _, r := range got[i].Walk {
			walked = append(walked, r.Text)
		}
		if !slices.Equal(walked, texts) {
			t.Errorf("rules of %s are %q, want %q", got[i].Name, walked, texts)
		}
	}
	for i := range got {
		got[i].Walk = nil
	}
	want := []snapshot.Chain{base("INPUT", "input", "accept", 11), forward, base("OUTPUT", "output", "accept", 13), user, empty}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseIPTableRefuses(t *testing.T) {
	info, entries := iptTable()
	for _, c := range []struct {
		name   string
		damage func(b []byte) []byte
		want   string
	}{
		{"cut", func(b []byte) []byte { return b[:len(b)-20] }, "left"},
		{"no next", func(b []byte) []byte { b[ipt4.next], b[ipt4.next+1] = 0, 0; return b }, "target at"},
		{"target before the entry", func(b []byte) []byte { b[ipt4.target] = 4; return b }, "target at 4"},
		{"starts outside of a chain", func(b []byte) []byte { return iptRule{info: standard(-2)}.bytes() }, "in no chain"},
		{"match without length", func([]byte) []byte {
			b := iptRule{matches: []string{"x"}, info: standard(-2)}.bytes()
			b[ipt4.entry], b[ipt4.entry+1] = 0, 0
			return b
		}, "match at 112"},
	} {
		where := info
		if c.name == "starts outside of a chain" {
			where = iptInfo{}
		}
		if _, err := ipt4.parse("filter", where, c.damage(append([]byte{}, entries...)), false); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	if got, err := ipt4.parse("filter", iptInfo{}, nil, false); err != nil || len(got) != 0 {
		t.Errorf("empty table: %v, %v", got, err)
	}
}

func TestChainIncreases(t *testing.T) {
	chain := func(name string, rules int, policy uint64, drops ...uint64) snapshot.Chain {
		c := snapshot.Chain{Name: name, Rules: rules, PolicyPackets: &policy}
		for i, n := range drops {
			c.DropRules = append(c.DropRules, snapshot.DropRule{Number: i + 1, Packets: new(n)})
		}
		return c
	}
	before := []snapshot.Chain{chain("same", 2, 10, 1, 1), chain("reset", 1, 10, 10), chain("changed", 1, 1, 1)}
	uncounted := snapshot.Chain{Name: "uncounted", DropRules: []snapshot.DropRule{{Number: 1}}}
	hooked := chain("new", 1, 5, 5)
	hooked.Hook = "forward"
	got := chainIncreases(before, []snapshot.Chain{chain("same", 2, 15, 2, 9), chain("reset", 1, 3, 4), chain("changed", 2, 3, 9, 1), uncounted, hooked})

	want := []snapshot.Chain{hooked, chain("same", 2, 5, 8, 1), chain("reset", 1, 3, 4), chain("changed", 2, 2, 0, 0), uncounted}
	want[1].DropRules[0].Number, want[1].DropRules[1].Number = 2, 1 // the busier first
	want[3].DropRules[0].Packets, want[3].DropRules[1].Packets = nil, nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// A rule that drops stands in DropRules and in Walk, and its counter has one increase.
func TestChainIncreasesOfOneRule(t *testing.T) {
	at := func(packets uint64) []snapshot.Chain {
		r := ruleReader{rule: &snapshot.Rule{Number: 1, Handle: 7, Verdict: "drop", Packets: &packets}}
		var c snapshot.Chain
		r.addTo(&c)
		c.Walk = []snapshot.Rule{*r.rule}
		return []snapshot.Chain{c}
	}
	got := chainIncreases(at(100), at(250))[0]
	if dropped, met := *got.DropRules[0].Packets, *got.Walk[0].Packets; dropped != 150 || met != 150 {
		t.Errorf("increases %d and %d of a counter that went from 100 to 250", dropped, met)
	}
}

func FuzzChains(f *testing.F) {
	info, entries := iptTable()
	f.Add(entries, info.hookEntry[2], info.underflow[2])
	f.Add(ruleOf(f, "filter", "forward", counter(5), verdict(0), compatTarget("SNAT", natRange(2, 1, 2))), uint32(0), uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, entry, underflow uint32) {
		for _, l := range []*iptLayout{&ipt4, &ipt6} {
			l.parse("nat", iptInfo{validHooks: 4, hookEntry: [5]uint32{2: entry}, underflow: [5]uint32{2: underflow}}, b, false)
		}
		set := newNFTRuleset()
		set.chains[nftKey{2, "filter", "forward"}] = 0
		set.out, set.keys = make([]snapshot.Chain, 1), make([]nftKey, 1)
		set.addRule(2, b)
		set.addChain(2, b)
		set.addTable(2, b)
		appendElements(nil, b)
		parseListener(b)
	})
}
