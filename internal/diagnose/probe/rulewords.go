// SPDX-License-Identifier: Apache-2.0

package probe

// How rules are written: values of fields, and whole rules as nft(8) and iptables(8) print
// them.

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// numberOf is a field that is a number: what the kernel keeps of its own is in its own byte
// order, what is in the packet in the network's.
func numberOf(key string, data []byte) (n uint64) {
	if native(key) {
		data = slices.Clone(data)
		slices.Reverse(data) // little endian, as on every machine that natkit is built for
	}
	if len(data) > 8 {
		return 0
	}
	for _, b := range data {
		n = n<<8 | uint64(b)
	}
	return n
}

// native says whether the kernel keeps a field in its own byte order.
func native(key string) bool {
	switch key {
	case "meta protocol", "meta ibrvproto", "meta random":
		return false
	}
	head, rest, _ := strings.Cut(key, " ")
	switch head {
	case "meta", "fib", "iif", "oif", "iifgroup", "oifgroup", "socket", "numgen", "jhash", "symhash", "rt":
		return true
	case "ct":
		return !strings.HasSuffix(rest, "addr") && !strings.HasPrefix(rest, "proto-")
	}
	return false
}

var protocolWords = map[uint64]string{1: "icmp", 2: "igmp", 6: "tcp", 17: "udp", 33: "dccp", 47: "gre", 50: "esp", 51: "ah", 58: "icmpv6", 132: "sctp", 136: "udplite"}

// valueWord writes a value of a field.
func valueWord(key string, data []byte) string {
	n := numberOf(key, data)
	switch key {
	case "ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr", "arp saddr ip", "arp daddr ip":
		return addrWord(data)
	case "iifname", "oifname":
		return deviceWord(data)
	case "iif", "oif":
		if l, err := net.InterfaceByIndex(int(n)); err == nil {
			return l.Name
		}
	case "ct expiration":
		return (time.Duration(n) * time.Millisecond).String()
	case "ether saddr", "ether daddr", "arp saddr ether", "arp daddr ether":
		return net.HardwareAddr(data).String()
	case "meta nfproto":
		if word, ok := map[uint64]string{unix.NFPROTO_IPV4: "ipv4", unix.NFPROTO_IPV6: "ipv6"}[n]; ok {
			return word
		}
	case "meta protocol", "ether type", "vlan type", "arp ptype":
		if word, ok := map[uint64]string{unix.ETH_P_IP: "ip", unix.ETH_P_IPV6: "ip6", unix.ETH_P_ARP: "arp", unix.ETH_P_8021Q: "8021q", unix.ETH_P_8021AD: "8021ad"}[n]; ok {
			return word
		}
	case "meta l4proto", "ip protocol", "ip6 nexthdr":
		if word, ok := protocolWords[n]; ok {
			return word
		}
	case "ct direction":
		return map[bool]string{true: "reply", false: "original"}[n == 1]
	case "ct state", "ct status":
		words, _ := ctWords(nftPart{key: key, length: 4}, unix.NFT_CMP_EQ, data)
		return strings.Join(words, ",")
	case "meta mark", "ct mark", "socket mark":
		return fmt.Sprintf("0x%x", n)
	case "meta priority": // a class of a queue, as tc(8) writes it
		return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
	case "ct helper", "meta iifkind", "meta oifkind", "osf name":
		return cString(append(slices.Clip(data), 0))
	case "ct l3proto":
		return valueWord("meta nfproto", data)
	case "ct protocol":
		return valueWord("meta l4proto", data)
	}
	if word, ok := addressTypes[n]; ok && strings.HasPrefix(key, "fib ") && strings.HasSuffix(key, " type") {
		return word
	}
	if len(data) > 8 || strings.HasPrefix(key, "@") {
		return fmt.Sprintf("0x%x", data)
	}
	return strconv.FormatUint(n, 10)
}

