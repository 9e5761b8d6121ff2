// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natkit/internal/words/plural"
)

// PaperSetup is one set-up of the experiment of 1997, as it is made today.
type PaperSetup struct {
	Setup  string // its number there, with its name
	Router Router
}

// PaperOptions is how the experiment of 1997 is repeated: 20 MB by file transfer
// six times each way, and what CPUFor and CPUTrials say for the processor time,
// which those few milliseconds are too short to show.
type PaperOptions struct {
	Setups    []PaperSetup
	Bytes     int64 // of a transfer; 0: as published
	Transfers int   // each way; 0: as published
	CPUFor    time.Duration
	CPUTrials int

	About
}

// What was published: MB counts 1024*1024 bytes, kB/s 1000, as its own figures
// have it (20 MB in 39.75 s are 527 kB/s).
const (
	paperBytes     = 20 << 20
	paperTransfers = 6
	paperSource    = "Linux 2.0 ipnatadm, 1997, on hosts of that time: 20 MB by file transfer, average of six"
)

// The metrics of BulkPaper.
const (
	MetricTransferSeconds = "transfer_seconds"
	MetricTransferKBs     = "transfer_kb_s"
)

// paperRows are the published averages, by set-up: down, up.
var paperRows = [...]struct{ seconds, kbs [2]float64 }{
	{[2]float64{39.75, 38.07}, [2]float64{527, 550}},
	{[2]float64{37.72, 37.79}, [2]float64{555, 554}},
	{[2]float64{41.68, 38.62}, [2]float64{502, 542}},
	{[2]float64{43.20, 38.83}, [2]float64{485, 539}},
	{[2]float64{46.48, 42.95}, [2]float64{451, 487}},
}

// PaperDirections are the directions in the order of the published tables.
var PaperDirections = [2]string{DirectionDown, DirectionUp}

// BulkPaper repeats the experiment of 1997. The set-ups take turns.
func BulkPaper(ctx context.Context, o PaperOptions) (res *Result, err error) {
	if o.Bytes == 0 {
		o.Bytes = paperBytes
	}
	if o.Transfers == 0 {
		o.Transfers = paperTransfers
	}
	if o.CPUTrials == 0 {
		o.CPUTrials = 3
	}
	if o.CPUFor == 0 {
		o.CPUFor = 500 * time.Millisecond
	}
	var routers []Router
	setups := map[string]string{} // by router
	for _, s := range o.Setups {
		routers = append(routers, s.Router)
		setups[s.Router.Name()] = s.Setup
	}
	c, err := newComparison(ctx, "bulk", routers, o.About)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := c.close(); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	sites, err := c.installAll(ctx)
	if err != nil {
		return nil, err
	}
	each := len(sites) * len(PaperDirections)
	trials := &steps{total: each * (1 + o.Transfers + o.CPUTrials), show: o.Progress}
	trials.expected = time.Duration(each*o.CPUTrials)*(o.CPUFor+trialOverhead) + time.Duration(each*(1+o.Transfers))*trialOverhead
	c.Plan(fmt.Sprintf("the published transfers in %s, %s", plural.Count(len(sites), "set-up"), plural.Count(trials.total, "trial")), trials.expected)
	err = c.paperTrials(ctx, paperSides(sites, setups), o, trials)
	for i, s := range o.Setups {
		if i < len(paperRows) {
			c.publish(s, i)
		}
	}
	c.result.Notes = append(c.result.Notes,
		"A transfer takes milliseconds today, as long as a few interrupts of the machine by something else: its spread is wide, "+
			"and its seconds say little. What a set-up costs shows in the processor time, measured by longer transfers.",
		bulkNote)
	return c.result.ended(ctx, err)
}

// paperSide is one row of the published tables: a set-up and a direction.
type paperSide struct {
	*site
	Params
}

// paperSides are all of them, in the order of the tables.
func paperSides(sites []*site, setups map[string]string) (out []*paperSide) {
	for _, s := range sites {
		for _, direction := range PaperDirections {
			out = append(out, &paperSide{s, Params{Streams: 1, Direction: direction, Protocol: "tcp", Setup: setups[s.router.Name()]}})
		}
	}
	return out
}

// paperTrials makes all trials: transfers as published, then longer ones.
func (c *comparison) paperTrials(ctx context.Context, sides []*paperSide, o PaperOptions, trials *steps) error {
	inTurns := func(n int, run func(context.Context, *paperSide) (*bulkTrial, error), figures func(*paperSide, *runs[*bulkTrial])) error {
		all, err := interleave(ctx, sides, n, func(ctx context.Context, s *paperSide) (*bulkTrial, error) {
			trials.next("%s %s", s.Setup, s.Direction)
			t, err := run(ctx, s)
			if err != nil {
				return nil, fmt.Errorf("set-up %s: %w", s.Setup, err)
			}
			return t, nil
		})
		for i, s := range measured(sides, all) {
			figures(s, &all[i])
		}
		return err
	}
	published := func(ctx context.Context, s *paperSide) (*bulkTrial, error) {
		source, target := s.endpoints(bulkPort)
		done, err := transfer{source: source, target: target, streams: 1, down: s.Direction == DirectionDown, bytes: o.Bytes}.run(ctx, s.testbed)
		return &bulkTrial{transferred: done}, err
	}
	// The first round is not counted: it is the only one that finds all caches cold.
	if err := inTurns(1, published, func(*paperSide, *runs[*bulkTrial]) {}); err != nil {
		return err
	}
	if err := inTurns(o.Transfers, published, func(s *paperSide, r *runs[*bulkTrial]) {
		c.result.add(r.figure(s.router.Name(), MetricTransferSeconds, s.Params, func(t *bulkTrial) float64 { return t.elapsed.Seconds() }))
		c.result.add(r.figure(s.router.Name(), MetricTransferKBs, s.Params, func(t *bulkTrial) float64 {
			return float64(t.bytes) / 1000 / t.elapsed.Seconds()
		}))
	}); err != nil {
		return err
	}
	return inTurns(o.CPUTrials, func(ctx context.Context, s *paperSide) (*bulkTrial, error) {
		return s.transferFor(ctx, s.Params, o.CPUFor)
	}, func(s *paperSide, r *runs[*bulkTrial]) {
		c.result.add(r.figure(s.router.Name(), MetricCPUPerGbit, s.Params, (*bulkTrial).cpuPerGbit))
	})
}

// publish adds the published figures of a set-up.
func (c *comparison) publish(s PaperSetup, i int) {
	for d, direction := range PaperDirections {
		p := Params{Streams: 1, Direction: direction, Protocol: "tcp", Setup: s.Setup}
		row := paperRows[i]
		theirs := Published{Source: paperSource, Router: s.Router.Name(), Name: "ipnatadm 1997", Params: p}
		theirs.Metric, theirs.Value = MetricTransferSeconds, row.seconds[d]
		c.result.Published = append(c.result.Published, theirs)
		theirs.Metric, theirs.Value = MetricTransferKBs, row.kbs[d]
		c.result.Published = append(c.result.Published, theirs)
	}
}
