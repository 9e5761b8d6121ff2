// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/words/plural"
)

// Compile turns a rule file into the contents of the engine's maps. It is pure: what
// the machine looks like comes in as facts. All that can't be is reported at once.
func Compile(file *rulefile.File, facts Facts) (*Tables, error) {
	c := &compiler{file: file, facts: facts, byName: map[string]*Link{}, ids: make(map[*rulefile.Rule]uint32, len(file.Rules)), t: &Tables{
		Links:        slices.Clone(facts.Links),
		Exact:        map[abiNatExactKey]uint32{},
		Destinations: map[abiNatDestinationKey]uint32{},
		Origins:      map[abiNatOriginKey]uint32{},
		ExcludeSrc:   map[abiNatPrefixKey]uint32{},
		ExcludeDst:   map[abiNatPrefixKey]uint32{},
		Excludes:     map[abiNatExcludeKey]uint32{},
		InClass:      map[abiNatPrefixKey]uint32{},
		Computed:     map[abiNatComputedKey]abiNatComputed{},
	}}
	for i := range c.t.Links {
		c.byName[c.t.Links[i].Name] = &c.t.Links[i]
		c.t.Links[i].Zone = c.t.Links[i].Inside && file.Subscribers.ByInterface
	}
	for i, id := range file.RuleIDs() {
		c.ids[&file.Rules[i]] = uint32(id)
	}
	c.configure()
	c.subscribers()
	c.t.Log = logWhat(c.file.Recorded(), c.file.Log.Destinations)
	c.outside()
	c.rules()
	c.insideHosts()
	c.origins()
	c.excludes()
	if len(c.t.Rules) > int(abiNatLimitNAT_MAX_RULES) {
		c.fail(nil, "%s, of which the engine holds %d", plural.Count(len(c.t.Rules), "rule"), abiNatLimitNAT_MAX_RULES)
	}
	if err := errors.Join(c.errs...); err != nil {
		return nil, err
	}
	return c.t, nil
}

type compiler struct {
	file   *rulefile.File
	facts  Facts
	t      *Tables
	byName map[string]*Link
	errs   []error
	ids    map[*rulefile.Rule]uint32 // rulefile.RuleID

	addresses map[netip.Addr]*ExternalAddress // wanted, by address
	had       map[netip.Addr]*ExternalAddress // of the engine as it runs, likewise
	proxies   map[ProxyNeighbour]bool
	next      int             // first index that was never given
	pools     map[string]pool // by what poolKey says
	sources   []source
	// What gatewaysPorts found, by range and whether it was named: there may be thousands
	// of addresses.
	gateways map[gatewaysKey]PortList
	forwards map[forwardKey][]uint16 // ports that forwards take from those to give
}

type gatewaysKey struct {
	ports [2]uint16
	named bool
}

// pool is what a source rule gives addresses from.
type pool struct {
	number       uint8
	first, count int // indices
}

// source is a source rule, before it is known which of several it must give way to.
type source struct {
	in, out int // links, -1 any
	prefix  netip.Prefix
	rule    uint32
}

func (c *compiler) fail(r *rulefile.Rule, format string, args ...any) {
	err := fmt.Errorf(format, args...)
	if r != nil {
		err = fmt.Errorf("%s:%d:%d: %w", c.file.Name, r.Position.Line, r.Position.Column, err)
	}
	c.errs = append(c.errs, err)
}

// configure gives what holds for the whole file.
func (c *compiler) configure() {
	for i, d := range c.file.Defaults.Timeouts {
		c.t.Config.Timeouts[i] = Ticks(d)
	}
	if c.file.Defaults.InboundRefresh {
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_INBOUND_REFRESH)
	}
	if c.file.Defaults.PortParity {
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_PARITY)
	}
	if !c.file.PCP.IsZero() {
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_LEASES)
	}
	c.t.Config.IcmpPerSecond = uint32(c.file.Limits.ICMPErrorsPerSecond)
}

// Ticks converts to the engine's unit of time, 2^20 ns, and never to less.
func Ticks(d time.Duration) uint32 {
	const tick = 1 << uint(abiNatLimitNAT_TICK_SHIFT)
	return uint32((d + tick - 1) / tick)
}

// --- external addresses ---------------------------------------------------------

