// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// hour lets one pass, and has the next one begin.
func (r *rig) hour() {
	r.t.Helper()
	r.pass(r.now.Truncate(time.Hour).Add(time.Hour).Sub(r.now))
	r.must(r.s.Tick())
	r.s.jobsDone(r.t)
}

// What a source reports some seconds late is in the hour in which it was reported, and who asks about
// the end of the hour before finds it.
func TestReportedLate(t *testing.T) {
	r := newRig(t)
	r.o.PartRecords = 3
	r.open()
	r.hour()
	turn := r.now
	late := func(port string, from, to time.Duration) {
		tr := mapping("10.0.0.1:"+port, "198.51.100.1:"+port)
		since := natlog.MicrosOf(turn.Add(from))
		r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Created, Time: since, Since: since}}))
		r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Ended, Time: natlog.MicrosOf(turn.Add(to)), Since: since}}))
	}
	r.pass(5 * time.Second)
	late("5000", -7*time.Second, -5*time.Second)
	late("5001", 4*time.Second, 5*time.Second)
	late("5002", -7*time.Second, -5*time.Second) // in the hour's second part
	r.must(r.s.Tick())
	check := func(file string) {
		t.Helper()
		for _, port := range []string{"5000", "5002"} {
			if got := r.who("198.51.100.1:"+port, turn.Add(-6*time.Second)); len(got.Lives) != 1 || len(got.Gaps) != 0 {
				t.Errorf("%s, port %s: %+v", file, port, got)
			}
		}
		if got := r.who("198.51.100.1:5001", turn.Add(-6*time.Second)); len(got.Lives) != 0 || len(got.Gaps) != 0 {
			t.Errorf("%s, what began later: %+v", file, got)
		}
	}
	check("journal")
	r.must(r.s.Close())
	check("Parquet")
}

// Where the hours that would tell are damaged, a life is not said to go on, and it did not end before
// what can be read.
func TestEndInDamagedHour(t *testing.T) {
	for _, tt := range []struct {
		damaged []int
		ended   bool // in the hour of number 2
		least   int  // hour at whose end it was there; 0: nothing is damaged
		until   int  // hour at whose beginning it was not; 0: that is not known
	}{
		{nil, false, 0, 0},
		{nil, true, 0, 0},
		{[]int{3}, false, 2, 0},
		{[]int{2, 3}, false, 1, 0},
		{[]int{2}, true, 1, 3},
	} {
		r := newRig(t)
		r.open()
		tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
		r.create(tr)
		asked := r.now
		var begun []time.Time
		for n := range 4 {
			if n == 2 && tt.ended {
				r.pass(time.Minute)
				r.end(tr)
			}
			r.hour()
			begun = append(begun, r.now)
		}
		r.must(r.s.Close())
		files := r.files(parquetSuffix)
		for _, n := range tt.damaged {
			r.must(os.Truncate(files[n], 100))
		}
		if len(tt.damaged) > 0 && tt.damaged[len(tt.damaged)-1] == 3 { // the last one
			r.must(os.Truncate(files[4], 100))
		}
		got := r.who("198.51.100.1:5000", asked)
		if len(got.Lives) != 1 {
			t.Fatalf("%+v: %+v", tt, got)
		}
		life, want := got.Lives[0], Life{}
		if tt.least > 0 {
			want.Least = natlog.MicrosOf(begun[tt.least])
		}
		if tt.until > 0 {
			want.Until = natlog.MicrosOf(begun[tt.until-1])
		}
		if tt.ended && tt.until == 0 {
			want.Until = natlog.MicrosOf(begun[1].Add(time.Minute))
			want.Least = want.Until
		}
		if life.Least != want.Least || life.Until != want.Until {
			t.Errorf("%+v: until %v, at the earliest %v; want %v, %v", tt, life.Until.Time(), life.Least.Time(), want.Until.Time(), want.Least.Time())
		}
	}
}

