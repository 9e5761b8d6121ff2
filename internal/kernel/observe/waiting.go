// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// Waiting for a connection without a program on the path of its packets. The kernel asks chains of
// type nat for the first packet of a connection only; where NAT is on, one more costs the packets
// of established connections nothing. Such chains mark new connections of the filter, and the
// kernel reports from there on the rules that their first packets meet.

// OpenWaiting begins to wait in a namespace, with a table for each family that is translated. The
// table goes with its socket, as that of a RuleTrace.
func OpenWaiting(place HookedPlace, f PacketFilter) (out []*RuleTrace, err error) {
	h, err := netns.Open(place.Ref)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	for _, family := range f.families(place.NAT4, place.NAT6) {
		t := &RuleTrace{ref: place.Ref, inode: place.Inode, filter: f, family: family, waits: true, known: map[snapshot.TraceTuple]bool{}}
		if err := t.open(h); err != nil {
			for _, t := range out {
				err = errors.Join(err, t.Close())
			}
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// waitingPriorities are right before those of NAT: rules in front of these are not reported.
var waitingPriorities = []struct {
	chain    string
	hook     uint32
	priority int32
	device   uint32 // the key of the interface that is known there
}{
	{"prerouting", unix.NF_INET_PRE_ROUTING, -101, unix.NFT_META_IIF}, {"output", unix.NF_INET_LOCAL_OUT, -101, unix.NFT_META_OIF},
	{"postrouting", unix.NF_INET_POST_ROUTING, 99, unix.NFT_META_OIF}, {"input", unix.NF_INET_LOCAL_IN, 99, unix.NFT_META_IIF},
}

func (t *RuleTrace) waitingChains() (out []netlink.Message) {
	if t.filter.Rate == 0 {
		t.filter.Rate = math.MaxUint32
	}
	for _, c := range waitingPriorities {
		out = append(out, t.chain(c.chain, "nat", c.hook, c.priority))
		for _, match := range t.filterMatches() {
			if t.filter.Ifindex != 0 {
				match = append(match, meta(unix.NFT_REG_1, c.device), compare(binary.NativeEndian.AppendUint32(nil, t.filter.Ifindex)))
			}
			out = append(out, t.rule(c.chain, match))
		}
	}
	return out
}
