// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
	"natkit/internal/snapshot"
)

// The doctor's facts are those of the folder's files, of a log that has this namespace or that
// the rules want.
func TestLogFacts(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(namespace uint64) *snapshot.Log {
		t.Helper()
		l, err := readFacts(dir, namespace)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if l := read(5); l != nil {
		t.Errorf("no log: %+v", l)
	}
	if l := read(0); l == nil || !l.Wanted || !l.Written.IsZero() {
		t.Errorf("a log that is wanted and was never written: %+v", l)
	}
	gaps := ""
	for i := range snapshot.TopN + 3 {
		gaps += fmt.Sprintf(`{"since":"2026-11-20T03:%02d:00Z","until":"2026-11-20T03:%02d:30Z","reason":"some"},`, i, i)
	}
	write(store.StateFile, `{"schema":"natkit/log-state/1","time":"2026-11-20T04:00:00Z","netns_inode":5,"lost_records_total":7,"gaps":[`+gaps[:len(gaps)-1]+`]}`)
	write(sink.FileName, `{"schema":"natkit/log-sinks/1","sinks":[{"url":"syslog+tls://log.example.net:6514?ca=/x.pem","behind_s":3,"error":"refused"},{"url":"json:///f","connected":true},
		{"url":"ipfix+udp://192.0.2.9:4739","unused":true},{"url":"kafka://b1:9092,b2:9092/t","lost_records_total":4}]}`)
	if l := read(6); l != nil {
		t.Errorf("another namespace's: %+v", l)
	}
	l := read(5)
	if l == nil || l.Wanted || l.Lost != 7 || l.GapCount != snapshot.TopN+3 || len(l.Gaps) != snapshot.TopN || l.Gaps[0].Since.Minute() != snapshot.TopN+2 {
		t.Fatalf("%+v", l)
	}
	want := []snapshot.LogSink{
		{URL: "syslog+tls://log.example.net:6514?ca=/x.pem", Hostname: "log.example.net", Port: 6514, Stream: true, Behind: 3, Error: "refused"},
		{URL: "json:///f", Connected: true},
		{URL: "kafka://b1:9092,b2:9092/t", Hostname: "b1", Port: 9092, Stream: true, Lost: 4},
	}
	if fmt.Sprint(l.Sinks) != fmt.Sprint(want) || !l.Written.Equal(time.Date(2026, 11, 20, 4, 0, 0, 0, time.UTC)) {
		t.Errorf("got  %+v\nwant %+v", l.Sinks, want)
	}
	write(store.StateFile, "{")
	if _, err := readFacts(dir, 5); err == nil {
		t.Error("a damaged file is none")
	}
}