// outside collects the addresses that are translated to, and gives each an index and
// each pool a number. What the engine knows already keeps both: mappings hold them.
func (c *compiler) outside() {
	c.addresses = map[netip.Addr]*ExternalAddress{}
	c.pools = map[string]pool{}
	c.had = make(map[netip.Addr]*ExternalAddress, len(c.facts.Addresses))
	c.proxies = map[ProxyNeighbour]bool{}
	for i, a := range c.facts.Addresses {
		c.next = max(c.next, a.Index+1)
		if c.had[a.Addr] == nil {
			c.had[a.Addr] = &c.facts.Addresses[i]
		}
	}
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.Masquerade:
			for _, l := range c.outLinks(r) {
				c.masquerade(r, a, l)
			}
		case rulefile.SNAT:
			c.pool(r, a)
		}
	}
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		if a, ok := r.Action.(rulefile.DNAT); ok {
			c.forwarded(r, a)
		}
		if _, pooled := r.Action.(rulefile.SNAT); !pooled && !r.Silent {
			m, mapped := r.Action.(rulefile.Map)
			for _, addresses := range r.OutsideAddresses() {
				if mapped && m.IsIdentity() {
					c.proxyRouted(addresses)
				} else {
					c.proxy(addresses)
				}
			}
		}
	}
	for at, ports := range c.forwards {
		at.address.Forwarded[at.class] = PortList(nil).With(ports...)
	}
	c.t.Addresses = c.t.Addresses[:0]
	for _, a := range c.addresses {
		c.t.Addresses = append(c.t.Addresses, *a)
	}
	for _, a := range c.facts.Addresses {
		if c.addresses[a.Addr] == nil {
			a.Leaving, a.Owned = true, slices.Contains(c.facts.Local, a.Addr)
			c.t.Addresses = append(c.t.Addresses, a)
		}
	}
	slices.SortFunc(c.t.Addresses, func(a, b ExternalAddress) int { return cmp.Compare(a.Index, b.Index) })
}

// masquerade gives a link the pool and address of what leaves by it.
func (c *compiler) masquerade(r *rulefile.Rule, a rulefile.Masquerade, l *Link) {
	if len(l.Addresses) == 0 && l.Awaited {
		return
	}
	if len(l.Addresses) == 0 {
		c.fail(r, "interface %s has no IPv4 address to masquerade behind", l.Name)
		return
	}
	key := fmt.Sprintf("masquerade %d", l.Index)
	p, known := c.pools[key]
	addr := l.Addresses[0].Addr()
	if known {
		if want := c.portsOf(addr, a.Ports); c.addresses[addr].Ports != want {
			c.fail(r, "masquerading behind %s uses ports %d-%d by another rule", l.Name, c.addresses[addr].Ports[0], c.addresses[addr].Ports[1])
		}
		return
	}
	for name, p := range c.pools {
		if a := c.addresses[addr]; a != nil && p.count > 1 && p.first <= a.Index && a.Index < p.first+p.count {
			c.fail(r, "the address %s of interface %s is in %s too: use snat to the pool there", addr, l.Name, name)
			return
		}
	}
	p = pool{count: 1, number: c.poolNumber([]netip.Addr{addr})}
	p.first = c.address(r, ExternalAddress{Addr: addr, Ports: c.portsOf(addr, a.Ports), Masquerade: true, Link: l.Index, Pool: p.number}, -1)
	c.pools[key] = p
	c.t.Masks = append(c.t.Masks, Masking{Link: l.Index, Pool: p.number, Address: p.first})
}

func poolKey(a rulefile.SNAT) string {
	if a.Pool != "" {
		return "pool " + a.Pool
	}
	return "address " + a.Address.String()
}

