// SPDX-License-Identifier: Apache-2.0

package probe

// Which rules do something to every packet that meets them, so that it matters if one
// doesn't: they count, limit, queue or change packets. All others decide, and decide the
// same for all packets of a flow in one direction.

import (
	"slices"

	"natkit/snapshot"
)

// nftPerPacket are expressions of nftables. objref refers to a named counter, quota or
// limit; payload, exthdr and meta are those that write.
var nftPerPacket = map[string]bool{
	"quota": true, "limit": true, "queue": true, "dynset": true, "objref": true, "connlimit": true, "last": true,
	"numgen": true, "dup": true, "fwd": true, "log": true, "tproxy": true, "payload": true, "exthdr": true,
}

// xtPerPacket are matches and targets of iptables. TCPMSS changes SYNs only.
var xtPerPacket = map[string]bool{
	"limit": true, "hashlimit": true, "quota": true, "statistic": true, "recent": true, "connbytes": true, "length": true,
	"string": true, "u32": true, "bpf": true, "ttl": true, "nfacct": true, "rateest": true,
	"NFQUEUE": true, "QUEUE": true, "TOS": true, "DSCP": true, "ECN": true, "TTL": true, "CLASSIFY": true, "NFLOG": true,
	"LOG": true, "ULOG": true, "TEE": true, "CHECKSUM": true, "RATEEST": true, "IDLETIMER": true, "TPROXY": true, "TRACE": true,
}

func addPerPacket(c *snapshot.Chain, names []string) {
	for _, name := range names {
		if !slices.Contains(c.PerPacket, name) {
			c.PerPacket = append(c.PerPacket, name)
		}
	}
	slices.Sort(c.PerPacket)
}
