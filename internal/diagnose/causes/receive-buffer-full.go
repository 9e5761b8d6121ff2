// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A datagram lost in a burst is sent again. From one in a hundred on clients wait.
	bufferFew   = 10
	bufferShare = 0.01 // of the datagrams for programs here: a warning
	bufferMany  = 0.10 // critical
)

var receiveBufferFull = Cause{
	Code:     "receive-buffer-full",
	Title:    "A program does not read its datagrams as fast as they arrive",
	Headline: "UDP packet receive errors: RcvbufErrors rising",
	Search: []string{
		"receive buffer errors",
		"packet receive errors",
		"nstat UdpRcvbufErrors",
		"net.core.rmem_max",
		"reason: SOCKET_RCVBUFF",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Thresholds: []Threshold{many(bufferFew, "datagrams dropped because of a full buffer"), portion(bufferShare, "of the datagrams for programs here")},
	Needs:      []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces},
	Symptom:    "A DNS forwarder, VPN or proxy on this machine loses requests under load, or all of them. It looks like packet loss in NAT but is not.",
	Proof: fmt.Sprintf("UDP datagrams found their socket's buffer full (Udp.RcvbufErrors, SOCKET_RCVBUFF): at least %d are advice, from %s of all datagrams for programs here a warning, from %s critical.",
		bufferFew, percent.Whole(bufferShare), percent.Whole(bufferMany)),
	FalsePositive: "A few in a burst beside much traffic. Datagrams that find no socket have other causes.",
	Cure:          "Let the program read faster, or start it: it may be stopped. For bursts, use a longer buffer: the program's own (SO_RCVBUF), which net.core.rmem_max limits, or net.core.rmem_default.",
	judge:         judgeReceiveBuffer,
}

func judgeReceiveBuffer(f facts) *verdict {
	lost, known := f.counter("Udp.RcvbufErrors")
	six, _ := f.counter("Udp6.RcvbufErrors")
	lost = saturate(lost, six)
	var traced uint64
	var rows []snapshot.Drop
	if f.Drops != nil {
		for _, row := range f.Drops.Rows {
			if row.Reason == "SOCKET_RCVBUFF" && row.Count < implausible && f.here(row.Netns) && len(udpOf(row)) > 0 {
				traced = saturate(traced, row.Count)
				rows = append(rows, row)
			}
		}
	}
	if !known {
		lost = traced
	}
	if lost < f.few(bufferFew) {
		return nil
	}
	taken, _ := f.counter("Udp.InDatagrams")
	part := share(lost, saturate(lost, taken))
	v := &verdict{impact: float64(lost)}
	switch {
	case part < f.part(bufferShare):
		v.Severity = Advice
	case part >= bufferMany:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s dropped %s: the program's receive buffer is full", number(lost, "UDP datagram"), f.window())
	v.Evidence = []Evidence{{"datagrams dropped because a buffer was full", strconv.FormatUint(lost, 10), fromSnmp + ": Udp RcvbufErrors"},
		{"datagrams delivered to programs here", strconv.FormatUint(taken, 10), fromSnmp + ": Udp InDatagrams"}}
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped because of it", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	}
	v.Why = "The kernel keeps datagrams for a program until it reads them, as many as the socket's buffer holds. More are dropped silently. NAT is not the cause, although it looks like it."
	show := "ss -lunpm"
	if len(rows) > 0 {
		dest := udpOf(rows[0])[0]
		v.Title += fmt.Sprintf(" (port %d first)", dest.Port())
		show += fmt.Sprintf(" 'sport = :%d'", dest.Port())
	}
	v.Remedy = []string{"# which program is it, and does it read? If Recv-Q stays full, the program is too slow or has stopped, and no buffer is long enough:", f.run(show)}
	v.Remedy = append(v.Remedy, "# for bursts: raise the program's own buffer (SO_RCVBUF, some MiB) and net.core.rmem_max, which limits it, to the same size; then restart it:", "sysctl net.core.rmem_max")
	v.Verify = f.look(f.run("nstat -az UdpRcvbufErrors"))
	return v
}

// udpOf is where a row's UDP packets were to go.
func udpOf(row snapshot.Drop) (out []netip.AddrPort) {
	for _, t := range samples([]snapshot.Drop{row}) {
		if t.protocol == "udp" {
			out = append(out, t.dest)
		}
	}
	return out
}
