// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A connection that has ended gets a late packet now and then, which is answered
	// by a reset and nobody notices. At fault is what resets many, beside the
	// connections that end: those in TIME_WAIT tell how many that are.
	resetFew      = 10
	resetOfEnded  = 0.10
	resetCritical = 0.50
	resetOfAll    = 0.001 // of all packets received, where no dump tells of the ended
)

var conntrackInvalidReset = Cause{
	Code:     "conntrack-invalid-reset",
	Title:    "Connections through NAT are reset because of segments that conntrack marks invalid",
	Headline: "Connection reset by peer at random through NAT: conntrack marks segments INVALID",
	Search: []string{
		"Connection reset by peer",
		"conntrack -S: invalid",
		"nf_conntrack_tcp_be_liberal",
		"ctstate INVALID",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanConntrackStats, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanConntrackDump, snapshot.CanSysctls},
	Symptom:       `Long transfers break with "Connection reset by peer", at random, on fast or lossy paths. Short ones work.`,
	Proof:         fmt.Sprintf("Connection tracking marked segments invalid (invalid of /proc/net/stat/nf_conntrack) and this machine, whose rules translate sources, sent resets (Tcp.OutRsts): at least %d of both, and %s of the connections that ended during the window; from %s it is critical. The tracer saw segments with only ACK that reached this machine and found no socket. If it saw only others, such as those of a scan, natkit does not report it. If destinations are translated and no reset leaves here, the same number of invalid packets is advice: the client resets, and this machine does not see why.", resetFew, percent.Whole(resetOfEnded), percent.Whole(resetCritical)),
	FalsePositive: "Late FINs of closed connections, and scans with odd flags, which are also invalid and cause a reset. With nf_conntrack_tcp_be_liberal=1 windows are not checked. With br_netfilter and engine ebpf conntrack sees the replies of containers in the bridge's ports, and never the packets that they reply to.",
	Cure:          "Set nf_conntrack_tcp_be_liberal=1: segments outside their window stay in their connection, and its endpoints decide. Or drop invalid packets before they reach this machine's stack; the segment is then lost and retransmitted. One report describes a table that filled up with be_liberal, because resets no longer ended connections: watch the table.",
	judge:         judgeInvalidReset,
}

