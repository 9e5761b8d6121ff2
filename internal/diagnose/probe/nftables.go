// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// nftables reads the chains of nftables, those of iptables-nft among them:
// policies, how many rules, what they translate and what they drop.
//
// The messages are read here and not by a library because the counter of a
// policy is wanted, and all rules of all tables in one dump.
func nftables() source {
	var before []snapshot.Chain
	return source{
		name:  snapshot.CanNFTables,
		costs: "policies and rules of nftables (and iptables-nft) that drop packets, and its NAT rules, are not seen",
		live:  true,
		start: func(v *view) (err error) {
			before, err = readNFTables(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readNFTables(v)
			if err != nil {
				return err
			}
			s.Chains = append(s.Chains, chainIncreases(before, after)...)
			if s.Chains == nil {
				s.Chains = []snapshot.Chain{} // known to be none
			}
			return nil
		},
	}
}

// nftFamilies are the names nft(8) uses for the families of its tables.
var nftFamilies = map[uint8]string{
	unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6",
	unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge",
}

// hookName is a hook's name by its number, which means something else in the
// families arp and netdev.
func hookName(family string, number uint32) string {
	names := []string{"prerouting", "input", "forward", "output", "postrouting", "ingress"}
	switch family {
	case "arp":
		names = []string{"input", "output", "forward"}
	case "netdev":
		names = []string{"ingress", "egress"}
	}
	if int64(number) < int64(len(names)) {
		return names[number]
	}
	return fmt.Sprintf("hook %d", number)
}

// readNFTables returns the chains with the totals of their counters.
func readNFTables(v *view) ([]snapshot.Chain, error) {
	if !v.loaded("nf_tables") {
		return nil, nil // and asking would load it
	}
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &largeMessages)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	defer conn.Close()
	var set nftRuleset
	err = whole(func() error {
		set = newNFTRuleset()
		for _, get := range []struct {
			message uint16
			what    string
			add     func(family uint8, attrs []byte) error
		}{
			{unix.NFT_MSG_GETTABLE, "tables", set.addTable},
			{unix.NFT_MSG_GETCHAIN, "chains", set.addChain},
			{unix.NFT_MSG_GETSET, "sets", set.addSet},
			{unix.NFT_MSG_GETOBJ, "objects", set.addObject},
			{unix.NFT_MSG_GETRULE, "rules", set.addRule},
		} {
			if err := listNFTables(conn, get.message, get.what, get.add); err != nil {
				return err
			}
		}
		set.keepRules(v.allRules)
		return set.walk(conn)
	})
	return set.out, err
}

// listNFTables calls add for each object of a kind.
func listNFTables(conn *netlink.Conn, message uint16, what string, add func(family uint8, attrs []byte) error) error {
	msgs, err := conn.Execute(netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | message),
			Flags: netlink.Request | netlink.Dump,
		},
		Data: []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return fmt.Errorf("list nftables %s: %w", what, err)
	}
	for _, m := range msgs {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return errInterrupted
		}
		if len(m.Data) < 4 {
			return fmt.Errorf("list nftables %s: message of %d bytes", what, len(m.Data))
		}
		if err := add(m.Data[0], m.Data[4:]); err != nil {
			return fmt.Errorf("list nftables %s: %w", what, err)
		}
	}
	return nil
}

// walk follows packets of established flows through the rules; conn is asked for the
// elements of sets that they meet.
func (set *nftRuleset) walk(conn *netlink.Conn) error {
	w := walk{chains: set.out, rules: make([][]walkedRule, len(set.out)), find: set.chain}
	for i, rules := range set.rules {
		w.rules[i] = rules
	}
	w.look = func(chain int, r *walkedRule) error {
		for _, l := range r.lookups {
			elements, err := nftElements(conn, set.keys[chain], l.set)
			if err != nil {
				return err
			}
			states := uint32(0)
			for _, e := range elements {
				wanted := !l.states
				if l.states && len(e.key) == 4 {
					key := binary.NativeEndian.Uint32(e.key)
					states |= key
					wanted = key&stateEstablished != 0
				}
				if wanted && e.verdict != nil {
					r.verdicts = append(r.verdicts, walkedVerdict{verdictWord(e.verdict.code), e.verdict.chain})
				}
			}
			if l.inverted {
				states = ^states
			}
			if l.states && states&stateEstablished == 0 {
				r.never = true
			}
		}
		return nil
	}
	return w.run()
}

// chain is the index of a chain in the table of another, -1 if it is not there.
func (set *nftRuleset) chain(beside int, name string) int {
	if i, ok := set.chains[nftKey{set.keys[beside].family, set.keys[beside].table, name}]; ok {
		return i
	}
	return -1
}

