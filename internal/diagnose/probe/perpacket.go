// SPDX-License-Identifier: Apache-2.0

package probe

// Which rules do something to every packet of a flow that they meet, so that it matters if
// one doesn't: they count, limit, queue or change packets, or decide by what differs from
// packet to packet. All others decide the same for all packets of a flow in one direction.

import (
	"encoding/binary"
	"slices"

	"natkit/internal/snapshot"
)

// nftPerPacket are expressions of nftables. objref refers to a named counter, quota or
// limit; payload and exthdr are those that write, or read what varies.
var nftPerPacket = map[string]bool{
	"quota": true, "limit": true, "queue": true, "dynset": true, "objref": true, "connlimit": true, "last": true,
	"numgen": true, "dup": true, "fwd": true, "log": true, "tproxy": true, "payload": true, "exthdr": true,
}

// xtPerPacket are matches and targets of iptables. TCPMSS changes SYNs only.
var xtPerPacket = map[string]bool{
	"limit": true, "hashlimit": true, "quota": true, "statistic": true, "recent": true, "connbytes": true, "length": true,
	"string": true, "u32": true, "bpf": true, "ttl": true, "nfacct": true, "rateest": true, "mac": true, "dscp": true, "tos": true, "ecn": true, "cpu": true,
	"NFQUEUE": true, "QUEUE": true, "TOS": true, "DSCP": true, "ECN": true, "TTL": true, "CLASSIFY": true, "NFLOG": true,
	"LOG": true, "ULOG": true, "TEE": true, "CHECKSUM": true, "RATEEST": true, "IDLETIMER": true, "TPROXY": true, "TRACE": true, "AUDIT": true,
}

func addPerPacket(c *snapshot.Chain, names []string) {
	for _, name := range names {
		if !slices.Contains(c.PerPacket, name) {
			c.PerPacket = append(c.PerPacket, name)
		}
	}
	slices.Sort(c.PerPacket)
}

// States of connection tracking, as rules have them: NF_CT_STATE_BIT of Linux
// include/uapi/linux/netfilter/nf_conntrack_common.h.
const stateEstablished = 1 << 1

// walkedRule is what a rule does with packets of established flows.
type walkedRule struct {
	never     bool // it wants those of other states
	always    bool // it has no condition that some of them fail
	perPacket []string
	verdicts  []walkedVerdict
	lookups   []nftLookup // that say more
}

// walkedVerdict is one with the chain that a jump or a goto names.
type walkedVerdict struct{ verdict, chain string }

// walk follows packets of established flows through the chains that forwarded ones meet,
// and puts what must see each of them into Chain.PerPacket. Chains of type nat see the
// first packet only.
type walk struct {
	chains []snapshot.Chain
	rules  [][]walkedRule // of each chain
	// find is the index of a chain in the table of another, -1 if it is not there.
	find func(beside int, name string) int
	// look says what the lookups of a rule say; nil if there are none.
	look func(chain int, r *walkedRule) error

	ends map[int]bool // chains that were walked: no packet comes back from them
}

func (w *walk) run() error {
	w.ends = map[int]bool{}
	for i, c := range w.chains {
		if c.Type == "nat" || c.Hook != "prerouting" && c.Hook != "forward" && c.Hook != "postrouting" {
			continue
		}
		if _, err := w.chain(i); err != nil {
			return err
		}
	}
	return nil
}

// chain says whether all packets end there: are accepted or dropped.
func (w *walk) chain(i int) (ends bool, err error) {
	if i < 0 {
		return false, nil
	}
	if ends, ok := w.ends[i]; ok {
		return ends, nil
	}
	w.ends[i] = false
	for _, r := range w.rules[i] {
		if len(r.lookups) > 0 {
			if err := w.look(i, &r); err != nil {
				return false, err
			}
		}
		if r.never {
			continue
		}
		addPerPacket(&w.chains[i], r.perPacket)
		for _, v := range r.verdicts {
			if v.verdict == "continue" || v.verdict == "" {
				continue
			}
			ended := v.verdict != "return"
			if v.verdict == "jump" || v.verdict == "goto" {
				if ended, err = w.chain(w.find(i, v.chain)); err != nil {
					return false, err
				}
			}
			if r.always && (ended || v.verdict != "jump") {
				w.ends[i] = ended
				return ended, nil
			}
		}
	}
	return false, nil
}

// xtStateAlias is XT_CONNTRACK_STATE_ALIAS: the rule was written with -m state.
const xtStateAlias = 1 << 13

// xtStates reads which states of connection tracking a match of iptables wants; ok is
// false if it asks for none. only: it asks for nothing else.
func xtStates(name string, info []byte) (states uint32, only, ok bool) {
	const byState = 1 // XT_CONNTRACK_STATE
	switch {
	case name == "state" && len(info) >= 4:
		return binary.NativeEndian.Uint32(info), true, true
	case name == "conntrack" && len(info) >= 160: // struct xt_conntrack_mtinfo2 or 3, after 8 addresses, 2 words and 5 ports
		flags, inverted := binary.NativeEndian.Uint16(info[146:]), binary.NativeEndian.Uint16(info[148:])
		states = uint32(binary.NativeEndian.Uint16(info[150:]))
		if inverted&byState != 0 {
			states = ^states
		}
		return states, flags&^xtStateAlias == byState, flags&byState != 0
	}
	return 0, false, false
}
