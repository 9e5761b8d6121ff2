// SPDX-License-Identifier: Apache-2.0

// Package ruleset is one model of the packet filter's rules, whoever wrote them: nft -j
// list ruleset and iptables-save are read into the same tables, chains and rules. It is
// pure. Which rules packets meet is evaluated for all of them at once (Walk): an import is
// made of that.
//
// Only what decides about IPv4 packets is evaluated. What is not understood stays in the
// model as a condition or statement with its text, so that whoever reads the rules can
// name it: a rule is never dropped silently.
package ruleset

import (
	"fmt"
	"slices"
	"strings"
)

// Sources of a rule set.
const (
	IPTables = "iptables"
	NFTables = "nftables"
)

// Ruleset is what one program listed.
type Ruleset struct {
	Source  string // IPTables or NFTables
	Tables  []*Table
	Dormant []*Table // their chains are on no hook, so their rules do nothing
}

// Table is a table of a family.
type Table struct {
	Family, Name string
	Line         int
	Chains       []*Chain // in their order
	Sets         []*Set   // and maps
	UnknownFlag  bool     // it may be dormant

	dormant bool
	byName  map[string]*Chain
}

// Chain is a list of rules; one with a hook is a base chain.
type Chain struct {
	Table      *Table
	Name       string
	Type, Hook string // "" unless it is a base chain
	Priority   int
	Policy     string // "accept", "drop" or ""
	Line       int
	Rules      []*Rule
}

// Set is a named set or map. Expires: its elements come and go by themselves.
type Set struct {
	Name     string
	Expires  bool
	elements []any // as nft lists them; read where a rule says which fields they are of
}

// Rule is a list of statements, each asked or done if those before it hold.
type Rule struct {
	Chain      *Chain
	Line       int // in the input
	Handle     int // nftables
	Text       string
	Comment    string
	Counter    bool
	IPv6       bool // no IPv4 packet meets it
	IPv4       bool // no IPv6 packet meets it
	Statements []Statement
}

// Statement is one of Match, SetMark, Verdict, VerdictMap, Translate and Other.
type Statement interface{ statement() }

// Match holds for packets whose fields have one of the values.
type Match struct {
	Fields []Field // several are of a concatenation
	Values []Tuple // alternatives
	Not    bool
	Set    *Set // where the values come from
}

// Tuple has a value for each field.
type Tuple []Value

// Value is a range of numbers (addresses are numbers), or the name of an interface, where
// * at the end stands for any characters.
type Value struct {
	First, Last uint32
	Name        string
}

// Field is what a condition looks at.
type Field struct {
	Kind FieldKind
	Mask uint32 // of a mark
	// Of a number that is drawn: it is from Offset to Offset + Mod - 1.
	Mod, Offset uint32
	// Key names what is drawn, or what is unknown: the same key is the same value for a
	// packet. An empty key is drawn again each time.
	Key string
}

// FieldKind is a property of a packet.
type FieldKind int

// Kinds of fields.
const (
	In FieldKind = iota
	Out
	Source
	Destination
	ProtocolField
	SourcePort
	DestinationPort
	Mark
	DestinationLocal // 1 if the destination is an address of this machine
	SourceLocal
	State   // of the connection: 1 is new, which packets are that NAT rules are asked about
	Draw    // a number that is drawn, or counted, or a hash
	Unknown // 1 if a condition holds that is not understood
)

// Verdict ends a rule.
type Verdict struct {
	Kind  VerdictKind
	Chain string // of a jump or goto
}

// VerdictKind is what becomes of a packet.
type VerdictKind int

// Verdicts.
const (
	Continue VerdictKind = iota
	Accept
	Drop
	Return
	Jump
	Goto
)

// VerdictMap chooses a verdict.
type VerdictMap struct {
	Fields   []Field
	Elements []VerdictElement
	Set      *Set
}

// VerdictElement is one of a VerdictMap.
type VerdictElement struct {
	Key     Tuple
	Verdict Verdict
}

// Translate is a NAT statement, and ends the way through the hook.
type Translate struct {
	Kind    TranslateKind
	Fields  []Field  // of a map
	Choices []Choice // one, or those of a map
	Set     *Set
	Flags   []string // random, fully-random, persistent
	Lost    string   // why it can't be evaluated
}

// TranslateKind is what is translated.
type TranslateKind int