// nftLookup is a set or map that a rule asks.
type nftLookup struct {
	set              string
	states, inverted bool // by the state of connection tracking
}

// nftVerdict is one of nftables, with the chain that a jump names.
type nftVerdict struct {
	code  int32
	chain string
}

// nftElement is one of a set; verdict is nil where it has none.
type nftElement struct {
	key, last        []byte // last is of a range of concatenated fields, nil otherwise
	end              bool   // a range ends before key
	verdict          *nftVerdict
	timeout, expires uint64 // milliseconds
}

// nftElements reads the elements of a set in the table of a chain.
func nftElements(conn *netlink.Conn, of nftKey, set string) (out []nftElement, err error) {
	ae := netlink.NewAttributeEncoder()
	ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, of.table)
	ae.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	attrs, err := ae.Encode()
	if err != nil {
		return nil, err
	}
	msgs, err := conn.Execute(netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSETELEM),
			Flags: netlink.Request | netlink.Dump,
		},
		Data: append([]byte{of.family, unix.NFNETLINK_V0, 0, 0}, attrs...),
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, errInterrupted // it went with its rule
	}
	if err != nil {
		return nil, fmt.Errorf("list elements of nftables set %q: %w", set, err)
	}
	for _, m := range msgs {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return nil, errInterrupted
		}
		if len(m.Data) < 4 {
			return nil, fmt.Errorf("list elements of nftables set %q: message of %d bytes", set, len(m.Data))
		}
		if out, err = appendElements(out, m.Data[4:]); err != nil {
			return nil, fmt.Errorf("list elements of nftables set %q: %w", set, err)
		}
	}
	return out, nil
}

// setElemKeyEnd is NFTA_SET_ELEM_KEY_END.
const setElemKeyEnd = 10

func appendElements(out []nftElement, attrs []byte) ([]nftElement, error) {
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		if ad.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		nested(ad, func(ad *netlink.AttributeDecoder) { // a list: all of type NFTA_LIST_ELEM
			var e nftElement
			nested(ad, func(ad *netlink.AttributeDecoder) {
				switch ad.Type() {
				case unix.NFTA_SET_ELEM_KEY:
					e.key = dataValue(ad)
				case setElemKeyEnd:
					e.last = dataValue(ad)
				case unix.NFTA_SET_ELEM_FLAGS:
					e.end = ad.Uint32()&unix.NFT_SET_ELEM_INTERVAL_END != 0
				case unix.NFTA_SET_ELEM_TIMEOUT:
					e.timeout = ad.Uint64()
				case unix.NFTA_SET_ELEM_EXPIRATION:
					e.expires = ad.Uint64()
				case unix.NFTA_SET_ELEM_DATA:
					e.verdict = dataVerdict(ad)
				}
			})
			out = append(out, e)
		})
	})
	return out, err
}

// dataVerdict is the verdict in a value, nil if it is something else.
func dataVerdict(ad *netlink.AttributeDecoder) (v *nftVerdict) {
	nested(ad, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_DATA_VERDICT {
			v = verdictOf(ad)
		}
	})
	return v
}

func verdictOf(ad *netlink.AttributeDecoder) *nftVerdict {
	v := &nftVerdict{}
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_VERDICT_CODE:
			v.code = int32(ad.Uint32())
		case unix.NFTA_VERDICT_CHAIN:
			v.chain = ad.String()
		}
	})
	return v
}

// errInterrupted says that something changed while it was listed.
var errInterrupted = errors.New("it changed again and again while it was read")

// whole calls list until it was not interrupted, a few times.
func whole(list func() error) error {
	var err error
	for range 5 {
		if err = list(); !errors.Is(err, errInterrupted) {
			break
		}
	}
	return err
}

// largeMessages lets the kernel answer in messages of 32 KiB, the most it makes,
// and not of 4: each one begins with a walk to where the one before ended.
var largeMessages = netlink.Config{MessageBufferSize: 64 << 10}

type nftKey struct {
	family      uint8
	table, name string
}

// nftRuleset collects the messages of the three dumps.
type nftRuleset struct {
	out     []snapshot.Chain
	keys    []nftKey // of each
	rules   map[int][]walkedRule
	chains  map[nftKey]int // -> index in out
	dormant map[nftKey]bool
	sets    map[nftKey]map[string]nftSet // of a table, whose key has no name
	objects map[nftKey]map[nftObject]nftAttrs
	walks   map[int][]snapshot.Rule
	xt      map[nftKey]bool // tables of iptables-nft
}

