// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// Subscribers says who shares what one subscriber may have, and how much that is. The zero value
// is a file without subscribers: each internal host is one, and Limits.SessionsPerSource is all
// that it is kept to.
type Subscribers struct {
	Prefix int // length: hosts of one such prefix are one subscriber; 32 is each host, 0 there are none
	// ByInterface: hosts behind two inside interfaces are two subscribers, whatever their
	// addresses are.
	ByInterface bool
	Default     Share // of those in no class
	Classes     []SubscriberClass
}

// Share is what a subscriber may have in a pool; 0 is no limit.
type Share struct {
	Ports        int // external ports, of all protocols together, those in hold-down too (RFC 6888 REQ-4)
	Sessions     int
	NewPerSecond int // sessions that it opens itself
	Burst        int // of these at once, after a pause
}

// SubscriberClass is subscribers with a share of their own.
type SubscriberClass struct {
	Name string
	Of   []netip.Prefix // longest prefix wins
	Share
	Position Position
}

// Blocks says that a pool gives ports in blocks; zero: it does not.
type Blocks struct {
	Size   int // ports of a subscriber's first block
	Extra  int // of each further one
	AtMost int // how many further ones
	// Deterministic: which of them follow from the rule file alone.
	Deterministic Deterministic
}

// Bounds of subscribers and blocks (enum nat_limit, nat_block_id of bpf/nat/abi.h).
const (
	MaxClasses     = 255
	MinBlock       = 64
	MaxBlock       = 4096
	MaxExtraBlocks = 7
	MaxNewSessions = 1000000
	MaxUse         = 1<<28 - 1
	defaultClass   = "default"
)

// IsZero reports whether ports are given one by one.
func (b Blocks) IsZero() bool { return b.Size == 0 }

// Most is how many ports a subscriber can have by its blocks, of each protocol.
func (b Blocks) Most() int { return b.Size + b.AtMost*b.Extra }

// Class gives the class of an internal host by its name, and what its subscriber may have.
func (s *Subscribers) Class(host netip.Addr) (string, Share) {
	name, share, best := defaultClass, s.Default, -1
	for i := range s.Classes {
		for _, p := range s.Classes[i].Of {
			if p.Contains(host) && p.Bits() > best {
				name, share, best = s.Classes[i].Name, s.Classes[i].Share, p.Bits()
			}
		}
	}
	return name, share
}

// Names are the names of all classes, the default first.
func (s *Subscribers) Names() []string {
	names := []string{defaultClass}
	for i := range s.Classes {
		names = append(names, s.Classes[i].Name)
	}
	return names
}

// Of gives the subscriber that a host belongs to: the first address of its prefix.
func (s *Subscribers) Of(host netip.Addr) netip.Addr {
	if s.Prefix == 0 {
		return host
	}
	return netip.PrefixFrom(host, s.Prefix).Masked().Addr()
}

// ShareOf is what the subscriber of a host may have, whichever key of the file says it.
func (f *File) ShareOf(host netip.Addr) (class string, share Share) {
	if f.Subscribers.Prefix == 0 {
		return defaultClass, Share{Sessions: f.Limits.SessionsPerSource}
	}
	return f.Subscribers.Class(host)
}

// --- reading -------------------------------------------------------------------------

func (r *reader) subscribers(n *yaml.Node) {
	s := &r.file.Subscribers
	s.Prefix = 32
	for _, e := range r.entries(n, "subscribers") {
		switch e.name {
		case "by":
			r.subscriberBy(e)
		case "classes":
			r.classes(e.value)
		default:
			r.unknown(e, "subscribers", "by", "classes")
		}
	}
	slices.SortFunc(s.Classes, func(a, b SubscriberClass) int { return cmp.Compare(a.Name, b.Name) })
}

