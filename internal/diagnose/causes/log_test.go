// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"strings"
	"testing"
	"time"

	"natkit/internal/snapshot"
)

// withLog has the log of translations kept on the gateway, without anything wrong.
func withLog(s *snapshot.Snapshot) *snapshot.Log {
	s.TakenAt = time.Date(2026, 11, 20, 3, 12, 7, 0, time.UTC)
	s.Log = &snapshot.Log{Folder: "/var/lib/natkit/log", Wanted: true, Written: s.TakenAt.Add(-time.Second), Sinks: []snapshot.LogSink{
		{URL: "syslog+tls://log.example.net:6514?ca=/etc/ssl/log.pem", Hostname: "log.example.net", Port: 6514, Stream: true, Connected: true, Since: s.TakenAt.Add(-time.Hour)},
		{URL: "ipfix+udp://192.0.2.9:4739", Hostname: "192.0.2.9", Port: 4739, Connected: true, Since: s.TakenAt.Add(-time.Hour)},
		{URL: "json:///var/log/nat.json", Connected: true, Since: s.TakenAt.Add(-time.Hour)},
	}}
	return s.Log
}

// lacks adds a gap of a minute that ended so long ago.
func lacks(s *snapshot.Snapshot, ago time.Duration, why string) {
	l := withLog(s)
	until := s.TakenAt.Add(-ago)
	l.Gaps, l.GapCount = []snapshot.LogGap{{Since: until.Add(-time.Minute), Until: until, Why: why}}, 1
}

func init() {
	examples["log-gap"] = func(s *snapshot.Snapshot) { lacks(s, 10*time.Minute, "events came faster than they could be read") }
	moreExamples["log-gap, not running"] = func(s *snapshot.Snapshot) { lacks(s, 10*time.Minute, "natkit log was not running") }
	moreExamples["log-gap, clock"] = func(s *snapshot.Snapshot) { lacks(s, 10*time.Minute, "the clock was set forward by 1h0m0s") }
	moreExamples["log-gap, disk"] = func(s *snapshot.Snapshot) {
		withLog(s).Error, s.Log.Lost = "write the log: no space left on device", 700
	}
	moreExamples["log-gap, serve does not run"] = func(s *snapshot.Snapshot) {
		withEngine(s)
		withLog(s).Written = s.TakenAt.Add(-time.Hour)
	}
	moreExamples["log-gap, serve runs"] = func(s *snapshot.Snapshot) {
		withEngine(s).Served = true
		withLog(s).Written = time.Time{}
	}
	examples["sink-behind"] = func(s *snapshot.Snapshot) {
		sink := &withLog(s).Sinks[0]
		sink.Connected, sink.Since, sink.Behind, sink.Unsent, sink.Error = false, s.TakenAt.Add(-20*time.Minute), 1190, 120_000, "connection refused"
	}
	moreExamples["sink-behind, datagrams lost"] = func(s *snapshot.Snapshot) { withLog(s).Sinks[1].Lost = 900 }
	moreExamples["sink-behind, file"] = func(s *snapshot.Snapshot) {
		withLog(s).Sinks[2].Behind, s.Log.Sinks[2].Error = 61, "no space left on device"
	}
}

func TestLog(t *testing.T) {
	run(t, []row{
		{"a log that is kept", func(s *snapshot.Snapshot) { withLog(s) }, ""},
		{"no log", func(s *snapshot.Snapshot) { withLog(s); s.Log = nil }, ""},
		{"a gap of the last hour", func(s *snapshot.Snapshot) { lacks(s, 59*time.Minute, "natkit log was not running") }, "warning log-gap"},
		{"a gap of yesterday", func(s *snapshot.Snapshot) { lacks(s, 61*time.Minute, "natkit log was not running") }, "advice log-gap"},
		{"records are lost now", moreExamples["log-gap, disk"], "critical log-gap"},
		{"the rules want a log that nobody writes", func(s *snapshot.Snapshot) { withLog(s).Written = s.TakenAt.Add(-31 * time.Second) }, "warning log-gap"},
		{"... that was written just now", func(s *snapshot.Snapshot) { withLog(s).Written = s.TakenAt.Add(-29 * time.Second) }, ""},
		{"a log that was stopped, and that no rules want", func(s *snapshot.Snapshot) {
			withLog(s).Written, s.Log.Wanted = s.TakenAt.Add(-time.Hour), false
		}, ""},
		{"a sink that is down", examples["sink-behind"], "warning sink-behind"},
		{"a sink that was restarted", func(s *snapshot.Snapshot) {
			withLog(s).Sinks[0].Connected, s.Log.Sinks[0].Since = false, s.TakenAt.Add(-59*time.Second)
		}, ""},
		{"a sink that is slow", func(s *snapshot.Snapshot) { withLog(s).Sinks[1].Behind = 60 }, "warning sink-behind"},
		{"a sink that is a little behind", func(s *snapshot.Snapshot) { withLog(s).Sinks[1].Behind = 59 }, ""},
		{"records that the log had no more", moreExamples["sink-behind, datagrams lost"], "critical sink-behind"},
		{"a total that went backwards", func(s *snapshot.Snapshot) { withLog(s).Sinks[1].Lost = 1<<64 - 5 }, ""},
		{"sinks of a log that nobody writes", func(s *snapshot.Snapshot) {
			examples["sink-behind"](s)
			s.Log.Written = s.TakenAt.Add(-time.Hour)
		}, "warning log-gap"},
	})
}

// A finding tells since when the gap is, how long, and why; the remedy fits the reason.
func TestLogTexts(t *testing.T) {
	for name, want := range map[string][2]string{
		"log-gap, not running":        {"a gap of 1m since 03:01:07 UTC", "systemctl enable --now natkit-log"},
		"log-gap, clock":              {"a gap of 1m", "timedatectl"},
		"log-gap, disk":               {"no space left on device", "df -h /var/lib/natkit/log"},
		"log-gap, serve does not run": {"not written since 02:12:07 UTC", "systemctl enable --now natkit"},
		"log-gap, serve runs":         {"is not written, though", "journalctl -u natkit -n 50"},
		"sink-behind":                 {"sink syslog+tls://log.example.net:6514 is down for 20m", "timeout 5 bash -c '</dev/tcp/log.example.net/6514'"},
		"sink-behind, file":           {"sink json:///var/log/nat.json is 1m1s behind", "df -h"},
	} {
		s := gateway()
		if change := moreExamples[name]; change != nil {
			change(s)
		} else {
			examples[name](s)
		}
		f := Judge(s)
		if len(f) == 0 || !strings.Contains(f[0].Title, want[0]) || !strings.Contains(strings.Join(f[0].Remedy, "\n"), want[1]) {
			t.Errorf("%s: %+v, want %q", name, f, want)
		}
	}
}