func newNFTRuleset() nftRuleset {
	return nftRuleset{chains: map[nftKey]int{}, dormant: map[nftKey]bool{}, rules: map[int][]walkedRule{}, sets: map[nftKey]map[string]nftSet{},
		objects: map[nftKey]map[nftObject]nftAttrs{}, walks: map[int][]snapshot.Rule{}, xt: map[nftKey]bool{}}
}

func (set *nftRuleset) addTable(family uint8, attrs []byte) error {
	const dormant = 1 // NFT_TABLE_F_DORMANT: its chains are not registered on hooks
	var name string
	var flags uint32
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_TABLE_NAME:
			name = ad.String()
		case unix.NFTA_TABLE_FLAGS:
			flags = ad.Uint32()
		}
	})
	if flags&dormant != 0 {
		set.dormant[nftKey{family, name, ""}] = true
	}
	return err
}

// hookDevices is NFTA_HOOK_DEVS, a list, of which the first is told otherwise as well.
const hookDevices = 4

func (set *nftRuleset) addChain(family uint8, attrs []byte) error {
	c := snapshot.Chain{Backend: "nft", Family: nftFamilies[family]}
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_CHAIN_TABLE:
			c.Table = ad.String()
		case unix.NFTA_CHAIN_NAME:
			c.Name = ad.String()
		case unix.NFTA_CHAIN_TYPE:
			c.Type = ad.String()
		case unix.NFTA_CHAIN_POLICY:
			c.Policy = verdictWord(int32(ad.Uint32()))
		case unix.NFTA_CHAIN_HOOK:
			nested(ad, func(ad *netlink.AttributeDecoder) {
				switch ad.Type() {
				case unix.NFTA_HOOK_HOOKNUM:
					c.Hook = hookName(c.Family, ad.Uint32())
				case unix.NFTA_HOOK_PRIORITY:
					c.Priority = int(int32(ad.Uint32()))
				case hookDevices:
					nested(ad, func(ad *netlink.AttributeDecoder) { c.Devices = append(c.Devices, ad.String()) })
				}
			})
		case unix.NFTA_CHAIN_COUNTERS:
			c.PolicyPackets = new(counterPackets(ad))
		}
	})
	if err != nil || set.dormant[nftKey{family, c.Table, ""}] {
		return err
	}
	if isIPTables(c) {
		set.xt[nftKey{family, c.Table, ""}] = true
	}
	set.chains[nftKey{family, c.Table, c.Name}] = len(set.out)
	set.out = append(set.out, c)
	set.keys = append(set.keys, nftKey{family, c.Table, c.Name})
	return nil
}

func (set *nftRuleset) addRule(family uint8, attrs []byte) error {
	var table, chain string
	var expressions []byte
	rule := snapshot.Rule{}
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_RULE_HANDLE:
			rule.Handle = ad.Uint64()
		case unix.NFTA_RULE_TABLE:
			table = ad.String()
		case unix.NFTA_RULE_CHAIN:
			chain = ad.String()
		case unix.NFTA_RULE_EXPRESSIONS:
			expressions = ad.Bytes()
		}
	})
	i, ok := set.chains[nftKey{family, table, chain}]
	if err != nil || !ok { // the chain is in a dormant table, or newer than the dump of chains
		return err
	}
	rule.Number = set.out[i].Rules + 1
	r := set.readRule(i, &rule, expressions)
	r.addTo(&set.out[i])
	set.walks[i] = append(set.walks[i], rule)
	set.rules[i] = append(set.rules[i], r.walked())
	return nil
}

func dataValue(ad *netlink.AttributeDecoder) (value []byte) {
	nested(ad, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_DATA_VALUE {
			value = ad.Bytes()
		}
	})
	return value
}

// counterPackets reads the packets of a counter, of a chain or of a rule.
func counterPackets(ad *netlink.AttributeDecoder) uint64 {
	var n uint64
	nested(ad, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_COUNTER_PACKETS {
			n = ad.Uint64()
		}
	})
	return n
}

// decode calls fn for each attribute. Numbers of nftables are in network order.
func decode(attrs []byte, fn func(*netlink.AttributeDecoder)) error {
	ad, err := netlink.NewAttributeDecoder(attrs)
	if err != nil {
		return err
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		fn(ad)
	}
	return ad.Err()
}

// nested is decode for the attributes inside the current one.
func nested(ad *netlink.AttributeDecoder, fn func(*netlink.AttributeDecoder)) {
	ad.Nested(func(inner *netlink.AttributeDecoder) error {
		for inner.Next() {
			fn(inner)
		}
		return inner.Err()
	})
}
