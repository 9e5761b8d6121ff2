// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"natkit/internal/bench"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// HTTP writes the figures of an HTTP load in the shape that ab(1) made
// familiar, followed by what ab does not measure and by notes on what the
// figures must not be blamed on.
func HTTP(w io.Writer, r *bench.HTTPResult) error {
	p := httpPage{HTTPResult: r}
	p.counts()
	if r.Completed > 0 {
		p.times()
	}
	p.circumstances()
	_, err := io.WriteString(w, p.b.String())
	return err
}

// httpPage is the text while it is written.
type httpPage struct {
	*bench.HTTPResult
	b strings.Builder
}

func (p *httpPage) line(label, format string, args ...any) {
	fmt.Fprintf(&p.b, "%-23s %s\n", label+":", fmt.Sprintf(format, args...))
}

// counts is ab's first part: what was asked of whom, and what became of it.
func (p *httpPage) counts() {
	p.line("Server Software", "%s", printable(p.Server))
	p.line("Server Hostname", "%s", p.Host)
	p.line("Server Port", "%d", p.Port)
	p.b.WriteByte('\n')
	p.line("Document Path", "%s", p.Path)
	p.line("Document Length", "%d bytes", p.DocumentBytes)
	p.b.WriteByte('\n')
	p.line("Concurrency Level", "%d", p.Concurrency)
	p.line("Time taken for tests", "%.3f seconds", p.Seconds)
	p.line("Complete requests", "%d", p.Completed)
	p.line("Failed requests", "%d", p.Failed.Sum())
	if f := p.Failed; f.Sum() > 0 {
		fmt.Fprintf(&p.b, "   (Connect: %d, Receive: %d, Length: %d, Exceptions: %d, Timeouts: %d)\n",
			f.Connect, f.Receive, f.Length, f.Exceptions, f.Timeout)
		for _, f := range p.FailureList() {
			fmt.Fprintf(&p.b, "   %8d %s\n", f.Count, f.Text)
		}
	}
	if p.Unfinished > 0 {
		p.line("Unfinished requests", "%d", p.Unfinished)
	}
	if p.Non2xx > 0 {
		p.line("Non-2xx responses", "%d", p.Non2xx)
	}
	if p.KeepAlive {
		p.line("Keep-Alive requests", "%d", p.KeepAliveRequests)
	}
	p.line("Total transferred", "%d bytes", p.TransferredBytes)
	p.line("HTML transferred", "%d bytes", p.HTMLBytes)
	p.line("Requests per second", "%.2f [#/sec] (mean)", p.RequestsPerSecond)
	if p.Completed > 0 {
		p.line("Time per request", "%.3f [ms] (mean)", p.TimePerRequestMS)
		p.line("Time per request", "%.3f [ms] (mean, across all concurrent requests)", p.TimePerRequestAll)
	}
	p.line("Transfer rate", "%.2f [Kbytes/sec] received", p.TransferRate)
}

// times is ab's second part.
func (p *httpPage) times() {
	p.b.WriteString("\nConnection Times (ms)\n")
	p.b.WriteString("                min    mean[+/-sd]   median      max\n")
	for _, row := range []struct {
		label string
		bench.Times
	}{{"Connect", p.Connect}, {"Processing", p.Processing}, {"Waiting", p.Waiting}, {"Total", p.Total}} {
		fmt.Fprintf(&p.b, "%-11s %7.1f %7.1f %6.1f %8.1f %8.1f\n", row.label+":", row.Min, row.Mean, row.SD, row.Median, row.Max)
	}
	p.b.WriteString("\nPercentage of the requests served within a certain time (ms)\n")
	for _, percent := range bench.Percentages {
		fmt.Fprintf(&p.b, " %3d%%  %8.1f", percent, p.Percentiles[strconv.Itoa(percent)])
		if percent == 100 {
			p.b.WriteString(" (longest request)")
		}
		p.b.WriteByte('\n')
	}
}

// circumstances is what ab does not measure.
func (p *httpPage) circumstances() {
	p.b.WriteByte('\n')
	if p.Rate != nil {
		p.line("Rate", "%.2f [#/sec] offered, %.2f started, %d late by more than 1 ms", p.Rate.Requested, p.Rate.Achieved, p.Rate.LateStarts)
	}
	p.line("SYN retransmits", "%d", p.TCP.SYNRetransmits)
	p.line("Listen overflows", "%d (seen at the %s)", p.TCP.ListenOverflows, p.TCP.ListenOverflowsAt)
	p.line("Client CPU", "%s of %s", percent.Of(p.ClientCPUShare, 0), plural.Count(p.Workers, "core"))
	p.line("Ports left", "%d of %d to %s", p.PortsLeft, p.PortsRange, p.Endpoint)
	for _, note := range httpNotes(p.HTTPResult) {
		p.b.WriteString("\nNote: " + note + "\n")
	}
}

// httpNotes says what in the figures is not the doing of the way between client
// and server.
func httpNotes(r *bench.HTTPResult) []string {
	var notes []string
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if r.TCP.ListenOverflows > 0 {
		note("the server's accept queue overflowed: connections waited for a SYN to be retransmitted.\n" +
			"      Give the server a larger backlog (and net.core.somaxconn) before you blame the path to it.")
	}
	if r.ClientCPUShare > 0.9 {
		note("the client used all of its CPU time: a faster client might reach more.")
	}
	if r.LeftOpen > 0 {
		note("%d times the client closed the connection because the server did not:\n"+
			"      each such connection keeps a local port for a minute.", r.LeftOpen)
	}
	if r.PortsLeft < r.Concurrency {
		note("fewer local ports are left than concurrent connections: the next run will fail to connect.\n" +
			"      Widen net.ipv4.ip_local_port_range or wait a minute.")
	}
	return notes
}

// printable keeps what a server says of itself from steering the terminal.
func printable(s string) string {
	return strings.Map(func(c rune) rune {
		if strconv.IsPrint(c) {
			return c
		}
		return '?'
	}, s)
}
