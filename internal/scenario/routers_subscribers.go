// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"natkit/internal/bench"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
)

// SubscriberRouters are the routers that bench subscribers compares, in the order in which tables
// show them: the eBPF engine with a pool, at each hook without blocks first.
func SubscriberRouters() (routers []bench.Router) {
	for _, hook := range []struct {
		name, words string
		attach      control.Attach
	}{{"ebpf", "XDP", control.AttachXDP}, {"ebpf-tc", "tc", control.AttachTC}} {
		for _, kind := range []struct {
			suffix, words string
			rules         func(*bench.Testbed, bench.RouterOptions) *rulefile.File
		}{
			{"", "a pool whose ports are given one by one, no limits", pooled},
			{"-blocks", "the pool with port blocks, whose begin and end are recorded", inBlocks},
			{"-limits", "the same with limits of ports, sessions and new sessions for each host", limited},
		} {
			routers = append(routers, &engineRouter{name: hook.name + kind.suffix, attach: hook.attach, rules: kind.rules,
				describe: "the eBPF engine at " + hook.words + ": " + kind.words})
		}
	}
	return routers
}

// pooled is engineRules with a pool, which has room for a block of each host.
func pooled(b *bench.Testbed, o bench.RouterOptions) *rulefile.File {
	hosts := (o.Sessions + bench.HostSessions - 1) / bench.HostSessions
	o.Sessions = max(o.Sessions, hosts*o.Block)
	file := engineRules(b, o)
	if len(file.Pools) == 0 {
		one := rulefile.AddressRange{First: statelessOutside.Addr(), Last: statelessOutside.Addr()}
		file.Pools = []rulefile.Pool{{Name: "bench", Addresses: []rulefile.AddressRange{one}, Ports: enginePorts}}
		file.Rules[0].Action = rulefile.SNAT{Source: b.Sources, Pool: "bench"}
	}
	return file
}

// inBlocks gives the ports of the pool in blocks, of which a host has as many as is usual.
func inBlocks(b *bench.Testbed, o bench.RouterOptions) *rulefile.File {
	file := pooled(b, o)
	file.Pools[0].Blocks = rulefile.Blocks{Size: o.Block, Extra: o.Block, AtMost: rulefile.MaxExtraBlocks}
	return file
}

// limited has limits beyond what a host opens that doesn't flood.
func limited(b *bench.Testbed, o bench.RouterOptions) *rulefile.File {
	const most = 4 * bench.HostSessions
	file := inBlocks(b, o)
	file.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Ports: most, Sessions: most, NewPerSecond: most, Burst: most}}
	return file
}
