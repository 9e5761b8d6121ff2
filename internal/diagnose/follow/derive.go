// SPDX-License-Identifier: Apache-2.0

package follow

// The rules of a namespace: their names for what the kernel reports by handles, and what they do
// to packets of which the kernel reports nothing.

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"natkit/internal/diagnose/blame"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// book is what a namespace's rules were when the trace began, or later if others were met.
type book struct {
	place netns.Place

	mu     sync.Mutex // the reader of nftables' trace may read it again
	rules  *snapshot.Snapshot
	chains map[chainName]*snapshot.Chain
	taken  time.Time

	// Of Dropped alone: rules with the sets that they ask, if any packet may be looked up in them.
	asked   *snapshot.Snapshot
	askedAt time.Time
}

// bookAge is how old a book must be to be read again: for a rule that it does not have, or for one that nobody reports.
const bookAge = time.Second

type chainName struct{ family, table, name string }

// newBook reads the rules. What could be read is returned with the error of what could not.
func newBook(place netns.Place) (*book, error) {
	b := &book{place: place, rules: &snapshot.Snapshot{}}
	return b, b.take()
}

// take reads the rules as they are now. Of a namespace that can't be entered any more those of before stay.
func (b *book) take() error {
	b.taken = time.Now()
	rules, err := b.read(nil)
	if rules == nil {
		return err
	}
	b.rules, b.chains = rules, map[chainName]*snapshot.Chain{}
	for i := range b.rules.Chains {
		if c := &b.rules.Chains[i]; c.Backend == "nft" {
			b.chains[chainName{c.Family, c.Table, c.Name}] = c
		}
	}
	return err
}

// current are the rules, read again if that is long ago.
func (b *book) current() *snapshot.Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.taken) > bookAge {
		_ = b.take() // what can't be read translates nothing
	}
	return b.rules
}

// read reads the rules; nil if the namespace can't be entered.
func (b *book) read(drops []snapshot.Drop) (*snapshot.Snapshot, error) {
	h, err := open(b.place.Ref, b.place.Inode)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return probe.Rules(h, drops)
}

// forDrop are the rules with the sets that they ask, as far as a dropped packet needs them. To read thousands takes longer than
// until the next packet: those of the packet before are used again, unless that is long ago. nil if the namespace can't be entered.
func (b *book) forDrop(row snapshot.Drop) *snapshot.Snapshot {
	if b.asked != nil && time.Since(b.askedAt) <= bookAge {
		return b.asked
	}
	at := time.Now()
	rules, _ := b.read([]snapshot.Drop{row}) // of what can't be read nothing is derived
	b.asked, b.askedAt = rules, at
	if rules != nil && !ofAnyPacket(rules.Sets) {
		b.asked = nil
	}
	return rules
}

// ofAnyPacket says whether sets have all of their elements, and not only those that one packet met.
func ofAnyPacket(sets []snapshot.Set) bool {
	return !slices.ContainsFunc(sets, func(s snapshot.Set) bool { return s.Backend != "nft" || s.Size > len(s.Elements) })
}

// name completes what nftables reported: the hook of a base chain, the text of a rule.
func (b *book) name(e *snapshot.TraceEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.knows(e) && time.Since(b.taken) > bookAge {
		_ = b.take() // what can't be read has no text
		b.knows(e)
	}
}

// knows fills in what the book has of a rule, and says whether it has it.
func (b *book) knows(e *snapshot.TraceEvent) bool {
	c := b.chains[chainName{e.Rule.Family, e.Rule.Table, e.Rule.Chain}]
	if c == nil {
		return false
	}
	e.Hook, e.Family, e.Priority = c.Hook, c.Family, c.Priority
	if e.Rule.Handle == 0 {
		return true
	}
	i := slices.IndexFunc(c.Walk, func(r snapshot.Rule) bool { return r.Handle == e.Rule.Handle })
	if i >= 0 {
		e.Rule.Text = c.Walk[i].Text
	}
	return i >= 0
}

// Dropped are rules that may have dropped a packet: see trace.Deriver.
func (r *Run) Dropped(inode uint64, function string, p snapshot.DroppedPacket) []trace.Rule {
	b := r.at.book(inode)
	if b == nil {
		return nil
	}
	row := snapshot.Drop{Count: 1, Location: function + "+0x0", Cause: snapshot.CauseRule, Packets: []snapshot.DroppedPacket{p}, Interface: p.In}
	s := b.forDrop(row)
	if s == nil {
		return nil
	}
	var out []trace.Rule
	for _, d := range blame.Follow(s, row, p).Droppers {
		out = append(out, ruleOf(d.Chain, d.Rule))
	}
	return out
}

