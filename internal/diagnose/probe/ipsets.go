// SPDX-License-Identifier: Apache-2.0

package probe

// Sets of ipset: which ones rules of iptables mean, and what is in them.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// Numbers of linux/netfilter/ipset/ip_set.h.
const (
	ipsetProtocol = 7
	ipsetCmdList  = 7

	ipsetAttrProtocol = 1
	ipsetAttrName     = 2
	ipsetAttrType     = 3
	ipsetAttrData     = 7
	ipsetAttrADT      = 8
	ipsetAttrIndex    = 11

	ipsetAttrIP      = 1
	ipsetAttrIPTo    = 2
	ipsetAttrCIDR    = 3
	ipsetAttrPort    = 4
	ipsetAttrPortTo  = 5
	ipsetAttrTimeout = 6
	ipsetAttrProto   = 7
	ipsetAttrFlags   = 8
	ipsetAttrIP2     = 20
	ipsetAttrCIDR2   = 21
	ipsetAttrIface   = 23

	ipsetNoMatch = 1 << 2
)

// ipset is one as the kernel lists it.
type ipset struct {
	index    int
	name     string
	kind     string // hash:ip,port
	timeout  uint32
	elements []ipsetElement
}

type ipsetElement struct {
	ip, ip2  string // with a length, or a range
	port     string
	protocol string
	iface    string
	timeout  uint32
	noMatch  bool
}

// readIPSets names the sets that rules of iptables ask, and reads them.
func readIPSets(s *snapshot.Snapshot, packets []snapshot.DroppedPacket) error {
	asks := slices.ContainsFunc(s.Chains, func(c snapshot.Chain) bool {
		return slices.ContainsFunc(c.Walk, func(r snapshot.Rule) bool {
			return slices.ContainsFunc(r.Matches, func(m snapshot.Match) bool { return strings.HasPrefix(m.Set, "#") })
		})
	})
	if !asks {
		return nil
	}
	all, err := listIPSets()
	if err != nil {
		return err
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		for n := range c.Walk {
			nameIPSets(s, c, &c.Walk[n], all, packets)
		}
	}
	return nil
}

// nameIPSets gives a rule's conditions the names of their sets, and saves these.
func nameIPSets(s *snapshot.Snapshot, c *snapshot.Chain, r *snapshot.Rule, all []ipset, packets []snapshot.DroppedPacket) {
	for i := range r.Matches {
		m := &r.Matches[i]
		index, err := strconv.Atoi(strings.TrimPrefix(m.Set, "#"))
		at := slices.IndexFunc(all, func(set ipset) bool { return set.index == index })
		if !strings.HasPrefix(m.Set, "#") || err != nil {
			continue
		}
		dims, flags := int(m.Mask>>8), int(m.Mask&0xff)
		m.Mask = 0
		if at < 0 {
			m.Set, m.Keys = "", nil
			continue
		}
		set := all[at]
		sides := make([]string, dims)
		for d := range sides {
			sides[d] = map[bool]string{true: "src", false: "dst"}[flags&(2<<d) != 0]
		}
		text := "-m set " + map[bool]string{true: "! "}[m.Not] + "--match-set " + set.name + " " + strings.Join(sides, ",")
		r.Text = strings.Replace(r.Text, m.Text, text, 1)
		m.Text, m.Set, m.Keys = text, set.name, ipsetKeys(c.Family, set.kind, sides)
		if m.Keys == nil || slices.ContainsFunc(s.Sets, func(o snapshot.Set) bool { return o.Backend == "ipset" && o.Name == set.name }) {
			continue
		}
		out := snapshot.Set{Backend: "ipset", Name: set.name, Size: len(set.elements), Whole: true}
		for _, e := range set.elements {
			out.Elements = append(out.Elements, e.words(m.Keys, set.timeout))
		}
		keepElements(s, c, &out, m.Keys, packets)
		s.Sets = append(s.Sets, out)
	}
}

// ipsetKeys are the fields that a set of a type is asked by, nil for one that is not known.
func ipsetKeys(family, kind string, sides []string) (keys []string) {
	_, parts, _ := strings.Cut(kind, ":")
	for i, part := range strings.Split(parts, ",") {
		if i >= len(sides) {
			return nil
		}
		source := sides[i] == "src"
		switch part {
		case "ip", "net":
			keys = append(keys, family+" "+map[bool]string{true: "saddr", false: "daddr"}[source])
		case "port":
			keys = append(keys, "th "+map[bool]string{true: "sport", false: "dport"}[source])
			if kind != "bitmap:port" {
				keys = append(keys, "meta l4proto")
			}
		case "iface":
			keys = append(keys, map[bool]string{true: "iifname", false: "oifname"}[source])
		default:
			return nil
		}
	}
	return keys
}

