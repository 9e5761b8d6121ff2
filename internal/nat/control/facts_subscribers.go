// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/snapshot"
)

// maxRefused is how many subscribers that were refused something a reading keeps until the one
// after the window says which of them were refused since.
const maxRefused = 4096

// subscriberFacts adds subscribers, their classes and pools. The reading before the window has
// only subscribers that were refused something.
func (s *Status) subscriberFacts(ns *netns.Handle, out, before *snapshot.Engine, whole bool) error {
	e, err := Open(ns)
	if err != nil {
		return err
	}
	return errors.Join(s.readSubscriberFacts(e, out, before, whole), e.Close())
}

// refusedKey is what stays of a subscriber between two readings.
type refusedKey struct {
	addr netip.Addr
	link string // where the addresses behind interfaces may be the same
	pool string
}

// refusedEarlier are what subscribers had been refused at an earlier reading.
type refusedEarlier map[refusedKey]map[string]uint64

func refusedBefore(before *snapshot.Engine) refusedEarlier {
	was := refusedEarlier{}
	if before != nil {
		for _, src := range before.Sources {
			was[refusedKey{src.Addr, src.Interface, src.Pool}] = src.Refused
		}
	}
	return was
}

// since leaves of what a subscriber was refused what it was refused after that.
func (r refusedEarlier) since(sub *Subscriber) {
	if earlier := r[refusedKey{sub.Of.Addr(), sub.Interface, sub.Pool}]; earlier != nil {
		sub.Refused = increases(earlier, sub.Refused)
	}
}

func (s *Status) readSubscriberFacts(e *datapath.Engine, out, before *snapshot.Engine, whole bool) error {
	var refused, busiest topSubscribers
	refused.by, busiest.by = (*Subscriber).AllRefused, func(s *Subscriber) uint64 { return uint64(s.Sessions) }
	refused.most, busiest.most = maxRefused, snapshot.TopN
	if !whole {
		busiest.most = 0
	}
	was := refusedBefore(before)
	totals := map[string]*SubscriberTotal{}
	err := s.books.each(e, func(sub *Subscriber) bool {
		out.Subscribers++
		total(totals, sub.Pool, sub)
		was.since(sub)
		refused.add(sub)
		busiest.add(sub)
		return true
	})
	if err != nil {
		return err
	}
	if s.Pools, err = s.books.poolStatus(e, s.Addresses, totals); err != nil {
		return err
	}
	out.Pools = s.poolFacts(totals, before)
	rows := refused.list()
	if whole {
		rows = rows[:min(len(rows), snapshot.TopN)]
		for _, sub := range busiest.list() {
			if !slices.ContainsFunc(rows, func(r Subscriber) bool { return r.Of == sub.Of && r.Interface == sub.Interface && r.Pool == sub.Pool }) {
				rows = append(rows, sub)
			}
		}
		if err := s.books.holdDown(e, rows); err != nil {
			return err
		}
		out.Classes = s.classFacts(rows)
	}
	for i := range rows {
		out.Sources = append(out.Sources, sourceFact(&rows[i]))
	}
	return nil
}

