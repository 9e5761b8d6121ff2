// SPDX-License-Identifier: Apache-2.0

package store

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
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

func event(e natlog.Event, tr natlog.Translation, at time.Time) natlog.Record {
	return natlog.Record{Translation: tr, Event: e, Time: natlog.MicrosOf(at)}
}

// Rules are kept once, with the time from which they were in force.
func TestKeepRules(t *testing.T) {
	r := newRig(t)
	r.open()
	keep := func(text string) natlog.Micros {
		t.Helper()
		r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), text))
		defer r.pass(time.Hour)
		return natlog.MicrosOf(r.now)
	}
	keep("") // none yet
	first := keep("rules: 1\n")
	keep("rules: 1\n")
	second := keep("rules: 2\n")
	none := keep("")
	list, err := RulesOf(r.dir)
	r.must(err)
	if len(list) != 3 || list[0].Since != first || list[1].Since != second || list[2].Since != none {
		t.Fatalf("kept are %v", list)
	}
	if text, err := os.ReadFile(list[1].Path); err != nil || string(text) != "rules: 2\n" {
		t.Errorf("%q, %v", text, err)
	}
	hour := natlog.Micros(time.Hour / time.Microsecond)
	for _, c := range []struct {
		since, upto natlog.Micros
		want        []Rules
	}{
		{second - 1, second - 1, list[:1]}, {second, second, list[1:2]}, {second - 1, none, list}, {none + hour, none + 2*hour, list[2:]}, {first - hour, first - 1, nil},
	} {
		got, err := RulesDuring(r.dir, c.since, c.upto)
		if err != nil || len(got) != len(c.want) || len(got) > 0 && !slices.Equal(got, c.want) {
			t.Errorf("from %d to %d: %v (%v), want %v", c.since, c.upto, got, err, c.want)
		}
	}
	r.must(r.s.Close())
	var applied []string
	files, err := parts(r.dir)
	r.must(err)
	for _, p := range files {
		r.must(eachRecord(p, func(rec *natlog.Record) {
			if rec.Event == natlog.Applied {
				applied = append(applied, filepath.Base(rec.Note))
			}
		}))
	}
	if len(applied) != 3 || !strings.HasSuffix(list[0].Path, applied[0]) {
		t.Errorf("recorded are %q", applied)
	}
}
