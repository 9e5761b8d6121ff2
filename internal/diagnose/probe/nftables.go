// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

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
		set.keepRules()
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
	w := walk{chains: set.out, rules: make([][]walkedRule, len(set.out))}
	for i, rules := range set.rules {
		for _, r := range rules {
			out := walkedRule{never: r.never, always: !r.others, perPacket: r.perPacket, lookups: r.lookups}
			if v := r.last; v != nil {
				out.verdicts = []walkedVerdict{{v.code, set.chain(i, v.chain)}}
			}
			w.rules[i] = append(w.rules[i], out)
		}
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
					r.verdicts = append(r.verdicts, walkedVerdict{e.verdict.code, set.chain(chain, e.verdict.chain)})
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
	rules   map[int][]*nftRule
	chains  map[nftKey]int // -> index in out
	dormant map[nftKey]bool
	sets    map[nftKey]map[string]nftSet // of a table, whose key has no name
	objects map[nftKey]map[nftObject]nftAttrs
	walks   map[int][]snapshot.Rule
	xt      map[nftKey]bool // tables of iptables-nft
}

func newNFTRuleset() nftRuleset {
	return nftRuleset{chains: map[nftKey]int{}, dormant: map[nftKey]bool{}, rules: map[int][]*nftRule{}, sets: map[nftKey]map[string]nftSet{},
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
			c.Policy = verdictName(int32(ad.Uint32()))
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
	rule, walked := &nftRule{family: nftFamilies[family]}, snapshot.Rule{}
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_RULE_HANDLE:
			walked.Handle = ad.Uint64()
		case unix.NFTA_RULE_TABLE:
			table = ad.String()
		case unix.NFTA_RULE_CHAIN:
			chain = ad.String()
		case unix.NFTA_RULE_EXPRESSIONS:
			expressions = ad.Bytes()
			nested(ad, func(ad *netlink.AttributeDecoder) { // a list: all of type NFTA_LIST_ELEM
				nested(ad, rule.addExpression())
			})
		}
	})
	i, ok := set.chains[nftKey{family, table, chain}]
	if err != nil || !ok { // the chain is in a dormant table, or newer than the dump of chains
		return err
	}
	c := &set.out[i]
	c.Rules++
	if rule.verdict != "" { // no packet of the flow gets further, so each comes here
		rule.perPacket = slices.DeleteFunc(rule.perPacket, func(name string) bool { return name == "log" })
	}
	set.rules[i] = append(set.rules[i], rule)
	walked.Number = c.Rules
	set.readRule(i, &walked, expressions)
	if rule.offloads {
		c.Offloads++
	}
	if rule.nat.kind != "" {
		addNAT(c, rule.nat)
	}
	if rule.verdict != "" {
		c.DropRules = append(c.DropRules, snapshot.DropRule{
			Number: c.Rules, Verdict: rule.verdict, All: !rule.conditions, Packets: rule.packets,
		})
	}
	return nil
}

// nftRule is what is of interest in the expressions of one rule.
type nftRule struct {
	registers  map[uint32][]byte // loaded with constants
	packets    *uint64
	verdict    string // drop, reject, or "" for everything else
	nat        natRule
	conditions bool // there are expressions that not every packet passes

	// For packets of established flows (walk).
	never     bool        // a condition wants another state, or IPv6
	others    bool        // there are conditions besides the state
	last      *nftVerdict // nil: none
	lookups   []nftLookup
	perPacket []string
	offloads  bool
	stateMask uint32 // of the state that was loaded

	family  string
	loaded  nftField // what was put into a register last
	atLeast []byte   // and what it was compared with
}

// nftField is a part of the packet that a plain condition compares.
type nftField int

const (
	otherField nftField = iota
	fieldProtocol
	fieldDest
	fieldDestPort
	fieldState
	fieldFamily
)

