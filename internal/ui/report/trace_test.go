// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/trace"
)

// A ladder fits the terminal; words stay whole, and piped text is not broken.
func TestTraceLadderFits(t *testing.T) {
	rule := &trace.Rule{Backend: "nft", Chain: "inet fw forward", Handle: 12, Verdict: "drop", Text: `ip saddr @bad_addresses tcp dport { 80, 443 } counter packets 0 bytes 0 drop comment "blocked by the administrator"`}
	p := trace.Packet{Number: 1, Connection: 1, Protocol: "tcp", Tuple: "10.0.0.5:40000 -> 198.51.100.1:443", Kind: "SYN", Length: 60, Steps: []trace.Step{
		{Namespace: "router", Interface: "eth1", Hook: "forward", What: trace.RuleMet, Rule: rule},
		{Namespace: "router", Interface: "eth1", Hook: "postrouting", What: trace.Translated, Detail: "source", Before: "10.0.0.5:40000 -> 198.51.100.1:443", After: "203.0.113.7:40000 -> 198.51.100.1:443"},
	}, End: trace.End{Outcome: trace.Died, Namespace: "router", Interface: "eth1", Rule: rule, Why: rule.String()}}
	written := func(width int) string {
		var b strings.Builder
		text := NewTraceText(&b, width, time.Unix(0, 0))
		if err := text.Packet(p); err != nil {
			t.Fatal(err)
		}
		if err := text.End(follow.Summary{}); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	whole := written(0)
	if n := strings.Count(whole, "\n"); n != 9 {
		t.Errorf("%d lines where nothing is broken:\n%s", n, whole)
	}
	for _, width := range []int{40, 60, 80, 132} {
		got := written(width)
		for line := range strings.Lines(got) {
			line = strings.TrimSuffix(line, "\n")
			if utf8.RuneCountInString(line) > width {
				t.Errorf("wider than %d: %q", width, line)
			}
			if strings.TrimSpace(line) == "" && line != "" {
				t.Errorf("a line of spaces at width %d", width)
			}
		}
		if got, want := strings.Join(strings.Fields(got), " "), strings.Join(strings.Fields(whole), " "); got != want {
			t.Errorf("other words at width %d:\n%s\nwant\n%s", width, got, want)
		}
	}
	if got, want := broken("  a-word-that-does-not-fit-anywhere b", 10, 4), "  a-word-that-does-not-fit-anywhere\n    b"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// However many connections a trace has, few are remembered; the others are counted.
func TestTraceManyConnections(t *testing.T) {
	var b strings.Builder
	text := NewTraceText(&b, 80, time.Unix(0, 0))
	const more = 500
	for i := range maxConnections + more {
		for range 2 {
			if err := text.Packet(trace.Packet{Number: 1, Connection: i + 1, Protocol: "udp", Tuple: "10.0.0.5:4000 -> 198.51.100.1:53", End: trace.End{Outcome: trace.Died, Why: "no route"}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.Reset()
	if err := text.End(follow.Summary{Capped: 1, Lost: 2}); err != nil {
		t.Fatal(err)
	}
	if len(text.connections) > maxConnections {
		t.Errorf("%d connections are remembered", len(text.connections))
	}
	for _, want := range []string{"\n500 connections more: 1000 packets, 1000 dropped\n", "\nNot traced: 1 packet that matched beyond --rate.\n", "\nMissing above: 2 steps for which there was no room.\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in ...%s", want, b.String()[max(0, b.Len()-300):])
		}
	}
}

// A page that is full says so: the trace ended before its time.
func TestTracePageIsFull(t *testing.T) {
	for n, want := range map[int]bool{MostTraceDrawn - 1: false, MostTraceDrawn: true} {
		var b strings.Builder
		if err := TraceHTML(&b, time.Unix(0, 0), make([]trace.Packet, n), nil, follow.Summary{}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(b.String(), "The trace ended with packet 1000"); got != want {
			t.Errorf("%d packets: said so: %v", n, got)
		}
	}
}
