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
	stop := watchSeries(Options{Netns: ns, Window: time.Second}, newView(""), time.Minute)
	s := stop()
	if s == nil || len(s.Times) == 0 {
		t.Fatalf("%+v", s)
	}
	for name, line := range s.Lines {
		if len(line) != len(s.Times) {
			t.Errorf("%s has %d values for %d times", name, len(line), len(s.Times))
		}
	}
	if s := watchSeries(Options{Window: time.Second}, newView(t.TempDir()), time.Minute)(); s != nil {
		t.Errorf("of files alone: %+v", s)
	}
}
