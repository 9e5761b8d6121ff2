// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/rulefile"
)

// Import reads the NAT rules of another program into a rule file.
//
// A list of rules, of which the first that matches a packet decides, becomes rules of
// which the most special does:
//
//  1. All packets at once are sent through the chains (ruleset.Walk). What comes of it is
//     a list of sets of packets, each with what is done to it: items (import_items.go).
//  2. Each item becomes rules, such that the most special rule is the first item's
//     (import_rules.go, import_place.go).
//  3. The rules are compared with the items, set by set (import_check.go). What differs is
//     named, whatever the reason: no mistake of the second step is silent.

// ImportOptions are what the rules alone do not tell.
type ImportOptions struct {
	Name            string       // of the input, in messages
	Inside, Outside []string     // interfaces; those that the rules tell of need not be named
	Local           []netip.Addr // external addresses of the gateway: what "type local" stands for
}

// Imported is a rule file and what of the input it does not say.
type Imported struct {
	File  *rulefile.File
	Notes []Note
	From  []string // what each rule of File was made of, as notes have it
}

// Lost reports whether the rule file does not do something that the input did.
func (i *Imported) Lost() bool {
	return slices.ContainsFunc(i.Notes, func(n Note) bool { return n.Lost })
}

// Note is about one rule of the input.
type Note struct {
	Line int    `json:"line"`
	Rule string `json:"rule"` // as it was written
	Why  string `json:"reason"`
	Lost bool   `json:"lost"` // the rule file does not do what the rule did; otherwise it does it otherwise
}

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
	set, err := readRuleset(data, o.Name)
	if err != nil {
		return nil, err
	}
	i := newImporter(set, o)
	if err := i.run(); err != nil {
		return nil, fmt.Errorf("import %s: %w", o.Name, err)
	}
	slices.SortStableFunc(i.notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	from := make([]string, len(i.origins))
	for k, it := range i.origins {
		from[k] = it.rule.Where()
	}
	return &Imported{File: i.file, From: from, Notes: i.notes}, nil
}

func readRuleset(data []byte, name string) (*ruleset.Ruleset, error) {
	switch text := bytes.TrimSpace(data); {
	case len(text) == 0:
		return nil, fmt.Errorf("read %s: it is empty", name)
	case text[0] == '{':
		return ruleset.ReadNFTables(data, name)
	case bytes.HasPrefix(text, []byte("table ")) || bytes.HasPrefix(text, []byte("flush ruleset")):
		return nil, fmt.Errorf("read %s: this is the text form of nftables: give the output of nft -j list ruleset", name)
	}
	return ruleset.ReadIPTables(data, name)
}

// importer makes the rule file.
type importer struct {
	set      *ruleset.Ruleset
	options  ImportOptions
	file     *rulefile.File
	universe ruleset.Universe
	local    ruleset.Ranges

	destinations, sources []item                       // what prerouting and postrouting do, the first decides
	marked                []item                       // destinations, apart by the mark that packets leave with
	behind                map[ruleset.MarkState][]item // what postrouting does with a mark

	placement placement
	orders    map[*item]int
	policies  map[*ruleset.Chain]*ruleset.Rule
	origins   []*item         // of the rules of file
	halves    map[string]half // of a map, by the rule's key: which directions the input has

	notes     []Note
	noted     map[Note]bool
	explained map[*ruleset.Rule]bool // a note says where the rule file differs
}

func newImporter(set *ruleset.Ruleset, o ImportOptions) *importer {
	i := &importer{
		set: set, options: o, file: rulefile.New(), noted: map[Note]bool{}, halves: map[string]half{},
		explained: map[*ruleset.Rule]bool{}, orders: map[*item]int{}, policies: map[*ruleset.Chain]*ruleset.Rule{}, behind: map[ruleset.MarkState][]item{},
	}
	for _, names := range [][]string{o.Inside, o.Outside, set.Links()} {
		for _, name := range names {
			if !slices.Contains(i.universe, name) {
				i.universe = append(i.universe, name)
			}
		}
	}
	if o.Local != nil {
		list := []ruleset.Range{{First: 127 << 24, Last: 127<<24 | (1<<24 - 1)}}
		for _, a := range o.Local {
			list = append(list, ruleset.Range{First: number(a), Last: number(a)})
		}
		i.local = ruleset.RangesOf(list)
	}
	i.file.Name = o.Name
	i.placement.keys, i.placement.destinations = map[string]bool{}, map[netip.Addr][]int{}
	return i
}

func (i *importer) run() error {
	if err := i.walk(); err != nil {
		return err
	}
	i.sides()
	i.surroundings()
	for k := range i.destinations {
		i.destination(&i.destinations[k])
	}
	for k := range i.sources {
		i.source(&i.sources[k])
	}
	i.finish()
	i.settle()
	i.check()
	i.ways()
	i.portsLeft()
	if len(i.file.Rules) == 0 {
		i.note(Note{Why: "no rule of the input could be taken over", Lost: true})
	}
	return nil
}

