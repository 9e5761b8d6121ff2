// SPDX-License-Identifier: Apache-2.0

package control

import (
	"testing"
	"time"

	"natkit/internal/snapshot"
)

// All packets of a short connection come near its session's beginning: one of them created it.
func TestPacketCreatesSession(t *testing.T) {
	const ms = uint64(time.Millisecond)
	one, two := snapshot.TraceTuple{Protocol: "tcp"}, snapshot.TraceTuple{Protocol: "udp"}
	var p packetPrograms
	for i, step := range []struct {
		ends  snapshot.TraceTuple
		began time.Duration
		at    uint64
		want  bool
	}{
		{one, 1000 * time.Millisecond, 1002 * ms, true}, // the clock of sessions counts jiffies
		{one, 1000 * time.Millisecond, 1002 * ms, true}, // the same packet, asked for again
		{one, 1000 * time.Millisecond, 1008 * ms, false},
		{two, 1000 * time.Millisecond, 1003 * ms, true},
		{one, 1000 * time.Millisecond, 1400 * ms, false},
		{one, 2000 * time.Millisecond, 1999 * ms, true}, // another session of the same ends
		{one, 2000 * time.Millisecond, 2004 * ms, false},
	} {
		if got := p.creates(step.ends, step.began, step.at); got != step.want {
			t.Errorf("step %d: created %t, want %t", i, got, step.want)
		}
	}
}