// pool gives a pool its addresses, whose indices follow each other.
func (c *compiler) pool(r *rulefile.Rule, a rulefile.SNAT) {
	key := poolKey(a)
	if _, known := c.pools[key]; known {
		return
	}
	var addrs []netip.Addr
	ports, oneToOne, silent := a.Ports, false, r.Silent
	named := &rulefile.Pool{}
	if a.Pool == "" {
		addrs = []netip.Addr{a.Address}
	} else {
		if named = c.file.Pool(a.Pool); named == nil {
			c.fail(r, "unknown pool %q", a.Pool)
			return
		}
		ports, oneToOne, silent = named.Ports, named.OneToOne, named.Silent
		for _, r := range named.Addresses {
			for i := range r.Count() {
				addrs = append(addrs, r.At(i))
			}
			if len(addrs) > int(abiNatLimitNAT_MAX_ADDRESSES) {
				c.fail(nil, "pool %s has more than %d addresses", a.Pool, abiNatLimitNAT_MAX_ADDRESSES)
				return
			}
		}
	}
	p := pool{count: len(addrs), number: c.poolNumber(addrs), first: c.block(addrs)}
	computed := c.computed(named, p)
	for i, addr := range addrs {
		wanted := ExternalAddress{
			Addr: addr, OneToOne: oneToOne, Link: c.linkOf(addr), Pool: p.number, Blocks: named.Blocks, Draining: named.Drains(addr), Computed: computed,
		}
		if !oneToOne {
			wanted.Ports = c.portsOf(addr, ports)
		}
		if other := c.addresses[addr]; other != nil && len(addrs) > 1 {
			c.fail(r, "address %s of %s is given by another rule too, on its own: use the pool in both", addr, key)
			return
		}
		c.address(r, wanted, p.first+i)
		if have := c.addresses[addr]; computed != [2]uint16{} && len(have.Reserved) > 0 {
			c.fail(r, "%s is the gateway's own, whose connections have ports %s of it: with deterministic blocks, name the ports of %s that it gives", addr, have.Reserved, key)
			return
		}
	}
	c.pools[key] = p
	if !silent {
		for _, addr := range addrs {
			c.proxy(rulefile.AddressRange{First: addr, Last: addr})
		}
	}
}

// block finds indices one after the other for a pool: those that its addresses have,
// or new ones.
func (c *compiler) block(addrs []netip.Addr) int {
	if have := c.known(addrs[0]); have != nil {
		same := true
		for i, addr := range addrs {
			a := c.known(addr)
			same = same && a != nil && a.Index == have.Index+i
		}
		if same {
			return have.Index
		}
	}
	first := c.next
	c.next += len(addrs)
	return first
}

// known is what the engine has under an address, from this file or the one before.
func (c *compiler) known(addr netip.Addr) *ExternalAddress {
	if a := c.addresses[addr]; a != nil {
		return a
	}
	return c.had[addr]
}

// address wants an external address, with the index that it has or else this one (-1:
// the next).
func (c *compiler) address(r *rulefile.Rule, a ExternalAddress, index int) int {
	a.Owned = slices.Contains(c.facts.Local, a.Addr)
	have := c.known(a.Addr)
	switch {
	case have == nil && index < 0:
		a.Index = c.next
		c.next++
	case have == nil:
		a.Index = index
	default:
		a.Index = have.Index
		if index >= 0 && index != have.Index && c.addresses[a.Addr] == nil { // its pool has grown
			a.Index, a.Before = index, have.Index+1
			if a.OneToOne {
				c.fail(r, "the addresses of a pool without ports can't become more or others while it is up: take the engine down and up again for that")
			}
		}
		static := have.Ports[0] == 0 && !have.OneToOne
		if !static && (have.Ports != a.Ports || have.OneToOne != a.OneToOne) {
			c.fail(r, "%s gives ports %s, but had %s before: take the engine down and up again for that",
				a.Addr, portsText(a), portsText(*have))
		}
		if !have.Blocks.IsZero() && a.Blocks.IsZero() {
			c.fail(r, "%s gives ports in blocks, which subscribers have; it can give them one by one when its sessions have ended: until then give the rule other addresses, or run `natkit down` and then `natkit up`, which ends all sessions", a.Addr)
		}
		a.Masquerade = a.Masquerade || c.addresses[a.Addr] != nil && have.Masquerade
	}
	if a.Index >= int(abiNatLimitNAT_MAX_ADDRESSES) {
		c.fail(r, "more than %d external addresses", abiNatLimitNAT_MAX_ADDRESSES)
	}
	if a.Owned && a.Ports[0] > 0 {
		a.Reserved = c.gatewaysPorts(r, a.Ports)
	}
	c.addresses[a.Addr] = &a
	return a.Index
}

func portsText(a ExternalAddress) string {
	switch {
	case a.OneToOne:
		return "none (whole)"
	case a.Ports[0] == 0:
		return "none"
	}
	return fmt.Sprintf("%d-%d", a.Ports[0], a.Ports[1])
}

