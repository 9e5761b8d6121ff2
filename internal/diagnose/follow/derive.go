// SPDX-License-Identifier: Apache-2.0

package follow

// The rules of a namespace: their names for what the kernel reports by handles, and what they do
// to packets of which the kernel reports nothing.

import (
	"slices"
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
}

// bookAge is how old a book must be to be read again for a rule that it does not have.
const bookAge = time.Second

type chainName struct{ family, table, name string }

// newBook reads the rules. What could be read is returned with the error of what could not.
func newBook(place netns.Place) (*book, error) {
	b := &book{place: place}
	return b, b.take()
}

// take reads the rules as they are now.
func (b *book) take() error {
	var err error
	b.rules, err = b.read(nil)
	b.taken, b.chains = time.Now(), map[chainName]*snapshot.Chain{}
	for i := range b.rules.Chains {
		if c := &b.rules.Chains[i]; c.Backend == "nft" {
			b.chains[chainName{c.Family, c.Table, c.Name}] = c
		}
	}
	return err
}

func (b *book) read(drops []snapshot.Drop) (*snapshot.Snapshot, error) {
	h, err := netns.Open(b.place.Ref)
	if err != nil {
		return &snapshot.Snapshot{}, err
	}
	defer h.Close()
	return probe.Rules(h, drops)
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
	s, _ := b.read([]snapshot.Drop{row}) // of what can't be read nothing is derived
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
	b.mu.Lock()
	rules := b.rules
	b.mu.Unlock()
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
			rest := strings.Join(words[i:], " ")
			return strings.Contains(rest, end.Addr().String()) || !strings.ContainsAny(rest, "0123456789") || strings.Contains(rest, "map") || strings.Contains(rest, "-")
		}
	}
	return false
}
