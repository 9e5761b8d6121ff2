// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/snapshot"
)

// aNight is eight hours with two findings, a restart, a gap, and words from outside.
func aNight(t *testing.T) *HistoryResult {
	t.Helper()
	start := time.Date(2026, 3, 1, 22, 0, 0, 0, time.UTC)
	r := &HistoryResult{Since: start, Until: start.Add(8 * time.Hour)}
	const hostile = `</svg><script>alert(1)</script>`
	for i := range 8 * 360 {
		at := start.Add(time.Duration(i) * 10 * time.Second)
		if i > 2000 && i < 2060 { // nobody recorded
			continue
		}
		e := &history.Entry{At: at, Seconds: 10, Begins: i == 0 || i == 1000}
		e.Samples = []*snapshot.Snapshot{{TakenAt: at, Netns: snapshot.Netns{Init: true, Inode: 1}, Conntrack: &snapshot.Conntrack{Count: uint64(i), Max: 4000},
			Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: uint64(i % 50), Cause: snapshot.CauseNoRoute}, {Count: 1000, Benign: true}}}}}
		finding := func(kind, namespace, code, severity string) {
			e.Events = append(e.Events, history.Event{At: at, Kind: kind, Namespace: namespace, Inode: 1, Code: code, Severity: severity, Title: "title of " + code, Since: at.Add(-10 * time.Second)})
		}
		switch i {
		case 98:
			e.Changes = []history.Change{{At: at, Inode: 1, Namespace: "host", What: "route removed: default via 10.0.0.1 dev eth0"}}
		case 100:
			finding(history.Began, "host", "no-route", "critical")
		case 150:
			finding(history.Changed, "host", "no-route", "warning")
		case 200:
			finding(history.Ended, "host", "no-route", "warning")
		case 990:
			finding(history.Began, hostile, "listen-overflow", "warning")
		case 1002: // the monitor was started again
			finding(history.Began, hostile, "listen-overflow", "warning")
		case 1500:
			e.Tunings = []history.Tuning{{At: at, Kind: history.Applied, Namespace: "host", Setting: "net.netfilter.nf_conntrack_max", Old: "65536", New: "131072", Code: "conntrack-table-full", Why: "it is full", ID: "20260302-021000"}}
		case 1506:
			e.Tunings = []history.Tuning{{At: at, Kind: history.TakenBack, Namespace: "host", Setting: "net.netfilter.nf_conntrack_max", Old: "131072", New: "65536", Code: "conntrack-table-full", Why: "more is lost"}}
		case 2500:
			e.Lost = "3 intervals could not be written: no space left on device"
		}
		if err := r.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	r.Finish([]string{"0000000003.segment: damaged"})
	return r
}

func TestHistoryText(t *testing.T) {
	r := aNight(t)
	var b strings.Builder
	if err := r.Text(&b, time.UTC, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"03-01 22:16:30  03-01 22:33:10  warning   host                  no-route: title of no-route\n  10s before: route removed: default via 10.0.0.1 dev eth0\n",
		"03-02 00:44:50  still on        warning   ",
		"Not recorded:\n  03-02 03:33:20 to 03-02 03:43:10\n",
		"  03-02 02:10:00  tuned net.netfilter.nf_conntrack_max in host: 65536 -> 131072, for conntrack-table-full: it is full (natkit tune rollback 20260302-021000 undoes it)\n",
		"tuning taken back: net.netfilter.nf_conntrack_max in host: 131072 -> 65536: more is lost\n",
		"no space left on device",
		"0000000003.segment: damaged",
		"2\n  findings, 1 change.",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if s := r.Forecasts; s.Checked < 2000 || s.Held < s.Checked*8/10 {
		t.Errorf("forecasts of a steady growth: %+v", s)
	}
}

// A table that was filling at the end is reported with when it will be full and the error of that, the soonest first.
func TestHistoryForecast(t *testing.T) {
	start := time.Date(2026, 3, 1, 22, 0, 0, 0, time.UTC)
	r := &HistoryResult{Since: start, Until: start.Add(20 * time.Minute)}
	for i := range 120 {
		at := start.Add(time.Duration(i) * 10 * time.Second)
		e := &history.Entry{At: at, Seconds: 10}
		for n := range 5 { // 10 entries a second each; the last one does not grow
			e.Samples = append(e.Samples, &snapshot.Snapshot{TakenAt: at, Netns: snapshot.Netns{Name: fmt.Sprint("n", n), Inode: uint64(n + 1)},
				Conntrack: &snapshot.Conntrack{Count: uint64(100 * (i*min(1, 4-n) + 1)), Max: uint64(40000 - 2000*n)}})
		}
		if err := r.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	r.Finish(nil)
	var text, page strings.Builder
	if err := errors.Join(r.Text(&text, time.UTC, false), r.HTML(&page, time.UTC)); err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{text.String(), page.String()} {
		got = strings.Join(strings.Fields(got), " ")
		first := strings.Index(got, "At the end the connection tracking table of n3 was filling: full in 37 min (37 min to 37 min).")
		if second := strings.Index(got, "table of n2 was filling: full in 40 min"); first < 0 || second < first || !strings.Contains(got, "Filling, too: 1 other table.") || strings.Contains(got, "table of n4") {
			t.Errorf("%.700s", got)
		}
	}
	f := monitor.Filling{FullIn: snapshot.Seconds(40 * time.Minute), Early: snapshot.Seconds(90 * time.Second)}
	if got, want := f.String(), "full in 40 min (90 s or more)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	f.Late = snapshot.Seconds(5 * time.Hour)
	if got, want := f.String(), "full in 40 min (90 s to 5 h)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestHistoryHTML(t *testing.T) {
	var b strings.Builder
	if err := aNight(t).HTML(&b, time.UTC); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	if strings.Contains(page, "<script") || strings.Count(page, "<svg ") != 3 || len(page) > 300<<10 {
		t.Errorf("%d bytes, %d pictures", len(page), strings.Count(page, "<svg "))
	}
	for _, want := range []string{"title of no-route", "Changed before:", "still on", "tuning taken back", "Dropped packets a second", "2026-03-02 03:33:20 to 2026-03-02 03:43:10"} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q", want)
		}
	}
	if n := strings.Count(page, `<path class="line i-s0"`); n != 4 {
		t.Errorf("%d lines: each of two curves has one before and one after the gap", n)
	}
	if strings.Contains(page, "</span>other</li>") {
		t.Error("packets that nobody waits for are among those dropped")
	}
	b.Reset()
	empty := &HistoryResult{Since: time.Unix(0, 0), Until: time.Unix(3600, 0)}
	empty.Finish(nil)
	if err := empty.HTML(&b, time.UTC); err != nil || !strings.Contains(b.String(), "Nothing was recorded") {
		t.Error(err)
	}
}

