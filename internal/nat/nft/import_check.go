// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/rulefile"
)

// The proof of an import: the items and the rules that were made of them are both lists of
// sets of packets of which the first decides. They are laid over each other, and where
// they do not do the same, the input's rule is named.

// fileItem is a rule of the file as a set of packets.
type fileItem struct {
	box  ruleset.Box
	rule *rulefile.Rule // nil: an exclude
	at   int            // of file.Rules
}

// maxChecked bounds how finely one item is cut.
const maxChecked = 20_000

// check compares.
func (i *importer) check() {
	if len(i.file.Inside) == 0 || len(i.file.Outside) == 0 {
		return // nobody can use the file yet
	}
	i.checkMaps()
	excludes, destinations, sources := i.fileItems()
	i.checkDestinations(slices.Concat(excludes, destinations))
	i.checkSources(slices.Concat(excludes, destinations), sources)
	i.checkBehind(sources)
}

// checkMaps: a map is two-way.
func (i *importer) checkMaps() {
	for k, rule := range i.file.Rules {
		if _, ok := rule.Action.(rulefile.Map); !ok {
			continue
		}
		switch i.halves[rule.Key()] {
		case halfSource:
			i.otherwise(i.origins[k].rule, "became a map, which holds both ways: it also lets in what is sent to its external addresses")
		case halfDestination:
			i.otherwise(i.origins[k].rule, "became a map, which holds both ways: it also translates what its internal hosts send")
		}
	}
}

// fileItems are the rules in the order in which rulefile.Explain would take them.
func (i *importer) fileItems() (excludes, destinations, sources []fileItem) {
	f := i.file
	all, inside, outside := i.links(i.named()), i.links(f.Inside), i.links(f.Outside)
	ranks := map[int][]int{}
	bound := func(link string, any ruleset.Ranges) ruleset.Ranges {
		if link == "" {
			return any
		}
		return any.And(i.links([]string{link}))
	}
	add := func(list *[]fileItem, k int, b ruleset.Box, in, out ruleset.Ranges) {
		b.Dim[ruleset.In], b.Dim[ruleset.Out] = in, out
		*list = append(*list, fileItem{b, &f.Rules[k], k})
	}
	for k := range f.Rules {
		r := &f.Rules[k]
		var b ruleset.Box
		switch a := r.Action.(type) {
		case rulefile.Exclude:
			b.Dim[ruleset.Source], b.Dim[ruleset.Destination] = rangesOf(a.Source), rangesOf(a.Destination)
			setPorts(&b, a.Protocol, a.Ports)
			excludes = append(excludes, fileItem{b, nil, k})
		case rulefile.DNAT:
			b.Dim[ruleset.Destination] = rangesOf(netip.PrefixFrom(a.Address, 32))
			setPorts(&b, a.Protocol, a.Ports)
			ranks[k] = append(rankDestination(*r), 32)
			add(&destinations, k, b, bound(r.In, all), nil)
		case rulefile.Map:
			b.Dim[ruleset.Destination] = rangesOf(a.Outside)
			ranks[k] = []int{0, truth(r.In != "" || r.Out != ""), 0, a.Outside.Bits()}
			add(&destinations, k, b, bound(r.In, inside), nil)
			add(&destinations, k, b, bound(r.Out, outside), nil)
			b.Dim[ruleset.Destination] = nil
		}
		if isSource(r) {
			b.Dim[ruleset.Source] = rangesOf(sourceOf(r))
			in, out := all, outside
			if r.In != "" {
				in = bound(r.In, all)
			}
			if r.Out != "" {
				out = i.links([]string{r.Out})
			}
			add(&sources, k, b, in, out)
		}
	}
	slices.SortStableFunc(destinations, func(a, b fileItem) int { return -slices.Compare(ranks[a.at], ranks[b.at]) })
	slices.SortStableFunc(sources, func(a, b fileItem) int { return -slices.Compare(rankSource(*a.rule), rankSource(*b.rule)) })
	return excludes, destinations, sources
}