// portsOf is the range of ports to give. Of an address of the gateway's own, ports that
// its own connections may have are in the range, but reserved.
func (c *compiler) portsOf(addr netip.Addr, ports rulefile.PortRange) [2]uint16 {
	if ports.IsZero() {
		ports = rulefile.DefaultPorts
	}
	return [2]uint16{ports.First, ports.Last}
}

// gatewaysPorts are those of a range that connections of the gateway itself may get.
// Where a rule names its ports, it is the other way round: the gateway is to leave
// them alone.
func (c *compiler) gatewaysPorts(r *rulefile.Rule, ports [2]uint16) PortList {
	key := gatewaysKey{ports, c.namesPorts(r)}
	if known, ok := c.gateways[key]; ok {
		return known
	}
	var own PortList
	for p := uint32(max(ports[0], c.facts.LocalPorts[0])); p <= uint32(min(ports[1], c.facts.LocalPorts[1])); p++ {
		if _, found := slices.BinarySearch(c.facts.ReservedPorts, uint16(p)); !found {
			own = append(own, uint16(p))
		}
	}
	if key.named {
		c.t.ReservePorts, own = c.t.ReservePorts.With(own...), nil
	}
	if c.gateways == nil {
		c.gateways = map[gatewaysKey]PortList{}
	}
	c.gateways[key] = own
	return own
}

func (c *compiler) namesPorts(r *rulefile.Rule) bool {
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		return !a.Ports.IsZero()
	case rulefile.SNAT:
		if p := c.file.Pool(a.Pool); p != nil {
			return !p.Ports.IsZero()
		}
		return !a.Ports.IsZero()
	}
	return false
}

// forwardKey is a space of ports: forwards of TCP leave those of UDP alone.
type forwardKey struct {
	address *ExternalAddress
	class   rulefile.Class
}

// forwarded takes the ports of a forward out of those that are given. Of another
// address it makes known on which interface it is, for internal hosts that use it; and
// packets to its other ports end here, unless it is the gateway's own.
func (c *compiler) forwarded(r *rulefile.Rule, a rulefile.DNAT) {
	have := c.addresses[a.Address]
	if have == nil {
		c.locate(r, a.Address)
		return
	}
	if a.Ports.IsZero() {
		return
	}
	if c.forwards == nil {
		c.forwards = map[forwardKey][]uint16{}
	}
	key := forwardKey{have, a.Protocol.Class()}
	for p := uint32(max(a.Ports.First, have.Ports[0])); p <= uint32(min(a.Ports.Last, have.Ports[1])); p++ {
		c.forwards[key] = append(c.forwards[key], uint16(p))
	}
}

// locate makes known on which interface an address is that gives no ports, for inside
// hosts that use it. One that has given ports is known until its sessions have ended.
func (c *compiler) locate(r *rulefile.Rule, addr netip.Addr) {
	if have := c.known(addr); have == nil || have.Ports[0] == 0 && !have.OneToOne {
		c.address(r, ExternalAddress{Addr: addr, Link: c.linkOf(addr)}, -1)
	}
}

// poolNumber gives a pool its number: the one that its addresses have had, or a new one.
func (c *compiler) poolNumber(addrs []netip.Addr) uint8 {
	for _, addr := range addrs {
		if a := c.known(addr); a != nil && a.Pool > 0 && (a.Ports[0] > 0 || a.OneToOne) {
			return a.Pool
		}
	}
	used := map[uint8]bool{}
	for _, a := range c.facts.Addresses {
		used[a.Pool] = true
	}
	for _, p := range c.pools {
		used[p.number] = true
	}
	for number := 1; number <= int(abiNatLimitNAT_MAX_POOLS); number++ {
		if !used[uint8(number)] {
			return uint8(number)
		}
	}
	c.fail(nil, "more than %d pools and masquerading interfaces", abiNatLimitNAT_MAX_POOLS)
	return 0
}

// linkOf is the index of the interface on whose network an address is, -1 if none.
func (c *compiler) linkOf(addr netip.Addr) int {
	for _, l := range c.t.Links {
		for _, p := range l.Addresses {
			if p.Masked().Contains(addr) {
				return l.Index
			}
		}
	}
	return -1
}

