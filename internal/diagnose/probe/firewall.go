// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"errors"
	"fmt"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// Rules reads what package blame follows packets through: chains with all their rules, interfaces,
// and of sets the elements that these dropped packets may have met. Counters are as good as none.
// What can be read is returned with the error of what can't.
func Rules(ns *netns.Handle, drops []snapshot.Drop) (*snapshot.Snapshot, error) {
	s := &snapshot.Snapshot{Drops: &snapshot.Drops{Rows: drops}}
	var errs []error
	err := ns.Do(func() error {
		v := newView("/")
		v.allRules = true
		for _, src := range []source{interfaces(), nftables(), iptablesLegacy(), host(), sets()} {
			if src.start != nil {
				if err := src.start(v); err != nil {
					errs = append(errs, err)
					continue
				}
			}
			if src.end != nil {
				errs = append(errs, src.end(v, s))
			}
			if src.stop != nil {
				src.stop()
			}
		}
		return nil
	})
	return s, errors.Join(append(errs, err)...)
}

// Chains reads the chains of nftables and iptables-legacy in a namespace, without
// what a whole Snapshot takes. Counters are totals. What can be read is returned with
// the error of what can't.
func Chains(ns *netns.Handle) (chains []snapshot.Chain, err error) {
	err = ns.Do(func() error {
		v := newView("/")
		tables, err1 := readNFTables(v)
		legacy, err2 := readIPTables(v)
		chains = append(tables, legacy...)
		if err1 != nil && err2 != nil {
			return fmt.Errorf("%w; %w", err1, err2)
		}
		return cmp.Or(err1, err2)
	})
	return chains, err
}
