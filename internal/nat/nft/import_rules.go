// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/rulefile"
)

// Rules that do what items do. What a rule can't say is named, and no rule is made of it.

// give names why no rule is made of an item.
func (i *importer) give(it *item, format string, args ...any) {
	it.lost = true
	for _, r := range it.rules() {
		i.lost(r, format, args...)
	}
}

// rules are all that decide about the item's packets.
func (it *item) rules() []*ruleset.Rule { return append([]*ruleset.Rule{it.rule}, it.turns...) }

// --- interfaces ------------------------------------------------------------------------

// sides settles which interface is on which side: as named, else as the items tell.
func (i *importer) sides() {
	f, o := i.file, i.options
	for k := range i.sources {
		it := &i.sources[k]
		in, out := it.box.Dim[ruleset.In], it.box.Dim[ruleset.Out]
		if it.kind != ruleset.Translated {
			continue
		}
		f.Inside = append(f.Inside, i.only(in)...)
		f.Outside = append(f.Outside, i.only(out)...)
		f.Inside = append(f.Inside, i.butFor(out)...)
	}
	for k := range i.destinations {
		if it := &i.destinations[k]; it.kind == ruleset.Translated {
			f.Outside = append(f.Outside, i.only(it.box.Dim[ruleset.In])...)
		}
	}
	if o.Outside != nil {
		f.Outside = slices.Clone(o.Outside)
	}
	f.Outside = slices.DeleteFunc(f.Outside, func(n string) bool { return n == "lo" || slices.Contains(o.Inside, n) })
	if o.Inside != nil {
		f.Inside = slices.Clone(o.Inside)
	}
	f.Inside = slices.DeleteFunc(f.Inside, func(n string) bool { return n == "lo" || slices.Contains(f.Outside, n) })
	f.Inside, f.Outside = unique(f.Inside), unique(f.Outside)
	slices.Sort(f.Inside)
}

