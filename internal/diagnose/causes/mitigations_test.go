// SPDX-License-Identifier: Apache-2.0

package causes

// What makes packets cheaper: when it is proposed, and to whom.

import (
	"math"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["softirq-all-cpus"] = func(s *snapshot.Snapshot) {
		s.Counters["Ip.ForwDatagrams"] = 1_990_000
		for n := range 4 {
			s.CPUs = append(s.CPUs, snapshot.CPU{Number: n, Busy: 1, Softirq: 0.94 - 0.01*float64(n), Packets: 500_000})
		}
	}
}

func TestAllCPUs(t *testing.T) {
	like := func(change func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { examples["softirq-all-cpus"](s); change(s) }
	}
	each := func(change func(c *snapshot.CPU)) func(s *snapshot.Snapshot) {
		return like(func(s *snapshot.Snapshot) {
			for i := range s.CPUs {
				change(&s.CPUs[i])
			}
		})
	}
	const full, warn, advice = "critical softirq-all-cpus", "warning softirq-all-cpus", "advice softirq-all-cpus"
	run(t, []row{
		{"saturated", examples["softirq-all-cpus"], warn},
		{"saturated, and the card loses packets", like(func(s *snapshot.Snapshot) { link(s, "eth0").RxMissed = 500 }), full},
		{"nearly", each(func(c *snapshot.CPU) { c.Busy = 0.85 }), advice},
		{"one processor, all there is", like(func(s *snapshot.Snapshot) { s.CPUs = s.CPUs[:1] }), warn},
		{"rules not known", like(func(s *snapshot.Snapshot) { s.Chains = nil }), warn},

		{"one of them does it all", like(func(s *snapshot.Snapshot) {
			for i := range s.CPUs[1:] {
				s.CPUs[1+i].Busy, s.CPUs[1+i].Softirq = 0.9, 0.1
			}
			s.CPUs[0].Softirq = 1
		}), "warning softirq-one-cpu"},
		{"busy with programs", each(func(c *snapshot.CPU) { c.Softirq = 0.3 }), ""},
		{"has time left", each(func(c *snapshot.CPU) { c.Busy = 0.75 }), ""},
		{"a server: nothing is forwarded", like(func(s *snapshot.Snapshot) { s.Counters["Ip.ForwDatagrams"] = 900 }), ""},
		{"counters not known", like(func(s *snapshot.Snapshot) { s.Counters = nil }), ""},
		{"a namespace beside others", like(func(s *snapshot.Snapshot) {
			s.Netns.Init = false
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 50_000, 50_000
		}), ""},
		{"not a number", like(func(s *snapshot.Snapshot) { s.CPUs[2].Busy = math.NaN() }), ""},
		{"window not known", like(func(s *snapshot.Snapshot) { s.WindowSeconds = 0 }), ""},
	})
	s := gateway()
	examples["softirq-all-cpus"](s)
	if e := Judge(s)[0].Evidence; !slices.ContainsFunc(e, func(e Evidence) bool { return e.Value == "18593 ns" }) { // 4 x 0.925 x 10 s of 1.99 million
		t.Errorf("time for a packet: %+v", e)
	}
}