func TestMonitorLine(t *testing.T) {
	at := time.Date(2026, 3, 1, 3, 12, 0, 0, time.Local)
	event := history.Event{At: at, Namespace: "host", Code: "no-route", Severity: "critical", Title: "5 packets had no route", Since: at.Add(-time.Minute)}
	for want, change := range map[string]func(*monitor.Line){
		"2026-03-01 03:12:00 began: critical no-route in host: 5 packets had no route\n": func(l *monitor.Line) { l.Kind = history.Began },
		"2026-03-01 03:12:00 ended: no-route in host, last seen 03:11:00\n":              func(l *monitor.Line) { l.Kind = history.Ended },
		"2026-03-01 03:12:00 ended: no-route in host: the namespace is gone\n": func(l *monitor.Line) {
			l.Kind, l.Why = history.Ended, "the namespace is gone"
		},
		"2026-03-01 03:12:00 problem: write the history: no space left on device\n": func(l *monitor.Line) {
			l.Event, l.Problem = nil, "write the history: no space left on device"
		},
		"2026-03-01 03:12:00 would tune net.netfilter.nf_conntrack_max in host: 65536 -> 131072, for conntrack-table-full: the table is full\n": func(l *monitor.Line) {
			l.Event, l.Tuning = nil, &history.Tuning{At: at, Kind: history.Proposed, Namespace: "host", Setting: "net.netfilter.nf_conntrack_max",
				Old: "65536", New: "131072", Code: "conntrack-table-full", Why: "the table is full"}
		},
	} {
		l := monitor.Line{At: at, Event: new(event)}
		change(&l)
		var b strings.Builder
		if err := MonitorLineText(&b, l, true); err != nil || b.String() != want {
			t.Errorf("%v, %q, want %q", err, b.String(), want)
		}
	}
}

// A line about no finding has no fields of one: what is unknown is absent.
func TestMonitorLineJSON(t *testing.T) {
	at := time.Date(2026, 3, 1, 3, 12, 0, 0, time.UTC)
	for want, l := range map[string]monitor.Line{
		`"time":"2026-03-01T03:12:00Z","problem":"no space left on device"}`: {At: at, Problem: "no space left on device"},
		`"time":"2026-03-01T03:12:00Z","tuning":{"time":"2026-03-01T03:12:00Z","kind":"kept","netns_inode":7,"netns":"host","setting":"a","old":"1","new":"2","reason":"nothing is lost"}}`: {At: at, Tuning: &history.Tuning{At: at, Kind: history.Kept, Inode: 7, Namespace: "host", Setting: "a", Old: "1", New: "2", Why: "nothing is lost"}},
		`"time":"2026-03-01T03:12:00Z","kind":"began","netns_inode":7,"netns":"host","code":"no-route","severity":"critical","title":"5 packets had no route"}`:                             {At: at, Event: &history.Event{At: at, Kind: history.Began, Inode: 7, Namespace: "host", Code: "no-route", Severity: "critical", Title: "5 packets had no route"}},
	} {
		var b strings.Builder
		if err := JSONLine(&b, l); err != nil {
			t.Fatal(err)
		}
		if want = `{"schema":"natkit/monitor-line/1",` + want + "\n"; b.String() != want {
			t.Errorf("got %s, want %s", b.String(), want)
		}
	}
}

