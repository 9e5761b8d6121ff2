// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/kernel/netns"
	"natkit/internal/ui/report"
)

func newBenchHTTPCommand(e *env) *cobra.Command {
	var o bench.HTTPOptions
	var serverNetns string
	cmd := &cobra.Command{
		Use:   "http [flags] URL",
		Short: "Measure HTTP requests, one connection each, as ab does",
		Long: `Make HTTP requests as ab(1) does, with its flags, and print its figures.

Every request has its own connection unless -k is given. The server closes it
first, as with ab, so the client's ports do not run out; if it does not, natkit
closes it after 200 ms and reports that.

Failed requests are counted under ab's names:
  Connect     no connection: refused, no route, no local port left
  Receive     the connection was reset, or closed before the header was complete
  Length      the body is not as long as the first one, or as announced; such a
              request also counts as complete
  Exceptions  the reply is not HTTP
  Timeouts    nothing happened for -s seconds: the connection was not made, the
              header not complete, or no more of the body came
Without -r the first of Connect, Receive (except for an early close) or Timeouts
ends the run: what was measured so far is printed and the exit code is 1, also
after an interrupt. With -r failed requests leave the exit code 0.

With --rate the load is open: requests start at that rate whether or not earlier
ones have finished, and the time of a request counts from its scheduled start. So
a server that stalls shows in the times of all requests that it delayed.

SYN retransmits and listen overflows are counters of a whole namespace, including
other traffic. Client CPU is the time of natkit's own threads. Ports left are
those of ip_local_port_range without a socket to the target.

Times are exact, percentiles and medians within 0.05 %.`,
		Example: `  natkit bench http -c 100 -n 10000 http://192.0.2.1:8080/
  natkit bench http -c 5000 -n 100000 -r -s 2 http://192.0.2.1:8080/
  natkit bench http --rate 2000 -c 500 -t 10 -o json http://192.0.2.1:8080/
  natkit bench http --netns client --server-netns server -n 1000 http://10.0.0.1/`,
		Args: asUsage(cobra.ExactArgs(1)),
	}
	f := cmd.Flags()
	f.IntVarP(&o.Concurrency, "concurrency", "c", 1, "connections at a time")
	f.IntVarP(&o.Requests, "requests", "n", 0, "requests to make (default 1, with -t 50000)")
	f.VarP((*secondsFlag)(&o.TimeLimit), "time-limit", "t", "stop after so many `seconds`")
	f.VarP((*secondsFlag)(&o.SocketTimeout), "socket-timeout", "s", "`seconds` until a socket times out (default 30)")
	f.BoolVarP(&o.TolerateErrors, "tolerate-errors", "r", false, "continue after socket errors and timeouts")
	f.BoolVarP(&o.KeepAlive, "keep-alive", "k", false, "several requests on a connection")
	f.StringArrayVarP(&o.Headers, "header", "H", nil, "header to send, as `'Name: value'`; replaces natkit's own of that name")
	f.Float64Var(&o.Rate, "rate", 0, "begin so many requests a second, with -c as the most at a time")
	f.IntVar(&o.Workers, "workers", 0, "threads (default one a processor)")
	f.StringVar(&serverNetns, "server-netns", "", "the server's network namespace, to read its listen overflows")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		// To package bench 0 means "not given".
		for _, name := range []string{"concurrency", "requests", "rate", "workers"} {
			if f := f.Lookup(name); f.Changed && f.Value.String() == "0" {
				return usagef("--%s 0: want more", name)
			}
		}
		o.URL = args[0]
		var err error
		if e.netns != "" {
			if o.Netns, err = netns.Open(e.netns); err != nil {
				return err
			}
			defer o.Netns.Close()
		}
		if serverNetns != "" {
			if o.ServerNetns, err = netns.Open(serverNetns); err != nil {
				return err
			}
			defer o.ServerNetns.Close()
		}
		progress := newProgressLine(e)
		o.Progress = func(p bench.HTTPProgress) {
			progress.show("%3.0f s: %d completed, %d failed, %.0f requests/s", p.Elapsed.Seconds(), p.Completed, p.Failed, p.RequestsPerSecond)
		}
		res, runErr := bench.HTTP(cmd.Context(), o)
		progress.clear()
		if runErr = inFlags(runErr); errors.As(runErr, new(usageError)) {
			return runErr
		}
		if res != nil {
			show := report.HTTP
			if *out == "json" {
				show = func(w io.Writer, r *bench.HTTPResult) error { return report.JSON(w, r) }
			}
			if err := show(e.stdout, res); err != nil {
				return err
			}
		}
		return runErr
	}
	return cmd
}
