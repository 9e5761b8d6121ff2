// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Each flag that is a time takes a number of seconds as well as one with a unit, and says the same of
// what is neither.
func TestTimesAreTakenAlike(t *testing.T) {
	times := 0
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			switch f.Value.Type() {
			case "duration":
				t.Errorf("%s --%s has a parser of its own", c.CommandPath(), f.Name)
			case "seconds":
				times++
				for text, want := range map[string]string{"10": "10s", "500ms": "500ms", "2m": "2m0s", "0.5": "500ms"} {
					if err := f.Value.Set(text); err != nil || f.Value.String() != want {
						t.Errorf("%s --%s %s: %s, %v", c.CommandPath(), f.Name, text, f.Value, err)
					}
				}
				for _, text := range []string{"x", "-1", "", "10 s", "1e9", "1000h"} {
					if f.Value.Set(text) == nil {
						t.Errorf("%s --%s %q is taken for %s", c.CommandPath(), f.Name, text, f.Value)
					}
				}
			}
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&env{}))
	if times < 12 {
		t.Errorf("only %d flags are times", times)
	}
}

// An empty name, as of a script's variable that is not set, must not mean the host's namespace.
func TestNamespaceIsNotEmpty(t *testing.T) {
	code, stdout, stderr := runBad(t, "", "status", "--netns", "")
	refused(t, []string{"status", "--netns", ""}, code, stdout, stderr)
	if code != exitUsage {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
