// SPDX-License-Identifier: Apache-2.0

package blame

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"natkit/internal/snapshot"
)

// machine is a router with eth1 inside, eth0 outside and a bridge with two ports.
func machine(chains ...snapshot.Chain) *snapshot.Snapshot {
	address := func(name, master, kind string, prefix string) snapshot.Interface {
		l := snapshot.Interface{Name: name, Master: master, Kind: kind}
		if prefix != "" {
			l.Addresses = []netip.Prefix{netip.MustParsePrefix(prefix)}
		}
		return l
	}
	return &snapshot.Snapshot{
		Host: snapshot.Host{Kernel: "6.12.0"}, Chains: chains,
		Interfaces: []snapshot.Interface{address("eth0", "", "device", "203.0.113.1/24"), address("eth1", "", "device", "192.168.0.1/24"),
			address("br0", "", "bridge", "10.5.0.1/24"), address("p1", "br0", "veth", ""), address("p2", "br0", "veth", "")},
	}
}

func chainOf(name, hook, policy string, priority int, rules ...snapshot.Rule) snapshot.Chain {
	for i := range rules {
		rules[i].Number = i + 1
	}
	return snapshot.Chain{Backend: "nft", Family: "inet", Table: "f", Name: name, Hook: hook, Type: "filter", Policy: policy, Priority: priority, Rules: len(rules), Walk: append([]snapshot.Rule{}, rules...)}
}

func when(key string, values ...string) snapshot.Match {
	return snapshot.Match{Keys: []string{key}, Values: values}
}

func not(m snapshot.Match) snapshot.Match { m.Not = true; return m }

func in(set string, keys ...string) snapshot.Match { return snapshot.Match{Keys: keys, Set: set} }

var untold = snapshot.Match{Text: "limit rate 1/second"}

func rule(verdict string, matches ...snapshot.Match) snapshot.Rule {
	return snapshot.Rule{Verdict: verdict, Matches: matches}
}

func to(verdict, chain string, matches ...snapshot.Match) snapshot.Rule {
	return snapshot.Rule{Verdict: verdict, Chain: chain, Matches: matches}
}

func counts(r snapshot.Rule, n uint64) snapshot.Rule { r.Packets = &n; return r }

var syn = snapshot.DroppedPacket{Text: "tcp 192.168.0.2:4000 -> 203.0.113.2:80 SYN", Stage: snapshot.StageRouted, In: "eth1", Out: "eth0", State: "new", TTL: 63, Length: 60}

