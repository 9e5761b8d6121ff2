// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// healthyMachines are at work with nothing wrong.
var healthyMachines = []struct {
	name     string
	topology string
	options  lab.Options
	watch    func(l *lab.Lab) *lab.Node
	work     action
	steady   bool // its load has no bursts
}{
	{name: "idle gateway", topology: "routed", work: do(), steady: true},
	{name: "busy Docker host", topology: "published", work: browseAt(800)},
	{name: "Kubernetes-like rules", topology: "published", work: do(kubernetesRules(5000), browse)},
	// Flows that stay: with new ones all the time the table would fill.
	{name: "busy gateway at 80 % of its table", topology: "routed", work: do(fill(0.8, 1000, "198.18.0.0/24", conntrack.FillOptions{}), swallow(lab.RoleServer, 5353),
		send(datagrams("{server}:5353", 50, 100), spray("10.65.0.1", 2, 100)), shape("100mbit", "256k")), steady: true},
	{name: "router without NAT", topology: "routed", options: lab.Options{Rules: lab.RulesNone}, work: browse},
	{name: "web server that forwards nothing", topology: "routed", watch: (*lab.Lab).ServerNode, work: do(serve(lab.HTTPServerOptions{}),
		send(pages(bench.HTTPOptions{URL: "{url}", Rate: 2000, Concurrency: 20, KeepAlive: true}))), steady: true},
}

// The doctor may advise, and must not warn, of machines at work with nothing wrong.
func TestHealthyMachines(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "iptables-nft-restore")
	for _, m := range healthyMachines {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
			defer cancel()
			m.options.Owned = true
			l, err := lab.Up(ctx, m.topology, m.options)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Down()
			s := &faultRun{lab: l, watched: l.NATNode(), options: FaultOptions{Window: 500 * time.Millisecond, Progress: func(string, float64) {}}}
			if m.watch != nil {
				s.watched = m.watch(l)
			}
			defer s.close()
			if err := m.work(ctx, s); err != nil {
				t.Fatal(err)
			}
			facts, err := s.watch(ctx)
			if err != nil {
				t.Fatal(err)
			}
			findings := causes.Judge(facts)
			t.Log(titles(findings))
			for _, f := range findings {
				if f.Severity >= causes.Warning {
					t.Errorf("%v %s: %s", f.Severity, f.Code, f.Title)
				}
			}
		})
	}
}

// An idle namespace with nothing but loopback is healthy, too.
func TestHealthyEmpty(t *testing.T) {
	facts, err := probe.Take(t.Context(), probe.Options{Root: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if found := causes.Judge(facts); len(found) > 0 {
		t.Errorf("where nothing can be read: %s", titles(found))
	}
}

// kubernetesRules adds so many rules as kube-proxy in iptables mode keeps them:
// a rule in KUBE-SERVICES, a chain of the service and one of its endpoint each.
func kubernetesRules(rules int) action {
	services := rules / 3
	var b strings.Builder
	b.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	for i := range services {
		fmt.Fprintf(&b, ":KUBE-SVC-%016d - [0:0]\n:KUBE-SEP-%016d - [0:0]\n", i, i)
	}
	b.WriteString("-A PREROUTING -j KUBE-SERVICES\n")
	for i := range services {
		fmt.Fprintf(&b, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-%016d\n", i/250, i%250+1, i)
		fmt.Fprintf(&b, "-A KUBE-SVC-%016d -j KUBE-SEP-%016d\n", i, i)
		fmt.Fprintf(&b, "-A KUBE-SEP-%016d -p tcp -m tcp -j DNAT --to-destination 10.244.%d.%d:8443\n", i, i/250, i%250+1)
	}
	b.WriteString("COMMIT\n")
	return func(ctx context.Context, s *faultRun) error {
		cmd := s.watched.Command(ctx, "iptables-nft-restore", "--noflush")
		cmd.Stdin = strings.NewReader(b.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("restore rules: %w: %s", err, out)
		}
		return nil
	}
}
