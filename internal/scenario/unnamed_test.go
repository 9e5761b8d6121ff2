// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"
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
	const short = "net.netfilter.nf_conntrack_udp_timeout_stream=1 net.netfilter.nf_conntrack_udp_timeout=1"
	// rally is flows of UDP whose server replies after a while.
	rally := func(s *faultRun, after time.Duration) error {
		if err := s.lateEcho(s.lab.ServerNode(), 5000, after); err != nil {
			return err
		}
		to := netip.AddrPortFrom(s.lab.ServerNode().Addr, 5000)
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, to, 8, 0.4))
		s.least = 4 * time.Second
		return nil
	}
	for _, f := range []struct {
		name, code string // "": nothing of severity warning or above
		make       func(ctx context.Context, s *faultRun) error
	}{
		{"UDP replies that come later than the time-out", "established-timeout-short", func(ctx context.Context, s *faultRun) error {
			if err := s.shell(ctx, "sysctl -w "+short); err != nil {
				return err
			}
			return rally(s, 1700*time.Millisecond)
		}},
		{"the same where the rules drop what is not known", "established-timeout-short", func(ctx context.Context, s *faultRun) error {
			if err := s.nft(ctx, "table ip guard {\nchain input {\ntype filter hook input priority 0; policy drop\nct state established accept\n}\n}\n"); err != nil {
				return err
			}
			if err := s.shell(ctx, "sysctl -w "+short); err != nil {
				return err
			}
			return rally(s, 1700*time.Millisecond)
		}},
		{"a short time-out that is long enough", "", func(ctx context.Context, s *faultRun) error {
			if err := s.shell(ctx, "sysctl -w "+short); err != nil {
				return err
			}
			return rally(s, 100*time.Millisecond)
		}},
		{"a zone of one direction, UDP", "answers-lost", func(ctx context.Context, s *faultRun) error {
			if err := s.nft(ctx, "table ip zones {\nchain pre {\ntype filter hook prerouting priority raw\niifname eth1 ct zone set 5\n}\n}\n"); err != nil {
				return err
			}
			if err := s.echo(s.lab.ServerNode(), 5000); err != nil {
				return err
			}
			s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(s.lab.ServerNode().Addr, 5000), 5, 10))
			return nil
		}},
		{"a zone for the original direction only", "", func(ctx context.Context, s *faultRun) error {
			if err := s.nft(ctx, "table ip zones {\nchain pre {\ntype filter hook prerouting priority raw\niifname eth1 ct original zone set 5\n}\n}\n"); err != nil {
				return err
			}
			if err := s.echo(s.lab.ServerNode(), 5000); err != nil {
				return err
			}
			s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(s.lab.ServerNode().Addr, 5000), 5, 10))
			return nil
		}},
		{"requests for an address that somebody is about to take", "", func(ctx context.Context, s *faultRun) error {
			s.traffic = append(s.traffic, func(ctx context.Context) error {
				for ctx.Err() == nil {
					_ = s.run(ctx, s.lab.Node(lab.RoleClient), fmt.Sprintf("arping -D -c 1 -w 1 -I eth0 %s || true", s.lab.Node(lab.RoleClient).Addr.Next()))
				}
				return nil
			})
			return s.browse(ctx)
		}},
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
