// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// stackOf makes a stack of functions, innermost first.
func stackOf(count uint64, functions string) ProfileStack {
	s := ProfileStack{Count: count}
	for i, name := range strings.Fields(functions) {
		s.Frames = append(s.Frames, Frame{name, "", uint64(0x1000 + i)})
	}
	return s
}

func TestCalls(t *testing.T) {
	p := &Profile{Stacks: []ProfileStack{
		stackOf(5, "nf_conntrack_in ipv4_conntrack_in nf_hook_slow ip_rcv softirq"),
		stackOf(3, "ipv4_conntrack_in nf_hook_slow br_nf_pre_routing nf_hook_slow br_handle_frame softirq"),
		stackOf(2, "nf_hook_slow ip_rcv softirq"),
		stackOf(1, "br_nf_pre_routing nf_hook_slow br_handle_frame softirq"),
		stackOf(7, "ip_forward softirq"),
	}}
	tests := []struct{ root, want string }{
		{"nf_hook_slow", `{"function":"nf_hook_slow","sample_count":11,"self_count":2,"callees":[
			{"function":"ipv4_conntrack_in","sample_count":5,"self_count":0,"callees":[
				{"function":"nf_conntrack_in","sample_count":5,"self_count":5}]},
			{"function":"br_nf_pre_routing","sample_count":4,"self_count":1,"callees":[
				{"function":"nf_hook_slow","sample_count":3,"self_count":0,"callees":[
					{"function":"ipv4_conntrack_in","sample_count":3,"self_count":3}]}]}]}`},
		{"ip_forward", `{"function":"ip_forward","sample_count":7,"self_count":7}`},
		{"absent", `{"function":"absent","sample_count":0,"self_count":0}`},
	}
	for _, tt := range tests {
		got, err := json.Marshal(p.Calls(tt.root))
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.Join(strings.Fields(tt.want), ""); string(got) != want {
			t.Errorf("%s:\n%s, want\n%s", tt.root, got, want)
		}
	}
	all := p.Calls(AllFunctions)
	if len(all.Callees) != 1 || all.Callees[0].Function != "softirq" || all.Samples != 18 || all.Callees[0].Samples != 18 {
		t.Errorf("whole tree: %+v", all)
	}
	want := []CallNode{
		{Function: "ipv4_conntrack_in", Samples: 8, Self: 3},
		{Function: "br_nf_pre_routing", Samples: 4, Self: 1},
	}
	if got := p.Called("nf_hook_slow"); !slices.EqualFunc(got, want, func(a, b CallNode) bool {
		return a.Function == b.Function && a.Samples == b.Samples && a.Self == b.Self
	}) {
		t.Errorf("called by nf_hook_slow: %+v, want %+v", got, want)
	}
}

func TestRestoreHooks(t *testing.T) {
	hooks := map[string]uint64{"ipv4_conntrack_in": 1, "ipv4_conntrack_local": 2, "ipv6_conntrack_in": 3}
	for _, tt := range []struct{ stack, want string }{
		{"nf_conntrack_in nf_hook_slow ip_rcv x", "nf_conntrack_in ipv4_conntrack_in nf_hook_slow ip_rcv x"},
		{"a nf_conntrack_in nf_hook_slow __ip_local_out", "a nf_conntrack_in ipv4_conntrack_local nf_hook_slow __ip_local_out"},
		{"nf_conntrack_in nf_hook_slow ipv6_rcv", "nf_conntrack_in ipv6_conntrack_in nf_hook_slow ipv6_rcv"},
		{"nf_conntrack_in nf_hook_slow ip6_local_out", "nf_conntrack_in nf_hook_slow ip6_local_out"}, // not in this kernel
		{"nf_conntrack_in ipv4_conntrack_in nf_hook_slow ip_rcv", "nf_conntrack_in ipv4_conntrack_in nf_hook_slow ip_rcv"},
		{"nf_conntrack_in nf_hook_slow", "nf_conntrack_in nf_hook_slow"}, // cut: the caller is not known
		{"", ""},
	} {
		var got []string
		for _, f := range restoreHooks(stackOf(1, tt.stack).Frames, hooks) {
			got = append(got, f.Function)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%q: %q, want %q", tt.stack, got, tt.want)
		}
	}
}

