// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// comparison is a measurement of several routers in turns, each in a testbed of its
// own for as long as it lasts, and the result that comes of it.
type comparison struct {
	About
	sites  []*site
	result *Result
	hidden []string // figures that were left out, as other programs hid them
}

// About is what a result shows of the program that made it, and what reports to that
// program how far the measurement is; nil where nobody listens.
type About struct {
	Command string // the command line
	Natkit  string // version

	Plan     func(what string, takes time.Duration) // before the first trial; takes is on a machine that is idle
	Progress func(format string, args ...any)       // what is done now
	Row      func(Figure)                           // each figure when its last trial is done
}

// complete puts functions that do nothing where nobody listens.
func (a *About) complete() {
	if a.Plan == nil {
		a.Plan = func(string, time.Duration) {}
	}
	if a.Progress == nil {
		a.Progress = func(string, ...any) {}
	}
	if a.Row == nil {
		a.Row = func(Figure) {}
	}
}

// What surrounds the measuring, for estimates: making a router, and what a trial takes
// besides its load.
const (
	routerTakes   = 300 * time.Millisecond
	trialOverhead = 100 * time.Millisecond
)

// site is a router that this machine can have, and its testbed.
type site struct {
	router  Router
	testbed *Testbed
	number  int            // of trials begun, which tells their addresses apart
	port    uint16         // of the last timed flow
	works   bool           // it could be made at least once
	stop    []func() error // what serves at its right end
}

// newComparison makes a testbed for each router.
func newComparison(ctx context.Context, kind string, routers []Router, about About) (c *comparison, err error) {
	about.complete()
	c = &comparison{About: about, result: newResult(kind, about)}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for _, r := range routers {
		c.result.Routers = append(c.result.Routers, RouterUse{Name: r.Name(), Describe: r.Describe()})
		testbed, err := NewTestbed(ctx)
		if err != nil {
			return c, err
		}
		c.sites = append(c.sites, &site{router: r, testbed: testbed})
	}
	return c, nil
}

func (c *comparison) close() error {
	var errs []error
	for _, s := range c.sites {
		for _, stop := range s.stop {
			errs = append(errs, stop())
		}
		errs = append(errs, s.testbed.Close())
	}
	return errors.Join(errs...)
}

// exclude notes that this machine can't have a router. Any other error it returns.
func (c *comparison) exclude(router string, err error) error {
	var unsupported *UnsupportedError
	if !errors.As(err, &unsupported) {
		return err
	}
	for i := range c.result.Routers {
		if c.result.Routers[i].Name == router {
			c.result.Routers[i].Unsupported = unsupported.Reason
		}
	}
	return nil
}

// steps counts the trials of a measurement for its progress and its duration.
type steps struct {
	done, total int
	started     time.Time
	expected    time.Duration // of all, until enough of them are done to tell
	show        func(format string, args ...any)
}

// next announces a trial.
func (s *steps) next(format string, args ...any) {
	if s.show == nil {
		return
	}
	if s.started.IsZero() {
		s.started = time.Now()
	}
	left := s.expected
	if s.done > 0 {
		left = time.Since(s.started) / time.Duration(s.done) * time.Duration(s.total-s.done)
	}
	s.done = min(s.done+1, s.total) // repeated trials are none of the plan's
	s.show("%d of %d, about %v left: %s", s.done, s.total, left.Round(time.Second), fmt.Sprintf(format, args...))
}
