// SPDX-License-Identifier: Apache-2.0

package probe

// Rules of nftables as package blame follows a packet through them: what their
// expressions compare, in the words of nft(8).

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// nftSet is what the kernel tells of a set besides its elements.
const nftaSetObjType = 15 // NFTA_SET_OBJ_TYPE

type nftSet struct {
	keyLen              int
	anonymous, interval bool
	objects             uint32 // a map to named objects: of which kind
}

// nftPart is a part of a packet that rules compare.
type nftPart struct {
	key    string
	length int // bytes
	mask   []byte
	shift  uint // of the bits that are looked at, to the right
	turned bool // from the kernel's own byte order to the network's, as ranges want it
}

// nftObject is a named quota, limit or the like.
type nftObject struct {
	kind uint32
	name string
}

// ruleReader reads the expressions of one rule.
type ruleReader struct {
	rule   *snapshot.Rule
	family string
	sets   map[string]nftSet
	xt     bool // written by iptables-nft, and printed in its words

	loaded    map[int][]nftPart // register, in units of 4 bytes -> what was put there last
	constants map[int][]byte    // likewise, of values that the rule gives
	network   string            // ip, ip6 or arp, where a condition said so
	transport string            // likewise
	statement []string          // what follows the conditions
	kept      []string          // fields of the packet that it puts into sets
	reject    string            // with what
	setNames  []string          // of sets whose elements are wanted
	from      bool              // the last condition was that a value is at least something
	objects   map[nftObject]nftAttrs

	ruleFacts
}

// untold begins the key of a part that has no name of its own, such as the result of a map.
const untold = "?"

// register is its place in units of 4 bytes: registers of 16 bytes have numbers of their own.
func register(n uint32) int {
	if n < unix.NFT_REG32_00 {
		return int(n-1) * 4
	}
	return int(n - unix.NFT_REG32_00)
}

// nftAttrs are the attributes of an expression by their numbers.
type nftAttrs map[uint16][]byte

func attrsOf(ad *netlink.AttributeDecoder) nftAttrs {
	out := nftAttrs{}
	nested(ad, func(ad *netlink.AttributeDecoder) { out[ad.Type()] = ad.Bytes() })
	return out
}

func (a nftAttrs) number(typ uint16) uint32 {
	switch b := a[typ]; len(b) {
	case 4:
		return binary.BigEndian.Uint32(b)
	case 1:
		return uint32(b[0])
	}
	return 0
}

