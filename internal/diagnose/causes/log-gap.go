// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

const (
	// logStale: a log is written once a second, and by a busy machine a little later.
	logStale = 30 * time.Second
	// logRecent is for how long a gap is a warning.
	logRecent = time.Hour
)

var logGap = Cause{
	Code:     "log-gap",
	Title:    "The log of translations has a gap, or is not written",
	Headline: "The NAT log misses records: nobody can say who had an address and port then",
	Search: []string{
		"the log has a gap then",
		"events came faster than they could be read",
		"the engine's log was full: nobody read it, or not fast enough",
		"natkit log was not running",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanLog},
	Symptom:       "`natkit who` answers \"The log cannot tell\" for some times. Packets are not affected.",
	Proof:         "log.json in the folder of the log. Records that cannot be written now are critical. A log that the rule file wants and nobody has written for 30 s is a warning, and so is a gap that ended within the last hour; until a day later it is advice.",
	FalsePositive: "A log that was stopped on purpose and that no rule file wants. Engine ebpf records while natkit serve restarts: that is no gap.",
	Cure:          "Keep natkit serve or natkit log running, with room on the disk, and record port blocks or mappings rather than sessions where there are many. What a gap lacks cannot be had back.",
	NoLab:         "a lab keeps no log of translations; tests of `natkit log` make every kind of gap",
	judge:         judgeLogGap,
}

func judgeLogGap(f facts) *verdict {
	l := f.Log
	if l == nil {
		return nil
	}
	v := &verdict{impact: float64(l.GapCount)}
	stale := l.Wanted && f.TakenAt.Sub(l.Written) > logStale
	state := l.Folder + "/log.json"
	var newest snapshot.LogGap
	if len(l.Gaps) > 0 {
		newest = l.Gaps[0]
	}
	switch {
	case l.Error != "":
		v.Severity, v.impact = Critical, float64(l.Lost)
		v.Title = "records of the translation log are being lost: " + l.Error
		v.Evidence = []Evidence{{"why records cannot be written", l.Error, state}, {"records lost in the window", strconv.FormatUint(l.Lost, 10), state}}
		v.Remedy = []string{"# is the disk full, or not writable?", "df -h " + quote(l.Folder), "# free some of it, or keep less of the log (--age and --size, in a rule file age and size of the key log)"}
	case stale:
		v.Severity = Warning
		v.Title = "the translation log is not written, though the rule file wants it"
		last := "never"
		if !l.Written.IsZero() {
			v.Title = "the translation log is not written since " + clock(l.Written) + ", though the rule file wants it"
			last = moment(l.Written)
		}
		v.Evidence = []Evidence{{"written last", last, state}}
		v.Remedy = f.keepLog()
	case newest.Until.IsZero():
		return nil
	default:
		v.Severity = Advice
		if f.TakenAt.Sub(newest.Until) < logRecent {
			v.Severity = Warning
		}
		v.Title = fmt.Sprintf("the translation log has a gap of %s since %s", spell(newest.Until.Sub(newest.Since)), clock(newest.Since))
		v.Remedy = f.closeLogGap(newest.Why)
	}
	for _, g := range l.Gaps {
		v.Evidence = append(v.Evidence, Evidence{"gap from " + moment(g.Since), fmt.Sprintf("to %s: %s", moment(g.Until), g.Why), state})
	}
	if l.GapCount > len(l.Gaps) {
		v.Evidence = append(v.Evidence, Evidence{"more gaps within a day", plural.Count(l.GapCount-len(l.Gaps), "gap"), state})
	}
	v.Why = "Who had an external address and port in a gap is unknown, unless the same translation is in the log before and after it."
	v.Verify = f.look("cat " + quote(state))
	return v
}

// keepLog is what has the log written again.
func (f facts) keepLog() []string {
	if e := f.Engine; e != nil && e.File != "" && !e.Served {
		return []string{"# natkit serve keeps the log of the rule file; as a service:", "systemctl enable --now natkit", "# or in this shell:", "# " + f.natkit(f.onFile("serve", e.Flags...))}
	}
	if f.Engine != nil && f.Engine.Served {
		return []string{"# natkit serve runs: its messages show why it does not keep the log", "journalctl -u natkit -n 50"}
	}
	return []string{"systemctl enable --now natkit-log"}
}

// closeLogGap is what keeps a gap of that reason from coming again.
func (f facts) closeLogGap(why string) []string {
	switch {
	case strings.Contains(why, "not running"):
		return append([]string{"# what keeps the log was stopped or killed: have it run all the time"}, f.keepLog()...)
	case strings.Contains(why, "clock"):
		return []string{"# the clock was set in a step: let a time service adjust it slowly, and start it before natkit", "timedatectl"}
	case strings.Contains(why, "could not be written"):
		return []string{"# the disk was full, or not writable", "df -h " + quote(f.Log.Folder)}
	}
	return []string{"# more was to be recorded than was read: which processor has no time left?", f.natkit("doctor --for 10s"), "# record port blocks or mappings instead of sessions (record of the key log, without --destinations)"}
}

// clock is a time of today or yesterday in a title, moment any time in evidence.
func clock(t time.Time) string  { return t.UTC().Format("15:04:05 UTC") }
func moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// spell is how long something took, to a tenth of a second.
func spell(d time.Duration) string {
	if d < time.Minute {
		return strconv.FormatFloat(max(d, 0).Seconds(), 'f', 1, 64) + " s"
	}
	return strings.TrimSuffix(d.Round(time.Second).String(), "0s")
}
