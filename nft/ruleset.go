// SPDX-License-Identifier: Apache-2.0

// Package nft is the kernel's NAT as an engine: descriptions of what to
// translate compiled to nftables, and put into a namespace over netlink in one
// transaction. It runs no program.
//
// Compiling is pure: [Docker.Compile] and [Gateway.Compile] give a [Ruleset],
// [Ruleset.Apply] is the only function that touches a kernel.
package nft

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"natkit/internal/netns"
)

// Ruleset is a list of tables as they shall be in the kernel.
type Ruleset []Table

// Table is one IPv4 table.
type Table struct {
	Name   string
	Chains []Chain
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
		c, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		for _, t := range r {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: t.Name}
			// Deleting a table that is not there is an error, adding one that is there is none.
			c.AddTable(table)
			c.DelTable(table)
			c.AddTable(table)
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
				return fmt.Errorf("apply nftables rules: %w (the kernel needs nf_tables, nft_chain_nat, nft_masq, nft_ct and nft_fib_ipv4)", err)
			}
			return fmt.Errorf("apply nftables rules: %w", err)
		}
		return nil
	})
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
