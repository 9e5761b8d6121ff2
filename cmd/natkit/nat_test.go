// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

func TestNATUsage(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(rules, []byte("inside: [a]\noutside: [b]\nrules:\n  - masquerade: 10.0.0.0/8\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ args, says string }{
		{"up", "give --file"},
		{"up -f " + rules + " --engine magic", `--engine "magic": want ebpf or nft`},
		{"up -f " + rules + " --attach wall", `--attach "wall": want auto, xdp or tc`},
		{"apply", "give --file"},
		{"up -f " + rules + " -o xml", "want text or json"},
		{"sessions --source here", `--source "here": want an IPv4 address or prefix`},
		{"sessions --protocol 300", `--protocol "300": want tcp`},
		{"sessions --state odd", `--state "odd": want udp, tcp_opening`},
		{"sessions --rule xyz", `--rule: "xyz" is not`},
		{"subscribers --by size", `--by "size": want ports, sessions, blocks, refused or share`},
		{"subscribers --rows -1", "--rows -1: want 0 or more"},
		{"subscribers fe80::1", `"fe80::1": want an IPv4 address or prefix`},
		{"events --kind born", `--kind "born": want created, ended or refused`},
		{"explain nonsense", "is not of the form"},
		{"explain", "want natkit explain PACKET"},
		{"explain external 203.0.113.1", `"203.0.113.1": want an IPv4 address and a port`},
		{"explain subscriber here", `"here": want an IPv4 address`},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, exitUsage, tt.says)
		}
	}
}

// twoLinks makes a namespace with the links "in" and "out", each with an address, and returns its name.
func twoLinks(t *testing.T) string {
	t.Helper()
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(ns.Close(), netns.Delete(name)) })
	if err := ns.Do(func() error {
		var errs []error
		for i, link := range []string{"in", "out"} {
			errs = append(errs, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: link}, PeerName: link + "-peer"}))
			l, err := netlink.LinkByName(link)
			peer, err2 := netlink.LinkByName(link + "-peer")
			address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, byte(i), 1).To4(), Mask: net.CIDRMask(24, 32)}}
			errs = append(errs, err, err2, netlink.AddrAdd(l, address), netlink.LinkSetUp(l), netlink.LinkSetUp(peer))
		}
		return errors.Join(errs...)
	}); err != nil {
		t.Fatal(err)
	}
	return name
}

// The life of a gateway by its commands: dry run, up, what shows it, apply, down.
func TestNATCommands(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	name := twoLinks(t)
	path := filepath.Join(t.TempDir(), "nat.yaml")
	write := func(rule string) {
		text := "inside: [in]\noutside: [out]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - " + rule + "\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	natkit := func(want int, args string) string {
		t.Helper()
		code, stdout, stderr := observed(t.Context(), args+" --netns "+name)
		if code != want || (want == exitOK) != (stderr == "") {
			t.Fatalf("natkit %s: exit %d, want %d: %s%s", args, code, want, stdout, stderr)
		}
		return stdout + stderr
	}
	says := func(got, want string) {
		t.Helper()
		if !strings.Contains(got, want) {
			t.Errorf("got %q, want %q in it", got, want)
		}
	}
	for _, command := range []string{"status", "rules", "subscribers", "sessions", "mappings", "down", "events"} {
		says(natkit(exitError, command), "natkit is not the gateway here")
	}
	write("masquerade: 10.0.0.0/24")
	says(natkit(exitError, "apply -f "+path), "natkit is not the gateway here")
	says(natkit(exitError, "up -f "+path+".gone"), "read rule file")
	says(natkit(exitOK, "up --dry-run -f "+path), "Would be up")
	says(natkit(exitError, "status"), "natkit is not the gateway here")
	var out strings.Builder
	packet := []string{"explain", "--netns", name, "-f", path, "tcp 10.0.0.9:1 -> 10.0.1.9:80 in in"}
	if code := run(t.Context(), packet, &env{stdout: &out, stderr: &out}); code != exitOK {
		t.Errorf("explain: exit %d", code)
	}
	says(out.String(), "masquerade: 10.0.0.0/24 (line 5)")

	var plan report.NATPlan
	if err := json.Unmarshal([]byte(natkit(exitOK, "up -o json -f "+path)), &plan); err != nil || !plan.Done || len(plan.Placements) != 2 {
		t.Errorf("plan %+v, %v", plan, err)
	}
	says(natkit(exitError, "up -f "+path), "is up already")
	says(natkit(exitOK, "status"), "engine ebpf")
	var status control.Status
	if err := json.Unmarshal([]byte(natkit(exitOK, "status -o json")), &status); err != nil || status.Rules != 1 || len(status.Interfaces) != 2 || status.Stats == nil {
		t.Errorf("status %+v, %v", status, err)
	}
	says(natkit(exitOK, "rules"), "masquerade: 10.0.0.0/24")
	if out := natkit(exitOK, "sessions") + natkit(exitOK, "mappings -o json"); out != "" {
		t.Errorf("sessions and mappings of nobody: %q", out)
	}
	// What shows the kernel's table says that these sessions are not in it.
	for _, command := range []string{"conntrack stats", "conntrack top", "conntrack memory"} {
		says(natkit(exitOK, command), "`natkit --netns "+name+" sessions`")
		says(natkit(exitOK, command+" -o json"), `"engine": "ebpf"`)
	}
	_, stdout, stderr := observed(t.Context(), "conntrack list --netns "+name)
	if !strings.Contains(stderr, "the eBPF engine translates here") || strings.Contains(stdout, "engine") {
		t.Errorf("conntrack list: %q, %q", stdout, stderr)
	}
	says(natkit(exitOK, "tune plan --for 100ms"), "has its own sessions (0 of 1000)")
	says(natkit(exitOK, "hooks"), "bypass these hooks")
	says(natkit(exitOK, "hooks --cost --for 200ms -o json"), `"engine": "ebpf"`)
	says(natkit(exitOK, "top --once -o json"), `"engine_rates"`)
	write("masquerade: 10.0.0.0/25")
	for _, dry := range []string{" --dry-run", ""} {
		out := natkit(exitOK, "apply -f "+path+dry)
		says(out, "+ masquerade: 10.0.0.0/25")
		says(out, "- masquerade: 10.0.0.0/24")
	}
	write("masquerade: 10.0.0.0/25\n  - nonsense: 1")
	says(natkit(exitError, "apply -f "+path), "nat.yaml:6:")
	says(natkit(exitOK, "rules -o json"), "masquerade: 10.0.0.0/25")
	says(natkit(exitOK, "down"), "Down; the namespace is as it was.")

	write("masquerade: 10.0.0.0/24")
	says(natkit(exitOK, "up --engine nft -f "+path), "Up on engine nft")
	says(natkit(exitError, "sessions"), "natkit conntrack list")
	says(natkit(exitOK, "rules"), "uses")
	says(natkit(exitOK, "conntrack stats"), "with label 110 (0 of 0 entries)")
	if out := natkit(exitOK, "tune plan --for 100ms"); strings.Contains(out, "its own sessions") {
		t.Errorf("what is for the eBPF engine: %s", out)
	}
	says(natkit(exitOK, "down -o json"), `"kept": []`)
}