func TestFollow(t *testing.T) {
	fw := func(policy string, rules ...snapshot.Rule) []snapshot.Chain {
		return []snapshot.Chain{chainOf("fw", "forward", policy, 0, rules...)}
	}
	as := func(change func(p *snapshot.DroppedPacket)) *snapshot.DroppedPacket {
		p := syn
		change(&p)
		return &p
	}
	set := func(whole bool, elements ...snapshot.Element) []snapshot.Set {
		return []snapshot.Set{{Backend: "nft", Family: "inet", Table: "f", Name: "bad", Whole: whole, Elements: elements}}
	}
	for _, tt := range []struct {
		name   string
		chains []snapshot.Chain
		sets   []snapshot.Set
		packet *snapshot.DroppedPacket
		at     string // where it was dropped
		want   []string
		unread bool
	}{
		{name: "the first that drops", chains: fw("drop", rule("drop", when("ip saddr", "10.0.0.1")), rule("drop", when("ip saddr", "192.168.0.0/24")), rule("drop")), want: []string{"fw 2"}},
		{name: "the policy", chains: fw("drop", rule("drop", when("ip saddr", "10.0.0.1"))), want: []string{"fw"}},
		{name: "accepted before", chains: fw("drop", rule("accept", when("tcp dport", "80")), rule("drop"))},
		{name: "a range, a negation", chains: fw("drop", rule("accept", not(when("tcp dport", "1-1023"))), rule("drop", when("tcp dport", "79-81"))), want: []string{"fw 2"}},
		{name: "no such header, inverted or not", chains: fw("drop", rule("drop", not(when("udp dport", "53"))), rule("drop", when("ip6 saddr", "::/0"))), want: []string{"fw"}},
		{name: "states", chains: fw("accept", rule("accept", when("ct state", "established", "related")), rule("drop", when("ct state", "new", "invalid"))), want: []string{"fw 2"}},
		{name: "interfaces", chains: fw("accept", rule("drop", when("iifname", "eth0")), rule("drop", when("oifname", "eth*"), when("iifname", "eth1"))), want: []string{"fw 2"}},
		{name: "the TTL and flags", chains: fw("accept", rule("drop", when("ip ttl", "0-9")), rule("drop", snapshot.Match{Keys: []string{"tcp flags"}, Mask: 0x17, Values: []string{"2"}})), want: []string{"fw 2"}},
		{name: "a flag that is missing", chains: fw("drop", rule("drop", snapshot.Match{Keys: []string{"tcp flags"}, Mask: 0x10, Values: []string{"0x10"}})), want: []string{"fw"}},
		{name: "a mark", packet: as(func(p *snapshot.DroppedPacket) { p.Mark = 0x17 }), chains: fw("drop", rule("drop", snapshot.Match{Keys: []string{"meta mark"}, Mask: 0xf, Values: []string{"0x7"}})), want: []string{"fw 1"}},

		{name: "may be: it or the policy", chains: fw("drop", rule("drop", untold)), want: []string{"fw 1", "fw"}},
		{name: "may be, but has not counted", chains: fw("drop", counts(rule("drop", untold), 0)), want: []string{"fw"}},
		{name: "may be, and has counted", chains: fw("drop", counts(rule("drop", untold), 7)), want: []string{"fw 1", "fw"}},
		{name: "may have been accepted, by one chain of two", chains: append(fw("drop", rule("accept", untold)), chainOf("late", "forward", "drop", 5)), want: []string{"fw", "late"}},
		{name: "a field that is not known", chains: fw("accept", rule("drop", when("meta skuid", "0"))), want: []string{"fw 1"}},

		{name: "a jump that comes back", chains: append(fw("drop", to("jump", "sub", when("tcp dport", "80")), rule("drop", when("ip saddr", "192.168.0.2"))), chainOf("sub", "", "", 0, rule("return", when("ip saddr", "192.168.0.2")), rule("drop"))), want: []string{"fw 2"}},
		{name: "a goto does not", chains: append(fw("drop", to("goto", "sub"), rule("accept")), chainOf("sub", "", "", 0)), want: []string{"fw"}},
		{name: "a jump to itself", chains: append(fw("drop", to("jump", "sub")), chainOf("sub", "", "", 0, to("jump", "sub"))), want: []string{"fw"}, unread: true},
		{name: "by priority", chains: []snapshot.Chain{chainOf("late", "forward", "drop", 9), chainOf("early", "forward", "drop", -9)}, want: []string{"early"}},
		{name: "only what it met: routed", chains: []snapshot.Chain{chainOf("pre", "prerouting", "drop", 0), chainOf("in", "input", "drop", 0), chainOf("fw", "forward", "drop", 0)}, want: []string{"fw"}},
		{name: "arrived", packet: as(func(p *snapshot.DroppedPacket) { p.Stage = snapshot.StageArrived }), chains: []snapshot.Chain{chainOf("pre", "prerouting", "drop", 0), chainOf("fw", "forward", "drop", 0)}, want: []string{"pre"}},
		{name: "for this machine", packet: as(func(p *snapshot.DroppedPacket) { p.Text = "tcp 192.168.0.2:4000 -> 192.168.0.1:22 SYN" }), chains: []snapshot.Chain{chainOf("in", "input", "drop", 0), chainOf("fw", "forward", "drop", 0)}, want: []string{"in"}},
		{name: "bridged, as IP rules see it", packet: as(func(p *snapshot.DroppedPacket) {
			p.Stage, p.In, p.Text = snapshot.StageLeaving, "p1", "udp 10.5.0.2:1 -> 10.5.0.3:2"
		}),
			chains: fw("accept", rule("drop", when("iifname", "p1")), rule("drop", when("iifname", "br0"))), want: []string{"fw 2"}},

		{name: "an element", sets: set(true, snapshot.Element{Key: []string{"192.168.0.2", "80"}}), chains: fw("drop", rule("drop", in("bad", "ip saddr", "tcp dport"))), want: []string{"fw 1"}},
		{name: "not in the set", sets: set(true, snapshot.Element{Key: []string{"192.168.0.2", "443"}}), chains: fw("drop", rule("drop", in("bad", "ip saddr", "tcp dport"))), want: []string{"fw"}},
		{name: "a set that was not read whole", sets: set(false), chains: fw("drop", rule("drop", in("bad", "ip saddr"))), want: []string{"fw 1", "fw"}},
		{name: "a set that was not read", chains: fw("drop", rule("drop", in("bad", "ip saddr"))), want: []string{"fw 1", "fw"}},
		{name: "a map", sets: set(true, snapshot.Element{Key: []string{"10.0.0.0/8"}, Verdict: "accept"}, snapshot.Element{Key: []string{"192.168.0.0/24"}, Verdict: "drop"}), chains: fw("accept", snapshot.Rule{Map: "bad", MapKeys: []string{"ip saddr"}}), want: []string{"fw 1"}},
		{name: "a map that was not read", chains: fw("accept", snapshot.Rule{Map: "bad", MapKeys: []string{"ip saddr"}}), unread: true},

		{name: "rules that were not saved", chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Hook: "forward", Name: "fw", Rules: 3, DropRules: []snapshot.DropRule{{Number: 1}}}}, unread: true},
		{name: "nftables does not free packets there", at: "nf_hook_slow+0x1", chains: fw("drop")},
		{name: "IPv6", packet: as(func(p *snapshot.DroppedPacket) { p.Text = "tcp [fd00::2]:4000 -> [fd01::2]:80 SYN" }), chains: fw("accept", rule("drop", when("ip daddr", "0.0.0.0/0")), rule("drop", when("ip6 daddr", "fd01::/16"))), want: []string{"fw 2"}},
		{name: "what is no packet", packet: as(func(p *snapshot.DroppedPacket) { p.Text = "ipv4, cut" }), chains: fw("drop"), unread: true},
	} {
		s := machine(tt.chains...)
		s.Sets = tt.sets
		packet := syn
		if tt.packet != nil {
			packet = *tt.packet
		}
		row := snapshot.Drop{Location: tt.at, Interface: packet.In}
		a := Follow(s, row, packet)
		var got []string
		for _, d := range a.Droppers {
			name := d.Chain.Name
			if d.Rule != nil {
				name += " " + strconv.Itoa(d.Rule.Number)
			}
			got = append(got, name)
		}
		if !slices.Equal(got, tt.want) || a.Unread != tt.unread {
			t.Errorf("%s: %q, unread %v; want %q, %v", tt.name, got, a.Unread, tt.want, tt.unread)
		}
	}
}