func rangesOf(p netip.Prefix) ruleset.Ranges {
	r := rulefile.RangeOf(p)
	return ruleset.RangesOf([]ruleset.Range{{First: number(r.First), Last: number(r.Last)}})
}

func setPorts(b *ruleset.Box, p rulefile.Protocol, ports rulefile.PortRange) {
	if p != rulefile.AnyProtocol {
		b.Dim[ruleset.ProtocolField] = ruleset.Ranges{{First: uint32(p), Last: uint32(p)}}
	}
	if !ports.IsZero() {
		b.Dim[ruleset.DestinationPort] = ruleset.Ranges{{First: uint32(ports.First), Last: uint32(ports.Last)}}
	}
}

// real are packets that there are: of named interfaces, forwarded, with ports if they have
// any.
func (i *importer) real() ruleset.Box {
	var b ruleset.Box
	b.Dim[ruleset.In] = i.links(i.named())
	b.Dim[ruleset.Source], b.Dim[ruleset.Destination] = forwardable, forwardable
	b.Dim[ruleset.ProtocolField] = ruleset.Ranges{{First: 1, Last: 255}}
	return b
}

// portless are protocols whose packets have no ports that a condition could name.
var portful = ruleset.Ranges{{First: 6, Last: 6}, {First: 17, Last: 17}, {First: 33, Last: 33}, {First: 132, Last: 132}, {First: 136, Last: 136}}

// possible cuts from boxes what no packet is: ports 0 and beyond, ports without protocol.
func possible(boxes []ruleset.Box) []ruleset.Box {
	var out []ruleset.Box
	for _, b := range boxes {
		if b.Dim[ruleset.DestinationPort] == nil && b.Dim[ruleset.SourcePort] == nil {
			out = append(out, b)
			continue
		}
		var with, zero ruleset.Box
		with.Dim[ruleset.ProtocolField] = portful
		for _, d := range []ruleset.FieldKind{ruleset.SourcePort, ruleset.DestinationPort} {
			if b.Dim[d] != nil {
				with.Dim[d] = ruleset.Ranges{{First: 1, Last: 65535}}
			}
			zero.Dim[d] = ruleset.Ranges{{First: 0, Last: 0}}
		}
		if in, ok := b.And(with); ok {
			out = append(out, in)
		}
		zero.Dim[ruleset.ProtocolField] = portful.Not()
		if in, ok := b.And(zero); ok {
			in.Dim[ruleset.DestinationPort], in.Dim[ruleset.SourcePort] = nil, nil
			out = append(out, in)
		}
	}
	return out
}

// own are the packets of the kth item that no item before it takes.
func own(items []item, x index, k int, within ruleset.Box) ([]ruleset.Box, bool) {
	b, meet := items[k].box.And(within)
	if !meet {
		return nil, true
	}
	var before []ruleset.Box
	for _, n := range items[k].not {
		before = append(before, n.Box)
	}
	pieces, ok := b.MinusAll(before, maxChecked)
	for _, e := range x.near(b) {
		if e >= k || !ok {
			break
		}
		pieces, ok = minusItem(pieces, &items[e])
	}
	return possible(pieces), ok
}

// minusItem takes the packets of an item away.
func minusItem(pieces []ruleset.Box, it *item) ([]ruleset.Box, bool) {
	var next []ruleset.Box
	for _, p := range pieces {
		in, meet := p.And(it.box)
		if !meet {
			next = append(next, p)
			continue
		}
		next = append(next, p.Minus(it.box)...)
		left := []ruleset.Box{in} // of in, what the item does not take
		var kept []ruleset.Box
		for _, n := range it.not {
			var rest []ruleset.Box
			for _, l := range left {
				if b, meet := l.And(n.Box); meet {
					kept = append(kept, b)
				}
				rest = append(rest, l.Minus(n.Box)...)
			}
			left = rest
		}
		next = append(next, kept...)
		if len(next) > maxChecked {
			return next, false
		}
	}
	return next, true
}

