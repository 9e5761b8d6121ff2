// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// deadRoom and deadWaste are the shares of the limit that connections without
	// life must hold for a warning and for advice: the same as for those in
	// TIME_WAIT. In a table with room they do no damage.
	deadRoom  = timeWaitRoom
	deadWaste = timeWaitWaste

	day = 86400
)

var establishedTimeoutLong = Cause{
	Code:     "established-timeout-long",
	Title:    "Connections whose endpoints have vanished stay in the table for days",
	Headline: "conntrack table fills with old ESTABLISHED entries: the timeout is 5 days",
	Search: []string{
		"net.netfilter.nf_conntrack_tcp_timeout_established = 432000",
		"nf_conntrack_tcp_timeout_established 432000",
		"conntrack: ESTABLISHED",
	},
	Severities: []Severity{Advice, Warning},
	Needs:      []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanSysctls},
	Symptom:    "The table fills slowly over days, with established connections of machines that were switched off, moved or lost their address.",
	Proof: fmt.Sprintf("The timeout of established connections is longer than a day (the kernel's default is five), and connections without a packet for %d hours, as their remaining time shows, hold at least %s of nf_conntrack_max; from %s it is advice. Keepalive with the usual settings would have refreshed them within %s.",
		snapshot.IdleSeconds/3600, percent.Whole(deadRoom), percent.Whole(deadWaste), "2 h 11 min"),
	FalsePositive: "Idle connections in a table with room, and a timeout that was raised while they existed: until their next packet they seem idle for the difference.",
	Cure:          "Set a timeout of a day, or longer if this machine's keepalive needs it. Existing connections keep theirs until their next packet.",
	judge:         judgeEstablishedLong,
}

func judgeEstablishedLong(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	s := f.local("net.netfilter.nf_conntrack_tcp_timeout_established", f.aliveSeconds())
	now, known := f.sysctl(s.Name)
	wanted, _ := strconv.ParseInt(s.Value, 10, 64)
	if !known || now <= wanted || t.Idle > t.Entries || share(t.Idle, limit) < deadWaste {
		return nil
	}
	v := &verdict{impact: share(t.Idle, limit)}
	v.Severity = Advice
	if share(t.Idle, limit) >= deadRoom {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("connections idle for hours hold %s of the connection tracking table", percent.Whole(share(t.Idle, limit)))
	v.Evidence = append(f.fillEvidence(),
		Evidence{fmt.Sprintf("established connections without a packet for %d hours", snapshot.IdleSeconds/3600), fmt.Sprintf("%d of %d entries (%s)", t.Idle, t.Entries, percent.Whole(share(t.Idle, t.Entries))), fromDump},
		Evidence{"their timeout", strconv.FormatInt(now, 10) + " s after their last packet", fromSettings + ": nf_conntrack_tcp_timeout_established"})
	v.Why = "A connection whose endpoints vanished silently, or whose last packets took another path, keeps its entry until the timeout. With five days, the table collects all that vanished in that time."
	v.Settings = []snapshot.Setting{s}
	v.Remedy = []string{"# longer than this machine's keepalive needs, so that no connection with keepalive breaks:", f.set(s)}
	if kube := f.owner("kube-proxy", s.Name); kube != "" {
		v.Remedy = append(v.Remedy, "# kube-proxy sets it when it starts ("+kube+"): its option --conntrack-tcp-timeout-established")
	}
	growth := tableGrowth{}
	growth.whoFills(f)
	v.Remedy = append(v.Remedy, growth.remedy...)
	v.Verify = f.look(f.natkit("conntrack stats"))
	return v
}

// aliveSeconds is a time-out of established connections that breaks none whose
// ends use keepalive as this machine does: a day, or what keepalive takes.
func (f facts) aliveSeconds() uint64 {
	number := func(name string, otherwise int64) int64 {
		if n, known := f.sysctl(name); known && n > 0 && n < 1<<24 {
			return n
		}
		return otherwise
	}
	alive := number("net.ipv4.tcp_keepalive_time", 7200) + min(number("net.ipv4.tcp_keepalive_probes", 9), 255)*min(number("net.ipv4.tcp_keepalive_intvl", 75), 1<<16)
	return uint64(max(day, alive+60))
}

// owner is where somebody sets a setting, "" when he does not.
func (f facts) owner(who, setting string) string {
	for _, o := range f.Owners {
		if o.Who == who && o.Setting == setting {
			return o.Where
		}
	}
	return ""
}
