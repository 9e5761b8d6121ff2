// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"strconv"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

var engineSourceLimit = Cause{
	Code:     "engine-source-limit",
	Title:    "A subscriber has reached its limit of sessions, ports or new sessions",
	Headline: "New connections of one host fail: its limit of sessions or ports is reached",
	Search: []string{
		"limits.sessions_per_source",
		"too many sessions per subscriber",
		"port-limit",
		"rate-limit",
	},
	Severities:    []Severity{Warning},
	Needs:         []string{snapshot.CanEngine},
	Symptom:       "New connections of one host fail at times. Other hosts have no trouble and its open connections continue.",
	Proof:         "The eBPF engine dropped packets during the window that would have opened a session beyond limits.sessions_per_source, or beyond the sessions, ports or new_per_second of a subscriber's class, or its port blocks.",
	FalsePositive: "A host close to its limit that was refused nothing: a limit is there to be used. Refusals because of a full table or missing ports are conntrack-table-full, snat-ports-exhausted and port-blocks-exhausted; ports that are mostly in hold-down are port-block-too-small.",
	Cure:          "Raise the limit if the host needs it. Otherwise find the program on it that opens so many sessions.",
	judge:         judgeEngineSourceLimit,
}

// subscriberLimits are the limits of a subscriber: the reason that counts refusals, and the key of
// its class.
var subscriberLimits = []struct{ reason, key, what string }{
	{"source-limit", "sessions", "sessions"},
	{"port-limit", "ports", "ports"},
	{"rate-limit", "new_per_second", "new sessions a second"},
}

func judgeEngineSourceLimit(f facts) *verdict {
	limit := subscriberLimits[0]
	for _, l := range subscriberLimits[1:] {
		if f.counted(l.reason) > f.counted(limit.reason) {
			limit = l
		}
	}
	lost := f.counted(limit.reason)
	if lost == 0 {
		return nil
	}
	e, who := f.Engine, (*snapshot.EngineSource)(nil)
	for i := range e.Sources {
		if who == nil && e.Sources[i].Refused[limit.reason] > 0 {
			who = &e.Sources[i]
		}
	}
	name, source := "an internal host", ""
	if who != nil {
		name, source = who.Name(), " --source "+who.Hosts()
		if float64(who.Refused[limit.reason]) < countedMost*float64(lost) {
			name += " and others"
		}
	}
	key, allowed, remedy := f.raiseLimit(limit.key, who)
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	v.Title = titled(fmt.Sprintf("%s reached %s: the engine dropped %s", name, key, number(lost, "packet")), " "+f.window())
	v.Evidence = append(f.engineEvidence(), f.countedEvidence(limit.reason)...)
	if who != nil {
		v.Evidence = append(v.Evidence, f.subscriberEvidence(who)...)
	}
	if allowed > 0 {
		v.Evidence = append(v.Evidence, Evidence{limit.what + " that it may have", strconv.FormatUint(allowed, 10), cmp.Or(e.File, "rule file")})
	}
	v.Why = "The limit keeps one host from using up what all share. At the limit the engine refuses new sessions of that host only, with an ICMP error; its open sessions continue."
	v.Remedy = []string{"# which sessions does it have? If they are a scan or a broken program, fix that on the host:", f.natkit("sessions" + source)}
	v.Remedy = append(v.Remedy, "# if it needs them, allow more:")
	v.Remedy = append(append(v.Remedy, remedy...), f.apply())
	v.Verify = f.look(f.natkit("subscribers --by refused"))
	return v
}

// raiseLimit is the limit that a subscriber has met, as the rule file writes it, and the commands that
// raise it.
func (f facts) raiseLimit(key string, who *snapshot.EngineSource) (name string, allowed uint64, remedy []string) {
	e := f.Engine
	if key == "sessions" && e.PerSource > 0 {
		return fmt.Sprintf("sessions_per_source (%d)", e.PerSource), e.PerSource, f.editLimit("sessions_per_source", e.PerSource, min(4*e.PerSource, rulefile.MaxSessions))
	}
	ask := fmt.Sprintf("# raise %s of its class in %s, then:", key, e.File)
	if who == nil {
		return key + " of its class", 0, []string{ask}
	}
	c := f.class(who)
	if c != nil {
		allowed = map[string]uint64{"sessions": c.Sessions, "ports": c.Ports, "new_per_second": c.NewPerSecond}[key]
	}
	if key == "ports" && who.Blocks > 0 && (allowed == 0 || who.Ports < allowed) {
		return "its port blocks", who.BlockPorts, f.largerBlocks(who)
	}
	if allowed == 0 || c.Lines[key] == 0 {
		return key + " of its class", allowed, []string{ask}
	}
	most := map[string]uint64{"sessions": rulefile.MaxSessions, "ports": rulefile.MaxUse, "new_per_second": rulefile.MaxNewSessions}[key]
	return fmt.Sprintf("%s (%d)", key, allowed), allowed, []string{setKey(c.Lines[key], key, allowed, min(4*allowed, most), e.File)}
}
