// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

// lostEvents is how many events a listener must have lost in the window for a
// warning; a burst costs a few.
const lostEvents = 10

var eventListenerLag = Cause{
	Code:     "event-listener-lag",
	Title:    "A program that listens to conntrack events does not keep up",
	Headline: "conntrackd or a flow exporter misses events: ENOBUFS, no buffer space available",
	Search: []string{
		"No buffer space available",
		"ENOBUFS",
		"WARNING: We have hit ENOBUFS! We are losing events.",
		"/proc/net/netlink: Drops",
	},
	Severities: []Severity{Advice, Warning},
	Needs:      []string{snapshot.CanEventSockets, snapshot.CanSysctls},
	Symptom:    `conntrackd's standby misses connections, and flow exports and accounting are too low. The program logs ENOBUFS or "No buffer space available". CPUs create events that nobody reads.`,
	Proof: fmt.Sprintf("A netlink socket in conntrack's groups lost events during the window (Drops of /proc/net/netlink): from %d a warning, fewer are advice.",
		lostEvents),
	FalsePositive: "Losses before the window, and sockets of other groups. A listener that keeps up costs one message for each connection that starts, changes and ends; natkit does not report it.",
	Cure:          "Use a larger socket buffer for the program, fewer event types, or no listener.",
	judge:         judgeEventListener,
}

func judgeEventListener(f facts) *verdict {
	var worst snapshot.EventSocket
	var lost uint64
	for _, s := range f.EventSockets {
		if s.Drops >= implausible {
			continue
		}
		lost = saturate(lost, s.Drops)
		if s.Drops > worst.Drops {
			worst = s
		}
	}
	if lost == 0 {
		return nil
	}
	who := worst.Process
	if who == "" {
		who = "a program"
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Advice
	if lost >= lostEvents {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s lost %s %s", who, number(lost, "conntrack event"), f.window())
	v.Evidence = []Evidence{
		{"events for which a socket had no room", strconv.FormatUint(lost, 10), fromNetlink + ": Drops"},
		{"socket with most losses", fmt.Sprintf("of %s, port %d: %d lost, %s wait", who, worst.PortID, worst.Drops, amount(worst.QueueBytes)), fromNetlink},
		{"sockets that listen", strconv.Itoa(len(f.EventSockets)), fromNetlink},
	}
	if n, known := f.sysctl("net.netfilter.nf_conntrack_events"); known {
		v.Evidence = append(v.Evidence, Evidence{"net.netfilter.nf_conntrack_events", strconv.FormatInt(n, 10), fromSettings})
	}
	v.Why = "Each connection that starts, changes its state or ends is a message to every listener. A listener loses what does not fit into its buffer; one that asked for reliable delivery keeps ended connections in the table until it reads."
	room := snapshot.Setting{Name: "net.core.rmem_max", Value: "16777216"} // the host's
	const use = "(conntrackd: NetlinkBufferSize and NetlinkBufferSizeMaxGrowth; others: raise the default and restart)"
	if f.enough(room) {
		v.Remedy = []string{"# let the program use a larger buffer, which net.core.rmem_max allows " + use}
	} else {
		v.Settings = []snapshot.Setting{room}
		v.Remedy = []string{"# allow a larger buffer, then let the program use it " + use + ":", f.set(room)}
	}
	v.Remedy = append(v.Remedy,
		"# or create fewer events, only for connections that start and end, by a rule:",
		f.run("nft add table inet natkit-events"),
		f.run("nft "+quote("add chain inet natkit-events prerouting { type filter hook prerouting priority mangle; }")),
		f.run("nft "+quote("add rule inet natkit-events prerouting ct state new ct event set new,destroy")),
		"# or stop the program, if nobody needs the events")
	v.Verify = f.look(f.run("cat /proc/net/netlink"))
	return v
}