// addExpression returns a function for the attributes of one expression: its
// name, which comes first, and what is in it.
func (r *nftRule) addExpression() func(*netlink.AttributeDecoder) {
	var name string
	return func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_EXPR_NAME:
			name = ad.String()
			switch name {
			case "counter", "immediate", "log", "nat", "masq", "redir", "target", "match":
			case "reject":
				r.verdict = "reject"
			default:
				r.conditions = true
			}
			switch name {
			case "counter", "immediate", "log", "meta", "payload", "ct", "bitwise", "fib", "objref", "notrack", "target":
			case "cmp", "lookup":
				r.others = r.others || r.loaded != fieldState
			case "match": // by compat
			default:
				r.others = true
			}
		case unix.NFTA_EXPR_DATA:
			if nftPerPacket[name] && (name != "payload" && name != "exthdr" || writes(name, ad)) {
				r.perPacket = append(r.perPacket, name)
			}
			switch name {
			case "counter":
				r.packets = new(counterPackets(ad))
			case "immediate":
				r.immediate(ad)
			case "nat":
				r.translation(ad, unix.NFTA_NAT_TYPE, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
			case "masq":
				r.nat.kind = "masquerade"
				r.translation(ad, unix.NFTA_MASQ_UNSPEC, unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX)
			case "redir":
				r.nat.kind = "redirect"
				r.translation(ad, unix.NFTA_REDIR_UNSPEC, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX)
			case "meta", "payload":
				r.load(name, ad)
			case "cmp":
				r.compare(ad)
			case "range":
				r.between(ad)
			case "flow_offload":
				r.offloads = true
			case "lookup":
				r.lookup(ad)
				r.loaded = otherField
			case "ct":
				r.loadState(ad)
			case "bitwise":
				r.mask(ad)
			case "fib":
				r.loaded = otherField
			case "match", "target":
				r.compat(name, ad)
			default:
				r.loaded = otherField
			}
		}
	}
}

// writes tells whether an expression that can load a part of the packet changes it.
func writes(name string, ad *netlink.AttributeDecoder) (source bool) {
	attr := uint16(unix.NFTA_PAYLOAD_SREG)
	if name == "exthdr" {
		attr = unix.NFTA_EXTHDR_SREG
	}
	const maxseg = 2 // TCP's MSS, which SYNs alone have
	option := uint32(0)
	nested(ad, func(ad *netlink.AttributeDecoder) {
		source = source || ad.Type() == attr
		if name == "exthdr" && ad.Type() == unix.NFTA_EXTHDR_TYPE {
			option = uint32(ad.Uint8())
		}
	})
	return source && option != maxseg
}

// varies tells whether packets of a flow differ in what is loaded: their length, TOS and
// TTL, TCP's numbers, the link's addresses. Flags of TCP are not among it, because SYN, FIN
// and RST are what rules ask for.
func (r *nftRule) varies(name string, key, base, offset uint32) bool {
	switch {
	case name == "meta":
		return key == unix.NFT_META_LEN
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return r.family == "ip" && offset < 9 && offset != 6
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return offset >= 4 && offset != 12 && offset != 13
	}
	return true
}

// load notes which part of the packet the next expression compares.
func (r *nftRule) load(name string, ad *netlink.AttributeDecoder) {
	var key, base, offset, length uint32
	loads := false
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch {
		case name == "meta" && ad.Type() == unix.NFTA_META_DREG, name == "payload" && ad.Type() == unix.NFTA_PAYLOAD_DREG:
			loads = true
		case name == "meta" && ad.Type() == unix.NFTA_META_KEY:
			key = ad.Uint32()
		case name == "meta":
		case ad.Type() == unix.NFTA_PAYLOAD_BASE:
			base = ad.Uint32()
		case ad.Type() == unix.NFTA_PAYLOAD_OFFSET:
			offset = ad.Uint32()
		case ad.Type() == unix.NFTA_PAYLOAD_LEN:
			length = ad.Uint32()
		}
	})
	r.loaded, r.atLeast = otherField, nil
	if loads && r.varies(name, key, base, offset) {
		r.perPacket = append(r.perPacket, name)
	}
	switch {
	case name == "meta" && key == unix.NFT_META_L4PROTO:
		r.loaded = fieldProtocol
	case name == "meta" && key == unix.NFT_META_NFPROTO:
		r.loaded = fieldFamily
	case name == "meta":
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 16 && length == 4 && r.family != "ip6":
		r.loaded = fieldDest
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 24 && length == 16 && r.family != "ip":
		r.loaded = fieldDest
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 2 && length == 2:
		r.loaded = fieldDestPort
	}
}