func TestDiff(t *testing.T) {
	side := func(forward string, names ...string) (out []*snapshot.Snapshot) {
		for i, name := range names {
			out = append(out, &snapshot.Snapshot{Netns: snapshot.Netns{Name: name, Inode: uint64(i + 1)}, Sysctls: map[string]string{"x": forward}})
		}
		return out
	}
	var b strings.Builder
	if err := Diff("A", "B", append(side("1", "blue"), side("1", "red", "gone")...), append(side("2", "blue"), side("1", "red", "new")...)).Text(&b); err != nil {
		t.Fatal(err)
	}
	const want = "From A to B\n\nblue\n  setting x: 1 -> 2\n\ngone is only there before\n\nnew is only there after\n\nNo difference in 1 namespace.\n"
	if b.String() != want {
		t.Errorf("%s", b.String())
	}
	if r := Diff("A", "B", side("1", "blue"), side("2", "other")); len(r.Namespaces) != 1 {
		t.Error(fmt.Sprint(r))
	}
}

// Of what was on when the record ended nobody knows whether it is still on.
func TestHistoryThatEnded(t *testing.T) {
	r := aNight(t)
	r.Until = r.Until.Add(6 * time.Hour)
	r.Gaps = nil
	r.Finish(nil)
	var text, page strings.Builder
	if err := errors.Join(r.Text(&text, time.UTC, false), r.HTML(&page, time.UTC)); err != nil {
		t.Fatal(err)
	}
	if got := text.String(); strings.Contains(got, "still on") || !strings.Contains(got, "03-02 00:44:50  on at the end   warning   ") ||
		!strings.Contains(got, "Not recorded:\n  03-02 05:59:50 to 03-02 12:00:00\n") {
		t.Error(got)
	}
	if strings.Contains(page.String(), "still on") {
		t.Error("still on, says the page")
	}
}

// A container that was restarted is the same one, and a finding that is now folded under another, or is so
// no longer, is neither new nor gone.
func TestDiffIsOfTheSame(t *testing.T) {
	side := func(pid, forward string) []*snapshot.Snapshot {
		return []*snapshot.Snapshot{{Netns: snapshot.Netns{Init: true, Inode: 1}},
			{Netns: snapshot.Netns{Name: "pid:" + pid, Container: "docker web1", Inode: 2}, Sysctls: map[string]string{"x": forward}}}
	}
	var b strings.Builder
	if err := Diff("A", "B", side("100", "1"), side("200", "2")).Text(&b); err != nil {
		t.Fatal(err)
	}
	const want = "From A to B\n\ndocker web1 (--netns pid:200)\n  setting x: 1 -> 2\n\nNo difference in 1 namespace.\n"
	if b.String() != want {
		t.Error(b.String())
	}
	alone := []causes.Finding{{Code: "b"}}
	under := []causes.Finding{{Code: "a", Consequences: []causes.Finding{{Code: "b"}}}}
	for name, c := range map[string]struct {
		was, is             []causes.Finding
		notBefore, notAfter []causes.Unjudged
		new, gone, still    string
		unsure              string
	}{
		"folded since":        {alone, under, nil, nil, "a", "", "b", ""},
		"no longer folded":    {under, alone, nil, nil, "", "a", "b", ""},
		"folded all the time": {under, under, nil, nil, "", "", "a", ""},
		"cured":               {under, nil, nil, nil, "", "a", "", ""},
		"came":                {nil, under, nil, nil, "a", "", "", ""},
		"not judged after":    {alone, nil, nil, []causes.Unjudged{{Code: "b"}}, "", "", "", "b"},
		"not judged before":   {nil, alone, []causes.Unjudged{{Code: "b"}}, nil, "", "", "", "b"},
	} {
		var n DiffNamespace
		n.findings(c.was, c.is, c.notBefore, c.notAfter)
		codes := func(list []DiffFinding) (out string) {
			for _, f := range list {
				out += f.Code
			}
			return out
		}
		if codes(n.New) != c.new || codes(n.Gone) != c.gone || codes(n.Still) != c.still || codes(n.UnjudgedBefore)+codes(n.UnjudgedAfter) != c.unsure {
			t.Errorf("%s: %+v", name, n)
		}
	}
}
