// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
)

// How the demo leaves the machine as it found it, also when the one before was killed.

// HostValues are the settings that no namespace has for itself and that the demo
// could have changed.
type HostValues struct {
	ConntrackMax     uint64 `json:"nf_conntrack_max"`
	ConntrackBuckets uint64 `json:"nf_conntrack_buckets"`
}

// lock keeps a second demo away: it would measure the first one's load.
func (o *DemoOptions) lock() (*journal.Journal, error) {
	lock, err := journal.Open(filepath.Join(cmp.Or(o.Place.StateDir, tune.DefaultStateDir), "demo"))
	if errors.Is(err, journal.ErrLocked) {
		return nil, errors.New("another demo is running on this machine")
	}
	return lock, err
}

// recover puts back what a killed demo changed. Its lab is removed by lab.Up.
func (o *DemoOptions) recover(ctx context.Context) error {
	history, err := tune.History(o.Place)
	if err != nil {
		return err
	}
	for _, r := range history {
		if r.By != demoName || (r.State != tune.StateApplied && r.State != tune.StateInterrupted) {
			continue
		}
		if _, err := tune.Rollback(ctx, r.ID, tune.RollbackOptions{Place: o.Place, Beneath: true}); err != nil {
			return fmt.Errorf("restore what a killed demo changed: %w", err)
		}
	}
	for _, r := range history {
		if r.By != demoName && r.State == tune.StateInterrupted {
			return &tune.PendingError{ID: r.ID} // the cure would be refused
		}
	}
	return nil
}

// restore puts back what the demo changed, removes what it made, and looks
// whether that is so. It works also when the demo's context has ended.
func (d *demo) restore() error {
	var errs []error
	if d.applied != nil && d.applied.State == tune.StateApplied {
		_, err := tune.Rollback(context.Background(), d.applied.ID, tune.RollbackOptions{Place: d.o.Place, Beneath: true})
		errs = append(errs, err)
	}
	var made []netns.Named
	for _, n := range d.lab.Nodes() {
		made = append(made, netns.Named{Name: n.Netns, Inode: n.Handle().Inode()})
	}
	errs = append(errs, d.lab.Down())
	after, err := readHostValues()
	errs = append(errs, err)
	d.res.After = after
	if after != d.res.Before {
		d.res.Left = append(d.res.Left, fmt.Sprintf("host-wide values: were %+v, are %+v", d.res.Before, after))
	}
	list, err := netns.List()
	errs = append(errs, err)
	for _, n := range list {
		if slices.Contains(made, n) {
			d.res.Left = append(d.res.Left, "network namespace "+n.Name)
		}
	}
	err = errors.Join(errs...)
	d.res.Restored = err == nil && len(d.res.Left) == 0
	return err
}

// readHostValues reads the host-wide values as this process sees them.
func readHostValues() (HostValues, error) {
	l, err := conntrack.ReadLimits()
	return HostValues{ConntrackMax: l.Max, ConntrackBuckets: l.Buckets}, err
}
