// SPDX-License-Identifier: Apache-2.0

// Package nft is the kernel's NAT as an engine: descriptions of what to
// translate compiled to nftables, and put into a namespace over netlink in one
// transaction. It runs no program.
//
// Compiling is pure: [Docker.Compile], [Gateway.Compile] and the functions of
// measure.go give a [Ruleset], [Ruleset.Apply] and [Ruleset.Remove] are the only
// functions that touch a kernel.
package nft

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// Ruleset is a list of tables as they shall be in the kernel.
type Ruleset []Table

// Table is one IPv4 table.
type Table struct {
	Name       string
	Sets       []Set
	Timeouts   []Timeout
	Helpers    []Helper
	Flowtables []Flowtable
	Chains     []Chain
}

// Set is a named set, or with Data a map. Several types of Key are a concatenation, as
// are several of Data; each part takes a multiple of four bytes.
type Set struct {
	Name     string
	Key      []nftables.SetDatatype
	Data     []nftables.SetDatatype
	Interval bool   // keys are ranges; they must not overlap
	Dynamic  bool   // rules add elements
	Counter  bool   // each element counts
	Size     uint32 // of a dynamic set
	Elements []Element
}

// Element is one of a Set: a key, or with End the range from Key to End, both
// included; and in a map what it leads to, a value or a verdict.
type Element struct {
	Key, End []byte
	Value    []byte
	Verdict  *expr.Verdict
	Rule     int // of the rule file that the element was compiled from, by index
}

// Timeout is a named policy of time-outs, in seconds by conntrack's number of the
// state, for connections of one protocol.
type Timeout struct {
	Name     string
	Protocol uint8
	Policy   expr.CtStatePolicyTimeout
}

// Helper is a named helper of connection tracking, for flows of one protocol.
type Helper struct {
	Name     string
	Type     string // as the kernel calls it: "sip"
	Protocol uint8
}

// Flowtable is where the kernel keeps the flows that go past its hooks.
type Flowtable struct {
	Name    string
	Devices []string
}

// Chain is a chain and its rules. Without Base it is reached by a jump alone.
type Chain struct {
	Name  string
	Base  *Base
	Rules []Rule
}

// Base says where in a packet's way a chain is called.
type Base struct {
	Type     nftables.ChainType
	Hook     *nftables.ChainHook
	Priority *nftables.ChainPriority
	Policy   nftables.ChainPolicy
}

// Rule is a sequence of matches that ends with a verdict or a translation.
type Rule []expr.Any

// library is held where the library (v0.3.0) writes into variables of its own: the map
// that it completes policies from, and the last set's number.
var library sync.Mutex

func addTimeouts(c *nftables.Conn, table *nftables.Table, policies []Timeout) {
	library.Lock()
	defer library.Unlock()
	for _, p := range policies {
		c.AddObj(&nftables.NamedObj{
			Table: table, Name: p.Name, Type: nftables.ObjTypeCtTimeout,
			Obj: &expr.CtTimeout{L3Proto: unix.NFPROTO_IPV4, L4Proto: p.Protocol, Policy: p.Policy},
		})
	}
}

// Apply puts the tables into the namespace of h, each in place of the table of
// that name there: all of them, or on an error none. Tables of other names stay.
func (r Ruleset) Apply(h *netns.Handle) error { return r.transact(h, false) }

// Try asks the kernel whether it takes the tables, and leaves none of them, whatever
// happens in between: what makes them takes them away.
func (r Ruleset) Try(h *netns.Handle) error { return r.transact(h, true) }