// Accel for the kernel's NAT is proposed where packets are the limit, an engine in
// its place where the rules are the user's besides.
func TestBeyondNetfilter(t *testing.T) {
	const up = "natkit up --engine ebpf -f nat.yaml --dry-run"
	chainOf := func(table, name string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: table, Name: name})
		}
	}
	rules := func(chains ...snapshot.Chain) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Chains = chains }
	}
	masquerade := map[string]int{"masquerade": 1}
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   []string // parts of lines, "-" before those that must not be there
	}{
		{"rules of one's own", func(*snapshot.Snapshot) {}, []string{
			"natkit hooks --cost", "natkit import --from nft > nat.yaml", up, "natkit bench udp --router nft,accel,ebpf --both-ways", "natkit accel on eth0 eth1 --dry-run",
			"refuses without --bypass: chain inet filter/forward (packets that natkit translates bypass its 2 rules)", "-is not for this machine"}},
		{"no filter", func(s *snapshot.Snapshot) { s.Chains = s.Chains[:1] }, []string{up, "---bypass"}},
		{"a bridge", func(s *snapshot.Snapshot) {
			s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "br0", Kind: "bridge", Up: true, RxPackets: 1_500_000},
				snapshot.Interface{Name: "veth7", Kind: "veth", Up: true, Master: "br0", RxPackets: 1_500_000})
		}, []string{"natkit accel on br0 eth0 --dry-run"}},
		{"interfaces not known", func(s *snapshot.Snapshot) { s.Interfaces = nil }, []string{"natkit accel on INSIDE OUTSIDE --dry-run"}},
		{"IPsec and shaping", func(s *snapshot.Snapshot) {
			s.Xfrm = &snapshot.Xfrm{Policies: 3}
			link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: "htb"}
		}, []string{up, "; 3 IPsec policies; htb on eth0"}},
		{"iptables", rules(snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", NATRules: masquerade}),
			[]string{"natkit import --from iptables > nat.yaml", up}},
		{"iptables-legacy", rules(snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", NATRules: masquerade}),
			[]string{"iptables-legacy-save | natkit import --from - > nat.yaml", up}},
		{"another namespace", func(s *snapshot.Snapshot) { s.Netns.Name = "blue" }, []string{"natkit --netns blue import --from nft > nat.yaml", "natkit --netns blue up --engine ebpf", "natkit --netns blue accel on"}},

		{"Docker", chainOf("filter", "DOCKER-USER"), []string{"natkit hooks --cost", "natkit accel on eth0 eth1 --dry-run", "managed by Docker", "udp --router nft,accel --both-ways", "-natkit import", "-natkit up --engine"}},
		{"Docker's own nftables", chainOf("docker-bridges", "nat-prerouting"), []string{"managed by Docker", "-natkit up --engine"}},
		{"Kubernetes", chainOf("nat", "KUBE-SERVICES"), []string{"managed by kube-proxy", "-natkit up --engine"}},
		{"Kubernetes' own nftables", chainOf("kube-proxy", "services"), []string{"managed by kube-proxy", "-natkit up --engine"}},
		{"firewalld", chainOf("firewalld", "nat_POST_public"), []string{"managed by firewalld", "-natkit up --engine"}},
		{"libvirt", chainOf("nat", "LIBVIRT_PRT"), []string{"managed by libvirt", "-natkit up --engine"}},
		{"kube-proxy as owner of settings", func(s *snapshot.Snapshot) { s.Owners = []snapshot.Owner{{Who: "kube-proxy"}} }, []string{"managed by kube-proxy", "-natkit up --engine"}},
		{"nothing is translated", func(s *snapshot.Snapshot) { s.Chains[0].NATRules = nil }, []string{"natkit hooks --cost", "-natkit up --engine", "-natkit accel", "-managed by"}},
		{"rules not known", func(s *snapshot.Snapshot) { s.Chains = nil }, []string{"natkit hooks --cost", "-natkit up --engine"}},
	} {
		for _, code := range []string{"softirq-all-cpus", "softirq-one-cpu"} {
			s := gateway()
			examples[code](s)
			r.change(s)
			found := Judge(s)
			i := slices.IndexFunc(found, func(f Finding) bool { return f.Code == code })
			if i < 0 {
				t.Errorf("%s: %s was not found", r.name, code)
				continue
			}
			remedy := strings.Join(found[i].Remedy, "\n")
			for _, want := range r.want {
				unwanted, not := strings.CutPrefix(want, "-")
				if not && strings.Contains(remedy, unwanted) || !not && !strings.Contains(remedy, want) {
					t.Errorf("%s, %s: %q in\n%s", r.name, code, want, remedy)
				}
			}
		}
	}
	// What merely wastes does not speak of it unless packets are the limit.
	for _, code := range []string{"needless-hooks", "rule-chain-long"} {
		for _, busy := range []bool{false, true} {
			s := gateway()
			examples[code](s)
			if busy {
				examples["softirq-all-cpus"](s)
			}
			i := slices.IndexFunc(Judge(s), func(f Finding) bool { return f.Code == code })
			if i < 0 {
				t.Fatalf("%s was not found", code)
			}
			if got := slices.Contains(Judge(s)[i].Remedy, up); got != busy {
				t.Errorf("%s, processors busy %v: engine proposed: %v", code, busy, got)
			}
		}
	}
}