// words are an element's values for these fields.
func (e ipsetElement) words(keys []string, timeout uint32) snapshot.Element {
	out := snapshot.Element{TimeoutSeconds: float64(timeout), ExpiresSeconds: float64(e.timeout), Not: e.noMatch}
	addresses := 0
	for _, key := range keys {
		word := ""
		switch {
		case strings.HasSuffix(key, "addr"):
			word = []string{e.ip, e.ip2}[min(addresses, 1)]
			addresses++
		case strings.HasSuffix(key, "port"):
			word = e.port
		case key == "meta l4proto":
			word = e.protocol
		default:
			word = e.iface
		}
		out.Key = append(out.Key, word)
	}
	return out
}

// listIPSets lists all sets with what is in them.
func listIPSets() (out []ipset, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &largeMessages)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	defer conn.Close()
	ae := netlink.NewAttributeEncoder()
	ae.Uint8(ipsetAttrProtocol, ipsetProtocol)
	attrs, err := ae.Encode()
	if err != nil {
		return nil, err
	}
	msgs, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_IPSET<<8 | ipsetCmdList), Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{unix.AF_INET, unix.NFNETLINK_V0, 0, 0}, attrs...),
	})
	if err != nil {
		return nil, fmt.Errorf("list sets of ipset: %w", err)
	}
	for _, m := range msgs {
		if len(m.Data) < 4 {
			return nil, errors.New("list sets of ipset: a message is too short")
		}
		var set ipset
		if set, err = parseIPSet(m.Data[4:]); err != nil {
			return nil, fmt.Errorf("list sets of ipset: %w", err)
		}
		if i := slices.IndexFunc(out, func(o ipset) bool { return o.name == set.name }); i >= 0 { // a large one takes several messages
			out[i].elements = append(out[i].elements, set.elements...)
		} else {
			out = append(out, set)
		}
	}
	return out, nil
}

func parseIPSet(attrs []byte) (set ipset, err error) {
	err = decode(attrs, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case ipsetAttrName:
			set.name = ad.String()
		case ipsetAttrType:
			set.kind = ad.String()
		case ipsetAttrIndex:
			set.index = int(ad.Uint16())
		case ipsetAttrData:
			if a := attrsOf(ad); len(a[ipsetAttrTimeout]) == 4 {
				set.timeout = a.number(ipsetAttrTimeout)
			}
		case ipsetAttrADT:
			nested(ad, func(ad *netlink.AttributeDecoder) {
				set.elements = append(set.elements, parseIPSetElement(attrsOf(ad)))
			})
		}
	})
	return set, err
}

func parseIPSetElement(a nftAttrs) (e ipsetElement) {
	e.ip, e.ip2 = ipsetAddress(a, ipsetAttrIP, ipsetAttrCIDR), ipsetAddress(a, ipsetAttrIP2, ipsetAttrCIDR2)
	if to := ipsetAddress(a, ipsetAttrIPTo, 0); to != "" {
		e.ip += "-" + to
	}
	if b := a[ipsetAttrPort]; len(b) == 2 {
		e.port = strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	}
	if b := a[ipsetAttrPortTo]; len(b) == 2 {
		e.port += "-" + strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	}
	if b := a[ipsetAttrProto]; len(b) == 1 {
		e.protocol = valueWord("meta l4proto", b)
	}
	e.timeout = a.number(ipsetAttrTimeout)
	e.iface = a.text(ipsetAttrIface)
	e.noMatch = a.number(ipsetAttrFlags)&ipsetNoMatch != 0
	return e
}

// ipsetAddress writes an address with its length, "" if there is none.
func ipsetAddress(a nftAttrs, attr, length uint16) (word string) {
	decode(a[attr], func(ad *netlink.AttributeDecoder) { word = addrWord(ad.Bytes()) })
	if b := a[length]; word != "" && len(b) == 1 {
		word += "/" + strconv.Itoa(int(b[0]))
	}
	return word
}
