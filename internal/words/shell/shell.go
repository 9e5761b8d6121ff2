// SPDX-License-Identifier: Apache-2.0

// Package shell writes commands that can be pasted into a shell.
package shell

import "strings"

// Quote makes s one word.
func Quote(s string) string {
	special := func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_@%+=:,./-", r))
	}
	if s != "" && !strings.ContainsFunc(s, special) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// Command is the command of those words.
func Command(words ...string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = Quote(w)
	}
	return strings.Join(quoted, " ")
}

// In is a command that is run in a namespace: named, of a process ("pid:12"), by its file's path, or "" for the one it is typed in.
func In(netns, command string) string {
	switch pid, ofProcess := strings.CutPrefix(netns, "pid:"); {
	case netns == "":
		return command
	case ofProcess:
		return "nsenter -t " + Quote(pid) + " -n " + command
	case strings.HasPrefix(netns, "/"):
		return "nsenter --net=" + Quote(netns) + " " + command
	default:
		return "ip netns exec " + Quote(netns) + " " + command
	}
}

// Natkit is a command of natkit's about a namespace, "" for the one it is typed in.
func Natkit(netns string, words ...string) string {
	if netns != "" {
		words = append([]string{"--netns", netns}, words...)
	}
	return Command(append([]string{"natkit"}, words...)...)
}
