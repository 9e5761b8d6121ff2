// SPDX-License-Identifier: Apache-2.0

package probe

// Matches of iptables, of both its back ends, as conditions that package blame can tell.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// xtInfo is what the kernel keeps of a match, in its own byte order.
type xtInfo []byte

func (b xtInfo) u16(i int) uint16 { return binary.NativeEndian.Uint16(b[i:]) }
func (b xtInfo) u32(i int) uint32 { return binary.NativeEndian.Uint32(b[i:]) }

// xtReader reads a match: its conditions, of a family, whose information has at least so many bytes.
type xtReader struct {
	least int
	read  func(b xtInfo, six bool) []snapshot.Match
}

var xtReaders = map[string]xtReader{
	"comment":   {0, func(xtInfo, bool) []snapshot.Match { return nil }},
	"nfacct":    {32, func(xtInfo, bool) []snapshot.Match { return nil }}, // it counts; only an object with a quota also decides
	"tcp":       {12, xtTCP},
	"udp":       {9, func(b xtInfo, _ bool) []snapshot.Match { return xtPorts("udp", b, b[8]) }},
	"udplite":   {9, func(b xtInfo, _ bool) []snapshot.Match { return xtPorts("udplite", b, b[8]) }},
	"icmp":      {4, xtICMP},
	"icmp6":     {4, xtICMP},
	"multiport": {48, xtMultiport},
	"conntrack": {0, func(b xtInfo, _ bool) []snapshot.Match { return xtState("conntrack", b) }},
	"state":     {0, func(b xtInfo, _ bool) []snapshot.Match { return xtState("state", b) }},
	"mark":      {9, func(b xtInfo, _ bool) []snapshot.Match { return xtMark("meta mark", "mark", b) }},
	"connmark":  {9, func(b xtInfo, _ bool) []snapshot.Match { return xtMark("ct mark", "connmark", b) }},
	"ttl":       {2, func(b xtInfo, _ bool) []snapshot.Match { return xtHops("ip ttl", "ttl", b) }},
	"hl":        {2, func(b xtInfo, _ bool) []snapshot.Match { return xtHops("ip6 hoplimit", "hl", b) }},
	"length": {5, func(b xtInfo, _ bool) []snapshot.Match {
		return xtOne(b[4] != 0, "meta length", fmt.Sprintf("%d-%d", b.u16(0), b.u16(2)), "length", "--length", fmt.Sprintf("%d:%d", b.u16(0), b.u16(2)))
	}},
	"dscp": {2, func(b xtInfo, six bool) []snapshot.Match {
		return xtOne(b[1] != 0, map[bool]string{true: "ip6 dscp", false: "ip dscp"}[six], strconv.Itoa(int(b[0])), "dscp", "--dscp", fmt.Sprintf("0x%02x", b[0]))
	}},
	"mac": {12, func(b xtInfo, _ bool) []snapshot.Match {
		address := net.HardwareAddr(b[:6]).String()
		return xtOne(b.u32(8) != 0, "ether saddr", address, "mac", "--mac-source", address)
	}},
	"helper": {8, func(b xtInfo, _ bool) []snapshot.Match {
		return xtOne(b.u32(0) != 0, "ct helper", cString(append(slices.Clip(b[4:]), 0)), "helper", "--helper", cString(append(slices.Clip(b[4:]), 0)))
	}},
	"iprange":   {65, xtRange},
	"addrtype":  {8, xtAddrType},
	"set":       {4, xtSet},
	"owner":     {18, xtOwner},
	"statistic": {16, xtStatistic},
	"limit":     {8, func(b xtInfo, _ bool) []snapshot.Match { return xtText("limit", "--limit", xtRate(b.u32(0))) }},
	"quota": {16, func(b xtInfo, _ bool) []snapshot.Match {
		return xtText("quota", "--quota", strconv.FormatUint(binary.NativeEndian.Uint64(b[8:]), 10))
	}},
	"connlimit": {24, xtConnlimit},
	"hashlimit": {1, xtHashlimit},
	"recent":    {211, xtRecent},
	"connbytes": {18, xtConnbytes},
}

// xtRevisions are the forms of matches that are read, where a kernel has several.
var xtRevisions = map[string][]int{"multiport": {1}, "addrtype": {1}, "set": {1, 2, 3, 4}, "mark": {1}, "connmark": {1}}

// xtMatch reads a match. A condition that can't be told from a packet's sample has no keys, and its text.
func xtMatch(family, name string, revision int, info []byte) []snapshot.Match {
	reader, ok := xtReaders[name]
	revisions, several := xtRevisions[name]
	if !ok || len(info) < reader.least || several && !slices.Contains(revisions, revision) {
		return []snapshot.Match{{Text: "-m " + name}}
	}
	return reader.read(info, family == "ip6")
}