// CountNAT is how many rules of an input translate IPv4. Rules of iptables, which nft lists but
// can't print, are not among them, nor are others in a table that iptables keeps.
func CountNAT(data []byte) int {
	set, err := readRuleset(data, "rules")
	if err != nil {
		return 0
	}
	kept := iptablesTables(set)
	n := 0
	for r := range set.Rules {
		if translates(r) && !r.IPv6 && !kept[r.Chain.Table] {
			n++
		}
	}
	return n
}

// iptablesTables are the tables of an nft listing that iptables keeps. Their names alone don't show
// it: who writes rules for nft by hand, or with iptables-translate, uses the same ones.
func iptablesTables(set *ruleset.Ruleset) map[*ruleset.Table]bool {
	kept := map[*ruleset.Table]bool{}
	for r := range set.Rules {
		if slices.ContainsFunc(r.Statements, func(s ruleset.Statement) bool { o, ok := s.(ruleset.Other); return ok && o.Name == "xt" }) {
			kept[r.Chain.Table] = true
		}
	}
	return kept
}

func translates(r *ruleset.Rule) bool {
	return slices.ContainsFunc(r.Statements, func(s ruleset.Statement) bool { _, ok := s.(ruleset.Translate); return ok })
}

func (i *importer) note(n Note) {
	if !i.noted[n] {
		i.noted[n] = true
		i.notes = append(i.notes, n)
	}
}

// lost and otherwise explain where the rule file differs; aside does not.
func (i *importer) lost(r *ruleset.Rule, format string, args ...any) {
	i.explained[r] = true
	i.note(Note{r.Line, r.Where(), fmt.Sprintf(format, args...), true})
}

func (i *importer) otherwise(r *ruleset.Rule, format string, args ...any) {
	i.explained[r] = true
	i.note(Note{r.Line, r.Where(), fmt.Sprintf(format, args...), false})
}

func (i *importer) aside(r *ruleset.Rule, lost bool, format string, args ...any) {
	i.note(Note{r.Line, r.Where(), fmt.Sprintf(format, args...), lost})
}

// whereOf names a rule in a note about another.
func whereOf(r *ruleset.Rule) string {
	if r.Handle == 0 {
		return fmt.Sprintf("line %d", r.Line)
	}
	return fmt.Sprintf("%s handle %d", r.Chain, r.Handle)
}

// ways says once what natkit does with external addresses and Linux does not.
func (i *importer) ways() {
	hides := slices.ContainsFunc(i.file.Rules, func(r rulefile.Rule) bool { return isSource(&r) })
	others, hairpin := len(i.file.Pools) > 0, false
	for _, rule := range i.file.Rules {
		switch a := rule.Action.(type) {
		case rulefile.DNAT:
			part := !a.Ports.IsZero() || a.Protocol != rulefile.AnyProtocol || rule.In != ""
			others = others || part && !slices.Contains(i.options.Local, a.Address)
			hairpin = hairpin || !i.file.IsOutside(rule.In) && hides
		case rulefile.SNAT:
			others = others || a.Pool == "" && !slices.Contains(i.options.Local, a.Address)
		}
	}
	if others {
		i.note(Note{Why: "what is sent to an external address of a rule or pool, and meets no rule, is dropped, unless the address is the gateway's own"})
	}
	if hairpin {
		i.note(Note{Why: "an internal host that asks for what is published is seen there by an external address (hairpin)"})
	}
}

// portsLeft names addresses of which forwards have every port of a protocol: engine ebpf
// gives none of those to internal hosts.
func (i *importer) portsLeft() {
	type space struct {
		address  netip.Addr
		protocol rulefile.Protocol
	}
	var spaces []space
	left := map[space][]rulefile.PortRange{}
	for _, rule := range i.file.Rules {
		a, ok := rule.Action.(rulefile.DNAT)
		if !ok || a.Ports.IsZero() {
			continue
		}
		s := space{a.Address, a.Protocol}
		have, known := left[s]
		if !known {
			spaces, have = append(spaces, s), i.gives(a.Address)
		}
		var rest []rulefile.PortRange
		for _, r := range have {
			if r.Overlaps(a.Ports) {
				rest = append(rest, withoutPorts(r, a.Ports)...)
			} else {
				rest = append(rest, r)
			}
		}
		left[s] = rest
	}
	for _, s := range spaces {
		if len(left[s]) == 0 && len(i.gives(s.address)) > 0 {
			i.note(Note{Why: fmt.Sprintf("the rules forward every %s port of %s: engine ebpf has none left there for internal hosts, engine nft does", s.protocol, s.address), Lost: true})
		}
	}
}

// gives are the ports of an address that source rules give to internal hosts, none if it is
// not theirs.
func (i *importer) gives(address netip.Addr) (ports []rulefile.PortRange) {
	add := func(r rulefile.PortRange) {
		if r.IsZero() {
			r = rulefile.DefaultPorts
		}
		ports = append(ports, r)
	}
	for _, rule := range i.file.Rules {
		switch a := rule.Action.(type) {
		case rulefile.Masquerade:
			if slices.Contains(i.options.Local, address) {
				add(a.Ports)
			}
		case rulefile.SNAT:
			if p := i.file.Pool(a.Pool); p != nil && p.Contains(address) {
				add(p.Ports)
			} else if a.Address == address {
				add(a.Ports)
			}
		}
	}
	return ports
}
