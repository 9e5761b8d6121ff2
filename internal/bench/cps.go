// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/words/choice"
	"natkit/internal/words/plural"
)

// CPSOptions is a measurement of routers with new sessions, in the manner of RFC
// 9693: the first packets of UDP sessions, or whole TCP connections. Without Goals
// the generator, the router and the sink share a CPU and go as fast as they can;
// with them the router has one CPU of its own and the generator another, and the
// highest rates are searched at which no more sessions fail than the goals allow.
type CPSOptions struct {
	Routers   []Router
	Protocols []string      // of Protocols
	Sessions  int           // of a trial
	Held      int           // in the table before each trial with new ones
	Rules     []int         // of each router, that match nothing before the one that matches; nil: none
	Block     int           // ports of a block, of routers that have blocks
	Duration  time.Duration // of a trial with established sessions
	Trials    int           // of each set of conditions
	Goals     []SearchGoal

	About
}

// Protocols are those of sessions.
var Protocols = []string{"udp", "tcp"}

// fewSessions are not enough for figures to which it matters what buffers hold: a
// router's rings some hundreds of frames, each processor some hundreds of freed
// objects.
const fewSessions = 10_000

// complete checks the options; an *OptionError names the one that cannot be.
func (o *CPSOptions) complete() error {
	cpus, err := allowedCPUs()
	for i, name := range o.Protocols {
		switch {
		case !slices.Contains(Protocols, name):
			return refuse("Protocols", "%v", choice.Error(name, Protocols...))
		case slices.Contains(o.Protocols[:i], name):
			return refuse("Protocols", "%s is named twice", name)
		}
	}
	switch {
	case err != nil:
		return err
	case len(o.Routers) == 0 || len(o.Protocols) == 0:
		return refuseAll([]string{"Routers", "Protocols"}, "want one at least")
	case o.Sessions < 1 || o.Sessions > MaxFlows:
		return refuse("Sessions", "%d: want 1 to %d", o.Sessions, MaxFlows)
	case o.Held < 0 || o.Held > MaxFlows-o.Sessions:
		return refuse("Held", "%d: want 0 to %d, which are %d with those of a trial", o.Held, MaxFlows-o.Sessions, MaxFlows)
	case o.Held > 0 && !slices.Equal(o.Protocols, []string{"udp"}):
		return refuse("Held", "%d: only with sessions of UDP alone", o.Held)
	case slices.ContainsFunc(o.Rules, func(n int) bool { return n < 0 || n > MaxRules }):
		return refuse("Rules", "%v: want 0 to %d each", o.Rules, MaxRules)
	case o.Trials < 1 || o.Trials > MaxTrials:
		return refuse("Trials", "%d: want 1 to %d", o.Trials, MaxTrials)
	case o.Duration < 10*time.Millisecond || o.Duration > MaxDuration:
		return refuse("Duration", "%v: want 10ms to %v", o.Duration, MaxDuration)
	case o.searches() && o.Sessions < fewSessions:
		return refuse("Sessions", "%d: too few for a search, many would wait in rings: want %d at least", o.Sessions, fewSessions)
	case o.searches() && len(cpus) < 2:
		return refuse("Goals", "the generator and the router want a CPU each, and natkit may use one only")
	}
	return nil
}

func (o *CPSOptions) searches() bool { return len(o.Goals) > 0 }

// cpsRun is a measurement under way.
type cpsRun struct {
	CPSOptions
	res   *Result
	duts  []*dut
	fills map[*trial]fill
}

// fill is what a trial with new sessions left behind.
type fill struct {
	sessions uint64            // in the router's connection tracking table
	growth   map[string]growth // of the kernel's caches, by their names
}