var endpoint = netip.MustParseAddrPort

// A rule's id has one form, in text and JSON, of rules, sessions and events, and --rule takes it.
func TestRuleIDsHaveOneForm(t *testing.T) {
	s := rulefile.Session{Protocol: rulefile.TCP, Rule: 0x0a0b0c0d}
	const form = "0a0b0c0d"
	var shown strings.Builder
	use := 1
	check := func(what string, err error) {
		t.Helper()
		if err != nil || !strings.Contains(shown.String(), form) || strings.Contains(shown.String(), "168496141") {
			t.Errorf("%s: %q, %v", what, shown.String(), err)
		}
		shown.Reset()
	}
	rules := []control.RuleUse{{ID: s.Rule, Rule: "masquerade: any", Sessions: &use}}
	check("rules", report.NATRulesText(&shown, rules))
	check("rules as JSON", report.JSON(&shown, report.NATRules{Rules: rules}))
	shown.Write(report.AppendNATSession(nil, &s))
	check("session", nil)
	check("session as JSON", report.JSONLine(&shown, &s))
	check("event as JSON", report.JSONLine(&shown, &rulefile.Event{Session: s}))
	for _, text := range []string{form, strings.ToUpper(form), "a0b0c0d"} {
		f := sessionFilter{rule: text}
		if err := f.parse(); err != nil || !f.wants(&s) {
			t.Errorf("--rule %s: %v", text, err)
		}
	}
	for _, text := range []string{"168496141", "0x0a0b0c0d", "-1", "rule"} {
		f := sessionFilter{rule: text}
		if err := f.parse(); err == nil || !strings.Contains(err.Error(), "natkit rules") || strings.Contains(err.Error(), "strconv") {
			t.Errorf("--rule %s: %v", text, err)
		}
	}
}

func TestSessionFilter(t *testing.T) {
	s := rulefile.Session{Protocol: rulefile.TCP, State: "tcp_established", Rule: 0xab}
	s.Source, s.SourceAfter = snapshot.EndpointOf(endpoint("10.0.0.1:5")), snapshot.EndpointOf(endpoint("192.0.2.1:5"))
	s.Destination, s.DestinationAfter = snapshot.EndpointOf(endpoint("198.51.100.1:80")), snapshot.EndpointOf(endpoint("198.51.100.1:80"))
	for _, tt := range []struct {
		f    sessionFilter
		want bool
	}{
		{sessionFilter{}, true},
		{sessionFilter{source: "10.0.0.0/8", protocol: "tcp", state: "tcp_established", rule: "ab"}, true},
		{sessionFilter{source: "192.0.2.1"}, true},
		{sessionFilter{source: "192.0.2.2"}, false},
		{sessionFilter{destination: "198.51.100.0/24"}, true},
		{sessionFilter{destination: "10.0.0.1"}, false},
		{sessionFilter{protocol: "udp"}, false},
		{sessionFilter{state: "dead"}, false},
		{sessionFilter{rule: "ac"}, false},
	} {
		if err := tt.f.parse(); err != nil {
			t.Fatal(err)
		}
		if got := tt.f.wants(&s); got != tt.want {
			t.Errorf("%+v: %v", tt.f, got)
		}
	}
	ended := s
	ended.State = rulefile.StateDead
	if open, dead := (&sessionFilter{}), (&sessionFilter{state: rulefile.StateDead}); !open.lists(&s) || open.lists(&ended) || !dead.lists(&ended) || dead.lists(&s) {
		t.Error("a session that has ended is listed with the open ones, or not where it is asked for")
	}
	for left, want := range map[time.Duration]string{time.Millisecond: "ends in 1s,", 1500 * time.Millisecond: "ends in 2s,", 30 * time.Second: "ends in 30s,"} {
		s.Expires = snapshot.Seconds(left)
		if line := string(report.AppendNATSession(nil, &s)); !strings.Contains(line, want) {
			t.Errorf("%v left: %s", left, line)
		}
	}
}
