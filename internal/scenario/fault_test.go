// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// onlyTraced are the causes that no counter of a namespace tells of.
var onlyTraced = map[string]bool{"martian-drop": true, "rule-drop": true, "next-hop-silent": true, "other-drops": true,
	"conntrack-helper-missing": true}

// onlyByRules are the causes that can't be told without the rules.
var onlyByRules = map[string]bool{"needless-hooks": true, "stale-udp-dnat": true, "stale-snat": true, "rule-chain-long": true, "iptables-two-backends": true,
	"snat-port-race": true, "rule-drop": true, "answers-lost": true}

// slow are the scenarios that fill a table of some hundred thousand entries. With
// -short they are left out, and of the others one for each topology is played: they
// share nearly all of their code.
var slow = map[string]bool{"conntrack-table-full": true, "conntrack-table-nearly-full": true, "time-wait-heavy": true,
	"conntrack-early-drop": true, "established-timeout-long": true, "close-wait-heavy": true}

// Every cause has a scenario: the doctor is silent about what only looks like
// it, names the fault first, and is silent after the finding's own commands were
// run. Nothing of the lab is left.
func TestFaults(t *testing.T) {
	ktest.Root(t)
	// The remedies are run as the findings give them.
	ktest.Tool(t, "nft")
	ktest.Tool(t, "iptables-nft")
	ktest.Tool(t, "iptables-legacy")
	ktest.Tool(t, "conntrack")
	ktest.Tool(t, "ip")
	ktest.Tool(t, "sysctl")
	ktest.Tool(t, "arping")
	faults := Faults()
	for _, c := range causes.Catalogue() {
		shown := slices.ContainsFunc(faults, func(f Fault) bool { return f.Code == c.Code })
		if shown != (c.NoLab == "") {
			t.Errorf("%s has a scenario: %v, and is said to have none because %q", c.Code, shown, c.NoLab)
		}
	}
	played := map[string]bool{} // topologies
	for _, f := range faults {
		if testing.Short() {
			if slow[f.Code] || played[f.topology] {
				continue
			}
			played[f.topology] = true
		}
		t.Run(f.Code, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
			defer cancel()
			began := time.Now()
			printed := newPrinted(t, false)
			run := func(window time.Duration) ([]FaultStep, error) {
				return f.Run(ctx, FaultOptions{Window: window, command: printed.command, check: printed.check, Step: func(s *FaultStep) error {
					t.Logf("%s after %v: %s", s.Name, time.Since(began).Round(10*time.Millisecond), titles(s.Findings))
					for _, c := range s.Commands {
						t.Logf("  %s", c)
					}
					checkPrinted(t, s.Findings)
					return nil
				}})
			}
			steps, err := run(500 * time.Millisecond)
			if err != nil {
				// Half a second may fall between two retransmissions; what is promised
				// is promised of the window that the doctor looks at by itself.
				t.Logf("in half a second: %v", err)
				steps, err = run(0)
			}
			if err != nil {
				for _, s := range steps {
					for _, c := range s.Facts.Capabilities {
						if !c.OK {
							t.Logf("%s: not seen: %s: %s", s.Name, c.Name, c.Reason)
						}
					}
				}
				t.Fatal(err)
			}
			var others []string
			for _, s := range steps {
				inside := *s.Facts
				inside.Netns.Name = ""
				findings := causes.Judge(&inside)
				namesNoNamespace(t, findings)
				ran := bareCommands(s.Findings)
				others = append(others, slices.DeleteFunc(bareCommands(findings), func(line string) bool { return slices.Contains(ran, line) })...)
			}
			otherInside.Store(f.Code, others)
			if len(steps) != 3 || len(steps[2].Commands) == 0 && f.Note == "" {
				t.Errorf("%d steps, cured by %q", len(steps), steps[len(steps)-1].Commands)
			}
			for _, blind := range []struct {
				what  string
				close func(s *snapshot.Snapshot)
			}{
				{"the tracer", func(s *snapshot.Snapshot) { s.Drops = nil }},
				{"the kernel log", func(s *snapshot.Snapshot) { s.KernelLog = nil }},
				{"hooks", func(s *snapshot.Snapshot) { s.Hooks = nil }},
				{"rules", func(s *snapshot.Snapshot) { s.Chains = nil }},
			} {
				if blind.what == "hooks" && f.Code == "needless-hooks" || blind.what == "the tracer" && onlyTraced[f.Code] || blind.what == "rules" && onlyByRules[f.Code] {
					continue
				}
				facts := *steps[1].Facts
				blind.close(&facts)
				if found := causes.Judge(&facts); len(found) == 0 || found[0].Code != f.Code {
					t.Errorf("without %s: %s", blind.what, titles(found))
				}
			}
		})
	}
}

