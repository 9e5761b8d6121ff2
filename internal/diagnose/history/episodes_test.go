// SPDX-License-Identifier: Apache-2.0

package history

import (
	"reflect"
	"testing"
	"time"
)

// Who reads a part of the history sees what began before it and is on in all of it, since when, and does not see as on what
// ended while nothing could be stored.
func TestEpisodesOfAPart(t *testing.T) {
	at := func(minutes int) time.Time { return noon.Add(time.Duration(minutes) * time.Minute) }
	event := func(kind, code, severity string, since time.Time) Event {
		return Event{Kind: kind, Namespace: "host", Code: code, Severity: severity, Title: code + " " + severity, Since: since}
	}
	w, err := Create(t.TempDir(), DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, e := range []*Entry{
		{At: at(-3000), Begins: true, On: []Event{}, Events: []Event{event(Began, "old", "warning", at(-3001))}},
		{At: at(0), On: []Event{event(On, "old", "warning", at(-3001)), event(On, "lost", "warning", at(-9))}},
		{At: at(1), Events: []Event{event(Began, "new", "critical", at(0))}},
		{At: at(2)},
		// What ended and changed here was not stored.
		{At: at(10), On: []Event{event(On, "old", "critical", at(-3001)), event(On, "new", "critical", at(0)), event(On, "missed", "advice", at(5))}},
		{At: at(11)},
	} {
		if err := w.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	var episodes Episodes
	if damaged, err := Read(w.dir, Span{From: at(-5)}, func(e *Entry) error { episodes.Add(e); return nil }); err != nil || len(damaged) > 0 {
		t.Fatal(damaged, err)
	}
	want := []Episode{
		{Namespace: "host", Code: "old", Severity: "critical", Title: "old critical", Began: at(-3001)},
		{Namespace: "host", Code: "lost", Severity: "warning", Title: "lost warning", Began: at(-9), Ended: at(2), Why: "its end was not recorded"},
		{Namespace: "host", Code: "new", Severity: "critical", Title: "new critical", Began: at(0)},
		{Namespace: "host", Code: "missed", Severity: "advice", Title: "missed advice", Began: at(5)},
	}
	if got := episodes.List(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}
