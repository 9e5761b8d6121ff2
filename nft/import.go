// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"natkit/nat"
)

// Import reads the NAT rules of another program into a rule file.
//
// A list of rules, of which the first that matches a packet decides, becomes rules of
// which the most special does. So the chains are walked as a packet would, with the
// conditions that have gathered on the way; a rule that an earlier one leaves nothing
// for is left out, and where the most special rule is not the first it is said. What
// has no place in a rule file is not approximated in silence either.

// ImportOptions are what the rules alone do not tell.
type ImportOptions struct {
	Name            string       // of the input, in messages
	Inside, Outside []string     // interfaces; those that the rules tell of need not be named
	Local           []netip.Addr // outside addresses of the gateway: what "type local" stands for
}

// Imported is a rule file and what of the input it does not say.
type Imported struct {
	File  *nat.File
	Notes []Note
}

// Note is about one rule of the input.
type Note struct {
	Line int    `json:"line"`
	Rule string `json:"rule"` // as it was written
	Why  string `json:"why"`
	Lost bool   `json:"lost"` // the rule file does not do what the rule did; otherwise it does it otherwise
}

// SyntaxError is an input that is not what it should be.
type SyntaxError struct {
	Name string
	Line int
	Err  error
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("%s:%d: %v", e.Name, e.Line, e.Err) }
func (e *SyntaxError) Unwrap() error { return e.Err }

// maxImport bounds the input: some million rules.
const maxImport = 256 << 20

// Import reads what iptables-save or nft -j list ruleset prints.
func Import(in io.Reader, o ImportOptions) (*Imported, error) {
	data, err := io.ReadAll(bufio.NewReader(io.LimitReader(in, maxImport+1)))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.Name, err)
	}
	if len(data) > maxImport {
		return nil, fmt.Errorf("read %s: more than %d MiB", o.Name, maxImport>>20)
	}
	var chains ruleLists
	switch text := bytes.TrimSpace(data); {
	case len(text) == 0:
		return nil, fmt.Errorf("read %s: it is empty", o.Name)
	case text[0] == '{':
		chains, err = parseNFTJSON(data, o.Name)
	case bytes.HasPrefix(text, []byte("table ")) || bytes.HasPrefix(text, []byte("flush ruleset")):
		return nil, fmt.Errorf("read %s: this is the text form of nftables: give the output of nft -j list ruleset", o.Name)
	default:
		chains, err = parseIPTablesSave(data, o.Name)
	}
	if err != nil {
		return nil, err
	}
	return chains.toFile(o)
}

// ruleLists are the chains of an input, by name ("table/chain").
type ruleLists struct {
	chains map[string][]listed
	bases  [3][]string // chains on the hooks prerouting, output, postrouting, in their order
}

const (
	hookPrerouting = iota
	hookOutput
	hookPostrouting
)

// listed is one rule of a list.
type listed struct {
	line   int
	text   string
	match  condition
	action action
	chain  string           // of a jump
	to     []nat.Target     // of dnat, one for each address
	pool   nat.AddressRange // of snat
	net    netip.Prefix     // of netmap
	ports  nat.PortRange    // of snat and masquerade
	share  bool             // one of several that take turns: statistic, numgen
	notes  []string         // what is lost of it, though the rule can be taken over
	lost   string           // why the rule can't be taken over
}

// where says which rule it is: by its line, or where many are on one line by its handle.
func (r listed) where() string {
	if strings.HasPrefix(r.text, "-A") || strings.HasPrefix(r.text, "[") {
		return fmt.Sprintf("line %d", r.line)
	}
	return r.text
}

type action int

const (
	actNothing action = iota // goes on with the next rule
	actAccept
	actReturn
	actJump
	actGoto
	actSNAT
	actDNAT
	actMasquerade
	actNetmap
	actLost // ends a packet's way through the list, in a way that can't be taken over
)

// condition is what packets a rule is for. Lists are alternatives, nil is any.
type condition struct {
	in, out        string
	notIn, notOut  []string
	src, dst       []netip.Prefix
	notSrc, notDst []netip.Prefix
	protocols      []nat.Protocol
	ports          []nat.PortRange
	local          bool     // to an address of the gateway
	odd            []string // conditions that a rule file does not have
}

