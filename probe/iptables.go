// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/snapshot"
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

// readIPTables returns the IPv4 chains with the totals of their counters.
func readIPTables(v *view) ([]snapshot.Chain, error) {
	names, err := v.readNet("ip_tables_names")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // ip_tables is not there
	}
	if err != nil {
		return nil, err
	}
	var out []snapshot.Chain
	for _, table := range strings.Fields(names) {
		info, entries, err := getIPTable(table)
		if err != nil {
			return nil, fmt.Errorf("read iptables-legacy table %q: %w", table, err)
		}
		chains, err := parseIPTable(table, info, entries)
		if err != nil {
			return nil, fmt.Errorf("read iptables-legacy table %q: %w", table, err)
		}
		out = append(out, chains...)
	}
	return out, nil
}

// Layout of linux/netfilter_ipv4/ip_tables.h and x_tables.h. Fields of fixed
// size: it is the same on every 64-bit machine.
const (
	iptSoGetInfo    = 64
	iptSoGetEntries = 65

	iptInfoLen       = 84 // name[32] valid_hooks hook_entry[5] underflow[5] num_entries size
	iptGetEntriesLen = 40 // name[32] size, padding
	iptEntryLen      = 112
	iptEntryIP       = 84 // struct ipt_ip; the condition on addresses, interfaces, protocol
	iptDest          = 4  // within it: destination, its mask, protocol, what is inverted
	iptDestMask      = 12
	iptProtocol      = 80
	iptInverted      = 83
	iptInvertDest    = 1 << 4 // IPT_INV_DSTIP
	iptTargetOffset  = 88
	iptNextOffset    = 90
	iptCounters      = 96 // packets, bytes
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

// getIPTable asks for a table that exists. It may be replaced between the two
// questions, which the kernel answers with EAGAIN.
func getIPTable(table string) (iptInfo, []byte, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return iptInfo{}, nil, err
	}
	defer unix.Close(fd)
	for range 5 {
		var raw [iptInfoLen]byte
		copy(raw[:31], table)
		if err := getsockopt(fd, iptSoGetInfo, raw[:]); err != nil {
			return iptInfo{}, nil, err
		}
		info := parseIPTInfo(raw[:])
		if info.size > maxIPTable {
			return iptInfo{}, nil, fmt.Errorf("says it has %d bytes", info.size)
		}
		b := make([]byte, iptGetEntriesLen+int(info.size))
		copy(b[:31], table)
		binary.NativeEndian.PutUint32(b[32:], info.size)
		switch err := getsockopt(fd, iptSoGetEntries, b); err {
		case nil:
			return info, b[iptGetEntriesLen:], nil
		case unix.EAGAIN:
		default:
			return iptInfo{}, nil, err
		}
	}
	return iptInfo{}, nil, errInterrupted
}