// proxy wants ARP answered for addresses on a connected network that nobody has.
func (c *compiler) proxy(r rulefile.AddressRange) {
	for _, part := range c.connected(r, c.t.Links...) {
		for i := range part.Count() {
			addr := part.At(i)
			index := c.linkOf(addr)
			if slices.Contains(c.facts.Local, addr) {
				continue
			}
			link := c.t.Links[slices.IndexFunc(c.t.Links, func(l Link) bool { return l.Index == index })]
			if !link.Outside {
				continue
			}
			// For the sake of ARP it is routed to lo: the routes do not tell where it is.
			c.locate(nil, addr)
			c.wantProxy(ProxyNeighbour{Link: link.Name, Addr: addr})
		}
	}
}

// proxyRouted wants ARP answered, on outside networks, for addresses that hosts behind the
// gateway have themselves. The routes tell where they are.
func (c *compiler) proxyRouted(r rulefile.AddressRange) {
	for _, l := range c.t.Links {
		for _, part := range c.connected(r, l) {
			for i := range part.Count() {
				if a := part.At(i); !slices.Contains(c.facts.Local, a) {
					c.wantProxy(ProxyNeighbour{Link: l.Name, Addr: a})
				}
			}
		}
	}
}

// connected are the parts of a range that are on the networks of those links that are outside.
func (c *compiler) connected(r rulefile.AddressRange, links ...Link) (parts []rulefile.AddressRange) {
	for _, l := range links {
		for _, p := range l.Addresses {
			part, ok := r.Within(rulefile.RangeOf(p))
			switch {
			case !ok || !l.Outside:
			case part.Count() > MaxProxies:
				c.fail(nil, "%s", TooManyProxies(part))
			default:
				parts = append(parts, part)
			}
		}
	}
	return parts
}

func (c *compiler) wantProxy(n ProxyNeighbour) {
	if !c.proxies[n] {
		c.proxies[n] = true
		c.t.ProxyNeighbours = append(c.t.ProxyNeighbours, n)
	}
}

// MaxProxies bounds the proxy neighbours of a rule: a network that large is routed.
const MaxProxies = 4096

// TooManyProxies is why a part of a rule's addresses can't be answered for.
func TooManyProxies(part rulefile.AddressRange) string {
	return fmt.Sprintf("%s on a connected network are %d addresses to answer ARP for, of at most %d: route them here, and say arp: none", part, part.Count(), MaxProxies)
}

// --- rules ----------------------------------------------------------------------

// outLinks are the interfaces that a source rule holds for: the one it names, or every
// outside one.
func (c *compiler) outLinks(r *rulefile.Rule) (links []*Link) {
	if r.Out != "" {
		if l := c.link(r, r.Out); l != nil {
			links = append(links, l)
		}
		return links
	}
	for i := range c.t.Links {
		if c.t.Links[i].Outside {
			links = append(links, &c.t.Links[i])
		}
	}
	return links
}

func (c *compiler) link(r *rulefile.Rule, name string) *Link {
	l := c.byName[name]
	if l == nil {
		c.fail(r, "interface %s is not one of the file's inside and outside interfaces", name)
	}
	return l
}

// index of a link that a rule is bound to, -1 for any.
func (c *compiler) index(r *rulefile.Rule, name string) int {
	if name == "" {
		return -1
	}
	if l := c.link(r, name); l != nil {
		return l.Index
	}
	return -1
}

// add puts a rule into the table and returns its index.
func (c *compiler) add(r *rulefile.Rule, rule abiNatRule) uint32 {
	for class := range rulefile.Class(rulefile.PortClasses) {
		rule.Mapping[class] = uint8(c.file.MappingMode(r, class) - rulefile.EndpointIndependent)
		rule.Filtering[class] = uint8(c.file.FilteringMode(r, class) - rulefile.FilterEndpointIndependent)
	}
	if c.file.ClampsMSS(r) {
		rule.Flags |= uint8(abiNatRuleFlagNAT_RULE_CLAMP_MSS)
	}
	c.t.Rules = append(c.t.Rules, rule)
	return uint32(len(c.t.Rules) - 1)
}

func (c *compiler) rules() {
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.Masquerade:
			index := c.add(r, abiNatRule{
				Id: c.ids[r], Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Flags: uint8(abiNatRuleFlagNAT_RULE_MASQUERADE), PoolCount: 1,
			})
			c.from(r, a.Source, index)
		case rulefile.SNAT:
			p := c.pools[poolKey(a)]
			rule := abiNatRule{
				Id: c.ids[r], Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Pool: p.number, PoolFirst: uint32(p.first), PoolCount: uint32(p.count),
			}
			if named := c.file.Pool(a.Pool); named != nil && named.OneToOne {
				rule.Kind = uint8(abiNatRuleKindNAT_RULE_ONE_TO_ONE)
			}
			c.from(r, a.Source, c.add(r, rule))
		case rulefile.DNAT:
			c.forward(r, a)
		case rulefile.Map:
			c.both(r, a)
		}
	}
}

