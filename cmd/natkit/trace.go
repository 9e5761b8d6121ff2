// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
)

func newTraceCommand(e *env) *cobra.Command {
	var host, device, name string
	var port uint16
	var total time.Duration
	var packets, rate uint32
	var dropsOnly, now bool
	cmd := &cobra.Command{
		Use:   "trace [FLOW]",
		Short: "Follow a connection through namespaces, hooks and NAT",
		Long: `Follow the packets of connections, in both directions, through every network
namespace of this machine: where each packet is received, what connection tracking
and the rules do to it, which route it takes, and where it leaves or is dropped, and
why.

FLOW is [PROTOCOL] SOURCE[:PORT] -> DESTINATION[:PORT], as the connection looks
anywhere on this machine; either side may be any. A connection is found by its first
packet that matches and followed from there on, also behind translations. --host and
--port match either end, --container is a container or pod by name: its address is
followed.

With --netns and --interface the matching packet must be seen there.

It needs root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN. What this kernel does not
allow to see is listed. What natkit's own programs do is read from their maps. Packets
that another program forwards at XDP never reach the stack and are not seen. Packets
that match beyond --rate are counted and not traced.

Until a packet matches, the trace costs the packets of established connections nothing:
natkit waits for a new connection in the namespaces that have NAT or track connections,
and for a dropped packet anywhere. It attaches its programs when one matches, and
detaches them when nothing was seen for 30 s. Of the first packet only the rules from
priority -101 on and the conntrack entry are shown then, or where it was dropped. With
--now all of it is attached at the start: the first packet is seen completely, and
connections that nothing tracks are seen; every packet of this machine takes some 20 %
more processor time.

A conntrack entry of a followed connection that ends before its time is shown too:
evicted from a full table, or deleted. natkit asks for the entries twice a second.

With -o json each packet is an object in a line of its own, then one with the totals.
-o html is one page with a sequence drawing per packet, -o pcapng a capture for
Wireshark, in which each frame has its step as comment.`,
		Example: `  natkit trace 'tcp 10.0.0.5 -> 198.51.100.1:443'
  natkit trace --host 192.168.0.2 --port 8080 --packets 20
  natkit trace --container web1 --drops-only
  natkit trace 'udp any -> any:53' --drops-only --for 1m
  natkit trace 'icmp 10.0.0.5 -> any' --netns gateway --interface eth1 -o json
  natkit trace 'tcp any -> 10.0.0.5:443' --now --packets 1
  natkit trace --port 53 --for 10s -o pcapng > trace.pcapng`,
		Args: asUsage(cobra.MaximumNArgs(1)),
	}
	f := cmd.Flags()
	f.StringVar(&host, "host", "", "connections of this `ADDRESS` or prefix, at either end")
	f.StringVar(&name, "container", "", "connections of the container or pod of this `NAME`, at either end")
	f.Uint16Var(&port, "port", 0, "connections of this port `NUMBER`, at either end")
	f.StringVar(&device, "interface", "", "the matching packet is seen on this `NAME` of an interface")
	f.BoolVar(&dropsOnly, "drops-only", false, "show only packets that are dropped")
	f.BoolVar(&now, "now", false, "see all of the first packet: every packet of this machine takes more processor time")
	f.Uint32Var(&packets, "packets", 0, "end after this `NUMBER` of packets (default until interrupted)")
	f.Uint32Var(&rate, "rate", 100, "trace at most this `NUMBER` of packets per second")
	timeVar(f, &total, "for", 0, "how long to trace (default until interrupted)")
	out := outputFlag(cmd, "text", "json", "html", "pcapng")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o := follow.Options{Port: port, Rate: rate, Wait: !now, Programs: packetPrograms}
		var err error
		if len(args) > 0 {
			if o.Flow, err = trace.ParseFlow(args[0]); err != nil {
				return usagef("%w", err)
			}
		}
		prefix, err := hostOrPrefix("host", host)
		switch {
		case err != nil:
			return err
		case total < 0:
			return usagef("--for %v: want a time, or nothing to trace until interrupted", total)
		case rate == 0:
			return usagef("--rate 0: want 1 or more")
		case port == 0 && cmd.Flags().Changed("port"):
			return usagef("--port 0: want 1 to 65535")
		case host != "" && name != "":
			return usagef("--host and --container: give one of them")
		case name != "" && o.Flow.A.Addresses.IsValid():
			return usagef("--container %s: the flow names its addresses already", name)
		case prefix.IsValid() && o.Flow.A.Addresses.IsValid():
			return usagef("--host %s: the flow names its addresses already", host)
		case len(args) == 0 && host == "" && name == "" && port == 0 && device == "":
			return usagef("what to trace? Give a flow, as in natkit trace 'tcp 10.0.0.5 -> 198.51.100.1:443', or --host, --container, --port or --interface")
		}
		if name != "" {
			if prefix, err = containerAddress(name, o.Flow.B.Addresses); err != nil {
				return err
			}
		}
		if prefix.IsValid() {
			o.Flow.A.Addresses = prefix
		}
		if err := o.Flow.Check(port); err != nil {
			return usagef("no packet can match: %w", err)
		}
		if err := traceAt(&o, e.netns, device); err != nil {
			return err
		}
		var shown presenter
		o.Ended = func(end trace.EntryEnd) error { return shown.ended(end) }
		run, err := follow.Open(o)
		if err != nil {
			return err
		}
		defer run.Close()
		ctx := cmd.Context()
		if total > 0 {
			var stop context.CancelFunc
			ctx, stop = context.WithTimeout(ctx, total)
			defer stop()
		}
		if shown, err = e.tracePresenter(*out); err != nil {
			return err
		}
		return e.trace(ctx, run, shown, dropsOnly, packets)
	}
	return cmd
}

