// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

const (
	gib      = 1 << 30
	timeWait = "net.netfilter.nf_conntrack_tcp_timeout_time_wait"
)

// machine is a host of 8 GiB with the kernel's default table and the sizes of
// Linux 6.18.
func machine(change func(*snapshot.Snapshot)) *snapshot.Snapshot {
	s := &snapshot.Snapshot{
		Host:  snapshot.Host{MemoryBytes: 8 * gib},
		Netns: snapshot.Netns{Init: true},
		Sysctls: map[string]string{
			timeWait: "120",
			"net.netfilter.nf_conntrack_tcp_timeout_established": "432000",
			"net.netfilter.nf_conntrack_tcp_timeout_close_wait":  "60",
			"net.netfilter.nf_conntrack_tcp_timeout_syn_sent":    "120",
			"net.ipv4.ip_forward":                                "1",
		},
		Conntrack: &snapshot.Conntrack{
			Count: 1000, Max: 262144, Buckets: 262144,
			ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8,
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

func want(name, value string) snapshot.Setting {
	return snapshot.Setting{Name: name, Value: value, Code: "a-finding", Reason: "because."}
}

// lines writes a plan down as short as can be: the changes, then "!" and the refusals.
func lines(p *Plan) string {
	var b strings.Builder
	for _, c := range p.Changes {
		fmt.Fprintf(&b, "%s %s>%s %d\n", strings.TrimPrefix(c.Setting, "net."), c.Old, c.New, c.MemoryBytes)
	}
	for _, r := range p.Refused {
		fmt.Fprintf(&b, "! %s %s\n", strings.TrimPrefix(r.Setting, "net."), r.Value)
	}
	return b.String()
}

func TestMakePlan(t *testing.T) {
	full := func(s *snapshot.Snapshot) { s.Conntrack.Count = 262144 }
	states := func(count uint64, by map[string]uint64) func(*snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Count = count
			s.Conntrack.Table = &snapshot.Table{Entries: count, ByState: by}
		}
	}
	for _, c := range []struct {
		name   string
		facts  *snapshot.Snapshot
		wanted []snapshot.Setting
		share  float64
		plan   string
	}{
		{"a healthy machine needs nothing", machine(nil), nil, 0, ""},
		{"what is so already is no change", machine(nil), []snapshot.Setting{want("net.ipv4.ip_forward", "1"), want(settingMax, "1000")}, 0, ""},
		{"a size that a finding wants, the hash first", machine(full),
			[]snapshot.Setting{want(settingMax, "524288"), want(settingBuckets, "524288"), want(timeWait, "30")}, 0,
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\n" +
				"netfilter.nf_conntrack_max 262144>524288 100663296\n" +
				"netfilter.nf_conntrack_tcp_timeout_time_wait 120>30 0\n"},
		{"the hash grows with the limit unasked", machine(full), []snapshot.Setting{want(settingMax, "524288")}, 0,
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 100663296\n"},
		{"no limit is more than any", machine(func(s *snapshot.Snapshot) { s.Conntrack.Max = 0 }), []snapshot.Setting{want(settingMax, "524288")}, 0, ""},
		{"a hash that is large enough stays", machine(func(s *snapshot.Snapshot) { s.Conntrack.Max = 1000 }), []snapshot.Setting{want(settingMax, "131072")}, 0,
			"netfilter.nf_conntrack_max 1000>131072 49947648\n"},
		{"of two sizes the larger, of two values the first", machine(nil),
			[]snapshot.Setting{want(settingBuckets, "524288"), want(settingBuckets, "1048576"), want(settingBuckets, "524288"), want(timeWait, "30"), want(timeWait, "60")}, 0,
			"netfilter.nf_conntrack_buckets 262144>1048576 6291456\nnetfilter.nf_conntrack_tcp_timeout_time_wait 120>30 0\n"},
		{"nearly full with no finding: twice as many", machine(func(s *snapshot.Snapshot) { s.Conntrack.Count = 240000 }), nil, 0,
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 100663296\n"},
		{"too little memory", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = gib }), nil, 0,
			"! netfilter.nf_conntrack_buckets 524288\n! netfilter.nf_conntrack_max 524288\n"},
		{"the same when the user allows more", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = gib }), nil, 0.25,
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 100663296\n"},
		{"too little memory leaves the time-outs", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = gib }),
			[]snapshot.Setting{want(settingMax, "524288"), want(timeWait, "30")}, 0,
			"netfilter.nf_conntrack_tcp_timeout_time_wait 120>30 0\n! netfilter.nf_conntrack_buckets 524288\n! netfilter.nf_conntrack_max 524288\n"},
		{"memory not known", machine(func(s *snapshot.Snapshot) { full(s); s.Host.MemoryBytes = 0 }), nil, 0,
			"! netfilter.nf_conntrack_buckets 524288\n! netfilter.nf_conntrack_max 524288\n"},
		{"an entry's size not known: a large one is assumed", machine(func(s *snapshot.Snapshot) { full(s); s.Conntrack.ObjectBytes = 0 }),
			[]snapshot.Setting{want(settingMax, "524288")}, 0,
			"netfilter.nf_conntrack_buckets 262144>524288 2097152\nnetfilter.nf_conntrack_max 262144>524288 134217728\n"},
		{"no conntrack: no sizes, the rest all the same", machine(func(s *snapshot.Snapshot) { s.Conntrack = nil }),
			[]snapshot.Setting{want(settingMax, "524288"), want("net.ipv4.ip_forward", "0")}, 0,
			"ipv4.ip_forward 1>0 0\n! netfilter.nf_conntrack_max 524288\n"},
		{"not natkit's to change", machine(nil), []snapshot.Setting{want("kernel.panic", "1"), want("net.ipv4.ip_forward", "7")}, 0,
			"! kernel.panic 1\n! ipv4.ip_forward 7\n"},
		{"a setting that the facts do not hold", machine(nil), []snapshot.Setting{want("net.ipv4.conf.eth0/5.rp_filter", "2")}, 0,
			"ipv4.conf.eth0/5.rp_filter >2 0\n"},

		{"TIME_WAIT in a table with room harms nobody", machine(states(100000, map[string]uint64{"TIME_WAIT": 90000})), nil, 0, ""},
		{"nor in one without a limit", machine(func(s *snapshot.Snapshot) {
			states(140000, map[string]uint64{"TIME_WAIT": 90000})(s)
			s.Conntrack.Max = 0
		}), nil, 0, ""},
		{"TIME_WAIT under pressure", machine(states(140000, map[string]uint64{"TIME_WAIT": 90000, "ESTABLISHED": 20000})), nil, 0,
			"netfilter.nf_conntrack_tcp_timeout_time_wait 120>30 0\n"},
		{"dead connections", machine(states(200000, map[string]uint64{"ESTABLISHED": 120000, "SYN_SENT": 70000})), nil, 0,
			"netfilter.nf_conntrack_tcp_timeout_syn_sent 120>60 0\nnetfilter.nf_conntrack_tcp_timeout_established 432000>86400 0\n"},
		{"keepalive that needs longer than a day", machine(func(s *snapshot.Snapshot) {
			states(200000, map[string]uint64{"ESTABLISHED": 120000})(s)
			s.Sysctls["net.ipv4.tcp_keepalive_time"] = "100000"
		}), nil, 0, "netfilter.nf_conntrack_tcp_timeout_established 432000>100735 0\n"},
		{"a time-out is never made longer", machine(func(s *snapshot.Snapshot) {
			states(200000, map[string]uint64{"TIME_WAIT": 190000})(s)
			s.Sysctls[timeWait] = "10"
		}), nil, 0, ""},
		{"a finding's time-out goes before the rule's", machine(states(200000, map[string]uint64{"TIME_WAIT": 190000})), []snapshot.Setting{want(timeWait, "20")}, 0,
			"netfilter.nf_conntrack_tcp_timeout_time_wait 120>20 0\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := MakePlan(c.facts, PlanOptions{Wanted: c.wanted, MemoryShare: c.share})
			if err != nil {
				t.Fatal(err)
			}
			if got := lines(p); got != c.plan {
				t.Errorf("plan\n%swant\n%s", got, c.plan)
			}
		})
	}
}

