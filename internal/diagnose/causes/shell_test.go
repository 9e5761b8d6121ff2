// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// hostile is a name that an interface may have, and that a shell would obey.
const hostile = "q'$(z)"

// Whatever an interface is called, no command that a finding prints gives its name to a shell as
// program text, not even to the shell that the command starts.
func TestPrintedNames(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	seen := 0
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		for _, netns := range []string{"", "blue", "pid:77"} {
			s := gateway()
			cases[name](s)
			s.Netns.Name, s.Netns.Init = netns, netns == ""
			for _, f := range flat(Judge(renamed(t, s))) {
				for _, line := range slices.Concat(f.Remedy, f.Verify) {
					if strings.HasPrefix(line, "#") || !strings.Contains(line, "$(z)") {
						continue
					}
					seen++
					if text, ok := obeyed(line); ok {
						t.Errorf("%s: %s\na shell reads %q as program text", f.Code, line, text)
					}
				}
			}
		}
	}
	if seen < 20 {
		t.Errorf("%d commands name an interface: are they renamed?", seen)
	}
}

// renamed is s with hostile interface names.
func renamed(t *testing.T, s *snapshot.Snapshot) *snapshot.Snapshot {
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("eth0", hostile+"0", "eth1", hostile+"1", "docker0", hostile+"d").Replace(string(data))
	out := new(snapshot.Snapshot)
	if err := json.Unmarshal([]byte(text), out); err != nil {
		t.Fatal(err)
	}
	return out
}

// obeyed is the program text, of a shell that reads line or that line starts, that has a part of the hostile name.
func obeyed(line string) (text string, ok bool) {
	outside, words := shellWords(line)
	if strings.Contains(outside, "$(z)") {
		return line, true
	}
	for i, w := range words[:len(words)-1] {
		if w == "-c" {
			if text, ok := obeyed(words[i+1]); ok {
				return text, true
			}
		}
	}
	return "", false
}

// shellWords is what of a line is outside of single quotes, and its words.
func shellWords(line string) (outside string, words []string) {
	var word strings.Builder
	for quoted := false; line != ""; line = line[1:] {
		switch c := line[0]; {
		case c == '\'':
			quoted = !quoted
		case quoted:
			word.WriteByte(c)
		case c == '\\' && len(line) > 1:
			line = line[1:]
			word.WriteByte(line[0])
		case c == ' ':
			words = append(words, word.String())
			word.Reset()
			outside += " "
		default:
			word.WriteByte(c)
			outside += string(c)
		}
	}
	return outside, append(words, word.String())
}

// Files of /sys/class/net are the namespace's only where /sys was mounted in it: nsenter alone leaves the host's.
func TestSysfsOfNamespace(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	for _, netns := range []string{"pid:77", "/run/docker/netns/x"} {
		seen := 0
		for _, name := range []string{"softirq-one-cpu", "softirq-delayed"} {
			s := gateway()
			cases[name](s)
			s.Netns.Name = netns
			for _, f := range flat(Judge(s)) {
				for _, line := range f.Remedy {
					if strings.Contains(line, "/sys/class/net") {
						seen++
						if !strings.Contains(line, "mount -t sysfs sysfs /sys &&") {
							t.Errorf("%s: %s", f.Code, line)
						}
					}
				}
			}
		}
		if seen < 2 {
			t.Errorf("%s: %d commands", netns, seen)
		}
	}
}
