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
	"strings"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
)

const (
	rulesFolder = "rules"
	rulesSuffix = ".yaml"
	rulesTime   = "20060102T150405.000000Z"
)

// Rules is a rule file that was in force from a time until that of the next one. An empty file:
// none was.
type Rules struct {
	Since, Until natlog.Micros // Until 0: it has not been replaced
	Path         string
}

// RuleOwner is who had an endpoint by the rules that were in force, without a record of it.
type RuleOwner struct {
	rulefile.Owner
	Rules
}

// RulesOf lists the rule files that a log has kept, in order of time.
func RulesOf(dir string) (list []Rules, err error) {
	entries, err := os.ReadDir(filepath.Join(dir, rulesFolder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the rules that the log has kept: %w", err)
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), rulesSuffix)
		if !ok {
			continue
		}
		if at, err := time.Parse(rulesTime, name); err == nil {
			list = append(list, Rules{Since: natlog.MicrosOf(at), Path: filepath.Join(dir, rulesFolder, e.Name())})
		}
	}
	slices.SortFunc(list, func(a, b Rules) int { return cmp.Compare(a.Since, b.Since) })
	for i := 1; i < len(list); i++ {
		list[i-1].Until = list[i].Since
	}
	return list, nil
}

// RulesDuring are those of RulesOf that were in force at some time from since to upto.
func RulesDuring(dir string, since, upto natlog.Micros) ([]Rules, error) {
	list, err := RulesOf(dir)
	if err != nil {
		return nil, err
	}
	first, last := 0, 0
	for i, r := range list {
		if r.Since <= since {
			first = i
		}
		if r.Since <= upto {
			last = i + 1
		}
	}
	return list[min(first, last):last], nil
}

// rulesWithin is how far from its file's time a change of rules can have been: the engine switches a
// moment before the file is written down.
const rulesWithin = natlog.Micros(time.Second / time.Microsecond)

// askRules adds whose the endpoint was by the rules in force. A file that cannot be read is a gap.
func (r *reader) askRules(dir string) error {
	list, err := RulesDuring(dir, r.q.Since-rulesWithin, r.q.Upto+rulesWithin)
	if err != nil {
		return err
	}
	for _, rules := range list {
		since, until := max(rules.Since, r.q.Since), r.q.Upto
		if rules.Until != 0 {
			until = min(rules.Until, r.q.Upto)
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

// keptRules are those that KeepRules was last called with.
type keptRules struct {
	source natlog.Source
	at     natlog.Micros
	text   string
}

// KeepRules keeps the text of the rules that came into force at a time, and records it; "" is that
// there are none any more. What was kept last is not kept again. What could not be kept, or was
// removed with the folder, Tick keeps later.
func (s *Store) KeepRules(source natlog.Source, at natlog.Micros, text string) error {
	s.rules = &keptRules{source, at, text}
	err := s.keepRules(*s.rules)
	s.rulesLost = err != nil
	return err
}

// keepRulesAgain tries again what KeepRules could not do.
func (s *Store) keepRulesAgain() {
	if s.rules == nil || !s.rulesLost {
		return
	}
	if err := s.keepRules(*s.rules); err == nil {
		s.rulesLost = false
	}
}

func (s *Store) keepRules(kept keptRules) error {
	source, at, text := kept.source, kept.at, kept.text
	list, err := RulesOf(s.o.Dir)
	if err != nil {
		return err
	}
	if len(list) == 0 && text == "" {
		return nil
	}
	if len(list) > 0 {
		last := list[len(list)-1]
		if had, err := os.ReadFile(last.Path); err == nil && string(had) == text {
			return nil
		}
		at = max(at, last.Since+1)
	}
	folder := filepath.Join(s.o.Dir, rulesFolder)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("keep the rules: %w", err)
	}
	name := at.Time().Format(rulesTime) + rulesSuffix
	path := filepath.Join(folder, name)
	if err := writeSynced(path, text); err != nil {
		return fmt.Errorf("keep the rules: %w", err)
	}
	return s.Append([]natlog.Record{{
		Translation: natlog.Translation{Source: source}, Event: natlog.Applied, Time: at, Note: filepath.Join(rulesFolder, name),
	}})
}

// writeSynced has a file on the disk, whole or not at all.
func writeSynced(path, text string) error {
	draft := path + ".draft"
	f, err := os.OpenFile(draft, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(draft, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(draft))
	}
	return syncFolder(filepath.Dir(path))
}

// retainRules removes rules that were replaced before what is kept begins.
func (s *Store) retainRules(now time.Time) {
	list, err := RulesOf(s.o.Dir)
	if err != nil || s.o.Age == 0 {
		return
	}
	for i := 0; i+1 < len(list) && now.Sub(list[i+1].Since.Time()) > s.o.Age; i++ {
		os.Remove(list[i].Path)
	}
}