func (r Ruleset) transact(h *netns.Handle, remove bool) error {
	return h.Do(func() error {
		c, err := newTransaction()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		for _, t := range r {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: t.Name}
			// Deleting a table that is not there is an error, adding one that is there is none.
			c.AddTable(table)
			c.DelTable(table)
			c.AddTable(table)
			for _, f := range t.Flowtables {
				c.AddFlowtable(&nftables.Flowtable{
					Table: table, Name: f.Name, Devices: f.Devices,
					Hooknum: nftables.FlowtableHookIngress, Priority: nftables.FlowtablePriorityFilter,
				})
			}
			addTimeouts(c, table, t.Timeouts)
			for _, helper := range t.Helpers {
				c.AddObj(&nftables.NamedObj{
					Table: table, Name: helper.Name, Type: nftables.ObjTypeCtHelper,
					Obj: &expr.CtHelper{Name: helper.Type, L3Proto: unix.NFPROTO_IPV4, L4Proto: helper.Protocol},
				})
			}
			// Elements name chains, rules name chains and sets.
			for _, ch := range t.Chains {
				chain := &nftables.Chain{Table: table, Name: ch.Name}
				if b := ch.Base; b != nil {
					chain.Type, chain.Hooknum, chain.Priority, chain.Policy = b.Type, b.Hook, b.Priority, &b.Policy
				}
				c.AddChain(chain)
			}
			for _, s := range t.Sets {
				if err := addSet(c, table, s); err != nil {
					return fmt.Errorf("compile set %s: %w", s.Name, err)
				}
			}
			for _, ch := range t.Chains {
				chain := &nftables.Chain{Table: table, Name: ch.Name}
				for _, rule := range ch.Rules {
					c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rule})
				}
			}
			if remove {
				c.DelTable(table)
			}
		}
		if err := c.Flush(); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("apply nftables rules: %w (the kernel needs nf_tables, nft_chain_nat, nft_masq, nft_ct and nft_fib_ipv4; a flowtable needs nft_flow_offload)", err)
			}
			return fmt.Errorf("apply nftables rules: %w", err)
		}
		return nil
	})
}

// Remove takes the tables of the ruleset out of the namespace of h. Tables that
// are not there are no error.
func (r Ruleset) Remove(h *netns.Handle) error {
	return h.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		for _, t := range r {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: t.Name}
			c.AddTable(table) // deleting one that is not there would be an error
			c.DelTable(table)
		}
		if err := c.Flush(); err != nil {
			return fmt.Errorf("remove nftables rules: %w", err)
		}
		return nil
	})
}

// elementsPerMessage keeps a message's list of elements, some 100 bytes each, below
// the 64 KiB that a netlink attribute can have.
const elementsPerMessage = 400

func addSet(c *nftables.Conn, table *nftables.Table, s Set) error {
	set := &nftables.Set{
		Table: table, Name: s.Name, IsMap: s.Data != nil, Interval: s.Interval,
		Dynamic: s.Dynamic, Counter: s.Counter, Size: s.Size,
		KeyType: concatenation(s.Key), DataType: concatenation(s.Data),
		Concatenation: len(s.Key) > 1,
	}
	if s.Key[0].Name == nftables.TypeIFName.Name {
		set.KeyByteOrder = binaryutil.NativeEndian // names are shown the right way round
	}
	library.Lock()
	err := c.AddSet(set, nil)
	library.Unlock()
	if err != nil {
		return err
	}
	for part := range slices.Chunk(s.Elements, elementsPerMessage) {
		elements := make([]nftables.SetElement, 0, 2*len(part))
		for _, e := range part {
			element := nftables.SetElement{Key: e.Key, Val: e.Value, VerdictData: e.Verdict}
			switch {
			case !s.Interval:
				elements = append(elements, element)
			case set.Concatenation: // which has ends in the element
				element.KeyEnd = e.End
				elements = append(elements, element)
			default: // an end is an element of its own, the first key behind
				elements = append(elements, element)
				if end, ok := following(e.End); ok {
					elements = append(elements, nftables.SetElement{Key: end, IntervalEnd: true})
				}
			}
		}
		if err := c.SetAddElements(set, elements); err != nil {
			return err
		}
	}
	return nil
}

func concatenation(types []nftables.SetDatatype) nftables.SetDatatype {
	switch len(types) {
	case 0:
		return nftables.SetDatatype{}
	case 1:
		return types[0]
	}
	return nftables.MustConcatSetType(types...)
}

// following is the number after key; none follows the largest.
func following(key []byte) ([]byte, bool) {
	next := slices.Clone(key)
	for i := len(next) - 1; i >= 0; i-- {
		next[i]++
		if next[i] != 0 {
			return next, true
		}
	}
	return nil, false
}

// The base chains that NAT and its firewall use, at the priorities iptables gives them.
func preroutingNAT() *Base {
	return &Base{nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, nftables.ChainPolicyAccept}
}

func outputNAT() *Base {
	return &Base{nftables.ChainTypeNAT, nftables.ChainHookOutput, nftables.ChainPriorityNATDest, nftables.ChainPolicyAccept}
}

func postroutingNAT() *Base {
	return &Base{nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept}
}

func forwardFilter(policy nftables.ChainPolicy) *Base {
	return &Base{nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, policy}
}
