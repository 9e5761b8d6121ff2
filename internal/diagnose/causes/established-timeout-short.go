// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// leastEstablished is the shortest time-out of an open connection that programs
// may count on: RFC 5382, REQ-5.
const leastEstablished = 2*3600 + 4*60

// The kernel's own time-outs of UDP flows, that were not answered and that were.
const (
	usualUDP       = 30
	usualUDPStream = 120
)

var establishedTimeoutShort = Cause{
	Code:     "established-timeout-short",
	Title:    "Open connections expire while they are idle",
	Headline: "Idle connections hang or are reset: nf_conntrack_tcp_timeout_established is too short",
	Search: []string{
		"Connection reset by peer",
		"Broken pipe",
		"client_loop: send disconnect: Broken pipe",
		"net.netfilter.nf_conntrack_tcp_timeout_established",
		"net.netfilter.nf_conntrack_udp_timeout",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"conntrack-invalid-reset", "rule-drop", "forward-policy-drop"},
	Needs:      []string{snapshot.CanSysctls, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanConntrackDump, snapshot.CanLeaving},
	Symptom:    "Connections that were idle for a while hang or are reset by the next packet: database pools, SSH sessions, long polls. With UDP, late replies are lost, and calls and tunnels go silent.",
	Proof: fmt.Sprintf("The timeout of established connections is below %d s (RFC 5382 requires 2 h 4 min), sources are translated, and segments in the middle of a connection reached this machine's own stack and were reset. %d of them during the window are a warning; %d, if they are %s of the connections that end, are critical. Such segments of clients that rules dropped count too. The short timeout alone is advice. Or a UDP timeout is below the kernel's %d s (without reply) and %d s (with replies), and datagrams from the destinations of flows here arrived and found no entry, so that no socket wanted them or a rule dropped them: from %d a warning, from %d critical.",
		leastEstablished, fewFailures, resetFew, percent.Whole(resetOfEnded), usualUDP, usualUDPStream, fewFailures, resetFew),
	FalsePositive: "A short timeout on a machine that translates nothing, and resets caused by scans, whose packets are not in the middle of a connection.",
	Cure:          "Set a timeout of a day, which keepalive with usual settings refreshes. Or use keepalive in the programs, at intervals shorter than the timeout.",
	judge:         judgeEstablishedShort,
}

func judgeEstablishedShort(f facts) *verdict {
	tcp, udp := judgeTCPShort(f), judgeUDPShort(f)
	if tcp == nil || udp != nil && udp.Severity > tcp.Severity {
		return udp
	}
	return tcp
}

// judgeUDPShort tells of answers that come when the entry of their flow is gone.
func judgeUDPShort(f facts) *verdict {
	if f.Drops == nil || f.Conntrack == nil || f.Conntrack.Table == nil {
		return nil
	}
	v := &verdict{}
	var short []Evidence
	for _, s := range []snapshot.Setting{
		f.local("net.netfilter.nf_conntrack_udp_timeout", usualUDP),
		f.local("net.netfilter.nf_conntrack_udp_timeout_stream", usualUDPStream),
	} {
		now, known := f.sysctl(s.Name)
		if want, err := strconv.ParseInt(s.Value, 10, 64); err == nil && known && now > 0 && now < want {
			v.Settings = append(v.Settings, s)
			v.Remedy = append(v.Remedy, f.set(s))
			short = append(short, Evidence{s.Name, strconv.FormatInt(now, 10), fromSettings})
		}
	}
	late, rows := f.lateDatagrams()
	if len(short) == 0 || late < fewFailures {
		return nil
	}
	v.impact = float64(late)
	v.Severity = Warning
	if late >= resetFew || f.mostOfWhatComes(rows, late) {
		v.Severity = Critical
	}
	reply := "1 UDP reply"
	if late != 1 {
		reply = fmt.Sprintf("%d UDP replies", late)
	}
	v.Title = fmt.Sprintf("%s arrived %s after their entries had expired: the timeout is %s s", reply, f.window(), short[len(short)-1].Value)
	v.Evidence = append(short, Evidence{"datagrams without an entry (NO_SOCKET, or dropped by a rule) from destinations of flows here", strconv.FormatUint(late, 10) + cameInBy(rows), fromTracer})
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	v.Why = "When the entry of a translated flow has expired, packets from outside are for this machine itself, which has no socket for them. RFC 4787 requires at least two minutes; calls, tunnels and games may send only every 20 to 30 s."
	v.Remedy = append(v.Remedy, "# if they were shortened because the table was full, raise its limit instead")
	v.Verify = f.look(f.run("sysctl " + v.Settings[0].Name))
	return v
}

// mostOfWhatComes says whether n packets of rows are most of what came in by their first interface.
func (f facts) mostOfWhatComes(rows []snapshot.Drop, n uint64) bool {
	l, ok := f.link(rows[0].Interface)
	return ok && l.RxPackets < implausible && share(n, l.RxPackets) >= silentHost
}

