// SPDX-License-Identifier: Apache-2.0

package probe

// The sets that rules ask, as far as packets that rules dropped may have met them.

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/blame"
	"natkit/internal/snapshot"
)

// sets reads the elements of sets, where rules dropped something. It comes after the drops.
func sets() source {
	return source{
		name:  snapshot.CanSets,
		costs: "which set elements packets matched is unknown, and so is which of the rules with sets dropped them",
		live:  true,
		end: func(v *view, s *snapshot.Snapshot) error {
			packets := ruledPackets(s)
			if len(packets) == 0 {
				return nil
			}
			err := readNFTSets(s, packets)
			if err2 := readIPSets(s, packets); err == nil {
				err = err2
			}
			return err
		},
	}
}

// maxAsked is how many packets each element of a large set is compared with.
const maxAsked = 64

// ruledPackets are the packets that rules dropped, those of one pair and port once.
func ruledPackets(s *snapshot.Snapshot) (out []snapshot.DroppedPacket) {
	if s.Drops == nil {
		return nil
	}
	seen := map[string]bool{}
	for _, row := range s.Drops.Rows {
		for _, p := range row.Packets {
			if key := p.Text + p.In + p.Out + p.State; !seen[key] && len(out) < maxAsked {
				seen[key] = true
				out = append(out, p)
			}
		}
	}
	return out
}

// askedSet is a set that a rule asks.
type askedSet struct {
	chain *snapshot.Chain
	name  string
}

// readNFTSets reads the sets of nftables that saved rules ask.
func readNFTSets(s *snapshot.Snapshot, packets []snapshot.DroppedPacket) error {
	asked, order := map[askedSet][]string{}, []askedSet{}
	known := map[string]bool{}
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Backend != "nft" {
			continue
		}
		note := func(name string, keys []string) {
			if id := c.Family + " " + c.Table + " " + name; name != "" && len(keys) > 0 && !known[id] {
				known[id] = true
				of := askedSet{c, name}
				asked[of], order = keys, append(order, of)
			}
		}
		for _, r := range c.Walk {
			note(r.Map, r.MapKeys)
			for _, m := range r.Matches {
				note(m.Set, m.Keys)
			}
		}
	}
	if len(order) == 0 {
		return nil
	}
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &largeMessages)
	if err != nil {
		return fmt.Errorf("open netfilter socket: %w", err)
	}
	defer conn.Close()
	about := newNFTRuleset()
	if err := whole(func() error { return listNFTables(conn, unix.NFT_MSG_GETSET, "sets", about.addSet) }); err != nil {
		return err
	}
	for _, of := range order {
		key := nftKey{familyNumber(of.chain.Family), of.chain.Table, ""}
		kind := about.sets[key][of.name]
		elements, err := nftElements(conn, key, of.name)
		if err != nil {
			continue // it is gone, or changes too fast: what is in it is not known
		}
		set := snapshot.Set{Backend: "nft", Family: of.chain.Family, Table: of.chain.Table, Name: of.name, Size: len(elements), Whole: true}
		slices.SortStableFunc(elements, func(a, b nftElement) int { return bytes.Compare(a.key, b.key) })
		for _, e := range intervals(elements, kind.interval) {
			set.Elements = append(set.Elements, elementOf(asked[of], e, kind.interval))
		}
		set.Size = len(set.Elements)
		keepElements(s, of.chain, &set, asked[of], packets)
		s.Sets = append(s.Sets, set)
		if kind.anonymous {
			spellOut(s, of.chain, set, asked[of])
		}
	}
	return nil
}

func familyNumber(name string) uint8 {
	for number, n := range nftFamilies {
		if n == name {
			return number
		}
	}
	return unix.NFPROTO_UNSPEC
}

// intervals makes ranges of where they begin and where they end.
func intervals(elements []nftElement, interval bool) []nftElement {
	if !interval || slices.ContainsFunc(elements, func(e nftElement) bool { return e.last != nil }) {
		return elements
	}
	slices.SortStableFunc(elements, func(a, b nftElement) int {
		if n := bytes.Compare(a.key, b.key); n != 0 {
			return n
		}
		return map[bool]int{true: -1, false: 1}[a.end] // an end before what begins there
	})
	var out []nftElement
	for i, e := range elements {
		if e.end {
			continue
		}
		e.last = slices.Repeat([]byte{0xff}, len(e.key))
		if i+1 < len(elements) {
			e.last = before(elements[i+1].key)
		}
		out = append(out, e)
	}
	return out
}

