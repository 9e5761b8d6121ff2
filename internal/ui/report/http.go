// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"natkit/internal/bench"
	"natkit/internal/words/plural"
)

// HTTP writes the figures of an HTTP load in the shape that ab(1) made
// familiar, followed by what ab does not measure and by notes on what the
// figures must not be blamed on.
func HTTP(w io.Writer, r *bench.HTTPResult) error {
	var b strings.Builder
	line := func(label, format string, args ...any) {
		fmt.Fprintf(&b, "%-23s %s\n", label+":", fmt.Sprintf(format, args...))
	}
	line("Server Software", "%s", printable(r.Server))
	line("Server Hostname", "%s", r.Host)
	line("Server Port", "%d", r.Port)
	b.WriteByte('\n')
	line("Document Path", "%s", r.Path)
	line("Document Length", "%d bytes", r.DocumentBytes)
	b.WriteByte('\n')
	line("Concurrency Level", "%d", r.Concurrency)
	line("Time taken for tests", "%.3f seconds", r.Seconds)
	line("Complete requests", "%d", r.Completed)
	line("Failed requests", "%d", r.Failed.Sum())
	if f := r.Failed; f.Sum() > 0 {
		fmt.Fprintf(&b, "   (Connect: %d, Receive: %d, Length: %d, Exceptions: %d, Timeouts: %d)\n",
			f.Connect, f.Receive, f.Length, f.Exceptions, f.Timeout)
		for _, f := range r.FailureList() {
			fmt.Fprintf(&b, "   %8d %s\n", f.Count, f.Text)
		}
	}
	if r.Unfinished > 0 {
		line("Unfinished requests", "%d", r.Unfinished)
	}
	if r.Non2xx > 0 {
		line("Non-2xx responses", "%d", r.Non2xx)
	}
	if r.KeepAlive {
		line("Keep-Alive requests", "%d", r.KeepAliveRequests)
	}
	line("Total transferred", "%d bytes", r.TransferredBytes)
	line("HTML transferred", "%d bytes", r.HTMLBytes)
	line("Requests per second", "%.2f [#/sec] (mean)", r.RequestsPerSecond)
	if r.Completed > 0 {
		line("Time per request", "%.3f [ms] (mean)", r.TimePerRequestMS)
		line("Time per request", "%.3f [ms] (mean, across all concurrent requests)", r.TimePerRequestAll)
	}
	line("Transfer rate", "%.2f [Kbytes/sec] received", r.TransferRate)

	if r.Completed > 0 {
		b.WriteString("\nConnection Times (ms)\n")
		b.WriteString("                min    mean[+/-sd]   median      max\n")
		for _, row := range []struct {
			label string
			bench.Times
		}{{"Connect", r.Connect}, {"Processing", r.Processing}, {"Waiting", r.Waiting}, {"Total", r.Total}} {
			fmt.Fprintf(&b, "%-11s %7.1f %7.1f %6.1f %8.1f %8.1f\n", row.label+":", row.Min, row.Mean, row.SD, row.Median, row.Max)
		}
		b.WriteString("\nPercentage of the requests served within a certain time (ms)\n")
		for _, p := range bench.Percentages {
			fmt.Fprintf(&b, " %3d%%  %8.1f", p, r.Percentiles[strconv.Itoa(p)])
			if p == 100 {
				b.WriteString(" (longest request)")
			}
			b.WriteByte('\n')
		}
	}

	b.WriteByte('\n')
	if r.Rate != nil {
		line("Rate", "%.2f [#/sec] offered, %.2f started, %d late by more than 1 ms", r.Rate.Requested, r.Rate.Achieved, r.Rate.LateStarts)
	}
	line("SYN retransmits", "%d", r.TCP.SYNRetransmits)
	line("Listen overflows", "%d (seen at the %s)", r.TCP.ListenOverflows, r.TCP.ListenOverflowsAt)
	line("Client CPU", "%.0f%% of %s", 100*r.ClientCPUShare, plural.Count(r.Workers, "core"))
	line("Ports left", "%d of %d to %s", r.PortsLeft, r.PortsRange, r.Endpoint)
	for _, note := range httpNotes(r) {
		b.WriteString("\nNote: " + note + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
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
