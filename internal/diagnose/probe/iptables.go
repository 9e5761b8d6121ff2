// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/snapshot"
)

// iptablesLegacy reads the chains of iptables' old kernel interface, which
// nftables does not show. Only tables that the namespace has already are asked
// for: to ask for another would load it, hooks and all.
func iptablesLegacy() source {
	var before []snapshot.Chain
	return source{
		name:  snapshot.CanIPTablesLegacy,
		costs: "policies and rules of iptables-legacy that drop packets, and its NAT rules, are not seen",
		live:  true,
		start: func(v *view) (err error) {
			before, err = readIPTables(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readIPTables(v)
			if err != nil {
				return err
			}
			s.Chains = append(s.Chains, chainIncreases(before, after)...)
			return nil
		},
	}
}

// readIPTables returns the chains, of IPv4 and then of IPv6, with the totals of
// their counters.
func readIPTables(v *view) ([]snapshot.Chain, error) {
	var out []snapshot.Chain
	for _, l := range []*iptLayout{&ipt4, &ipt6} {
		names, err := v.readNet(l.names)
		if errors.Is(err, fs.ErrNotExist) {
			continue // ip_tables or ip6_tables is not there
		}
		if err != nil {
			return nil, err
		}
		for _, table := range strings.Fields(names) {
			info, entries, err := l.get(table)
			if err != nil {
				return nil, fmt.Errorf("read %s table %q: %w", l.program, table, err)
			}
			chains, err := l.parse(table, info, entries, v.allRules)
			if err != nil {
				return nil, fmt.Errorf("read %s table %q: %w", l.program, table, err)
			}
			out = append(out, chains...)
		}
	}
	return out, nil
}

// iptLayout is what differs between linux/netfilter_ipv4/ip_tables.h and
// linux/netfilter_ipv6/ip6_tables.h: where an entry has what. Fields of fixed
// size: it is the same on every 64-bit machine.
type iptLayout struct {
	program, family, names string
	domain, level          int // of the socket that is asked

	entry    int // length of an entry
	address  int // of an address
	protocol int // where it has the protocol, and what is inverted
	inverted int
	target   int // offsets of the target and of the next entry
	next     int
	counters int // packets, bytes
}

var (
	ipt4 = iptLayout{
		program: "iptables-legacy", family: "ip", names: "ip_tables_names", domain: unix.AF_INET, level: unix.SOL_IP,
		entry: 112, address: 4, protocol: 80, inverted: 83, target: 88, next: 90, counters: 96,
	}
	ipt6 = iptLayout{
		program: "ip6tables-legacy", family: "ip6", names: "ip6_tables_names", domain: unix.AF_INET6, level: unix.SOL_IPV6,
		entry: 168, address: 16, protocol: 128, inverted: 132, target: 140, next: 142, counters: 152,
	}
)

// What both have alike, and x_tables.h.
const (
	iptSoGetInfo    = 64
	iptSoGetEntries = 65

	iptInfoLen       = 84 // name[32] valid_hooks hook_entry[5] underflow[5] num_entries size
	iptGetEntriesLen = 40 // name[32] size, padding
	iptGoto          = 1 << 1
	iptReturn        = -5 // XT_RETURN
	xtTargetLen      = 32 // size, name[29], revision
	xtNameOffset     = 2
	xtNameLen        = 29

	maxIPTable = 256 << 20
)

// iptInfo is struct ipt_getinfo.
type iptInfo struct {
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	size       uint32
}

// get asks for a table that exists. It may be replaced between the two
// questions, which the kernel answers with EAGAIN.
func (l *iptLayout) get(table string) (iptInfo, []byte, error) {
	fd, err := unix.Socket(l.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return iptInfo{}, nil, err
	}
	defer unix.Close(fd)
	for range 5 {
		var raw [iptInfoLen]byte
		copy(raw[:31], table)
		if err := getsockopt(fd, l.level, iptSoGetInfo, raw[:]); err != nil {
			return iptInfo{}, nil, err
		}
		info := parseIPTInfo(raw[:])
		if info.size > maxIPTable {
			return iptInfo{}, nil, fmt.Errorf("says it has %d bytes", info.size)
		}
		b := make([]byte, iptGetEntriesLen+int(info.size))
		copy(b[:31], table)
		binary.NativeEndian.PutUint32(b[32:], info.size)
		switch err := getsockopt(fd, l.level, iptSoGetEntries, b); err {
		case nil:
			return info, b[iptGetEntriesLen:], nil
		case unix.EAGAIN:
		default:
			return iptInfo{}, nil, err
		}
	}
	return iptInfo{}, nil, errInterrupted
}

func getsockopt(fd, level, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	runtime.KeepAlive(b)
	if errno != 0 {
		return errno
	}
	return nil
}

func parseIPTInfo(b []byte) iptInfo {
	u32 := func(i int) uint32 { return binary.NativeEndian.Uint32(b[32+4*i:]) }
	info := iptInfo{validHooks: u32(0), size: u32(12)}
	for h := range info.hookEntry {
		info.hookEntry[h], info.underflow[h] = u32(1+h), u32(6+h)
	}
	return info
}

// parse reads the entries of a table. They are one list: a built-in chain
// begins at the offset of its hook and ends with its policy; a chain of the user
// begins with an entry whose target is ERROR and holds the chain's name, and
// ends with an entry that returns; one more ERROR ends the list.
func (l *iptLayout) parse(table string, info iptInfo, entries []byte, all bool) ([]snapshot.Chain, error) {
	begins, policies := map[int]int{}, map[int]bool{}      // offset -> hook; offsets of policies
	starts, rules := map[int32]int{}, map[int][]iptEntry{} // offset of a chain's first entry -> its index; the entries of each
	for h := range ruleset.BuiltinChains {
		if info.validHooks&(1<<h) != 0 {
			begins[int(info.hookEntry[h])] = h
			policies[int(info.underflow[h])] = true
		}
	}
	var out []snapshot.Chain
	walks, readers := [][]snapshot.Rule{}, [][]*ruleReader{}
	var chain *snapshot.Chain
	begin := func(name string) {
		out = append(out, snapshot.Chain{Backend: "iptables-legacy", Family: l.family, Table: table, Name: name})
		walks, readers = append(walks, nil), append(readers, nil)
		chain = &out[len(out)-1]
	}
	for off := 0; off < len(entries); {
		e, err := l.parseEntry(entries[off:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d: %w", off, err)
		}
		if h, ok := begins[off]; ok {
			begin(ruleset.BuiltinChains[h].Chain)
			chain.Hook = ruleset.BuiltinChains[h].Hook
			chain.Type, chain.Priority = ruleset.BuiltinPlace(table, chain.Hook)
		}
		switch {
		case e.target == "ERROR":
			if chain != nil && chain.Hook == "" {
				chain.Rules-- // the entry that returns
			}
			begin(cString(e.info))
			starts[int32(off+e.size)] = len(out) - 1
		case chain == nil:
			return nil, fmt.Errorf("entry at %d is in no chain", off)
		case policies[off]:
			chain.Policy = e.verdict()
			chain.PolicyPackets = new(e.packets)
		default:
			at := len(out) - 1
			rule := snapshot.Rule{Number: chain.Rules + 1, Packets: new(e.packets)}
			r := l.rule(&rule, chain.Name, entries[off:], e)
			r.addTo(chain)
			rules[at] = append(rules[at], e)
			walks[at], readers[at] = append(walks[at], rule), append(readers[at], r)
		}
		off += e.size
	}
	out = out[:max(0, len(out)-1)]
	find := l.keepRules(out, walks, rules, starts, all)
	w := walk{chains: out, rules: make([][]walkedRule, len(out)), find: find}
	for i := range out {
		for n, r := range readers[i][:len(walks[i])] {
			r.rule = &walks[i][n] // where a jump leads is known by now
			w.rules[i] = append(w.rules[i], r.walked())
		}
	}
	return out, w.run()
}

// iptEntry is struct ipt_entry or ip6t_entry with its target.
type iptEntry struct {
	size    int
	packets uint64
	target  string
	info    []byte // the target's private part
	at      int    // where the target is
	goes    bool   // and does not come back
}

// verdict is what the entry does with a packet, "" for anything but accept, drop
// and reject.
func (e iptEntry) verdict() string {
	switch {
	case e.target == "REJECT":
		return "reject"
	case e.target == "" && len(e.info) >= 4: // the standard target: NF_ACCEPT is -2, NF_DROP is -1
		if v := int32(binary.NativeEndian.Uint32(e.info)); v < 0 {
			return verdictWord(-v - 1)
		}
	}
	return ""
}

func (l *iptLayout) parseEntry(b []byte) (iptEntry, error) {
	if len(b) < l.entry+xtTargetLen {
		return iptEntry{}, fmt.Errorf("%d bytes left", len(b))
	}
	target := int(binary.NativeEndian.Uint16(b[l.target:]))
	size := int(binary.NativeEndian.Uint16(b[l.next:]))
	if target < l.entry || target+xtTargetLen > size || size > len(b) {
		return iptEntry{}, fmt.Errorf("target at %d of %d bytes, %d are left", target, size, len(b))
	}
	e := iptEntry{
		size:    size,
		at:      target,
		goes:    b[l.inverted-1]&iptGoto != 0,
		packets: binary.NativeEndian.Uint64(b[l.counters:]),
		target:  cString(b[target+xtNameOffset:][:xtNameLen]),
		info:    b[target+xtTargetLen : size],
	}
	for m := l.entry; m < target; { // the matches, which rule reads
		length := 0
		if m+xtTargetLen <= target {
			length = int(binary.NativeEndian.Uint16(b[m:]))
		}
		if length < xtTargetLen || m+length > target {
			return iptEntry{}, fmt.Errorf("match at %d of %d bytes", m, length)
		}
		m += length
	}
	return e, nil
}

// cString is the text before the first zero byte.
func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}
