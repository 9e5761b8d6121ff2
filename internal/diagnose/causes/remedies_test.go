// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/diagnose/tune"
	"natkit/internal/snapshot"
)

// moreExamples are machines on which the remedy of a cause is another one than on
// the one in examples.
var moreExamples = map[string]func(s *snapshot.Snapshot){
	"ip-forward-off, advice":          func(s *snapshot.Snapshot) { forwarding(s, "0") },
	"established-timeout-short, bare": func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_established"] = "600" },
	"conntrack-helper, by port":       func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_helper"] = "1" },
	"conntrack-invalid-reset, elsewhere": func(s *snapshot.Snapshot) {
		publish(s, "tcp", 80, "192.168.1.80", 80)
		s.Conntrack.Stats["invalid"] = 5000
	},
	"martian-drop, own source": func(s *snapshot.Snapshot) {
		s.Drops.Rows = append(s.Drops.Rows, drop(900_000, snapshot.CauseMartian, "eth1", sample("udp 198.51.100.1:53 -> 192.168.1.20:53")))
	},
	"qdisc-drop, pfifo_fast": func(s *snapshot.Snapshot) {
		link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: "pfifo_fast", Packets: 900_000, Dropped: 300_000}
	},
}

func forwarding(s *snapshot.Snapshot, value string) {
	for name := range s.Sysctls {
		if strings.HasSuffix(name, "forward") || strings.HasSuffix(name, "forwarding") {
			s.Sysctls[name] = value
		}
	}
}

// inRemedy finds the settings among a remedy's commands: their names and values as
// tune knows them.
func inRemedy(commands []string) map[string]string {
	out := map[string]string{}
	for _, c := range commands {
		for pattern, name := range map[string]string{
			`^(?:# )?sysctl -w ([^ =]+)=([^ ]+)$`:      "%s",
			`^ethtool -G (\S+) rx (\d+)$`:              "dev.%s.rx_ring",
			`^ethtool -L (\S+) combined (\d+)$`:        "dev.%s.combined_channels",
			`^ethtool -K (\S+) rx (off)$`:              "dev.%s.rx_checksum",
			`^ip link set dev (\S+) txqueuelen (\d+)$`: "dev.%s.tx_queue_len",
			`^sh -c 'for q in /sys/class/net/(\S+)/queues/rx-\*/rps_cpus; do echo (\S+) > \$q; done'$`: "dev.%s.rps_cpus",
		} {
			if m := regexp.MustCompile(pattern).FindStringSubmatch(c); m != nil {
				out[fmt.Sprintf(name, m[1])] = strings.ReplaceAll(m[2], "off", "0")
			}
		}
		if m := regexp.MustCompile(`echo 1 > /sys/class/net/(\S+)/threaded`).FindStringSubmatch(c); m != nil {
			out["dev."+m[1]+".threaded"] = "1"
		}
	}
	return out
}

func flat(findings []Finding) (out []Finding) {
	for _, f := range findings {
		out = append(append(out, f), flat(f.Consequences)...)
	}
	return out
}

// Each setting in a remedy is one that tune plans, unasked or at the user's word.
func TestRemediesArePlanned(t *testing.T) {
	var codes []string
	for _, c := range Catalogue() {
		codes = append(codes, c.Code)
	}
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	found := 0
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		t.Run(name, func(t *testing.T) {
			s := gateway()
			cases[name](s)
			findings := Judge(s)
			code, _, _ := strings.Cut(name, ",")
			if !slices.ContainsFunc(flat(findings), func(f Finding) bool { return f.Code == code }) {
				t.Fatalf("not found: %s", titles(findings))
			}
			wanted := Settings(findings)
			plan := func(o tune.PlanOptions) *tune.Plan {
				o.Wanted = wanted
				p, err := tune.MakePlan(s, o)
				if err != nil {
					t.Fatal(err)
				}
				return p
			}
			unasked, confirmed := plan(tune.PlanOptions{}), plan(tune.PlanOptions{Confirmed: codes})
			planned := func(p *tune.Plan, setting, value string) bool {
				return slices.ContainsFunc(p.Changes, func(c tune.Change) bool { return c.Setting == setting && c.New == value })
			}
			for _, w := range wanted {
				asks := slices.ContainsFunc(unasked.Refused, func(r tune.Refusal) bool {
					return r.Setting == w.Name && r.If == w.If && strings.Contains(r.Why, w.If) && strings.Contains(r.Why, "--confirm "+w.Code)
				})
				if w.If == "" && !planned(unasked, w.Name, w.Value) || w.If != "" && !asks {
					t.Errorf("%s=%s (if %q) is not in the plan: %+v", w.Name, w.Value, w.If, unasked.Refused)
				}
				if !planned(confirmed, w.Name, w.Value) {
					t.Errorf("%s=%s is not in the plan although its condition holds: %+v", w.Name, w.Value, confirmed.Refused)
				}
			}
			for _, f := range flat(findings) {
				found += len(inRemedy(f.Remedy))
				for setting, value := range inRemedy(f.Remedy) {
					if !planned(confirmed, setting, value) {
						t.Errorf("the remedy of %s sets %s=%s, which is not planned", f.Code, setting, value)
					}
				}
			}
			for _, c := range confirmed.Changes {
				if c.Does == "" || c.Scope == "" || c.Reason == "" {
					t.Errorf("a change without words: %+v", c)
				}
			}
		})
	}
	if found < 30 {
		t.Errorf("%d settings in the remedies of all causes: the patterns do not find them", found)
	}
}

func titles(findings []Finding) string {
	var out []string
	for _, f := range flat(findings) {
		out = append(out, fmt.Sprintf("%v %s: %s", f.Severity, f.Code, f.Title))
	}
	return strings.Join(out, "; ")
}
