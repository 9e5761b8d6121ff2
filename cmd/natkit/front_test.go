// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/testutil/ktest"
)

// natkit alone names what translates in a namespace, and what was dropped there, with the cause.
func TestFrontCommand(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()
	says := func(want ...string) {
		t.Helper()
		code, stdout, stderr := observed(t.Context(), "--netns "+name)
		for try := 0; try < 10 && strings.Contains(stdout, "it took too long"); try++ { // the machine is busy
			code, stdout, stderr = observed(t.Context(), "--netns "+name)
		}
		if code != exitOK || stderr != "" {
			t.Fatalf("exit %d, %q", code, stderr)
		}
		for _, w := range want {
			if !strings.Contains(stdout, w) {
				t.Errorf("no %q in\n%s", w, stdout)
			}
		}
	}
	says("table  ", "drops  none in the last", "NAT    nothing translates", "natkit doctor --netns "+name)
	if err := nft.OneToOne(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("192.0.2.2"), "lo").Apply(ns); err != nil {
		t.Fatal(err)
	}
	says("table  0 of ", "NAT    kernel, ", " in nft table ip ")
}

// Every command stands in a group, but for those about natkit itself.
func TestGroups(t *testing.T) {
	root := testRoot()
	var titles []string
	for _, g := range root.Groups() {
		titles = append(titles, g.Title)
	}
	if got := strings.Join(titles, " "); got != "Diagnose: Watch: Fix: Gateway: Accelerate: Measure: Lab:" {
		t.Error(got)
	}
	for _, cmd := range root.Commands() {
		if name := cmd.Name(); cmd.GroupID == "" && name != "version" {
			t.Errorf("%s is in no group", name)
		}
	}
}

// One line says what a command does: it begins with what a reader wants done.
func TestOneLine(t *testing.T) {
	verbs := []string{"Show", "List", "Find", "Change", "Measure", "Create", "Remove", "Start", "Stop", "Run", "Convert", "Count", "Build", "Accelerate", "Turn", "Follow", "Compare", "Keep"}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		verb, _, _ := strings.Cut(cmd.Short, " ")
		known := false
		for _, v := range verbs {
			known = known || v == verb
		}
		if !cmd.Hidden && (!known || len(cmd.Short) > 80 || strings.HasSuffix(cmd.Short, ".")) {
			t.Errorf("%s: %q", cmd.CommandPath(), cmd.Short)
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(testRoot())
}
