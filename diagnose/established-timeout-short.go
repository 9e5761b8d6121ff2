// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"strconv"

	"natkit/snapshot"
)

// leastEstablished is the shortest time-out of an open connection that programs
// may count on: RFC 5382, REQ-5.
const leastEstablished = 2*3600 + 4*60

var establishedTimeoutShort = Cause{
	Code:       "established-timeout-short",
	Title:      "Open connections are forgotten while they are idle",
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"conntrack-invalid-reset"},
	Needs:      []string{snapshot.CanSysctls, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:    "Connections that were idle for a while hang or are reset with the next packet: database pools, SSH sessions, long polls.",
	Proof: fmt.Sprintf("The time-out of established connections is below %d s (RFC 5382 asks for 2 h 4 min), sources are translated, and segments in the middle of a connection reached this machine's own stack and were reset: "+
		"from %d in the window a warning, from %d and %s of the connections that end critical. The short time-out alone is advice.", leastEstablished, fewFailures, resetFew, percent(resetOfEnded)),
	Lookalike: "A short time-out on a machine that translates nothing, and resets of scans, whose packets are not in the middle of a connection.",
	Cure:      "A time-out of a day, which keepalive with usual settings keeps up; or keepalive in the programs, more often than the time-out.",
	judge:     judgeEstablishedShort,
}

func judgeEstablishedShort(f facts) *verdict {
	s := f.local("net.netfilter.nf_conntrack_tcp_timeout_established", f.aliveSeconds())
	now, known := f.sysctl(s.Name)
	if !known || now <= 0 || now >= leastEstablished || f.Conntrack == nil || !f.translatesSources() && f.Chains != nil {
		return nil
	}
	strays, rows := f.strays()
	sent, sentKnown := f.counter("Tcp.OutRsts")
	resets := strays
	if sentKnown {
		resets = min(strays, sent)
	}
	v := &verdict{harm: float64(resets)}
	switch {
	case resets >= resetFew && f.ofEnded(resets) >= resetOfEnded:
		v.Severity = Critical
	case resets >= fewFailures:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Title = fmt.Sprintf("open connections are forgotten after %d s without a packet", now)
	if v.Severity > Advice {
		v.Title += fmt.Sprintf(": %s of such reset %s", number(resets, "packet"), f.window())
	}
	v.Evidence = []Evidence{{s.Name, strconv.FormatInt(now, 10), fromSettings}}
	if strays > 0 {
		v.Evidence = append(v.Evidence, Evidence{"segments for nobody here (NO_SOCKET)", strconv.FormatUint(strays, 10) + cameInBy(rows), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	}
	if sent > 0 {
		v.Evidence = append(v.Evidence, Evidence{"resets that this machine sent", strconv.FormatUint(sent, 10), fromSnmp + ": Tcp OutRsts"})
	}
	v.Why = "When the entry of a translated connection is gone, a packet from outside is for this machine itself, which knows nothing of it and answers with a reset. Programs count on two hours and more, " +
		"keepalive begins after two."
	v.Settings = []snapshot.Setting{s}
	if v.Severity < Warning { // a time-out that hurts nobody was somebody's choice
		v.Settings[0].If = "nobody chose the short time-out on purpose"
	}
	v.Remedy = []string{f.set(s), "# or let the programs that stay connected send keepalives more often than that (TCP_KEEPIDLE, ServerAliveInterval of ssh)"}
	v.Verify = f.look(f.run("sysctl " + s.Name))
	return v
}