func ruleOf(c *snapshot.Chain, r *snapshot.Rule) trace.Rule {
	out := trace.Rule{Backend: c.Backend, Chain: c.Family + " " + c.Table + " " + c.Name, Derived: true}
	if c.Backend != "nft" {
		out.Chain = c.Backend + " " + c.Table + " " + c.Name
	}
	if r == nil {
		out.Policy, out.Verdict = true, c.Policy
		return out
	}
	out.Handle, out.Text, out.Verdict = r.Handle, r.Text, r.Verdict
	if r.Handle == 0 {
		out.Number = r.Number
	}
	return out
}

// Translated are rules that may have translated a packet: see trace.Deriver.
func (r *Run) Translated(inode uint64, hook string, p snapshot.DroppedPacket, after snapshot.TraceTuple) []trace.Rule {
	b := r.at.book(inode)
	if b == nil {
		return nil
	}
	rules := b.current()
	w := translators{s: rules, p: p, after: after}
	for i := range rules.Chains {
		c := &rules.Chains[i]
		if c.Hook == hook && c.Type == "nat" {
			w.chain(c)
		}
	}
	return w.out
}

// translators are the rules that translate and whose conditions may hold for a packet.
type translators struct {
	s     *snapshot.Snapshot
	p     snapshot.DroppedPacket
	after snapshot.TraceTuple
	out   []trace.Rule
	seen  int
}

// maxWalked bounds a walk; the kernel's own limit is on the depth of jumps.
const maxWalked = 20000

func (w *translators) chain(c *snapshot.Chain) {
	for i := range c.Walk {
		rule := &c.Walk[i]
		if w.seen++; w.seen > maxWalked {
			return
		}
		if !blame.MayMeet(w.s, c, rule, w.p) {
			continue
		}
		if rule.Chain != "" {
			for j := range w.s.Chains {
				if to := &w.s.Chains[j]; to.Name == rule.Chain && to.Table == c.Table && to.Family == c.Family && to.Backend == c.Backend {
					w.chain(to)
				}
			}
			continue
		}
		if w.translates(rule.Text) {
			w.out = append(w.out, ruleOf(c, rule))
		}
	}
}

// translates says whether a rule's text may have led to the packet's new ends.
func (w *translators) translates(text string) bool {
	words := strings.Fields(strings.ToLower(text))
	for i, word := range words {
		switch word {
		case "masquerade", "redirect", "netmap":
			return true
		case "dnat", "snat":
			end := w.after.Destination
			if word == "snat" {
				end = w.after.Source
			}
			to := slices.IndexFunc(words[i:], func(w string) bool { return w == "to" || strings.HasPrefix(w, "--to-") })
			return to < 0 || i+to+1 == len(words) || leadsTo(words[i+to+1], end)
		}
	}
	return false
}

// leadsTo says whether "10.0.0.1:80", "10.0.0.1-10.0.0.9:1024-2047", "[fd00::1]:80" or ":80" may have led to an end.
// Of what is read from a map that is not known.
func leadsTo(target string, end netip.AddrPort) bool {
	addresses, ports := target, ""
	if i := strings.LastIndexByte(target, ':'); i == 0 || i > 0 && (target[i-1] == ']' || strings.Count(target, ":") == 1) {
		addresses, ports = target[:i], target[i+1:]
	}
	if first, last, ok := ends(strings.NewReplacer("[", "", "]", "").Replace(addresses), netip.ParseAddr); ok && (end.Addr().Less(first) || last.Less(end.Addr())) {
		return false
	}
	first, last, ok := ends(ports, strconv.Atoi)
	port := int(end.Port())
	return !ok || port == 0 || first <= port && port <= last
}

// ends are those of a range, which may be one.
func ends[T any](text string, parse func(string) (T, error)) (first, last T, ok bool) {
	from, to, isRange := strings.Cut(text, "-")
	if !isRange {
		to = from
	}
	first, err := parse(from)
	if err == nil {
		last, err = parse(to)
	}
	return first, last, err == nil
}
