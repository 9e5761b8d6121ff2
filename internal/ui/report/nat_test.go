// SPDX-License-Identifier: Apache-2.0

package report

import (
	"io"
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/diagnose/monitor"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
)

// A port that may not be given again yet is in hold-down, as in all other outputs.
func TestMappingInHoldDown(t *testing.T) {
	var b strings.Builder
	m := &rulefile.Mapping{HoldDown: true}
	m.Inside.AddrPort, m.Outside.AddrPort = netip.MustParseAddrPort("10.0.0.2:4000"), netip.MustParseAddrPort("203.0.113.1:4000")
	if err := NATMappingText(&b, m); err != nil || !strings.Contains(b.String(), ", in hold-down\n") {
		t.Errorf("%v, %q", err, b.String())
	}
}

// An interface, a chain and another program may be called anything: no terminal obeys it.
func TestGatewayTextsAreHarmless(t *testing.T) {
	const name = "e\x1b[7mth\u009b0"
	placements := []control.Placement{{Interface: name, Reason: "tc: the XDP program " + name}}
	bypassed := []control.Bypassed{{What: "chain " + name, Effect: "bypassed"}}
	for what, text := range map[string]func(io.Writer) error{
		"accel on":     (&AccelPlan{AccelPlan: &control.AccelPlan{Placements: placements, Bypassed: bypassed, Warnings: []string{name}}}).Text,
		"accel off":    (&AccelOff{Kept: []string{name}}).Text,
		"accel status": (&AccelStatus{AccelStatus: &control.AccelStatus{Problems: []string{name}}}).Text,
		"up":           (&NATPlan{Plan: &control.Plan{Placements: placements, Bypassed: bypassed, Detached: []string{name}}}).Text,
		"log":          func(w io.Writer) error { return LogLineText(w, LogLine{Text: name}, false) },
		"monitor":      func(w io.Writer) error { return MonitorLineText(w, monitor.Line{Problem: name}, false) },
		"down":         (&NATDown{Kept: []string{name}}).Text,
		"status":       func(w io.Writer) error { return NATStatusText(w, &control.Status{Problems: []string{name}}) },
		"serve": func(w io.Writer) error {
			return ServeEventText(w, &control.ServeEvent{Kind: "followed", Why: []string{name}}, false)
		},
	} {
		var b strings.Builder
		if err := text(&b); err != nil || strings.ContainsAny(b.String(), "\x1b\u009b") || !strings.Contains(b.String(), "e?[7mth?0") || !strings.HasSuffix(b.String(), "\n") {
			t.Errorf("%s: %v, %q", what, err, b.String())
		}
	}
}