// unique keeps the first of each.
func unique(names []string) []string {
	var out []string
	for _, n := range names {
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// others is the number of all interfaces without a name here.
func (i *importer) others() uint32 { return uint32(len(i.universe)) }

// only are the interfaces that packets are bound to.
func (i *importer) only(r ruleset.Ranges) []string {
	if r.Contains(i.others()) {
		return nil
	}
	return i.namesIn(r, i.universe)
}

// butFor are the interfaces that packets must not have.
func (i *importer) butFor(r ruleset.Ranges) []string {
	if !r.Contains(i.others()) || r == nil {
		return nil
	}
	return i.namesIn(r.Not(), i.universe)
}

func (i *importer) namesIn(r ruleset.Ranges, names []string) []string {
	var in []string
	for _, n := range names {
		if r.Contains(i.universe.Index(n)) {
			in = append(in, n)
		}
	}
	return in
}

// links are the numbers of interfaces.
func (i *importer) links(names ...[]string) ruleset.Ranges {
	list := []ruleset.Range{}
	for _, name := range slices.Concat(names...) {
		k := i.universe.Index(name)
		list = append(list, ruleset.Range{First: k, Last: k})
	}
	return ruleset.RangesOf(list)
}

func (i *importer) named() []string { return slices.Concat(i.file.Inside, i.file.Outside) }

// bind gives the interfaces that rules are bound to for packets of r, "" for all of among;
// none if they are of none that is named.
func (i *importer) bind(it *item, r ruleset.Ranges, among []string) []string {
	in := i.namesIn(r, among)
	if len(in) == len(among) {
		return []string{""}
	}
	return in
}

// unnamed says that an item is about interfaces that the file does not name.
func (i *importer) unnamed(it *item, r ruleset.Ranges) {
	names := i.only(r)
	if slices.Equal(names, []string{"lo"}) {
		i.give(it, "is about the gateway itself")
		return
	}
	if len(names) == 0 {
		i.give(it, "is for packets of interfaces that are named neither inside nor outside")
		return
	}
	i.give(it, "is bound to %s, which is not named as an inside or outside interface", strings.Join(names, ", "))
}

// --- destinations ----------------------------------------------------------------------

// destination makes rules of what prerouting does.
func (i *importer) destination(it *item) {
	switch {
	case it.dead:
		return
	case it.why != "":
		i.give(it, "%s", it.why)
		return
	case it.whole() < 1-1e-6:
		i.give(it, "is for %.4g %% of new connections only, and a rule file has no rule for a part of them", 100*it.whole())
		return
	case it.box.Dim[ruleset.Source] != nil || it.box.Dim[ruleset.SourcePort] != nil:
		i.give(it, "a destination rule can't depend on the source")
		return
	case it.box.Dim[ruleset.Destination] != nil && len(forwardedIn(it.box.Dim[ruleset.Destination])) == 0:
		i.give(it, "is about the gateway itself")
		return
	case len(i.namesIn(it.box.Dim[ruleset.In], i.named())) == 0 && len(i.named()) > 0:
		i.unnamed(it, it.box.Dim[ruleset.In])
		return
	}
	pieces := []ruleset.Box{it.box}
	for _, n := range it.not {
		if i.leftOut(it, n) {
			continue
		}
		var next []ruleset.Box
		for _, p := range pieces {
			next = append(next, p.Minus(n.Box)...)
		}
		pieces = next
	}
	for _, p := range pieces {
		i.destinationOf(it, p)
	}
}

// leftOut makes an exclude of what an item leaves out, if ports, protocols and addresses
// alone can't say it, and the packets are not translated later either.
func (i *importer) leftOut(it *item, n ruleset.Except) bool {
	b, meet := it.box.And(n.Box)
	if !meet {
		return true
	}
	fromSources := n.Box.Dim[ruleset.Source] != nil || n.Box.Dim[ruleset.SourcePort] != nil
	whole := it.box.Dim[ruleset.ProtocolField] == nil && n.Box.Dim[ruleset.ProtocolField] != nil
	if !fromSources && !whole {
		return false
	}
	named := i.links(i.named())
	if b.Dim[ruleset.SourcePort] != nil || !b.Dim[ruleset.In].Covers(it.box.Dim[ruleset.In].And(named)) {
		if n.Rule != nil {
			i.lost(n.Rule, "leaves packets out of the rules that follow by more than an exclude can name")
		}
		return fromSources
	}
	b.Dim[ruleset.In], b.Dim[ruleset.Out] = nil, nil
	if b.Dim[ruleset.Destination] == nil && i.local != nil {
		b.Dim[ruleset.Destination] = i.local
	}
	if n.Rule != nil && i.exclude(it, b) {
		i.otherwise(n.Rule, "became an exclude, which holds for every rule")
	} else if n.Rule != nil {
		i.lost(n.Rule, "leaves packets out of the rules that follow by more than an exclude can name")
	}
	return true
}

// destinationOf makes rules for one piece of an item.
func (i *importer) destinationOf(it *item, p ruleset.Box) {
	fromInside := len(i.namesIn(p.Dim[ruleset.In], i.file.Inside)) > 0
	if it.to == ruleset.Netmap {
		i.netmapDestination(it, p)
		return
	}
	addresses, several := i.addresses(it, p)
	if addresses == nil {
		return
	}
	switch {
	case several && it.local:
		i.otherwise(it.rule, "holds for external addresses of the gateway, not for its inside ones")
	case several && !it.local && fromInside:
		i.lost(it.rule, "is for every destination: of those only the gateway's own external addresses are named")
	case several && !it.local:
		i.otherwise(it.rule, "holds for external addresses of the gateway, not for others that are routed to it")
	}
	protocols, ok := protocolsIn(p.Dim[ruleset.ProtocolField])
	if !ok {
		i.give(it, "is for all protocols but some")
		return
	}
	for _, in := range i.bindDestination(it, p.Dim[ruleset.In]) {
		for _, address := range addresses {
			for _, protocol := range protocols {
				for _, ports := range portsIn(p.Dim[ruleset.DestinationPort]) {
					i.forward(it, in, rulefile.DNAT{Protocol: protocol, Address: address, Ports: ports})
				}
			}
		}
	}
}

// bindDestination binds to interfaces. A rule that leaves out some inside interfaces only
// holds for them too, and so for hairpin.
func (i *importer) bindDestination(it *item, r ruleset.Ranges) []string {
	if r.Contains(i.others()) && r.Covers(i.links(i.file.Outside)) {
		if out := i.namesIn(r.Not(), i.file.Inside); len(out) > 0 && r != nil {
			i.otherwise(it.rule, "holds for packets from every interface, also %s: hairpin", strings.Join(out, ", "))
		}
		return []string{""}
	}
	return i.bind(it, r, i.named())
}

// maxEnumerated is how many addresses become rules of their own.
const maxEnumerated = 256

// addresses of a piece that rules are made for, none if it can't be; several: they are not
// all.
func (i *importer) addresses(it *item, p ruleset.Box) (list []netip.Addr, several bool) {
	dst := p.Dim[ruleset.Destination]
	several = it.local
	if dst == nil || dst.Size() > 1<<31 {
		if i.local == nil {
			i.give(it, "is for addresses of the gateway, which the rules do not tell: name them with --local")
			return nil, false
		}
		dst, several = dst.And(i.local), true
	}
	if dst = forwardedIn(dst); len(dst) == 0 {
		i.give(it, "is for destinations that are not the gateway's own, and a rule file names single addresses")
		return nil, false
	}
	if dst.Size() > maxEnumerated {
		i.give(it, "sends the whole of %s to one place: a rule file names single addresses", prefixes(dst)[0])
		return nil, false
	}
	for _, r := range dst {
		for n := uint64(r.First); n <= uint64(r.Last); n++ {
			if a := asAddress(uint32(n)); isForwarded(netip.PrefixFrom(a, 32)) {
				list = append(list, a)
			}
		}
	}
	it.taken = ruleset.RangesOf(slices.Concat(it.taken, dst))
	return list, several
}

// maxProtocols is how many protocols become rules of their own.
const maxProtocols = 16

func protocolsIn(r ruleset.Ranges) ([]rulefile.Protocol, bool) {
	if r == nil {
		return []rulefile.Protocol{rulefile.AnyProtocol}, true
	}
	var list []rulefile.Protocol
	for _, x := range r {
		for n := x.First; n <= min(x.Last, 255); n++ {
			if len(list) == maxProtocols {
				return nil, false
			}
			if n > 0 {
				list = append(list, rulefile.Protocol(n))
			}
		}
	}
	return list, true
}

// portsIn are ranges of ports; one that is zero for all.
func portsIn(r ruleset.Ranges) []rulefile.PortRange {
	if r == nil {
		return []rulefile.PortRange{{}}
	}
	var list []rulefile.PortRange
	for _, x := range r {
		if first, last := max(x.First, 1), min(x.Last, 65535); first <= last {
			list = append(list, rulefile.PortRange{First: uint16(first), Last: uint16(last)})
		}
	}
	return list
}

// maxSingle is how many ports become rules of their own where all go to one.
const maxSingle = 64

// forward adds a rule for one address; what it sends to must fit the ports it is for.
func (i *importer) forward(it *item, in string, a rulefile.DNAT) {
	if !a.Ports.IsZero() && !a.Protocol.HasPorts() {
		i.give(it, "natkit does not translate ports of protocol %s", a.Protocol)
		return
	}
	fixed := slices.ContainsFunc(it.shares, func(s share) bool { return s.mode == portFixed })
	if n := a.Ports.Count(); fixed && n > 1 && n <= maxSingle {
		for port := int(a.Ports.First); port <= int(a.Ports.Last); port++ {
			one := a
			one.Ports = rulefile.PortRange{First: uint16(port), Last: uint16(port)}
			i.forward(it, in, one)
		}
		return
	}
	targets, shares, why := it.targets(a.Ports)
	if why != "" {
		i.give(it, "%s", why)
		return
	}
	exact := true
	a.Targets = targets
	if a.Weights, exact = weightsOf(shares); !exact {
		i.otherwise(it.rule, "the shares of its targets became weights in thousandths")
	}
	if len(targets) > 1 {
		i.otherwise(it.rule, "a client keeps its target: it is chosen by the client's address, not for each connection")
	}
	i.place(it, rulefile.Rule{Action: a, In: in})
}

// weightsOf are the smallest weights with these shares, nil if all are equal; exact, if
// they are those and not just near.
func weightsOf(shares []float64) (weights []int, exact bool) {
	const finest = 1000 // of a rule file
	for total := 1; total <= finest; total++ {
		near, equal := true, true
		weights = weights[:0]
		for _, s := range shares {
			w := math.Round(s * float64(total))
			near = near && w >= 1 && math.Abs(s*float64(total)-w) < 1e-5*float64(total)
			equal = equal && (len(weights) == 0 || weights[0] == int(w))
			weights = append(weights, int(w))
		}
		switch {
		case near && equal:
			return nil, true
		case near:
			return weights, true
		}
	}
	for k := range weights {
		weights[k] = max(weights[k], 1)
	}
	return weights, false
}

// targets of packets to these ports and their shares, or why there are none.
func (it *item) targets(ports rulefile.PortRange) (all []rulefile.Target, shares []float64, why string) {
	names := false
	for _, s := range it.shares {
		var t rulefile.PortRange
		switch {
		case s.mode == portKept:
			t = ports
		case s.mode == portFixed && ports.Count() == 1:
			t = rulefile.PortRange{First: s.port, Last: s.port}
		case s.mode == portFixed:
			return nil, nil, fmt.Sprintf("sends ports %s to one port, %d (the kernel takes the first of a range); a rule file has at most %d ports for one: for a port each write a target with as many ports", orAll(ports), s.port, maxSingle)
		case s.mode == portShifted && !ports.IsZero() && s.shifts(ports):
			first := s.port + (ports.First - s.base)
			t = rulefile.PortRange{First: first, Last: first + (ports.Last - ports.First)}
		default:
			return nil, nil, fmt.Sprintf("sends ports %q to %q: in a rule file the first becomes the first, so both must be as long", orAll(ports), s.ports)
		}
		names = names || t != ports
		if s.first == 0 {
			return nil, nil, "changes the port only, of whatever address"
		}
		if int(s.last-s.first) >= maxTargets-len(all) {
			return nil, nil, fmt.Sprintf("sends to %d addresses: a list of targets has at most %d", s.last-s.first+1, maxTargets)
		}
		each := s.weight / float64(s.last-s.first+1)
		for n := uint64(s.first); n <= uint64(s.last); n++ {
			target := rulefile.Target{Address: asAddress(uint32(n)), Ports: t}
			if k := slices.Index(all, target); k >= 0 {
				shares[k] += each
				continue
			}
			all, shares = append(all, target), append(shares, each)
		}
	}
	if !names {
		for k := range all {
			all[k].Ports = rulefile.PortRange{}
		}
	}
	return all, shares, ""
}

func orAll(r rulefile.PortRange) string {
	if r.IsZero() {
		return "all"
	}
	return r.String()
}

// shifts reports whether a shift holds for all of the ports.
func (s share) shifts(ports rulefile.PortRange) bool {
	return ports.First >= s.base && int(ports.Last)-int(s.base) < s.ports.Count()
}

// netmapDestination makes a map of a translation of a whole prefix.
func (i *importer) netmapDestination(it *item, p ruleset.Box) {
	dst := prefixes(p.Dim[ruleset.Destination])
	s := it.shares[0]
	if len(it.shares) > 1 || len(dst) != 1 || p.Dim[ruleset.ProtocolField] != nil || p.Dim[ruleset.DestinationPort] != nil || dst[0].Bits() != s.bits {
		i.give(it, "a map is for a whole prefix, and for one of the same length")
		return
	}
	for _, link := range i.bind(it, p.Dim[ruleset.In], i.named()) {
		i.addMap(it, netip.PrefixFrom(asAddress(s.first), s.bits), dst[0], link, halfDestination)
	}
}

// half is one direction of a map.
type half int

const (
	halfSource half = 1 << iota
	halfDestination
)

// addMap adds one rule for both directions, of which the input usually has two.
func (i *importer) addMap(it *item, inside, outside netip.Prefix, link string, h half) {
	rule := rulefile.Rule{Action: rulefile.Map{Inside: inside.Masked(), Outside: outside.Masked()}, Out: link}
	i.halves[rule.Key()] |= h
	i.place(it, rule)
}

// --- sources ---------------------------------------------------------------------------

// source makes rules of what postrouting does.
func (i *importer) source(it *item) {
	b := it.box
	in, out := b.Dim[ruleset.In], b.Dim[ruleset.Out]
	src, dst := b.Dim[ruleset.Source], b.Dim[ruleset.Destination]
	switch {
	case it.dead:
		return
	case it.why != "":
		i.give(it, "%s", it.why)
		return
	case len(it.shares) != 1 || it.whole() < 1-1e-6:
		i.give(it, "is for a part of new connections only, and a source rule has no shares")
		return
	case src != nil && slices.Equal(src, dst):
		it.lost = true
		i.otherwise(it.rule, "hairpin is part of every rule that publishes a port")
		return
	case dst != nil && dst.Size() <= 1<<31 || b.Dim[ruleset.ProtocolField] != nil || b.Dim[ruleset.SourcePort] != nil || b.Dim[ruleset.DestinationPort] != nil:
		i.give(it, "a source rule can't depend on the destination or the protocol")
		return
	case len(i.named()) > 0 && (len(i.namesIn(out, i.named())) == 0 || len(i.namesIn(in, i.named())) == 0):
		i.unnamed(it, map[bool]ruleset.Ranges{true: out, false: in}[len(i.namesIn(out, i.named())) == 0])
		return
	}
	pieces := []ruleset.Box{b}
	for _, n := range it.not {
		pieces = i.cutSource(it, n, pieces)
	}
	if dst != nil {
		x := b
		x.Dim[ruleset.Destination] = dst.Not()
		i.excludeFrom(it, x, it.rule, "what it leaves out became an exclude, which holds for every rule")
	}
	for _, p := range pieces {
		i.sourceOf(it, p)
	}
}

// cutSource takes what a rule before has taken out of the pieces, or excludes it.
func (i *importer) cutSource(it *item, n ruleset.Except, pieces []ruleset.Box) []ruleset.Box {
	x, meet := it.box.And(n.Box)
	if !meet {
		return pieces
	}
	special := false
	for _, d := range []ruleset.FieldKind{ruleset.Destination, ruleset.ProtocolField, ruleset.SourcePort, ruleset.DestinationPort} {
		special = special || n.Box.Dim[d] != nil && !n.Box.Dim[d].Covers(it.box.Dim[d])
	}
	if !special {
		var next []ruleset.Box
		for _, p := range pieces {
			next = append(next, p.Minus(n.Box)...)
		}
		return next
	}
	by := n.Rule
	if by == nil {
		by = it.rule
	}
	if dst := x.Dim[ruleset.Destination]; dst != nil && len(forwardedIn(dst)) == 0 {
		return pieces // no rule is about these
	}
	i.excludeFrom(it, x, by, "became an exclude, which holds for every rule")
	return pieces
}

// excludeFrom excludes packets of an item, if its interfaces are all that the item is for.
func (i *importer) excludeFrom(it *item, x ruleset.Box, by *ruleset.Rule, what string) {
	named := i.links(i.named())
	for _, d := range []ruleset.FieldKind{ruleset.In, ruleset.Out} {
		if !x.Dim[d].Covers(it.box.Dim[d].And(named)) {
			i.lost(by, "leaves packets out of the rules that follow by more than an exclude can name")
			return
		}
	}
	done := false
	for _, p := range untranslated(i.sources, x) {
		if len(i.namesIn(p.Dim[ruleset.In], i.named())) == 0 || len(i.namesIn(p.Dim[ruleset.Out], i.named())) == 0 {
			continue
		}
		if dst := p.Dim[ruleset.Destination]; dst != nil && len(forwardedIn(dst)) == 0 {
			continue
		}
		if !i.exclude(it, p) {
			i.lost(by, "leaves packets out of the rules that follow by more than an exclude can name")
			return
		}
		done = true
	}
	if done {
		i.otherwise(by, "%s", what)
	}
}

// untranslated are the packets of a box that no item translates.
func untranslated(items []item, x ruleset.Box) []ruleset.Box {
	pieces := []ruleset.Box{x}
	for k := range items {
		var next []ruleset.Box
		for _, p := range pieces {
			in, meet := p.And(items[k].box)
			if !meet {
				next = append(next, p)
				continue
			}
			next = append(next, p.Minus(items[k].box)...)
			for _, n := range items[k].not {
				if b, meet := in.And(n.Box); meet {
					next = append(next, b)
				}
			}
		}
		if pieces = next; len(pieces) > maxCells {
			return nil
		}
	}
	return pieces
}

// maxExcluded is how many ports engine ebpf takes in one exclude, maxExcludes how many
// excludes one rule may become.
const (
	maxExcluded = 1024
	maxExcludes = 1024
)

// exclude adds excludes for a box; not, if they can't say it.
func (i *importer) exclude(it *item, b ruleset.Box) bool {
	protocols, ok := protocolsIn(b.Dim[ruleset.ProtocolField])
	if !ok || b.Dim[ruleset.SourcePort] != nil {
		return false
	}
	ports := portsIn(b.Dim[ruleset.DestinationPort])
	sources, destinations := prefixes(b.Dim[ruleset.Source]), prefixes(b.Dim[ruleset.Destination])
	if len(sources)*len(destinations)*len(protocols)*len(ports) > maxExcludes {
		return false
	}
	for _, src := range sources {
		for _, dst := range destinations {
			if !isForwarded(dst) || !isForwarded(src) {
				continue
			}
			for _, p := range protocols {
				for _, r := range ports {
					for _, some := range pieces(r, maxExcluded) {
						if !some.IsZero() && !p.HasPorts() {
							return false
						}
						i.place(it, rulefile.Rule{Action: rulefile.Exclude{Protocol: p, Source: src, Destination: dst, Ports: some}})
					}
				}
			}
		}
	}
	return true
}

// pieces cuts a range into such of at most n ports.
func pieces(r rulefile.PortRange, n int) []rulefile.PortRange {
	out := []rulefile.PortRange{}
	for r.Count() > n {
		out = append(out, rulefile.PortRange{First: r.First, Last: r.First + uint16(n-1)})
		r.First += uint16(n)
	}
	return append(out, r)
}

// sourceOf makes rules for one piece of an item.
func (i *importer) sourceOf(it *item, p ruleset.Box) {
	s := it.shares[0]
	outs := i.bindSource(p.Dim[ruleset.Out], i.file.Outside, i.file.Inside)
	ins := i.bindSource(p.Dim[ruleset.In], i.file.Inside, i.file.Outside)
	list := prefixes(p.Dim[ruleset.Source])
	if len(list) > maxEnumerated {
		i.give(it, "is for %d prefixes: too many for rules of their own", len(list))
		return
	}
	for _, src := range list {
		if !isForwarded(src) {
			continue
		}
		for _, in := range ins {
			for _, out := range outs {
				bound := rulefile.Rule{In: in, Out: out}
				switch {
				case it.to == ruleset.Masquerade:
					bound.Action = rulefile.Masquerade{Source: src, Ports: s.ports}
				case it.to == ruleset.Netmap && src.Bits() != s.bits:
					i.give(it, "a map is between prefixes of the same length")
					continue
				case it.to == ruleset.Netmap:
					i.addMap(it, src, netip.PrefixFrom(asAddress(s.first), s.bits), out, halfSource)
					continue
				case s.first == 0:
					i.give(it, "changes the port only, of whatever address")
					return
				case s.first == s.last:
					bound.Action = rulefile.SNAT{Source: src, Address: asAddress(s.first), Ports: s.ports}
				default:
					bound.Action = rulefile.SNAT{Source: src, Pool: i.pool(s)}
				}
				i.place(it, bound)
			}
		}
	}
}

// bindSource gives the interfaces that rules are bound to. What leaves out some of the
// other side does so by not being bound.
func (i *importer) bindSource(r ruleset.Ranges, side, other []string) []string {
	names := i.namesIn(r, side)
	if !r.Contains(i.others()) {
		return append(names, i.namesIn(r, other)...)
	}
	if len(names) == len(side) {
		return []string{""}
	}
	return names
}

// pool is the name of the pool with these addresses and ports.
func (i *importer) pool(s share) string {
	addresses := rulefile.AddressRange{First: asAddress(s.first), Last: asAddress(s.last)}
	for _, p := range i.file.Pools {
		if p.Addresses[0] == addresses && p.Ports == s.ports {
			return p.Name
		}
	}
	name := fmt.Sprintf("pool%d", len(i.file.Pools)+1)
	i.file.Pools = append(i.file.Pools, rulefile.Pool{Name: name, Addresses: []rulefile.AddressRange{addresses}, Ports: s.ports})
	return name
}

// --- addresses -------------------------------------------------------------------------

// notForwarded is what is never for another host: no NAT of forwarded packets is about it.
var notForwarded = []netip.Prefix{netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("0.0.0.0/32")}

func isForwarded(to netip.Prefix) bool {
	return !slices.ContainsFunc(notForwarded, func(p netip.Prefix) bool { return p.Bits() <= to.Bits() && p.Contains(to.Addr()) })
}

// forwardable are all addresses but those.
var forwardable = func() ruleset.Ranges {
	list := []ruleset.Range{}
	for _, p := range notForwarded {
		r := rulefile.RangeOf(p)
		list = append(list, ruleset.Range{First: number(r.First), Last: number(r.Last)})
	}
	return ruleset.RangesOf(list).Not()
}()

func forwardedIn(r ruleset.Ranges) ruleset.Ranges { return r.And(forwardable) }

// prefixes covers addresses with prefixes, the largest that fit.
func prefixes(r ruleset.Ranges) []netip.Prefix {
	if r == nil {
		return []netip.Prefix{rulefile.Everywhere}
	}
	var out []netip.Prefix
	for _, x := range r {
		out = append(out, prefixesOfRange(rulefile.AddressRange{First: asAddress(x.First), Last: asAddress(x.Last)})...)
	}
	return out
}

// prefixesOfRange covers a range with prefixes, the largest that fit.
func prefixesOfRange(r rulefile.AddressRange) []netip.Prefix {
	var out []netip.Prefix
	for first, last := uint64(number(r.First)), uint64(number(r.Last)); first <= last; {
		bits := 32
		for bits > 0 && first&(1<<(33-bits)-1) == 0 && first+1<<(33-bits)-1 <= last {
			bits--
		}
		out = append(out, netip.PrefixFrom(asAddress(uint32(first)), bits))
		first += 1 << (32 - bits)
	}
	return out
}
