// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// Faults that have a cause whose scenario shows it in another way: the cause is named first, and what
// only looks like it is not.
func TestOtherWays(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	short := onGateway("sysctl -w net.netfilter.nf_conntrack_udp_timeout_stream=1 net.netfilter.nf_conntrack_udp_timeout=1")
	// rally is flows of UDP whose server replies after a while.
	rally := func(after time.Duration) action {
		return do(lateEcho(lab.RoleServer, 5000, after), send(datagrams("{server}:5000", 8, 0.4)), atLeast(4*time.Second))
	}
	zones := func(rule string) action {
		return do(nftText("table ip zones {\nchain pre {\ntype filter hook prerouting priority raw\n"+rule+"\n}\n}\n"),
			echo(lab.RoleServer, 5000), send(datagrams("{server}:5000", 5, 10)))
	}
	asking := func(ctx context.Context, s *faultRun) error {
		for ctx.Err() == nil {
			_ = onClient("arping -D -c 1 -w 1 -I eth0 192.168.0.3 || true")(ctx, s)
		}
		return nil
	}
	for _, f := range []struct {
		name, code string // "": nothing of severity warning or above
		make       action
	}{
		{"UDP replies that come later than the time-out", "established-timeout-short", do(short, rally(1700*time.Millisecond))},
		{"the same where the rules drop what is not known", "established-timeout-short",
			do(nftText("table ip guard {\nchain input {\ntype filter hook input priority 0; policy drop\nct state established accept\n}\n}\n"), short, rally(1700*time.Millisecond))},
		{"a short time-out that is long enough", "", do(short, rally(100*time.Millisecond))},
		{"a zone of one direction, UDP", "answers-lost", zones("iifname eth1 ct zone set 5")},
		{"a zone for the original direction only", "", zones("iifname eth1 ct original zone set 5")},
		{"requests for an address that somebody is about to take", "", do(send(asking), browse)},
	} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			l, err := lab.Up(ctx, "routed", lab.Options{Owned: true})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Down()
			s := &faultRun{lab: l, watched: l.NATNode(), options: FaultOptions{Window: 2 * time.Second, Progress: func(string, float64) {}}}
			defer s.close()
			if err := f.make(ctx, s); err != nil {
				t.Fatal(err)
			}
			facts, err := s.watch(ctx)
			if err != nil {
				t.Fatal(err)
			}
			found := causes.Judge(facts)
			got := ""
			if len(found) > 0 && found[0].Severity >= causes.Warning {
				got = found[0].Code
			}
			if got != f.code {
				t.Errorf("want %q first: %s", f.code, titles(found))
			}
		})
	}
}