func TestInterrupted(t *testing.T) {
	for stack, want := range map[string]bool{
		"pv_native_safe_halt default_idle do_idle cpu_startup_entry":                             false,
		"ip_rcv net_rx_action handle_softirqs irq_exit_rcu asm_sysvec_apic default_idle do_idle": true,
		"ip_rcv net_rx_action __do_softirq do_softirq do_idle":                                   true,
	} {
		if got := interrupted(stackOf(1, stack).Frames); got != want {
			t.Errorf("%q: %v, want %v", stack, got, want)
		}
	}
}

// While a gateway translates, conntrack and NAT are seen below nf_hook_slow, and
// the ticks add up.
func TestProfile(t *testing.T) {
	l := routed(t, lab.RulesNft)
	stop := make(chan struct{})
	defer close(stop)
	go flood(t, l.Node(lab.RoleClient).Handle(), &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 1, 0, 2}}, stop)

	// Other work may leave the gateway few ticks: look until it has been seen.
	seen := map[string]uint64{}
	ktest.Wait(t, 30*time.Second, "conntrack and NAT among what nf_hook_slow calls", func() bool {
		p, err := TakeProfile(context.Background(), ProfileOptions{For: 500 * time.Millisecond, Frequency: 997})
		if err != nil {
			t.Fatal(err)
		}
		if p.Samples != p.Kernel+p.User+p.Idle+p.Lost || p.Samples == 0 || p.CPUs == 0 {
			t.Fatalf("%d ticks on %d CPUs: kernel %d, user %d, idle %d, lost %d", p.Samples, p.CPUs, p.Kernel, p.User, p.Idle, p.Lost)
		}
		if most := uint64(1.2 * p.Duration.Seconds() * 997 * float64(p.CPUs)); p.Samples > most {
			t.Fatalf("%d ticks, more than %d", p.Samples, most)
		}
		sum := uint64(0)
		for _, stack := range p.Stacks {
			sum += stack.Count
		}
		if sum != p.Kernel {
			t.Fatalf("stacks of %d ticks, want of %d", sum, p.Kernel)
		}
		for _, c := range p.Called("nf_hook_slow") {
			seen[c.Function] += c.Samples
		}
		return seen["ipv4_conntrack_in"] > 0 && seen["nf_nat_ipv4_out"]+seen["nf_nat_ipv4_pre_routing"] > 0
	})
}

// The end of the context ends it early, without error.
func TestProfileIsCancelled(t *testing.T) {
	ktest.Root(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p, err := TakeProfile(ctx, ProfileOptions{For: time.Hour})
	if err != nil || p.Duration > time.Minute {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestAddIdle(t *testing.T) {
	for _, c := range []struct {
		name       string
		idle       time.Duration
		ticked     uint64 // idle
		idles, all uint64 // then
	}{
		{"every tick came", time.Second, 100, 100, 200},
		{"a CPU's clock stood still while it was idle", 2 * time.Second, 0, 100, 200},
		{"stolen time is not idle", 0, 0, 0, 100},
		{"idle only in part", 400 * time.Millisecond, 10, 40, 140},
		{"/proc/stat went back", -time.Second, 10, 10, 110},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := Profile{Duration: time.Second, Frequency: 100, CPUs: 2, Kernel: 100, Idle: c.ticked, Samples: 100 + c.ticked}
			p.addIdle(c.idle)
			if p.Idle != c.idles || p.Samples != c.all {
				t.Errorf("%d idle of %d samples, want %d of %d", p.Idle, p.Samples, c.idles, c.all)
			}
		})
	}
}