// A refusal says what it would need and what would help.
func TestRefusalNamesTheNeed(t *testing.T) {
	s := machine(func(s *snapshot.Snapshot) {
		s.Conntrack.Count, s.Conntrack.Max, s.Host.MemoryBytes = 60000, 65536, 2*gib
	})
	p, err := MakePlan(s, PlanOptions{Wanted: []snapshot.Setting{want(settingMax, "1048576")}})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Refused) != 2 || p.Refused[0].NeedBytes != 1048576*(384+8) {
		t.Fatalf("refused %+v", p.Refused)
	}
	for _, text := range []string{"392.0 MiB", "19.1 %", "2.0 GiB", "10.0 % is allowed", "a limit of 524288 would fit", "--memory-share 0.20", "timeouts"} {
		if !strings.Contains(p.Refused[0].Why, text) {
			t.Errorf("%q does not say %q", p.Refused[0].Why, text)
		}
	}
	if p.Memory.Then != p.Memory.Now || p.Memory.Now.Bytes != 65536*384+262144*8 || p.Memory.Now.Chain != 0.5 {
		t.Errorf("memory %+v", p.Memory)
	}
	// What the remedy names works.
	if p, err = MakePlan(s, PlanOptions{Wanted: []snapshot.Setting{want(settingMax, "1048576")}, MemoryShare: 0.20}); err != nil || len(p.Refused) != 0 {
		t.Errorf("with --memory-share 0.20: %+v, %v", p.Refused, err)
	}
}