// over gives each part of the pieces to the first file item it is in, and what is in none.
func over(pieces []ruleset.Box, items []fileItem, see func(ruleset.Box, *fileItem)) bool {
	for k := range items {
		var next []ruleset.Box
		for _, p := range pieces {
			in, meet := p.And(items[k].box)
			if !meet {
				next = append(next, p)
				continue
			}
			see(in, &items[k])
			next = append(next, p.Minus(items[k].box)...)
		}
		if pieces = next; len(pieces) > maxChecked {
			return false
		}
	}
	for _, p := range pieces {
		see(p, nil)
	}
	return true
}

func (i *importer) tangled(r *ruleset.Rule) {
	i.lost(r, "meets others in too many ways to be compared with the rule file: try it")
}

// differs names a difference, unless the rules have been named.
func (i *importer) differs(it *item, b ruleset.Box, lost bool, what string) {
	for _, r := range it.rules() {
		if i.explained[r] {
			continue
		}
		why := fmt.Sprintf("%s for %s", what, i.describe(b))
		if lost {
			i.lost(r, "%s", why)
		} else {
			i.otherwise(r, "%s", why)
		}
	}
}

// --- destinations ----------------------------------------------------------------------

func (i *importer) checkDestinations(file []fileItem) {
	near := newFileIndex(file, ruleset.Destination)
	x := newIndex(i.destinations, ruleset.Destination)
	for k := range i.destinations {
		it := &i.destinations[k]
		if it.dead || it.lost && len(it.taken) == 0 {
			continue
		}
		within := i.real()
		if it.taken != nil {
			within.Dim[ruleset.Destination] = it.taken
		}
		pieces, ok := own(i.destinations, x, k, within)
		ok = ok && over(pieces, near.of(it.box), func(b ruleset.Box, f *fileItem) {
			if f == nil || f.rule == nil || !it.sameDestination(b, f.rule) {
				i.differs(it, b, true, "the rule file decides otherwise")
			}
		})
		if !ok {
			i.tangled(it.rule)
		}
	}
	// Where the rule file translates, and the input does not.
	for k := range file {
		if file[k].rule == nil {
			continue
		}
		b, meet := file[k].box.And(i.real())
		if !meet {
			continue
		}
		pieces, ok := []ruleset.Box{b}, true
		for _, e := range near.of(b) {
			if e.at == file[k].at {
				break
			}
			var next []ruleset.Box
			for _, p := range pieces {
				next = append(next, p.Minus(e.box)...)
			}
			pieces = next
		}
		for _, e := range x.near(b) {
			if ok {
				pieces, ok = minusItem(pieces, &i.destinations[e])
			}
		}
		origin := i.origins[file[k].at]
		_, isMap := file[k].rule.Action.(rulefile.Map)
		for _, p := range possible(pieces) {
			hairpin := isMap && len(i.namesIn(p.Dim[ruleset.In], i.file.Outside)) == 0
			i.differs(origin, p, !hairpin, "the rule file also translates, what the input leaves alone,")
		}
		if !ok {
			i.tangled(origin.rule)
		}
	}
}

// sameDestination compares what becomes of the packets of b.
func (it *item) sameDestination(b ruleset.Box, r *rulefile.Rule) bool {
	if it.kind != ruleset.Translated || len(it.shares) == 0 {
		return false
	}
	switch a := r.Action.(type) {
	case rulefile.Map:
		s := it.shares[0]
		return it.to == ruleset.Netmap && len(it.shares) == 1 && s.bits == a.Inside.Bits() && asAddress(s.first) == a.Inside.Masked().Addr()
	case rulefile.DNAT:
		return it.to == ruleset.DNAT && it.sameTargets(b, a)
	}
	return false
}