// from notes a source rule for every egress interface that it holds for.
func (c *compiler) from(r *rulefile.Rule, prefix netip.Prefix, rule uint32) {
	out := -1
	if r.Out != "" {
		out = c.index(r, r.Out)
	}
	c.sources = append(c.sources, source{in: c.index(r, r.In), out: out, prefix: prefix.Masked(), rule: rule})
}

// both is a map: a source rule for what internal hosts send, a destination rule for what
// is sent to them, from outside and by other internal hosts.
func (c *compiler) both(r *rulefile.Rule, a rulefile.Map) {
	kind := abiNatRuleKindNAT_RULE_MAP
	if a.Stateless {
		kind = abiNatRuleKindNAT_RULE_STATELESS
	}
	id := c.ids[r]
	rule := abiNatRule{Id: id, Kind: uint8(kind), Prefix: uint8(a.Inside.Bits()), To: octets(a.Outside.Masked().Addr())}
	c.from(r, a.Inside, c.add(r, rule))

	rule.To, rule.Zone = octets(a.Inside.Masked().Addr()), c.zone(r)
	index := c.add(r, rule)
	c.owned(a.Outside, index)
	links, from := []int{-1}, r.In
	if c.file.Subscribers.ByInterface {
		from = "" // it says whose addresses they are: hosts behind all interfaces may send to them
	}
	if r.Out != "" || from != "" {
		links = nil
		for i := range c.t.Links {
			l := &c.t.Links[i]
			if l.Inside && (from == "" || l.Name == from) || l.Outside && (r.Out == "" || l.Name == r.Out) {
				links = append(links, l.Index)
			}
		}
	}
	for _, link := range links {
		key := abiNatDestinationKey{
			Prefixlen: 32 + uint32(a.Outside.Bits()), Link: bigEndian(uint16(link + 1)),
			Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Addr: octets(a.Outside.Masked().Addr()),
		}
		c.t.Destinations[key] = index
		c.lookup(link, abiNatLookupNAT_LOOKUP_PREFIX, abiNatLookupNAT_LOOKUP_PREFIX_LINK)
	}
}

// owned makes known that nobody inside has addresses of a map's outside prefix, whatever
// interfaces the map is bound to.
func (c *compiler) owned(prefix netip.Prefix, rule uint32) {
	c.t.Destinations[abiNatDestinationKey{
		Prefixlen: 32 + uint32(prefix.Bits()), Kind: uint8(abiNatDestinationKindNAT_OWNED), Addr: octets(prefix.Masked().Addr()),
	}] = rule
	c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_OWNED)
}

// insideHosts makes known whose packets are from inside where an interface is on both sides.
func (c *compiler) insideHosts() {
	if !slices.ContainsFunc(c.t.Links, func(l Link) bool { return l.Inside && l.Outside }) {
		return
	}
	for _, prefix := range c.file.InsideHosts() {
		c.t.Destinations[abiNatDestinationKey{
			Prefixlen: 32 + uint32(prefix.Bits()), Kind: uint8(abiNatDestinationKindNAT_INTERNAL_HOSTS), Addr: octets(prefix.Masked().Addr()),
		}] = 0
	}
}

// lookup notes that packets must be looked up in a way, bound to an interface or not.
func (c *compiler) lookup(link int, unbound, bound abiNatLookup) {
	if link < 0 {
		c.t.Config.Lookups |= uint32(unbound)
	} else {
		c.t.Config.Lookups |= uint32(bound)
	}
}

