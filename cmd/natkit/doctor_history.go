// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/plural"
)

// looksFor is how long before or after a time facts may have been taken that tell of it: a
// namespace in which all is well is examined that often.
const looksFor = 20 * time.Minute

// recorded is the doctor for what natkit monitor has stored of a time (--at), or since one.
func (o *doctorOptions) recorded(e *env, out string) error {
	now := time.Now()
	n := o.namespaces(out)
	if o.at != "" {
		at, err := parseMoment(o.at, now)
		if err != nil {
			return usagef("--at %w", err)
		}
		looks, err := looksAt(e, historyFolder(o.history), at)
		if err != nil {
			return err
		}
		return o.showLooks(e, n, looks, out, fmt.Sprintf("nearest to %s", at.Format(time.DateTime)))
	}
	span, err := spanOf(o.since, "", now)
	if err != nil {
		return err
	}
	return o.sinceThen(e, n, span, out)
}

// readHistory reads a history and says what of it is damaged.
func readHistory(e *env, dir string, span history.Span, each func(*history.Entry) error) error {
	damaged, err := history.Read(dir, span, each)
	for _, d := range damaged {
		fmt.Fprintf(e.stderr, "natkit: %s\n", d)
	}
	return err
}

// looksAt are the facts of each namespace that are nearest to a time.
func looksAt(e *env, dir string, at time.Time) ([]*snapshot.Snapshot, error) {
	best := map[history.Namespace]history.Look{}
	var order []history.Namespace
	var first, last time.Time
	near := time.Minute // and an interval: an entry tells of what is before it, and the next one may not be there yet
	apart := func(t time.Time) time.Duration { return max(t.Sub(at), at.Sub(t)) }
	err := readHistory(e, dir, history.Span{From: at.Add(-looksFor), To: at.Add(looksFor)}, func(entry *history.Entry) error {
		if first.IsZero() {
			first = entry.At
		}
		last = entry.At
		near = max(near, time.Minute+time.Duration(entry.Seconds*float64(time.Second)))
		for _, l := range entry.Looks {
			key := history.Namespace{Inode: l.Inode(), Title: l.Title()}
			before, known := best[key]
			if !known {
				order = append(order, key)
			}
			if !known || apart(l.At()) < apart(before.At()) {
				best[key] = l
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(best) == 0 || first.Sub(at) > near || at.Sub(last) > near {
		return nil, fmt.Errorf("nothing was recorded at %s: natkit history --since 7d shows what was", at.Format(time.DateTime))
	}
	var out []*snapshot.Snapshot
	for _, key := range order {
		s, err := best[key].Snapshot()
		if err != nil { // the others can be judged
			fmt.Fprintf(e.stderr, "natkit: facts of %s: %s\n", key.Title, inWords(err))
			continue
		}
		// A namespace that was made again has the same name and another number.
		same := slices.IndexFunc(out, func(o *snapshot.Snapshot) bool {
			return o.Netns.Name == s.Netns.Name && o.Netns.Container == s.Netns.Container
		})
		if same < 0 {
			out = append(out, s)
		} else if apart(s.TakenAt) < apart(out[same].TakenAt) {
			out[same] = s
		}
	}
	// The host first, as in doctor --all-netns.
	slices.SortStableFunc(out, func(a, b *snapshot.Snapshot) int { return cmp.Compare(rank(a), rank(b)) })
	return out, nil
}

func rank(s *snapshot.Snapshot) int {
	if s.Netns.Name == "" || s.Netns.Init {
		return 0
	}
	return 1
}

// ofNetns leaves those that --netns names.
func (e *env) ofNetns(all []*snapshot.Snapshot) []*snapshot.Snapshot {
	if e.netns == "" {
		return all
	}
	return slices.DeleteFunc(all, func(s *snapshot.Snapshot) bool {
		return s.Netns.Name != e.netns && monitor.Title(s.Netns) != e.netns
	})
}

// showLooks judges facts with the causes of today.
func (o *doctorOptions) showLooks(e *env, n *namespaces, looks []*snapshot.Snapshot, out, when string) error {
	looks = e.ofNetns(looks)
	if len(looks) == 0 {
		return fmt.Errorf("nothing was recorded of network namespace %q then", e.netns)
	}
	var file *os.File
	var err error
	if o.save != "" {
		if file, err = os.Create(o.save); err != nil {
			return err
		}
		defer file.Close()
		if len(looks) > 1 {
			n.file = snapshot.NewWriter(file)
		}
	}
	from, to := looks[0].TakenAt, looks[0].TakenAt
	for _, s := range looks {
		from, to = minTime(from, s.TakenAt), maxTime(to, s.TakenAt)
		if err := n.add(s); err != nil {
			return err
		}
	}
	fmt.Fprintf(e.stderr, "natkit: facts recorded %s: of %s, taken between %s and %s\n", when, plural.Count(len(looks), "network namespace"),
		from.Local().Format(time.TimeOnly), to.Local().Format(time.TimeOnly))
	if file != nil {
		if n.file != nil {
			err = n.file.End(snapshot.LeftOut{})
		} else {
			err = snapshot.Save(file, looks[0])
		}
		if err := cmp.Or(err, file.Close()); err != nil {
			return err
		}
	}
	if len(looks) == 1 {
		return showDoctor(e, looks[0], out)
	}
	return n.show(e, snapshot.LeftOut{}, out)
}

func minTime(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func maxTime(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// sighting is a finding of one namespace in a span.
type sighting struct {
	worst       causes.Finding
	first, last time.Time
	windows     int
}

// sinceThen judges all facts of a span, and shows of each finding the worst window.
func (o *doctorOptions) sinceThen(e *env, n *namespaces, span history.Span, out string) error {
	type spaceSeen struct {
		last     *snapshot.Snapshot
		windows  int
		findings map[string]*sighting
	}
	seen := map[history.Namespace]*spaceSeen{}
	var order []*spaceSeen
	var first time.Time
	err := readHistory(e, historyFolder(o.history), span, func(entry *history.Entry) error {
		for _, l := range entry.Looks {
			s, err := l.Snapshot()
			if err != nil { // the others can be judged
				fmt.Fprintf(e.stderr, "natkit: facts of %s: %s\n", l.Title(), inWords(err))
				continue
			}
			if len(e.ofNetns([]*snapshot.Snapshot{s})) == 0 {
				continue
			}
			if n.redactor != nil {
				n.redactor.Redact(s)
			}
			if first.IsZero() || s.TakenAt.Before(first) {
				first = s.TakenAt
			}
			key := history.Namespace{Inode: l.Inode(), Title: s.Netns.Title()}
			space := seen[key]
			if space == nil {
				space = &spaceSeen{findings: map[string]*sighting{}}
				seen[key] = space
				order = append(order, space)
			}
			space.last = s
			space.windows++
			for _, f := range causes.Judge(s) {
				at := space.findings[f.Code]
				if at == nil {
					at = &sighting{worst: f, first: s.TakenAt}
					space.findings[f.Code] = at
				}
				at.last, at.windows = s.TakenAt, at.windows+1
				if cmp.Or(cmp.Compare(f.Severity, at.worst.Severity), cmp.Compare(f.Impact, at.worst.Impact)) > 0 {
					at.worst = f
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(order) == 0 {
		return fmt.Errorf("nothing was recorded since %s: natkit history --since 7d shows what was", span.From.Format(time.DateTime))
	}
	slices.SortStableFunc(order, func(a, b *spaceSeen) int { return cmp.Compare(rank(a.last), rank(b.last)) })
	n.page.Since = first
	for _, space := range order {
		var findings []causes.Finding
		for _, at := range space.findings {
			f := at.worst
			f.Evidence = append([]causes.Evidence{{What: "seen", Value: fmt.Sprintf("%s to %s, in %d of %s", at.first.Local().Format(time.DateTime), at.last.Local().Format(time.TimeOnly),
				at.windows, plural.Count(space.windows, "examined window")), Source: "natkit history"}}, f.Evidence...)
			findings = append(findings, f)
		}
		slices.SortFunc(findings, func(a, b causes.Finding) int {
			return cmp.Or(-cmp.Compare(a.Severity, b.Severity), -cmp.Compare(a.Impact, b.Impact), cmp.Compare(a.Code, b.Code))
		})
		findings = n.machine.Once(findings)
		n.page.Add(space.last, findings)
		n.npd.Add(space.last, findings)
		if err := alarm(space.last, findings); n.alarm == nil || err == errFindings {
			n.alarm = err
		}
	}
	return n.show(e, snapshot.LeftOut{}, out)
}

// compared compares two files of facts, or two times of the history.
func (o *doctorOptions) compared(e *env, before, after, out string) error {
	var sides [2][]*snapshot.Snapshot
	for i, which := range []string{before, after} {
		var err error
		if sides[i], err = o.side(e, which); err != nil {
			return err
		}
		if sides[i] = e.ofNetns(sides[i]); len(sides[i]) == 0 {
			return fmt.Errorf("%s has no facts of network namespace %q", which, e.netns)
		}
	}
	return e.show(out, report.Diff(before, after, sides[0], sides[1]))
}

// side is the facts in a file or of a time.
func (o *doctorOptions) side(e *env, which string) (all []*snapshot.Snapshot, err error) {
	f, err := os.Open(which)
	if err != nil {
		at, notTime := parseMoment(which, time.Now())
		if notTime != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err // it is there, and cannot be read
		}
		if notTime != nil {
			return nil, usagef("--diff %q: neither a file of natkit doctor --save nor a time such as 03:12", which)
		}
		return looksAt(e, historyFolder(o.history), at)
	}
	defer f.Close()
	_, _, err = snapshot.LoadEach(f, func(s *snapshot.Snapshot) error {
		all = append(all, s)
		return nil
	})
	return all, err
}
