// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
)

const (
	rulesFolder   = "rules"
	rulesSuffix   = ".yaml"
	unknownSuffix = ".unknown"
	rulesTime     = "20060102T150405.000000Z"
)

// Rules is a rule file that was in force from a time until that of the next one. An empty file:
// none was.
type Rules struct {
	Since, Until natlog.Micros // Until 0: it has not been replaced
	// Hour is the number of the hour of the log in which it was kept; 0: its name does not say.
	// Times of two files are compared only within an hour: the clock may have been set between hours.
	Hour    uint64
	Unknown bool // which rules were in force is not known
	Path    string
}

// None reports whether no rules were in force.
func (r *Rules) None() bool {
	info, err := os.Stat(r.Path)
	return err == nil && info.Size() == 0 && !r.Unknown
}

// RuleOwner is who had an endpoint by the rules that were in force, without a record of it.
type RuleOwner struct {
	rulefile.Owner
	Rules
}

// place is a time within an hour of the log.
type place struct {
	hour uint64
	at   natlog.Micros
}

func (p place) compare(o place) int {
	return cmp.Or(cmp.Compare(p.hour, o.hour), cmp.Compare(p.at, o.at))
}

func (r *Rules) from() place { return place{r.Hour, r.Since} }

// parseRules reads the name of a rule file.
func parseRules(name string) (r Rules, ok bool) {
	rest, known := strings.CutSuffix(name, rulesSuffix)
	if !known {
		if rest, r.Unknown = strings.CutSuffix(name, unknownSuffix); !r.Unknown {
			return r, false
		}
	}
	at, hour, numbered := strings.Cut(rest, "-")
	since, err := time.Parse(rulesTime, at)
	if err == nil && numbered {
		r.Hour, err = strconv.ParseUint(hour, 10, 64)
	}
	r.Since = natlog.MicrosOf(since)
	return r, err == nil
}

