// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"natkit/internal/nat/rulefile"
)

// Destination rules, from the most special question to the least:
//
//	1  protocol, address and port            ports_in, ports
//	2  protocol, address and range of ports  ranges_in, ranges; shifted_in, shifted
//	3  protocol and address                  protocols_in, hosts_in, nets_in,
//	   address, prefix                       protocols, hosts, nets
//
// Each first for rules that are bound to the interface the packet came in by (_in).
// A range whose ports become others is a map with each of its ports (shifted, or with several
// targets one for each of them): the kernel can't add numbers. Ranges that overlap are cut, the narrower wins.

// place is what ranges of ports may overlap on.
type place struct {
	in       string
	protocol rulefile.Protocol
	address  netip.Addr
}

// destinationSteps are the questions, each for rules that are bound to an ingress interface and for others,
// and what is to be cut before it is asked for.
type destinationSteps struct {
	*compiler
	ports, ranges, shifted, protocols, hosts, nets [2]*step

	overlapping map[place][]span
	prefixes    map[string][]span // by ingress interface
}

const bound, unbound = 0, 1

func (c *compiler) newDestinationSteps() *destinationSteps {
	steps := func(name string, interval bool, parts ...part) [2]*step {
		return [2]*step{
			bound:   {name: name + "_in", kind: expr.NATTypeDestNAT, interval: interval, parts: append([]part{partIn}, parts...)},
			unbound: {name: name, kind: expr.NATTypeDestNAT, interval: interval, parts: parts},
		}
	}
	return &destinationSteps{
		compiler:    c,
		ports:       steps("ports", false, partProtocol, partDest, partDestPort),
		shifted:     steps("shifted", false, partProtocol, partDest, partDestPort),
		ranges:      steps("ranges", true, partProtocol, partDest, partDestPort),
		protocols:   steps("protocols", false, partProtocol, partDest),
		hosts:       steps("hosts", false, partDest),
		nets:        steps("nets", true, partDest),
		overlapping: map[place][]span{},
		prefixes:    map[string][]span{},
	}
}

// keyAt is which of two steps asks for what comes in by that interface, "" for any, and the key.
func keyAt(in string, parts ...[]byte) (int, []byte) {
	if in == "" {
		return unbound, key(parts...)
	}
	return bound, key(append([][]byte{keyLink(in)}, parts...)...)
}

// destinations gives the chain of the destination rules, which is empty if there are none.
func (c *compiler) destinations() (Chain, error) {
	d := c.newDestinationSteps()
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.Map:
			d.addMap(i, r, a)
		case rulefile.DNAT:
			if len(a.Targets) == 0 {
				return Chain{}, fmt.Errorf("compile rule %q: no target", r.Match())
			}
			d.addForward(i, r, a)
		}
	}
	d.cutRanges()
	d.cutPrefixes()

	chain := Chain{Name: "destination"}
	for _, s := range []*step{d.ports[bound], d.ports[unbound], d.ranges[bound], d.shifted[bound], d.ranges[unbound], d.shifted[unbound],
		d.protocols[bound], d.hosts[bound], d.nets[bound], d.protocols[unbound], d.hosts[unbound], d.nets[unbound]} {
		c.emit(&chain, s)
	}
	if len(chain.Rules) > 0 {
		c.table.Chains = append(c.table.Chains, chain)
	}
	return chain, nil
}

func (d *destinationSteps) addMap(i int, r *rulefile.Rule, a rulefile.Map) {
	spans := d.sessionSpans(i, a.Outside)
	if len(spans) == 0 {
		return
	}
	if !singleHost(a.Outside) {
		for _, in := range d.mapWaysIn(r) {
			d.prefixes[in] = append(d.prefixes[in], spans...)
		}
		return
	}
	for _, in := range d.mapWaysIn(r) {
		b, k := keyAt(in, a.Outside.Addr().AsSlice())
		e := Element{Key: k, Value: a.Inside.Addr().AsSlice(), Rule: i}
		if a.IsIdentity() {
			e.Value, e.Verdict = nil, acceptVerdict()
		}
		d.hosts[b].add(e)
	}
}

