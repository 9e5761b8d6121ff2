// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// On a pipe work that is done soon says nothing, and long work a line every ten seconds.
func TestProgressOnPipe(t *testing.T) {
	var out bytes.Buffer
	now := time.Now()
	line := newProgressLine(&env{stderr: &out})
	line.now = func() time.Time { return now }
	line.last = now
	for second := range 31 {
		line.show("second %d", second)
		now = now.Add(time.Second)
	}
	line.clear()
	if want := "natkit: second 10\nnatkit: second 20\nnatkit: second 30\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	out.Reset()
	line.say("a row")
	line.show("soon after it")
	if out.String() != "natkit: a row\n" {
		t.Errorf("%q", out.String())
	}
}

// A file that takes its time to be read shows how much of it is.
func TestProgressOfReading(t *testing.T) {
	var out bytes.Buffer
	now := time.Now()
	line := newProgressLine(&env{stderr: &out})
	line.now = func() time.Time { now = now.Add(6 * time.Second); return now }
	line.last = now
	in := line.counts(strings.NewReader("four bytes"), "facts.json")
	for range 4 {
		in.Read(make([]byte, 4))
	}
	if !strings.Contains(out.String(), "natkit: facts.json: 0 MiB read\n") {
		t.Errorf("%q", out.String())
	}
}

// On a narrow terminal a line takes one row: what is on a second one would stay.
func TestProgressFits(t *testing.T) {
	var out bytes.Buffer
	line := newProgressLine(&env{stderr: &out})
	line.terminal, line.width = true, func() int { return 20 }
	line.show("doctor: [%s] %s", strings.Repeat("#", 30), "reading end values")
	if want := "\r\x1b[Kdoctor: [##########"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	out.Reset()
	line.width = func() int { return 0 }
	if line.show("whole"); out.String() != "\r\x1b[Kwhole" {
		t.Errorf("%q", out.String())
	}
}

// onlyProgress tells whether stderr holds nothing but lines about how far a measurement is.
func onlyProgress(stderr string) bool {
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "natkit: ") || strings.Contains(line, "error") {
			return false
		}
	}
	return true
}