// subscriberBy reads what a subscriber is: an address or a prefix, or an interface with one of these.
func (r *reader) subscriberBy(e entry) {
	s := &r.file.Subscribers
	r.file.positions["subscribers.by"] = position(e.key)
	elements, prefixes := r.elements(e.value, e.name), 0
	for _, n := range elements {
		text := r.word(n, e.name)
		switch {
		case strings.Contains(text, "vlan"):
			r.fail(n, "by: %s is not possible: a VLAN is known by its interface; write [interface, address] or [interface, /24], and VLAN interfaces such as eth1.10 under inside", text)
			return
		case text == "interface" && !s.ByInterface:
			s.ByInterface = true
			continue
		case prefixes > 0:
			r.fail(n, "by is one of address, /24, [interface, address] and [interface, /24], and %q is one too many", text)
			return
		}
		s.Prefix, prefixes = r.subscriberPrefix(n, text), prefixes+1
	}
	if s.ByInterface && prefixes == 0 {
		r.fail(e.value, "by: interface does not say what behind an interface is a subscriber: write [interface, address], or [interface, /24] for the length of a prefix")
	}
}

// subscriberPrefix reads what shares one address and one set of limits, as the length of a prefix.
func (r *reader) subscriberPrefix(n *yaml.Node, text string) int {
	if text == "address" || text == "" {
		return 32
	}
	length, err := strconv.Atoi(strings.TrimPrefix(text, "/"))
	if err != nil || text[0] != '/' || length < 8 || length > 32 || "/"+strconv.Itoa(length) != text {
		r.fail(n, "by is address, or the length of a prefix from /8 to /32, and not %q", text)
		return 32
	}
	return length
}

func (r *reader) classes(n *yaml.Node) {
	entries := r.entries(n, "classes")
	if len(entries) > MaxClasses+1 {
		r.fail(n, "%d classes of subscribers, of at most %d", len(entries), MaxClasses+1)
		return
	}
	for _, e := range entries {
		if !isPoolName(e.name) {
			r.fail(e.key, "%q can't name a class: take letters, digits, - and _, a letter first, %d at most", e.name, maxPoolName)
			continue
		}
		c := r.class(e)
		if e.name == defaultClass {
			r.file.Subscribers.Default = c.Share
		} else {
			r.file.Subscribers.Classes = append(r.file.Subscribers.Classes, c)
		}
	}
}

func (r *reader) class(e entry) SubscriberClass {
	c := SubscriberClass{Name: e.name, Position: position(e.key)}
	burst, listed := (*yaml.Node)(nil), false
	for _, e := range r.entries(e.value, "a class") {
		switch e.name {
		case "of":
			listed = true
			c.Of = r.classMembers(e.value, c.Name)
		case "ports":
			c.Ports = r.number(e, 0, MaxUse)
		case "sessions":
			c.Sessions = r.number(e, 0, MaxSessions)
		case "new_per_second":
			c.NewPerSecond = r.number(e, 0, MaxNewSessions)
		case "burst":
			c.Burst, burst = r.number(e, 1, MaxNewSessions), e.key
		default:
			r.unknown(e, "a class", "of", "ports", "sessions", "new_per_second", "burst")
		}
	}
	if c.NewPerSecond == 0 && burst != nil {
		r.fail(burst, "burst belongs to new_per_second, which class %s does not have", c.Name)
	}
	if burst == nil {
		c.Burst = c.NewPerSecond
	}
	if !listed && c.Name != defaultClass {
		r.fail(e.key, "class %s has no key of, which names its internal addresses; those in no class are in class %s", c.Name, defaultClass)
	}
	return c
}

// classMembers reads the prefixes of a class.
func (r *reader) classMembers(n *yaml.Node, name string) (of []netip.Prefix) {
	if name == defaultClass {
		r.fail(n, "class %s has all that are in no other class: it has no key of", defaultClass)
		return nil
	}
	for _, element := range r.elements(n, "of") {
		text := r.word(element, "of")
		if text == "" {
			continue
		}
		p, ok := r.prefix(element, text)
		if !ok {
			continue
		}
		if slices.Contains(of, p) {
			r.fail(element, "%s is listed twice", p)
			continue
		}
		r.file.positions["class "+name+" "+p.String()] = position(element)
		of = append(of, p)
	}
	return of
}

