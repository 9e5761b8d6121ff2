// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

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
	Since natlog.Micros
	Path  string
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
			list = append(list, Rules{natlog.MicrosOf(at), filepath.Join(dir, rulesFolder, e.Name())})
		}
	}
	slices.SortFunc(list, func(a, b Rules) int { return int(a.Since - b.Since) })
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

// KeepRules keeps the text of the rules that came into force at a time, and records it; "" is that
// there are none any more. What was kept last is not kept again.
func (s *Store) KeepRules(source natlog.Source, at natlog.Micros, text string) error {
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
