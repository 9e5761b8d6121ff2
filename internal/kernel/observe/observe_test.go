// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// What a kernel refuses for good is marked as such and explained; hints of the
// library, which are about other things, do not reach the reader.
func TestRefused(t *testing.T) {
	hint := fmt.Errorf("load program: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", unix.EPERM)
	tests := []struct {
		name        string
		err         error
		unavailable bool
		says        string
	}{
		{"no right", hint, true, "trace drops: not possible here: "},
		{"access", unix.EACCES, true, "not possible here"},
		{"no system call", fmt.Errorf("bpf: %w", unix.ENOSYS), true, "seccomp"},
		{"old kernel", fmt.Errorf("ring buffer: %w", ebpf.ErrNotSupported), true, "does not support it: ring buffer"},
		{
			"verifier", fmt.Errorf("load program: %w", &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"R1 invalid mem access"}}),
			true, "verifier refuses",
		},
		{"memory", fmt.Errorf("map create: %w", unix.ENOMEM), false, "trace drops: map create: cannot allocate memory"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := refused("trace drops", tt.err)
			if errors.Is(err, ErrUnavailable) != tt.unavailable || !errors.Is(err, tt.err) {
				t.Errorf("%v: unavailable %v, want %v; or its cause is lost", err, errors.Is(err, ErrUnavailable), tt.unavailable)
			}
			if !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "MEMLOCK") {
				t.Errorf("%q, want %q in it and no hint", err, tt.says)
			}
		})
	}
}

func TestReasonNames(t *testing.T) {
	r := reasons{core: map[uint32]string{12: "NETFILTER_DROP"}, subsystems: map[uint32]string{2: "OPENVSWITCH"}}
	for reason, want := range map[uint32]string{
		12: "NETFILTER_DROP", 900: "reason 900", 2<<16 | 3: "OPENVSWITCH/3", 7<<16 | 1: "subsystem 7/1",
	} {
		if got := r.name(reason); got != want {
			t.Errorf("reason %#x is %q, want %q", reason, got, want)
		}
	}
	if got := (reasons{}).name(12); got != "reason 12" { // a kernel that names none
		t.Errorf("%q", got)
	}
}