// lateDatagrams are those that came in for an address of this machine and found no socket, or were
// dropped by a rule, and are from where flows here go to, or went to.
func (f facts) lateDatagrams() (n uint64, rows []snapshot.Drop) {
	for _, row := range f.Drops.Rows {
		ruled := row.Cause == snapshot.CauseRule && !row.Benign
		if row.Reason != "NO_SOCKET" && !ruled || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		if f.lateReplies(row, ruled) {
			n = saturate(n, row.Count)
			rows = append(rows, row)
		}
	}
	return n, rows
}

// lateReplies says whether datagrams of a row are replies to flows of which the entry is gone: they come from
// where flows of the table go to, or where datagrams were seen to leave for. Of a time-out of
// seconds the table shows the fewest.
func (f facts) lateReplies(row snapshot.Drop, ruled bool) bool {
	return slices.ContainsFunc(row.Samples, func(sample string) bool {
		packet, ok := parseSample(sample)
		if !ok || packet.protocol != "udp" || strings.Contains(sample, "(flow ") || !ruled && !f.own(packet.dest.Addr()) || f.own(packet.source.Addr()) || f.manifold(packet.dest.Addr()) {
			return false
		}
		return f.asked(packet.source)
	})
}

// asked says whether flows here go to an address and port by UDP.
func (f facts) asked(service netip.AddrPort) bool {
	t := f.Conntrack.Table
	if slices.ContainsFunc(t.Unanswered, func(u snapshot.UnansweredUse) bool {
		return u.Protocol == "udp" && u.SNAT && u.Dest.AddrPort == service
	}) ||
		slices.ContainsFunc(f.Leaving, func(l snapshot.Leaving) bool { return slices.Contains(l.Datagrams, snapshot.EndpointOf(service)) }) {
		return true
	}
	return slices.ContainsFunc(t.Destinations, func(d snapshot.Talker) bool { return d.Addr == service.Addr() }) &&
		slices.ContainsFunc(t.DestPorts, func(p snapshot.PortUse) bool { return p.Protocol == "udp" && p.Port == service.Port() })
}

// swallowed are segments in the middle of connections of clients here that have no entry any
// more, which rules dropped. Where one direction never comes by here, that is why.
func (f facts) swallowed() (n uint64, rows []snapshot.Drop) {
	if judgeAsymmetric(f) != nil {
		return 0, nil
	}
	_, dropped, _ := f.dropped(snapshot.CauseRule)
	for _, row := range dropped {
		in, _ := f.link(row.Interface)
		if _, ours := f.sentByClients(row, in); ours && !slices.ContainsFunc(row.Samples, func(s string) bool { return !midStream(s) || strings.Contains(s, "(flow ") }) {
			n = saturate(n, row.Count)
			rows = append(rows, row)
		}
	}
	return n, rows
}

func judgeTCPShort(f facts) *verdict {
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
	swallowed, swallowers := f.swallowed()
	v := &verdict{impact: float64(max(resets, swallowed))}
	switch {
	case resets >= resetFew && f.ofEnded(resets) >= resetOfEnded, swallowed >= resetFew:
		v.Severity = Critical
	case resets >= fewFailures, swallowed >= fewFailures:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Title = fmt.Sprintf("idle connections expire after %d s", now)
	switch {
	case v.Severity > Advice && swallowed > resets:
		v.Title += fmt.Sprintf(": rules dropped %s %s", number(swallowed, "packet"), f.window())
	case v.Severity > Advice:
		v.Title += fmt.Sprintf(": %s caused resets %s", number(resets, "packet"), f.window())
	}
	v.Evidence = []Evidence{{s.Name, strconv.FormatInt(now, 10), fromSettings}}
	if strays > 0 {
		v.Evidence = append(v.Evidence, Evidence{"segments for which no socket was found (NO_SOCKET)", strconv.FormatUint(strays, 10) + cameInBy(rows), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	}
	if swallowed > 0 {
		v.Evidence = append(v.Evidence, Evidence{"segments of open connections that rules dropped, without an entry", strconv.FormatUint(swallowed, 10) + cameInBy(swallowers), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence(swallowers)...)
	}
	if sent > 0 {
		v.Evidence = append(v.Evidence, Evidence{"resets that this machine sent", strconv.FormatUint(sent, 10), fromSnmp + ": Tcp OutRsts"})
	}
	v.Why = "When the entry of a translated connection has expired, a packet from outside is for this machine itself, which replies with a reset; one from inside is invalid or starts a new connection, which rules with a state match may drop. Programs expect two hours or more: " +
		"keepalive starts after two."
	v.Settings = []snapshot.Setting{s}
	if v.Severity < Warning { // a time-out that hurts nobody was somebody's choice
		v.Settings[0].If = "nobody chose the short timeout on purpose"
	}
	v.Remedy = []string{f.set(s), "# or let the programs that stay connected send keepalives more often (TCP_KEEPIDLE, ServerAliveInterval of ssh)"}
	v.Verify = f.look(f.run("sysctl " + s.Name))
	return v
}
