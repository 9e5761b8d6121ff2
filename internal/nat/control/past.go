// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
)

// inForce is when rules came into force, as which ones since the engine was brought up.
type inForce struct {
	Number  uint64    `json:"number,omitempty"` // from 1; 0: an older natkit applied them
	Since   time.Time `json:"since,omitzero"`
	Running int64     `json:"monotonic_ns,omitempty"` // that time by CLOCK_MONOTONIC, which nobody sets
}

// came notes that the rules have come into force now.
func (f *inForce) came() {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it has this clock
	f.Since, f.Running = time.Now().Round(0), ts.Nano()
}

// next is that of a text which replaces the rules; the same text only repeats them.
func (t *ruleText) next(text string) inForce {
	if text == t.Text && t.Number > 0 {
		return t.inForce
	}
	next := inForce{Number: t.Number + 1}
	next.came() // who is killed before it can tell is not far off
	return next
}

// How much of rules that were replaced is remembered, for a log that is not kept at the time.
const (
	pastMost  = 64
	pastBytes = 16 << 20
)

func pastFolder(inode uint64) string { return instancePath(inode, ".past") }

// keepPast remembers the rules that are about to be replaced.
func (r *record) keepPast(inode uint64) error {
	if r.Next.Number == r.Rules.Number || r.Rules.Number == 0 {
		return nil
	}
	folder := pastFolder(inode)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("remember the rules that are replaced: %w", err)
	}
	old := ruleText{File: r.Rules.File, Text: r.Rules.Text, inForce: r.Rules.inForce}
	data, err := json.Marshal(old)
	if err != nil {
		return err
	}
	path := filepath.Join(folder, strconv.FormatUint(old.Number, 10)+".json")
	if err := os.WriteFile(path+".draft", data, 0o600); err != nil {
		os.Remove(path + ".draft")
		return fmt.Errorf("remember the rules that are replaced: %w", err)
	}
	if err := os.Rename(path+".draft", path); err != nil {
		return err
	}
	return boundPast(folder)
}

// forgetPast forgets rules that were not replaced after all.
func (r *record) forgetPast(inode uint64) error {
	folder := pastFolder(inode)
	err := os.Remove(filepath.Join(folder, strconv.FormatUint(r.Rules.Number, 10)+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	_ = os.Remove(folder) // if nothing else is in it
	return err
}

// pastNumbers lists what is remembered, the oldest first.
func pastNumbers(folder string) (list []uint64, err error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if n, err := strconv.ParseUint(name, 10, 64); ok && err == nil {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	return list, err
}

// boundPast forgets the oldest of what is more than is to be remembered.
func boundPast(folder string) error {
	list, err := pastNumbers(folder)
	var bytes int64
	for i, n := range slices.Backward(list) {
		path := filepath.Join(folder, strconv.FormatUint(n, 10)+".json")
		if info, err := os.Stat(path); err == nil {
			bytes += info.Size()
		}
		if len(list)-i > pastMost || bytes > pastBytes {
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}

// removePast forgets all of it.
func removePast(inode uint64) error {
	folder := pastFolder(inode)
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, os.Remove(filepath.Join(folder, e.Name())))
	}
	return errors.Join(append(errs, os.Remove(folder))...)
}

// AppliedRules are rules that came into force.
type AppliedRules struct {
	Text    string
	Since   time.Time
	Running int64 // that time by CLOCK_MONOTONIC; 0: not known
}

// RulesChange is what has become of the rules of a namespace.
type RulesChange struct {
	File *rulefile.File // in use now; nil: none
	// Applied are those that have come into force since the last look; at the first one all that are
	// remembered. The last are in use.
	Applied []AppliedRules
	Whole   bool // no others came into force in between
}

// RulesInUse is a reader of the rules that translate in a namespace.
type RulesInUse struct {
	ns     *netns.Handle
	seen   os.FileInfo
	up     time.Time // when the engine was brought up whose rules were seen; zero: there was none
	number uint64    // of the rules that were seen
}

// NewRulesInUse reads the rules of a namespace.
func NewRulesInUse(ns *netns.Handle) *RulesInUse { return &RulesInUse{ns: ns} }

// Changed tells what has become of the rules since the last call; nil: nothing has. An engine that
// was taken down leaves nothing to read, so that what it was told last may never be seen.
func (r *RulesInUse) Changed() (*RulesChange, error) {
	info, err := os.Stat(instancePath(r.ns.Inode(), ".json"))
	if err == nil && r.seen != nil && os.SameFile(info, r.seen) && info.ModTime().Equal(r.seen.ModTime()) {
		return nil, nil
	}
	rec := (*record)(nil)
	if err == nil {
		rec, err = readSettled(r.ns)
	} else {
		err = ErrDown
	}
	if errors.Is(err, ErrDown) || errors.Is(err, errAccelOn) || err == nil && !rec.Whole {
		had := !r.up.IsZero()
		r.seen, r.up, r.number = nil, time.Time{}, 0
		if !had {
			return nil, nil
		}
		return &RulesChange{}, nil
	}
	if err != nil {
		return nil, err
	}
	if rec.Rules.Number == 0 {
		rec.Rules.Since = info.ModTime()
	}
	change, err := r.since(rec)
	if err == nil {
		r.seen, r.up, r.number = info, rec.Since, rec.Rules.Number
	}
	return change, err
}

// since is what has come into force since what was seen.
func (r *RulesInUse) since(rec *record) (*RulesChange, error) {
	file, err := rec.rules()
	if err != nil {
		return nil, err
	}
	change := &RulesChange{File: file}
	had := uint64(0)
	if r.up.Equal(rec.Since) {
		had = r.number
	}
	folder := pastFolder(r.ns.Inode())
	list, err := pastNumbers(folder)
	if err != nil {
		return nil, err
	}
	next := had + 1
	change.Whole = rec.Rules.Number > 0 && (r.up.IsZero() || r.up.Equal(rec.Since))
	for _, n := range list {
		if n <= had || n >= rec.Rules.Number {
			continue
		}
		var past ruleText
		data, err := os.ReadFile(filepath.Join(folder, strconv.FormatUint(n, 10)+".json"))
		if err == nil {
			err = json.Unmarshal(data, &past)
		}
		if err != nil {
			continue // it is missing: replaced again since
		}
		change.Whole = change.Whole && n == next
		next = n + 1
		change.Applied = append(change.Applied, AppliedRules{past.Text, past.Since, past.Running})
	}
	if had != rec.Rules.Number || had == 0 {
		change.Whole = change.Whole && rec.Rules.Number == next
		change.Applied = append(change.Applied, AppliedRules{rec.Rules.Text, rec.Rules.Since, rec.Rules.Running})
	}
	return change, nil
}
