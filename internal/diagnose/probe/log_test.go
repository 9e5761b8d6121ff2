// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// What was lost before the window is not lost in it; a sink that is new has lost nothing before.
func TestTranslationLog(t *testing.T) {
	readings := []*snapshot.Log{
		{Lost: 5, Sinks: []snapshot.LogSink{{URL: "a", Lost: 7}}},
		{Lost: 6, Sinks: []snapshot.LogSink{{URL: "a", Lost: 9}, {URL: "b", Lost: 3}}},
	}
	at := 0
	s := translationLog(Options{Log: func(*netns.Handle) (*snapshot.Log, error) {
		at++
		return readings[at-1], nil
	}})
	var out snapshot.Snapshot
	if err := s.start(nil); err != nil {
		t.Fatal(err)
	}
	if err := s.end(nil, &out); err != nil {
		t.Fatal(err)
	}
	if l := out.Log; l.Lost != 1 || l.Sinks[0].Lost != 2 || l.Sinks[1].Lost != 3 {
		t.Errorf("%+v", l)
	}
	at, readings = 0, []*snapshot.Log{nil, {Lost: 6, Sinks: []snapshot.LogSink{{URL: "a", Lost: 9}}}}
	if err := s.start(nil); err != nil {
		t.Fatal(err)
	}
	if err := s.end(nil, &out); err != nil || out.Log.Lost != 0 || out.Log.Sinks[0].Lost != 0 {
		t.Errorf("a log that was not there before: %+v, %v", out.Log, err)
	}
}