// before is the number one less.
func before(key []byte) []byte {
	out := slices.Clone(key)
	for i := len(out) - 1; i >= 0; i-- {
		out[i]--
		if out[i] != 0xff {
			break
		}
	}
	return out
}

// keyLength is how long a field is in the key of a set.
func keyLength(key string) (n int) {
	switch {
	case strings.HasSuffix(key, "port"):
		return 2
	case strings.HasPrefix(key, "@"): // "@th,16,16", in bits
		bits, _ := strconv.Atoi(key[strings.LastIndexByte(key, ',')+1:])
		return bits / 8
	case strings.HasPrefix(key, "fib "), strings.HasPrefix(key, "socket "), strings.HasPrefix(key, "rt "), strings.HasPrefix(key, "numgen "):
		return 4
	}
	key = strings.NewReplacer("ct original ", "ct ", "ct reply ", "ct ").Replace(key)
	for _, parts := range []map[uint32]nftPart{nftMeta, nftCT} {
		for _, p := range parts {
			if p.key == key {
				return p.length
			}
		}
	}
	for _, f := range slices.Concat(ipv4Fields, ipv6Fields, linkFields, arpFields) {
		if f.key == key {
			return f.length
		}
	}
	head, field, _ := strings.Cut(key, " ")
	for _, f := range transportFields[head] {
		if f.key == field {
			return f.length
		}
	}
	return 1 // types, codes and flags
}

// elementOf puts an element into words. Sets of intervals hold all in the network's order.
func elementOf(keys []string, e nftElement, interval bool) snapshot.Element {
	out := snapshot.Element{TimeoutSeconds: float64(e.timeout) / 1000, ExpiresSeconds: float64(e.expires) / 1000}
	if e.verdict != nil {
		out.Verdict, out.Chain = verdictWord(e.verdict.code), e.verdict.chain
	}
	from, last := e.key, e.last
	if last == nil {
		last = from
	}
	for _, key := range keys {
		size := keyLength(key)
		if len(from) < size || len(last) < size {
			return out
		}
		p := nftPart{key: key, turned: interval && native(key)}
		out.Key = append(out.Key, rangeWord(key, p.inOrder(from[:size]), p.inOrder(last[:size])))
		step := min((size+3)/4*4, len(from), len(last))
		from, last = from[step:], last[step:]
	}
	return out
}

// keepElements leaves in a large set what the packets may have met.
func keepElements(s *snapshot.Snapshot, c *snapshot.Chain, set *snapshot.Set, keys []string, packets []snapshot.DroppedPacket) {
	if len(set.Elements) <= snapshot.MaxElements {
		return
	}
	met := map[int]bool{}
	for _, p := range packets {
		for _, i := range blame.Met(s, c, set, keys, p) {
			met[i] = true
		}
	}
	var kept []snapshot.Element
	for i, e := range set.Elements {
		if met[i] && len(kept) < 4*snapshot.MaxElements {
			kept = append(kept, e)
		}
	}
	set.Elements = kept
}

// shownElements is how many elements of a set without a name a rule's text shows.
const shownElements = 12

// spellOut writes the elements of a set that has no name where rules name it.
func spellOut(s *snapshot.Snapshot, of *snapshot.Chain, set snapshot.Set, keys []string) {
	var words []string
	for i, e := range set.Elements {
		if i == shownElements {
			words = append(words, "...")
			break
		}
		parts := slices.Clone(e.Key)
		for n := range parts {
			parts[n] = spelt(keys[n], parts[n])
		}
		word := strings.Join(parts, " . ")
		switch {
		case e.Chain != "":
			word += " : " + e.Verdict + " " + e.Chain
		case e.Verdict != "":
			word += " : " + e.Verdict
		}
		words = append(words, word)
	}
	list := "{ " + strings.Join(words, ", ") + " }"
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Backend != "nft" || c.Family != of.Family || c.Table != of.Table {
			continue
		}
		for n := range c.Walk {
			c.Walk[n].Text = replaceName(c.Walk[n].Text, "@"+set.Name, list)
		}
	}
}

// replaceName replaces a set's name, and none that only begins like it.
func replaceName(text, name, by string) string {
	head, tail, found := strings.Cut(text, name)
	if !found || tail != "" && tail[0] != ' ' {
		return text
	}
	return head + by + tail
}