// A translation that has ended has done so, though the same one is there hours later, and of that one
// nobody knows since when.
func TestSameAgainMuchLater(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:51820", "198.51.100.1:51820")
	r.create(tr)
	asked := r.now
	r.hour()
	r.pass(time.Minute)
	r.end(tr)
	ended := r.now
	for range 5 {
		r.hour()
	}
	r.kill()
	r.alive[tr] = 0
	r.open()
	for range 12 {
		r.hour()
	}
	got := r.who("198.51.100.1:51820", asked)
	if len(got.Lives) != 1 || got.Lives[0].Until != natlog.MicrosOf(ended) || got.Lives[0].Gap {
		t.Errorf("%+v, want an end at %v", got, ended)
	}
	r.must(r.s.Close())
}

// An end that nobody saw was after the last time at which it was there.
func TestUnseenEnd(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	r.pass(time.Minute)
	after := natlog.MicrosOf(r.now)
	r.pass(10 * time.Second)
	at := natlog.MicrosOf(r.now)
	r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Ended, Time: at, Since: r.alive[tr], Note: "pool cgn: " + natlog.Unseen(after)}}))
	delete(r.alive, tr)
	check := func(file string) {
		t.Helper()
		got := r.who("198.51.100.1:5000", r.now.Add(-30*time.Second))
		if len(got.Lives) != 1 || got.Lives[0].Least != after || got.Lives[0].Until != at {
			t.Errorf("%s: %+v", file, got)
		}
	}
	check("journal")
	r.must(r.s.Close())
	check("Parquet")
}

// Rules are kept for as long as the hours that need them: not removed by a clock that has jumped.
func TestRulesWhenClockJumps(t *testing.T) {
	r := newRig(t)
	r.o.Age = 5 * time.Hour
	r.open()
	for _, text := range []string{"rules: 1\n", "rules: 2\n"} {
		r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), text))
		r.pass(time.Minute)
	}
	const far = 12 * 365 * 24 * time.Hour
	kept := func() int {
		list, err := RulesOf(r.dir)
		r.must(err)
		return len(list)
	}
	r.now = r.now.Add(far)
	r.must(r.s.Tick())
	r.hour()
	if n := kept(); n != 2 {
		t.Errorf("%d of 2 rule files are left when the clock has jumped", n)
	}
	r.now = r.now.Add(-far)
	r.must(r.s.Tick())
	for range 8 {
		r.hour()
	}
	if n := kept(); n != 1 {
		t.Errorf("%d rule files of 5 hours", n)
	}
	r.must(r.s.Close())
}

// A line of the audit file that the disk had no room for in full does not spoil the next one.
func TestAuditAfterHalfALine(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, AuditFile)
	write := func(n int) {
		t.Helper()
		if err := WriteAudit(dir, Audit{Verdict: "nobody", Found: n}); err != nil {
			t.Fatal(err)
		}
	}
	write(1)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, b[:20]...), 0o600); err != nil {
		t.Fatal(err)
	}
	write(2)
	write(3)
	if b, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	var found []int
	for line := range strings.Lines(string(b)) {
		var a Audit
		if json.Unmarshal([]byte(line), &a) == nil {
			found = append(found, a.Found)
		}
	}
	if !slices.Equal(found, []int{1, 2, 3}) {
		t.Errorf("look-ups %v are in\n%s", found, b)
	}
}

// What was lost may be known only when the hour has come to another part: the gap is of the time
// before, and who asks about that is not told that nobody had it.
func TestGapInLaterPart(t *testing.T) {
	r := newRig(t)
	r.o.PartRecords = 4
	r.open()
	lost := r.now.Add(500 * time.Millisecond)
	for i := range 12 {
		r.create(mapping(fmt.Sprintf("10.0.0.1:%d", 1000+i), fmt.Sprintf("198.51.100.1:%d", 5000+i)))
		r.pass(time.Second)
	}
	r.must(r.s.Gap(natlog.Kernel, natlog.MicrosOf(lost), natlog.MicrosOf(lost.Add(time.Second)), "lost"))
	check := func(file string) {
		t.Helper()
		if got := r.who("198.51.100.1:6000", lost.Add(time.Millisecond)); len(got.Gaps) != 1 || got.Gaps[0].Why != "lost" {
			t.Errorf("%s: %+v", file, got)
		}
		if got := r.who("198.51.100.1:6000", lost.Add(3*time.Second)); len(got.Gaps) != 0 {
			t.Errorf("%s: after it: %+v", file, got)
		}
	}
	check("journals")
	r.must(r.s.Close())
	check("Parquet")
}
