// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"net/netip"

	"natkit/internal/bench"
	"natkit/internal/nat/nft"
)

// PaperSetups are the five set-ups of the rule-count experiment of 1997 on
// today's kernel.
func PaperSetups() []bench.PaperSetup {
	setup := func(name, router, describe string, nat bool, rules func(*bench.Testbed) nft.Ruleset) bench.PaperSetup {
		return bench.PaperSetup{Setup: name, Router: &rulesRouter{
			name: router, describe: describe, nat: nat,
			rules: func(b *bench.Testbed, _ bench.RouterOptions) nft.Ruleset { return rules(b) },
		}}
	}
	return []bench.PaperSetup{
		setup("1 NAT not in the kernel", "none", "forwarding by the stack, no netfilter hook", false,
			func(*bench.Testbed) nft.Ruleset { return nil }),
		setup("2 NAT in the kernel, no rule", "nat-idle", "connection tracking and NAT chains without a rule", false,
			func(*bench.Testbed) nft.Ruleset { return nft.IdleNAT() }),
		setup("3 one two-way rule", "nat-one", "connection tracking; one host translated to another address, in both directions", true,
			func(b *bench.Testbed) nft.Ruleset { return nft.OneToOne(paperHost(b), paperSeenAs, b.OutsideDev) }),
		setup("4 four one-way rules, twice a packet", "nat-twice",
			"no tracking; the address of each packet is rewritten at ingress and again at egress", true,
			func(b *bench.Testbed) nft.Ruleset { return double(b, 0) }),
		setup("5 set-up 4 behind 46 rules", "nat-twice-46", "the same behind 46 rules that match nothing, all scanned twice by each packet", true,
			func(b *bench.Testbed) nft.Ruleset { return double(b, 46) }),
	}
}

// paperHost is the testbed's source that measures, paperSeenAs what the right end sees.
func paperHost(b *bench.Testbed) netip.Addr { return b.Sources.Addr().Next() }

var paperSeenAs = statelessOutside.Addr().Next()

// paperMiddle is the address that a packet has between its two translations: the
// router has a route to it, by way of the left end.
func paperMiddle(b *bench.Testbed) netip.Addr {
	a := b.Sources.Addr().As4()
	a[2], a[3] = 3, 3
	return netip.AddrFrom4(a)
}

func double(b *bench.Testbed, idle int) nft.Ruleset {
	return nft.Double{
		Host: paperHost(b), Middle: paperMiddle(b), SeenAs: paperSeenAs,
		Inside: b.InsideDev, Outside: b.OutsideDev, Idle: silentHosts(idle),
	}.Compile()
}
