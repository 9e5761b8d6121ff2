// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/nat/rulefile"
)

var theZoneRig *modelRig

func aZoneRig(t *testing.T) *modelRig {
	t.Helper()
	if theZoneRig == nil {
		theZoneRig = newModelRig(keeper{t}, false, true)
	}
	return theZoneRig
}

// Random packets through a gateway whose inside interfaces have hosts with the same addresses. The
// model knows those of one interface by other addresses: each packet ends as if they were others.
func TestRandomPacketsOfZones(t *testing.T) {
	aZoneRig(t).packets(t)
}

// The same where subscribers may have little, and blocks are few.
func TestRandomPacketsOfSubscribersInZones(t *testing.T) {
	r := aZoneRig(t)
	r.tight = true
	defer func() { r.tight = false }()
	clear(r.count)
	packets := number(t, "NATKIT_PACKETS", 3000)
	for n, seed := 0, uint64(number(t, "NATKIT_SEED", 1)); n < packets; seed++ {
		n += r.sequence(t, seed, min(packets-n, 500))
		if t.Failed() {
			t.Fatalf("NATKIT_SEED=%d", seed)
		}
	}
	t.Logf("%v", r.count)
}

var (
	zoneNetwork = netip.MustParsePrefix("192.168.0.0/16") // of both zones, on the wire
	zoneAlias   = netip.MustParsePrefix("10.2.0.0/16")    // of the second one, in the model
)

const zoneTable = 200

// addZone makes the second inside link, with the addresses of the first. What comes in by it has a
// table of routes of its own; the main one has two routes to the network.
func (r *modelRig) addZone(t testing.TB) func() error {
	return func() error {
		second, err := r.addPort(t, "in2", 7, insideMTU, gatewayIn, insideHost, abiNatLinkFlagNAT_LINK_INSIDE)
		if err != nil {
			return err
		}
		r.ports["in2"] = second
		network := func(p netip.Prefix) *net.IPNet {
			return &net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
		}
		rule := netlink.NewRule()
		rule.IifName, rule.Table, rule.Family = "in2", zoneTable, netlink.FAMILY_V4
		if err := netlink.RuleAdd(rule); err != nil {
			return err
		}
		for _, route := range []netlink.Route{
			{LinkIndex: r.in.ifindex, Gw: insideHost.AsSlice(), Dst: network(zoneNetwork)},
			{LinkIndex: second.ifindex, Gw: insideHost.AsSlice(), Dst: network(zoneNetwork)},
			{LinkIndex: second.ifindex, Dst: network(netip.PrefixFrom(gatewayIn, 24)), Scope: netlink.SCOPE_LINK, Table: zoneTable},
			{LinkIndex: second.ifindex, Gw: insideHost.AsSlice(), Dst: network(zoneNetwork), Table: zoneTable},
			{LinkIndex: r.out.ifindex, Gw: router.AsSlice(), Table: zoneTable},
		} {
			if err := netlink.RouteAppend(&route); err != nil {
				return err
			}
		}
		return nil
	}
}

// wireAddr is the address that a host has on the wire which the model has by that one.
func (r *modelRig) wireAddr(a netip.Addr) netip.Addr {
	if !r.zones || !zoneAlias.Contains(a) {
		return a
	}
	return mapAddress(a, zoneNetwork)
}

func (r *modelRig) wireEnds(e modelEnds) modelEnds {
	return modelEnds{netip.AddrPortFrom(r.wireAddr(e.src.Addr()), e.src.Port()), netip.AddrPortFrom(r.wireAddr(e.dst.Addr()), e.dst.Port())}
}

// wire is the gateway as it is.
func (r *modelRig) wire(f Facts) Facts {
	f.Links, f.Local = slices.Clone(f.Links), slices.Clone(f.Local)
	for i := range f.Links {
		if f.Links[i].Name == "in2" {
			f.Links[i].Addresses = []netip.Prefix{netip.PrefixFrom(gatewayIn, 24)}
		}
	}
	for i := range f.Local {
		if zoneAlias.Contains(f.Local[i]) {
			f.Local[i] = gatewayIn
		}
	}
	return f
}

// wireFile is the rule file of the engine: that of the model with the addresses on the wire.
func (r *modelRig) wireFile(f *rulefile.File) *rulefile.File {
	if !r.zones {
		return f
	}
	out := *f
	out.Subscribers.ByInterface = true
	prefix := func(p netip.Prefix) netip.Prefix {
		if p.Bits() == 0 {
			return p
		}
		return netip.PrefixFrom(r.wireAddr(p.Addr()), p.Bits())
	}
	out.Subscribers.Classes = slices.Clone(f.Subscribers.Classes)
	for i := range out.Subscribers.Classes {
		c := &out.Subscribers.Classes[i]
		c.Of = slices.DeleteFunc(slices.Clone(c.Of), func(p netip.Prefix) bool { return zoneAlias.Overlaps(p) })
	}
	out.Rules = slices.Clone(f.Rules)
	for i := range out.Rules {
		switch a := out.Rules[i].Action.(type) {
		case rulefile.Masquerade:
			a.Source = prefix(a.Source)
			out.Rules[i].Action = a
		case rulefile.SNAT:
			a.Source = prefix(a.Source)
			out.Rules[i].Action = a
		case rulefile.Map:
			a.Inside = prefix(a.Inside)
			out.Rules[i].Action = a
		case rulefile.DNAT:
			a.Targets = slices.Clone(a.Targets)
			for j := range a.Targets {
				a.Targets[j].Address = r.wireAddr(a.Targets[j].Address)
			}
			out.Rules[i].Action = a
		}
	}
	return &out
}