func (d *destinationSteps) addForward(i int, r *rulefile.Rule, a rulefile.DNAT) {
	address := a.Address.AsSlice()
	switch {
	case a.Ports.IsZero() && a.Protocol == rulefile.AnyProtocol:
		b, k := keyAt(r.In, address)
		d.hosts[b].add(d.forward(i, k, rulefile.PortRange{}))
		return
	case a.Ports.IsZero():
		b, k := keyAt(r.In, []byte{byte(a.Protocol)}, address)
		d.protocols[b].add(d.forward(i, k, rulefile.PortRange{}))
		return
	}
	for _, p := range portProtocols(a.Protocol) {
		if a.Ports.Count() == 1 {
			b, k := keyAt(r.In, []byte{byte(p)}, address, keyPort(a.Ports.First))
			d.ports[b].add(d.forward(i, k, a.Ports))
			continue
		}
		where := place{r.In, p, a.Address}
		d.overlapping[where] = append(d.overlapping[where],
			span{uint32(a.Ports.First), uint32(a.Ports.Last), -a.Ports.Count(), i})
	}
}

// cutRanges adds ranges of ports that do not overlap any more.
func (d *destinationSteps) cutRanges() {
	for _, where := range sortedPlaces(d.overlapping) {
		at := func(port uint32) (int, []byte) {
			return keyAt(where.in, []byte{byte(where.protocol)}, where.address.AsSlice(), keyPort(uint16(port)))
		}
		for _, p := range flatten(d.overlapping[where]) {
			a := d.file.Rules[p.rule].Action.(rulefile.DNAT)
			if keepsPorts(a) || len(a.Targets) > 1 {
				b, k := at(p.first)
				e := Element{Key: k, Rule: p.rule}
				if keepsPorts(a) {
					e = d.forward(p.rule, k, rulefile.PortRange{})
				} else {
					e.Verdict = goToVerdict(d.balanceShifted(p.rule, a))
				}
				_, e.End = at(p.last)
				d.ranges[b].add(e)
				continue
			}
			for port := p.first; port <= p.last; port++ {
				b, k := at(port)
				d.shifted[b].add(d.forward(p.rule, k, rulefile.PortRange{First: uint16(port), Last: uint16(port)}))
			}
		}
	}
}

// cutPrefixes adds ranges of addresses likewise.
func (d *destinationSteps) cutPrefixes() {
	for _, in := range slices.Sorted(maps.Keys(d.prefixes)) {
		for _, p := range flatten(d.prefixes[in]) {
			b, k := keyAt(in, binaryutil.BigEndian.PutUint32(p.first))
			_, end := keyAt(in, binaryutil.BigEndian.PutUint32(p.last))
			m := d.file.Rules[p.rule].Action.(rulefile.Map)
			verdict := acceptVerdict()
			if !m.IsIdentity() {
				verdict = goToVerdict(d.chain("to_"+m.Inside.String(), rule(translatePrefix(expr.NATTypeDestNAT, m.Inside))))
			}
			d.nets[b].add(Element{Key: k, End: end, Verdict: verdict, Rule: p.rule})
		}
	}
}

// mapWaysIn are the interfaces that what is sent to a map's external addresses may come in
// by: from outside its own, and from inside (hairpin) its hosts'. "" is every one.
func (c *compiler) mapWaysIn(r *rulefile.Rule) []string {
	if r.In == "" && r.Out == "" {
		return []string{""}
	}
	of := func(bound string, side []string) []string {
		if bound != "" {
			return []string{bound}
		}
		return side
	}
	ways := slices.Concat(of(r.In, c.file.Inside), of(r.Out, c.file.Outside))
	slices.Sort(ways)
	return slices.Compact(ways)
}

func sortedPlaces(m map[place][]span) []place {
	places := make([]place, 0, len(m))
	for p := range m {
		places = append(places, p)
	}
	slices.SortFunc(places, func(a, b place) int {
		return slices.Compare(key(keyLink(a.in), []byte{byte(a.protocol)}, a.address.AsSlice()), key(keyLink(b.in), []byte{byte(b.protocol)}, b.address.AsSlice()))
	})
	return places
}

// portProtocols are those that a rule with ports is for.
func portProtocols(p rulefile.Protocol) []rulefile.Protocol {
	if p == rulefile.AnyProtocol {
		return []rulefile.Protocol{rulefile.TCP, rulefile.UDP}
	}
	return []rulefile.Protocol{p}
}

// keepsPorts reports whether all targets get the ports as they were addressed.
func keepsPorts(a rulefile.DNAT) bool {
	return !slices.ContainsFunc(a.Targets, func(t rulefile.Target) bool { return !t.Ports.IsZero() && t.Ports != a.Ports })
}