// packetPrograms opens natkit's own programs of a namespace.
func packetPrograms(ref string) (follow.Program, error) {
	r, err := control.OpenPacketReader(ref)
	if r == nil {
		return nil, err // not a nil of another type
	}
	return r, err
}

// errEnough ends a trace after its number of packets.
var errEnough = errors.New("enough packets")

// trace shows packets until ctx ends or there were enough.
func (e *env) trace(ctx context.Context, run *follow.Run, p presenter, dropsOnly bool, packets uint32) error {
	summary, err := run.Summary()
	if err != nil {
		return err
	}
	fmt.Fprint(e.stderr, report.TraceMissing(summary.Missing, terminalWidth(e.stderr)))
	known := summary.Missing
	if run.Waiting() {
		fmt.Fprintln(e.stderr, "waiting for a new connection or a drop (--now sees every packet); Ctrl-C ends it")
	} else {
		fmt.Fprintln(e.stderr, "tracing; Ctrl-C ends it")
	}
	shown := uint32(0)
	err = run.Watch(ctx, func(packet trace.Packet) error {
		if dropsOnly && packet.End.Outcome != trace.Died {
			return nil
		}
		if err := p.packet(packet); err != nil {
			return err
		}
		if shown++; shown == packets {
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return unlessPipeClosed(err)
	}
	if summary, err = run.Summary(); err != nil {
		return err
	}
	later := slices.DeleteFunc(slices.Clone(summary.Missing), func(m observe.Missing) bool { return slices.Contains(known, m) })
	fmt.Fprint(e.stderr, report.TraceMissing(later, terminalWidth(e.stderr))) // of namespaces that were made since
	return unlessPipeClosed(p.end(summary))
}

// presenter shows packets, conntrack entries that ended, and the totals.
type presenter struct {
	packet func(trace.Packet) error
	ended  func(trace.EntryEnd) error
	end    func(follow.Summary) error
}

// tracePresenter returns that of an output.
func (e *env) tracePresenter(output string) (p presenter, err error) {
	var clock unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &clock); err != nil {
		return p, fmt.Errorf("read clock: %w", err)
	}
	boot := time.Now().Add(-time.Duration(clock.Nano()))
	switch output {
	case "json":
		p.packet = func(packet trace.Packet) error { return report.JSONLine(e.stdout, packet) }
		p.ended = func(end trace.EntryEnd) error { return report.JSONLine(e.stdout, end) }
		p.end = func(s follow.Summary) error { return report.JSONLine(e.stdout, s) }
	case "html":
		var all []trace.Packet
		var ended []trace.EntryEnd
		p.packet = func(packet trace.Packet) error {
			if all = append(all, packet); len(all) == report.MostTraceDrawn {
				return errEnough
			}
			return nil
		}
		p.ended = func(end trace.EntryEnd) error {
			if len(ended) < report.MostTraceDrawn {
				ended = append(ended, end)
			}
			return nil
		}
		p.end = func(s follow.Summary) error { return report.TraceHTML(e.stdout, boot, all, ended, s) }
	case "pcapng":
		capture, err := trace.NewPcapng(e.stdout, boot.UnixNano())
		if err != nil {
			return p, err
		}
		p.packet = func(packet trace.Packet) error {
			return capture.Packet(packet, report.TraceComment, report.TraceEnd(packet.End))
		}
		// A capture has no place for these.
		p.ended = func(end trace.EntryEnd) error {
			_, err := fmt.Fprintln(e.stderr, report.TraceEnded(end, boot))
			return err
		}
		p.end = func(s follow.Summary) error {
			_, err := fmt.Fprint(e.stderr, report.TraceLost(s))
			return err
		}
	default:
		text := report.NewTraceText(e.stdout, terminalWidth(e.stdout), boot)
		p = presenter{text.Packet, text.Ended, text.End}
	}
	return p, nil
}

// traceAt says where the matching packet is to be seen.
func traceAt(o *follow.Options, namespace, device string) error {
	if namespace == "" && device == "" {
		return nil
	}
	h, err := netns.Open(namespace)
	if err != nil {
		return err
	}
	defer h.Close()
	o.Netns = h.Inode()
	if device == "" {
		return nil
	}
	return h.Do(func() error {
		dev, err := net.InterfaceByName(device)
		if err != nil {
			return fmt.Errorf("--interface %s: %s", device, strings.TrimPrefix(err.Error(), "route ip+net: "))
		}
		o.Ifindex = uint32(dev.Index)
		return nil
	})
}