// CPS measures how fast routers take new sessions, what established ones cost
// with all of them in the table, and how many the table took. A router that this
// machine can't have is named in the result with the reason, and the others are
// measured.
func CPS(ctx context.Context, o CPSOptions) (res *Result, err error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	o.About.complete()
	if len(o.Rules) == 0 {
		o.Rules = []int{0}
	}
	r := &cpsRun{CPSOptions: o, fills: map[*trial]fill{}, res: newResult("cps", o.About)}
	defer func() {
		if e := closeDUTs(r.duts); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	o.Plan(o.plan())
	return r.res.ended(ctx, r.measureAll(ctx))
}

// plan is what will be measured, and how long that takes: some two microseconds a new
// session, and as much to remove it.
func (o *CPSOptions) plan() (what string, takes time.Duration) {
	routers := len(o.Routers) * len(o.Rules)
	fill := trialOverhead + 4*time.Microsecond*time.Duration(o.Sessions+o.Held)
	what = fmt.Sprintf("%s of %s through %s", plural.Count(o.Sessions, "new session"), strings.Join(o.Protocols, " and "), plural.Count(routers, "router"))
	takes = time.Duration(routers) * routerTakes
	each := time.Duration(o.Trials) * (fill + 2*(o.Duration+trialOverhead+fill/2))
	for _, goal := range o.Goals {
		goal.Trial = fill
		goal.Sum = 21 * fill
		each = goal.takes()
		what += ", a search for " + strings.ToUpper(goal.Name)
		takes += time.Duration(routers*len(o.Protocols)) * each
	}
	if len(o.Goals) == 0 {
		takes += time.Duration(routers*len(o.Protocols)) * each
	}
	return what, takes
}

// measureAll makes the routers and measures them with all protocols.
func (r *cpsRun) measureAll(ctx context.Context) error {
	for _, router := range r.Routers {
		for _, rules := range r.Rules {
			if err := r.addDUT(ctx, router, rules); err != nil {
				return err
			}
		}
	}
	measure := r.atFullSpeed
	if r.searches() {
		measure = r.search
	}
	for _, protocol := range r.Protocols {
		if err := measure(ctx, protocol); err != nil {
			return err
		}
		r.conditions(protocol)
	}
	return nil
}

// addDUT makes a router in a testbed of its own, whose table must be large enough.
func (r *cpsRun) addDUT(ctx context.Context, router Router, rules int) error {
	r.Progress("%s: making the router", router.Name())
	use := RouterUse{Name: router.Name(), Describe: router.Describe()}
	l, err := newDUT(ctx, router, RouterOptions{Rules: rules, Sessions: r.Sessions + r.Held, Block: r.Block}, r.Sessions+r.Held, false)
	if err == nil && r.searches() {
		if err = l.tester.giveRouterAThread(); err != nil {
			err = errors.Join(err, l.close())
		}
	}
	var unsupported *UnsupportedError
	switch {
	case errors.As(err, &unsupported):
		use.Unsupported = unsupported.Reason
	case err != nil:
		return err
	default:
		l.rules = rules
		r.duts = append(r.duts, l)
		limits, err := l.table()
		if err != nil {
			return err
		}
		if want := r.Sessions + r.Held; limits.Max > 0 && uint64(want) > limits.Max {
			return tooSmall(want, limits.Max)
		}
	}
	if i := slices.IndexFunc(r.res.Routers, func(u RouterUse) bool { return u.Name == use.Name }); i < 0 {
		r.res.Routers = append(r.res.Routers, use)
	} else if use.Unsupported != "" {
		r.note("%s behind %s was left out: %s.", use.Name, plural.Count(rules, "rule"), use.Unsupported)
	}
	return nil
}

// tooSmall says that a table has no room for so many sessions, and what would give it.
func tooSmall(sessions int, limit uint64) error {
	return refuse("Sessions", "%d in all: the table takes %d: want no more, or for the time being "+
		"sysctl -w net.netfilter.nf_conntrack_max=%d net.netfilter.nf_conntrack_buckets=%[3]d, which hold for the whole machine",
		sessions, limit, sessions+sessions/20)
}

// conntrackSysctls is where a namespace with connection tracking has its settings.
const conntrackSysctls = "/proc/sys/net/netfilter/nf_conntrack_"

// table reads how full the router's table is, its own or connection tracking; all is
// 0 where there is none.
func (l *dut) table() (limits conntrack.Limits, err error) {
	if l.own != nil {
		limits.Count, limits.Max, err = l.own.Sessions()
		return limits, err
	}
	err = l.tester.testbed.Router.Do(func() error {
		if _, err := os.Stat(conntrackSysctls + "count"); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		limits, err = conntrack.ReadLimits()
		return err
	})
	return limits, err
}

// emptyTable removes all sessions from the router's table.
func (l *dut) emptyTable(ctx context.Context) error {
	l.warmedFlows = 0
	if l.own != nil {
		if count, _, err := l.own.Sessions(); err != nil || count == 0 {
			return err
		}
		return l.own.Empty(ctx)
	}
	for deadline := time.Now().Add(5 * time.Second); ; {
		limits, err := l.table()
		switch {
		case err != nil:
			return err
		case limits.Count == 0:
			return context.Cause(ctx)
		case time.Now().After(deadline):
			return fmt.Errorf("empty the table of router %s: %s are left after 5 s", l.name, plural.Count(limits.Count, "entry"))
		}
		if err := l.tester.testbed.Router.Do(func() error { return conntrack.Flush(ctx) }); err != nil {
			return err
		}
	}
}

// fill begins each session once, through a router without sessions but those held. Its
// trial ends with the last of them.
func (r *cpsRun) fill(ctx context.Context, l *dut, protocol string, pps float64) (*trial, error) {
	load := frameLoad{frames: []int{MinFrame}, flows: r.Sessions, pps: pps, once: true}
	if protocol == "tcp" {
		load.traffic = connections
	}
	if r.searches() {
		load.cpus = []int{l.tester.generatorCPU}
	} else {
		load.cpus = l.tester.cpus[len(l.tester.cpus)-1:]
	}
	load.duration = fillTime(r.Sessions)
	if pps > 0 { // long enough also for a generator that misses half of its slots
		load.duration = 100*time.Millisecond + time.Duration(2*float64(r.Sessions)/pps*1e9)
	}
	if err := l.emptyTable(ctx); err != nil {
		return nil, err
	}
	held, err := r.hold(ctx, l, load)
	if err != nil {
		return nil, err
	}
	before, err := readSlabs()
	if err != nil {
		return nil, err
	}
	t, err := l.tester.run(ctx, load)
	if err != nil {
		return nil, err
	}
	after, err := readSlabs()
	if err != nil {
		return nil, err
	}
	limits, err := l.table()
	if err != nil {
		return nil, err
	}
	limits.Count -= min(limits.Count, held)
	if t.sent.frames > 0 && t.received.frames == 0 {
		return nil, l.forwardsNothing(t)
	}
	if t.sent.frames < uint64(r.Sessions) {
		t.late = true
		t.noise = append(t.noise, fmt.Sprintf("the generator began %d of %d sessions", t.sent.frames, r.Sessions))
	}
	r.fills[t] = fill{limits.Count, growthPerSession(before, after, limits.Count)}
	if protocol == "udp" && !t.late {
		l.warmed, l.warmedFlows = time.Now(), r.Sessions
	}
	return t, nil
}

// hold begins the sessions that are to be in the table already, and returns how many
// it has.
func (r *cpsRun) hold(ctx context.Context, l *dut, load frameLoad) (uint64, error) {
	if r.Held == 0 {
		return 0, nil
	}
	load.first, load.flows, load.duration = r.Sessions, r.Held, fillTime(r.Held)
	if load.pps > 0 {
		load.pps = warmPPS
	}
	t, err := l.tester.run(ctx, load)
	if err != nil {
		return 0, err
	}
	if t.received.frames == 0 {
		return 0, l.forwardsNothing(t)
	}
	limits, err := l.table()
	return limits.Count, err
}

// atFullSpeed measures with generator, router and sink on one CPU: new sessions, then
// established ones, of which the table has those of the first trials.
func (r *cpsRun) atFullSpeed(ctx context.Context, protocol string) error {
	p := Params{FrameBytes: MinFrame, Flows: r.Sessions, Cores: 1, Protocol: protocol, Held: r.Held}
	fills, err := r.newSessions(ctx, protocol, p)
	if err != nil {
		return err
	}
	for _, flows := range slices.Compact([]int{r.Sessions, 1}) {
		if err := r.establishedSessions(ctx, protocol, flows, p); err != nil {
			return err
		}
	}
	r.tableTook(fills, protocol, p)
	return nil
}

// newSessions measures what beginning a session costs.
func (r *cpsRun) newSessions(ctx context.Context, protocol string, p Params) (fills []series, err error) {
	round := 0
	fills, err = interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		round++
		r.Progress("%s: %d new %s sessions: trial %d", l.name, r.Sessions, protocol, round)
		return r.fill(ctx, l, protocol, 0)
	})
	for i, l := range measured(r.duts, fills) {
		s := &fills[i]
		label := s.label()
		if slices.Max(s.values((*trial).lossRatio)) > maxCostLoss {
			label = "lossy"
		}
		cost := "new_flow_cost_ns"
		if protocol == "tcp" {
			cost = "connection_cost_ns"
		}
		r.figure(l, s, cost, p, label, func(t *trial) float64 {
			return ratio(float64(t.spent), float64(t.received.frames))
		})
		// A connection is established when both ends say so, a session of UDP when it is in the table.
		if protocol == "tcp" {
			r.figure(l, s, "establishment_cps", p, label, func(t *trial) float64 { return t.rate(t.received.frames) })
		} else if r.tracks(s) {
			r.figure(l, s, "establishment_cps", p, label, func(t *trial) float64 { return t.rate(r.fills[t].sessions) })
		}
	}
	return fills, err
}

