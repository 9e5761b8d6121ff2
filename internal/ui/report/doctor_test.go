// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

// doctored is a machine with something of everything that can be shown.
func doctored() (*snapshot.Snapshot, []causes.Finding) {
	s := &snapshot.Snapshot{
		TakenAt: time.Date(2026, 11, 21, 1, 2, 3, 0, time.UTC), WindowSeconds: 10.04,
		Host:  snapshot.Host{Hostname: "gw1", Kernel: "6.18.44", CPUs: 2},
		Netns: snapshot.Netns{Name: "blue", Inode: 4026532322},
		Capabilities: []snapshot.Capability{
			{Name: snapshot.CanConntrack, OK: true},
			{Name: snapshot.CanDrops, Reason: "trace drops: not possible here: run as root, or with the capabilities CAP_BPF and CAP_PERFMON", Costs: "where the kernel drops packets and why is not told"},
			{Name: snapshot.CanConntrackDump, Reason: "not requested"},
		},
		Conntrack: &snapshot.Conntrack{Count: 1000, Max: 1000, Buckets: 65536},
	}
	findings := []causes.Finding{
		{
			Code: "conntrack-table-full", Severity: causes.Critical,
			Title: "The connection tracking table is full: 1000 of 1000 entries; 5310 packets of new connections were dropped in 10 s",
			Evidence: []causes.Evidence{
				{What: "entries", Value: "1000 of 1000", Source: "/proc/sys/net/netfilter/nf_conntrack_count"},
				{What: "packets refused", Value: "5310", Source: "/proc/net/stat/nf_conntrack: drop, insert_failed is 0"},
			},
			Why: "A packet of a new connection needs an entry. Established connections go on, so the machine looks healthy from where you are logged in.",
			Remedy: []string{
				"# room for 262144 entries takes 96 MiB at most:",
				"sysctl -w net.netfilter.nf_conntrack_max=262144",
				"ip netns exec blue sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30 # a very long command is never broken",
			},
			Verify:   []string{"natkit doctor --netns blue"},
			Settings: []snapshot.Setting{{Name: "net.netfilter.nf_conntrack_max", Value: "262144"}},
			Consequences: []causes.Finding{
				{Code: "time-wait-heavy", Severity: causes.Warning, Title: "928 of 1000 entries are in TIME_WAIT",
					Consequences: []causes.Finding{{Code: "conntrack-hash-too-small", Severity: causes.Advice, Title: "The hash is small"}}},
			},
		},
		{Code: "br-netfilter-overhead", Severity: causes.Advice, Title: "Bridged frames walk the IP hooks"},
	}
	return s, findings
}

func TestDoctorText(t *testing.T) {
	s, findings := doctored()
	healthy := *s
	healthy.Netns.Name = ""
	healthy.Capabilities = healthy.Capabilities[:1]
	healthy.Conntrack = &snapshot.Conntrack{Count: 180, Max: 262144}
	healthy.Chains = make([]snapshot.Chain, 14)
	healthy.Sysctls = map[string]string{"net.ipv4.ip_forward": "1"}
	for name, c := range map[string]struct {
		s        *snapshot.Snapshot
		findings []causes.Finding
	}{
		"doctor.txt":         {s, findings},
		"doctor-healthy.txt": {&healthy, nil},
		"doctor-blind.txt":   {&snapshot.Snapshot{}, nil},
	} {
		var b bytes.Buffer
		if err := DoctorText(&b, c.s, c.findings, false); err != nil {
			t.Fatal(err)
		}
		printed(t, name, b.Bytes())
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns && !strings.Contains(line, "sysctl") {
				t.Errorf("%s: line of %d columns: %s", name, n, line)
			}
			if strings.TrimRight(line, " \n") != strings.TrimSuffix(line, "\n") {
				t.Errorf("%s: spaces at the end of %q", name, line)
			}
		}

		// With colours it is the same text.
		var colored bytes.Buffer
		if err := DoctorText(&colored, c.s, c.findings, true); err != nil {
			t.Fatal(err)
		}
		plain := regexp.MustCompile("\x1b\\[[0-9;]*m").ReplaceAllString(colored.String(), "")
		if plain != b.String() {
			t.Errorf("%s: colours change the text:\n%s", name, plain)
		}
		if len(c.findings) > 0 && !strings.Contains(colored.String(), "\x1b[1;31mCRITICAL") {
			t.Errorf("%s: no colour", name)
		}
	}
}

// The JSON form is a promise.
func TestDoctorJSON(t *testing.T) {
	s, findings := doctored()
	var b bytes.Buffer
	if err := JSON(&b, Doctor(s, findings)); err != nil {
		t.Fatal(err)
	}
	printed(t, "doctor.json", b.Bytes())

	b.Reset()
	if err := JSON(&b, Doctor(&snapshot.Snapshot{}, nil)); err != nil {
		t.Fatal(err)
	}
	var empty map[string]any
	if err := json.Unmarshal(b.Bytes(), &empty); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"capabilities", "findings"} {
		if list, ok := empty[key].([]any); !ok || len(list) != 0 {
			t.Errorf("%s is %v, want an empty list", key, empty[key])
		}
	}
	for _, key := range []string{"kernel", "interval_s"} {
		if _, ok := empty[key]; !ok {
			t.Errorf("no key %s", key)
		}
	}
}

// A limit of 0 is none: a table without one is not said to have more entries than it may.
func TestTableWithoutLimit(t *testing.T) {
	s := &snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Count: 5}}
	var text, page strings.Builder
	if err := errors.Join(DoctorText(&text, s, nil, false), DoctorHTML(&page, s, nil)); err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{text.String(), page.String()} {
		if !strings.Contains(strings.Join(strings.Fields(got), " "), "5 entries, no limit") || strings.Contains(got, "of 0") {
			t.Error(got)
		}
	}
}

// The first line counts findings in English.
func TestCountsOfFindings(t *testing.T) {
	for n, want := range map[int]string{1: "1 critical, 1 warning, 1 advice", 2: "2 critical, 2 warnings, 2 advice"} {
		var findings []causes.Finding
		for range n {
			findings = append(findings, causes.Finding{Severity: causes.Critical}, causes.Finding{Severity: causes.Warning}, causes.Finding{Severity: causes.Advice})
		}
		var b strings.Builder
		if err := DoctorText(&b, &snapshot.Snapshot{}, findings, false); err != nil || !strings.Contains(b.String(), want) {
			t.Errorf("no %q, %v:\n%s", want, err, b.String())
		}
	}
}
