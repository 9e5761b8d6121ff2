// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"fmt"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

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
