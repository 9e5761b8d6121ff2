// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	checksumFew   = 10
	checksumShare = 0.001 // of all packets received: a warning
	checksumMost  = 0.01  // critical
)

var checksumErrors = Cause{
	Code:     "checksum-errors",
	Title:    "Packets arrive with wrong checksums",
	Headline: "Connections through a tunnel or VM never open: bad checksums (InCsumErrors)",
	Search: []string{
		"nstat TcpInCsumErrors",
		"nstat UdpInCsumErrors",
		"tcpdump: cksum incorrect",
		"bad udp cksum",
		"reason: TCP_CSUM",
		"reason: UDP_CSUM",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(checksumFew, "packets with a wrong checksum"), portion(checksumShare, "of all received")},
	Needs:         []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanConntrackStats},
	Symptom:       "Connections through a tunnel or between virtual machines open late or never, while pings work. A capture at the receiver shows packets that get no reply.",
	Proof:         fmt.Sprintf("Packets were dropped because of their checksum (InCsumErrors of Ip, Tcp, Udp or Icmp; TCP_CSUM and similar), at least %s of those received: a warning, from %s critical. The receiver drops them. A router on the path forwards them: its connection tracking marks them invalid, so they are not translated and keep their internal source (Linux 6.18: of 50 such datagrams through a masquerading gateway all 50 left untranslated, counted as invalid and never as checksum errors). Run the doctor on the receiver.", "0.1 %", percent.Whole(checksumMost)),
	FalsePositive: "A capture of what this machine sends shows wrong checksums, since the network card fills them in. A few broken packets from far away.",
	Cure:          "Let the sender's CPU compute the checksums instead of its (virtual) card: `ethtool -K DEV tx off` there; for VXLAN, tx-checksum-ip-generic off on the tunnel. If a card rejects good checksums: `ethtool -K DEV rx off` here. If the interface's errors rise too, check cables and switches.",
	judge:         judgeChecksum,
}

func judgeChecksum(f facts) *verdict {
	traced, rows, _ := f.dropped(snapshot.CauseChecksum)
	var counted uint64
	var counts []Evidence
	for _, c := range []struct{ counter, source string }{
		{"IpExt.InCsumErrors", fromNetstat + ": IpExt InCsumErrors"}, {"Tcp.InCsumErrors", fromSnmp + ": Tcp InCsumErrors"},
		{"Udp.InCsumErrors", fromSnmp + ": Udp InCsumErrors"}, {"UdpLite.InCsumErrors", fromSnmp + ": UdpLite InCsumErrors"},
		{"Icmp.InCsumErrors", fromSnmp + ": Icmp InCsumErrors"},
	} {
		if n, _ := f.counter(c.counter); n > 0 {
			counted = saturate(counted, n)
			counts = append(counts, Evidence{"packets with a wrong checksum", strconv.FormatUint(n, 10), c.source})
		}
	}
	lost := max(traced, counted)
	if lost < f.few(checksumFew) {
		return nil
	}
	received, known := f.counter("Ip.InReceives")
	part := share(lost, received)
	v := &verdict{impact: float64(lost)}
	switch {
	case known && part < f.part(checksumShare):
		v.Severity = Advice
	case known && part >= checksumMost:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s dropped because of a wrong checksum %s", number(lost, "packet"), f.window())
	v.Evidence = counts
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped for their checksum", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	if invalid, _ := f.stat("invalid"); invalid > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets that connection tracking marked invalid", strconv.FormatUint(invalid, 10), fromStats})
	}
	names := devices(rows)
	for _, name := range names {
		if l, ok := f.link(name); ok {
			v.Evidence = append(v.Evidence, Evidence{"errors of " + name, strconv.FormatUint(l.RxErrors, 10), fromLinks})
		}
	}
	v.Why = "The receiver drops such a packet silently, and the sender retransmits it with the same error. Packets are rarely damaged on the path: usually the checksum was left to a card, real or virtual, that did not compute it."
	if len(names) == 0 {
		v.Remedy = append(v.Remedy, "# see on which interface they arrive, and from where:", f.natkit("drops --for 10s"))
	}
	for _, name := range names {
		v.Remedy = append(v.Remedy, fmt.Sprintf("# on the sender (see the packets from %s): let the CPU compute the checksums (DEV is its device; for VXLAN the tunnel's, with tx-checksum-ip-generic off):", name),
			"# ethtool -K DEV tx off")
		if l, ok := f.link(name); ok && !slices.Contains([]string{"veth", "bridge", "tun", "vxlan"}, l.Kind) {
			v.Settings = append(v.Settings, provided(f.device(name, "rx_checksum", "0"), "a capture on "+name+" shows right checksums"))
			v.Remedy = append(v.Remedy, "# if a capture on "+name+" shows right checksums, its card judges wrongly:", f.run("ethtool -K "+quote(name)+" rx off"))
		}
		v.Remedy = append(v.Remedy, "# a capture shows which checksums are wrong:", f.run("tcpdump -c 20 -vvni "+quote(name)+" inbound"))
	}
	v.Verify = f.look(f.run("nstat -az IpExtInCsumErrors TcpInCsumErrors UdpInCsumErrors IcmpInCsumErrors"))
	return v
}
