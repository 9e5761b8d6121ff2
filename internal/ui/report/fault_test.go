// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"unicode/utf8"

	"natkit/internal/scenario"
	"natkit/internal/snapshot"
)

func TestFaultListFits(t *testing.T) {
	var b strings.Builder
	faults := scenario.Faults()
	if err := FaultList(&b, faults); err != nil {
		t.Fatal(err)
	}
	codes := 0
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns {
			t.Errorf("%d columns: %s", n, line)
		}
		if !strings.HasPrefix(line, " ") {
			codes++
		}
	}
	if codes != len(faults) {
		t.Errorf("%d codes at the beginning of a line, want %d:\n%s", codes, len(faults), b.String())
	}
}

// The command of a step can be pasted.
func TestFaultCommand(t *testing.T) {
	var b strings.Builder
	text := FaultText{W: &b}
	if err := text.Step(&scenario.FaultStep{Name: "healthy", Facts: &snapshot.Snapshot{Netns: snapshot.Netns{Name: "two words"}}}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "$ natkit doctor --netns 'two words'\n") {
		t.Error(b.String())
	}
}