// loadState notes that the next expression is about the state of connection tracking, and
// what of connection tracking differs from packet to packet.
func (r *nftRule) loadState(ad *netlink.AttributeDecoder) {
	key, loads := uint32(0), false
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_CT_KEY:
			key = ad.Uint32()
		case unix.NFTA_CT_DREG:
			loads = true
		}
	})
	r.loaded, r.stateMask = otherField, 0
	switch {
	case !loads:
	case key == unix.NFT_CT_STATE:
		r.loaded = fieldState
	case key == unix.NFT_CT_PKTS || key == unix.NFT_CT_BYTES || key == unix.NFT_CT_AVGPKT:
		r.perPacket = append(r.perPacket, "connbytes")
	}
}

// mask reads which bits of the state are looked at.
func (r *nftRule) mask(ad *netlink.AttributeDecoder) {
	var mask []byte
	nested(ad, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_BITWISE_MASK {
			mask = dataValue(ad)
		}
	})
	if r.loaded != fieldState || len(mask) != 4 {
		r.loaded = otherField
		return
	}
	r.stateMask = binary.NativeEndian.Uint32(mask)
}

// state reads the condition that the state is one of some. nft(8) writes several as bits,
// of which not none may be set.
func (r *nftRule) state(op uint32, data []byte) {
	if len(data) != 4 {
		r.others = true
		return
	}
	r.loaded = otherField
	states := binary.NativeEndian.Uint32(data)
	wanted := op == unix.NFT_CMP_EQ
	if r.stateMask != 0 {
		if states != 0 {
			r.others = true
			return
		}
		states, wanted = r.stateMask, !wanted
	}
	r.never = r.never || (states&stateEstablished != 0) != wanted
}

// lookup notes a set of states, or a map of verdicts; of other sets nothing is known.
func (r *nftRule) lookup(ad *netlink.AttributeDecoder) {
	l, verdicts := nftLookup{states: r.loaded == fieldState}, false
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_LOOKUP_SET:
			l.set = ad.String()
		case unix.NFTA_LOOKUP_DREG:
			verdicts = ad.Uint32() == unix.NFT_REG_VERDICT
		case unix.NFTA_LOOKUP_FLAGS:
			l.inverted = ad.Uint32()&unix.NFT_LOOKUP_F_INV != 0
		}
	})
	if l.states || verdicts {
		r.lookups = append(r.lookups, l)
	}
}

// compare reads the condition that a part of the packet is one value.
func (r *nftRule) compare(ad *netlink.AttributeDecoder) {
	op, data := uint32(unix.NFT_CMP_EQ), []byte(nil)
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_CMP_OP:
			op = ad.Uint32()
		case unix.NFTA_CMP_DATA:
			data = dataValue(ad)
		}
	})
	if r.loaded == fieldState {
		r.state(op, data)
		return
	}
	switch op {
	case unix.NFT_CMP_EQ:
		r.condition(data, data)
	case unix.NFT_CMP_GTE: // nft(8) writes a range as two comparisons
		r.atLeast = data
	case unix.NFT_CMP_LTE:
		if len(r.atLeast) == len(data) {
			r.condition(r.atLeast, data)
		}
	}
}

// between reads the condition that a part of the packet lies between two values.
func (r *nftRule) between(ad *netlink.AttributeDecoder) {
	op, from, to := uint32(unix.NFT_RANGE_EQ), []byte(nil), []byte(nil)
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_RANGE_OP:
			op = ad.Uint32()
		case unix.NFTA_RANGE_FROM_DATA:
			from = dataValue(ad)
		case unix.NFTA_RANGE_TO_DATA:
			to = dataValue(ad)
		}
	})
	if op == unix.NFT_RANGE_EQ {
		r.condition(from, to)
	}
}

