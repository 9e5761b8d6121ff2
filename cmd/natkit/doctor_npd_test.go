// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/snapshot"
)

// node-problem-detector takes exit code 1 for a problem of the node and everything but 0 and 1
// for unknown, and the first 80 bytes of what is printed.
func TestDoctorNPD(t *testing.T) {
	full := saved(t, fullFacts())
	for _, c := range []struct {
		name, stdin, args string
		code              int
		says              string
	}{
		{"critical", full, "--from -", 1, "conntrack-table-full: "},
		{"not all judged", saved(t, healthyFacts()), "--from -", 2, "could not be judged: "},
		{"no file", "", "--from /nowhere", 2, "natkit doctor failed: "},
		{"damaged", "{", "--from -", 2, "natkit doctor failed: "},
		{"a wrong use", full, "--from - --for 3s", 2, "natkit doctor failed: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errs := doctor(t, t.Context(), c.stdin, append(strings.Fields(c.args), "-o", "npd")...)
			if code != c.code || !strings.Contains(out, c.says) || strings.Count(out, "\n") != 1 || len(strings.TrimSpace(out)) > 80 {
				t.Errorf("exit code %d, %q, %q; want %d, %q", code, out, errs, c.code, c.says)
			}
			if failed := strings.Contains(c.says, "failed"); failed != (errs != "") {
				t.Errorf("standard error: %q", errs)
			}
		})
	}
	both := fullFacts()
	both.Netns = snapshot.Netns{Inode: 7, Container: "pod shop/cart"}
	var file strings.Builder
	w := snapshot.NewWriter(&file)
	for _, s := range []*snapshot.Snapshot{healthyFacts(), both} {
		if err := w.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.End(snapshot.LeftOut{}); err != nil {
		t.Fatal(err)
	}
	if code, out, errs := doctor(t, t.Context(), file.String(), "--from", "-", "-o", "npd"); code != 1 || !strings.Contains(out, " in pod shop/cart: ") {
		t.Errorf("a pod: exit code %d, %q, %q", code, out, errs)
	}
}

// The configuration for node-problem-detector runs a command that natkit has, in the time that
// the detector gives it.
func TestNPDConfig(t *testing.T) {
	text, err := os.ReadFile("../../deploy/kubernetes/node-problem-detector/natkit.json")
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		PluginConfig struct {
			Interval string `json:"invoke_interval"`
			Timeout  string
			Most     int `json:"max_output_length"`
		}
		Conditions []struct{ Type string }
		Rules      []struct {
			Condition, Timeout string
			Args               []string
		}
	}
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	rule := config.Rules[0]
	root := newRoot(&env{})
	cmd, args, err := root.Find(rule.Args)
	if err != nil || cmd.Name() != "doctor" || cmd.ParseFlags(args) != nil {
		t.Fatalf("%q: %v", rule.Args, err)
	}
	if out := cmd.Flags().Lookup("output").Value.String(); out != "npd" || config.PluginConfig.Most != 80 || config.Conditions[0].Type != rule.Condition {
		t.Errorf("output %s of at most %d bytes, conditions %v", out, config.PluginConfig.Most, config.Conditions)
	}
	var times []time.Duration
	for _, text := range []string{rule.Args[slices.Index(rule.Args, "--for")+1], rule.Timeout, config.PluginConfig.Timeout, config.PluginConfig.Interval} {
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatal(err)
		}
		times = append(times, d)
	}
	// npd refuses a rule whose time-out is above the global one; a doctor of many namespaces takes longer than its window.
	if times[1] < 2*times[0]+10*time.Second || times[1] > times[2] || times[2] > times[3] {
		t.Errorf("window, time-out, its limit, interval: %v", times)
	}
}
