// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// DiffResult compares the facts of two times, as -o json prints it.
type DiffResult struct {
	Before     string           `json:"side_before"` // as they were given: a file, a time
	After      string           `json:"side_after"`
	Namespaces []DiffNamespace  `json:"namespaces"` // those in which something differs
	Same       int              `json:"same_count"` // how many others both have
	Only       []DiffOnlyInSide `json:"only"`       // namespaces that one of them has
}

// DiffOnlyInSide is a namespace that only one side has.
type DiffOnlyInSide struct {
	Namespace string `json:"netns"`
	Side      string `json:"side"` // before, after
}

// DiffNamespace is what differs in one namespace.
type DiffNamespace struct {
	Namespace string        `json:"netns"`
	New       []DiffFinding `json:"new_findings"`
	Gone      []DiffFinding `json:"gone_findings"`
	Still     []DiffFinding `json:"still_findings"`
	// Those of one side whose causes could not be judged on the other.
	UnjudgedBefore []DiffFinding         `json:"unjudged_before"`
	UnjudgedAfter  []DiffFinding         `json:"unjudged_after"`
	Changed        []snapshot.Difference `json:"configuration_changes"`
}

// DiffFinding is a finding in short.
type DiffFinding struct {
	Code     string          `json:"code"`
	Severity causes.Severity `json:"severity"`
	Title    string          `json:"title"`
}

// Diff judges both and compares them, namespace by namespace.
func Diff(before, after string, a, b []*snapshot.Snapshot) DiffResult {
	out := DiffResult{Before: before, After: after, Namespaces: []DiffNamespace{}, Only: []DiffOnlyInSide{}}
	other, known := pairs(a, b)
	// Two snapshots of one namespace each are meant to be compared, whatever they are called.
	alone := len(a) == 1 && len(b) == 1
	for _, s := range a {
		same := other[s]
		if alone {
			same = b[0]
		}
		if same == nil {
			out.Only = append(out.Only, DiffOnlyInSide{namespaceTitle(s.Netns), "before"})
			continue
		}
		n := diffOf(s, same)
		if len(n.New)+len(n.Gone)+len(n.UnjudgedBefore)+len(n.UnjudgedAfter)+len(n.Changed) == 0 {
			out.Same++
			continue
		}
		out.Namespaces = append(out.Namespaces, n)
	}
	for _, s := range b {
		if !alone && !known[s] {
			out.Only = append(out.Only, DiffOnlyInSide{namespaceTitle(s.Netns), "after"})
		}
	}
	return out
}

// pairs are the snapshots of b that are of the same namespaces as those of a, and which these are. A
// namespace is the same by its reference, or else by what it belongs to: a container that was restarted
// has another process.
func pairs(a, b []*snapshot.Snapshot) (other map[*snapshot.Snapshot]*snapshot.Snapshot, known map[*snapshot.Snapshot]bool) {
	other, known = map[*snapshot.Snapshot]*snapshot.Snapshot{}, map[*snapshot.Snapshot]bool{}
	for _, title := range []func(snapshot.Netns) string{namespaceTitle, snapshot.Netns.Title} {
		for _, s := range a {
			if other[s] != nil {
				continue
			}
			i := slices.IndexFunc(b, func(o *snapshot.Snapshot) bool { return !known[o] && title(o.Netns) == title(s.Netns) })
			if i >= 0 {
				other[s], known[b[i]] = b[i], true
			}
		}
	}
	return other, known
}

// hasCode tells whether a finding is among others, or folded under one.
func hasCode(list []causes.Finding, code string) bool {
	return slices.ContainsFunc(list, func(f causes.Finding) bool { return f.Code == code || hasCode(f.Consequences, code) })
}

// standsAlone tells whether a finding is among others, and not folded under one.
func standsAlone(list []causes.Finding, code string) bool {
	return slices.ContainsFunc(list, func(f causes.Finding) bool { return f.Code == code })
}

func diffOf(a, b *snapshot.Snapshot) DiffNamespace {
	n := DiffNamespace{Namespace: namespaceTitle(b.Netns), New: []DiffFinding{}, Gone: []DiffFinding{}, Still: []DiffFinding{}, UnjudgedBefore: []DiffFinding{}, UnjudgedAfter: []DiffFinding{},
		Changed: append([]snapshot.Difference{}, snapshot.Differences(a, b)...)}
	was, is := causes.Judge(a), causes.Judge(b)
	n.findings(was, is, causes.NotJudged(a, was), causes.NotJudged(b, is))
	return n
}

// findings sorts what was found before and what is now; notBefore and notAfter could not be judged.
func (n *DiffNamespace) findings(was, is []causes.Finding, notBefore, notAfter []causes.Unjudged) {
	among := func(list []causes.Unjudged, code string) bool {
		return slices.ContainsFunc(list, func(u causes.Unjudged) bool { return u.Code == code })
	}
	var add func(list []causes.Finding, folded bool)
	add = func(list []causes.Finding, folded bool) {
		for _, f := range list {
			switch short := (DiffFinding{f.Code, f.Severity, f.Title}); {
			case !folded && !hasCode(was, f.Code) && among(notBefore, f.Code):
				n.UnjudgedBefore = append(n.UnjudgedBefore, short)
			case !folded && !hasCode(was, f.Code):
				n.New = append(n.New, short)
			case !folded || standsAlone(was, f.Code):
				n.Still = append(n.Still, short)
			}
			add(f.Consequences, true)
		}
	}
	add(is, false)
	for _, f := range was {
		switch short := (DiffFinding{f.Code, f.Severity, f.Title}); {
		case hasCode(is, f.Code):
		case among(notAfter, f.Code):
			n.UnjudgedAfter = append(n.UnjudgedAfter, short)
		default:
			n.Gone = append(n.Gone, short)
		}
	}
}

// Text writes what is new, gone and configured otherwise.
func (r DiffResult) Text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "From %s to %s\n", r.Before, r.After)
	for _, n := range r.Namespaces {
		fmt.Fprintf(&b, "\n%s\n", n.Namespace)
		for _, part := range []struct {
			word, note string
			list       []DiffFinding
		}{
			{"new", "", n.New}, {"gone", "", n.Gone}, {"still", "", n.Still},
			{"?", " (after; its cause could not be judged before)", n.UnjudgedBefore}, {"?", " (before; its cause could not be judged after)", n.UnjudgedAfter},
		} {
			for _, f := range part.list {
				fmt.Fprintf(&b, "  %-5s  %-8s  %s: %s%s\n", part.word, f.Severity, f.Code, f.Title, part.note)
			}
		}
		for _, d := range n.Changed {
			fmt.Fprintf(&b, "  %s: %s -> %s\n", d.What, cmp.Or(d.Before, "none"), cmp.Or(d.After, "none"))
		}
	}
	for _, o := range r.Only {
		fmt.Fprintf(&b, "\n%s is only there %s\n", o.Namespace, o.Side)
	}
	if r.Same > 0 {
		fmt.Fprintf(&b, "\nNo difference in %s.\n", plural.Count(r.Same, "namespace"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
