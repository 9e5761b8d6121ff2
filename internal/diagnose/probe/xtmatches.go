// SPDX-License-Identifier: Apache-2.0

package probe

// Matches of iptables, of both its back ends, as conditions that package blame can tell.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// xtMatch reads a match; ok is false where it is no condition. One that can't be told from a
// packet's sample has no keys, and its text.
func xtMatch(family, name string, revision int, info []byte) (out []snapshot.Match, ok bool) {
	six := family == "ip6"
	u16 := func(i int) uint16 { return binary.NativeEndian.Uint16(info[i:]) }
	u32 := func(i int) uint32 { return binary.NativeEndian.Uint32(info[i:]) }
	unread := []snapshot.Match{{Text: "-m " + name}}
	one := func(not bool, key string, values ...string) {
		m := snapshot.Match{Keys: []string{key}, Not: not, Values: values}
		m.Text = xtWords(m)
		out = append(out, m)
	}
	switch {
	case name == "comment":
		return nil, false
	case name == "tcp" && len(info) >= 12:
		xtPorts(one, name, info, info[11])
		if mask, want := info[9], info[10]; mask != 0 {
			m := snapshot.Match{Keys: []string{"tcp flags"}, Not: info[11]&4 != 0, Mask: uint32(mask), Values: []string{fmt.Sprintf("0x%x", want)}}
			m.Text = xtWords(m)
			out = append(out, m)
		}
		if info[8] != 0 {
			out = append(out, snapshot.Match{Text: "-m tcp --tcp-option " + strconv.Itoa(int(info[8]))})
		}
		return out, true
	case (name == "udp" || name == "udplite") && len(info) >= 9:
		xtPorts(one, name, info, info[8])
		return out, true
	case (name == "icmp" || name == "icmp6") && len(info) >= 4:
		return xtICMP(info, six), true
	case name == "multiport" && revision == 1 && len(info) >= 48:
		return xtMultiport(info), true
	case name == "conntrack" || name == "state":
		return xtState(name, revision, info, unread), true
	case name == "mark" && len(info) >= 9:
		m := snapshot.Match{Keys: []string{"meta mark"}, Not: info[8] != 0, Mask: u32(4), Values: []string{fmt.Sprintf("0x%x", u32(0))}}
		m.Text = xtWords(m)
		return append(out, m), true
	case (name == "ttl" || name == "hl") && len(info) >= 2:
		key := map[bool]string{true: "ip6 hoplimit", false: "ip ttl"}[six]
		words := []string{"-eq", "-ne", "-lt", "-gt"}
		values := []string{strconv.Itoa(int(info[1])), strconv.Itoa(int(info[1])), fmt.Sprintf("0-%d", max(int(info[1]), 1)-1), fmt.Sprintf("%d-255", int(info[1])+1)}
		mode := min(int(info[0]), 3)
		if name == "ttl" {
			mode = []int{0, 1, 2, 3}[mode]
		}
		return append(out, snapshot.Match{Keys: []string{key}, Not: mode == 1, Values: values[mode : mode+1], Text: fmt.Sprintf("-m %s --%s%s %d", name, name, words[mode], info[1])}), true
	case name == "length" && len(info) >= 5:
		return append(out, snapshot.Match{Keys: []string{"meta length"}, Not: info[4] != 0, Values: []string{fmt.Sprintf("%d-%d", u16(0), u16(2))},
			Text: fmt.Sprintf("-m length --length %d:%d", u16(0), u16(2))}), true
	case name == "iprange" && len(info) >= 65:
		return xtRange(info, six), true
	case name == "addrtype" && len(info) >= 8 && revision == 1:
		return xtAddrType(u16(0), u16(2), u32(4)), true
	case name == "set" && revision > 0 && len(info) >= 4:
		return append(out, snapshot.Match{Set: "#" + strconv.Itoa(int(u16(0))), Not: info[3]&1 != 0, Mask: uint32(info[2])<<8 | uint32(info[3]), Text: fmt.Sprintf("-m set #%d", u16(0))}), true
	case name == "limit" && len(info) >= 8:
		return append(out, snapshot.Match{Text: "-m limit --limit " + xtRate(u32(0))}), true
	case name == "quota" && len(info) >= 16:
		return append(out, snapshot.Match{Text: fmt.Sprintf("-m quota --quota %d", binary.NativeEndian.Uint64(info[8:]))}), true
	case name == "connlimit" && len(info) >= 24:
		word := map[bool]string{true: "--connlimit-upto", false: "--connlimit-above"}[u32(20)&1 != 0]
		return append(out, snapshot.Match{Text: fmt.Sprintf("-m connlimit %s %d", word, u32(16))}), true
	case name == "hashlimit" && len(info) > 0:
		return append(out, snapshot.Match{Text: "-m hashlimit --hashlimit-name " + cString(info)}), true
	case name == "recent" && len(info) >= 11:
		return unread, true
	}
	return unread, true
}

// xtPorts reads the ports of the source and of the destination, which come first.
func xtPorts(one func(bool, string, ...string), name string, info []byte, inverted byte) {
	for i, field := range []string{" sport", " dport"} {
		low, high := binary.NativeEndian.Uint16(info[4*i:]), binary.NativeEndian.Uint16(info[4*i+2:])
		if not := inverted&(1<<i) != 0; low != 0 || high != 0xffff || not {
			one(not, name+field, portWord(low, high))
		}
	}
}

func portWord(low, high uint16) string {
	if low == high {
		return strconv.Itoa(int(low))
	}
	return fmt.Sprintf("%d-%d", low, high)
}

func xtICMP(info []byte, six bool) []snapshot.Match {
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

func xtMultiport(info []byte) []snapshot.Match {
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
func xtState(name string, revision int, info []byte, unread []snapshot.Match) []snapshot.Match {
	states, only, ok := xtStates(name, info)
	if !ok || !only {
		return unread
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
	return []snapshot.Match{m}
}

func xtRange(info []byte, six bool) (out []snapshot.Match) {
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

func xtAddrType(source, dest uint16, flags uint32) (out []snapshot.Match) {
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
func (l *iptLayout) rule(number int, chain string, b []byte, e iptEntry, target int) snapshot.Rule {
	r := ruleReader{rule: &snapshot.Rule{Number: number, Packets: new(e.packets)}, family: l.family, xt: true}
	r.add(l.addresses(b)...)
	for m := l.entry; m+xtTargetLen <= target; {
		length := int(binary.NativeEndian.Uint16(b[m:]))
		name := cString(b[m+xtNameOffset:][:xtNameLen])
		if matches, ok := xtMatch(l.family, name, int(b[m+xtTargetLen-1]), b[m+xtTargetLen:m+length]); ok {
			r.add(matches...)
		}
		m += length
	}
	r.rule.Verdict = e.verdict()
	if e.target != "" {
		r.target(e.target)
	} else if len(e.info) >= 4 && int32(binary.NativeEndian.Uint32(e.info)) == iptReturn {
		r.rule.Verdict = "return"
	}
	r.rule.Text = r.text(chain)
	return *r.rule
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

// keepRules gives the chains their rules; where a jump leads is known when all are read.
func (l *iptLayout) keepRules(chains []snapshot.Chain, walks [][]snapshot.Rule, entries map[int][]iptEntry, starts map[int32]int) {
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
	keepWalks(chains, walks[:len(chains)], func(_ int, name string) int {
		if i, ok := names[name]; ok {
			return i
		}
		return -1
	})
}