// forward is a destination rule.
func (c *compiler) forward(r *rulefile.Rule, a rulefile.DNAT) {
	link := c.index(r, r.In)
	rule := abiNatRule{
		Id: c.ids[r], Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: a.Ports.First,
		Targets: uint32(len(c.t.Targets)),
	}
	table := a.Table()
	rule.TargetCount = uint32(len(table))
	c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_TARGETS)
	for _, i := range table {
		target := a.Targets[i]
		c.t.Destinations[abiNatDestinationKey{
			Prefixlen: 64, Kind: uint8(abiNatDestinationKindNAT_TARGETS), Addr: octets(target.Address),
		}] = 0
		c.t.Targets = append(c.t.Targets, abiNatTarget{Addr: octets(target.Address), Port: bigEndian(target.Ports.First), Zone: c.zone(r)})
	}
	if a.Targets[0].Ports.IsZero() {
		rule.Flags |= uint8(abiNatRuleFlagNAT_RULE_KEEP_PORT)
	}
	index := c.add(r, rule)
	in := bigEndian(uint16(link + 1))
	switch {
	case a.Ports.IsZero():
		c.t.Destinations[abiNatDestinationKey{
			Prefixlen: 64, Link: in, Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Protocol: uint8(a.Protocol), Addr: octets(a.Address),
		}] = index
		if a.Protocol == rulefile.AnyProtocol {
			c.lookup(link, abiNatLookupNAT_LOOKUP_PREFIX, abiNatLookupNAT_LOOKUP_PREFIX_LINK)
		} else {
			c.lookup(link, abiNatLookupNAT_LOOKUP_PREFIX_PROTOCOL, abiNatLookupNAT_LOOKUP_PREFIX_PROTOCOL_LINK)
		}
	case a.Ports.First == a.Ports.Last:
		c.t.Exact[abiNatExactKey{Addr: octets(a.Address), Port: bigEndian(a.Ports.First), Protocol: uint8(a.Protocol), Link: uint32(link + 1)}] = index
		c.lookup(link, abiNatLookupNAT_LOOKUP_EXACT, abiNatLookupNAT_LOOKUP_EXACT_LINK)
	default:
		for _, p := range portPrefixes(a.Ports) {
			c.t.Destinations[abiNatDestinationKey{
				Prefixlen: 64 + uint32(p.bits), Link: in, Kind: uint8(abiNatDestinationKindNAT_BY_RANGE),
				Protocol: uint8(a.Protocol), Addr: octets(a.Address), Port: bigEndian(p.first),
			}] = index
		}
		c.lookup(link, abiNatLookupNAT_LOOKUP_RANGE, abiNatLookupNAT_LOOKUP_RANGE_LINK)
	}
}

type portPrefix struct {
	first uint16
	bits  int
}

// portPrefixes covers a range of ports with as few prefixes as there can be.
func portPrefixes(r rulefile.PortRange) (out []portPrefix) {
	for first, last := uint32(r.First), uint32(r.Last); first <= last; {
		size := uint32(1) << min(bits.TrailingZeros32(first|1<<16), 16)
		for size > last-first+1 {
			size /= 2
		}
		out = append(out, portPrefix{uint16(first), 16 - bits.TrailingZeros32(size)})
		first += size
	}
	return out
}

// --- source rules by interface -----------------------------------------------------

// origins gives every pair of ingress and egress interface that rules are about a trie of its
// own, complete in itself. A rule bound to more interfaces goes before one bound to
// fewer, whatever their prefixes: (in, out), then out alone, then in alone, then
// neither. So a prefix enters a trie only where no rule of a higher rank covers it.
// Rules without an egress interface are about the outside interfaces.
func (c *compiler) origins() {
	ins, outs := map[int]bool{-1: true}, map[int]bool{}
	for _, s := range c.sources {
		ins[s.in] = true
		if s.out >= 0 {
			outs[s.out] = true
		}
	}
	outside := map[int]bool{}
	for _, l := range c.t.Links {
		if l.Outside {
			outs[l.Index], outside[l.Index] = true, true
		}
	}
	if len(c.sources) == 0 {
		return
	}
	c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_SOURCE_OUT)
	if len(ins) > 1 {
		c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_SOURCE_IN_OUT)
	}
	ranked := slices.Clone(c.sources)
	slices.SortStableFunc(ranked, func(a, b source) int { return cmp.Compare(a.rank(), b.rank()) })
	for in := range ins {
		for out := range outs {
			trie := map[netip.Prefix]bool{}
			for i := 0; i < len(ranked); {
				// What a rule covers, rules of its own rank may still divide.
				j := i
				var entered []netip.Prefix
				for ; j < len(ranked) && ranked[j].rank() == ranked[i].rank(); j++ {
					s := ranked[j]
					if s.in >= 0 && s.in != in || s.out >= 0 && s.out != out || s.out < 0 && !outside[out] || covered(trie, s.prefix) {
						continue
					}
					c.t.Origins[abiNatOriginKey{
						Prefixlen: 32 + uint32(s.prefix.Bits()), In: bigEndian(uint16(in + 1)), Out: bigEndian(uint16(out + 1)), Addr: octets(s.prefix.Addr()),
					}] = s.rule
					entered = append(entered, s.prefix)
				}
				for _, p := range entered {
					trie[p] = true
				}
				i = j
			}
		}
	}
}