func TestMakePlanScope(t *testing.T) {
	s := machine(func(s *snapshot.Snapshot) {
		s.Netns = snapshot.Netns{Name: "blue"}
		s.Owners = []snapshot.Owner{
			{Setting: settingMax, Value: "65536", Who: "sysctl.d", Where: "/etc/sysctl.d/99-x.conf:1"},
			{Setting: timeWait, Value: "120", Who: "sysctl.d", Where: "/etc/sysctl.d/99-x.conf:2"},
		}
	})
	p, err := MakePlan(s, PlanOptions{Wanted: []snapshot.Setting{want(settingMax, "524288"), want(timeWait, "30")}})
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, c := range p.Changes {
		got += fmt.Sprintf("%s %s %q %d|", c.Setting, c.Scope, c.Netns, len(c.Owners))
	}
	// The owners act in the initial namespace: of blue's time-out they know nothing.
	if want := settingBuckets + ` host "" 0|` + settingMax + ` host "" 1|` + timeWait + ` namespace "blue" 0|`; got != want {
		t.Errorf("changes %s\nwant %s", got, want)
	}
}

func TestOwners(t *testing.T) {
	for _, c := range []struct {
		owner   snapshot.Owner
		warning string // part of it; "-" means no owner at all
	}{
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "1", Who: "sysctl.d", Where: "/etc/sysctl.d/10-x.conf:1"}, "comes later and wins"},
		{snapshot.Owner{Setting: "net.ipv4.conf.*.rp_filter", Value: "1", Who: "sysctl.d", Where: "/etc/sysctl.d/99-x.conf:1"}, "after natkit's own"},
		{snapshot.Owner{Setting: "net.ipv4.conf.*.rp_filter", Value: "1", Who: "sysctl.d", Where: "/etc/sysctl.conf:7"}, "after natkit's own"},
		{snapshot.Owner{Setting: "net.ipv4.conf.*.rp_filter", Value: "2", Who: "sysctl.d", Where: "/etc/sysctl.conf:7"}, ""},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "tuned"}, "profile"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "kube-proxy"}, "starts"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "docker"}, "dockerd"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "k3s"}, "kube-proxy-arg"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "ufw"}, "reloaded"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "0", Who: "NetworkManager"}, "connection"},
		{snapshot.Owner{Setting: "net.ipv4.conf.*.rp_filter", Value: "0", Who: "systemd-networkd"}, "interface comes up"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0.rp_filter", Value: "1", Who: "tuned"}, "-"},
		{snapshot.Owner{Setting: "net.*.rp_filter", Value: "1", Who: "tuned"}, "-"}, // a star is one part
		{snapshot.Owner{Setting: "net.[", Value: "1", Who: "tuned"}, "-"},
		{snapshot.Owner{Setting: "net.ipv4.conf.eth0/1.rp_filter", Value: "1", Who: "natkit", Where: "/etc/sysctl.d/90-natkit.conf:9"}, "-"},
	} {
		got := owners([]snapshot.Owner{c.owner}, Change{Setting: "net.ipv4.conf.eth0/1.rp_filter", New: "2"})
		switch {
		case c.warning == "-":
			if len(got) != 0 {
				t.Errorf("%+v: owner of another setting", c.owner)
			}
		case len(got) != 1 || !strings.Contains(got[0].Warning, c.warning) || (c.warning == "") != (got[0].Warning == ""):
			t.Errorf("%+v: %+v, want a warning with %q", c.owner, got, c.warning)
		}
	}
	// Two names of one setting.
	k3s := snapshot.Owner{Setting: "net.ipv4.conf.all.forwarding", Value: "1", Who: "k3s"}
	if got := owners([]snapshot.Owner{k3s}, Change{Setting: "net.ipv4.ip_forward", New: "0"}); len(got) != 1 || got[0].Warning == "" {
		t.Errorf("who forwards: %+v", got)
	}
}

