// SPDX-License-Identifier: Apache-2.0

// What single values of a rule file may look like.

package rulefile

import (
	"fmt"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// MaxSessions is the most that an engine holds; as many references fit in what counts
// them (NAT_REFS_COUNT of bpf/nat/abi.h).
const MaxSessions = 1<<24 - 1

// --- addresses -----------------------------------------------------------------------

// ipv4 reads an address; in messages n is where it stands.
func (r *reader) ipv4(n *yaml.Node, s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.Trim(s, "[]"))
	switch {
	case err != nil:
		r.fail(n, "want an IPv4 address and not %q%s", s, whyNoAddress(s))
	case !a.Is4():
		r.fail(n, "%s is an IPv6 address: only IPv4 is translated", a)
	default:
		return a, true
	}
	return netip.Addr{}, false
}

// whyNoAddress says, as the end of a message, what keeps a text from being an IPv4 address.
func whyNoAddress(s string) string {
	if strings.ContainsFunc(s, unicode.IsSpace) {
		return ": there is a space in it"
	}
	if i := strings.IndexFunc(s, unicode.IsControl); i >= 0 {
		c, _ := utf8.DecodeRuneInString(s[i:])
		return fmt.Sprintf(": there is a control character in it, %U", c)
	}
	if strings.ContainsFunc(s, func(c rune) bool { return !(c >= '0' && c <= '9' || c == '.') }) {
		return ": it has numbers and dots only, and names of hosts are not looked up"
	}
	octets := strings.Split(s, ".")
	for _, octet := range octets {
		n, err := strconv.ParseUint(octet, 10, 8)
		switch {
		case octet == "":
			return ": a number is missing between the dots"
		case len(octet) > 1 && octet[0] == '0' && err == nil:
			return fmt.Sprintf(": %s begins with a zero, which some programs read as octal; write %d", octet, n)
		case err != nil:
			return fmt.Sprintf(": %s is more than 255", octet)
		}
	}
	if len(octets) != 4 {
		return fmt.Sprintf(": it has four numbers, and here are %d", len(octets))
	}
	return ""
}

// whyNoPrefix does the same for a prefix.
func whyNoPrefix(s string) string {
	address, length, _ := strings.Cut(s, "/")
	if a, err := netip.ParseAddr(address); err != nil {
		return whyNoAddress(address)
	} else if a.Is6() {
		return ": only IPv4 is translated"
	}
	if mask, err := netip.ParseAddr(length); err == nil && mask.Is4() {
		m := number(mask)
		if ones := bits.LeadingZeros32(^m); m<<ones == 0 {
			return fmt.Sprintf(": write the mask as its length, %s/%d", address, ones)
		}
		return ": write the length of the prefix, from 0 to 32, and not a mask"
	}
	n, err := strconv.ParseUint(length, 10, 32)
	switch {
	case length == "":
		return ": the length behind / is missing, from 0 to 32"
	case strings.Trim(length, "0123456789") != "":
		return fmt.Sprintf(": the length of a prefix is a number from 0 to 32, and not %q", length)
	case err == nil && len(length) > 1 && length[0] == '0':
		return fmt.Sprintf(": %s begins with a zero; write /%d", length, n)
	}
	return fmt.Sprintf(": a prefix has 32 bits at most, and %s are named", length)
}

// host reads an address that a host can have.
func (r *reader) host(n *yaml.Node, s string) (netip.Addr, bool) {
	a, ok := r.ipv4(n, s)
	return a, ok && r.hosts(n, AddressRange{a, a})
}

// hosts refuses addresses that no host can have.
func (r *reader) hosts(n *yaml.Node, a AddressRange) bool {
	for _, never := range neverHosts {
		if a.First.Compare(never.Last) <= 0 && never.First.Compare(a.Last) <= 0 {
			r.fail(n, "%s: no host has an address in %s (%s)", a, never.AddressRange, never.what)
			return false
		}
	}
	return true
}

