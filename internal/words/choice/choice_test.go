// SPDX-License-Identifier: Apache-2.0

package choice

import (
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	states := []string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE"}
	engines := []string{"ebpf", "nft"}
	for _, tt := range []struct {
		got   string
		known []string
		want  string
	}{
		{"TIMEWAIT", states, "TIME_WAIT"},
		{"time-wait", states, "TIME_WAIT"},
		{"ESTABLISHD", states, "ESTABLISHED"},
		{"est", states, "ESTABLISHED"},
		{"SYN", states, ""}, // two begin so
		{"SNY_SENT", states, "SYN_SENT"},
		{"bpf", engines, "ebpf"},
		{"eBPF", engines, "ebpf"},
		{"nftables", engines, ""},
		{"iptables", engines, ""},
		{"", engines, ""},
		{"x", []string{"y"}, ""},
		{"jsno", []string{"text", "json", "html"}, "json"},
		{"yaml", []string{"text", "json", "html"}, ""},
	} {
		if got := Nearest(tt.got, tt.known); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.got, got, tt.want)
		}
	}
}

func TestError(t *testing.T) {
	if got, want := Error("TIMEWAIT", "CLOSE", "TIME_WAIT").Error(), `"TIMEWAIT": want CLOSE or TIME_WAIT; did you mean TIME_WAIT?`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	many := strings.Split(strings.Repeat("word ", fewWords)+"TIME_WAIT", " ")
	if got, want := Error("TIMEWAIT", many...).Error(), `"TIMEWAIT": did you mean TIME_WAIT?`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := Error("zz", "a", "b", "c").Error(), `"zz": want a, b or c`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