// sameTargets compares where the packets of b are sent. As both are linear in the port, it
// is enough to look at the ends of each range.
func (it *item) sameTargets(b ruleset.Box, a rulefile.DNAT) bool {
	single := b.Dim[ruleset.DestinationPort]
	if a.Ports.IsZero() {
		targets, shares, why := it.targets(rulefile.PortRange{})
		weights, _ := weightsOf(shares)
		return why == "" && slices.Equal(targets, a.Targets) && slices.Equal(weights, a.Weights)
	}
	for _, r := range single {
		for _, p := range []uint32{r.First, r.Last} {
			port := rulefile.PortRange{First: uint16(p), Last: uint16(p)}
			want, shares, why := it.targets(port)
			have := destinationOnly(a, port)
			weights, _ := weightsOf(shares)
			if why != "" || !slices.Equal(weights, have.Weights) || !slices.EqualFunc(want, have.Targets, func(x, y rulefile.Target) bool {
				return x.Address == y.Address && cmp.Or(x.Ports, port) == cmp.Or(y.Ports, port)
			}) {
				return false
			}
		}
		if r.First != r.Last && slices.ContainsFunc(it.shares, func(s share) bool { return s.mode == portFixed }) {
			return false
		}
	}
	return true
}

// --- sources ---------------------------------------------------------------------------

// checkSources compares packets that are translated by their source only.
func (i *importer) checkSources(before, file []fileItem) {
	near := newFileIndex(file, ruleset.Source)
	x := newIndex(i.sources, ruleset.Source)
	for _, side := range []struct {
		in, out []string
		lost    bool
		why     string
	}{
		{i.file.Inside, i.file.Outside, true, "the rule file decides otherwise"},
		{i.file.Inside, i.file.Inside, false, "holds for what leaves by outside interfaces, and the source stays"},
		{i.file.Outside, i.named(), false, "holds for what comes from inside, and the source stays"},
	} {
		within := i.real()
		within.Dim[ruleset.In], within.Dim[ruleset.Out] = i.links(side.in), i.links(side.out)
		within.Dim[ruleset.Destination] = within.Dim[ruleset.Destination].And(i.given().Not())
		if side.in[0] == i.file.Outside[0] {
			within.Dim[ruleset.Source] = i.strangers()
		}
		fromOutside := &side.in[0] == &i.file.Outside[0]
		for k := range i.sources {
			it := &i.sources[k]
			if it.dead || it.lost || fromOutside && i.hides(it) {
				continue
			}
			pieces, ok := own(i.sources, x, k, within)
			pieces, ok2 := i.notDestined(pieces)
			compare := func(b ruleset.Box, f *fileItem) {
				if f == nil || fromOutside || !i.sameSource(it, f.rule) {
					i.differs(it, b, side.lost, side.why)
				}
			}
			ok = ok && ok2 && over(pieces, before, func(b ruleset.Box, f *fileItem) {
				switch {
				case f == nil:
					ok = ok && over([]ruleset.Box{b}, near.of(b), compare)
				case f.rule == nil:
					compare(b, nil)
				}
			})
			if !ok {
				i.tangled(it.rule)
			}
		}
		if fromOutside {
			continue // there the rule file translates no source
		}
		i.checkSourcesAlone(before, file, near, x, within, side.lost)
	}
}

// checkSourcesAlone finds what the rule file translates and the input does not.
func (i *importer) checkSourcesAlone(before, file []fileItem, near fileIndex, x index, within ruleset.Box, lost bool) {
	for k := range file {
		b, meet := file[k].box.And(within)
		if !meet {
			continue
		}
		origin := i.origins[file[k].at]
		pieces, ok := []ruleset.Box{b}, true
		for _, list := range [][]fileItem{before, near.of(b)} {
			for _, e := range list {
				if e.rule != nil && e.at == file[k].at {
					break
				}
				var next []ruleset.Box
				for _, p := range pieces {
					next = append(next, p.Minus(e.box)...)
				}
				if pieces = next; len(pieces) > maxChecked {
					ok = false
					break
				}
			}
		}
		for _, e := range x.near(b) {
			if ok {
				pieces, ok = minusItem(pieces, &i.sources[e])
			}
		}
		if ok {
			pieces, ok = i.notDestined(pieces)
		}
		for _, p := range possible(pieces) {
			i.differs(origin, p, lost, "the rule file also translates, what the input leaves alone,")
		}
		if !ok {
			i.tangled(origin.rule)
		}
	}
}

// notDestined are the packets whose destination the input does not translate.
func (i *importer) notDestined(pieces []ruleset.Box) ([]ruleset.Box, bool) {
	ok := true
	for k := range i.destinations {
		if ok {
			pieces, ok = minusItem(pieces, &i.destinations[k])
		}
	}
	return pieces, ok
}

