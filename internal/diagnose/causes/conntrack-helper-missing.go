// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// A client tries its data connection once a file. Of FTP's port 20 one is enough: nothing else comes from there.
var dataFew = many(2, "refused or unanswered data connections")

var helperMissing = Cause{
	Code:     "conntrack-helper-missing",
	Title:    "Data connections of FTP, SIP and similar protocols are refused: their control connection has no helper",
	Headline: "FTP hangs at LIST, SIP has no audio behind NAT: no conntrack helper",
	Search: []string{
		"425 Can't open data connection",
		"227 Entering Passive Mode",
		"nf_conntrack: default automatic helper assignment has been turned off for security reasons",
		"nf_conntrack_ftp",
		"nf_conntrack_helper",
	},
	Severities:    []Severity{Warning},
	Thresholds:    []Threshold{dataFew},
	Explains:      []string{"rule-drop", "forward-policy-drop", "backend-silent", "answers-lost"},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanDrops, snapshot.CanInterfaces},
	Symptom:       "FTP logs in and hangs at the first listing. SIP calls connect without sound. TFTP gets no file. PPTP stops after authentication.",
	Proof:         fmt.Sprintf("A flow with replies is at the port of such a protocol and has no conntrack helper, and at least %.0f packets were dropped (by a rule, or because nobody here listens) that open another flow between the same two hosts: FTP from the server's port 20 (here one packet is enough), or to a high port of the server, TFTP from another port of the server, RTP and GRE.", dataFew.Enter),
	FalsePositive: "Passive FTP from behind source NAT, SIP with STUN or a session border controller, and control connections in TLS (FTPS), which no helper can read: their data connections pass, or need open ports.",
	Cure:          "Add a rule that assigns the helper to these control connections, and rules that accept related connections. For FTPS, open a fixed range of passive ports.",
	judge:         judgeHelperMissing,
}

func judgeHelperMissing(f facts) *verdict {
	if f.Drops == nil || f.Conntrack == nil || f.Conntrack.Table == nil {
		return nil
	}
	for _, c := range f.Conntrack.Table.Controls {
		if c.Helped > 0 || c.Entries == 0 || !c.Source.IsValid() || !c.Dest.IsValid() || !c.Target.IsValid() {
			continue
		}
		at := slices.IndexFunc(snapshot.HelperPorts, func(p snapshot.HelperPort) bool { return p.Protocol == c.Protocol && p.Port == c.Target.Port() })
		if at < 0 {
			continue
		}
		lost, rows := f.dataLost(c)
		if lost == 0 || !f.reaches(lost, dataFew) && !fromFTPData(c, rows) {
			continue
		}
		return f.helperVerdict(c, snapshot.HelperPorts[at], lost, rows)
	}
	return nil
}

func (f facts) helperVerdict(c snapshot.ControlUse, h snapshot.HelperPort, lost uint64, rows []snapshot.Drop) *verdict {
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	what := strings.ToUpper(h.Helper)
	v.Title = fmt.Sprintf("%s of %s between %s and %s lost: no conntrack helper", number(lost, "data packet"), what, c.Source, c.Dest.Addr())
	v.Evidence = []Evidence{
		{"dropped packets of further connections between the two", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer},
		{fmt.Sprintf("%s flows from %s to %s", c.Protocol, c.Source, c.Dest), fmt.Sprintf("%d, with a helper 0", c.Entries), fromDump},
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	v.Why = fmt.Sprintf("%s negotiates addresses and ports of further connections inside the first one. Only a helper reads them there, rewrites translated addresses, and makes connection tracking expect the further connections (RELATED). Newer kernels assign helpers by rules only.", what)
	family := "ip"
	if c.Source.Is6() {
		family = "ip6"
	}
	table := family + " natkit-helpers"
	v.Remedy = []string{"# load the helper if it is a module (not for TLS, which no helper can read):", "modprobe -q " + h.Module + " || true",
		"# a rule that assigns it to the control connections:",
		f.run("nft add table " + table),
		f.run("nft " + quote(fmt.Sprintf(`add ct helper %s %s { type "%s" protocol %s; }`, table, strings.ToLower(h.Helper), h.Helper, c.Protocol))),
		f.run("nft " + quote("add chain "+table+" prerouting { type filter hook prerouting priority filter; }")),
		f.run("nft " + quote(fmt.Sprintf(`add rule %s prerouting %s dport %d ct helper set "%s"`, table, c.Protocol, c.Dest.Port(), strings.ToLower(h.Helper)))),
		"# open connections continue without it; if the rules drop anything, they must accept related connections (ct state established,related)"}
	v.Verify = f.look(f.run("conntrack -L expect"+conntrackFamily(c.Dest.Addr())), f.run(fmt.Sprintf("conntrack -L%s -o extended -p %s --dport %d", conntrackFamily(c.Dest.Addr()), c.Protocol, c.Dest.Port())))
	return v
}

// dataLost is packets that open a further connection between the two ends of a control connection.
func (f facts) dataLost(c snapshot.ControlUse) (n uint64, rows []snapshot.Drop) {
	for _, row := range f.Drops.Rows {
		unwanted := row.Reason == "NO_SOCKET" || row.Reason == "IP_NOPROTO" || row.Cause == snapshot.CauseRule
		if !unwanted || row.Benign || row.Count >= implausible || !f.here(row.Netns) {
			continue
		}
		if data, some := only(row, func(s string) bool {
			packet, ok := parseSample(s)
			return ok && opensData(c, packet, s)
		}); some {
			n = saturate(n, data.Count)
			rows = append(rows, data)
		}
	}
	return n, rows
}

const ftpDataPort = 20

// fromFTPData says whether a server's FTP data connection is among the packets.
func fromFTPData(c snapshot.ControlUse, rows []snapshot.Drop) bool {
	return c.Target.Port() == 21 && slices.ContainsFunc(samples(rows), func(t tuple) bool { return t.source.Port() == ftpDataPort })
}

// opensData says whether a packet opens a further connection of a control connection's.
func opensData(c snapshot.ControlUse, packet tuple, sample string) bool {
	const high = 1024
	source, dest := packet.source.Addr(), packet.dest.Addr()
	toClient := (source == c.Target.Addr() || source == c.Dest.Addr()) && (dest == c.Seen || dest == c.Source)
	toServer := (source == c.Source || source == c.Seen) && (dest == c.Dest.Addr() || dest == c.Target.Addr())
	switch c.Target.Port() {
	case 1723:
		return (toClient || toServer) && (packet.protocol == "gre" || packet.protocol == "protocol 47")
	case 69:
		return packet.protocol == "udp" && toClient && packet.source.Port() != 69
	case 5060:
		return packet.protocol == "udp" && (toClient || toServer) && packet.source.Port() >= high && packet.dest.Port() >= high && !hasPort(packet, 5060)
	case 21:
		return packet.protocol == "tcp" && strings.HasSuffix(strings.TrimSpace(cutFlow(sample)), " SYN") &&
			(toClient && packet.source.Port() == ftpDataPort || (toServer || toClient) && packet.source.Port() >= high && packet.dest.Port() >= high)
	}
	return packet.protocol == "tcp" && (toClient || toServer) && strings.HasSuffix(strings.TrimSpace(cutFlow(sample)), " SYN") &&
		!hasPort(packet, c.Target.Port()) && packet.dest.Port() >= high
}

// cutFlow is a sample without what is said of its entry.
func cutFlow(sample string) string {
	packet, _, _ := strings.Cut(sample, "(flow ")
	return packet
}

func hasPort(t tuple, port uint16) bool {
	return t.source.Port() == port || t.dest.Port() == port
}