func getsockopt(fd, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(option),
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

// iptHooks are iptables' built-in chains and the hooks they stand on, in the
// order of the hooks' numbers.
var iptHooks = [5]struct{ chain, hook string }{
	{"PREROUTING", "prerouting"}, {"INPUT", "input"}, {"FORWARD", "forward"}, {"OUTPUT", "output"}, {"POSTROUTING", "postrouting"},
}

// parseIPTable reads the entries of a table. They are one list: a built-in chain
// begins at the offset of its hook and ends with its policy; a chain of the user
// begins with an entry whose target is ERROR and holds the chain's name, and
// ends with an entry that returns; one more ERROR ends the list.
func parseIPTable(table string, info iptInfo, entries []byte) ([]snapshot.Chain, error) {
	begins, policies := map[int]int{}, map[int]bool{} // offset -> hook; offsets of policies
	for h := range iptHooks {
		if info.validHooks&(1<<h) != 0 {
			begins[int(info.hookEntry[h])] = h
			policies[int(info.underflow[h])] = true
		}
	}
	var out []snapshot.Chain
	var chain *snapshot.Chain
	begin := func(name string) {
		out = append(out, snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: table, Name: name})
		chain = &out[len(out)-1]
	}
	for off := 0; off < len(entries); {
		e, err := parseIPTEntry(entries[off:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d: %w", off, err)
		}
		if h, ok := begins[off]; ok {
			begin(iptHooks[h].chain)
			chain.Hook = iptHooks[h].hook
			chain.Type, chain.Priority = iptPlace(table, chain.Hook)
		}
		switch {
		case e.target == "ERROR":
			if chain != nil && chain.Hook == "" {
				chain.Rules-- // the entry that returns
			}
			begin(cString(e.info))
		case chain == nil:
			return nil, fmt.Errorf("entry at %d is in no chain", off)
		case policies[off]:
			chain.Policy = e.verdict()
			chain.PolicyPackets = new(e.packets)
		default:
			chain.Rules++
			if v := e.verdict(); v == "drop" || v == "reject" {
				chain.DropRules = append(chain.DropRules, snapshot.DropRule{
					Number: chain.Rules, Verdict: v, All: e.all, Packets: new(e.packets),
				})
			}
			if kind := xtNATKinds[e.target]; kind != "" {
				e.nat.kind = kind
				e.nat.addrs, e.nat.ports = xtNATRange(chain.Family, e.info)
				addNAT(chain, e.nat)
			}
		}
		off += e.size
	}
	return out[:max(0, len(out)-1)], nil
}

// iptPlace is the type and the priority on a hook that a table of iptables has.
func iptPlace(table, hook string) (string, int) {
	switch {
	case table == "raw":
		return "filter", -300
	case table == "mangle":
		return "filter", -150
	case table == "nat" && (hook == "prerouting" || hook == "output"):
		return "nat", -100
	case table == "nat":
		return "nat", 100
	case table == "security":
		return "filter", 50
	}
	return "filter", 0
}

// iptEntry is struct ipt_entry with its target.
type iptEntry struct {
	size    int
	all     bool // it has no condition
	packets uint64
	target  string
	info    []byte // the target's private part
	nat     natRule
}

// verdict is what the entry does with a packet, "" for anything but accept, drop
// and reject.
func (e iptEntry) verdict() string {
	switch {
	case e.target == "REJECT":
		return "reject"
	case e.target == "" && len(e.info) >= 4: // the standard target: NF_ACCEPT is -2, NF_DROP is -1
		if v := int32(binary.NativeEndian.Uint32(e.info)); v < 0 {
			return verdictName(-v - 1)
		}
	}
	return ""
}

func parseIPTEntry(b []byte) (iptEntry, error) {
	if len(b) < iptEntryLen+xtTargetLen {
		return iptEntry{}, fmt.Errorf("%d bytes left", len(b))
	}
	target := int(binary.NativeEndian.Uint16(b[iptTargetOffset:]))
	size := int(binary.NativeEndian.Uint16(b[iptNextOffset:]))
	if target < iptEntryLen || target+xtTargetLen > size || size > len(b) {
		return iptEntry{}, fmt.Errorf("target at %d of %d bytes, %d are left", target, size, len(b))
	}
	e := iptEntry{
		size:    size,
		all:     bytes.Count(b[:iptEntryIP], []byte{0}) == iptEntryIP,
		packets: binary.NativeEndian.Uint64(b[iptCounters:]),
		target:  cString(b[target+xtNameOffset:][:xtNameLen]),
		info:    b[target+xtTargetLen : size],
	}
	e.nat.protocol = protocolName(uint8(binary.NativeEndian.Uint16(b[iptProtocol:])))
	if mask := binary.NativeEndian.Uint32(b[iptDestMask:]); mask == ^uint32(0) && b[iptInverted]&iptInvertDest == 0 {
		e.nat.dest = netip.AddrFrom4([4]byte(b[iptDest:]))
	}
	for m := iptEntryLen; m < target; { // the matches; a comment is no condition
		length := 0
		if m+xtTargetLen <= target {
			length = int(binary.NativeEndian.Uint16(b[m:]))
		}
		if length < xtTargetLen || m+length > target {
			return iptEntry{}, fmt.Errorf("match at %d of %d bytes", m, length)
		}
		switch name := cString(b[m+xtNameOffset:][:xtNameLen]); name {
		case "comment":
		case "tcp", "udp": // ports of the source and of the destination come first in both
			if ports := b[m+xtTargetLen : m+length]; len(ports) >= 8 {
				e.nat.destPorts = snapshot.PortRange{Min: binary.NativeEndian.Uint16(ports[4:]), Max: binary.NativeEndian.Uint16(ports[6:])}
			}
			fallthrough
		default:
			e.all = false
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