// neverHosts are of RFC 1122, section 3.2.1.3, and RFC 1112.
var neverHosts = []struct {
	AddressRange
	what string
}{
	{RangeOf(netip.MustParsePrefix("0.0.0.0/8")), "this network"},
	{RangeOf(netip.MustParsePrefix("127.0.0.0/8")), "loopback"},
	{RangeOf(netip.MustParsePrefix("224.0.0.0/3")), "multicast, reserved, broadcast"},
}

// prefix reads a prefix, an address, or any.
func (r *reader) prefix(n *yaml.Node, s string) (netip.Prefix, bool) {
	if s == "any" {
		return Everywhere, true
	}
	if !strings.Contains(s, "/") {
		a, ok := r.ipv4(n, s)
		return netip.PrefixFrom(a, 32), ok
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		r.fail(n, "want an IPv4 address, a prefix such as 10.0.0.0/8, or any, and not %q%s", s, whyNoPrefix(s))
	case !p.Addr().Is4():
		r.fail(n, "%s is IPv6: only IPv4 is translated", p)
	case p != p.Masked():
		r.fail(n, "%s has bits set behind its length: write %s or %s", p, p.Masked(), p.Addr())
	default:
		return p, true
	}
	return netip.Prefix{}, false
}

// addresses reads an address, a prefix, or first-last.
func (r *reader) addresses(n *yaml.Node) (AddressRange, bool) {
	s := r.word(n, "addresses")
	if s == "" {
		return AddressRange{}, false
	}
	var a AddressRange
	if first, last, ok := strings.Cut(s, "-"); ok {
		var known bool
		if a.First, ok = r.ipv4(n, strings.TrimSpace(first)); !ok {
			return a, false
		}
		if a.Last, known = r.ipv4(n, strings.TrimSpace(last)); !known {
			return a, false
		}
		if a.Last.Less(a.First) {
			r.fail(n, "%s comes after %s", a.First, a.Last)
			return a, false
		}
	} else {
		p, ok := r.prefix(n, s)
		if !ok {
			return a, false
		}
		a = RangeOf(p)
	}
	return a, r.hosts(n, a)
}

// endpoint reads address[:port or range].
func (r *reader) endpoint(n *yaml.Node, s string) (a netip.Addr, ports PortRange, ok bool) {
	address, port, named := strings.Cut(s, ":")
	if strings.Contains(port, ":") { // IPv6, with ports perhaps
		address, named = s, false
		if i := strings.LastIndex(s, "]:"); i > 0 {
			address = s[:i+1]
		}
	}
	if a, ok = r.host(n, address); ok && named {
		ports = r.portRange(n, port)
	}
	return a, ports, ok
}

// --- ports and protocols ---------------------------------------------------------------

func (r *reader) ports(n *yaml.Node) PortRange {
	if s := r.word(n, "ports"); s != "" {
		return r.portRange(n, s)
	}
	return PortRange{}
}

// portRange reads a port, or first-last; zero after a complaint.
func (r *reader) portRange(n *yaml.Node, s string) PortRange {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, okA := port(first)
	b, okB := port(last)
	switch {
	case !okA || !okB:
		r.fail(n, "want a port from 1 to 65535, or a range such as 8000-8099, and not %q%s", s, whyNoPort(s))
	case a > b:
		r.fail(n, "port %d comes after %d", a, b)
	default:
		return PortRange{a, b}
	}
	return PortRange{}
}

func port(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0 && s[0] != '0'
}

// whyNoPort says, as the end of a message, what is wrong with a port or a range of them.
func whyNoPort(s string) string {
	for p := range strings.SplitSeq(s, "-") {
		n, err := strconv.ParseUint(p, 10, 16)
		switch {
		case p == "":
			return ": a port is missing"
		case strings.Trim(p, "0123456789") != "":
			return fmt.Sprintf(": %q is not a number", p)
		case err != nil:
			return fmt.Sprintf(": %s is more than 65535", p)
		case n == 0:
			return ": 0 is no port"
		case p[0] == '0':
			return fmt.Sprintf(": %s begins with a zero; write %d", p, n)
		}
	}
	return ""
}

func (r *reader) protocol(n *yaml.Node, s string) Protocol {
	p, err := ParseProtocol(s)
	if err != nil {
		r.fail(n, "%v", err)
	}
	return p
}

// --- words and numbers -----------------------------------------------------------------