// establishedSessions measures packets of so many sessions that the table has.
func (r *cpsRun) establishedSessions(ctx context.Context, protocol string, flows int, p Params) error {
	p.Flows = flows
	if flows == 1 {
		p.Held = 0
	}
	load := frameLoad{frames: []int{MinFrame}, flows: flows, duration: r.Duration}
	if protocol == "tcp" {
		load.traffic = segments
	}
	round := 0
	all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		round++
		r.Progress("%s: %d established %s sessions: trial %d", l.name, flows, protocol, round)
		if l.warmedFlows != flows {
			if err := l.emptyTable(ctx); err != nil {
				return nil, err
			}
		}
		load := load
		load.cpus = l.tester.cpus[len(l.tester.cpus)-1:]
		return l.runWarm(ctx, load)
	})
	for i, l := range measured(r.duts, all) {
		r.figure(l, &all[i], "established_pps", p, all[i].label(), func(t *trial) float64 { return t.rate(t.received.frames) })
	}
	return err
}

// tableTook says what the table took in the trials with new sessions.
func (r *cpsRun) tableTook(fills []series, protocol string, p Params) {
	for i, l := range r.duts {
		s := &fills[i]
		if !r.tracks(s) {
			continue
		}
		// A count is right also when it took longer than it should.
		r.figure(l, s, "capacity_sessions", p, "", func(t *trial) float64 { return float64(r.fills[t].sessions) })
		r.missing(l, s, protocol)
		if r.fills[s.trials[0]].sessions < fewSessions {
			continue
		}
		r.memory(l, s, p)
	}
}