// given are destinations that are the gateway's own business: what is sent there and meets
// no rule is not forwarded.
func (i *importer) given() ruleset.Ranges {
	list := slices.Clone(i.local)
	for k := range i.file.Rules {
		for _, r := range i.file.Rules[k].OutsideAddresses() {
			list = append(list, ruleset.Range{First: number(r.First), Last: number(r.Last)})
		}
	}
	for _, p := range i.file.Pools {
		for _, r := range p.Addresses {
			list = append(list, ruleset.Range{First: number(r.First), Last: number(r.Last)})
		}
	}
	return ruleset.RangesOf(list)
}

// strangers are sources that packets from outside can have: none that a rule hides.
func (i *importer) strangers() ruleset.Ranges {
	hidden := []ruleset.Range{}
	for k := range i.sources {
		if i.hides(&i.sources[k]) {
			hidden = append(hidden, i.sources[k].box.Dim[ruleset.Source]...)
		}
	}
	return forwardable.And(ruleset.RangesOf(hidden).Not())
}

// hides reports whether an item is for certain sources that go outside: they are inside.
func (i *importer) hides(it *item) bool {
	src := it.box.Dim[ruleset.Source]
	return src != nil && src.Size() <= 1<<31 && len(i.namesIn(it.box.Dim[ruleset.Out], i.file.Outside)) > 0
}

// sameSource compares what becomes of a source.
func (i *importer) sameSource(it *item, r *rulefile.Rule) bool {
	if it.kind != ruleset.Translated || len(it.shares) != 1 {
		return false
	}
	s := it.shares[0]
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		return it.to == ruleset.Masquerade && samePorts(s.ports, a.Ports)
	case rulefile.SNAT:
		if it.to != ruleset.SNAT {
			return false
		}
		if a.Pool == "" {
			return s.first == s.last && asAddress(s.first) == a.Address && samePorts(s.ports, a.Ports)
		}
		p := i.file.Pool(a.Pool)
		return p != nil && len(p.Addresses) == 1 && number(p.Addresses[0].First) == s.first && number(p.Addresses[0].Last) == s.last && samePorts(s.ports, p.Ports)
	case rulefile.Map:
		return it.to == ruleset.Netmap && s.bits == a.Outside.Bits() && asAddress(s.first) == a.Outside.Masked().Addr()
	}
	return false
}

func samePorts(a, b rulefile.PortRange) bool { return a == b || usual(a) && usual(b) }

// checkBehind compares what becomes of the sources of packets whose destination is
// translated.
func (i *importer) checkBehind(file []fileItem) {
	type seen struct {
		mark      ruleset.MarkState
		in, src   string
		to, ports string
	}
	done, taken := map[seen]bool{}, map[*ruleset.Rule]bool{}
	for k := range i.destinations {
		taken[i.destinations[k].rule] = taken[i.destinations[k].rule] || !i.destinations[k].lost
	}
	for k := range i.marked {
		d := &i.marked[k]
		if d.dead || !taken[d.rule] || d.kind != ruleset.Translated || d.to != ruleset.DNAT {
			continue
		}
		for _, b := range d.behind(i.real()) {
			key := seen{d.mark, fmt.Sprint(b.Dim[ruleset.In]), fmt.Sprint(b.Dim[ruleset.Source]), fmt.Sprint(b.Dim[ruleset.Destination]), fmt.Sprint(b.Dim[ruleset.ProtocolField], b.Dim[ruleset.DestinationPort])}
			if !done[key] {
				done[key] = true
				i.checkBehindOne(d, i.behind[d.mark], b, file)
			}
		}
	}
}