func (r *reader) blocks(n *yaml.Node) (b Blocks) {
	b.AtMost = MaxExtraBlocks
	before := r.count
	for _, e := range r.entries(n, "blocks") {
		switch e.name {
		case "size":
			b.Size = r.blockSize(e)
		case "extra":
			b.Extra = r.blockSize(e)
		case "at_most":
			b.AtMost = r.number(e, 0, MaxExtraBlocks)
		case "deterministic":
			b.Deterministic = Deterministic(r.choice(e.value, e.name, deterministicNames)) % 3 // false is none
		default:
			r.unknown(e, "blocks", "size", "extra", "at_most", "deterministic")
		}
	}
	if b.Size == 0 {
		if r.count == before {
			r.fail(n, "blocks need a size, as in {size: 512}")
		}
		return Blocks{}
	}
	if b.Extra == 0 {
		b.Extra = b.Size
	}
	return b
}

func (r *reader) blockSize(e entry) int {
	size := r.number(e, MinBlock, MaxBlock)
	if size&(size-1) != 0 {
		r.fail(e.value, "%s is a power of two from %d to %d, and not %d", e.name, MinBlock, MaxBlock, size)
		return 0
	}
	return size
}

// --- what must fit together -----------------------------------------------------------

// shares: no prefix is in two classes, none divides a subscriber, and one key says how many
// sessions there may be.
func (r *reader) shares() {
	s := &r.file.Subscribers
	if s.Prefix == 0 {
		return
	}
	if r.file.Limits.SessionsPerSource > 0 {
		r.add(r.file.at("limits.sessions_per_source"), "with subscribers, sessions_per_source is the key sessions of their classes")
	}
	in := map[netip.Prefix]string{}
	for _, c := range s.Classes {
		for _, p := range c.Of {
			at := cmp.Or(r.file.at("class "+c.Name+" "+p.String()), c.Position)
			if other, known := in[p]; known {
				r.add(at, "%s is in class %s and in class %s", p, other, c.Name)
			}
			if in[p] = c.Name; p.Bits() > s.Prefix {
				r.add(at, "%s is a part of a subscriber, which is a /%d", p, s.Prefix)
			}
		}
	}
}

// zones: where an address is not enough to name a host, rules name its interface.
func (r *reader) zones() {
	f := r.file
	if !f.Subscribers.ByInterface {
		return
	}
	for _, name := range f.OneArmed() {
		r.add(f.at("inside."+name), "interface %q is inside and outside: with subscribers by interface, each is on one side", name)
	}
	for i := range f.Rules {
		rule := &f.Rules[i]
		key := ""
		switch rule.Action.(type) {
		case DNAT:
			key = "out"
		case Map:
			key = "in"
		}
		if key != "" && !f.IsInside(f.InsideOf(rule)) {
			r.add(rule.Position, "rule %q must name the inside interface of its hosts by %s: with subscribers by interface, hosts behind others may have the same address", rule.Kind()+" "+rule.Match(), key)
		}
	}
	for i := range f.Pools {
		if p := &f.Pools[i]; p.Blocks.Deterministic != DeterministicNone {
			r.add(p.Position, "pool %s: deterministic blocks follow from the addresses of subscribers, and with subscribers by interface several may have the same: take blocks that the log records", p.Name)
		}
	}
}

// mapFrom is the interface by which internal hosts must send to the external addresses of a map, ""
// any: where subscribers are told apart by their interface, a map's is that of its own hosts.
func (f *File) mapFrom(r *Rule) string {
	if f.Subscribers.ByInterface {
		return ""
	}
	return r.In
}

// InsideOf is the inside interface of the hosts that a rule dnat or map sends packets to, as far as
// the file says it; "" for other rules.
func (f *File) InsideOf(r *Rule) (name string) {
	switch r.Action.(type) {
	case DNAT:
		name = r.Out
	case Map:
		name = r.In
	default:
		return ""
	}
	if name == "" && len(f.Inside) == 1 {
		name = f.Inside[0]
	}
	return name
}