func (a nftAttrs) long(typ uint16) uint64 {
	if b := a[typ]; len(b) == 8 {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (a nftAttrs) text(typ uint16) string { return cString(append(slices.Clip(a[typ]), 0)) }

// value is the bytes of a NFTA_DATA_VALUE.
func (a nftAttrs) value(typ uint16) (value []byte) {
	decode(a[typ], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_DATA_VALUE {
			value = ad.Bytes()
		}
	})
	return value
}

// read takes one expression.
func (r *ruleReader) read(name string, a nftAttrs) {
	r.sees(name, a)
	load, loads := nftLoads[name]
	switch {
	case r.compares(name, a) || r.does(name, a):
	case name == "exthdr" && a[unix.NFTA_EXTHDR_DREG] == nil:
		r.set(load.part(a).key, a.number(7))
	case loads:
		r.load(a.number(load.register), load.part(a))
	default:
		r.add(snapshot.Match{Text: name})
	}
}

// compares takes an expression that loads a part of a packet, or is a condition.
func (r *ruleReader) compares(name string, a nftAttrs) bool {
	switch name {
	case "meta":
		r.meta(a)
	case "payload":
		r.payload(a)
	case "ct":
		r.ct(a)
	case "fib":
		r.fib(a)
	case "bitwise":
		r.bitwise(a)
	case "byteorder":
		parts := slices.Clone(r.loaded[register(a.number(unix.NFTA_BYTEORDER_SREG))])
		for i := range parts {
			parts[i].turned = native(parts[i].key)
		}
		r.load(a.number(unix.NFTA_BYTEORDER_DREG), parts...)
	case "cmp":
		r.cmp(a)
	case "range":
		r.between(a)
	case "lookup":
		r.lookup(a)
	case "limit":
		r.limited(r.limitWords(a))
	case "quota":
		r.quota(a)
	case "connlimit":
		r.limited(countText(a))
	case "match":
		r.add(xtMatch(r.family, a.text(unix.NFTA_MATCH_NAME), int(a.number(unix.NFTA_MATCH_REV)), a[unix.NFTA_MATCH_INFO])...)
	default:
		return false
	}
	return true
}

// does takes an expression that decides about the packet, changes it or notes it.
func (r *ruleReader) does(name string, a nftAttrs) bool {
	switch name {
	case "immediate":
		r.immediate(a)
	case "counter", "comment":
		if name == "counter" {
			r.rule.Packets = new(a.long(unix.NFTA_COUNTER_PACKETS))
			if !r.xt {
				r.statement = append(r.statement, "counter")
			}
		}
	case "objref":
		r.object(a)
	case "dynset":
		r.dynset(a)
	case "reject":
		r.rule.Verdict, r.reject = "reject", rejectWords(a)
	case "target":
		r.target(a.text(unix.NFTA_TARGET_NAME), a[unix.NFTA_TARGET_INFO])
	case "masq":
		r.translate("masquerade", a, 0, unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX)
	case "redir":
		r.translate("redirect", a, 0, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX)
	case "nat":
		kind := "snat"
		if a.number(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_DNAT {
			kind = "dnat"
		}
		r.translate(kind, a, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
	case "flow_offload":
		r.offloads = true
		r.statement = append(r.statement, "flow add")
	case "queue":
		r.rule.Verdict = "queue"
		r.statement = append(r.statement, name)
	case "log", "notrack", "dup", "fwd", "tproxy", "synproxy":
		r.statement = append(r.statement, name)
	default:
		return false
	}
	return true
}

// nftLoads are expressions that load what nobody can tell from a packet's sample.
var nftLoads = map[string]struct {
	register uint16 // the attribute with it
	part     func(a nftAttrs) nftPart
}{
	"exthdr": {unix.NFTA_EXTHDR_DREG, func(a nftAttrs) nftPart {
		head := map[uint32]string{0: "exthdr", 1: "tcp option", 2: "ip option", 3: "sctp chunk", 4: "dccp option"}[a.number(6)]
		part := nftPart{key: fmt.Sprintf("%s @%d,%d,%d", head, a.number(2), 8*a.number(3), 8*a.number(4)), length: int(a.number(4))}
		if part.key == "tcp option @2,16,16" {
			part.key = "tcp option maxseg size"
		}
		return part
	}},
	"rt": {1, func(a nftAttrs) nftPart {
		return nftPart{key: "rt " + wordOf([]string{"classid", "nexthop", "nexthop", "mtu", "ipsec"}, a.number(2)), length: 4}
	}},
	"socket": {2, func(a nftAttrs) nftPart {
		return nftPart{key: "socket " + wordOf([]string{"transparent", "mark", "wildcard", "cgroupv2"}, a.number(1)), length: 4}
	}},
	"numgen": {1, func(a nftAttrs) nftPart {
		return nftPart{key: fmt.Sprintf("numgen %s mod %d", wordOf([]string{"inc", "random"}, a.number(3)), a.number(2)), length: 4}
	}},
	"hash": {2, func(a nftAttrs) nftPart {
		return nftPart{key: fmt.Sprintf("%s mod %d", wordOf([]string{"jhash", "symhash"}, a.number(7)), a.number(4)), length: 4}
	}},
	"osf":    {1, func(nftAttrs) nftPart { return nftPart{key: "osf name", length: 16} }},
	"tunnel": {2, func(nftAttrs) nftPart { return nftPart{key: "tunnel id", length: 4} }},
	"xfrm":   {1, func(nftAttrs) nftPart { return nftPart{key: "ipsec", length: 4} }},
}

// wordOf is the n-th word, or the number where there is none.
func wordOf(words []string, n uint32) string {
	if n < uint32(len(words)) {
		return words[n]
	}
	return strconv.FormatUint(uint64(n), 10)
}

func (r *ruleReader) load(to uint32, parts ...nftPart) {
	if r.loaded == nil {
		r.loaded = map[int][]nftPart{}
	}
	r.loaded[register(to)] = parts
	delete(r.constants, register(to))
}

// add appends conditions, and puts them into words.
func (r *ruleReader) add(matches ...snapshot.Match) {
	for _, m := range matches {
		if m.Text == "" {
			m.Text = r.words(m)
		}
		r.rule.Matches = append(r.rule.Matches, m)
	}
}

// limited appends a condition that depends on what was before.
func (r *ruleReader) limited(text string) {
	r.add(snapshot.Match{Text: text})
}

// nftMeta are the keys of meta, by their numbers.
var nftMeta = map[uint32]nftPart{
	unix.NFT_META_LEN: {key: "meta length", length: 4}, unix.NFT_META_PROTOCOL: {key: "meta protocol", length: 2}, unix.NFT_META_MARK: {key: "meta mark", length: 4},
	unix.NFT_META_IIF: {key: "iif", length: 4}, unix.NFT_META_OIF: {key: "oif", length: 4}, unix.NFT_META_IIFNAME: {key: "iifname", length: 16}, unix.NFT_META_OIFNAME: {key: "oifname", length: 16},
	unix.NFT_META_NFPROTO: {key: "meta nfproto", length: 1}, unix.NFT_META_L4PROTO: {key: "meta l4proto", length: 1}, unix.NFT_META_PKTTYPE: {key: "meta pkttype", length: 1},
	unix.NFT_META_SKUID: {key: "meta skuid", length: 4}, unix.NFT_META_SKGID: {key: "meta skgid", length: 4}, unix.NFT_META_IIFTYPE: {key: "meta iiftype", length: 2}, unix.NFT_META_CPU: {key: "meta cpu", length: 4},
	unix.NFT_META_PRIORITY: {key: "meta priority", length: 4}, unix.NFT_META_CGROUP: {key: "meta cgroup", length: 4},
	unix.NFT_META_OIFTYPE: {key: "meta oiftype", length: 2}, unix.NFT_META_RTCLASSID: {key: "meta rtclassid", length: 4}, unix.NFT_META_SECMARK: {key: "meta secmark", length: 4},
	unix.NFT_META_BRI_IIFNAME: {key: "meta ibrname", length: 16}, unix.NFT_META_BRI_OIFNAME: {key: "meta obrname", length: 16},
	unix.NFT_META_IIFGROUP: {key: "iifgroup", length: 4}, unix.NFT_META_OIFGROUP: {key: "oifgroup", length: 4}, unix.NFT_META_PRANDOM: {key: "meta random", length: 4},
	25: {key: "meta ipsec", length: 1}, 26: {key: "meta iifkind", length: 16}, 27: {key: "meta oifkind", length: 16}, 28: {key: "meta ibrpvid", length: 2}, 29: {key: "meta ibrvproto", length: 2},
	12: {key: "meta nftrace", length: 1}, 30: {key: "meta time", length: 8}, 31: {key: "meta day", length: 1}, 32: {key: "meta hour", length: 4}, 33: {key: "meta sdif", length: 4}, 34: {key: "meta sdifname", length: 16},
}

// set writes that a field is given the value of a register.
func (r *ruleReader) set(key string, from uint32) {
	text := key + " set"
	if value, ok := r.constants[register(from)]; ok {
		text += " " + spelt(key, valueWord(key, value))
	} else if parts := r.loaded[register(from)]; len(parts) == 1 && !strings.HasPrefix(parts[0].key, untold) && parts[0].mask == nil {
		text += " " + parts[0].key
	}
	r.statement = append(r.statement, text)
}

func (r *ruleReader) meta(a nftAttrs) {
	key := a.number(unix.NFTA_META_KEY)
	part, ok := nftMeta[key]
	if !ok {
		part = nftPart{key: fmt.Sprintf("meta %d", key), length: 4}
	}
	if _, sets := a[unix.NFTA_META_SREG]; sets {
		r.set(part.key, a.number(unix.NFTA_META_SREG))
		return
	}
	r.load(a.number(unix.NFTA_META_DREG), part)
}

// headers are the fields of headers: where they begin, and how long they are.
type headerField struct {
	offset, length int
	key            string
}

var (
	ipv4Fields = []headerField{{1, 1, "ip tos"}, {2, 2, "ip length"}, {4, 2, "ip id"}, {6, 2, "ip frag-off"}, {8, 1, "ip ttl"}, {9, 1, "ip protocol"}, {10, 2, "ip checksum"}, {12, 4, "ip saddr"}, {16, 4, "ip daddr"}}
	ipv6Fields = []headerField{{4, 2, "ip6 length"}, {6, 1, "ip6 nexthdr"}, {7, 1, "ip6 hoplimit"}, {8, 16, "ip6 saddr"}, {24, 16, "ip6 daddr"}}
	linkFields = []headerField{{0, 6, "ether daddr"}, {6, 6, "ether saddr"}, {12, 2, "ether type"}, {14, 2, "vlan id"}, {16, 2, "vlan type"}}
	arpFields  = []headerField{{0, 2, "arp htype"}, {2, 2, "arp ptype"}, {4, 1, "arp hlen"}, {5, 1, "arp plen"}, {6, 2, "arp operation"},
		{8, 6, "arp saddr ether"}, {14, 4, "arp saddr ip"}, {18, 6, "arp daddr ether"}, {24, 4, "arp daddr ip"}}
	icmpFields = []headerField{{0, 1, "type"}, {1, 1, "code"}}
	portFields = []headerField{{0, 2, "sport"}, {2, 2, "dport"}}

	// transportFields are those of each protocol; others may have ports.
	transportFields = map[string][]headerField{
		"icmp": icmpFields, "icmpv6": icmpFields,
		"tcp": append(slices.Clip(portFields), headerField{4, 4, "sequence"}, headerField{8, 4, "ackseq"}, headerField{13, 1, "flags"}, headerField{14, 2, "window"}, headerField{16, 2, "checksum"}),
		"udp": append(slices.Clip(portFields), headerField{4, 2, "length"}, headerField{6, 2, "checksum"}),
		"esp": {{0, 4, "spi"}, {4, 4, "sequence"}}, "ah": {{4, 4, "spi"}}, "gre": {{0, 2, "flags"}, {2, 2, "protocol"}},
	}
)

func (r *ruleReader) payload(a nftAttrs) {
	base, offset, length := a.number(unix.NFTA_PAYLOAD_BASE), int(a.number(unix.NFTA_PAYLOAD_OFFSET)), int(a.number(unix.NFTA_PAYLOAD_LEN))
	fields, prefix, name := r.header(base, offset, length)
	parts := partsOf(fields, prefix, name, offset, length)
	if _, sets := a[unix.NFTA_PAYLOAD_SREG]; !sets {
		r.load(a.number(unix.NFTA_PAYLOAD_DREG), parts...)
		return
	}
	ttl := 8
	if r.family == "ip6" || r.network == "ip6" {
		ttl = 7
	}
	if base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset <= ttl && offset+length > ttl {
		r.rule.Sets = append(r.rule.Sets, "ttl")
	}
	if offset == ttl-1 && length == 2 || offset == ttl && length == 2 { // with its neighbour, as checksums want it
		parts = partsOf(fields, prefix, name, ttl, 1)
	}
	r.set(parts[0].key, a.number(unix.NFTA_PAYLOAD_SREG))
}

// header is the fields of a header, what their names begin with, and what others of it are called by.
func (r *ruleReader) header(base uint32, offset, length int) (fields []headerField, prefix, name string) {
	switch base {
	case unix.NFT_PAYLOAD_LL_HEADER:
		return linkFields, "", "@ll"
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		switch {
		case r.family == "arp" || r.network == "arp":
			return arpFields, "", "@nh"
		case r.family == "ip6" || r.network == "ip6" || r.network == "" && r.family != "ip" && (length > 8 || offset >= 20):
			return ipv6Fields, "", "@nh"
		}
		return ipv4Fields, "", "@nh"
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		if r.transport == "" {
			return portFields, "th ", "@th"
		}
		if fields, ok := transportFields[r.transport]; ok {
			return fields, r.transport + " ", "@th"
		}
		return portFields, r.transport + " ", "@th"
	}
	return nil, "", "@ll"
}

// partsOf are the fields in a stretch of a header; a prefix of an address may be all that
// is looked at of it.
func partsOf(fields []headerField, prefix, name string, offset, length int) (out []nftPart) {
	for at := offset; at < offset+length; {
		i := slices.IndexFunc(fields, func(f headerField) bool { return f.offset == at })
		left := offset + length - at
		if i < 0 || fields[i].length > left && !isAddress(fields[i].key) {
			return []nftPart{{key: fmt.Sprintf("%s,%d,%d", name, offset*8, length*8), length: length}} // as nft(8) writes it
		}
		size := min(fields[i].length, left)
		out = append(out, nftPart{key: prefix + fields[i].key, length: size})
		at += size
	}
	return out
}

// nftCT are the keys of ct, by their numbers.
var nftCT = map[uint32]nftPart{
	unix.NFT_CT_STATE: {key: "ct state", length: 4}, unix.NFT_CT_DIRECTION: {key: "ct direction", length: 1}, unix.NFT_CT_STATUS: {key: "ct status", length: 4}, unix.NFT_CT_MARK: {key: "ct mark", length: 4},
	unix.NFT_CT_SECMARK: {key: "ct secmark", length: 4}, unix.NFT_CT_EXPIRATION: {key: "ct expiration", length: 4}, unix.NFT_CT_HELPER: {key: "ct helper", length: 16}, unix.NFT_CT_L3PROTOCOL: {key: "ct l3proto", length: 1},
	unix.NFT_CT_SRC: {key: "ct saddr", length: 16}, unix.NFT_CT_DST: {key: "ct daddr", length: 16}, unix.NFT_CT_PROTOCOL: {key: "ct protocol", length: 1}, unix.NFT_CT_PROTO_SRC: {key: "ct proto-src", length: 2}, unix.NFT_CT_PROTO_DST: {key: "ct proto-dst", length: 2},
	unix.NFT_CT_LABELS: {key: "ct label", length: 16}, unix.NFT_CT_PKTS: {key: "ct packets", length: 8}, unix.NFT_CT_BYTES: {key: "ct bytes", length: 8}, unix.NFT_CT_AVGPKT: {key: "ct avgpkt", length: 8}, unix.NFT_CT_ZONE: {key: "ct zone", length: 2},
	18: {key: "ct event", length: 4}, 19: {key: "ct ip saddr", length: 4}, 20: {key: "ct ip daddr", length: 4}, 21: {key: "ct ip6 saddr", length: 16}, 22: {key: "ct ip6 daddr", length: 16}, 23: {key: "ct id", length: 4},
}

func (r *ruleReader) ct(a nftAttrs) {
	key := a.number(unix.NFTA_CT_KEY)
	part, ok := nftCT[key]
	if !ok {
		part = nftPart{key: fmt.Sprintf("ct %d", key), length: 4}
	}
	if _, sets := a[unix.NFTA_CT_SREG]; sets {
		r.set(part.key, a.number(unix.NFTA_CT_SREG))
		return
	}
	if way, ok := a[unix.NFTA_CT_DIRECTION]; ok && len(way) == 1 { // "ct original packets"
		part.key = "ct " + wordOf([]string{"original", "reply"}, uint32(way[0])) + strings.TrimPrefix(part.key, "ct")
	}
	r.load(a.number(unix.NFTA_CT_DREG), part)
}

func (r *ruleReader) fib(a nftAttrs) {
	const result = 2 // NFTA_FIB_RESULT
	var by []string
	for bit, word := range []string{"saddr", "daddr", "mark", "iif", "oif"} { // NFTA_FIB_FLAGS
		if a.number(3)&(1<<bit) != 0 {
			by = append(by, word)
		}
	}
	what := wordOf([]string{"", "oif", "oifname", "type"}, a.number(result))
	if a.number(3)&0x20 != 0 { // NFTA_FIB_F_PRESENT: whether there is one
		what = "exists " + what
	}
	r.load(a.number(1), nftPart{key: "fib " + strings.Join(by, " . ") + " " + what, length: 4})
}

func (r *ruleReader) bitwise(a nftAttrs) {
	mask, xor := a.value(unix.NFTA_BITWISE_MASK), a.value(unix.NFTA_BITWISE_XOR)
	parts := r.loaded[register(a.number(unix.NFTA_BITWISE_SREG))]
	zero := !slices.ContainsFunc(xor, func(b byte) bool { return b != 0 })
	if len(parts) != 1 || len(mask) < parts[0].length || !zero {
		r.load(a.number(unix.NFTA_BITWISE_DREG), nftPart{key: untold + "bitwise", length: 4})
		return
	}
	part := parts[0].masked(mask)
	r.load(a.number(unix.NFTA_BITWISE_DREG), part)
}

// masked is the part of a field that a mask leaves, by the name that it has of its own.
func (p nftPart) masked(mask []byte) nftPart {
	p.mask = mask
	n := numberOf("", mask[:p.length])
	switch {
	case p.key == "ip tos" && n == 0xfc:
		p.key, p.mask, p.shift = "ip dscp", nil, 2
	case p.key == "ip tos" && n == 0x03:
		p.key, p.mask = "ip ecn", nil
	case p.key == "vlan id" && n == 0x0fff:
		p.mask = nil
	case p.key == "vlan id":
		p.key = "@ll,112,16"
	}
	return p
}

// cmp: nft(8) writes a range as two comparisons.
func (r *ruleReader) cmp(a nftAttrs) {
	op, data := a.number(unix.NFTA_CMP_OP), a.value(unix.NFTA_CMP_DATA)
	parts := r.loaded[register(a.number(unix.NFTA_CMP_SREG))]
	if len(parts) == 0 {
		r.limited("an unknown condition")
		return
	}
	if len(parts) > 1 && op != unix.NFT_CMP_EQ {
		r.limited("conditions on " + parts[0].key)
		return
	}
	for _, p := range parts {
		size := min(p.length, len(data))
		value := p.inOrder(data[:size])
		if p.shift > 0 && size == 1 {
			value = []byte{value[0] >> p.shift}
		}
		r.one(p, op, value)
		data = data[size:]
	}
}

// inOrder is a value in the order that the field has by itself.
func (p nftPart) inOrder(data []byte) []byte {
	if !p.turned {
		return data
	}
	data = slices.Clone(data)
	slices.Reverse(data)
	return data
}

// one adds the condition on one field.
func (r *ruleReader) one(p nftPart, op uint32, data []byte) {
	if hidden, ok := strings.CutPrefix(p.key, untold); ok {
		r.limited(hidden)
		return
	}
	sign := map[uint32]string{unix.NFT_CMP_EQ: "==", unix.NFT_CMP_NEQ: "!=", unix.NFT_CMP_LT: "<", unix.NFT_CMP_LTE: "<=", unix.NFT_CMP_GT: ">", unix.NFT_CMP_GTE: ">="}[op]
	ordered := op != unix.NFT_CMP_EQ && op != unix.NFT_CMP_NEQ
	masked := p.key
	if p.mask != nil {
		masked += " & " + valueWord(p.key, p.mask[:p.length])
	}
	if p.mask != nil && isAddress(p.key) && ordered {
		r.limited(masked + " " + sign + " " + valueWord(p.key, data))
		return
	}
	m := snapshot.Match{Keys: []string{p.key}, Not: op == unix.NFT_CMP_NEQ}
	switch p.key {
	case "ct state", "ct status":
		m.Values, m.Not = ctWords(p, op, data)
	case "iifname", "oifname", "meta ibrname", "meta obrname", "meta sdifname":
		m.Values = []string{deviceWord(data)}
	default:
		m.Values, m.Mask = r.values(p, op, data)
		if ordered || p.mask != nil && p.length > 4 && !isAddress(p.key) { // a longer mask than Match.Mask: nobody knows these fields of a packet
			m.Text = masked + " " + sign + " " + valueWord(p.key, data)
		}
		m = r.joined(op, m)
	}
	r.learn(p.key, op, m)
	r.add(m)
}

// joined makes one of "at least this" and "at most that".
func (r *ruleReader) joined(op uint32, m snapshot.Match) snapshot.Match {
	last := len(r.rule.Matches) - 1
	if op == unix.NFT_CMP_LTE && r.from && last >= 0 && slices.Equal(r.rule.Matches[last].Keys, m.Keys) && r.rule.Matches[last].Mask == m.Mask {
		from, _, _ := strings.Cut(r.rule.Matches[last].Values[0], "-")
		_, to, _ := strings.Cut(m.Values[0], "-")
		r.rule.Matches = r.rule.Matches[:last]
		m.Values, m.Text = []string{from + "-" + to}, ""
		if number, err := strconv.ParseUint(from, 10, 64); err == nil && strings.HasSuffix(m.Keys[0], "mark") {
			last, _ := strconv.ParseUint(to, 10, 64)
			m.Values[0] = fmt.Sprintf("0x%x-0x%x", number, last)
		}
	}
	r.from = op == unix.NFT_CMP_GTE
	return m
}

// learn notes which header follows.
func (r *ruleReader) learn(key string, op uint32, m snapshot.Match) {
	if op != unix.NFT_CMP_EQ || len(m.Values) != 1 {
		return
	}
	switch v := m.Values[0]; key {
	case "meta nfproto", "meta protocol", "ether type":
		r.network = map[string]string{"ipv4": "ip", "ip": "ip", "ipv6": "ip6", "ip6": "ip6", "arp": "arp"}[v]
	case "meta l4proto", "ip protocol", "ip6 nexthdr":
		r.transport = map[string]string{"tcp": "tcp", "udp": "udp", "icmp": "icmp", "icmpv6": "icmpv6", "ipv6-icmp": "icmpv6", "sctp": "sctp", "dccp": "dccp", "udplite": "udplite", "esp": "esp", "ah": "ah", "gre": "gre"}[v]
	}
}

// values are the alternatives that a comparison allows.
func (r *ruleReader) values(p nftPart, op uint32, data []byte) (values []string, mask uint32) {
	top := uint64(math.MaxUint64)
	if p.length < 8 {
		top = 1<<(8*p.length) - 1
	}
	address := isAddress(p.key)
	if !address {
		mask = p.matchMask()
	}
	switch op {
	case unix.NFT_CMP_EQ, unix.NFT_CMP_NEQ:
		if address {
			return []string{prefixWord(p, data)}, 0
		}
		return []string{valueWord(p.key, data)}, mask
	case unix.NFT_CMP_GTE, unix.NFT_CMP_LTE:
		if address && p.mask == nil && len(data) == fullLength(p.key) {
			low, high := make([]byte, len(data)), slices.Repeat([]byte{255}, len(data))
			if op == unix.NFT_CMP_GTE {
				low = data
			} else {
				high = data
			}
			return []string{addrWord(low) + "-" + addrWord(high)}, 0
		}
	}
	n := numberOf(p.key, data)
	switch op {
	case unix.NFT_CMP_LT:
		return []string{fmt.Sprintf("0-%d", max(n, 1)-1)}, mask
	case unix.NFT_CMP_LTE:
		return []string{fmt.Sprintf("0-%d", n)}, mask
	case unix.NFT_CMP_GT:
		return []string{fmt.Sprintf("%d-%d", n+1, top)}, mask
	case unix.NFT_CMP_GTE:
		return []string{fmt.Sprintf("%d-%d", n, top)}, mask
	}
	return nil, 0
}

// matchMask is the part's mask as a Match has it, 0 for none.
func (p nftPart) matchMask() uint32 {
	if p.mask == nil || p.length > 4 {
		return 0
	}
	return uint32(numberOf(p.key, p.mask[:p.length]))
}

func fullLength(key string) int {
	if strings.HasPrefix(key, "ip6") {
		return 16
	}
	return 4
}

// between is a range in one comparison.
func (r *ruleReader) between(a nftAttrs) {
	from, to := a.value(unix.NFTA_RANGE_FROM_DATA), a.value(unix.NFTA_RANGE_TO_DATA)
	parts := r.loaded[register(a.number(unix.NFTA_RANGE_SREG))]
	if len(parts) != 1 || strings.HasPrefix(parts[0].key, untold) || len(from) == 0 || parts[0].mask != nil && (parts[0].length > 4 || isAddress(parts[0].key)) {
		r.limited("a range")
		return
	}
	key := parts[0].key
	r.add(snapshot.Match{Keys: []string{key}, Mask: parts[0].matchMask(), Not: a.number(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_NEQ, Values: []string{rangeWord(key, parts[0].inOrder(from), parts[0].inOrder(to))}})
}

// keysAt are the fields that were put into a register and those after it, of length bytes in all.
func (r *ruleReader) keysAt(at uint32, length int) (keys []string) {
	for place := register(at); length > 0; {
		parts := r.loaded[place]
		if len(parts) == 0 {
			return nil
		}
		for _, p := range parts {
			if strings.HasPrefix(p.key, untold) || p.mask != nil {
				return nil
			}
			keys = append(keys, p.key)
			units := (p.length + 3) / 4
			place += units
			length -= units * 4
		}
	}
	return keys
}

func (r *ruleReader) lookup(a nftAttrs) {
	name := a.text(unix.NFTA_LOOKUP_SET)
	set, ok := r.sets[name]
	keys := r.keysAt(a.number(unix.NFTA_LOOKUP_SREG), set.keyLen)
	if !ok {
		keys = nil
	}
	r.setNames = append(r.setNames, name)
	dreg, maps := a[unix.NFTA_LOOKUP_DREG]
	verdicts := maps && binary.BigEndian.Uint32(dreg) == unix.NFT_REG_VERDICT
	inverted := a.number(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0
	if states := slices.Equal(keys, []string{"ct state"}); states || verdicts {
		r.lookups = append(r.lookups, nftLookup{set: name, states: states, inverted: inverted})
	}
	switch {
	case verdicts:
		r.rule.Map, r.rule.MapKeys = name, keys
		r.statement = append(r.statement, strings.Join(keys, " . ")+" vmap @"+name)
	case maps:
		key := untold + "map @" + name
		if keys != nil {
			key = untold + strings.Join(keys, " . ") + " map @" + name
		}
		r.load(binary.BigEndian.Uint32(dreg), nftPart{key: key, length: 4})
	default:
		m := snapshot.Match{Keys: keys, Set: name, Not: inverted}
		if keys == nil {
			m.Text = "in set @" + name
		}
		r.add(m)
	}
}

// immediate: a verdict, or a constant for a register that a translation uses.
func (r *ruleReader) immediate(a nftAttrs) {
	if value := a.value(unix.NFTA_IMMEDIATE_DATA); value != nil {
		if r.constants == nil {
			r.constants = map[int][]byte{}
		}
		r.constants[register(a.number(unix.NFTA_IMMEDIATE_DREG))] = value
	}
	decode(a[unix.NFTA_IMMEDIATE_DATA], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_DATA_VERDICT {
			v := verdictOf(ad)
			r.rule.Verdict, r.rule.Chain = verdictWord(v.code), v.chain
		}
	})
}

// rejectWords is what a rejected packet's sender is told, where it is not what nft(8) has by itself.
func rejectWords(a nftAttrs) string {
	const kind, code = 1, 2
	of := map[uint32][]string{0: {"net-unreachable", "host-unreachable", "prot-unreachable", "port-unreachable", 9: "net-prohibited", 10: "host-prohibited", 13: "admin-prohibited"},
		2: {"no-route", "", "host-unreachable", "admin-prohibited"}}
	var n uint32
	if v := a[code]; len(v) == 1 {
		n = uint32(v[0])
	}
	switch k := a.number(kind); {
	case k == 1:
		return " with tcp reset"
	case n < uint32(len(of[k])) && of[k][n] != "":
		return " with " + map[uint32]string{0: "icmp", 2: "icmpx"}[k] + " " + of[k][n]
	}
	return ""
}

// translate reads nat, masq and redir, which number their attributes differently; the last of the
// addresses follows their first, addrAttr 0 is none.
func (r *ruleReader) translate(kind string, a nftAttrs, addrAttr, minAttr, maxAttr uint16) {
	r.nat.kind = kind
	constant := func(attr uint16) []byte { // nil: from the packet or a map, or there is none
		if _, ok := a[attr]; !ok || attr == 0 {
			return nil
		}
		return r.constants[register(a.number(attr))]
	}
	address := func(attr uint16) netip.Addr {
		addr, _ := netip.AddrFromSlice(constant(attr))
		return addr
	}
	port := func(attr uint16) (n uint16) {
		if b := constant(attr); len(b) >= 2 {
			n = binary.BigEndian.Uint16(b)
		}
		return n
	}
	if addrAttr != 0 {
		r.nat.addrs.First = address(addrAttr)
		r.nat.addrs.Last = r.nat.addrs.First
		if _, ok := a[addrAttr+1]; ok {
			r.nat.addrs.Last = address(addrAttr + 1)
		}
	}
	r.nat.ports.Min = port(minAttr)
	r.nat.ports.Max = r.nat.ports.Min
	if _, ok := a[maxAttr]; ok {
		r.nat.ports.Max = port(maxAttr)
	}
	var mapped string // what the target is looked up by, where a map has it
	if _, ok := a[addrAttr]; ok && addrAttr != 0 && constant(addrAttr) == nil {
		if parts := r.loaded[register(a.number(addrAttr))]; len(parts) == 1 {
			mapped = strings.TrimPrefix(parts[0].key, untold)
		}
	}
	flags := a.number(map[string]uint16{"masquerade": unix.NFTA_MASQ_FLAGS, "redirect": unix.NFTA_REDIR_FLAGS, "snat": unix.NFTA_NAT_FLAGS, "dnat": unix.NFTA_NAT_FLAGS}[kind])
	if r.xt {
		r.statement = append(r.statement, xtTargetWords(kind, r.nat.addrs, r.nat.ports, flags))
		return
	}
	r.statement = append(r.statement, r.translationWords(mapped, flags))
}

func verdictWord(code int32) string {
	return map[int32]string{0: "drop", 1: "accept", 3: "queue", unix.NFT_JUMP: "jump", unix.NFT_GOTO: "goto", unix.NFT_RETURN: "return", unix.NFT_CONTINUE: "continue"}[code]
}

func (r *ruleReader) quota(a nftAttrs) {
	const bytes, flags, consumed = 1, 2, 4
	r.used("quota", "", a.long(bytes), a.long(consumed), a.number(flags)&1 != 0)
}

// used adds a condition on a quota: over says that it holds once that is used up.
func (r *ruleReader) used(what, name string, limit, used uint64, over bool) {
	m := snapshot.Match{Text: what}
	if name != "" {
		m.Text = what + " name " + strconv.Quote(name)
	} else if over {
		m.Text = fmt.Sprintf("%s over %d bytes", what, limit)
	} else {
		m.Text = fmt.Sprintf("%s %d bytes", what, limit)
	}
	if name != "" {
		what += " " + name
	}
	r.rule.State = append(r.rule.State, fmt.Sprintf("%s: %d of %d bytes used", what, min(used, limit), limit))
	r.add(m)
}

func (r *ruleReader) object(a nftAttrs) {
	const typ, name, setKey, setName = 1, 2, 3, 4 // NFTA_OBJREF_*
	kind, named := a.number(typ), strconv.Quote(a.text(name))
	if set, ok := r.sets[a.text(setName)]; ok {
		kind, named = set.objects, strings.Join(r.keysAt(a.number(setKey), set.keyLen), " . ")+" map @"+a.text(setName)
	}
	word := objectKinds[kind]
	if o, ok := r.objects[nftObject{kind, a.text(name)}]; ok && word == "quota" {
		r.used("quota", a.text(name), o.long(1), o.long(4), o.number(2)&1 != 0)
		return
	} else if ok && word == "limit" {
		r.rule.State = append(r.rule.State, fmt.Sprintf("limit %s: %s", a.text(name), limitText(o)))
	}
	text := word + " name " + named
	if word == "counter" || word == "ct helper" {
		r.statement = append(r.statement, text)
		return
	}
	r.limited(text)
}

// objectKinds are NFT_OBJECT_* in nft's words.
var objectKinds = map[uint32]string{1: "counter", 2: "quota", 3: "ct helper", 4: "limit", 5: "ct count", 8: "synproxy"}

// dynset puts fields of the packet into a set. It is a condition if each element has a limit of some kind.
func (r *ruleReader) dynset(a nftAttrs) {
	const name, op, key, timeout, expr, exprs = 1, 3, 4, 6, 7, 10
	set := a.text(name)
	keys := r.keysAt(a.number(key), r.sets[set].keyLen)
	r.kept = append(r.kept, keys...)
	words := []string{strings.Join(keys, " . ")}
	if words[0] == "" {
		words[0] = "..."
	}
	if ms := a.long(timeout); ms > 0 {
		words = append(words, fmt.Sprintf("timeout %ds", ms/1000))
	}
	limits := false
	take := func(list []byte) {
		text, limit := elementWords(list)
		words, limits = append(words, text), limits || limit
	}
	if one, ok := a[expr]; ok {
		take(one)
	} else if several, ok := a[exprs]; ok {
		decode(several, func(ad *netlink.AttributeDecoder) { take(ad.Bytes()) })
	}
	text := map[uint32]string{0: "add", 1: "update", 2: "delete"}[a.number(op)] + " @" + set + " { " + strings.Join(words, " ") + " }"
	if limits {
		r.limited(text)
		return
	}
	r.statement = append(r.statement, text)
}

// elementWords writes what a set keeps for each of its elements; limit: and what may not hold.
func elementWords(expression []byte) (text string, limit bool) {
	decode(expression, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_EXPR_NAME {
			text = ad.String()
			return
		}
		switch a := attrsOf(ad); text {
		case "limit":
			text, limit = limitText(a), true
		case "connlimit":
			text, limit = countText(a), true
		case "quota":
			const bytes, flags = 1, 2
			text, limit = fmt.Sprintf("quota %s%d bytes", overText(a.number(flags)), a.long(bytes)), true
		}
	})
	return text, limit
}

// countText writes "ct count over 5".
func countText(a nftAttrs) string {
	return "ct count " + overText(a.number(2)) + strconv.FormatUint(uint64(a.number(1)), 10)
}

func (r *ruleReader) target(name string, info []byte) {
	if kind := xtNATKinds[name]; kind != "" {
		r.nat.kind = kind
		r.nat.addrs, r.nat.ports = xtNATRange(r.family, info)
		r.statement = append(r.statement, xtTargetWords(kind, r.nat.addrs, r.nat.ports, 0))
		return
	}
	switch name {
	case "REJECT":
		r.rule.Verdict = "reject"
	case "NFQUEUE":
		r.rule.Verdict = "queue"
	case "TTL", "HL":
		r.rule.Sets = append(r.rule.Sets, "ttl")
	}
	r.statement = append(r.statement, "-j "+name)
}

func overText(flags uint32) string {
	if flags&1 != 0 {
		return "over "
	}
	return ""
}

func (r *ruleReader) limitWords(a nftAttrs) string {
	if !r.xt {
		return limitText(a)
	}
	const rate, unit = 1, 2
	return fmt.Sprintf("-m limit --limit %d/%s", a.long(rate), map[uint64]string{1: "sec", 60: "min", 3600: "hour", 86400: "day"}[a.long(unit)])
}

// limitText writes "limit rate over 10/second burst 5 packets".
func limitText(a nftAttrs) string {
	const rate, unit, burst, kind, flags, usual = 1, 2, 3, 4, 5, 5
	per := map[uint64]string{1: "second", 60: "minute", 3600: "hour", 86400: "day", 604800: "week"}[a.long(unit)]
	amount := strconv.FormatUint(a.long(rate), 10)
	if a.number(kind) == 1 {
		amount += " bytes"
	}
	text := "limit rate " + overText(a.number(flags)) + amount + "/" + per
	if n := a.number(burst); n != usual && a.number(kind) == 0 {
		text += " burst " + plural.Count(n, "packet")
	}
	return text
}

// readRule reads a rule of a chain.
func (set *nftRuleset) readRule(i int, rule *snapshot.Rule, expressions []byte) *ruleReader {
	table := nftKey{set.keys[i].family, set.keys[i].table, ""}
	r := &ruleReader{rule: rule, family: set.out[i].Family, sets: set.sets[table], objects: set.objects[table], xt: set.xt[table]}
	err := decode(expressions, func(ad *netlink.AttributeDecoder) {
		var name string
		nested(ad, func(ad *netlink.AttributeDecoder) {
			switch ad.Type() {
			case unix.NFTA_EXPR_NAME:
				name = ad.String()
			case unix.NFTA_EXPR_DATA:
				r.read(name, attrsOf(ad))
				name = ""
			}
		})
		if name != "" { // it has no attributes
			r.read(name, nftAttrs{})
		}
	})
	if err != nil {
		r.limited("a condition that could not be read")
	}
	rule.Text = r.text(set.out[i].Name)
	return r
}

// isIPTables says whether a chain is a built-in one of iptables-nft.
func isIPTables(c snapshot.Chain) bool {
	return (c.Family == "ip" || c.Family == "ip6") && c.Hook != "" && c.Name == strings.ToUpper(c.Hook) &&
		slices.Contains([]string{"filter", "nat", "mangle", "raw", "security"}, c.Table)
}

func (set *nftRuleset) addSet(family uint8, attrs []byte) error {
	var table, name string
	var s nftSet
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NFTA_SET_TABLE:
			table = ad.String()
		case unix.NFTA_SET_NAME:
			name = ad.String()
		case unix.NFTA_SET_FLAGS:
			s.anonymous = ad.Uint32()&unix.NFT_SET_ANONYMOUS != 0
			s.interval = ad.Uint32()&unix.NFT_SET_INTERVAL != 0
		case unix.NFTA_SET_KEY_LEN:
			s.keyLen = int(ad.Uint32())
		case nftaSetObjType:
			s.objects = ad.Uint32()
		}
	})
	key := nftKey{family, table, ""}
	if set.sets[key] == nil {
		set.sets[key] = map[string]nftSet{}
	}
	set.sets[key][name] = s
	return err
}