func TestMemoryShare(t *testing.T) {
	for _, share := range []float64{-0.1, 1.01, math.NaN(), math.Inf(1)} {
		if _, err := MakePlan(machine(nil), PlanOptions{MemoryShare: share}); err == nil {
			t.Errorf("share %v accepted", share)
		}
	}
}

// What is right only on a condition waits for the user's word, unless somebody
// wants the same without one or it is so already.
func TestConditions(t *testing.T) {
	only := func(name, value string) snapshot.Setting {
		return snapshot.Setting{Name: name, Value: value, Code: "an-advice", If: "the moon is full"}
	}
	for _, c := range []struct {
		name      string
		wanted    []snapshot.Setting
		confirmed []string
		plan      string
	}{
		{"not said", []snapshot.Setting{only(timeWait, "30")}, []string{"another"}, "! netfilter.nf_conntrack_tcp_timeout_time_wait 30\n"},
		{"said", []snapshot.Setting{only(timeWait, "30")}, []string{"another", "an-advice"}, "netfilter.nf_conntrack_tcp_timeout_time_wait 120>30 0\n"},
		{"so already", []snapshot.Setting{only(timeWait, "120")}, nil, ""},
		{"wanted by another finding without", []snapshot.Setting{only(timeWait, "30"), want(timeWait, "60")}, nil, "netfilter.nf_conntrack_tcp_timeout_time_wait 120>60 0\n"},
		{"not natkit's to change", []snapshot.Setting{only("kernel.panic", "1")}, []string{"an-advice"}, "! kernel.panic 1\n"},
	} {
		p, err := MakePlan(machine(nil), PlanOptions{Wanted: c.wanted, Confirmed: c.confirmed})
		if err != nil {
			t.Fatal(err)
		}
		if got := lines(p); got != c.plan {
			t.Errorf("%s: plan\n%swant\n%s", c.name, got, c.plan)
		}
		for _, r := range p.Refused {
			if r.If != "" && (!r.Chosen || !strings.Contains(r.Why, "only if the moon is full: confirm that with --confirm an-advice")) {
				t.Errorf("%s: refused %+v", c.name, r)
			}
		}
	}
}

