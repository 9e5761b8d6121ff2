// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"reflect"
	"testing"
	"time"

	"natkit/internal/snapshot"
)

func TestRecorder(t *testing.T) {
	r := recorder{series: snapshot.Series{Lines: map[string][]float64{}}}
	for _, now := range []map[string]float64{{"late": 0, "still": 0}, {"still": 0, "gone": 2}, {"late": 3, "still": 0}} {
		r.series.Times = append(r.series.Times, float64(len(r.series.Times)))
		for name, v := range now {
			r.add(name, v)
		}
	}
	got := r.finish()
	want := map[string][]float64{"late": {0, 0, 3}, "gone": {0, 2, 0}}
	if !reflect.DeepEqual(got.Lines, want) {
		t.Errorf("%v, want %v", got.Lines, want)
	}
}

func TestWatchSeries(t *testing.T) {
	ns := newNetns(t)
	readings := []*reading{{opts: Options{Netns: ns}, view: newView("")}, {view: newView(t.TempDir())}, {opts: Options{Netns: ns, NoSeries: true}, view: newView("")}}
	all := watchSeries(readings, time.Minute)()
	s := all[0]
	if s == nil || len(s.Times) == 0 {
		t.Fatalf("%+v", s)
	}
	for name, line := range s.Lines {
		if len(line) != len(s.Times) {
			t.Errorf("%s has %d values for %d times", name, len(line), len(s.Times))
		}
	}
	if len(all) != len(readings) || all[1] != nil || all[2] != nil {
		t.Errorf("of files alone, or not asked for: %+v", all[1:])
	}
}
