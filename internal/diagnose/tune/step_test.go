// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func TestMakeStep(t *testing.T) {
	const fragments = "net.ipv4.ipfrag_high_thresh"
	full := func(s *snapshot.Snapshot) { s.Conntrack.Count = 262144 }
	of := func(name, value string) func(*snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Sysctls[name] = value }
	}
	for _, c := range []struct {
		name   string
		facts  *snapshot.Snapshot
		wanted []snapshot.Setting
		plan   string
		why    string // of the first refusal
	}{
		{"nothing is wanted, however full it is", machine(full), nil, "", ""},
		{"at most twice, with the hash", machine(full), []snapshot.Setting{want(settingMax, "4194304")},
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 100663296\n", ""},
		{"less than twice", machine(full), []snapshot.Setting{want(settingMax, "300000")},
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>300000 14536704\n", ""},
		{"a quarter of the memory", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = 700 << 20 }), []snapshot.Setting{want(settingMax, "524288")},
			"! netfilter.nf_conntrack_buckets 524288\n! netfilter.nf_conntrack_max 524288\n", "25.0 % is allowed"},
		{"just below it", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = 790 << 20 }), []snapshot.Setting{want(settingMax, "1048576")},
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 100663296\n", ""},
		{"no memory known", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = 0 }), []snapshot.Setting{want(settingMax, "524288")},
			"! netfilter.nf_conntrack_buckets 524288\n! netfilter.nf_conntrack_max 524288\n", "unknown"},
		{"somebody else sets it, to whatever value", machine(func(s *snapshot.Snapshot) {
			full(s)
			s.Owners = []snapshot.Owner{{Who: "kube-proxy", Where: "its configuration", Setting: settingMax, Value: "524288"}}
		}), []snapshot.Setting{want(settingMax, "524288")}, "! netfilter.nf_conntrack_max 524288\n", "kube-proxy sets it"},
		{"the hash is somebody's: not the limit alone", machine(func(s *snapshot.Snapshot) {
			full(s)
			s.Owners = []snapshot.Owner{{Who: "tuned", Where: "a profile", Setting: settingBuckets, Value: "1"}}
		}), []snapshot.Setting{want(settingMax, "524288")}, "! netfilter.nf_conntrack_buckets 524288\n", "tuned sets it"},
		{"no setting of the list", machine(nil), []snapshot.Setting{want("net.ipv4.ip_forward", "0"), want(timeWait, "30"), want("net.core.somaxconn", "4096")}, "", ""},
		{"the first that is possible, one purpose alone", machine(of(fragments, "4194304")), []snapshot.Setting{want("net.ipv4.ip_forward", "0"), want(fragments, "16777216"), want(settingMax, "524288")},
			"ipv4.ipfrag_high_thresh 4194304>8388608 0\n", ""},
		{"its ceiling", machine(of(fragments, "200000000")), []snapshot.Setting{want(fragments, "800000000")}, "ipv4.ipfrag_high_thresh 200000000>268435456 0\n", ""},
		{"at its ceiling", machine(of(fragments, "268435456")), []snapshot.Setting{want(fragments, "1073741824")}, "! ipv4.ipfrag_high_thresh 536870912\n", "the most that natkit gives it by itself"},
		{"its value is not known", machine(nil), []snapshot.Setting{want(fragments, "1073741824")}, "! ipv4.ipfrag_high_thresh 1073741824\n", "not known"},
		{"only on a condition", machine(of(fragments, "4194304")), []snapshot.Setting{{Name: fragments, Value: "8388608", Code: "x", If: "it is so"}}, "", ""},
	} {
		p, err := MakeStep(c.facts, c.wanted)
		if err != nil {
			t.Fatal(err)
		}
		if got := lines(p); !strings.HasPrefix(got, c.plan) || c.plan == "" && got != "" {
			t.Errorf("%s:\n%swant\n%s", c.name, got, c.plan)
		}
		if c.why != "" && (len(p.Refused) == 0 || !strings.Contains(p.Refused[0].Why, c.why)) {
			t.Errorf("%s: %+v, want %q", c.name, p.Refused, c.why)
		}
	}
	for _, name := range Automatic() {
		if k, err := find(name); err != nil || !k.size {
			t.Errorf("%s: %+v, %v: only what is more room is changed automatically", name, k, err)
		}
	}
}