// Kinds of translation.
const (
	SNAT TranslateKind = iota
	DNAT
	Masquerade
	Redirect
	Netmap // of sources or destinations, as the hook has it
)

// Choice is where to translate to. Bits is the length of a netmap's prefix.
type Choice struct {
	Key         Tuple
	First, Last uint32 // addresses; zero: the address stays
	Bits        int
	Ports       [2]uint16 // first and last; zero: the port stays
	Base        uint16    // the port that becomes the first; zero: there is none
}

// SetMark gives the packet mark &^ And ^ Xor; Unknown: what nobody can tell beforehand.
type SetMark struct {
	And, Xor uint32
	Unknown  bool
}

// Other is what natkit does not evaluate. Ends: the packet's way ends here.
type Other struct {
	Name, Text string
	Ends       bool
	Harmless   bool // it neither changes the packet nor where it goes
}

func (Match) statement()      {}
func (SetMark) statement()    {}
func (Verdict) statement()    {}
func (VerdictMap) statement() {}
func (Translate) statement()  {}
func (Other) statement()      {}

// SyntaxError is an input that is not what it should be.
type SyntaxError struct {
	Name string
	Line int
	Err  error
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("%s:%d: %v", e.Name, e.Line, e.Err) }
func (e *SyntaxError) Unwrap() error { return e.Err }

// Chain finds a chain of the table, nil if there is none.
func (t *Table) Chain(name string) *Chain { return t.byName[name] }

func (t *Table) add(c *Chain) *Chain {
	if t.byName == nil {
		t.byName = map[string]*Chain{}
	}
	t.byName[c.Name] = c
	t.Chains = append(t.Chains, c)
	return c
}

// Rules are all rules of the set.
func (s *Ruleset) Rules(yield func(*Rule) bool) {
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// Bases are the base chains of a type on a hook that IPv4 packets pass, in the order in
// which they do. Of one priority the one that was made last comes first (Linux
// net/netfilter/core.c, nf_hook_entries_grow); they are listed as they were made.
func (s *Ruleset) Bases(kind, hook string) []*Chain {
	var all []*Chain
	for _, t := range s.Tables {
		if t.Family != "ip" && t.Family != "inet" {
			continue
		}
		for _, c := range t.Chains {
			if c.Hook == hook && c.Type == kind {
				all = append(all, c)
			}
		}
	}
	slices.Reverse(all)
	slices.SortStableFunc(all, func(a, b *Chain) int { return a.Priority - b.Priority })
	return all
}

// Empty tells whether none of its elements were listed.
func (s *Set) Empty() bool { return len(s.elements) == 0 }

// Sets are the named sets and maps that the rule uses.
func (r *Rule) Sets() []*Set {
	var all []*Set
	for _, statement := range r.Statements {
		var set *Set
		switch x := statement.(type) {
		case Match:
			set = x.Set
		case VerdictMap:
			set = x.Set
		case Translate:
			set = x.Set
		}
		if set != nil {
			all = append(all, set)
		}
	}
	return all
}

// Where names the rule: as iptables-save has it, or chain, handle and text.
func (r *Rule) Where() string {
	if r.Handle == 0 {
		return r.Text
	}
	return fmt.Sprintf("%s handle %d: %s", r.Chain, r.Handle, r.Text)
}

// String is family, table and chain.
func (c *Chain) String() string {
	return strings.Join([]string{c.Table.Family, c.Table.Name, c.Name}, " ")
}

// Protocols are the transport protocols by the names that both programs write: those of /etc/protocols,
// where ipip is not the protocol IPPROTO_IPIP, which is ipencap.
var Protocols = map[string]uint32{
	"icmp": 1, "igmp": 2, "ipencap": 4, "tcp": 6, "udp": 17, "dccp": 33, "gre": 47, "esp": 50, "ah": 51, "ipv6-icmp": 58, "icmpv6": 58,
	"ospf": 89, "ipip": 94, "pim": 103, "comp": 108, "ipcomp": 108, "vrrp": 112, "l2tp": 115, "sctp": 132, "udplite": 136,
}

// portProtocols are those whose packets have ports.
var portProtocols = []Tuple{{number(6)}, {number(17)}, {number(33)}, {number(132)}, {number(136)}}

func number(n uint32) Value { return Value{First: n, Last: n} }

func unknown(key string, not bool) Match {
	return Match{Fields: []Field{{Kind: Unknown, Key: key}}, Values: []Tuple{{number(1)}}, Not: not}
}