// and is both conditions at once; not ok if nothing meets both.
func (c condition) and(d condition) (condition, bool) {
	ok := true
	c.in, ok = both(c.in, d.in, ok)
	c.out, ok = both(c.out, d.out, ok)
	c.notIn, c.notOut = slices.Concat(c.notIn, d.notIn), slices.Concat(c.notOut, d.notOut)
	c.notSrc, c.notDst = slices.Concat(c.notSrc, d.notSrc), slices.Concat(c.notDst, d.notDst)
	c.odd = slices.Concat(c.odd, d.odd)
	c.local = c.local || d.local
	c.src, ok = common(c.src, d.src, ok, commonPrefix)
	c.dst, ok = common(c.dst, d.dst, ok, commonPrefix)
	c.protocols, ok = common(c.protocols, d.protocols, ok, func(a, b nat.Protocol) (nat.Protocol, bool) { return a, a == b })
	c.ports, ok = common(c.ports, d.ports, ok, func(a, b nat.PortRange) (nat.PortRange, bool) {
		return nat.PortRange{First: max(a.First, b.First), Last: min(a.Last, b.Last)}, a.Overlaps(b)
	})
	if c.in != "" && slices.Contains(c.notIn, c.in) || c.out != "" && slices.Contains(c.notOut, c.out) {
		ok = false
	}
	return c, ok
}

func both(a, b string, ok bool) (string, bool) {
	if a == "" || b == "" || a == b {
		return cmp.Or(a, b), ok
	}
	return a, false
}

// maxAlternatives bounds what a rule with several alternatives becomes.
const maxAlternatives = 4096

func common[T any](a, b []T, ok bool, meet func(T, T) (T, bool)) ([]T, bool) {
	if a == nil {
		return b, ok
	}
	if b == nil {
		return a, ok
	}
	var out []T
	for _, x := range a {
		for _, y := range b {
			if z, met := meet(x, y); met && len(out) < maxAlternatives {
				out = append(out, z)
			}
		}
	}
	return out, ok && len(out) > 0
}

func commonPrefix(a, b netip.Prefix) (netip.Prefix, bool) {
	if a.Bits() < b.Bits() {
		a, b = b, a
	}
	return a, b.Overlaps(a)
}

// importer walks the chains and collects.
type importer struct {
	lists   ruleLists
	options ImportOptions
	file    *nat.File
	origins []listed // of the rules of file
	notes   []Note
	noted   map[Note]bool
	seen    map[string]int  // rule's key -> index
	halves  map[string]half // of a map, by the rule's key: which directions the input has
	walking []string
	steps   int
}

// maxSteps bounds the walk, which a hostile input could make exponential.
const maxSteps = 1_000_000

var errTooLong = errors.New("the chains lead into each other too often to follow every way")

func newImporter(l ruleLists, o ImportOptions) *importer {
	return &importer{lists: l, options: o, file: nat.New(), noted: map[Note]bool{}, seen: map[string]int{}, halves: map[string]half{}}
}