// increases are what counters have grown by, only those above zero. A subscriber that was gone in
// between starts again at zero.
func increases(before, now map[string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for name, n := range now {
		if was := before[name]; was <= n {
			n -= was
		}
		if n > 0 {
			out[name] = n
		}
	}
	return out
}

// topSubscribers are those with most of something, of any number.
type topSubscribers struct {
	by   func(*Subscriber) uint64
	most int
	rows []Subscriber
}

// add keeps it if it has any and may be among the most.
func (t *topSubscribers) add(s *Subscriber) {
	if t.most == 0 || t.by(s) == 0 {
		return
	}
	if t.rows = append(t.rows, *s); len(t.rows) >= 2*t.most+1024 {
		t.list()
	}
}

// list is the most of those that were added, most first.
func (t *topSubscribers) list() []Subscriber {
	slices.SortFunc(t.rows, func(a, b Subscriber) int {
		return cmp.Or(cmp.Compare(t.by(&b), t.by(&a)), a.Of.Addr().Compare(b.Of.Addr()), cmp.Compare(a.Interface, b.Interface), cmp.Compare(a.Pool, b.Pool))
	})
	t.rows = t.rows[:min(len(t.rows), t.most)]
	return t.rows
}

func sourceFact(s *Subscriber) snapshot.EngineSource {
	out := snapshot.EngineSource{Addr: s.Of.Addr(), Interface: s.Interface, Pool: s.Pool, Class: s.Class, Sessions: uint64(s.Sessions), Blocks: uint64(len(s.Blocks))}
	if s.Of.Bits() < 32 {
		out.Prefix = s.Of.Bits()
	}
	for _, b := range s.Blocks {
		out.BlockPorts += uint64(b.Last-b.First) + 1
	}
	if s.Ports != nil {
		out.Ports = uint64(*s.Ports)
	}
	if s.HoldDown != nil {
		out.HoldDown = uint64(*s.HoldDown)
	}
	if len(s.Refused) > 0 {
		out.Refused = s.Refused
	}
	return out
}

// poolFacts are the pools, fullest first.
func (s *Status) poolFacts(totals map[string]*SubscriberTotal, before *snapshot.Engine) []snapshot.EnginePool {
	var out []snapshot.EnginePool
	for _, p := range s.Pools {
		fact := snapshot.EnginePool{
			Name: p.Name, Addresses: uint64(p.Addresses), Subscribers: uint64(p.Subscribers), NearLimit: uint64(p.NearLimit),
			Ports: uint64(p.Ports), FreeTCP: uint64(p.FreeTCP), FreeUDP: uint64(p.FreeUDP), FreeICMP: uint64(p.FreeICMP), Share: p.Share, Refused: p.Refused,
		}
		if b := p.Blocks; b != nil {
			fact.BlockSize, fact.ExtraSize, fact.ExtraMax = uint64(b.Size), uint64(b.Extra), uint64(b.AtMost)
			fact.BlocksUsed, fact.BlocksFree = uint64(b.Used), uint64(b.Free)
		}
		if t := totals[p.Name]; t != nil && t.Ports != nil {
			fact.Taken = uint64(*t.Ports)
		}
		if before != nil {
			if i := slices.IndexFunc(before.Pools, func(b snapshot.EnginePool) bool { return b.Name == p.Name }); i >= 0 {
				fact.Refused = increases(before.Pools[i].Refused, p.Refused)
			}
		}
		if len(fact.Refused) == 0 {
			fact.Refused = nil
		}
		if pool := s.file.Pool(p.Name); pool != nil {
			fact.Lines = s.keyLines(pool.Position.Line, map[string]int{"size": pool.Blocks.Size, "extra": pool.Blocks.Extra, "at_most": pool.Blocks.AtMost})
		}
		out = append(out, fact)
	}
	slices.SortStableFunc(out, func(a, b snapshot.EnginePool) int { return cmp.Compare(b.Share, a.Share) })
	return out[:min(len(out), snapshot.TopN)]
}

// classFacts are the classes of some subscribers.
func (s *Status) classFacts(rows []Subscriber) []snapshot.EngineClass {
	var out []snapshot.EngineClass
	for i := range rows {
		name := rows[i].Class
		if s.file.Subscribers.Prefix == 0 || slices.ContainsFunc(out, func(c snapshot.EngineClass) bool { return c.Name == name }) {
			continue
		}
		share, line := s.file.Subscribers.Default, lineFrom(s.text, lineOf(s.text, `^subscribers:`), fmt.Sprintf(`\b%s:`, name))
		for _, c := range s.file.Subscribers.Classes {
			if c.Name == name {
				share, line = c.Share, c.Position.Line
			}
		}
		out = append(out, snapshot.EngineClass{
			Name: name, Ports: uint64(share.Ports), Sessions: uint64(share.Sessions), NewPerSecond: uint64(share.NewPerSecond), Burst: uint64(share.Burst),
			Lines: s.keyLines(line, map[string]int{"ports": share.Ports, "sessions": share.Sessions, "new_per_second": share.NewPerSecond, "burst": share.Burst}),
		})
	}
	return out
}

// keyLines are the lines of the rule file at which keys of an entry stand with these values: an
// entry that begins at a line, and ends before the next one that is not further in.
func (s *Status) keyLines(from int, keys map[string]int) map[string]int {
	if from == 0 {
		return nil
	}
	out := map[string]int{}
	for key, n := range keys {
		if line := lineFrom(s.text, from, fmt.Sprintf(`\b%s: *%d\b`, key, n)); line > 0 && line < s.entryEnd(from) {
			out[key] = line
		}
	}
	return out
}

// entryEnd is the line after an entry of the rule file that begins at a line.
func (s *Status) entryEnd(from int) int {
	lines := strings.Split(s.text, "\n")
	indent := func(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }
	for i := from; i < len(lines); i++ {
		if text := strings.TrimSpace(lines[i]); text != "" && text[0] != '#' && indent(lines[i]) <= indent(lines[from-1]) {
			return i + 1
		}
	}
	return len(lines) + 1
}
