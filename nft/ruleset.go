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
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/netns"
)

// Ruleset is a list of tables as they shall be in the kernel.
type Ruleset []Table

// Table is one IPv4 table.
type Table struct {
	Name       string
	Maps       []Map
	Flowtables []Flowtable
	Chains     []Chain
}

// Map is a named map from addresses to addresses.
type Map struct {
	Name     string
	Elements []MapElement
}

// MapElement is one entry of a Map.
type MapElement struct{ Key, Value netip.Addr }

// Flowtable is where the kernel keeps the flows that go past its hooks.
type Flowtable struct {
	Name    string
	Devices []string
}

// Chain is a chain and its rules. Without Base it is reached by a jump alone, and
// stands before the chains that jump to it.
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

// Apply puts the tables into the namespace of h, each in place of the table of
// that name there: all of them, or on an error none. Tables of other names stay.
func (r Ruleset) Apply(h *netns.Handle) error {
	return h.Do(func() error {
		// All of it is one message, and each part of it is answered.
		c, err := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
			return errors.Join(c.SetWriteBuffer(maxTransaction), c.SetReadBuffer(maxTransaction))
		}))
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
			for _, m := range t.Maps {
				if err := addMap(c, table, m); err != nil {
					return fmt.Errorf("compile map %s: %w", m.Name, err)
				}
			}
			for _, ch := range t.Chains {
				chain := &nftables.Chain{Table: table, Name: ch.Name}
				if b := ch.Base; b != nil {
					chain.Type, chain.Hooknum, chain.Priority, chain.Policy = b.Type, b.Hook, b.Priority, &b.Policy
				}
				c.AddChain(chain)
				for _, rule := range ch.Rules {
					c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rule})
				}
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

// maxTransaction is the size of the largest ruleset in bytes of netlink: some
// 200 000 rules.
const maxTransaction = 128 << 20

// mapElementsPerMessage keeps a message's list of elements, some 50 bytes each,
// below the 64 KiB that a netlink attribute can have.
const mapElementsPerMessage = 1000

func addMap(c *nftables.Conn, table *nftables.Table, m Map) error {
	set := &nftables.Set{
		Table: table, Name: m.Name, IsMap: true, KeyType: nftables.TypeIPAddr, DataType: nftables.TypeIPAddr,
	}
	if err := c.AddSet(set, nil); err != nil {
		return err
	}
	for part := range slices.Chunk(m.Elements, mapElementsPerMessage) {
		elements := make([]nftables.SetElement, len(part))
		for i, e := range part {
			elements[i] = nftables.SetElement{Key: e.Key.AsSlice(), Val: e.Value.AsSlice()}
		}
		if err := c.SetAddElements(set, elements); err != nil {
			return err
		}
	}
	return nil
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
