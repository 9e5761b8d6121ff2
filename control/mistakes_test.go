// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"natkit/nft"
	"natkit/snapshot"
)

// What an engine that is up can't become is said by a dry run as well, with what differs.
func TestApplyOtherLimits(t *testing.T) {
	b := newBed(t)
	o := Options{Namespace: b.gateway, Attach: AttachTC}
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); err != nil {
		t.Fatal(err)
	}
	wider := strings.Replace(baseRules, "sessions: 4096", "sessions: 5000", 1)
	_, planned := PlanApply(b.parse(wider), wider, o)
	_, applied := Apply(t.Context(), b.parse(wider), wider, o)
	for what, err := range map[string]error{"dry run": planned, "apply": applied} {
		if err == nil || !strings.Contains(err.Error(), "5000 instead of 4096 sessions") || strings.Contains(err.Error(), "sources") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := PlanApply(b.parse(baseRules), baseRules, o); err != nil {
		t.Errorf("dry run of the same: %v", err)
	}
}

func TestUpInterfaceMissing(t *testing.T) {
	b := newBed(t)
	text := strings.Replace(baseRules, "outside: [out]", "outside: [out, gone]", 1)
	_, err := Up(t.Context(), b.parse(text), text, Options{Namespace: b.gateway})
	if err == nil || !strings.HasSuffix(err.Error(), `:3:16: interface "gone" is not there`) {
		t.Errorf("up: %v", err)
	}
}

// Chains by which the kernel translates too are told: of connections that they send
// inside, the engine sees the answers only.
func TestKernelNATIsTold(t *testing.T) {
	chains := []snapshot.Chain{
		{Family: "ip", Table: "nat", Name: "DOCKER", NATRules: map[string]int{"dnat": 2, "redirect": 1}},
		{Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", NATRules: map[string]int{"masquerade": 4}},
		{Family: "ip6", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", NATRules: map[string]int{"masquerade": 4}},
		{Family: "ip", Table: "nat", Name: "OUTPUT", Hook: "output", Type: "nat"},
	}
	b := newBed(t)
	p, err := MakePlan(b.parse(baseRules), baseRules, Options{Namespace: b.gateway, Chains: chains})
	if err != nil {
		t.Fatal(err)
	}
	told := func(start string) bool {
		return slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.HasPrefix(w, start) })
	}
	if !told("chain ip nat/DOCKER has 3 rules by which the kernel sends connections") ||
		!told("chain ip nat/POSTROUTING has 4 rules by which the kernel translates sources") ||
		told("chain ip6") || told("chain ip nat/OUTPUT") || len(p.Bypassed) != 0 {
		t.Errorf("warnings %q, bypassed %v", p.Warnings, p.Bypassed)
	}
}

// A record that somebody has damaged is told with what helps, and is in nobody's way in
// other namespaces; down takes down what is there.
func TestDamagedRecord(t *testing.T) {
	b := newBed(t)
	before := b.state()
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		o := Options{Namespace: b.gateway, Engine: engine}
		if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(instancePath(b.gateway.Inode(), ".json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadStatus(b.gateway); !errors.Is(err, errRecord) || !strings.Contains(err.Error(), "natkit down") {
			t.Errorf("%s: status: %v", engine, err)
		}
		if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); !errors.Is(err, errRecord) {
			t.Errorf("%s: up: %v", engine, err)
		}
		if removed, err := Clean(); err != nil || removed != 0 {
			t.Errorf("%s: clean removed %d, %v", engine, removed, err)
		}
		if _, err := Down(b.gateway); err != nil {
			t.Errorf("%s: down: %v", engine, err)
		}
		if after := b.state(); after != before {
			t.Errorf("%s: after down:\n%s\nbefore up:\n%s", engine, after, before)
		}
		if there, err := nft.RulesThere(b.gateway); err != nil || there {
			t.Errorf("%s: table natkit is there: %t, %v", engine, there, err)
		}
	}
}

func TestDamagedJournal(t *testing.T) {
	b := newBed(t)
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err != nil {
		t.Fatal(err)
	}
	path := instancePath(b.gateway.Inode(), ".journal")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("no entry\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Down(b.gateway); err == nil || !strings.Contains(err.Error(), "without the file `natkit down`") {
		t.Errorf("down: %v", err)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
}