// behind are the packets of an item as they are when their destination is translated.
func (it *item) behind(within ruleset.Box) []ruleset.Box {
	b, meet := it.box.And(within)
	if !meet {
		return nil
	}
	var out []ruleset.Box
	for _, s := range it.shares {
		one := b
		one.Dim[ruleset.Destination] = ruleset.Ranges{{First: s.first, Last: s.last}}
		switch s.mode {
		case portFixed:
			one.Dim[ruleset.DestinationPort] = ruleset.Ranges{{First: uint32(s.port), Last: uint32(s.port)}}
		case portShifted:
			one.Dim[ruleset.DestinationPort] = ruleset.Ranges{{First: uint32(s.ports.First), Last: uint32(s.ports.Last)}}
		}
		out = append(out, possible([]ruleset.Box{one})...)
	}
	return out
}

func (i *importer) checkBehindOne(d *item, items []item, b ruleset.Box, file []fileItem) {
	x := newIndex(items, ruleset.Destination)
	for _, side := range []struct{ in, out []string }{{i.file.Outside, i.named()}, {i.file.Inside, i.file.Outside}} {
		var sides ruleset.Box
		sides.Dim[ruleset.In], sides.Dim[ruleset.Out] = i.links(side.in), i.links(side.out)
		if side.in[0] == i.file.Outside[0] {
			sides.Dim[ruleset.Source] = i.strangers()
		}
		within, meet := b.And(sides)
		if !meet {
			continue
		}
		rest, ok := []ruleset.Box{within}, true
		for k := range items {
			it := &items[k]
			pieces, ok1 := own(items, x, k, within)
			ok2 := over(pieces, file, func(p ruleset.Box, f *fileItem) {
				if f == nil || !i.sameSource(it, f.rule) {
					i.differs(it, p, true, "behind "+whereOf(d.rule)+" the rule file does not do the same")
				}
			})
			if !ok1 || !ok2 {
				i.tangled(it.rule)
			}
			if ok {
				rest, ok = minusItem(rest, it)
			}
		}
		over(rest, file, func(p ruleset.Box, f *fileItem) {
			if f != nil {
				i.differs(i.origins[f.at], p, true, "behind "+whereOf(d.rule)+" the rule file also translates the source, what the input leaves alone,")
			}
		})
	}
}

// fileIndex finds the rules of the file that may be for packets of a box.
type fileIndex struct {
	items []fileItem
	index index
}

func newFileIndex(file []fileItem, dim ruleset.FieldKind) fileIndex {
	boxes := make([]item, len(file))
	for k := range file {
		boxes[k].box = file[k].box
	}
	return fileIndex{file, newIndex(boxes, dim)}
}

func (x fileIndex) of(b ruleset.Box) []fileItem {
	near := x.index.near(b)
	out := make([]fileItem, len(near))
	for k, n := range near {
		out[k] = x.items[n]
	}
	return out
}

// --- words -----------------------------------------------------------------------------

// describe names some packets of a box, as in "tcp 10.0.0.0/24 -> 203.0.113.5:80 in eth1".
func (i *importer) describe(b ruleset.Box) string {
	var words []string
	if r := b.Dim[ruleset.ProtocolField]; r != nil && r.Size() < 16 {
		list, _ := protocolsIn(r)
		for k, p := range list {
			if k == 0 {
				words = append(words, p.String())
			}
		}
	}
	end := func(addresses, ports ruleset.Ranges) string {
		text := "any"
		if addresses != nil && addresses.Size() < 1<<31 {
			text = prefixes(addresses)[0].String()
			text = strings.TrimSuffix(text, "/32")
		}
		if len(ports) > 0 {
			r := rulefile.PortRange{First: uint16(min(ports[0].First, math.MaxUint16)), Last: uint16(min(ports[0].Last, math.MaxUint16))}
			text += ":" + r.String()
		}
		return text
	}
	words = append(words, end(b.Dim[ruleset.Source], b.Dim[ruleset.SourcePort]), "->", end(b.Dim[ruleset.Destination], b.Dim[ruleset.DestinationPort]))
	for _, d := range []struct {
		word string
		r    ruleset.Ranges
	}{{"in", b.Dim[ruleset.In]}, {"out", b.Dim[ruleset.Out]}} {
		if names := i.namesIn(d.r, i.named()); len(names) > 0 && len(names) < len(i.named()) {
			words = append(words, d.word, names[0])
		}
	}
	return strings.Join(words, " ")
}
