// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// What node-problem-detector makes of a custom plugin's exit code: every other one is unknown,
// too. Of its output it takes the first 80 bytes (max_output_length), which become the message
// of the node's condition. (github.com/kubernetes/node-problem-detector,
// pkg/custompluginmonitor/plugin/plugin.go)
const (
	NPDOK      = 0
	NPDProblem = 1
	NPDUnknown = 2

	npdBytes = 80
)

// NPD is what the doctor found, for node-problem-detector. A problem is a critical finding:
// traffic is lost now. Only what may be that is missed when it could not be judged.
type NPD struct {
	critical []npdFinding
	warnings int
	unjudged []string // codes
}

type npdFinding struct {
	causes.Finding
	where string // "" is the host or the one namespace
}

// Add takes what was found in a namespace.
func (n *NPD) Add(s *snapshot.Snapshot, findings []causes.Finding) {
	where := ""
	if s.Netns.Container != "" && !s.Netns.Init {
		where = monitor.Title(s.Netns)
	}
	for _, f := range findings {
		switch f.Severity {
		case causes.Critical:
			n.critical = append(n.critical, npdFinding{f, where})
		case causes.Warning:
			n.warnings++
		}
	}
	for _, u := range causes.NotJudged(s, findings) {
		if mayBeCritical(u.Code) && !slices.Contains(n.unjudged, u.Code) {
			n.unjudged = append(n.unjudged, u.Code)
		}
	}
}

func mayBeCritical(code string) bool {
	return slices.ContainsFunc(causes.Catalogue(), func(c causes.Cause) bool {
		return c.Code == code && slices.Contains(c.Severities, causes.Critical)
	})
}

// Line is the line to print and the exit code.
func (n *NPD) Line() (line string, status int) {
	switch {
	case len(n.critical) > 0:
		worst := slices.MaxFunc(n.critical, func(a, b npdFinding) int { return cmp.Compare(a.Impact, b.Impact) })
		line, more := worst.Code+": "+worst.Title, ""
		if worst.where != "" {
			line = worst.Code + " in " + worst.where + ": " + worst.Title
		}
		if len(n.critical) > 1 {
			more = fmt.Sprintf(" (+%d)", len(n.critical)-1)
		}
		return npdCut(line, npdBytes-len(more)) + more, NPDProblem
	case len(n.unjudged) > 0:
		return npdCut(fmt.Sprintf("%s could not be judged: %s", plural.Count(len(n.unjudged), "cause"), strings.Join(n.unjudged, ", ")), npdBytes), NPDUnknown
	case n.warnings > 0:
		return "no critical finding, " + plural.Count(n.warnings, "warning"), NPDOK
	}
	return "no critical finding", NPDOK
}

// NPDFailure is the line of a doctor that failed.
func NPDFailure(why string) string { return npdCut("natkit doctor failed: "+why, npdBytes) }

// npdCut is text on one line of at most so many bytes, cut after a word.
func npdCut(text string, most int) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= most {
		return text
	}
	const dots = "..."
	cut := strings.ToValidUTF8(text[:most-len(dots)], "")
	if i := strings.LastIndexByte(cut, ' '); i > most/2 {
		cut = cut[:i]
	}
	return strings.TrimRight(cut, " ,:;") + dots
}
