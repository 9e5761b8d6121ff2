// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"
	"time"

	"natkit/internal/snapshot"
)

// sinkLate is for how many seconds a sink may be down or have something unsent: a receiver that
// restarts takes less.
const sinkLate = 60

var sinkBehind = Cause{
	Code:     "sink-behind",
	Title:    "A sink of the log of translations is down or does not keep up",
	Headline: "NAT records do not reach the collector, syslog server or Kafka",
	Search: []string{
		"connection refused",
		"natkit log --sink",
		"records that no file of the log has any more",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanLog},
	Symptom:       "A collector has no records of the last time, or late ones. Packets, the log itself and other sinks are not affected.",
	Proof:         "sinks.json in the folder of the log: a sink that is not connected, or has had something unsent, for 60 s. It is critical if records were lost for it during the window: the log no longer had them.",
	FalsePositive: "A sink that was down and catches up: it is reported only while it is more than 60 s behind. Datagrams that are lost on the way are not noticed.",
	Cure:          "Start the receiver, or give it the time and disk that it needs: what it has missed comes from the log by itself. Keep the log for longer than a receiver may be away.",
	NoLab:         "a lab keeps no log of translations; tests of internal/natlog/sink stop and slow down receivers",
	judge:         judgeSinkBehind,
}

func judgeSinkBehind(f facts) *verdict {
	if f.Log == nil || f.TakenAt.Sub(f.Log.Written) > logStale { // what nobody writes is log-gap
		return nil
	}
	var worst *snapshot.LogSink
	var late float64
	for i := range f.Log.Sinks {
		s := &f.Log.Sinks[i]
		seconds := s.Behind
		if !s.Connected && !s.Since.IsZero() {
			seconds = max(seconds, f.TakenAt.Sub(s.Since).Seconds())
		}
		lost := s.Lost > 0 && s.Lost < implausible
		if !lost && seconds < sinkLate {
			continue
		}
		if worst == nil || s.Lost > worst.Lost || s.Lost == worst.Lost && seconds > late {
			worst, late = s, seconds
		}
	}
	if worst == nil {
		return nil
	}
	name, from := worst.Name(), f.Log.Folder+"/sinks.json"
	v := &verdict{impact: late}
	v.Severity = Warning
	switch {
	case worst.Lost > 0 && worst.Lost < implausible:
		v.Severity, v.impact = Critical, float64(worst.Lost)
		v.Title = fmt.Sprintf("sink %s lost %s %s", name, number(worst.Lost, "record"), f.window())
	case !worst.Connected:
		v.Title = fmt.Sprintf("sink %s is down for %s", name, lateFor(late))
	default:
		v.Title = fmt.Sprintf("sink %s is %s behind", name, lateFor(late))
	}
	v.Evidence = []Evidence{
		{"sink", worst.URL, from},
		{"records not sent yet", strconv.Itoa(worst.Unsent), from},
		{"unsent for", lateFor(worst.Behind), from},
	}
	if worst.Error != "" {
		v.Evidence = append(v.Evidence, Evidence{"its last error", worst.Error, from})
	}
	if worst.Lost > 0 {
		v.Evidence = append(v.Evidence, Evidence{"records lost for it in the window", strconv.FormatUint(worst.Lost, 10), from})
	}
	v.Why = "A sink that is down or slow delays nothing else: what it has missed is read from the log when it is back. It is lost for the sink when the log removes the hour (age and size)."
	v.Remedy = f.reachSink(worst)
	v.Verify = f.look("cat " + quote(from))
	return v
}

// lateFor is seconds as people write them.
func lateFor(seconds float64) string { return spell(time.Duration(seconds * float64(time.Second))) }

// reachSink is how to find out why a sink does not take what it is sent.
func (f facts) reachSink(s *snapshot.LogSink) []string {
	if s.Hostname == "" {
		return []string{"# is there room on the disk, and can the file be written?", "df -h"}
	}
	out := []string{fmt.Sprintf("# on %s: does the receiver run, and keep up? Its firewall must let port %d in", s.Hostname, s.Port)}
	if s.Stream {
		out = append(out, "# from here (sinks are reached from the namespace in which natkit serve or natkit log runs):",
			"timeout 5 bash -c "+quote(fmt.Sprintf("</dev/tcp/%s/%d", quote(s.Hostname), s.Port)))
	} else {
		out = append(out, "# is there a route to it?", "getent hosts "+quote(s.Hostname))
	}
	return append(out, "# it catches up by itself")
}