var addressTypes = map[uint64]string{1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole", 7: "unreachable", 8: "prohibit"}

// ctStateBits are the states by their bits, ctStatusBits the status of an entry.
var (
	ctStateBits  = map[int]string{0: "invalid", 1: "established", 2: "related", 3: "new", 6: "untracked"}
	ctStatusBits = map[int]string{0: "expected", 1: "seen-reply", 2: "assured", 3: "confirmed", 4: "snat", 5: "dnat", 9: "dying"}
)

// ctWords reads a condition on states: nft(8) writes several as bits, of which not none may
// be set.
func ctWords(p nftPart, op uint32, data []byte) (words []string, not bool) {
	if len(data) < 4 {
		return nil, false
	}
	names := ctStateBits
	if p.key == "ct status" {
		names = ctStatusBits
	}
	n, not := binary.NativeEndian.Uint32(data), op == unix.NFT_CMP_NEQ
	if p.mask != nil && n == 0 {
		n, not = binary.NativeEndian.Uint32(p.mask), !not
	}
	return bitWords(n, names), not
}

func bitWords(n uint32, names map[int]string) (words []string) {
	for bit := range 32 {
		if n&(1<<bit) == 0 {
			continue
		}
		word, ok := names[bit]
		if !ok {
			word = fmt.Sprintf("0x%x", 1<<bit)
		}
		words = append(words, word)
	}
	return words
}

// isAddress says whether a field is an IP address, of which a prefix may be asked.
func isAddress(key string) bool {
	return strings.HasSuffix(key, "addr") && !strings.HasPrefix(key, "ether")
}

func addrWord(data []byte) string {
	a, ok := netip.AddrFromSlice(data)
	if !ok {
		return fmt.Sprintf("0x%x", data)
	}
	return a.String()
}

// prefixWord writes an address of which only the first bytes, or what a mask leaves, count.
func prefixWord(p nftPart, data []byte) string {
	full := make([]byte, fullLength(p.key))
	size := len(data) * 8
	copy(full, data)
	if p.mask != nil {
		ones, whole := net.IPMask(p.mask[:min(len(p.mask), len(data))]).Size()
		if whole == 0 {
			return addrWord(full) + "/" + addrWord(p.mask) // no prefix: nothing that can be compared
		}
		size = ones
	}
	if size == len(full)*8 {
		return addrWord(full)
	}
	return addrWord(full) + "/" + strconv.Itoa(size)
}

// rangeWord writes a range, of addresses as a prefix where it is one.
func rangeWord(key string, from, to []byte) string {
	if slices.Equal(from, to) {
		return valueWord(key, from)
	}
	if isAddress(key) {
		if size, ok := prefixLength(from, to); ok {
			return addrWord(from) + "/" + strconv.Itoa(size)
		}
		return addrWord(from) + "-" + addrWord(to)
	}
	if strings.HasSuffix(key, "mark") {
		return valueWord(key, from) + "-" + valueWord(key, to)
	}
	return fmt.Sprintf("%d-%d", numberOf(key, from), numberOf(key, to))
}

// prefixLength is that of a range that is a prefix.
func prefixLength(from, to []byte) (size int, ok bool) {
	if len(from) != len(to) {
		return 0, false
	}
	for i := range from {
		size += bits.LeadingZeros8(from[i] ^ to[i])
		if from[i] == to[i] {
			continue
		}
		for j := i; j < len(from); j++ {
			ones := byte(0xff)
			if j == i {
				ones = 0xff >> bits.LeadingZeros8(from[i]^to[i])
			}
			if from[j]&ones != 0 || to[j]&ones != ones {
				return 0, false
			}
		}
		return size, true
	}
	return size, true
}

// deviceWord is an interface's name; one without an end stands for all that begin so.
func deviceWord(data []byte) string {
	name := cString(append(slices.Clip(data), 0))
	if !slices.Contains(data, 0) && len(data) < 16 {
		return name + "*"
	}
	return name
}

// words writes one condition.
func (r *ruleReader) words(m snapshot.Match) string {
	if r.xt {
		return xtWords(m)
	}
	if slices.Equal(m.Keys, []string{"tcp flags"}) && len(m.Values) == 1 {
		return flagsWords(m)
	}
	text := strings.Join(m.Keys, " . ") + " "
	if by, what, ok := strings.Cut(text, "exists "); ok { // "fib saddr oif missing"
		text = by + what
	}
	if m.Mask != 0 {
		text += fmt.Sprintf("& 0x%x ", m.Mask)
		if len(m.Values) != 1 || !strings.Contains(m.Values[0], "-") { // a range follows by itself
			text += "== "
		}
	}
	if m.Not {
		text = strings.TrimSuffix(text, "== ") + "!= "
	}
	if m.Set != "" {
		return text + "@" + m.Set
	}
	values := slices.Clone(m.Values)
	for i, v := range values {
		values[i] = spelt(m.Keys[0], v)
	}
	if len(values) > 1 && strings.HasPrefix(m.Keys[0], "ct ") {
		return text + strings.Join(values, ",")
	}
	if len(values) > 1 {
		return text + "{ " + strings.Join(values, ", ") + " }"
	}
	return text + strings.Join(values, "")
}

// flagsWords writes a condition on the flags of TCP.
func flagsWords(m snapshot.Match) string {
	want, err := strconv.ParseUint(m.Values[0], 0, 8)
	if err != nil {
		return "tcp flags " + m.Values[0]
	}
	flags := strings.ToLower(tcpFlagWords(uint32(want)))
	mask := strings.ToLower(tcpFlagWords(m.Mask))
	switch {
	case m.Mask != 0 && want == 0 && m.Not:
		return "tcp flags " + mask
	case m.Mask != 0 && want == 0:
		return "tcp flags ! " + mask
	case m.Mask != 0 && m.Not:
		return "tcp flags != " + flags + " / " + mask
	case m.Mask != 0:
		return "tcp flags " + flags + " / " + mask
	case m.Not:
		return "tcp flags != " + flags
	}
	return "tcp flags " + flags
}

// valueNames are what nft(8) calls some values of fields.
var valueNames = map[string]map[string]string{
	"arp operation": {"1": "request", "2": "reply", "3": "rrequest", "4": "rreply", "8": "inrequest", "9": "inreply", "10": "nak"},
	"meta pkttype":  {"0": "host", "1": "broadcast", "2": "multicast", "3": "other"},
	"meta iiftype":  {"1": "ether", "512": "ppp", "772": "loopback", "65534": "none"},
	"meta oiftype":  {"1": "ether", "512": "ppp", "772": "loopback", "65534": "none"},
	"meta day":      {"0": `"Sunday"`, "1": `"Monday"`, "2": `"Tuesday"`, "3": `"Wednesday"`, "4": `"Thursday"`, "5": `"Friday"`, "6": `"Saturday"`},
	"ip ecn":        {"0": "not-ect", "1": "ect1", "2": "ect0", "3": "ce"},
	"ip dscp": {"0": "cs0", "8": "cs1", "16": "cs2", "24": "cs3", "32": "cs4", "40": "cs5", "48": "cs6", "56": "cs7", "10": "af11", "12": "af12", "14": "af13",
		"18": "af21", "20": "af22", "22": "af23", "26": "af31", "28": "af32", "30": "af33", "34": "af41", "36": "af42", "38": "af43", "46": "ef"},
}

// icmpTypes are the types of ICMP messages that nft(8) has names for.
var icmpTypes = map[string]map[string]string{
	"icmp type": {"0": "echo-reply", "3": "destination-unreachable", "4": "source-quench", "5": "redirect", "8": "echo-request", "9": "router-advertisement",
		"10": "router-solicitation", "11": "time-exceeded", "12": "parameter-problem", "13": "timestamp-request", "14": "timestamp-reply"},
	"icmpv6 type": {"1": "destination-unreachable", "2": "packet-too-big", "3": "time-exceeded", "4": "parameter-problem", "128": "echo-request", "129": "echo-reply",
		"133": "nd-router-solicit", "134": "nd-router-advert", "135": "nd-neighbor-solicit", "136": "nd-neighbor-advert", "137": "nd-redirect"},
}

// spelt is a value as nft(8) prints it.
func spelt(key, value string) string {
	switch key {
	case "iifname", "oifname", "iif", "oif", "meta ibrname", "meta obrname", "meta sdifname", "ct helper", "meta iifkind", "meta oifkind", "osf name":
		return strconv.Quote(value)
	}
	for _, names := range []map[string]string{icmpTypes[key], valueNames[key]} {
		if name, ok := names[value]; ok {
			return name
		}
	}
	if strings.HasPrefix(key, "fib ") && strings.Contains(key, " exists ") {
		return map[string]string{"0": "missing", "1": "exists"}[value]
	}
	return value
}

// implied says whether nft(8) added a condition by itself and does not print it: one behind it
// says it.
func (r *ruleReader) implied(m snapshot.Match, behind []snapshot.Match) bool {
	if len(m.Keys) != 1 || len(m.Values) != 1 || m.Not {
		return false
	}
	var heads []string
	switch m.Keys[0] {
	case "meta nfproto", "meta protocol", "ether type":
		heads = map[string][]string{"ipv4": {"ip", "icmp"}, "ip": {"ip", "icmp"}, "ipv6": {"ip6", "icmpv6"}, "ip6": {"ip6", "icmpv6"}, "arp": {"arp"}, "8021q": {"vlan"}}[m.Values[0]]
	case "meta iiftype":
		heads = map[string][]string{"1": {"ether", "vlan"}}[m.Values[0]]
	case "meta l4proto":
		heads = m.Values
	}
	names := slices.Concat(r.rule.MapKeys, r.statement, r.kept)
	for _, m := range behind {
		names = append(names, m.Keys...)
	}
	return slices.ContainsFunc(names, func(name string) bool {
		head, _, _ := strings.Cut(name, " ")
		return slices.Contains(heads, head)
	})
}

// text writes the whole rule, as nft -s list or iptables -S print it.
func (r *ruleReader) text(chain string) string {
	var out []string
	for i, m := range r.rule.Matches {
		if m.Text != "" && (r.xt || !r.implied(m, r.rule.Matches[i+1:])) {
			out = append(out, m.Text)
		}
	}
	out = append(out, r.statement...)
	if r.xt {
		return xtRule(chain, *r.rule, out)
	}
	switch r.rule.Verdict {
	case "", "queue":
	case "jump", "goto":
		out = append(out, r.rule.Verdict+" "+r.rule.Chain)
	default:
		out = append(out, r.rule.Verdict+r.reject)
	}
	return strings.Join(out, " ")
}

// xtRule writes a rule as iptables -S does.
func xtRule(chain string, rule snapshot.Rule, parts []string) string {
	out := append([]string{"-A " + chain}, parts...)
	switch {
	case slices.ContainsFunc(parts, func(p string) bool { return strings.HasPrefix(p, "-j ") }):
	case rule.Verdict == "jump":
		out = append(out, "-j "+rule.Chain)
	case rule.Verdict == "goto":
		out = append(out, "-g "+rule.Chain)
	case rule.Verdict != "":
		out = append(out, "-j "+strings.ToUpper(rule.Verdict))
	}
	return strings.Join(out, " ")
}

// xtWords writes a condition as iptables does.
func xtWords(m snapshot.Match) string {
	if len(m.Keys) == 0 {
		return m.Text
	}
	not := ""
	if m.Not {
		not = "! "
	}
	values := strings.Join(m.Values, ",")
	head, field, _ := strings.Cut(m.Keys[0], " ")
	switch m.Keys[0] {
	case "ip saddr", "ip6 saddr":
		return not + "-s " + withLength(values)
	case "ip daddr", "ip6 daddr":
		return not + "-d " + withLength(values)
	case "iifname":
		return not + "-i " + strings.ReplaceAll(values, "*", "+")
	case "oifname":
		return not + "-o " + strings.ReplaceAll(values, "*", "+")
	case "meta l4proto", "ip protocol":
		return not + "-p " + values
	case "ct state":
		return "-m conntrack " + not + "--ctstate " + strings.ToUpper(values)
	case "meta mark":
		return "-m mark " + not + "--mark " + values + maskWord(m.Mask)
	case "tcp flags":
		want, _ := strconv.ParseUint(values, 0, 8)
		return fmt.Sprintf("-m tcp %s--tcp-flags %s %s", not, tcpFlagWords(m.Mask), tcpFlagWords(uint32(want)))
	}
	if field == "sport" || field == "dport" {
		return fmt.Sprintf("-m %s %s--%s %s", head, not, field, strings.ReplaceAll(values, "-", ":"))
	}
	return "-m " + head + " " + not + field + " " + values
}

// maskWord is the mask of a mark, where not all of it counts.
func maskWord(mask uint32) string {
	if mask == 0 || mask == math.MaxUint32 {
		return ""
	}
	return fmt.Sprintf("/0x%x", mask)
}

func tcpFlagWords(flags uint32) string {
	words := bitWords(flags, map[int]string{0: "FIN", 1: "SYN", 2: "RST", 3: "PSH", 4: "ACK", 5: "URG"})
	if len(words) == 0 {
		return "NONE"
	}
	return strings.Join(words, ",")
}

func withLength(value string) string {
	if strings.Contains(value, "/") || strings.Contains(value, "-") {
		return value
	}
	if strings.Contains(value, ":") {
		return value + "/128"
	}
	return value + "/32"
}

// translationWords writes what a rule translates to as nft(8) does: "dnat to 10.0.0.1:80".
// mapped is the field and the map that the target is looked up by, "" where the rule gives it.
func (r *ruleReader) translationWords(mapped string, flags uint32) string {
	kind, target := r.nat.kind, mapped
	if target == "" {
		target = endWords(r.nat.addrs, r.nat.ports, "-")
	}
	text := kind
	if target != "" {
		if a := r.nat.addrs.First; r.family == "inet" && (kind == "snat" || kind == "dnat") && (a.IsValid() || mapped != "") {
			text += map[bool]string{true: " ip6", false: " ip"}[a.Is6() || r.network == "ip6"]
		}
		text += " to " + target
	}
	var words []string
	for _, f := range natFlags {
		if flags&f.bit != 0 {
			words = append(words, f.nft)
		}
	}
	if words != nil {
		text += " " + strings.Join(words, ",")
	}
	return text
}

// natFlags are bits of NF_NAT_RANGE_* that a rule may ask for.
var natFlags = []struct {
	bit           uint32
	nft, iptables string
}{{1 << 2, "random", "--random"}, {1 << 4, "fully-random", "--random-fully"}, {1 << 3, "persistent", "--persistent"}}

// endWords writes addresses and ports, the ports as a range with this sign.
func endWords(addrs snapshot.AddrRange, ports snapshot.PortRange, to string) string {
	var text string
	one := func(a netip.Addr) string {
		if a.Is6() && ports.Min != 0 {
			return "[" + a.String() + "]"
		}
		return a.String()
	}
	if addrs.First.IsValid() {
		text = one(addrs.First)
		if addrs.Last.IsValid() && addrs.Last != addrs.First {
			text += "-" + one(addrs.Last)
		}
	}
	if ports.Min != 0 {
		text += fmt.Sprintf(":%d", ports.Min)
		if ports.Max > ports.Min {
			text += fmt.Sprintf("%s%d", to, ports.Max)
		}
	}
	return text
}

// xtTargetWords writes a translation as iptables -S does.
func xtTargetWords(kind string, addrs snapshot.AddrRange, ports snapshot.PortRange, flags uint32) string {
	text := "-j " + strings.ToUpper(kind)
	target := endWords(addrs, ports, "-")
	switch {
	case target == "":
	case kind == "dnat":
		text += " --to-destination " + target
	case kind == "snat":
		text += " --to-source " + target
	case kind == "netmap":
		text += " --to " + target
	default:
		text += " --to-ports " + strings.TrimPrefix(target, ":")
	}
	for _, f := range natFlags {
		if flags&f.bit != 0 {
			text += " " + f.iptables
		}
	}
	return text
}
