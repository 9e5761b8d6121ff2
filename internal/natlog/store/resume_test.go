// SPDX-License-Identifier: Apache-2.0

package store

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// A source that has everything since the log ended goes on at that time: no gap, what was alive then
// is what the next hour begins with, and its mark is that of what was stored last, after a kill
// and after a stop.
func TestResume(t *testing.T) {
	for _, killed := range []bool{true, false} {
		r := newRig(t)
		r.open()
		began := r.now
		one, two := mapping("10.0.0.1:1000", "198.51.100.1:5000"), mapping("10.0.0.2:1000", "198.51.100.1:5001")
		r.must(r.s.Append([]natlog.Record{event(natlog.Created, one, began), event(natlog.Created, two, began), natlog.Mark(natlog.Engine, natlog.MicrosOf(began), "first")}))
		r.pass(time.Minute)
		r.must(r.s.Append([]natlog.Record{event(natlog.Ended, two, r.now), natlog.Mark(natlog.Engine, natlog.MicrosOf(r.now), "second")}))
		r.must(r.s.Tick())
		ended := natlog.MicrosOf(r.now)
		if killed {
			r.kill()
		} else {
			r.must(r.s.Close())
		}
		r.pass(10 * time.Minute)
		var left Left
		var alive []natlog.Translation
		r.o.Resume = func(l *Left) (Resumed, error) {
			left = *l
			for rec := range l.Alive {
				alive = append(alive, rec.Translation)
			}
			return Resumed{At: l.End}, nil
		}
		r.o.Alive = func(yield func(natlog.Record) bool) {
			yield(natlog.Record{Translation: one, Since: natlog.MicrosOf(began)})
		}
		r.open()
		if left.Marks[natlog.Engine] != "second" || left.End != ended || !slices.Equal(alive, []natlog.Translation{one}) {
			t.Errorf("killed %v: found %+v with %v alive", killed, left, alive)
		}
		late := r.now.Add(-5 * time.Minute)
		r.must(r.s.Append([]natlog.Record{event(natlog.Ended, one, late), natlog.Mark(natlog.Engine, natlog.MicrosOf(late), "third")}))
		r.must(r.s.Tick())
		got := r.who("198.51.100.1:5000", late.Add(-time.Minute))
		if len(got.Gaps) > 0 || len(got.Lives) != 1 || got.Lives[0].Since != natlog.MicrosOf(began) || got.Lives[0].Until != natlog.MicrosOf(late) {
			t.Errorf("killed %v: %+v", killed, got)
		}
		if got := r.who("198.51.100.1:5000", late.Add(time.Minute)); len(got.Gaps)+len(got.Lives) > 0 {
			t.Errorf("killed %v: after the end %+v", killed, got)
		}
		r.must(r.s.Close())
	}
}

// Who is killed when an hour has just been made leaves a journal of it without records, or, when the power
// fails, an empty one: the log ended with the hour before.
func TestResumeAfterEmptyHour(t *testing.T) {
	for _, text := range []string{"", natlog.JournalHeader} {
		r := newRig(t)
		r.open()
		tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
		r.create(tr)
		r.must(r.s.Append([]natlog.Record{natlog.Mark(natlog.Engine, natlog.MicrosOf(r.now), "mark")}))
		ended := natlog.MicrosOf(r.now)
		r.must(r.s.Close())
		r.must(os.WriteFile(filepath.Join(r.dir, "0000000002.000"+journalSuffix), []byte(text), 0o600))
		r.pass(time.Minute)
		alive := 0
		r.o.Resume = func(l *Left) (Resumed, error) {
			if l.End != ended || l.Marks[natlog.Engine] != "mark" {
				t.Errorf("%q: the log ended at %v with %q, want %v", text, l.End, l.Marks, ended)
			}
			for range l.Alive {
				alive++
			}
			return Resumed{Gaps: l.Gap()}, nil
		}
		r.open()
		if alive != 1 || r.s.current.number != 3 {
			t.Errorf("%q: %d were alive, and hour %d follows", text, alive, r.s.current.number)
		}
		r.pass(time.Second)
		r.must(r.s.Tick())
		if got := r.who("198.51.100.1:6000", r.now.Add(-30*time.Second)); len(got.Gaps) != 1 || got.Gaps[0].Why != "natkit log was not running" {
			t.Errorf("%q: %+v", text, got)
		}
		r.must(r.s.Close())
	}
}

func event(e natlog.Event, tr natlog.Translation, at time.Time) natlog.Record {
	return natlog.Record{Translation: tr, Event: e, Time: natlog.MicrosOf(at)}
}