func (r *nftRule) condition(from, to []byte) {
	switch {
	case r.loaded == fieldFamily && len(from) == 1 && from[0] != unix.NFPROTO_IPV4:
		r.never = true
	case r.loaded == fieldProtocol && len(from) == 1 && from[0] == to[0]:
		r.nat.protocol = protocolName(from[0])
	case r.loaded == fieldDest && slices.Equal(from, to):
		r.nat.dest, _ = netip.AddrFromSlice(from) // of no other length than an address
	case r.loaded == fieldDestPort && len(from) == 2 && len(to) == 2:
		r.nat.destPorts = snapshot.PortRange{Min: binary.BigEndian.Uint16(from), Max: binary.BigEndian.Uint16(to)}
	}
}

func dataValue(ad *netlink.AttributeDecoder) (value []byte) {
	nested(ad, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_DATA_VALUE {
			value = ad.Bytes()
		}
	})
	return value
}

// immediate: a verdict, or a constant for a register that a translation uses.
func (r *nftRule) immediate(ad *netlink.AttributeDecoder) {
	var register uint32
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_IMMEDIATE_DREG:
			register = ad.Uint32()
		case unix.NFTA_IMMEDIATE_DATA:
			nested(ad, func(ad *netlink.AttributeDecoder) {
				switch ad.Type() {
				case unix.NFTA_DATA_VALUE:
					if r.registers == nil {
						r.registers = map[uint32][]byte{}
					}
					r.registers[register] = ad.Bytes()
				case unix.NFTA_DATA_VERDICT:
					r.last = verdictOf(ad)
					if verdictName(r.last.code) == "drop" {
						r.verdict = "drop"
					}
				}
			})
		}
	})
}

// translation reads nat, masq and redir, which number their attributes
// differently; kindAttr 0 is an attribute that does not occur.
func (r *nftRule) translation(ad *netlink.AttributeDecoder, kindAttr, minAttr, maxAttr uint16) {
	address := func(ad *netlink.AttributeDecoder) netip.Addr {
		a, _ := netip.AddrFromSlice(r.registers[ad.Uint32()]) // otherwise from the packet or a map
		return a
	}
	port := func(ad *netlink.AttributeDecoder) uint16 {
		if b := r.registers[ad.Uint32()]; len(b) >= 2 {
			return binary.BigEndian.Uint16(b)
		}
		return 0 // from the packet or a map
	}
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case kindAttr:
			r.nat.kind = "snat"
			if ad.Uint32() == unix.NFT_NAT_DNAT {
				r.nat.kind = "dnat"
			}
		case minAttr:
			r.nat.ports.Min = port(ad)
			r.nat.ports.Max = max(r.nat.ports.Max, r.nat.ports.Min)
		case maxAttr:
			r.nat.ports.Max = port(ad)
		case unix.NFTA_NAT_REG_ADDR_MIN:
			if kindAttr != 0 { // the others have no addresses
				r.nat.addrs.First = address(ad)
				r.nat.addrs.Last = r.nat.addrs.First
			}
		case unix.NFTA_NAT_REG_ADDR_MAX:
			if kindAttr != 0 {
				r.nat.addrs.Last = address(ad)
			}
		}
	})
}

// compat reads a match or target of iptables inside of nftables, as iptables-nft
// makes them.
func (r *nftRule) compat(kind string, ad *netlink.AttributeDecoder) {
	var name string
	var info []byte
	nested(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() { // matches have the same numbers
		case unix.NFTA_TARGET_NAME:
			name = ad.String()
		case unix.NFTA_TARGET_INFO:
			info = ad.Bytes()
		}
	})
	if xtPerPacket[name] {
		r.perPacket = append(r.perPacket, name)
	}
	switch {
	case kind == "match":
		r.conditions = r.conditions || name != "comment"
		states, only, ok := xtStates(name, info)
		r.never = r.never || ok && states&stateEstablished == 0
		r.others = r.others || name != "comment" && !(ok && only)
	case name == "REJECT":
		r.verdict = "reject"
	case xtNATKinds[name] != "":
		r.nat.kind = xtNATKinds[name]
		r.nat.addrs, r.nat.ports = xtNATRange(r.family, info)
	}
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

func verdictName(code int32) string {
	switch code {
	case 0: // NF_DROP
		return "drop"
	case 1: // NF_ACCEPT
		return "accept"
	}
	return ""
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