// A plan says how the table will be: how long its chains, when it is full at the
// present rate.
func TestTableToCome(t *testing.T) {
	seconds := func(n float64) *float64 { return &n }
	for _, c := range []struct {
		name      string
		change    func(s *snapshot.Snapshot)
		wanted    []snapshot.Setting
		growth    float64
		now, then Table
	}{
		{"at rest", func(s *snapshot.Snapshot) { s.Conntrack.CountStart = 1000 }, nil, 0,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}, Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}},
		{"emptying", func(s *snapshot.Snapshot) { s.Conntrack.CountStart = 3000 }, nil, -200,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}, Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}},
		{"growing, a larger limit", func(s *snapshot.Snapshot) { s.Conntrack.CountStart, s.Conntrack.Count = 240000, 242144 }, []snapshot.Setting{want(settingMax, "524288")}, 214.4,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 242144, FullSeconds: seconds(20000 / 214.4)},
			Table{Max: 524288, Buckets: 524288, Chain: 2, Entries: 242144, FullSeconds: seconds(282144 / 214.4)}},
		{"full and refusing", func(s *snapshot.Snapshot) {
			s.Conntrack.Count, s.Conntrack.CountStart = 262144, 262144
			s.Conntrack.Stats = map[string]uint64{"drop": 5100, "insert_failed": 100}
		}, []snapshot.Setting{want(settingMax, "524288")}, 500,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 262144, FullSeconds: seconds(0)},
			Table{Max: 524288, Buckets: 524288, Chain: 2, Entries: 262144, FullSeconds: seconds(262144.0 / 500)}},
		{"shorter time-outs", func(s *snapshot.Snapshot) {
			s.Conntrack.Count, s.Conntrack.CountStart = 120000, 120000
			s.Conntrack.Table = &snapshot.Table{Entries: 120000, ByState: map[string]uint64{"TIME_WAIT": 80000, "ESTABLISHED": 40000}}
		}, []snapshot.Setting{want(timeWait, "30")}, 0,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 120000}, Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 60000}},
		{"no limit", func(s *snapshot.Snapshot) { s.Conntrack.Max = 0 }, nil, 100, Table{Buckets: 262144, Entries: 1000}, Table{Buckets: 262144, Entries: 1000}},
		{"a window of no length", func(s *snapshot.Snapshot) { s.WindowSeconds = 0 }, nil, 0,
			Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}, Table{Max: 262144, Buckets: 262144, Chain: 2, Entries: 1000}},
	} {
		s := machine(c.change)
		if c.name != "a window of no length" {
			s.WindowSeconds = 10
		}
		p, err := MakePlan(s, PlanOptions{Wanted: c.wanted})
		if err != nil {
			t.Fatal(err)
		}
		m := p.Memory
		m.Now.Bytes, m.Then.Bytes = 0, 0
		if math.Abs(m.Growth-c.growth) > 1e-9 || !reflect.DeepEqual(m.Now, c.now) || !reflect.DeepEqual(m.Then, c.then) {
			t.Errorf("%s: growth %v, now %+v, then %+v", c.name, m.Growth, m.Now, m.Then)
		}
	}
}

// A snapshot is a file that somebody sent: whatever its numbers, the plan stays
// within the memory and the permitted values.
func FuzzMakePlan(f *testing.F) {
	f.Add(uint64(262144), uint64(262144), uint64(262144), uint64(256), uint64(128), uint64(8), uint64(8*gib), "120", settingMax, "524288")
	f.Add(uint64(math.MaxUint64), uint64(math.MaxUint64), uint64(1), uint64(math.MaxUint64), uint64(1), uint64(0), uint64(1), "-1", settingBuckets, "1")
	f.Add(uint64(1<<63), uint64(1<<62), uint64(512), uint64(200), uint64(0), uint64(8), uint64(math.MaxUint64), "x", "net.ipv4.conf.//.rp_filter", "2")
	f.Fuzz(func(t *testing.T, count, limit, buckets, object, extension, bucket, memory uint64, timeout, name, value string) {
		s := machine(func(s *snapshot.Snapshot) {
			s.Host.MemoryBytes = memory
			s.Conntrack = &snapshot.Conntrack{Count: count, Max: limit, Buckets: buckets, ObjectBytes: object, ExtensionBytes: extension, BucketBytes: bucket,
				Table: &snapshot.Table{Entries: count, ByState: map[string]uint64{"TIME_WAIT": count, "ESTABLISHED": limit}}}
			s.Sysctls[timeWait] = timeout
		})
		p, err := MakePlan(s, PlanOptions{Wanted: []snapshot.Setting{want(name, value)}})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Changes {
			k, err := find(c.Setting)
			if err != nil {
				t.Fatalf("plans %+v", c)
			}
			if _, err := k.value(c.New); err != nil || c.MemoryBytes < 0 {
				t.Errorf("plans %+v: %v", c, err)
			}
			if (c.Setting == settingMax || c.Setting == settingBuckets) && float64(p.Memory.Then.Bytes) > DefaultMemoryShare*float64(memory) {
				t.Errorf("plans a table of %d bytes on a machine of %d", p.Memory.Then.Bytes, memory)
			}
		}
	})
}