func judgeInvalidReset(f facts) *verdict {
	invalid, known := f.stat("invalid")
	liberal := f.local("net.netfilter.nf_conntrack_tcp_be_liberal", 1)
	if n, _ := f.sysctl(liberal.Name); !known || n == 1 {
		return nil
	}
	sent, sentKnown := f.counter("Tcp.OutRsts")
	resets := min(invalid, sent)
	strays, rows := f.strays()
	if !sentKnown || resets < resetFew || f.Chains != nil && !f.translatesSources() || f.Drops != nil && strays == 0 {
		return f.judgeInvalidForwarded(invalid, liberal)
	}
	v := &verdict{impact: float64(resets)}
	switch part := f.ofEnded(resets); {
	case part < resetOfEnded:
		v.Severity = Advice
	case part >= resetCritical && strays > 0:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s likely reset %s: conntrack marked their segments invalid", number(resets, "connection"), f.window())
	v.Evidence = []Evidence{
		{"invalid packets (the resets are among them)", strconv.FormatUint(invalid, 10), fromStats + ": invalid"},
		{"resets that this machine sent", strconv.FormatUint(sent, 10), fromSnmp + ": Tcp OutRsts"},
	}
	if strays > 0 {
		v.Evidence = append(v.Evidence, Evidence{"segments for which no socket was found (NO_SOCKET)", strconv.FormatUint(strays, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	if ended, ok := f.ended(); ok {
		v.Evidence = append(v.Evidence, Evidence{"connections that end", fmt.Sprintf("%.1f a second", ended), fromDump + ": TIME_WAIT entries and their timeout"})
	}
	v.Evidence = append(v.Evidence, Evidence{liberal.Name, "0", fromSettings})
	v.Why = "A segment that is outside the window which connection tracking computed, or whose entry is gone, is not translated back. It stays addressed to this machine, where no socket matches, and the kernel replies with a reset, " +
		"which ends the connection at the sender. Entries are gone after conntrack -F, after a restart that clears the table, or when they expired."
	v.Remedy = append(f.entryOf(rows), "# let the endpoints check the window:", f.set(liberal))
	v.Remedy = append(v.Remedy, f.dropInvalid("input")...)
	v.Settings = []snapshot.Setting{liberal}
	if v.Severity < Warning { // late packets of a busy gateway are no reason
		v.Settings[0].If = openConnections
	}
	v.Verify = f.look(f.run("conntrack -S"), f.run("nstat -az TcpOutRsts"))
	return v
}

// entryOf is how to tell segments outside their window from segments of no entry.
func (f facts) entryOf(rows []snapshot.Drop) []string {
	seen := samples(rows)
	if len(seen) == 0 {
		return nil
	}
	t := seen[0]
	return []string{fmt.Sprintf("# is there an entry for the segment %s -> %s? If not, it expired or was deleted: check the timeouts, or find what deletes entries. (Resets right after conntrack -F stop by themselves.)", t.source, t.dest),
		f.run(fmt.Sprintf("conntrack -L%s -p tcp --reply-src %s --reply-port-dst %d", conntrackFamily(t.source.Addr()), t.source.Addr(), t.dest.Port()))}
}

// judgeInvalidForwarded is for destinations that are translated: there an invalid
// answer goes on to the client with the server's own address, and the client
// resets it. This machine sees no more of it than the number of invalid packets.
func (f facts) judgeInvalidForwarded(invalid uint64, liberal snapshot.Setting) *verdict {
	ended, known := f.ended()
	if frames, _ := f.sysctl("net.bridge.bridge-nf-call-iptables"); frames == 1 && f.Engine.Tracks() {
		return nil // conntrack sees one direction of the engine's connections, in the bridge's ports
	}
	if !known || !f.translatesDestinations() || invalid < resetFew || f.perSecond(invalid) < max(1, resetOfEnded*ended) {
		return nil
	}
	v := &verdict{}
	v.Severity = Advice
	v.Title = fmt.Sprintf("%s %s, which conntrack does not translate", number(invalid, "invalid packet"), f.window())
	v.Evidence = []Evidence{
		{"invalid packets", strconv.FormatUint(invalid, 10), fromStats + ": invalid"},
		{"connections that end", fmt.Sprintf("%.1f a second", ended), fromDump + ": TIME_WAIT entries and their timeout"},
		{liberal.Name, "0", fromSettings},
	}
	v.Why = "The kernel counts these packets and does not record what they were. If replies of published services are among them, they reach the client with the server's own address, and the client, which has no such connection, sends a reset."
	log := f.local("net.netfilter.nf_conntrack_log_invalid", 6)
	v.Settings = []snapshot.Setting{
		provided(log, "the kernel may log a line for each invalid packet until this is rolled back"),
		provided(liberal, openConnections),
	}
	v.Remedy = []string{
		"# see which packets they are, in the kernel's log (6 is TCP; 0 switches it off again):",
		f.set(log),
		"# if they belong to open connections, let the endpoints check the window:", f.set(liberal),
	}
	v.Remedy = append(v.Remedy, f.dropInvalid("forward")...)
	v.Verify = f.look(f.run("conntrack -S"))
	return v
}

// openConnections is what makes a liberal window the cure.
const openConnections = "a capture or the kernel log shows that these packets belong to open connections"

// dropInvalid is the other way: what is invalid goes no further than a hook.
func (f facts) dropInvalid(hook string) []string {
	return []string{
		"# or drop such segments before the stack replies; they are then retransmitted:",
		f.run("nft add table inet natkit-invalid"),
		f.run("nft " + quote("add chain inet natkit-invalid "+hook+" { type filter hook "+hook+" priority filter; }")),
		f.run("nft " + quote("add rule inet natkit-invalid "+hook+" ct state invalid drop")),
	}
}

// strays are dropped segments in the middle of a connection, with no more than
// ACK and PSH set, that reached this machine's own stack and found no socket.
func (f facts) strays() (n uint64, out []snapshot.Drop) {
	if f.Drops == nil {
		return 0, nil
	}
	for _, row := range f.Drops.Rows {
		if row.Reason != "NO_SOCKET" || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		if open, some := only(row, midStream); some {
			n = saturate(n, open.Count)
			out = append(out, open)
		}
	}
	return n, out
}

// midStream says whether a sampled packet is a segment of a connection that both
// ends take for open.
func midStream(sample string) bool {
	fields := strings.Fields(sample)
	if len(fields) < 5 || fields[0] != "tcp" {
		return false
	}
	return fields[4] == "ACK" || fields[4] == "PSH,ACK"
}

// ended is how many connections end in a second: each is in TIME_WAIT for its
// time-out.
func (f facts) ended() (perSecond float64, known bool) {
	timeout, ok := f.sysctl("net.netfilter.nf_conntrack_tcp_timeout_time_wait")
	if !ok || timeout <= 0 || f.Conntrack == nil || f.Conntrack.Table == nil {
		return 0, false
	}
	return float64(f.Conntrack.Table.ByState["TIME_WAIT"]) / float64(timeout), true
}

// ofEnded is what share of the connections that ended in the window n is, at most
// 1; without a dump n is held against all packets.
func (f facts) ofEnded(n uint64) float64 {
	if ended, known := f.ended(); known {
		return min(1, f.perSecond(n)/max(ended, 1))
	}
	received, known := f.counter("Ip.InReceives")
	if !known || share(n, received) >= resetOfAll {
		return resetOfEnded
	}
	return 0
}
