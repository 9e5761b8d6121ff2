// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// shortCloseWait is the kernel's own time-out of CLOSE_WAIT.
const shortCloseWait = 60

var closeWaitHeavy = Cause{
	Code:     "close-wait-heavy",
	Title:    "Half-closed connections fill the table",
	Headline: "conntrack table fills with CLOSE_WAIT entries on a Kubernetes node",
	Search: []string{
		"conntrack: CLOSE_WAIT",
		"net.netfilter.nf_conntrack_tcp_timeout_close_wait",
		"kube-proxy --conntrack-tcp-timeout-close-wait",
	},
	Severities: []Severity{Advice, Warning},
	Needs:      []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanSysctls, snapshot.CanOwners},
	Symptom:    "The table of a Kubernetes node fills with connections in CLOSE_WAIT, each for an hour.",
	Proof: fmt.Sprintf("CLOSE_WAIT entries hold at least %s of nf_conntrack_max, from %s it is advice, and their timeout is longer than the kernel's %d s: kube-proxy sets it to an hour.",
		percent.Whole(deadRoom), percent.Whole(deadWaste), shortCloseWait),
	FalsePositive: fmt.Sprintf("CLOSE_WAIT entries with a timeout of %d s: those connections are half closed and in use, or a program does not close its side, which is not NAT's fault. The timeout alone, in a table with room.", shortCloseWait),
	Cure:          "Use the kernel's timeout of a minute. With Kubernetes set kube-proxy's own option, which it writes at every start.",
	judge:         judgeCloseWait,
}

func judgeCloseWait(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	waiting := t.ByState["CLOSE_WAIT"]
	s := f.local("net.netfilter.nf_conntrack_tcp_timeout_close_wait", shortCloseWait)
	now, known := f.sysctl(s.Name)
	if !known || now <= shortCloseWait || waiting > t.Entries || share(waiting, limit) < deadWaste {
		return nil
	}
	v := &verdict{impact: share(waiting, limit)}
	v.Severity = Advice
	if share(waiting, limit) >= deadRoom {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("half-closed connections (CLOSE_WAIT) hold %s of the connection tracking table", percent.Whole(share(waiting, limit)))
	v.Evidence = append(f.fillEvidence(),
		Evidence{"entries in CLOSE_WAIT", fmt.Sprintf("%d of %d (%s)", waiting, t.Entries, percent.Whole(share(waiting, t.Entries))), fromDump},
		Evidence{"their timeout", strconv.FormatInt(now, 10) + " s", fromSettings + ": nf_conntrack_tcp_timeout_close_wait"})
	v.Why = "After one side has closed, the other may still send, so the entry stays. Few do for more than a moment; with a timeout of an hour each connection that was never closed on both sides keeps its entry that long."
	v.Settings = []snapshot.Setting{s}
	v.Remedy = []string{f.set(s)}
	if kube := f.owner("kube-proxy", s.Name); kube != "" {
		v.Evidence = append(v.Evidence, Evidence{"who sets it", "kube-proxy", kube})
		v.Remedy = append(v.Remedy, fmt.Sprintf("# kube-proxy writes its own value when it starts: give it --conntrack-tcp-timeout-close-wait=%ds, or conntrack.tcpCloseWaitTimeout in its configuration", shortCloseWait))
	}
	v.Remedy = append(v.Remedy, "# existing entries keep their old timeout; to remove them at once:", f.run("conntrack -D -p tcp --state CLOSE_WAIT"))
	v.Verify = f.look(f.natkit("conntrack stats"))
	return v
}
