// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
)

// Only a symptom of another machine with the address asks for probes, three in ten minutes; once such a machine is found, each
// window does.
func TestProbesOnSymptom(t *testing.T) {
	const inode = 3
	m, now := &monitor{attention: newAttention(), findings: newFindings()}, noon
	probes := func(windows int) (sent int) {
		for range windows {
			now = now.Add(10 * time.Second)
			if m.suspects(inode, now) {
				sent++
			}
		}
		return sent
	}
	show := func(windows int, f ...causes.Finding) {
		for range windows {
			now = now.Add(10 * time.Second)
			m.findings.window(spaces(3)[2], now, f)
		}
	}
	r := m.attention.of(inode)
	r.symptoms = symptoms{"fill": 9, "drop.rule.NETFILTER_DROP": 3, "resets": 2, "frames": 1}
	if n := probes(100); n != 0 {
		t.Errorf("%d probes by symptoms of other causes", n)
	}
	for _, name := range []string{"claims", "unconfirmed", "traffic"} {
		*r = watched{symptoms: symptoms{name: 1}}
		if n := probes(59); n != probeTimes {
			t.Errorf("%s: %d probes in ten minutes, want %d", name, n, probeTimes)
		}
		if n := probes(60); n != probeTimes {
			t.Errorf("%s: %d probes in the next ten minutes, want %d", name, n, probeTimes)
		}
	}
	*r = watched{}
	show(2, causes.Finding{Code: "rule-drop", Severity: causes.Critical}, causes.Finding{Code: duplicateCode, Severity: causes.Warning})
	if n := probes(60); n != 0 {
		t.Errorf("%d probes by findings that no probe says more of", n)
	}
	show(2, causes.Finding{Code: "clients-unreached", Severity: causes.Warning})
	if n := probes(59); n != probeTimes {
		t.Errorf("%d probes by a finding that it may explain, want %d", n, probeTimes)
	}
	show(2, causes.Finding{Code: duplicateCode, Severity: causes.Critical})
	if n := probes(60); n != 60 {
		t.Errorf("%d probes in 60 windows while another machine has the address", n)
	}
	show(offAfter)
	if n := probes(30); n != 0 {
		t.Errorf("%d probes after its end", n)
	}
}
