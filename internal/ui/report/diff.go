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
	Before     string           `json:"before"` // as they were given: a file, a time
	After      string           `json:"after"`
	Namespaces []DiffNamespace  `json:"namespaces"` // those in which something differs
	Same       int              `json:"same"`       // how many others both have
	Only       []DiffOnlyInSide `json:"only"`       // namespaces that one of them has
}

// DiffOnlyInSide is a namespace that only one side has.
type DiffOnlyInSide struct {
	Namespace string `json:"namespace"`
	Side      string `json:"side"` // before, after
}

// DiffNamespace is what differs in one namespace.
type DiffNamespace struct {
	Namespace string                `json:"namespace"`
	New       []DiffFinding         `json:"new"`
	Gone      []DiffFinding         `json:"gone"`
	Still     []DiffFinding         `json:"still"`
	Changed   []snapshot.Difference `json:"changed"`
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
	find := func(list []*snapshot.Snapshot, title string) *snapshot.Snapshot {
		i := slices.IndexFunc(list, func(s *snapshot.Snapshot) bool { return namespaceTitle(s.Netns) == title })
		if i < 0 {
			return nil
		}
		return list[i]
	}
	// Two snapshots of one namespace each are meant to be compared, whatever they are called.
	alone := len(a) == 1 && len(b) == 1
	for _, s := range a {
		other := find(b, namespaceTitle(s.Netns))
		if alone {
			other = b[0]
		}
		if other == nil {
			out.Only = append(out.Only, DiffOnlyInSide{namespaceTitle(s.Netns), "before"})
			continue
		}
		n := diffOf(s, other)
		if len(n.New)+len(n.Gone)+len(n.Changed) == 0 {
			out.Same++
			continue
		}
		out.Namespaces = append(out.Namespaces, n)
	}
	for _, s := range b {
		if !alone && find(a, namespaceTitle(s.Netns)) == nil {
			out.Only = append(out.Only, DiffOnlyInSide{namespaceTitle(s.Netns), "after"})
		}
	}
	return out
}

func diffOf(a, b *snapshot.Snapshot) DiffNamespace {
	n := DiffNamespace{Namespace: namespaceTitle(b.Netns), New: []DiffFinding{}, Gone: []DiffFinding{}, Still: []DiffFinding{}, Changed: append([]snapshot.Difference{}, snapshot.Differences(a, b)...)}
	was, is := causes.Judge(a), causes.Judge(b)
	has := func(list []causes.Finding, code string) bool {
		return slices.ContainsFunc(list, func(f causes.Finding) bool { return f.Code == code })
	}
	for _, f := range is {
		short := DiffFinding{f.Code, f.Severity, f.Title}
		if has(was, f.Code) {
			n.Still = append(n.Still, short)
		} else {
			n.New = append(n.New, short)
		}
	}
	for _, f := range was {
		if !has(is, f.Code) {
			n.Gone = append(n.Gone, DiffFinding{f.Code, f.Severity, f.Title})
		}
	}
	return n
}

// Text writes what is new, gone and configured otherwise.
func (r DiffResult) Text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "From %s to %s\n", r.Before, r.After)
	for _, n := range r.Namespaces {
		fmt.Fprintf(&b, "\n%s\n", n.Namespace)
		for _, part := range []struct {
			word string
			list []DiffFinding
		}{{"new", n.New}, {"gone", n.Gone}, {"still", n.Still}} {
			for _, f := range part.list {
				fmt.Fprintf(&b, "  %-5s  %-8s  %s: %s\n", part.word, f.Severity, f.Code, f.Title)
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
