// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

// Looks at what a Series shows are seriesStep apart, and further in a long window.
const (
	seriesStep = 250 * time.Millisecond
	seriesMost = snapshot.MaxSeries / 2 // of a window; the rest is for clocks that run ahead
)

// seriesCounters are the counters of the stack that a Series shows.
var seriesCounters = []string{"TcpExt.ListenOverflows", "TcpExt.ListenDrops", "TcpExt.TCPBacklogDrop", "TcpExt.IPReversePathFilter",
	"Tcp.RetransSegs", "Tcp.AttemptFails", "Ip.InDiscards", "Ip.OutDiscards", "Ip.OutNoRoutes", "Ip.FragFails", "Udp.RcvbufErrors", "Icmp.OutTimeExcds"}

// watchSeries looks again and again, a step apart, at one namespace after the other, from now on
// until the function that it returns is called, which returns what was seen of each. What can't be
// read is left out: the window's own numbers do not come from here.
func watchSeries(readings []*reading, step time.Duration) (stop func() []*snapshot.Series) {
	recorders := make([]*recorder, len(readings))
	for i, r := range readings {
		if r.view.live && !r.opts.NoSeries {
			recorders[i] = &recorder{began: time.Now(), series: snapshot.Series{Lines: map[string][]float64{}}}
		}
	}
	look := func(stale time.Duration) { // at those at which none was since then
		v := newView("")
		text, _ := v.read("proc/stat") // the processors are everybody's
		times := parseCPUTimes(text)
		for i, r := range recorders {
			if r != nil && (time.Since(r.last) >= stale || len(r.series.Times) == 0) {
				// Take reports a namespace that can't be entered.
				_ = readings[i].opts.Netns.Do(func() error { r.look(v, times); return nil })
			}
		}
	}
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticks := time.NewTicker(step)
		defer ticks.Stop()
		for look(0); ; look(0) {
			select {
			case <-end:
				look(step / 2) // a sliver's rates mean nothing
				return
			case <-ticks.C:
			}
		}
	}()
	return func() []*snapshot.Series {
		close(end)
		<-done
		out := make([]*snapshot.Series, len(recorders))
		for i, r := range recorders {
			if r != nil {
				out[i] = r.finish()
			}
		}
		return out
	}
}

// recorder turns levels and totals into lines.
type recorder struct {
	began   time.Time
	last    time.Time
	before  map[string]uint64
	tracked conntrack.Stats
	times   map[int]cpuTimes
	series  snapshot.Series
}

// look adds a time to all lines, but for the first one, which only begins.
func (r *recorder) look(v *view, times map[int]cpuTimes) {
	tracked, _ := readConntrackStats(v) // without it no lines
	totals, all := map[string]uint64{}, map[string]uint64{}
	for _, file := range []string{"snmp", "netstat"} {
		if text, err := v.readNet(file); err == nil {
			_ = parseCounters(text, all) // a line that can't be read is a line less
		}
	}
	for _, name := range seriesCounters {
		if n, ok := all[name]; ok {
			totals[name] = n
		}
	}
	before, trackedBefore, timesBefore := r.before, r.tracked, r.times
	r.before, r.tracked, r.times, r.last = totals, tracked, times, time.Now()
	if before == nil || len(r.series.Times) == snapshot.MaxSeries {
		return
	}
	r.series.Times = append(r.series.Times, time.Since(r.began).Seconds())
	if limits, err := conntrack.ReadLimits(); err == nil {
		r.add("conntrack.count", float64(limits.Count))
	}
	for name, n := range tracked.Since(trackedBefore) {
		r.add("conntrack."+name, float64(n))
	}
	for name, n := range totals {
		if b, ok := before[name]; ok {
			r.add(name, float64(increase(b, n)))
		}
	}
	for cpu, now := range times {
		was, ok := timesBefore[cpu]
		total := 0.0
		for i := range now {
			total += float64(increase(was[i], now[i]))
		}
		if ok && total > 0 {
			r.add(fmt.Sprintf("cpu%d.softirq", cpu), float64(increase(was[cpuSoftirq], now[cpuSoftirq]))/total)
		}
	}
}

// add appends to a line; one that was not there at all times has zeros before.
func (r *recorder) add(name string, value float64) {
	line := r.series.Lines[name]
	for len(line) < len(r.series.Times)-1 {
		line = append(line, 0)
	}
	r.series.Lines[name] = append(line, value)
}

// finish leaves out the counters that did not move.
func (r *recorder) finish() *snapshot.Series {
	for name, line := range r.series.Lines {
		moved := false
		for _, v := range line {
			moved = moved || v != 0
		}
		if !moved && name != "conntrack.count" {
			delete(r.series.Lines, name)
			continue
		}
		for len(line) < len(r.series.Times) {
			line = append(line, 0)
		}
		r.series.Lines[name] = line
	}
	if len(r.series.Times) == 0 {
		return nil
	}
	return &r.series
}