func (s source) rank() int {
	switch {
	case s.in >= 0 && s.out >= 0:
		return 0
	case s.out >= 0:
		return 1
	case s.in >= 0:
		return 2
	}
	return 3
}

// covered reports whether a prefix, or a shorter one around it, is in the set.
func covered(set map[netip.Prefix]bool, p netip.Prefix) bool {
	for b := p.Bits(); b >= 0; b-- {
		if set[netip.PrefixFrom(p.Addr(), b).Masked()] {
			return true
		}
	}
	return false
}

// --- exclusions --------------------------------------------------------------------

// Bounds of what exclusions may become.
const (
	maxExcludePorts = 1024    // of one rule's range: each is an entry
	maxExcludes     = 1 << 20 // pairs
)

// excludes numbers the source and the destination prefixes, and lists the pairs that
// a rule covers: also those of longer prefixes inside its own, since a packet is
// numbered by the longest that it is in.
func (c *compiler) excludes() {
	type exclusion struct {
		rulefile.Exclude
		rule *rulefile.Rule
	}
	var all []exclusion
	src, dst := map[netip.Prefix]uint32{}, map[netip.Prefix]uint32{}
	number := func(set map[netip.Prefix]uint32, keys map[abiNatPrefixKey]uint32, p netip.Prefix) {
		if _, ok := set[p]; !ok {
			set[p] = uint32(len(set))
			keys[abiNatPrefixKey{Prefixlen: uint32(p.Bits()), Addr: octets(p.Addr())}] = set[p]
		}
	}
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		a, ok := r.Action.(rulefile.Exclude)
		if !ok {
			continue
		}
		if r.In != "" || r.Out != "" {
			c.fail(r, "an exclusion can't be bound to an interface on engine ebpf")
		}
		a.Source, a.Destination = a.Source.Masked(), a.Destination.Masked()
		number(src, c.t.ExcludeSrc, a.Source)
		number(dst, c.t.ExcludeDst, a.Destination)
		all = append(all, exclusion{a, r})
	}
	inSrc, inDst := within(src), within(dst)
	for _, a := range all {
		c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_EXCLUDE)
		if a.Protocol != rulefile.AnyProtocol {
			c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_EXCLUDE_PORT)
		}
		if n := a.Ports.Count(); n > maxExcludePorts {
			c.fail(a.rule, "a range of %d ports in an exclusion, of at most %d", n, maxExcludePorts)
			continue
		}
		for _, s := range inSrc[a.Source] {
			for _, d := range inDst[a.Destination] {
				key := abiNatExcludeKey{Src: s, Dst: d, Protocol: uint8(a.Protocol)}
				if a.Ports.IsZero() {
					c.t.Excludes[key] = 0
				}
				for p := uint32(a.Ports.First); !a.Ports.IsZero() && p <= uint32(a.Ports.Last); p++ {
					key.Port = bigEndian(uint16(p))
					c.t.Excludes[key] = 0
				}
				if len(c.t.Excludes) > maxExcludes {
					c.fail(a.rule, "exclusions of overlapping prefixes become more than %d pairs", maxExcludes)
					return
				}
			}
		}
	}
}

// within gives for each prefix of a set the numbers of those that lie in it, its own
// among them: every prefix is compared with the at most 33 that are around it.
func within(set map[netip.Prefix]uint32) map[netip.Prefix][]uint32 {
	out := make(map[netip.Prefix][]uint32, len(set))
	for p, n := range set {
		for b := range p.Bits() + 1 {
			around := netip.PrefixFrom(p.Addr(), b).Masked()
			if _, ok := set[around]; ok {
				out[around] = append(out[around], n)
			}
		}
	}
	return out
}

// octets and bigEndian give addresses and ports as they lie in memory.
func octets(a netip.Addr) abiNatAddr { return abiNatAddr{Octet: a.As4()} }

func bigEndian(n uint16) uint16 { return bits.ReverseBytes16(n) }