// RulesOf lists the rule files that a log has kept, in the order in which they came into force.
func RulesOf(dir string) (list []Rules, err error) {
	entries, err := os.ReadDir(filepath.Join(dir, rulesFolder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the rules that the log has kept: %w", err)
	}
	for _, e := range entries {
		if r, ok := parseRules(e.Name()); ok {
			r.Path = filepath.Join(dir, rulesFolder, e.Name())
			list = append(list, r)
		}
	}
	sortRules(list)
	return list, nil
}

func sortRules(list []Rules) {
	slices.SortStableFunc(list, func(a, b Rules) int { return a.from().compare(b.from()) })
	for i := 1; i < len(list); i++ {
		list[i-1].Until = list[i].Since
	}
}

// rulesWithin is how far from its file's time a change of rules can have been: the engine switches a
// moment before the file is written down.
const rulesWithin = second

const second = natlog.Micros(time.Second / time.Microsecond) // the times of an hour are rounded to seconds

// number gives rules whose name has no hour the one that their time is in, or the next one.
func (r *reader) number(list []Rules) {
	for i := range list {
		if list[i].Hour != 0 {
			continue
		}
		for k := range r.hours {
			if list[i].Hour = r.hours[k].parts[0].number; natlog.MicrosOf(r.hours[k].end) >= list[i].Since {
				break
			}
		}
	}
	sortRules(list)
}

// window is from one place of the log to another.
type window struct{ from, to place }

// windows are the times asked about, by hours, and a little more.
func (r *reader) windows() (out []window) {
	since, upto := r.q.Since-rulesWithin, r.q.Upto+rulesWithin
	for i := range r.hours {
		this, begin, end := r.hours[i].span()
		if r.q.Since <= end && r.q.Upto >= begin {
			out = append(out, r.windowOf(i))
		}
		if i == 0 && r.q.Since < begin && !r.covers(r.q.Since, min(begin, r.q.Upto)) {
			out = append(out, window{place{0, since}, place{this, upto}})
		}
		if i+1 == len(r.hours) {
			if r.q.Upto > end && r.q.Since <= end+between && !r.covers(max(r.q.Since, end), r.q.Upto) { // nobody has followed the rules for longer
				out = append(out, window{place{this, since}, place{this, upto}})
			}
			break
		}
		if after, next, _ := r.hours[i+1].span(); end < next && r.q.Since < next && r.q.Upto > end && !r.covers(max(r.q.Since, end), min(r.q.Upto, next)) && !r.skipped(i+1) {
			out = append(out, window{place{after, since}, place{after, upto}})
		}
	}
	return out
}

// skipped reports whether the clock was set when an hour began: what is between it and the one before is
// no time in which rules were in force.
func (r *reader) skipped(at int) bool {
	records, err := r.readGaps(r.hours[at].parts[0])
	return err != nil || slices.ContainsFunc(records, func(rec natlog.Record) bool {
		return rec.Event == natlog.Gap && strings.HasPrefix(rec.Note, clockSet)
	})
}

// windowOf is what of the time asked about is in an hour; at its edge, also the end of the one
// before and the beginning of the one after.
func (r *reader) windowOf(i int) window {
	this, begin, end := r.hours[i].span()
	w := window{place{this, r.q.Since - rulesWithin}, place{this, r.q.Upto + rulesWithin}}
	if i > 0 {
		before, _, ended := r.hours[i-1].span()
		if left := begin - w.from.at - apart(ended, begin); left > 0 {
			w.from = place{before, min(ended, begin) - left}
			if ended > begin+second { // the clock was set back
				w.from.at = ended - left
			}
		}
	}
	if i+1 < len(r.hours) {
		after, begins, _ := r.hours[i+1].span()
		if left := w.to.at - end - apart(end, begins); left > 0 {
			w.to = place{after, begins + left}
		}
	}
	return w
}

// apart is what is between the end of an hour and the beginning of the next one.
func apart(end, begin natlog.Micros) natlog.Micros { return max(0, begin-end) }

// covers reports whether an hour has all of a time: what is between two others is not that time then,
// but the clock was set.
func (r *reader) covers(since, upto natlog.Micros) bool {
	return slices.ContainsFunc(r.hours, func(h hour) bool {
		_, begin, end := h.span()
		return begin <= since && upto <= end
	})
}

// rulesAsked are those that were in force at a time asked about.
func (r *reader) rulesAsked(dir string) (asked []Rules, err error) {
	list, err := RulesOf(dir)
	if err != nil {
		return nil, err
	}
	r.number(list)
	windows := r.windows()
	for i := range list {
		if slices.ContainsFunc(windows, func(w window) bool {
			return list[i].from().compare(w.to) <= 0 && (i+1 == len(list) || list[i+1].from().compare(w.from) > 0)
		}) {
			asked = append(asked, list[i])
		}
	}
	return asked, nil
}

// askRules adds whose the endpoint was by the rules in force. A file that cannot be read is a gap.
func (r *reader) askRules(dir string) error {
	list, err := r.rulesAsked(dir)
	if err != nil {
		return err
	}
	for _, rules := range list {
		since, until := max(rules.Since, r.q.Since), r.q.Upto
		if rules.Until > rules.Since {
			until = min(rules.Until, r.q.Upto)
		}
		if rules.Unknown {
			r.answer.Gaps = append(r.answer.Gaps, Span{min(since, until), max(since, until), "which rules were in force is not known: they changed while no log was kept"})
			continue
		}
		text, err := os.ReadFile(rules.Path)
		var file *rulefile.File
		if err == nil && len(text) == 0 {
			continue
		}
		if err == nil {
			file, err = rulefile.ParseRecorded(rules.Path, text)
		}
		if err != nil {
			first, _, _ := strings.Cut(err.Error(), "\n") // of all that is wrong with the file
			r.answer.Gaps = append(r.answer.Gaps, Span{min(since, until), max(since, until), "the rules of that time cannot be read: " + first})
			continue
		}
		for _, owner := range file.Owners(netip.AddrPortFrom(r.q.Address, r.q.Port), rulefile.Protocol(r.q.Protocol)) {
			if owner.Rule == nil && r.otherHad(owner.Block.Subscriber, since, until) {
				continue
			}
			r.answer.Rules = append(r.answer.Rules, RuleOwner{owner, rules})
		}
	}
	return nil
}

// otherHad reports whether the log has the endpoint with others than a subscriber from since to
// until: rules of an earlier file gave it to them, and it is not computed until they have left it.
func (r *reader) otherHad(subscriber netip.Prefix, since, until natlog.Micros) bool {
	return slices.ContainsFunc(r.answer.Lives, func(l Life) bool {
		began := cmp.Or(l.Since, l.Log)
		ended := l.Until != 0 && l.Until < until
		return l.Source == natlog.Engine && !subscriber.Contains(l.Internal.Addr()) && began <= since && !ended && !l.Gap && l.Until == l.Least
	})
}

// keptRules are rules of which a log has to keep the text.
type keptRules struct {
	source  natlog.Source
	at      natlog.Micros
	text    string
	unknown bool
}

// KeepRules keeps the text of the rules that came into force at a time, and records it; "" is that
// there are none any more. What was kept last is not kept again. What could not be kept, or was
// removed with the folder, Tick keeps later.
func (s *Store) KeepRules(source natlog.Source, at natlog.Micros, text string) error {
	return s.keepLater(keptRules{source, at, text, false})
}

// RulesUnknown keeps that it is not known which rules are in force from a time until that of the
// next ones.
func (s *Store) RulesUnknown(source natlog.Source, at natlog.Micros) error {
	return s.keepLater(keptRules{source, at, "", true})
}

// LastRules is what was kept last; nil: nothing was.
func (s *Store) LastRules() (*Rules, error) {
	list, err := RulesOf(s.o.Dir)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return &list[len(list)-1], nil
}

// keepLater keeps rules, with those before that could not be kept.
func (s *Store) keepLater(kept keptRules) error {
	if !s.rulesLost {
		s.rules = nil
	}
	s.rules, s.rulesLost = append(s.rules, kept), true
	return s.keepRulesAgain()
}

// keepRulesAgain keeps what could not be kept, or was removed.
func (s *Store) keepRulesAgain() error {
	for s.rulesLost {
		if len(s.rules) == 0 {
			s.rulesLost = false
			break
		}
		if err := s.keepRules(s.rules[0]); err != nil {
			return err
		}
		if len(s.rules) == 1 {
			s.rulesLost = false
			break
		}
		s.rules = s.rules[1:]
	}
	return nil
}

func (s *Store) keepRules(kept keptRules) error {
	at := kept.at
	last, err := s.LastRules()
	switch {
	case err != nil:
		return err
	case last == nil && kept.text == "":
		return nil
	case last != nil && kept.unknown == last.Unknown:
		if had, err := os.ReadFile(last.Path); err == nil && string(had) == kept.text {
			return nil
		}
	}
	if last != nil && last.Hour == s.current.number {
		at = max(at, last.Since+1)
	}
	folder := filepath.Join(s.o.Dir, rulesFolder)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("keep the rules: %w", err)
	}
	suffix := rulesSuffix
	if kept.unknown {
		suffix = unknownSuffix
	}
	name := fmt.Sprintf("%s-%010d%s", at.Time().Format(rulesTime), s.current.number, suffix)
	err = writeWhole(filepath.Join(folder, name), kept.text, true)
	if err = cmp.Or(err, syncFolder(folder)); err != nil {
		return fmt.Errorf("keep the rules: %w", err)
	}
	return s.Append([]natlog.Record{{
		Translation: natlog.Translation{Source: kept.source}, Event: natlog.Applied, Time: at, Note: filepath.Join(rulesFolder, name),
	}})
}

// retainRules removes rules that were replaced before what is kept begins: the oldest file has an hour
// from before that.
func (s *Store) retainRules(now time.Time) {
	list, err := RulesOf(s.o.Dir)
	if err != nil || s.o.Age == 0 {
		return
	}
	for i := 0; i+1 < len(list) && now.Sub(list[i+1].Since.Time()) > s.o.Age+2*time.Hour; i++ {
		os.Remove(list[i].Path)
	}
}