// forward leads to where a rule sends to. port is the one port that the key is for, or
// none, if the port stays.
func (c *compiler) forward(index int, k []byte, port rulefile.PortRange) Element {
	a := c.file.Rules[index].Action.(rulefile.DNAT)
	e := Element{Key: k, Rule: index}
	value := func(t rulefile.Target) []byte {
		to := port.First
		if !t.Ports.IsZero() {
			to = t.Ports.First + (port.First - a.Ports.First)
		}
		if port.IsZero() || to == port.First {
			return t.Address.AsSlice()
		}
		return key(t.Address.AsSlice(), keyPort(to))
	}
	if len(a.Targets) == 1 {
		e.Value = value(a.Targets[0])
		return e
	}
	// With several targets a key leads to a chain that chooses.
	name := fmt.Sprintf("balance_%d", index)
	e.Verdict = goToVerdict(name)
	if c.chains[name] {
		return e
	}
	slots := a.Table()
	withPort := slices.ContainsFunc(a.Targets, func(t rulefile.Target) bool { return len(value(t)) > 4 })
	targets := Set{
		Name: name, Key: []nftables.SetDatatype{nftables.TypeMark}, Data: []nftables.SetDatatype{nftables.TypeIPAddr},
	}
	if withPort {
		targets.Data = append(targets.Data, nftables.TypeInetService)
	}
	for slot, t := range slots {
		v := value(a.Targets[t])
		if withPort && len(v) == 4 {
			v = key(v, keyPort(port.First))
		}
		targets.Elements = append(targets.Elements, Element{Key: binaryutil.NativeEndian.PutUint32(uint32(slot)), Value: v, Rule: noRule})
	}
	c.set(targets)
	c.chain(name, rule(hashOfSource(len(slots)),
		[]expr.Any{&expr.Lookup{SourceRegister: register0, DestRegister: register0, IsDestRegSet: true, SetName: name}},
		translate(expr.NATTypeDestNAT, withPort)))
	return e
}

// balanceShifted is a chain that chooses one of several targets whose ports are others: for each of
// them there is a chain with a map of the ports.
func (c *compiler) balanceShifted(index int, a rulefile.DNAT) string {
	name := fmt.Sprintf("balance_%d", index)
	if c.chains[name] {
		return name
	}
	to := func(target int) string { return fmt.Sprintf("%s_%d", name, target) }
	for i, t := range a.Targets {
		ports := Set{
			Name: to(i), Key: datatypes([]part{partDestPort}), Data: []nftables.SetDatatype{nftables.TypeIPAddr, nftables.TypeInetService},
		}
		first := t.Ports.First
		if t.Ports.IsZero() {
			first = a.Ports.First // this target keeps them
		}
		for n := range a.Ports.Count() {
			ports.Elements = append(ports.Elements, Element{
				Key: keyPort(a.Ports.First + uint16(n)), Value: key(t.Address.AsSlice(), keyPort(first+uint16(n))), Rule: noRule,
			})
		}
		c.set(ports)
		c.chain(ports.Name, rule(mapped(ports.Name, partDestPort), translate(expr.NATTypeDestNAT, true)))
	}
	targets := Set{Name: name, Key: []nftables.SetDatatype{nftables.TypeMark}, Data: []nftables.SetDatatype{nftables.TypeVerdict}}
	slots := a.Table()
	for slot, t := range slots {
		targets.Elements = append(targets.Elements, Element{
			Key: binaryutil.NativeEndian.PutUint32(uint32(slot)), Verdict: goToVerdict(to(t)), Rule: noRule,
		})
	}
	c.set(targets)
	return c.chain(name, rule(hashOfSource(len(slots)),
		[]expr.Any{&expr.Lookup{SourceRegister: register0, IsDestRegSet: true, SetName: name}}))
}

// maxShifted bounds the elements of ports that become others.
const maxShifted = 1 << 20

// shiftedTooMany refuses more than these: the kernel's maps have one for each port of each target.
func shiftedTooMany(f *rulefile.File) error {
	total := 0
	for i := range f.Rules {
		r := &f.Rules[i]
		a, ok := r.Action.(rulefile.DNAT)
		if !ok || a.Ports.Count() < 2 || keepsPorts(a) {
			continue
		}
		if total += a.Ports.Count() * len(a.Targets); total > maxShifted {
			return rulefile.Problems{{File: f.Name, Position: r.Position, Message: fmt.Sprintf("the kernel's NAT has an element for each port that becomes another, at each target, and with this rule they are %d, of at most %d: use engine ebpf, or targets that keep the ports", total, maxShifted)}}
		}
	}
	return nil
}
