// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/choice"
)

// Routers are the routers that natkit can measure, by name, in the order in which
// tables show them: from nothing to all, then what replaces it.
func Routers() []bench.Router {
	return []bench.Router{
		&rulesRouter{name: "none", describe: "forwarding by the stack, no netfilter hook",
			rules: func(*bench.Testbed, bench.RouterOptions) nft.Ruleset { return nil }},
		&rulesRouter{name: "framework", describe: "netfilter with empty chains in prerouting, forward and postrouting, no tracking",
			rules: func(*bench.Testbed, bench.RouterOptions) nft.Ruleset { return nft.EmptyHooks() }},
		&rulesRouter{name: "default", nat: true, describe: "connection tracking and nftables NAT, and the tables raw, mangle, security and filter that distributions and Docker register",
			rules: func(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset { return gateway(b, o).Distribution() }},
		&rulesRouter{name: "trimmed", nat: true, describe: "connection tracking and one nftables NAT chain, nothing else",
			rules: func(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset { return gateway(b, o).Compile() }},
		&rulesRouter{name: "nft", nat: true, takesRules: true, describe: "nftables masquerade, a rule for each host before it",
			rules: behind},
		&rulesRouter{name: "nft-map", nat: true, takesRules: true, describe: "nftables masquerade, all hosts before it in one map",
			rules: func(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset {
				return gateway(b, o).BehindMap(silentHosts(o.Rules), b.OutsideAddr)
			}},
		&rulesRouter{name: "nft-flowtable", nat: true, describe: "nftables masquerade with a flowtable", needs: "a flowtable (CONFIG_NF_FLOW_TABLE, CONFIG_NFT_FLOW_OFFLOAD)",
			rules: func(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset { return gateway(b, o).Offloaded(b.InsideDev) }},
		&iptablesRouter{name: "iptables", by: lab.RulesIPTables, describe: "the nftables back end of iptables: masquerade, a rule for each host before it"},
		&iptablesRouter{name: "iptables-legacy", by: lab.RulesIPTablesLegacy, describe: "iptables-legacy: masquerade, a rule for each host before it"},
		&rulesRouter{name: "stateless", nat: true, describe: "nftables rewriting the addresses of a whole network, no tracking, no ports",
			rules: func(b *bench.Testbed, _ bench.RouterOptions) nft.Ruleset {
				return nft.Stateless(b.Sources, statelessOutside, b.OutsideDev)
			}},
		actionRouter{},
		bench.Forwarder{},
		&accelRouter{attach: control.AttachXDP, rulesRouter: rulesRouter{name: "accel", nat: true, takesRules: true, rules: behind,
			describe: "the rules of nft, accelerated by natkit at XDP; with --both-ways each trial starts after 2 s of its load, in which the flows are learned"}},
		&accelRouter{attach: control.AttachTC, rulesRouter: rulesRouter{name: "accel-tc", nat: true, takesRules: true, rules: behind,
			describe: "the same at tc"}},
		&rulesRouter{name: "filtered", nat: true, rules: filtered,
			describe: "nftables masquerade behind 5000 filter rules, all evaluated for each packet"},
		&accelRouter{attach: control.AttachXDP, rulesRouter: rulesRouter{name: "accel-filtered", nat: true, rules: filtered,
			describe: "the same, accelerated by natkit at XDP"}},
		&engineRouter{name: "ebpf", attach: control.AttachXDP, describe: "the eBPF engine at XDP: masquerade with sessions, counters and expiry"},
		&engineRouter{name: "ebpf-tc", attach: control.AttachTC, describe: "the eBPF engine at tc, the same"},
	}
}

// behind masquerades, with a rule for each host before.
func behind(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset {
	return gateway(b, o).Behind(silentHosts(o.Rules), b.OutsideAddr)
}

// filtered asks many rules about each packet before it lets established flows pass.
func filtered(b *bench.Testbed, o bench.RouterOptions) nft.Ruleset {
	return gateway(b, o).Filtered(silentHosts(5000))
}

// statelessOutside is what the stateless router makes of the sources: RFC 6598.
var statelessOutside = netip.MustParsePrefix("100.64.0.0/16")

// FindRouters returns the routers of these names, in that order.
func FindRouters(names []string) ([]bench.Router, error) {
	return findRouters(Routers(), names)
}

// FindSubscriberRouters is FindRouters of SubscriberRouters.
func FindSubscriberRouters(names []string) ([]bench.Router, error) {
	return findRouters(SubscriberRouters(), names)
}

func findRouters(of []bench.Router, names []string) ([]bench.Router, error) {
	byName := map[string]bench.Router{}
	var known []string
	for _, r := range of {
		byName[r.Name()] = r
		known = append(known, r.Name())
	}
	var out []bench.Router
	for _, name := range names {
		r, ok := byName[name]
		if !ok {
			return nil, choice.Error(name, known...)
		}
		out = append(out, r)
	}
	return out, nil
}

func gateway(b *bench.Testbed, o bench.RouterOptions) nft.Gateway {
	return nft.Gateway{Inside: b.Sources, Outside: b.OutsideDev, Pool: outsidePool(o.Sessions)}
}

// outsidePool are the outside addresses of a router for so many sessions: not valid, if
// the interface's own has ports for them. Of several every second port would do, so that
// no host comes to an address whose ports are taken.
func outsidePool(sessions int) netip.Prefix {
	if sessions <= bench.PortsOfAddress {
		return netip.Prefix{}
	}
	addresses := (2*sessions - 1) / bench.PortsOfAddress // one less
	return netip.PrefixFrom(statelessOutside.Addr(), 32-bits.Len(uint(addresses)))
}

// rulesRouter is a router of nftables rules, put in by netlink.
type rulesRouter struct {
	name, describe  string
	needs           string // of the kernel, besides NAT by nftables
	nat, takesRules bool
	rules           func(*bench.Testbed, bench.RouterOptions) nft.Ruleset
}

func (r *rulesRouter) Name() string     { return r.name }
func (r *rulesRouter) Describe() string { return r.describe }
func (r *rulesRouter) NAT() bool        { return r.nat }

func (r *rulesRouter) Install(_ context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	if o.Rules > 0 && !r.takesRules {
		return nil, &bench.UnsupportedError{Router: r.name, Reason: "it has no rules"}
	}
	set := r.rules(b, o)
	if len(set) == 0 {
		return func() error { return nil }, nil
	}
	switch err := set.Apply(b.Router); {
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT):
		return nil, &bench.UnsupportedError{Router: r.name, Reason: "this kernel lacks " + cmp.Or(r.needs, "NAT by nftables (nf_tables, nft_chain_nat, nft_masq, nft_ct)")}
	case err != nil:
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	return func() error { return set.Remove(b.Router) }, nil
}

// silentHosts are addresses of the testbed's sources that send nothing: the last ones,
// so many that rules can be written about.
func silentHosts(n int) []netip.Addr {
	hosts := make([]netip.Addr, n)
	for i := range hosts {
		hosts[i] = netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return hosts
}

// iptablesRouter is a router of rules that iptables' programs put in.
type iptablesRouter struct {
	name, describe string
	by             lab.RuleSet
}

func (r *iptablesRouter) Name() string     { return r.name }
func (r *iptablesRouter) Describe() string { return r.describe }
func (r *iptablesRouter) NAT() bool        { return true }

func (r *iptablesRouter) Install(ctx context.Context, b *bench.Testbed, o bench.RouterOptions) (func() error, error) {
	var rules strings.Builder
	rules.WriteString("*nat\n")
	for _, h := range silentHosts(o.Rules) {
		fmt.Fprintf(&rules, "-A POSTROUTING -s %s/32 -o %s -j SNAT --to-source %s\n", h, b.OutsideDev, b.OutsideAddr)
	}
	last := "MASQUERADE"
	if pool := outsidePool(o.Sessions); pool.IsValid() {
		r := rulefile.RangeOf(pool)
		last = fmt.Sprintf("SNAT --to-source %s-%s --persistent", r.First, r.Last)
	}
	fmt.Fprintf(&rules, "-A POSTROUTING -s %s -o %s -j %s\nCOMMIT\n", b.Sources, b.OutsideDev, last)
	node := b.Node(lab.RoleGateway)
	err := node.RestoreIPTables(ctx, r.by, rules.String())
	var missing *lab.MissingProgramError
	switch {
	case errors.As(err, &missing):
		return nil, &bench.UnsupportedError{Router: r.name, Reason: missing.Program + " is not installed"}
	case err != nil:
		return nil, fmt.Errorf("router %s: %w", r.name, err)
	}
	return func() error {
		return node.RestoreIPTables(context.WithoutCancel(ctx), r.by, "*nat\nCOMMIT\n")
	}, nil
}