// memory says what a session takes of the kernel's memory. The caches are those of
// the whole machine: what other programs took or gave back in most of the trials
// can't be told from it, and is said.
func (r *cpsRun) memory(l *dut, s *series, p Params) {
	if l.own != nil {
		r.ownMemory(l, p)
		return
	}
	var trials []map[string]growth
	for _, t := range s.trials {
		trials = append(trials, r.fills[t].growth)
	}
	took, err := objectsPerSession(trials)
	if err != nil {
		r.note("The kernel memory of a session of %s is unknown, because other programs allocated or freed memory during the trial: %v.", l.name, err)
		return
	}
	bytes := l.bucketBytes()
	for _, o := range took {
		bytes += float64(o.count * o.bytes)
	}
	extension := ""
	if len(took) == 1 { // the entry's own
		extension = "; no extension, which masquerading has for its interface and a pool of addresses (more than " +
			strconv.Itoa(PortsOfAddress) + " sessions) does without"
	}
	p.Rules = l.rules
	r.res.add(NewFigure(l.name, "session_bytes", p, bytes))
	r.note("A session of %s takes of the kernel's caches: %s%s; and its share of the buckets of a full table, %.0f bytes.",
		l.name, objectNames(took), extension, l.bucketBytes())
}

// bucketBytes is an entry's share of connection tracking's two hash tables when as
// many entries are in them as there can be: one of tuples, one of NAT's sources, each
// of nf_conntrack_buckets pointers.
func (l *dut) bucketBytes() float64 {
	const pointer, tables = 8, 2
	limits, err := l.table()
	if err != nil {
		return 0
	}
	return ratio(tables*pointer*float64(limits.Buckets), float64(limits.Max))
}

// ownMemory says the same of a table that is not the kernel's: its maps are there from
// the start, so it is their memory by the sessions that they have room for.
func (r *cpsRun) ownMemory(l *dut, p Params) {
	bytes, err := l.own.SessionBytes()
	if err != nil {
		r.note("What a session of %s takes of the kernel's memory was not to be seen: %v.", l.name, err)
		return
	}
	p.Rules = l.rules
	r.res.add(NewFigure(l.name, "session_bytes", p, bytes))
	r.note("A session of %s takes its share of all maps of sessions, mappings and queues, hash buckets included, when they are full.", l.name)
}

