// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"natkit/internal/words/choice"

	"golang.org/x/sys/unix"
)

// Filter chooses flows. Its zero value chooses all; every field that is set
// must match.
type Filter struct {
	Family    uint8        // unix.AF_INET or unix.AF_INET6
	Proto     uint8        // unix.IPPROTO_TCP, ...
	States    uint64       // bit n set: State n is wanted; see ParseStates
	Unreplied bool         // only such as saw no reply
	Src, Dst  netip.Prefix // of the original direction, as conntrack(8)'s -s and -d
}

// Match says whether the filter chooses f.
func (w *Filter) Match(f *Flow) bool {
	return (w.Family == 0 || w.Family == f.Family) &&
		(w.Proto == 0 || w.Proto == f.Proto) &&
		(w.States == 0 || f.Has&HasState != 0 && w.States>>f.State&1 != 0) &&
		(!w.Unreplied || f.Unreplied()) &&
		(!w.Src.IsValid() || w.Src.Contains(f.Orig.Src)) &&
		(!w.Dst.IsValid() || w.Dst.Contains(f.Orig.Dst))
}

// ParseFamily reads "ipv4" or "ipv6"; "" is any.
func ParseFamily(s string) (uint8, error) {
	switch s {
	case "":
		return 0, nil
	case "ipv4":
		return unix.AF_INET, nil
	case "ipv6":
		return unix.AF_INET6, nil
	}
	return 0, choice.Error(s, "ipv4", "ipv6")
}

// FamilyName is the inverse of ParseFamily.
func FamilyName(family uint8) string {
	switch family {
	case unix.AF_INET:
		return "ipv4"
	case unix.AF_INET6:
		return "ipv6"
	}
	return "unknown"
}

// otherProtos are names of protocols of which connection tracking knows only the number
// (its "generic" one): they are read, as in /etc/protocols, and printed as "unknown".
var otherProtos = map[string]uint8{
	"igmp": unix.IPPROTO_IGMP, "ipip": unix.IPPROTO_IPIP, "ipv6": unix.IPPROTO_IPV6, "esp": unix.IPPROTO_ESP, "ah": unix.IPPROTO_AH,
	"eigrp": 88, "ospf": 89, "pim": unix.IPPROTO_PIM, "vrrp": 112, "l2tp": unix.IPPROTO_L2TP,
}

// ParseProto reads the name or number of a transport protocol; "" is any.
func ParseProto(s string) (uint8, error) {
	if s == "" {
		return 0, nil
	}
	if n, known := otherProtos[s]; known {
		return n, nil
	}
	for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6,
		unix.IPPROTO_GRE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE} {
		if s == protoName(p) {
			return p, nil
		}
	}
	if n, err := strconv.ParseUint(s, 10, 8); err == nil && n > 0 {
		return uint8(n), nil
	}
	return 0, choice.Error(s, "tcp", "udp", "icmp", "icmpv6", "gre", "sctp", "dccp", "udplite", "igmp", "esp", "ah", "ipip", "ospf", "a number from 1 to 255")
}

// ParseStates reads names of states, separated by commas, for Filter.States: those of
// the protocol, or of TCP and SCTP where it is 0. A name that both have means both. DCCP,
// which hardly anybody uses, writes TIMEWAIT what all others write TIME_WAIT, and has to
// be named. "" is any state.
func ParseStates(s string, proto uint8) (uint64, error) {
	var mask uint64
	if s == "" {
		return 0, nil
	}
	protocols, refused := []uint8{unix.IPPROTO_TCP, unix.IPPROTO_SCTP}, []uint8{unix.IPPROTO_TCP}
	if proto != 0 {
		protocols, refused = []uint8{proto}, []uint8{proto}
	}
	for name := range strings.SplitSeq(s, ",") {
		var bits uint64
		for _, p := range protocols {
			first, named := statesOf(p)
			for i, known := range named {
				if strings.EqualFold(name, known) {
					bits |= 1 << (int(first) + i)
				}
			}
		}
		if bits == 0 {
			_, named := statesOf(refused[0])
			if len(named) == 0 {
				return 0, fmt.Errorf("%q: protocol %s has no states", name, ProtoName(proto))
			}
			return 0, choice.Error(name, named...)
		}
		mask |= bits
	}
	return mask, nil
}

// TCPStates are the names of the states that an entry of TCP can be in.
func TCPStates() []string {
	_, names := statesOf(unix.IPPROTO_TCP)
	return names
}

// statesOf are the names of a protocol's states, and where they begin; none for a protocol
// without states.
func statesOf(proto uint8) (first State, names []string) {
	first, ok := firstState(proto)
	if !ok {
		return 0, nil
	}
	for _, name := range stateNames[first : first+sctpStates] {
		if name != "" {
			names = append(names, name)
		}
	}
	return first, names
}

// ParsePrefix reads an address or a prefix; "" is any.
func ParsePrefix(s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q: want an address or a prefix such as 10.0.0.0/8", s)
	}
	return p, nil
}