// Of chains with one priority, packets meet the one first that was registered last: as the hooks tell, and
// without them as the chains are listed, by back end.
func TestOfOnePriority(t *testing.T) {
	of := func(backend, family, table string) snapshot.Chain {
		c := chainOf("FORWARD", "forward", "drop", 0)
		c.Backend, c.Family, c.Table = backend, family, table
		return c
	}
	chains := []snapshot.Chain{of("nft", "inet", "old"), of("nft", "ip", "new"), of("iptables-legacy", "ip", "filter")}
	hook := func(owner, chain string) snapshot.Hook {
		return snapshot.Hook{Family: "ipv4", Hook: "forward", Owner: owner, Chain: chain + "/FORWARD"}
	}
	for _, tt := range []struct {
		name   string
		chains []snapshot.Chain
		hooks  []snapshot.Hook
		want   string
	}{
		{"made last", chains[:2], nil, "new"},
		{"registered last", chains[:2], []snapshot.Hook{hook("nf_tables", "old"), hook("nf_tables", "new")}, "old"},
		{"iptables, registered last", chains, []snapshot.Hook{hook("iptables", "filter"), hook("nf_tables", "new"), hook("nf_tables", "old")}, "filter"},
		{"iptables, registered first", chains, []snapshot.Hook{hook("nf_tables", "new"), hook("nf_tables", "old"), hook("iptables", "filter")}, "new"},
		{"hooks of another family", chains[:2], []snapshot.Hook{{Family: "ipv6", Hook: "forward", Owner: "nf_tables", Chain: "old/FORWARD"}, hook("nf_tables", "new")}, "new"},
	} {
		s := machine(tt.chains...)
		s.Hooks = tt.hooks
		a := Follow(s, snapshot.Drop{Interface: "eth1"}, syn)
		if len(a.Droppers) != 1 || a.Droppers[0].Chain.Table != tt.want {
			t.Errorf("%s: %+v, want the policy of table %s", tt.name, a.Droppers, tt.want)
		}
	}
}

func TestAccepting(t *testing.T) {
	s := machine(chainOf("fw", "forward", "drop", 0, rule("accept", when("iifname", "eth9")), rule("accept", when("iifname", "eth9"), when("tcp dport", "22")), rule("accept", when("tcp dport", "443"))))
	got := Accepting(s, snapshot.Drop{}, syn, func(m snapshot.Match) bool { return slices.Contains(m.Values, "eth9") })
	if len(got) != 1 || got[0].Rule.Number != 1 {
		t.Errorf("%+v", got)
	}
}

// Whatever a snapshot says, the walk ends.
func FuzzFollow(f *testing.F) {
	for _, s := range []*snapshot.Snapshot{
		machine(chainOf("fw", "forward", "drop", 0, to("jump", "a"), rule("drop", when("ip saddr", "1-2", "x/y", "10.0.0.0/99"))), chainOf("a", "", "", 0, to("goto", "fw"), to("jump", "a"))),
	} {
		b, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, syn.Text)
	}
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		var s snapshot.Snapshot
		if json.Unmarshal(data, &s) != nil {
			return // no snapshot
		}
		for _, stage := range []snapshot.Stage{snapshot.StageArrived, snapshot.StageRouted, snapshot.StageLocal, snapshot.StageLeaving} {
			p := syn
			p.Text, p.Stage = text, stage
			Follow(&s, snapshot.Drop{}, p)
		}
	})
}
