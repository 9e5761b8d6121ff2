// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"

	"natkit/internal/snapshot"
)

var engineSourceLimit = Cause{
	Code:     "engine-source-limit",
	Title:    "An internal host has reached its session limit",
	Headline: "New connections of one host fail: sessions_per_source reached",
	Search: []string{
		"limits.sessions_per_source",
		"too many sessions per subscriber",
	},
	Severities:    []Severity{Warning},
	Needs:         []string{snapshot.CanEngine},
	Symptom:       "New connections of one host fail at times. Other hosts have no trouble and its open connections continue.",
	Proof:         "The eBPF engine dropped packets during the window that would have opened a session beyond limits.sessions_per_source.",
	FalsePositive: "A host close to its limit that was refused nothing: a limit is there to be used. Refusals because of a full table or missing ports are conntrack-table-full and snat-ports-exhausted.",
	Cure:          "Raise the limit if the host needs it. Otherwise find the program on it that opens so many sessions.",
	judge:         judgeEngineSourceLimit,
}

func judgeEngineSourceLimit(f facts) *verdict {
	lost := f.counted("source-limit")
	if lost == 0 || f.Engine.PerSource == 0 {
		return nil
	}
	e := f.Engine
	who, source := "an internal host", ""
	if len(e.Sources) > 0 && e.Sources[0].Sessions >= e.PerSource {
		who = e.Sources[0].Addr.String()
		source = " --source " + who
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	v.Title = fmt.Sprintf("%s reached sessions_per_source (%d): the engine dropped %s %s", who, e.PerSource, number(lost, "packet"), f.window())
	v.Evidence = append(f.engineEvidence(), f.countedEvidence("source-limit")...)
	for _, s := range e.Sources[:min(len(e.Sources), 3)] {
		v.Evidence = append(v.Evidence, Evidence{"sessions of " + s.Addr.String(), fmt.Sprintf("%d of %d", s.Sessions, e.PerSource), "natkit sessions"})
	}
	v.Why = "limits.sessions_per_source keeps one host from using up what all share. At the limit the engine refuses new sessions of that host only, with an ICMP error; its open sessions continue."
	v.Remedy = []string{"# which sessions does it have? If they are a scan or a broken program, fix that on the host:", f.natkit("sessions" + source)}
	v.Remedy = append(v.Remedy, "# if it needs them, allow more:")
	v.Remedy = append(v.Remedy, f.editLimit("sessions_per_source", e.PerSource, 4*e.PerSource)...)
	v.Remedy = append(v.Remedy, f.apply())
	v.Verify = f.look(f.natkit("status"))
	return v
}
