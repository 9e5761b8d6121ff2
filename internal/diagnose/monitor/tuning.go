// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/tune"
	"natkit/internal/snapshot"
	"natkit/internal/words/exposition"
)

// By is who asked for a change, as natkit tune history shows it.
const By = "monitor"

// beginTuning takes back what an earlier process changed without knowing its effect.
func (m *monitor) beginTuning(ctx context.Context) ([]history.Tuning, error) {
	if m.o.Tune == "" || m.o.Tune == TuneOff {
		return nil, nil
	}
	m.tuner = newTuner(m.o.Tune, m.o.Interval)
	m.state.tuned = map[string]uint64{}
	if m.o.Tune != TuneApply {
		return nil, nil
	}
	var settings unix.Statfs_t
	if err := unix.Statfs("/proc/sys", &settings); err == nil && settings.Flags&unix.ST_RDONLY != 0 {
		return nil, errors.New("--tune apply: /proc/sys is read-only here; for the systemd service set ProtectKernelTunables=no (systemctl edit natkit-monitor)")
	}
	records, err := tune.History(m.o.TunePlace)
	if err != nil {
		return nil, err
	}
	records = slices.DeleteFunc(records, func(r tune.Record) bool { return r.By != By })
	if len(records) == 0 {
		return nil, nil
	}
	now := time.Now()
	m.tuner.remembers(records, now, m.o.TunePlace.Lives)
	last := records[len(records)-1]
	if last.State != tune.StateInterrupted && (last.State != tune.StateApplied || !m.undecided(last, now)) {
		return nil, nil
	}
	const why = "natkit monitor ended before its effect was known"
	_, err = tune.Rollback(ctx, last.ID, tune.RollbackOptions{Place: m.o.TunePlace, Beneath: true})
	m.tuner.last = time.Now()
	var out []history.Tuning
	for _, c := range last.Changes {
		n := history.Tuning{At: time.Now(), Kind: history.TakenBack, Namespace: m.placeOf(c), Setting: c.Setting, Old: c.New, New: c.Old, Code: c.Code, Why: why, ID: last.ID}
		if err != nil {
			n.Kind, n.Why = history.NotTuned, why+", and taking it back failed: "+err.Error()
		} else {
			delete(m.tuner.wrote, m.tuner.keyOf(c.Space.Inode, c.Setting))
		}
		out = append(out, n)
	}
	return out, nil
}

// placeOf is how the namespace of an earlier change is spoken of.
func (m *monitor) placeOf(c tune.Change) string {
	if c.Scope == tune.ScopeHost {
		return "host"
	}
	for _, n := range m.sampler.Namespaces() {
		if n.Inode == c.Space.Inode {
			return Title(n)
		}
	}
	return cmp.Or(c.Netns, "own")
}

// decideAfter is how long after a change a monitor that goes on has surely decided about it.
const decideAfter = 10 * tuneWithin

// undecided says whether a monitor ended before it knew the effect of a change. The history shows that: it does not go on
// with the same monitor, nor say that the change stays. Where it does not reach back to the change (it keeps some days, and
// may be removed or elsewhere), a change of long ago stays: its monitor mostly went on.
func (m *monitor) undecided(r tune.Record, now time.Time) bool {
	made, kept, failed, reaches, ended := false, false, false, false, false
	// What can't be read shows nothing.
	_, _ = history.Read(m.o.HistoryDir, history.Span{From: r.Time.Add(-decideAfter)}, func(e *history.Entry) error {
		after := e.At.Sub(r.Time)
		reaches = reaches || after <= 0
		ended = ended || after > 0 && e.Begins
		kept = kept || reaches && !ended && after > decideAfter
		for _, n := range e.Tunings {
			if n.ID != r.ID {
				continue
			}
			switch n.Kind {
			case history.Applied:
				made = true
			case history.Kept:
				kept = true
			case history.NotTuned: // it should have been taken back
				failed = true
			}
		}
		return nil
	})
	return failed || !kept && (made || reaches || now.Sub(r.Time) < decideAfter)
}

// tune does about a window what the tuner decides.
func (m *monitor) tune(ctx context.Context, s *snapshot.Snapshot, shown []causes.Finding) []history.Tuning {
	if m.tuner == nil {
		return nil
	}
	act, said := m.tuner.window(s, shown, m.findings.asking(s.Netns.Inode), time.Now())
	return append(said, m.perform(ctx, act)...)
}

// tuningDue decides about a change whose namespace was not examined in time.
func (m *monitor) tuningDue(ctx context.Context, there map[uint64]bool) []history.Tuning {
	if m.tuner == nil {
		return nil
	}
	m.tuner.gone(func(inode uint64) bool { return !there[inode] })
	act, said := m.tuner.due(time.Now())
	return append(said, m.perform(ctx, act)...)
}

// perform makes a change or takes one back.
func (m *monitor) perform(ctx context.Context, act *action) []history.Tuning {
	switch {
	case act == nil:
		return nil
	case act.change != nil:
		r, err := tune.Apply(ctx, act.change.plan, tune.ApplyOptions{Place: m.o.TunePlace, By: By})
		return m.tuner.changed(act.change, r, err, time.Now())
	}
	// What was found to be worse is taken back even when the monitor is told to end.
	_, err := tune.Rollback(context.WithoutCancel(ctx), act.takeBack, tune.RollbackOptions{Place: m.o.TunePlace, Beneath: true})
	return m.tuner.tookBack(act.why, err, time.Now())
}

// observeTunings tells of what was done about settings.
func (m *monitor) observeTunings(list []history.Tuning) {
	if m.tuner == nil {
		return
	}
	m.mu.Lock()
	for _, n := range list {
		m.state.tuned[n.Kind]++
	}
	m.state.proposed = slices.SortedFunc(maps.Values(m.tuner.proposed), func(a, b history.Tuning) int {
		return cmp.Or(cmp.Compare(a.Setting, b.Setting), cmp.Compare(a.Namespace, b.Namespace))
	})
	m.mu.Unlock()
	for i := range list {
		m.o.Say(Line{At: list[i].At, Tuning: &list[i]})
	}
}

// exposeTunings shows what would be or was changed.
func (st *state) exposeTunings(e *exposition.Exposition) {
	if st.tuned == nil {
		return
	}
	shown := map[string]bool{}
	for _, n := range st.proposed {
		value, err := strconv.ParseFloat(n.New, 64)
		if key := n.Setting + "\x00" + n.Namespace; err == nil && len(shown) < maxTunings && !shown[key] {
			shown[key] = true
			e.Gauge(descTuneWould, value, n.Setting, n.Namespace)
		}
	}
	for _, kind := range []string{history.Proposed, history.Applied, history.Kept, history.TakenBack, history.NotTheCause, history.NotTuned} {
		e.Counter(descTuned, float64(st.tuned[kind]), strings.ReplaceAll(kind, " ", "_"))
	}
}