// xtText is a condition that compares no field.
func xtText(name string, words ...string) []snapshot.Match {
	return []snapshot.Match{{Text: "-m " + name + " " + strings.Join(words, " ")}}
}

// xtOne is a condition on one field.
func xtOne(not bool, key, value, name, option, shown string) []snapshot.Match {
	return []snapshot.Match{{Keys: []string{key}, Not: not, Values: []string{value},
		Text: "-m " + name + map[bool]string{true: " !"}[not] + " " + option + " " + shown}}
}

func xtTCP(b xtInfo, _ bool) []snapshot.Match {
	out := xtPorts("tcp", b, b[11])
	if mask, want := b[9], b[10]; mask != 0 {
		m := snapshot.Match{Keys: []string{"tcp flags"}, Not: b[11]&4 != 0, Mask: uint32(mask), Values: []string{fmt.Sprintf("0x%x", want)}}
		m.Text = xtWords(m)
		out = append(out, m)
	}
	if b[8] != 0 {
		out = append(out, xtText("tcp", "--tcp-option", strconv.Itoa(int(b[8])))...)
	}
	return out
}

// xtMark reads a mark of the packet or of its connection.
func xtMark(key, name string, b xtInfo) []snapshot.Match {
	value := fmt.Sprintf("0x%x", b.u32(0))
	out := xtOne(b[8] != 0, key, value, name, "--mark", value+maskWord(b.u32(4)))
	out[0].Mask = b.u32(4)
	return out
}

// xtConnlimit reads a number of connections, of those that the mask makes one.
func xtConnlimit(b xtInfo, six bool) []snapshot.Match {
	of, length := "--connlimit-saddr", 4
	if b.u32(20)&2 != 0 {
		of = "--connlimit-daddr"
	}
	if six {
		length = 16
	}
	ones := 0
	for _, m := range b[:length] {
		ones += bits.OnesCount8(m)
	}
	word := map[bool]string{true: "--connlimit-upto", false: "--connlimit-above"}[b.u32(20)&1 != 0]
	return xtText("connlimit", word, strconv.FormatUint(uint64(b.u32(16)), 10), "--connlimit-mask", strconv.Itoa(ones), of)
}

// xtHashlimit reads a rate and what of packets has one of its own; of its first form only the name.
func xtHashlimit(b xtInfo, _ bool) []snapshot.Match {
	const avg, burst, mode, bytesMode, above = 256, 264, 272, 1 << 5, 1 << 4
	name := cString(append(slices.Clip(b[:min(len(b), avg)]), 0))
	if len(b) < mode+4 || b.u32(mode)&bytesMode != 0 {
		return xtText("hashlimit", "--hashlimit-name", name)
	}
	word := map[bool]string{true: "--hashlimit-above", false: "--hashlimit-upto"}[b.u32(mode)&above != 0]
	var of []string
	for _, part := range []struct {
		bit  uint32
		name string
	}{{1 << 2, "srcip"}, {1 << 3, "srcport"}, {1 << 0, "dstip"}, {1 << 1, "dstport"}} {
		if b.u32(mode)&part.bit != 0 {
			of = append(of, part.name)
		}
	}
	words := []string{word, xtRate(uint32(min(binary.NativeEndian.Uint64(b[avg:])/100, math.MaxUint32))), // of units of 1 us, of 100 us
		"--hashlimit-burst", strconv.FormatUint(binary.NativeEndian.Uint64(b[burst:]), 10)}
	if of != nil {
		words = append(words, "--hashlimit-mode", strings.Join(of, ","))
	}
	return xtText("hashlimit", append(words, "--hashlimit-name", name)...)
}

// xtRecent reads a list of addresses that were seen lately.
func xtRecent(b xtInfo, six bool) []snapshot.Match {
	const set, update, remove = 1 << 1, 1 << 2, 1 << 3
	mode := "--rcheck"
	switch check := b[8]; {
	case check&set != 0:
		mode = "--set"
	case check&update != 0:
		mode = "--update"
	case check&remove != 0:
		mode = "--remove"
	}
	words := []string{mode}
	if b[9] != 0 {
		words = []string{"!", mode}
	}
	for i, option := range []string{"--seconds", "--hitcount"} {
		if n := b.u32(4 * i); n != 0 {
			words = append(words, option, strconv.FormatUint(uint64(n), 10))
		}
	}
	words = append(words, "--name", cString(append(slices.Clip(b[10:210]), 0)))
	const mask = 212
	switch { // of the second form
	case len(b) < mask+16:
	case six:
		words = append(words, "--mask", netip.AddrFrom16([16]byte(b[mask:mask+16])).String())
	default:
		words = append(words, "--mask", netip.AddrFrom4([4]byte(b[mask:mask+4])).String())
	}
	return xtText("recent", append(words, map[bool]string{true: "--rsource", false: "--rdest"}[b[210] == 0])...)
}

