// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"natkit/internal/kernel/netns"
)

// ChainName names a chain as nft(8) does.
type ChainName struct{ Family, Table, Chain string }

// RuleUse is a rule that is there, whoever made it.
type RuleUse struct {
	Handle  uint64  `json:"handle"`           // as in nft delete rule FAMILY TABLE CHAIN handle N
	Packets *uint64 `json:"packets,omitzero"` // of its counter; nil without one
}

// maxListed bounds the base chains whose rules are listed: each is a request.
const maxListed = 256

var families = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
	nftables.TableFamilyARP: "arp", nftables.TableFamilyNetdev: "netdev", nftables.TableFamilyBridge: "bridge",
}

// BaseRules lists the rules of the base chains in the namespace of h, in their
// order, with what their counters have counted since they were made.
func BaseRules(h *netns.Handle) (map[ChainName][]RuleUse, error) {
	out := map[ChainName][]RuleUse{}
	err := h.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		chains, err := c.ListChains()
		if err != nil {
			return fmt.Errorf("list nftables chains: %w", err)
		}
		for _, chain := range chains {
			if chain.Hooknum == nil || len(out) == maxListed {
				continue
			}
			rules, err := c.GetRules(chain.Table, chain)
			if err != nil {
				return fmt.Errorf("list rules of chain %q: %w", chain.Name, err)
			}
			name := ChainName{families[chain.Table.Family], chain.Table.Name, chain.Name}
			out[name] = make([]RuleUse, 0, len(rules))
			for _, r := range rules {
				use := RuleUse{Handle: r.Handle}
				for _, e := range r.Exprs {
					if counter, ok := e.(*expr.Counter); ok {
						use.Packets = &counter.Packets
					}
				}
				out[name] = append(out[name], use)
			}
		}
		return nil
	})
	return out, err
}

// Since turns what counters had counted to what they counted since before. A rule
// that was not there then has counted from zero.
func Since(before, after map[ChainName][]RuleUse) {
	for name, rules := range after {
		was := map[uint64]*uint64{}
		for _, r := range before[name] {
			was[r.Handle] = r.Packets
		}
		for _, r := range rules {
			if b := was[r.Handle]; r.Packets != nil && b != nil && *b <= *r.Packets {
				*r.Packets -= *b
			}
		}
	}
}