func (l ruleLists) toFile(o ImportOptions) (*Imported, error) {
	i := newImporter(l, o)
	for _, hook := range []int{hookPrerouting, hookPostrouting} {
		if err := i.hook(hook); err != nil {
			return nil, fmt.Errorf("import %s: %w", o.Name, err)
		}
	}
	// The gateway's own connections meet the destination rules on both engines' ways
	// only as far as those of forwarded packets go; anything more is lost.
	own := newImporter(l, o)
	if err := own.hook(hookOutput); err != nil {
		return nil, fmt.Errorf("import %s: %w", o.Name, err)
	}
	for k, r := range own.file.Rules {
		if _, ok := i.seen[r.Key()]; !ok {
			i.lost(own.origins[k], "is for the gateway's own connections only")
		}
	}
	i.sides()
	i.reach()
	i.order()
	i.settle()
	i.ways()
	if len(i.file.Rules) == 0 {
		i.note(Note{Why: "no rule of the input could be taken over", Lost: true})
	}
	i.file.Name = o.Name
	slices.SortStableFunc(i.notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	return &Imported{i.file, i.notes}, nil
}

func (i *importer) hook(hook int) error {
	for _, base := range i.lists.bases[hook] {
		if _, err := i.walk(base, hook, condition{}, nil); err != nil {
			return err
		}
	}
	return nil
}

func (i *importer) note(n Note) {
	if !i.noted[n] {
		i.noted[n] = true
		i.notes = append(i.notes, n)
	}
}

func (i *importer) lost(r listed, format string, args ...any) {
	i.note(Note{r.line, r.text, fmt.Sprintf(format, args...), true})
}

func (i *importer) otherwise(r listed, format string, args ...any) {
	i.note(Note{r.line, r.text, fmt.Sprintf(format, args...), false})
}

// walk takes over what a chain does with packets that meet c. With targets it takes
// over nothing, but adds to them where the chain would send packets. It tells whether
// the chain leaves no such packet to its caller.
func (i *importer) walk(name string, hook int, c condition, targets *[]nat.Target) (done bool, err error) {
	if slices.Contains(i.walking, name) {
		return false, nil // the kernel refuses loops
	}
	i.walking = append(i.walking, name)
	defer func() { i.walking = i.walking[:len(i.walking)-1] }()
	base := len(i.walking) == 1

	rules := i.lists.chains[name]
	for k := 0; k < len(rules); k++ {
		if i.steps++; i.steps > maxSteps {
			return false, errTooLong
		}
		r := rules[k]
		if r.share && targets == nil {
			var group []listed
			for ; k < len(rules) && rules[k].share; k++ {
				group = append(group, rules[k])
			}
			if k < len(rules) { // the last takes what the others leave
				group = append(group, rules[k])
			}
			if err := i.balance(group, hook, c); err != nil {
				return false, err
			}
			continue
		}
		m, ok := c.and(r.match)
		if !ok {
			continue
		}
		if targets == nil && repeated(r, rules[k+1:]) {
			continue
		}
		if r.lost != "" {
			i.lost(r, "%s", r.lost)
		}
		all := r.match.isAny()
		switch r.action {
		case actNothing:
		case actJump, actGoto:
			ended, err := i.walk(r.chain, hook, m, targets)
			if err != nil {
				return false, err
			}
			if all && (ended || r.action == actGoto) {
				return ended, nil
			}
		case actAccept, actReturn, actLost:
			if all {
				return r.action != actReturn || base, nil
			}
			if r.action == actLost {
				continue // said above
			}
			if m.dst != nil && !slices.ContainsFunc(m.dst, isForwarded) {
				continue // no rule is about these
			}
			c = i.except(r, m, c, base)
		default:
			if targets != nil {
				*targets = append(*targets, r.to...)
			} else {
				i.translate(r, m, hook)
			}
			if all {
				return true, nil
			}
		}
	}
	return false, nil
}

func (c condition) isAny() bool {
	return c.in == "" && c.out == "" && len(c.notIn)+len(c.notOut)+len(c.src)+len(c.dst)+len(c.notSrc)+len(c.notDst)+
		len(c.protocols)+len(c.ports)+len(c.odd) == 0 && !c.local
}

// except leaves packets out: of all rules that follow (final), or of those that
// follow in this chain. It gives the condition for what follows in this chain.
func (i *importer) except(r listed, m, c condition, base bool) condition {
	final := base || r.action == actAccept
	own := r.match
	links := own.in != "" || own.out != ""
	addresses := own.src != nil || own.dst != nil || own.protocols != nil || own.ports != nil
	here := base || r.action == actReturn // leaving out what follows in this chain is all there is
	plain := len(m.odd) == 0 && own.notIn == nil && own.notOut == nil && own.notSrc == nil && own.notDst == nil && !own.local
	switch {
	case !plain:
	case links && !addresses && here && own.out == "":
		c.notIn = append(slices.Clone(c.notIn), own.in)
		return c
	case links && !addresses && here && own.in == "":
		c.notOut = append(slices.Clone(c.notOut), own.out)
		return c
	case addresses && !links && final && m.in == "" && m.out == "" && !m.local && m.notSrc == nil && m.notDst == nil && m.notIn == nil && m.notOut == nil:
		i.otherwise(r, "became an exclude, which holds for every rule")
		for _, src := range orAny(m.src, nat.Everywhere) {
			for _, dst := range orAny(m.dst, nat.Everywhere) {
				for _, p := range orAny(m.protocols, nat.AnyProtocol) {
					for _, ports := range orAny(m.ports, nat.PortRange{}) {
						for _, some := range pieces(ports, maxExcluded) {
							i.add(r, nat.Rule{Action: nat.Exclude{Protocol: p, Source: src, Destination: dst, Ports: some}})
						}
					}
				}
			}
		}
		return c
	case !links && here && own.dst != nil && own.src == nil && own.protocols == nil && own.ports == nil:
		c.notDst = slices.Concat(c.notDst, own.dst)
		return c
	case !links && here && own.src != nil && own.dst == nil && own.protocols == nil && own.ports == nil:
		c.notSrc = slices.Concat(c.notSrc, own.src)
		return c
	}
	i.lost(r, "leaves packets out of the rules that follow by more than an exclude can name")
	c.odd = append(slices.Clone(c.odd), "what "+r.where()+" leaves out")
	return c
}

// maxExcluded is how many ports engine ebpf takes in one exclude.
const maxExcluded = 1024

// pieces cuts a range into such of at most n ports.
func pieces(r nat.PortRange, n int) []nat.PortRange {
	out := []nat.PortRange{}
	for r.Count() > n {
		out = append(out, nat.PortRange{First: r.First, Last: r.First + uint16(n-1)})
		r.First += uint16(n)
	}
	return append(out, r)
}

// repeated tells whether the rules that follow at once do the same for every protocol: so
// libvirt writes a masquerade, for TCP and UDP with the ports that are usual anyway.
func repeated(r listed, next []listed) bool {
	if len(next) == 0 || r.action != actMasquerade || r.match.protocols == nil || r.match.ports != nil || r.lost != "" || r.share ||
		r.ports != (nat.PortRange{}) && r.ports != nat.DefaultPorts {
		return false
	}
	n := next[0]
	if n.action != r.action || n.lost != "" || n.share || len(r.notes) > 0 {
		return false
	}
	a, b := r.match, n.match
	a.protocols, b.protocols = nil, nil
	if !reflect.DeepEqual(a, b) {
		return false
	}
	if n.match.protocols == nil {
		return n.ports == nat.PortRange{}
	}
	return repeated(n, next[1:])
}

// notForwarded is what is never for another host: no NAT of forwarded packets is about it.
var notForwarded = []netip.Prefix{netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("127.0.0.0/8")}

func isForwarded(to netip.Prefix) bool {
	return !slices.ContainsFunc(notForwarded, func(p netip.Prefix) bool { return p.Bits() <= to.Bits() && p.Contains(to.Addr()) })
}

func orAny[T any](list []T, any T) []T {
	if list == nil {
		return []T{any}
	}
	return list
}

// balance makes one rule of several that take turns.
func (i *importer) balance(group []listed, hook int, c condition) error {
	var targets []nat.Target
	for _, r := range group {
		if r.lost != "" {
			i.lost(r, "%s", r.lost)
		}
		switch r.action {
		case actJump, actGoto:
			if _, err := i.walk(r.chain, hook, c, &targets); err != nil {
				return err
			}
		case actDNAT:
			targets = append(targets, r.to...)
		default:
			i.lost(r, "takes turns with other rules, but does not send to a target")
			return nil
		}
	}
	first := group[0]
	first.action, first.to = actDNAT, targets
	m, ok := c.and(first.match)
	if !ok || len(targets) == 0 {
		return nil
	}
	i.otherwise(first, "a client keeps its target: it is chosen by the client's address, not for each connection")
	i.translate(first, m, hook)
	return nil
}

// translate takes over one translation of packets that meet m.
func (i *importer) translate(r listed, m condition, hook int) {
	for _, n := range r.notes {
		i.otherwise(r, "%s", n)
	}
	switch {
	case len(m.odd) > 0:
		i.lost(r, "depends on %s", strings.Join(m.odd, ", "))
	case m.in == "lo" || m.out == "lo":
		i.lost(r, "is about the gateway itself")
	case r.action == actDNAT || r.action == actNetmap && hook != hookPostrouting:
		i.destination(r, m)
	default:
		i.source(r, m)
	}
}

// destination takes over dnat, or netmap of destinations.
func (i *importer) destination(r listed, m condition) {
	if m.src != nil || m.notSrc != nil {
		i.lost(r, "a destination rule can't depend on the source")
		return
	}
	if m.dst != nil && !slices.ContainsFunc(m.dst, isForwarded) {
		i.lost(r, "is about the gateway itself")
		return
	}
	r.match = m // all that has gathered, for reach
	if r.action == actNetmap {
		if len(m.dst) != 1 || m.protocols != nil || m.ports != nil || m.dst[0].Bits() != r.net.Bits() {
			i.lost(r, "a map is for a whole prefix, and for one of the same length")
			return
		}
		i.addMap(r, r.net, m.dst[0], m.in, halfDestination)
		return
	}
	addresses := m.dst
	if addresses == nil || m.local {
		addresses = nil
		for _, d := range m.dst {
			if d.IsSingleIP() {
				addresses = append(addresses, d)
			}
		}
		for _, a := range i.options.Local {
			p := netip.PrefixFrom(a, 32)
			named := slices.Contains(addresses, p)
			if m.dst == nil || !named && slices.ContainsFunc(m.dst, func(d netip.Prefix) bool { return d.Contains(a) }) {
				addresses = append(addresses, p)
			}
		}
		if len(addresses) == 0 {
			i.lost(r, "is for addresses of the gateway, which the rules do not tell: name them with --local")
			return
		}
	}
	for _, dst := range addresses {
		if slices.ContainsFunc(m.notDst, func(n netip.Prefix) bool { return n.Overlaps(dst) }) {
			continue
		}
		if !dst.IsSingleIP() {
			i.lost(r, "sends the whole of %s to one place: a rule file names single addresses", dst)
			continue
		}
		for _, p := range orAny(m.protocols, nat.AnyProtocol) {
			for _, ports := range orAny(m.ports, nat.PortRange{}) {
				i.forward(r, m, nat.DNAT{Protocol: p, Address: dst.Addr(), Ports: ports})
			}
		}
	}
}

// forward adds a rule for one address; what it sends to must fit the ports it is for.
func (i *importer) forward(r listed, m condition, a nat.DNAT) {
	if !a.Ports.IsZero() && !a.Protocol.HasPorts() {
		i.lost(r, "natkit does not translate ports of protocol %s", a.Protocol)
		return
	}
	for _, t := range r.to {
		switch {
		case t.Ports.IsZero() || t.Ports == a.Ports:
			t.Ports = nat.PortRange{}
		case t.Ports.Count() == 1 && a.Ports.Count() == 1:
		default:
			i.lost(r, "sends ports %q to %q: of a range of ports the first becomes the first, so both must be as long", a.Ports, t.Ports)
			return
		}
		a.Targets = append(a.Targets, t)
	}
	if len(a.Targets) > 0 {
		i.add(r, nat.Rule{Action: a, In: m.in})
	}
}

// source takes over snat, masquerade and netmap of sources.
func (i *importer) source(r listed, m condition) {
	switch {
	case m.dst != nil && slices.Equal(m.src, m.dst):
		i.otherwise(r, "hairpin is part of every rule that publishes a port")
		return
	case m.dst != nil || m.protocols != nil || m.ports != nil || m.local:
		i.lost(r, "a source rule can't depend on the destination or the protocol")
		return
	case m.notSrc != nil:
		i.lost(r, "a source rule can't leave sources out: write an exclude for them")
		return
	}
	r.match = m
	for _, src := range orAny(m.src, nat.Everywhere) {
		for _, not := range m.notDst {
			if isForwarded(not) {
				i.otherwise(r, "what it leaves out became an exclude, which holds for every rule")
				i.add(r, nat.Rule{Action: nat.Exclude{Source: src, Destination: not}})
			}
		}
		bound := nat.Rule{In: m.in, Out: m.out}
		switch r.action {
		case actMasquerade:
			bound.Action = nat.Masquerade{Source: src, Ports: r.ports}
		case actNetmap:
			if src.Bits() != r.net.Bits() {
				i.lost(r, "a map is between prefixes of the same length")
				continue
			}
			i.addMap(r, src, r.net, m.out, halfSource)
			continue
		default:
			if r.pool.First == r.pool.Last {
				bound.Action = nat.SNAT{Source: src, Address: r.pool.First, Ports: r.ports}
			} else {
				bound.Action = nat.SNAT{Source: src, Pool: i.pool(r)}
			}
		}
		i.add(r, bound)
	}
	for _, out := range m.notOut {
		if slices.Contains(i.options.Outside, out) {
			i.lost(r, "does not hold for packets out of %q, which is an outside interface", out)
		} else if !slices.Contains(i.file.Inside, out) {
			i.file.Inside = append(i.file.Inside, out)
		}
	}
}

// pool is the name of the pool with the rule's addresses and ports.
func (i *importer) pool(r listed) string {
	for _, p := range i.file.Pools {
		if p.Addresses[0] == r.pool && p.Ports == r.ports {
			return p.Name
		}
	}
	name := fmt.Sprintf("pool%d", len(i.file.Pools)+1)
	i.file.Pools = append(i.file.Pools, nat.Pool{Name: name, Addresses: []nat.AddressRange{r.pool}, Ports: r.ports})
	return name
}

// half is one direction of a map.
type half int

const (
	halfSource half = 1 << iota
	halfDestination
)

// addMap adds one rule for both directions, of which the input usually has two.
func (i *importer) addMap(r listed, inside, outside netip.Prefix, link string, h half) {
	rule := nat.Rule{Action: nat.Map{Inside: inside.Masked(), Outside: outside.Masked()}, Out: link}
	i.halves[rule.Key()] |= h
	i.add(r, rule)
}

// add appends a rule, if the file does not have it.
func (i *importer) add(r listed, rule nat.Rule) {
	k := rule.Key()
	if at, ok := i.seen[k]; ok {
		if have := i.file.Rules[at].String(); have != rule.String() {
			i.lost(r, "%s is for the same packets and comes first: this one is never reached", i.origins[at].where())
		}
		return
	}
	i.seen[k] = len(i.file.Rules)
	i.file.Rules = append(i.file.Rules, rule)
	i.origins = append(i.origins, r)
	i.file.Outside = link(i.file.Outside, rule)
}

// link adds an interface that a rule shows to be outside.
func link(outside []string, r nat.Rule) []string {
	name := r.Out
	if _, ok := r.Action.(nat.DNAT); ok {
		name = r.In
	}
	if name == "" || slices.Contains(outside, name) {
		return outside
	}
	return append(outside, name)
}

// sides settles which interface is on which side: as named, else as the rules tell.
func (i *importer) sides() {
	f, o := i.file, i.options
	if o.Outside != nil {
		for _, name := range f.Outside {
			if !slices.Contains(o.Outside, name) && !slices.Contains(o.Inside, name) {
				i.note(Note{Why: fmt.Sprintf("rules are bound to %q, which is not named as an interface", name), Lost: true})
			}
		}
		f.Outside = slices.Clone(o.Outside)
	}
	f.Outside = slices.DeleteFunc(f.Outside, func(n string) bool { return slices.Contains(o.Inside, n) })
	for _, r := range f.Rules {
		if _, ok := r.Action.(nat.DNAT); !ok && r.In != "" {
			f.Inside = append(f.Inside, r.In)
		}
	}
	if o.Inside != nil {
		f.Inside = slices.Clone(o.Inside)
	}
	f.Inside = slices.DeleteFunc(f.Inside, func(n string) bool { return slices.Contains(f.Outside, n) })
	slices.Sort(f.Inside)
	f.Inside = slices.Compact(f.Inside)
}

// reach settles and says what depends on which interfaces are inside: whom a destination
// rule is for, and where to a source rule holds.
func (i *importer) reach() {
	var rules []nat.Rule
	var origins []listed
	for k, rule := range i.file.Rules {
		r := i.origins[k]
		m := r.match
		froms := []string{rule.In}
		switch rule.Action.(type) {
		case nat.DNAT:
			fromInside := m.in == "" || slices.Contains(i.file.Inside, m.in)
			several := m.dst == nil || slices.ContainsFunc(m.dst, func(p netip.Prefix) bool { return !p.IsSingleIP() })
			switch {
			case fromInside && several && !m.local:
				i.lost(r, "is for every destination: of those only the gateway's own outside addresses are named")
			case fromInside && several:
				i.otherwise(r, "holds for outside addresses of the gateway, not for its inside ones")
			case several && !m.local:
				i.otherwise(r, "holds for outside addresses of the gateway, not for others that are routed to it")
			}
			if slices.ContainsFunc(m.notIn, func(n string) bool { return slices.Contains(i.file.Outside, n) }) {
				// Without a binding it would let everybody in.
				froms = slices.DeleteFunc(slices.Clone(i.file.Inside), func(n string) bool { return slices.Contains(m.notIn, n) })
				if len(froms) == 0 {
					i.lost(r, "does not hold for packets from outside, and no inside interface is named that it holds for")
				}
			} else if m.notIn != nil {
				links := slices.Sorted(slices.Values(m.notIn))
				i.otherwise(r, "holds for packets from every interface, also %s: hairpin", strings.Join(slices.Compact(links), ", "))
			}
		case nat.Map:
			switch i.halves[rule.Key()] {
			case halfSource:
				i.otherwise(r, "became a map, which holds both ways: it also lets in what is sent to its outside addresses")
			case halfDestination:
				i.otherwise(r, "became a map, which holds both ways: it also translates what its inside hosts send")
			}
		case nat.Masquerade, nat.SNAT:
			kept := slices.DeleteFunc(slices.Clone(i.file.Inside), func(n string) bool { return slices.Contains(m.notOut, n) })
			if m.out == "" && len(kept) > 0 && (m.src == nil || len(i.file.Inside) > 1) {
				i.otherwise(r, "holds for what leaves by outside interfaces: what goes to %s keeps its source", strings.Join(kept, ", "))
			}
		}
		for _, from := range froms {
			rule.In = from
			rules, origins = append(rules, rule), append(origins, r)
		}
	}
	i.file.Rules, i.origins = rules, origins
}

// ways says once what natkit does with addresses that are published and Linux does not.
func (i *importer) ways() {
	hides := slices.ContainsFunc(i.file.Rules, isSourceRule)
	others, hairpin := false, false
	for _, rule := range i.file.Rules {
		a, ok := rule.Action.(nat.DNAT)
		if !ok {
			continue
		}
		others = others || !a.Ports.IsZero() && len(i.options.Local) > 0 && !slices.Contains(i.options.Local, a.Address)
		hairpin = hairpin || rule.In == "" && hides
	}
	if others {
		i.note(Note{Why: "what is sent to other ports of an address that is published, and not the gateway's own, is dropped"})
	}
	if hairpin {
		i.note(Note{Why: "an inside host that asks for what is published is seen there by an outside address (hairpin)"})
	}
}

func isSourceRule(r nat.Rule) bool { return isSource(&r) }

// order compares which rule is first in the list with which is the most special.
func (i *importer) order() {
	dead := map[int]bool{}
	firsts := map[netip.Prefix][]int{} // source rules by prefix
	var all []int
	targets := map[netip.Addr][]int{}
	say := func(later, earlier int, why string) {
		i.lost(i.origins[later], why, i.origins[earlier].where())
	}
	for k := range i.file.Rules {
		r := &i.file.Rules[k]
		if a, ok := r.Action.(nat.DNAT); ok {
			for _, e := range targets[a.Address] {
				i.compareTargets(e, k, dead, say)
			}
			targets[a.Address] = append(targets[a.Address], k)
			continue
		}
		if !isSource(r) {
			continue
		}
		from := sourceOf(r)
		for bits := 0; bits <= from.Bits(); bits++ {
			wider, _ := from.Addr().Prefix(bits)
			for _, e := range firsts[wider] {
				if earlier := &i.file.Rules[e]; holds(earlier.In, r.In) && holds(earlier.Out, r.Out) {
					dead[k] = true
					say(k, e, "%s comes first and is for all of its packets: this one is never reached, and left out")
				} else if meets(earlier.In, r.In) && meets(earlier.Out, r.Out) && bound(r) >= bound(earlier) {
					say(k, e, "%s comes first, but here the rule that is bound to an interface, or has the longer prefix, decides")
				}
			}
		}
		if bound(r) > 0 {
			for _, e := range all {
				if earlier := &i.file.Rules[e]; sourceOf(earlier).Bits() > from.Bits() && from.Overlaps(sourceOf(earlier)) &&
					meets(earlier.In, r.In) && meets(earlier.Out, r.Out) && bound(earlier) < bound(r) {
					say(k, e, "%s comes first, but here the rule that is bound to an interface decides")
				}
			}
		}
		firsts[from] = append(firsts[from], k)
		all = append(all, k)
	}
	i.orderOfExcludes()
	var kept []nat.Rule
	var origins []listed
	for k, r := range i.file.Rules {
		if !dead[k] {
			kept, origins = append(kept, r), append(origins, i.origins[k])
		}
	}
	i.file.Rules, i.origins = kept, origins
}

func (i *importer) compareTargets(earlier, later int, dead map[int]bool, say func(later, earlier int, why string)) {
	e, l := &i.file.Rules[earlier], &i.file.Rules[later]
	a, b := e.Action.(nat.DNAT), l.Action.(nat.DNAT)
	sameProtocol := a.Protocol == nat.AnyProtocol || b.Protocol == nat.AnyProtocol || a.Protocol == b.Protocol
	samePorts := a.Ports.IsZero() || b.Ports.IsZero() || a.Ports.Overlaps(b.Ports)
	if !sameProtocol || !samePorts || !meets(e.In, l.In) {
		return
	}
	holdsProtocol := a.Protocol == nat.AnyProtocol || a.Protocol == b.Protocol
	holdsPorts := a.Ports.IsZero() || !b.Ports.IsZero() && a.Ports.First <= b.Ports.First && b.Ports.Last <= a.Ports.Last
	switch {
	case holdsProtocol && holdsPorts && holds(e.In, l.In):
		dead[later] = true
		say(later, earlier, "%s comes first and is for all of its packets: this one is never reached, and left out")
	case b.Ports.Count() > 0 && (a.Ports.IsZero() || b.Ports.Count() < a.Ports.Count()) || l.In != "" && e.In == "":
		say(later, earlier, "%s comes first, but here the rule for fewer ports, or bound to an interface, decides")
	}
}

// orderOfExcludes: an exclude beats every rule, also one that came before it.
func (i *importer) orderOfExcludes() {
	for k := range i.file.Rules {
		x, ok := i.file.Rules[k].Action.(nat.Exclude)
		if !ok {
			continue
		}
		for e := range k {
			r := &i.file.Rules[e]
			before := true
			switch a := r.Action.(type) {
			case nat.DNAT:
				before = x.Destination.Contains(a.Address) && (x.Ports.IsZero() || a.Ports.IsZero() || x.Ports.Overlaps(a.Ports))
			case nat.Exclude:
				before = false
			default:
				before = x.Source.Overlaps(sourceOf(r))
			}
			if before {
				i.lost(i.origins[k], "%s comes first, but here an exclude beats every rule", i.origins[e].where())
				break
			}
		}
	}
}

// holds tells whether a binding to an interface is for all packets of another, meets
// whether for some.
func holds(a, b string) bool { return a == "" || a == b }
func meets(a, b string) bool { return a == "" || b == "" || a == b }

// bound ranks a rule by its interfaces, as nat.Explain does.
func bound(r *nat.Rule) int {
	n := 0
	if r.Out != "" {
		n += 2
	}
	if r.In != "" {
		n++
	}
	return n
}