// otherInside has of the faults (by code) that TestFaults has played those commands for a shell
// inside of the namespace that it did not run, without the words that lead into it.
var otherInside sync.Map

// bareCommands are all commands of findings, without those words.
func bareCommands(findings []causes.Finding) (lines []string) {
	for _, f := range findings {
		for _, line := range slices.Concat(f.Remedy, f.Verify) {
			lines = append(lines, bare(line))
		}
		lines = append(lines, bareCommands(f.Consequences)...)
	}
	return lines
}

// The same cures and checks work in a shell inside of the namespace, where no command
// names it: a machine of its own, or a container. Those that TestFaults has run are not run
// again, nor those that differ from another fault's in their numbers only.
func TestCuresFromInside(t *testing.T) {
	ktest.Root(t)
	number := regexp.MustCompile(`[0-9]+`)
	run := map[string]bool{}
	for _, f := range Faults() {
		others, played := otherInside.Load(f.Code)
		if !played && testing.Short() {
			continue
		}
		if played {
			more := false
			for _, line := range others.([]string) {
				line = number.ReplaceAllString(line, "0")
				more = more || !run[line]
				run[line] = true
			}
			if !more {
				continue
			}
		}
		t.Run(f.Code, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
			defer cancel()
			printed := newPrinted(t, true)
			run := func(window time.Duration) error {
				steps, err := f.Run(ctx, FaultOptions{Window: window, inside: true, command: printed.command, check: printed.check, Step: func(s *FaultStep) error {
					for _, c := range s.Commands {
						t.Logf("%s: %s", s.Name, c)
					}
					checkPrinted(t, s.Findings)
					return nil
				}})
				if len(steps) > 1 {
					namesNoNamespace(t, steps[1].Findings)
				}
				return err
			}
			err := run(500 * time.Millisecond)
			if err != nil {
				t.Logf("in half a second: %v", err)
				err = run(0)
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Whoever interrupts a scenario reads that, and not which command was killed for it.
func TestFaultInterrupted(t *testing.T) {
	ktest.Root(t)
	ctx, interrupt := context.WithCancel(t.Context())
	f := Fault{Code: "link-down", healthy: do(func(context.Context, *faultRun) error {
		time.AfterFunc(100*time.Millisecond, interrupt)
		return nil
	}, onGateway("exec sleep 30"))}
	if steps, err := f.Run(ctx, FaultOptions{}); !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "sleep") || len(steps) > 0 {
		t.Errorf("%d steps, %v", len(steps), err)
	}
}

// What the scenarios made is gone.
func TestFaultsLeaveNothing(t *testing.T) {
	ktest.Root(t)
	infos, err := lab.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range infos {
		if i.State == lab.StateRemains {
			t.Errorf("lab %s was left", i.Name)
		}
	}
}

func titles(findings []causes.Finding) string {
	var out []string
	for _, f := range findings {
		out = append(out, f.Severity.String()+" "+f.Code+": "+f.Title)
	}
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, "\n    ")
}