// rate is so many a second of the time that a trial had its one CPU.
func (t *trial) rate(n uint64) float64 { return ratio(float64(n), t.spent.Seconds()) }

// tracks tells whether the router had a session in its table after each trial.
func (r *cpsRun) tracks(s *series) bool {
	return len(s.trials) > 0 && !slices.ContainsFunc(s.trials, func(t *trial) bool { return r.fills[t].sessions == 0 })
}

// missing says which sessions were not in the table.
func (r *cpsRun) missing(l *dut, s *series, protocol string) {
	lost := map[string]int64{}
	var offered, complete, took uint64
	for _, t := range s.trials {
		offered += t.sent.frames
		complete += t.received.frames
		took += r.fills[t].sessions
		for place, n := range t.lost {
			lost[place] += n
		}
	}
	switch {
	case took == offered:
	case protocol == "tcp" && complete == offered:
		r.note("All of %d TCP connections through %s were completed, and %d were in its table: masquerading ends an entry in TIME_WAIT "+
			"when another connection needs its outside port (Linux 6.18).", offered, l.name, took)
	default:
		r.note("Of %d %s sessions offered to %s, %d were in its table: %d are missing. Packets were lost: %s.",
			offered, strings.ToUpper(protocol), l.name, took, int64(offered-took), placesOf(lost))
	}
}

// search finds the highest rates at which a router with a CPU of its own fulfils
// the goals.
func (r *cpsRun) search(ctx context.Context, protocol string) error {
	for _, l := range r.duts {
		received, pps := 0.0, 0.0
		// A flood, and two approaches from above; of a flood of SYNs few become
		// connections, so that an approach begins from below.
		for approaches, tries := 3, 20; approaches > 0 && tries > 0; tries-- {
			r.Progress("%s: %d new %s sessions, overload", l.name, r.Sessions, protocol)
			t, err := r.fill(ctx, l, protocol, pps)
			if err != nil {
				return err
			}
			received = max(received, t.receivedPPS())
			if pps > 0 && t.lossRatio() <= maxCostLoss {
				pps = 1.5 * received
				continue
			}
			pps = 1.2 * received
			approaches--
		}
		for _, goal := range r.Goals {
			if err := r.searchGoal(ctx, l, protocol, goal, received); err != nil {
				return err
			}
		}
	}
	return nil
}

// searchGoal searches around what the router took under overload. Trials end with
// their sessions, whatever the goal says of their duration.
func (r *cpsRun) searchGoal(ctx context.Context, l *dut, protocol string, goal SearchGoal, overload float64) error {
	p := Params{FrameBytes: MinFrame, Flows: r.Sessions, Cores: 1, Protocol: protocol, Held: r.Held, Rules: l.rules}
	name := strings.ToUpper(goal.Name)
	found, err := Search(ctx, goal, searchLeast*overload, searchMost*overload, func(ctx context.Context, pps float64, _ time.Duration) (float64, error) {
		r.Progress("%s: %d new %s sessions, search for %s: %.0f a second", l.name, r.Sessions, protocol, name, pps)
		t, err := r.fill(ctx, l, protocol, pps)
		if err != nil {
			return 0, err
		}
		return t.outcome()
	})
	if err != nil {
		return err
	}
	r.res.addSearch(l.name, "establishment_"+goal.Name+"_cps", p, found)
	return nil
}

// conditions notes how the table was filled, and when sessions end.
func (r *cpsRun) conditions(protocol string) {
	const begin = "Each trial with new %s begins with an empty table, flushed in the router's namespace, and "
	sessions := fmt.Sprintf("%s (%s a source address) in pseudo-random order", plural.Count(r.Sessions, "session"), plural.Count(flowsPerSource, "port"))
	if r.Held > 0 {
		sessions += fmt.Sprintf(", beside %d that the table has", r.Held)
	}
	timeouts := []string{"udp_timeout"}
	if protocol == "udp" {
		r.note(begin+"sends one UDP packet of each of %s. Nothing answers: their entries are unreplied.", "UDP sessions", sessions)
	} else {
		timeouts = []string{"tcp_timeout_time_wait", "tcp_timeout_established"}
		r.note(begin+"makes a TCP connection for each of %s: SYN, SYN-ACK, ACK, the server's FIN, the client's, the last ACK. "+
			"A connection counts when the last has come; a segment is never retransmitted. Their entries are in TIME_WAIT.", "TCP connections", sessions)
	}
	for _, l := range r.duts {
		seconds := make([]any, len(timeouts))
		if err := l.tester.testbed.Router.Do(func() (err error) {
			for i, name := range timeouts {
				text, e := os.ReadFile(conntrackSysctls + name)
				seconds[i], err = strings.TrimSpace(string(text)), errors.Join(err, e)
			}
			return err
		}); err != nil {
			continue // a router without a table
		}
		if protocol == "udp" {
			r.note("The routers forget such a session after %s s without a packet (sysctl net.netfilter.nf_conntrack_udp_timeout). "+
				"A trial with established sessions begins with a packet of each of them, unless the last ones are less than %v old.", append(seconds, l.sessionsLast)...)
		} else {
			r.note("The routers forget such a connection after %s s (sysctl net.netfilter.nf_conntrack_tcp_timeout_time_wait), and an open one after %s s "+
				"(nf_conntrack_tcp_timeout_established). Those of the trials with established sessions were opened before them and stay open.", seconds...)
		}
		return
	}
}