// maxLinkName is IFNAMSIZ without its end.
const maxLinkName = 15

// link reads an interface's name, as the kernel allows them.
func (r *reader) link(n *yaml.Node, what string) string {
	name := r.word(n, what)
	if len(name) > maxLinkName || name == "." || name == ".." || strings.ContainsFunc(name, func(c rune) bool {
		return c == '/' || c == ':' || c == 0x7f || unicode.IsSpace(c) || unicode.IsControl(c) || invisible(c)
	}) {
		r.fail(n, "%q can't be the name of an interface: that has at most %d bytes, without spaces, / and :", name, maxLinkName)
		return ""
	}
	return name
}

const maxPoolName = 32

// isPoolName keeps pools apart from addresses.
func isPoolName(s string) bool {
	for i, c := range s {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || !(c >= '0' && c <= '9' || c == '-' || c == '_')) {
			return false
		}
	}
	return s != "" && len(s) <= maxPoolName
}

// choice reads one of the names, as its index; 0 after a complaint.
func (r *reader) choice(n *yaml.Node, what string, names []string) int {
	s := r.word(n, what)
	found := nameOf(names, s)
	if s != "" && found == 0 {
		r.fail(n, "%s is %s, and not %q%s", what, choices(names), s, didYouMean(s, names[1:]))
	}
	return found
}

// readPerClass reads one choice for all classes, or a map with some of them.
func readPerClass[T interface {
	~uint8
	comparable
}](r *reader, e entry, names []string, to *PerClass[T]) {
	if e.value.Kind != yaml.MappingNode {
		if mode := r.choice(e.value, e.name, names); mode != 0 {
			*to = PerClass[T]{T(mode), T(mode), T(mode)}
		}
		return
	}
	for _, class := range r.entries(e.value, e.name) {
		at := -1
		for c := range Class(PortClasses) {
			if c.String() == class.name {
				at = int(c)
			}
		}
		if at < 0 {
			r.unknown(class, e.name, "tcp", "udp", "icmp")
		} else if mode := r.choice(class.value, e.name, names); mode != 0 {
			to[at] = T(mode)
		}
	}
}

// truth reads true or false.
func (r *reader) truth(n *yaml.Node, what string) bool {
	s := r.word(n, what)
	if s != "" && s != "true" && s != "false" {
		r.fail(n, "%s is true or false, and not %q", what, s)
	}
	return s == "true"
}

// silent reads arp: none.
func (r *reader) silent(n *yaml.Node) bool {
	s := r.word(n, "arp")
	if s != "" && s != "none" {
		r.fail(n, "arp is none, or not there, and not %q", s)
	}
	return s == "none"
}

// number reads a decimal number; 0 after a complaint. With a zero before it YAML 1.1 means octal and YAML 1.2 decimal: it is refused.
func (r *reader) number(e entry, least, most int) int {
	s := r.word(e.value, e.name)
	n, err := strconv.ParseUint(s, 10, 63)
	switch {
	case s == "":
	case err == nil && len(s) > 1 && s[0] == '0':
		r.fail(e.value, "%s: a number begins with no zero, and %q does", e.name, s)
	case err != nil || n < uint64(least) || n > uint64(most):
		r.fail(e.value, "%s is a number from %d to %d, and not %q", e.name, least, most, s)
	default:
		return int(n)
	}
	return 0
}

func (r *reader) duration(n *yaml.Node, what string) (time.Duration, bool) {
	s := r.word(n, what)
	if s == "" {
		return 0, false
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil && strings.Trim(s, "0123456789") == "":
		r.fail(n, "%s needs a unit: %ss, %sm or %sh", what, s, s, s)
	case err != nil:
		r.fail(n, "%s is a time such as 300s, 5m or 2h4m, and not %q", what, s)
	case d < MinTimeout || d > MaxTimeout:
		r.fail(n, "%s is from %s to %s, and not %s", what, MinTimeout, durationText(MaxTimeout), s)
	default:
		return d, true
	}
	return 0, false
}

// durationText writes whole seconds as seconds: so RFCs count.
func durationText(d time.Duration) string {
	if d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	}
	return d.String()
}