// xtConnbytes reads how much a connection has sent.
func xtConnbytes(b xtInfo, _ bool) []snapshot.Match {
	from, to := binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:])
	span := strconv.FormatUint(from, 10)
	if to != math.MaxUint64 {
		span += ":" + strconv.FormatUint(to, 10)
	}
	return xtText("connbytes", "--connbytes", span,
		"--connbytes-mode", wordOf([]string{"packets", "bytes", "avgpkt"}, uint32(b[16])),
		"--connbytes-dir", wordOf([]string{"original", "reply", "both"}, uint32(b[17])))
}

// xtHops reads conditions on the time to live.
func xtHops(key, name string, b xtInfo) []snapshot.Match {
	n := int(b[1])
	mode := min(int(b[0]), 3)
	value := []string{strconv.Itoa(n), strconv.Itoa(n), fmt.Sprintf("0-%d", max(n, 1)-1), fmt.Sprintf("%d-255", n+1)}[mode]
	word := []string{"-eq", "-eq", "-lt", "-gt"}[mode]
	return xtOne(mode == 1, key, value, name, "--"+name+word, strconv.Itoa(n))
}

// xtSet names the set by its number; readIPSets knows the names.
func xtSet(b xtInfo, _ bool) []snapshot.Match {
	return []snapshot.Match{{Set: "#" + strconv.Itoa(int(b.u16(0))), Not: b[3]&1 != 0, Mask: uint32(b[2])<<8 | uint32(b[3]), Text: fmt.Sprintf("-m set #%d", b.u16(0))}}
}

// xtOwner reads who made the packet.
func xtOwner(b xtInfo, _ bool) (out []snapshot.Match) {
	for i, who := range []struct{ key, option string }{{"meta skuid", "--uid-owner"}, {"meta skgid", "--gid-owner"}} {
		if b[16]&(1<<i) == 0 {
			continue
		}
		value := strconv.FormatUint(uint64(b.u32(8*i)), 10)
		if last := b.u32(8*i + 4); last != b.u32(8*i) {
			value += fmt.Sprintf("-%d", last)
		}
		out = append(out, xtOne(b[17]&(1<<i) != 0, who.key, value, "owner", who.option, value)...)
	}
	if b[16]&4 != 0 {
		out = append(out, xtText("owner", map[bool]string{true: "! "}[b[17]&4 != 0]+"--socket-exists")...)
	}
	return out
}

// xtStatistic reads a share of the packets.
func xtStatistic(b xtInfo, _ bool) []snapshot.Match {
	not := map[bool]string{true: "! "}[b.u16(2)&1 != 0]
	if b.u16(0) == 0 {
		return xtText("statistic", "--mode random", not+"--probability", fmt.Sprintf("%.11f", float64(b.u32(4))/(1<<31)))
	}
	return xtText("statistic", "--mode nth", not+"--every", strconv.FormatUint(uint64(b.u32(4))+1, 10), "--packet", strconv.FormatUint(uint64(b.u32(8)), 10))
}

// xtPorts reads the ports of the source and of the destination, which come first.
func xtPorts(name string, b xtInfo, inverted byte) (out []snapshot.Match) {
	for i, field := range []string{" sport", " dport"} {
		low, high := b.u16(4*i), b.u16(4*i+2)
		if not := inverted&(1<<i) != 0; low != 0 || high != 0xffff || not {
			m := snapshot.Match{Keys: []string{name + field}, Not: not, Values: []string{portWord(low, high)}}
			m.Text = xtWords(m)
			out = append(out, m)
		}
	}
	return out
}

func portWord(low, high uint16) string {
	if low == high {
		return strconv.Itoa(int(low))
	}
	return fmt.Sprintf("%d-%d", low, high)
}

func xtICMP(info xtInfo, six bool) []snapshot.Match {
	name := map[bool]string{true: "icmpv6", false: "icmp"}[six]
	kind, low, high, not := int(info[0]), int(info[1]), int(info[2]), info[3]&1 != 0
	text := fmt.Sprintf("-m %s --%s-type %d", strings.Replace(name, "v6", "6", 1), name, kind)
	if kind == 255 {
		return nil
	}
	out := []snapshot.Match{{Keys: []string{name + " type"}, Not: not, Values: []string{strconv.Itoa(kind)}, Text: text}}
	if low != 0 || high != 255 {
		if not { // of both at once: no single field tells
			return []snapshot.Match{{Text: text + fmt.Sprintf("/%d", low)}}
		}
		out[0].Text += fmt.Sprintf("/%d", low)
		out = append(out, snapshot.Match{Keys: []string{name + " code"}, Values: []string{fmt.Sprintf("%d-%d", low, high)}})
	}
	return out
}