// poolBlocks: a pool with blocks has ports, and room for a block.
func (r *reader) poolBlocks() {
	for i := range r.file.Pools {
		p := &r.file.Pools[i]
		if p.Blocks.IsZero() {
			continue
		}
		if p.OneToOne {
			r.add(p.Position, "pool %s gives whole addresses: it has no blocks of ports", p.Name)
		} else if p.blocksOf(p.Blocks.Size) == 0 {
			r.add(p.Position, "pool %s has no block of %d ports in %s: a block begins at a multiple of its size", p.Name, p.Blocks.Size, p.PortsOf())
		} else {
			r.computed(p)
		}
	}
}

// computed: there is room for the blocks that follow from the file.
func (r *reader) computed(p *Pool) {
	if b := p.Blocks; b.Deterministic == DeterministicAll && b.Extra != b.Size {
		r.add(p.Position, "pool %s: with deterministic: all the blocks of a subscriber are of one size: extra is %d, and size %d", p.Name, b.Extra, b.Size)
	} else if l := r.file.Layout(p); l != nil && l.problem() != "" {
		r.add(p.Position, "%s", l.problem())
	}
}

// drained: what a pool drains is of the pool.
func (r *reader) drained() {
	for i := range r.file.Pools {
		p := &r.file.Pools[i]
		for _, drain := range p.Drain {
			if !slices.ContainsFunc(p.Addresses, func(a AddressRange) bool { return a.Contains(drain.First) && a.Contains(drain.Last) }) {
				r.add(cmp.Or(r.file.at("drain "+p.Name+" "+drain.String()), p.Position), "pool %s drains %s, which is not among its addresses", p.Name, drain)
			}
		}
	}
}

// PortsOf are the ports that the pool gives.
func (p *Pool) PortsOf() PortRange {
	if p.Ports.IsZero() {
		return DefaultPorts
	}
	return p.Ports
}

// blocksOf is how many blocks of a size an address of the pool has.
func (p *Pool) blocksOf(size int) int {
	ports := p.PortsOf()
	return max((int(ports.Last)+1)/size-(int(ports.First)+size-1)/size, 0)
}

// --- writing --------------------------------------------------------------------------

func (s *Subscribers) write(b *strings.Builder) {
	if s.Prefix == 0 {
		return
	}
	by := "address"
	if s.Prefix < 32 {
		by = "/" + strconv.Itoa(s.Prefix)
	}
	if s.ByInterface {
		by = "[interface, " + by + "]"
	}
	fmt.Fprintf(b, "subscribers:\n  by: %s\n", by)
	if s.Default == (Share{}) && len(s.Classes) == 0 {
		return
	}
	b.WriteString("  classes:\n")
	if s.Default != (Share{}) {
		fmt.Fprintf(b, "    %s: {%s}\n", defaultClass, strings.Join(s.Default.fields(), ", "))
	}
	for _, c := range s.Classes {
		of := make([]string, len(c.Of))
		for i, p := range c.Of {
			of[i] = p.String()
		}
		fmt.Fprintf(b, "    %s: {%s}\n", c.Name, strings.Join(append([]string{"of: [" + strings.Join(of, ", ") + "]"}, c.fields()...), ", "))
	}
}

func (s *Share) fields() (fields []string) {
	for _, one := range []struct {
		key          string
		value, usual int
	}{{"ports", s.Ports, 0}, {"sessions", s.Sessions, 0}, {"new_per_second", s.NewPerSecond, 0}, {"burst", s.Burst, s.NewPerSecond}} {
		if one.value != one.usual {
			fields = append(fields, one.key+": "+strconv.Itoa(one.value))
		}
	}
	return fields
}

func (b Blocks) String() string {
	text := fmt.Sprintf("{size: %d, extra: %d, at_most: %d", b.Size, b.Extra, b.AtMost)
	if b.Deterministic != DeterministicNone {
		text += ", deterministic: " + b.Deterministic.String()
	}
	return text + "}"
}