func (set *nftRuleset) addObject(family uint8, attrs []byte) error {
	const objTable, objName, objType, objData = 1, 2, 3, 4
	var table string
	var o nftObject
	var data nftAttrs
	err := decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case objTable:
			table = ad.String()
		case objName:
			o.name = ad.String()
		case objType:
			o.kind = ad.Uint32()
		case objData:
			data = attrsOf(ad)
		}
	})
	key := nftKey{family, table, ""}
	if set.objects[key] == nil {
		set.objects[key] = map[nftObject]nftAttrs{}
	}
	set.objects[key][o] = data
	return err
}

// keepRules gives the chains their rules.
func (set *nftRuleset) keepRules(all bool) {
	walks := make([][]snapshot.Rule, len(set.out))
	for i, rules := range set.walks {
		walks[i] = rules
	}
	keepWalks(set.out, walks, set.chain, all)
}

// keepWalks gives chains their rules where a packet may be dropped in them, or in those that
// lead to them; with all, wherever they are. find is the index of the chain that a jump names.
func keepWalks(chains []snapshot.Chain, walks [][]snapshot.Rule, find func(beside int, name string) int, all bool) {
	drops := make([]int, len(chains)) // 0 unknown, 1 being looked at or no, 2 yes
	var mayDrop func(i int) bool
	mayDrop = func(i int) bool {
		if i < 0 || drops[i] != 0 {
			return i >= 0 && drops[i] == 2
		}
		drops[i] = 1
		may := chains[i].Policy == "drop"
		for _, r := range walks[i] {
			to := -1
			if r.Chain != "" {
				to = find(i, r.Chain)
			}
			may = may || r.Verdict == "drop" || r.Verdict == "reject" || r.Map != "" || len(r.Sets) > 0 || mayDrop(to)
		}
		if may {
			drops[i] = 2
		}
		return may
	}
	kept := 0
	seen := make([]bool, len(chains))
	var keep func(i int)
	keep = func(i int) {
		if i < 0 || seen[i] {
			return
		}
		seen[i] = true
		if kept += len(walks[i]); kept > snapshot.MaxRules {
			return
		}
		chains[i].Walk = append([]snapshot.Rule{}, walks[i]...)
		for _, r := range walks[i] {
			if r.Chain != "" {
				keep(find(i, r.Chain))
			}
			if r.Map != "" { // it may lead to any chain of its table
				for j := range chains {
					if chains[j].Hook == "" && chains[j].Family == chains[i].Family && chains[j].Table == chains[i].Table {
						keep(j)
					}
				}
			}
		}
	}
	for i, c := range chains {
		if c.Hook != "" && (all || mayDrop(i)) {
			keep(i)
		}
	}
}