func xtMultiport(info xtInfo, _ bool) []snapshot.Match {
	flags, count := info[0], min(int(info[1]), 15)
	var values []string
	for i := 0; i < count; i++ {
		low := binary.NativeEndian.Uint16(info[2+2*i:])
		high := low
		if info[32+i] != 0 && i+1 < count { // a range
			i++
			high = binary.NativeEndian.Uint16(info[2+2*i:])
		}
		values = append(values, portWord(low, high))
	}
	option := map[byte]string{0: "--sports", 1: "--dports", 2: "--ports"}[flags]
	not := ""
	if info[47] != 0 {
		not = "! "
	}
	m := snapshot.Match{Not: info[47] != 0, Values: values, Text: "-m multiport " + not + option + " " + strings.ReplaceAll(strings.Join(values, ","), "-", ":")}
	if flags < 2 {
		m.Keys = []string{map[byte]string{0: "th sport", 1: "th dport"}[flags]}
	}
	return []snapshot.Match{m}
}

// xtState reads conditions on the state of connection tracking.
func xtState(name string, info xtInfo) []snapshot.Match {
	states, only, ok := xtStates(name, info)
	if !ok {
		return []snapshot.Match{{Text: "-m " + name}}
	}
	names := map[int]string{0: "invalid", 1: "established", 2: "related", 3: "new", 6: "untracked"}
	not := false
	if name == "conntrack" {
		names = map[int]string{0: "invalid", 1: "established", 2: "related", 3: "new", 6: "snat", 7: "dnat", 8: "untracked"}
		if not = binary.NativeEndian.Uint16(info[148:])&1 != 0; not {
			states = ^states & 0xffff // xtStates turned them round
		}
	}
	m := snapshot.Match{Keys: []string{"ct state"}, Not: not, Values: bitWords(states, names)}
	m.Text = xtWords(m)
	if name == "state" || binary.NativeEndian.Uint16(info[146:])&xtStateAlias != 0 {
		m.Text = strings.Replace(m.Text, "-m conntrack", "-m state", 1)
		m.Text = strings.Replace(m.Text, "--ctstate", "--state", 1)
	}
	if !only { // addresses, directions and the like, of the connection
		return []snapshot.Match{m, {Text: "-m " + name + " ..."}}
	}
	return []snapshot.Match{m}
}

func xtRange(info xtInfo, six bool) (out []snapshot.Match) {
	family, size := "ip ", 4
	if six {
		family, size = "ip6 ", 16
	}
	for i, side := range []struct{ key, option string }{{"saddr", "--src-range"}, {"daddr", "--dst-range"}} {
		if info[64]&(1<<i) == 0 {
			continue
		}
		value := addrWord(info[32*i:][:size]) + "-" + addrWord(info[32*i+16:][:size])
		m := snapshot.Match{Keys: []string{family + side.key}, Not: info[64]&(16<<i) != 0, Values: []string{value}}
		m.Text = "-m iprange " + map[bool]string{true: "! "}[m.Not] + side.option + " " + value
		out = append(out, m)
	}
	return out
}

func xtAddrType(b xtInfo, _ bool) (out []snapshot.Match) {
	source, dest, flags := b.u16(0), b.u16(2), b.u32(4)
	if flags&^3 != 0 { // about one interface only
		return []snapshot.Match{{Text: "-m addrtype"}}
	}
	for i, side := range []struct {
		types       uint16
		key, option string
	}{{source, "fib saddr type", "--src-type"}, {dest, "fib daddr type", "--dst-type"}} {
		if side.types == 0 {
			continue
		}
		m := snapshot.Match{Keys: []string{side.key}, Not: flags&(1<<i) != 0}
		for bit := range 12 {
			if side.types&(1<<bit) != 0 {
				m.Values = append(m.Values, addressTypes[uint64(bit)])
			}
		}
		m.Text = "-m addrtype " + map[bool]string{true: "! "}[m.Not] + side.option + " " + strings.ToUpper(strings.Join(m.Values, ","))
		out = append(out, m)
	}
	return out
}

