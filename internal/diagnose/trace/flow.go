// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Flow says which connections to trace: those between A and B, whoever began them.
type Flow struct {
	Protocol string // "" for any
	A, B     Side
}

// Side is one end of a Flow. Without a valid prefix any address is meant, with port 0 any port.
type Side struct {
	Addresses netip.Prefix
	Port      uint16
}

// flowForm is what ParseFlow reads.
const flowForm = "[PROTOCOL] [SOURCE[:PORT] -> DESTINATION[:PORT]]"

// Protocols are those that a flow may name, by their numbers.
var Protocols = map[string]uint8{"icmp": 1, "tcp": 6, "udp": 17, "gre": 47, "esp": 50, "icmpv6": 58, "sctp": 132, "udplite": 136, "dccp": 33}

// ParseFlow reads "tcp 10.0.0.5 -> 198.51.100.1:443". An end is an address or a prefix with or
// without a port, *:PORT, or any; IPv6 addresses with a port are written in brackets.
func ParseFlow(s string) (Flow, error) {
	var f Flow
	words := strings.Fields(s)
	if len(words) == 0 {
		return f, fmt.Errorf("a flow is empty: want %s, as in \"tcp 10.0.0.5 -> 198.51.100.1:443\"", flowForm)
	}
	if _, known := Protocols[strings.ToLower(words[0])]; known {
		f.Protocol, words = strings.ToLower(words[0]), words[1:]
	}
	if len(words) == 0 {
		return f, nil
	}
	if len(words) != 3 || words[1] != "->" {
		return f, fmt.Errorf("flow %q: want %s, as in \"tcp 10.0.0.5 -> 198.51.100.1:443\"", s, flowForm)
	}
	var err error
	if f.A, err = parseEnd(words[0]); err != nil {
		return f, err
	}
	if f.B, err = parseEnd(words[2]); err != nil {
		return f, err
	}
	if err := f.Check(0); err != nil {
		return f, fmt.Errorf("flow %q: %w", s, err)
	}
	return f, nil
}

// Check says why no packet is of a flow that also has a port at either end, 0 for any; nil if one may be.
func (f Flow) Check(port uint16) error {
	var family string
	for _, side := range []Side{f.A, f.B} {
		if !side.Addresses.IsValid() {
			continue
		}
		is := "IPv6"
		if side.Addresses.Addr().Is4() {
			is = "IPv4"
		}
		if family != "" && is != family {
			return errors.New("one end is IPv4 and the other IPv6: trace the flow as it is on one side of the translation")
		}
		family = is
	}
	switch {
	case f.Protocol == "icmp" && family == "IPv6":
		return errors.New("icmp is of IPv4: with IPv6 addresses write icmpv6")
	case f.Protocol == "icmpv6" && family == "IPv4":
		return errors.New("icmpv6 is of IPv6: with IPv4 addresses write icmp")
	case (f.A.Port != 0 || f.B.Port != 0 || port != 0) && !hasPorts(f.Protocol):
		return fmt.Errorf("%s has no ports: leave them out", f.Protocol)
	case port != 0 && f.A.Port != 0 && f.B.Port != 0 && port != f.A.Port && port != f.B.Port:
		return fmt.Errorf("its ends have the ports %d and %d, neither is %d", f.A.Port, f.B.Port, port)
	}
	return nil
}

func hasPorts(protocol string) bool {
	switch protocol {
	case "", "tcp", "udp", "sctp", "udplite", "dccp":
		return true
	}
	return false
}

func parseEnd(s string) (Side, error) {
	var e Side
	wrong := fmt.Errorf("%q: want an address, a prefix, ADDRESS:PORT, *:PORT or any", s)
	if s == "any" || s == "*" {
		return e, nil
	}
	host, port := s, ""
	if a, err := netip.ParsePrefix(s); err == nil {
		e.Addresses = a.Masked()
		return e, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		host = a.String()
	} else if i := strings.LastIndexByte(s, ':'); i >= 0 {
		host, port = s[:i], s[i+1:]
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return e, fmt.Errorf("%q: want a port from 1 to 65535", s)
		}
		e.Port = uint16(n)
	}
	if host == "*" || host == "any" {
		return e, nil
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if p, err := netip.ParsePrefix(host); err == nil {
		e.Addresses = p.Masked()
		return e, nil
	}
	a, err := netip.ParseAddr(host)
	if err != nil || a.Zone() != "" {
		return e, wrong
	}
	a = a.Unmap()
	e.Addresses = netip.PrefixFrom(a, a.BitLen())
	return e, nil
}
