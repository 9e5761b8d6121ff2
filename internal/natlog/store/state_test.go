// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// What watches a log reads how it is kept, with the gaps of the last day, also of those before
// who keeps it now was started.
func TestState(t *testing.T) {
	r := newRig(t)
	if _, err := ReadState(r.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a log: %v", err)
	}
	r.o.Namespace = 77
	r.open()
	tick := func() State {
		t.Helper()
		r.pass(time.Second)
		_ = r.s.Tick()
		s, err := ReadState(r.dir)
		r.must(err)
		return s
	}
	if s, err := ReadState(r.dir); err != nil || !s.Time.Equal(r.now) {
		t.Errorf("before the first second: %+v, %v", s, err)
	}
	if s := tick(); !s.Time.Equal(r.now) || s.Namespace != 77 || len(s.Gaps) != 0 || s.Error != "" {
		t.Errorf("at the start: %+v", s)
	}
	began := natlog.MicrosOf(r.now)
	r.must(r.s.Gap(natlog.Kernel, began-60e6, began, "events came faster than they could be read"))
	if s := tick(); len(s.Gaps) != 1 || natlog.MicrosOf(s.Gaps[0].Since) != began-60e6 || natlog.MicrosOf(s.Gaps[0].Until) != began || s.Gaps[0].Why != "events came faster than they could be read" {
		t.Errorf("after a gap: %+v", s)
	}
	r.kill()
	r.pass(time.Hour)
	r.open()
	if s := tick(); len(s.Gaps) != 2 || !strings.Contains(s.Gaps[1].Why, "not running") {
		t.Errorf("after a kill: %+v", s)
	}
	r.pass(gapsFor)
	for range 2 * gapsMost {
		r.must(r.s.Gap(natlog.Kernel, natlog.MicrosOf(r.now)-1e6, natlog.MicrosOf(r.now), "some"))
	}
	if s := tick(); len(s.Gaps) != gapsMost || s.Gaps[0].Why != "some" {
		t.Errorf("after many: %d gaps, %+v", len(s.Gaps), s.Gaps[0])
	}
	r.must(r.s.Close())
	for text, want := range map[string]string{"{": "damaged", `{"schema": "natkit/log-state/99"}`: "newer natkit"} {
		r.must(os.WriteFile(filepath.Join(r.dir, StateFile), []byte(text), 0o600))
		if _, err := ReadState(r.dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A file that a power failure must not take is on the disk before it has the place of the one before: otherwise
// some file systems have the new name and none of the text.
func TestBesideLasts(t *testing.T) {
	dir := t.TempDir()
	f := Beside{Name: "x.json", Kind: "x", Version: 1, Lasts: true}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if err := f.Write(dir, map[string]int{"n": 1}); err != nil {
		t.Fatal(err)
	}
	before, synced := read(filepath.Join(dir, f.Name)), ""
	defer func(was func(*os.File) error) { syncFile = was }(syncFile)
	syncFile = func(draft *os.File) error {
		if now := read(filepath.Join(dir, f.Name)); now != before {
			t.Errorf("%q is in the place of %q before it is on the disk", now, before)
		}
		synced = read(draft.Name())
		return draft.Sync()
	}
	if err := f.Write(dir, map[string]int{"n": 2}); err != nil {
		t.Fatal(err)
	}
	if now := read(filepath.Join(dir, f.Name)); now != synced || now == before {
		t.Errorf("%q was synced, and the file has %q", synced, now)
	}
}