// xtRate writes a rate as iptables does: the kernel has the time between two packets.
func xtRate(period uint32) string {
	const second = 10000
	rates := []struct {
		name string
		mult uint32
	}{{"day", second * 86400}, {"hour", second * 3600}, {"min", second * 60}, {"sec", second}}
	i := 1
	for ; i < len(rates); i++ {
		if period > rates[i].mult || period == 0 || rates[i].mult/period < rates[i].mult%period {
			break
		}
	}
	return fmt.Sprintf("%d/%s", rates[i-1].mult/max(period, 1), rates[i-1].name)
}

// rule reads an entry of iptables-legacy.
func (l *iptLayout) rule(rule *snapshot.Rule, chain string, b []byte, e iptEntry) *ruleReader {
	r := &ruleReader{rule: rule, family: l.family, xt: true}
	r.add(l.addresses(b)...)
	for m := l.entry; m+xtTargetLen <= e.at; {
		length := int(binary.NativeEndian.Uint16(b[m:]))
		name := cString(b[m+xtNameOffset:][:xtNameLen])
		if xtPerPacket[name] {
			r.perPacket = append(r.perPacket, name)
		}
		r.add(xtMatch(l.family, name, int(b[m+xtTargetLen-1]), b[m+xtTargetLen:m+length])...)
		m += length
	}
	rule.Verdict = e.verdict()
	if e.target != "" {
		if xtPerPacket[e.target] {
			r.perPacket = append(r.perPacket, e.target)
		}
		r.target(e.target, e.info)
	} else if len(e.info) >= 4 && int32(binary.NativeEndian.Uint32(e.info)) == iptReturn {
		rule.Verdict = "return"
	}
	rule.Text = r.text(chain)
	return r
}

// addresses are the conditions of an entry's first part.
func (l *iptLayout) addresses(b []byte) (out []snapshot.Match) {
	size := l.address
	flags := b[l.inverted]
	for i, key := range []string{"saddr", "daddr"} {
		mask := b[(2+i)*size:][:size]
		if not := flags&(8<<i) != 0; not || bytes.Count(mask, []byte{0}) < size {
			m := snapshot.Match{Keys: []string{l.family + " " + key}, Not: not, Values: []string{addrWord(b[i*size:][:size]) + "/" + addrWord(mask)}}
			if ones, whole := net.IPMask(mask).Size(); whole > 0 {
				m.Values[0] = addrWord(b[i*size:][:size]) + "/" + strconv.Itoa(ones)
			}
			out = append(out, m)
		}
	}
	for i, key := range []string{"iifname", "oifname"} {
		name, mask := b[4*size+16*i:][:16], b[4*size+32+16*i:][:16]
		if n := bytes.Count(mask, []byte{0xff}); n > 0 {
			word := cString(name)
			if n <= len(word) {
				word = word[:n] + "*" // "eth+" is compared as far as it goes
			}
			out = append(out, snapshot.Match{Keys: []string{key}, Not: flags&(1<<i) != 0, Values: []string{word}})
		}
	}
	if protocol := binary.NativeEndian.Uint16(b[l.protocol:]); protocol != 0 {
		out = append(out, snapshot.Match{Keys: []string{"meta l4proto"}, Not: flags&0x40 != 0, Values: []string{valueWord("meta l4proto", []byte{byte(protocol)})}})
	}
	if b[l.inverted-1]&1 != 0 && l.family == "ip" {
		out = append(out, snapshot.Match{Text: "-f"})
	}
	return slices.Clip(out)
}

// keepRules gives the chains their rules; where a jump leads is known when all are read. It
// returns how to find a chain.
func (l *iptLayout) keepRules(chains []snapshot.Chain, walks [][]snapshot.Rule, entries map[int][]iptEntry, starts map[int32]int, all bool) (find func(int, string) int) {
	names := map[string]int{}
	for i, c := range chains {
		names[c.Name] = i
		if len(walks[i]) > c.Rules { // the entry that returns, at the end of a chain of the user's
			walks[i] = walks[i][:c.Rules]
		}
		for n := range walks[i] {
			r, e := &walks[i][n], entries[i][n]
			if e.target != "" || len(e.info) < 4 {
				continue
			}
			to, ok := starts[int32(binary.NativeEndian.Uint32(e.info))]
			if !ok || to >= len(chains) {
				continue
			}
			r.Verdict, r.Chain = "jump", chains[to].Name
			option := " -j "
			if e.goes {
				r.Verdict, option = "goto", " -g "
			}
			r.Text += option + r.Chain
		}
	}
	find = func(_ int, name string) int {
		if i, ok := names[name]; ok {
			return i
		}
		return -1
	}
	keepWalks(chains, walks[:len(chains)], find, all)
	return find
}