func (r *cpsRun) note(format string, args ...any) {
	r.res.Notes = append(r.res.Notes, fmt.Sprintf(format, args...))
}

// figure adds one quantity of a series.
func (r *cpsRun) figure(l *dut, s *series, metric string, p Params, label string, of func(*trial) float64) {
	p.Rules = l.rules
	f := NewFigure(l.name, metric, p, s.values(of)...)
	f.Discarded, f.Label = s.discarded, label
	r.res.add(f)
}

// entryCache is the cache of the table's entries.
const entryCache = "nf_conntrack"

// object is a number of objects of one of the kernel's caches, and what each takes.
type object struct{ count, bytes uint64 }

// readSlabs reads the objects in use of the kernel's caches, by their names.
func readSlabs() (map[string]object, error) {
	text, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		return nil, fmt.Errorf("read the kernel's caches: %w", err)
	}
	return parseSlabs(string(text)), nil
}

// parseSlabs reads /proc/slabinfo: name, objects in use, objects, size of one,
// objects in a slab, pages in a slab. An object takes its share of the slab.
func parseSlabs(text string) map[string]object {
	caches := map[string]object{}
	for line := range strings.Lines(text) {
		w := strings.Fields(line)
		if len(w) < 6 || w[0] == "#" || w[0] == "slabinfo" {
			continue
		}
		var n [5]uint64
		for i := range n {
			n[i], _ = strconv.ParseUint(w[i+1], 10, 64)
		}
		if inUse, inSlab, pages := n[0], n[3], n[4]; inSlab > 0 {
			caches[w[0]] = object{inUse, pages * uint64(os.Getpagesize()) / inSlab}
		}
	}
	return caches
}

// growth is by how much a cache grew for each session, and how large its objects are.
type growth struct {
	objects float64
	bytes   uint64
}

// growthPerSession is what each of so many sessions took, and what other programs
// took and gave back in that time.
func growthPerSession(before, after map[string]object, sessions uint64) map[string]growth {
	grown := map[string]growth{}
	for name, o := range after {
		if b := before[name]; sessions > 0 && o.count != b.count {
			grown[name] = growth{(float64(o.count) - float64(b.count)) / float64(sessions), o.bytes}
		}
	}
	return grown
}

// maxPartObject is how far from a whole number of objects a session may seem to take,
// for what other programs do.
const maxPartObject = 0.25

// objectsPerSession is what a session takes in the median of the trials: whole objects,
// one of which is the entry. An error says which cache does not show it.
func objectsPerSession(trials []map[string]growth) (map[string]object, error) {
	names := map[string]uint64{entryCache: 0}
	for _, t := range trials {
		for name, g := range t {
			names[name] = g.bytes
		}
	}
	took := map[string]object{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		var each []float64
		for _, t := range trials {
			each = append(each, t[name].objects)
		}
		n := medianOf(each)
		whole := math.Round(n)
		if whole < 0 || math.Abs(n-whole) > maxPartObject || name == entryCache && whole != 1 {
			return nil, fmt.Errorf("%s grew by %.2f objects a session", name, n)
		}
		if whole > 0 {
			took[name] = object{uint64(whole), names[name]}
		}
	}
	return took, nil
}

// objectNames writes objects and their sizes.
func objectNames(objects map[string]object) string {
	var names []string
	for name, o := range objects {
		names = append(names, fmt.Sprintf("%d of %s (%d bytes)", o.count, name, o.bytes))
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}