// bound are the rules with the interface of each host that they name, and more of them for the
// second zone.
func (r *modelRig) bound(f *rulefile.File, rules []rulefile.Rule) []rulefile.Rule {
	f.Subscribers.Prefix = 32
	for i := range f.Subscribers.Classes {
		c := &f.Subscribers.Classes[i]
		for _, p := range c.Of {
			c.Of = append(c.Of, netip.PrefixFrom(mapAddress(p.Addr(), zoneAlias), p.Bits()))
		}
	}
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	rules = append(rules,
		rulefile.Rule{Action: rulefile.SNAT{Source: prefix("10.2.3.0/24"), Address: addr("203.0.113.20"), Ports: rules[3].Action.(rulefile.SNAT).Ports}, In: "in2", Out: "out"},
		rulefile.Rule{Action: rulefile.SNAT{Source: prefix("10.2.5.0/24"), Pool: "whole"}, In: "in2"},
		rulefile.Rule{Action: rulefile.DNAT{Protocol: rulefile.UDP, Address: gatewayOut, Ports: rulefile.PortRange{First: 53, Last: 53}, Targets: []rulefile.Target{
			{Address: addr("10.2.2.2"), Ports: rulefile.PortRange{First: 5000, Last: 5000}}}}})
	link := func(a netip.Addr) string {
		if zoneAlias.Contains(a) {
			return "in2"
		}
		return "in"
	}
	for i := range rules {
		rule := &rules[i]
		switch a := rule.Action.(type) {
		case rulefile.Exclude:
			a.Source = rulefile.Everywhere
			rule.Action = a
		case rulefile.DNAT:
			a.Targets = slices.DeleteFunc(slices.Clone(a.Targets), func(t rulefile.Target) bool { return link(t.Address) != link(a.Targets[0].Address) })
			rule.Action, rule.Out = a, link(a.Targets[0].Address)
		default:
			if source, _ := sourceOf(rule); source.Bits() > 0 {
				rule.In = link(source.Addr())
			}
		}
	}
	return rules
}

// meant reports whether a packet is one that the model and the wire know by the same name: nobody
// behind one interface knows an address of those behind the other.
func (r *modelRig) meant(p modelPacket) bool {
	if !r.zones {
		return true
	}
	others := zoneAlias
	if p.link == "in2" {
		others = zoneNetwork
	}
	return !others.Contains(p.src.Addr()) && !others.Contains(p.dst.Addr())
}

// confirm has every neighbour be one that was confirmed a moment ago: packets that go through the
// neighbour table do not show whom they are for.
func (r *modelRig) confirm(t *testing.T) {
	t.Helper()
	if !r.zones {
		return
	}
	// Where ticks come late the engine's clock is behind: a time to come would be one of long ago.
	keys, values, ago := make([]uint32, 4096), make([]uint32, 4096), now()-ticks(1)/2
	for i := range keys {
		keys[i], values[i] = uint32(i), ago
	}
	if _, err := r.maps["probed"].BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(err)
	}
	r.confirmed = ago
}

// late reports whether the machine was so busy that neighbours are no longer confirmed.
func (r *modelRig) late() bool { return r.zones && now()-r.confirmed >= ticks(1) }

// whose gives ends on the wire as the model has them: the MAC shows whom the packet is for.
func (r *modelRig) whose(p modelPacket, ends modelEnds, frame []byte) (modelEnds, error) {
	alias := func(a netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(mapAddress(a.Addr(), zoneAlias), a.Port())
	}
	if p.link == "in2" && ends.src.Addr() == r.wireAddr(p.src.Addr()) && ends.src.Addr() != p.src.Addr() {
		ends.src = alias(ends.src)
	}
	if bytes.Equal(frame[:6], r.ports[p.link].mac) && zoneNetwork.Contains(ends.dst.Addr()) {
		return ends, fmt.Errorf("%v leaves by the neighbour table, which does not show for whom", ends)
	}
	if bytes.Equal(frame[:6], r.ports["in2"].neighbor) && zoneNetwork.Contains(ends.dst.Addr()) {
		ends.dst = alias(ends.dst)
	}
	return ends, nil
}
