// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// newNetns makes a namespace for one test. Its table is emptied at the end: the
// hash is shared by the whole machine, and a dying namespace gives its entries
// back late.
func newNetns(t testing.TB) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Do(func() error { return Flush(context.Background()) }); err != nil {
			t.Error(err)
		}
		h.Close()
		netns.Delete(name)
	})
	return h
}

func in(t testing.TB, h *netns.Handle, fn func() error) {
	t.Helper()
	if err := h.Do(fn); err != nil {
		t.Fatal(err)
	}
}

// conntrackTool runs conntrack(8) in the calling thread's namespace.
func conntrackTool(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(ktest.Tool(t, "conntrack"), args...).Output()
	if err != nil {
		t.Fatalf("conntrack %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// conntrackRun is conntrackTool for what may be refused.
func conntrackRun(t testing.TB, args ...string) error {
	t.Helper()
	if out, err := exec.Command(ktest.Tool(t, "conntrack"), args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func TestFill(t *testing.T) {
	h := newNetns(t)
	tests := []struct {
		name string
		o    FillOptions
		want []string // each in every line
		last string   // in one line
	}{
		{"default", FillOptions{Count: 700}, []string{"tcp", "ESTABLISHED", "src=198.18.0.", "dst=198.19.0.1", "dport=80", "[ASSURED]"},
			"src=198.18.0.187 dst=198.19.0.1 sport=1026 dport=80 src=198.19.0.1 dst=198.18.0.187 sport=80 dport=1026"},
		{"time wait", FillOptions{Count: 3, State: TCPTimeWait, Timeout: time.Hour, Mark: 7}, []string{"TIME_WAIT", "mark=7"}, "[ASSURED]"},
		{"syn sent", FillOptions{Count: 3, State: TCPSynSent}, []string{"SYN_SENT", "[UNREPLIED]"}, "src=198.18.0.2 "},
		{"udp", FillOptions{Count: 3, Protocol: unix.IPPROTO_UDP, Unreplied: true, Sources: netip.MustParsePrefix("10.1.1.1/32")},
			[]string{"udp", "[UNREPLIED]", "src=10.1.1.1 "}, "sport=1026"},
		{"snat", FillOptions{Count: 3, Outside: netip.MustParseAddr("100.64.0.1"), OutsidePorts: snapshot.PortRange{Min: 5000, Max: 5002}},
			[]string{"dst=100.64.0.1 "}, "src=198.19.0.1 dst=100.64.0.1 sport=80 dport=5002"},
		{"published", FillOptions{Count: 2, Inside: netip.MustParseAddrPort("172.17.0.2:8080")}, []string{"src=172.17.0.2 "}, "sport=8080 dport=1024"},
		{"ipv6", FillOptions{Count: 2, Sources: netip.MustParsePrefix("2001:db8::ff/120"), Dest: netip.MustParseAddrPort("[2001:db8:1::1]:443")},
			[]string{"src=2001:db8::"}, "src=2001:db8::1 dst=2001:db8:1::1"},
		{"zone", FillOptions{Count: 2, Zone: 9}, []string{"zone=9"}, "src=198.18.0.1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in(t, h, func() error {
				if err := Flush(context.Background()); err != nil {
					return err
				}
				progress := 0
				tt.o.Progress = func(done, total int) {
					progress = done
					if total != tt.o.Count {
						t.Errorf("progress total %d", total)
					}
				}
				res, err := Fill(context.Background(), tt.o)
				if err != nil {
					return err
				}
				if res != (FillResult{Added: tt.o.Count}) || progress != tt.o.Count {
					t.Errorf("result %+v, progress %d", res, progress)
				}
				family := "ipv4"
				if tt.o.Sources.IsValid() && tt.o.Sources.Addr().Is6() {
					family = "ipv6"
				}
				out := conntrackTool(t, "-L", "-f", family)
				lines := strings.Split(strings.TrimSpace(out), "\n")
				if len(lines) != tt.o.Count {
					t.Fatalf("%d lines, want %d:\n%s", len(lines), tt.o.Count, out)
				}
				for _, l := range lines {
					for _, w := range tt.want {
						if !strings.Contains(l, w) {
							t.Fatalf("%q is not in %s", w, l)
						}
					}
				}
				if !strings.Contains(out, tt.last) {
					t.Errorf("no line with %q:\n%s", tt.last, out)
				}
				return nil
			})
		})
	}
}

func TestFillPassesOverExisting(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		if _, err := Fill(context.Background(), FillOptions{Count: 300}); err != nil {
			return err
		}
		res, err := Fill(context.Background(), FillOptions{Count: 10})
		if err != nil {
			return err
		}
		if res != (FillResult{Added: 10, Existing: 300}) {
			t.Errorf("second fill: %+v, want 10 added and 300 passed over", res)
		}
		l, err := ReadLimits()
		if err != nil {
			return err
		}
		if l.Count != 310 {
			t.Errorf("count %d, want 310", l.Count)
		}
		return nil
	})
}

func TestFillEndsWithContext(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		res, err := Fill(ctx, FillOptions{Count: 100000, Progress: func(done, _ int) {
			if done >= 1000 {
				cancel()
			}
		}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		l, lerr := ReadLimits()
		if lerr != nil {
			return lerr
		}
		if uint64(res.Added) != l.Count || res.Added < 1000 || res.Added > 2000 {
			t.Errorf("added %d, in the table %d", res.Added, l.Count)
		}
		return nil
	})
}

func TestFillRefuses(t *testing.T) {
	for _, tt := range []struct {
		o    FillOptions
		want string
	}{
		{FillOptions{Count: 5, Outside: netip.MustParseAddr("10.0.0.1"), OutsidePorts: snapshot.PortRange{Min: 1, Max: 4}}, "only 4"},
		{FillOptions{Count: 1, Outside: netip.MustParseAddr("::1")}, "family"},
		{FillOptions{Count: 1, Protocol: unix.IPPROTO_ICMP}, "protocol 1"},
		{FillOptions{Count: 1, Protocol: unix.IPPROTO_UDP, State: TCPEstablished}, "not a state"},
		{FillOptions{Count: 1, Timeout: time.Millisecond}, "1s or more"},
	} {
		_, err := Fill(context.Background(), tt.o)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want %q", tt.o, err, tt.want)
		}
	}
}

// TestFillStopsAtFullTable needs no change of the limit: it fills the table of
// its own namespace up to it.
func TestFillStopsAtFullTable(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		l, err := ReadLimits()
		if err != nil {
			return err
		}
		if l.Max > 600000 {
			ktest.Unsupported(t, "nf_conntrack_max is %d: filling that is not a test", l.Max)
		}
		res, err := Fill(context.Background(), FillOptions{Count: int(l.Max) + 1000})
		if err != nil {
			return err
		}
		if !res.Full || res.Added != int(l.Max) {
			t.Errorf("result %+v, want full with %d", res, l.Max)
		}
		return nil
	})
}
