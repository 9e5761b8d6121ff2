// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"testing"
	"time"

	"natkit/internal/diagnose/tune"
	"natkit/internal/snapshot"
)

const (
	tuneMax      = "net.netfilter.nf_conntrack_max"
	tuneBuckets  = "net.netfilter.nf_conntrack_buckets"
	tuneTimeWait = "net.netfilter.nf_conntrack_tcp_timeout_time_wait"
)

func tuneFacts(change func(*snapshot.Snapshot)) *snapshot.Snapshot {
	s := &snapshot.Snapshot{
		TakenAt: time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC),
		Host:    snapshot.Host{Hostname: "gw1", Kernel: "6.18.0", MemoryBytes: 8 << 30},
		Netns:   snapshot.Netns{Init: true},
		Sysctls: map[string]string{tuneTimeWait: "120"},
		Conntrack: &snapshot.Conntrack{
			Count: 262144, CountStart: 262144, Max: 262144, Buckets: 262144, ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8,
		},
		Owners: []snapshot.Owner{
			{Setting: tuneMax, Value: "65536", Who: "sysctl.d", Where: "/etc/sysctl.d/99-k8s.conf:3"},
			{Setting: tuneMax, Value: "524288", Who: "kube-proxy", Where: "process 41 (kube-proxy)"},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

func TestTunePlanText(t *testing.T) {
	full := []snapshot.Setting{
		{Name: tuneMax, Value: "524288", Code: "conntrack-table-full", Reason: "the connection tracking table is full (262144 of 262144): 5000 packets of new connections dropped in 10 s"},
		{Name: tuneTimeWait, Value: "30", Code: "time-wait-heavy", Reason: "connections that are over hold 76 % of the connection tracking table"},
	}
	for _, c := range []struct {
		file   string
		facts  *snapshot.Snapshot
		wanted []snapshot.Setting

		unjudged []string
	}{
		{"tune-plan.txt", tuneFacts(nil), full, nil},
		{"tune-plan-refused.txt", tuneFacts(func(s *snapshot.Snapshot) {
			s.Netns = snapshot.Netns{Name: "blue"}
			s.Host.MemoryBytes = 1 << 30
			s.Conntrack.ObjectBytes = 0 // not root
		}), append(full[:1:1], snapshot.Setting{Name: "kernel.panic", Value: "1", Code: "odd"}), nil},
		{"tune-plan-asked.txt", tuneFacts(func(s *snapshot.Snapshot) {
			s.Conntrack.Count, s.Conntrack.CountStart, s.WindowSeconds = 12000, 11000, 10
		}), []snapshot.Setting{{Name: "net.netfilter.nf_conntrack_acct", Value: "0", Code: "conntrack-accounting", Reason: "each of 12000 entries carries what nf_conntrack_acct counts",
			If: "no program here reads what entries count"}}, nil},
		{"tune-plan-nothing.txt", tuneFacts(func(s *snapshot.Snapshot) { s.Conntrack.Count, s.Conntrack.CountStart = 10, 10 }), nil, nil},
		{"tune-plan-no-limit.txt", tuneFacts(func(s *snapshot.Snapshot) { s.Conntrack.Max = 0 }), nil, nil},
		{"tune-plan-unjudged.txt", tuneFacts(func(s *snapshot.Snapshot) { s.Conntrack.Count, s.Conntrack.CountStart = 10, 10 }), nil, []string{"rule-drop"}},
		{"tune-plan-engine.txt", tuneFacts(func(s *snapshot.Snapshot) {
			s.Engine = &snapshot.Engine{Kind: "ebpf", File: "/etc/natkit.yaml", Sessions: 600, SessionsMax: 1000}
		}), full[:1], nil},
		{"tune-plan-blind.txt", tuneFacts(func(s *snapshot.Snapshot) {
			*s = snapshot.Snapshot{TakenAt: s.TakenAt, Capabilities: []snapshot.Capability{
				{Name: snapshot.CanSysctls, OK: true},
				{Name: snapshot.CanConntrack, Reason: "no such file or directory", Costs: "a full table is not seen"},
			}}
		}), nil, []string{"conntrack-table-full"}},
	} {
		plan, err := tune.MakePlan(c.facts, tune.PlanOptions{Wanted: c.wanted, Unjudged: c.unjudged})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := TunePlanText(&out, plan, "natkit tune apply"); err != nil {
			t.Fatal(err)
		}
		printed(t, c.file, out.Bytes())
	}
}

func TestTuneRecordTexts(t *testing.T) {
	changes := []tune.Change{
		{Setting: tuneMax, Scope: tune.ScopeHost, Old: "262144", New: "524288", MemoryBytes: 96 << 20, Owners: []tune.Owner{}},
		{Setting: tuneTimeWait, Scope: tune.ScopeNamespace, Netns: "blue", Old: "120", New: "30", Owners: []tune.Owner{}},
	}
	at := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	skipped := []tune.Refusal{{Setting: tuneBuckets, Value: "524288", Why: "it has one value for the whole machine"}}
	file := "/etc/sysctl.d/90-natkit.conf"
	restored := []tune.Restored{
		{Setting: file, Outcome: tune.OutcomeRestored},
		{Setting: tuneTimeWait, Netns: "blue", Outcome: tune.OutcomeGone, Detail: "its namespace is gone, and the setting with it"},
		{Setting: tuneMax, Outcome: tune.OutcomeKept, Detail: "somebody set it to 7 since"},
	}
	records := []tune.Record{
		{ID: "20260102-150405", Time: at, State: tune.StateApplied, Changes: changes, Skipped: skipped},
		{ID: "20260102-150405-2", Time: at, State: tune.StateRolledBack, By: "demo", Changes: changes, File: file, Restored: restored},
		{ID: "20260103-150405", Time: at.AddDate(0, 0, 1), State: tune.StateInterrupted, Changes: changes[:1]},
		{State: tune.StatePlanned, Changes: changes, File: file},
		{State: tune.StateUnchanged},
		{State: tune.StateUnchanged, Skipped: skipped},
		{State: tune.StateUnchanged, Unjudged: []string{"rule-drop", "dns-race"}},
	}
	var out bytes.Buffer
	for _, i := range []int{0, 1, 3, 4, 5, 6} {
		if err := TuneApplyText(&out, &records[i], "natkit tune rollback "+records[i].ID); err != nil {
			t.Fatal(err)
		}
		out.WriteString("----\n")
	}
	printed(t, "tune-apply.txt", out.Bytes())

	out.Reset()
	if err := TuneRollbackText(&out, &records[1]); err != nil {
		t.Fatal(err)
	}
	out.WriteString("----\n")
	if err := TuneHistoryText(&out, records[:3]); err != nil {
		t.Fatal(err)
	}
	out.WriteString("----\n")
	if err := TuneHistoryText(&out, nil); err != nil {
		t.Fatal(err)
	}
	printed(t, "tune-history.txt", out.Bytes())

	out.Reset()
	if err := JSON(&out, TuneHistory{Applies: records[:2]}); err != nil {
		t.Fatal(err)
	}
	printed(t, "tune-history.json", out.Bytes())
}

func TestRate(t *testing.T) {
	for v, want := range map[float64]string{0.04321: "0.0432", 12: "12", 99.94: "99.9", 1984.4: "1984", 1e6: "1000000"} {
		if got := rate(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}
