// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/kubernetes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/exposition"
)

// readingHolds is how long the series of a table's entries stand without another reading. While a symptom lasts it is read
// every few minutes; after its end nothing shows that the numbers still hold.
const readingHolds = 15 * time.Minute

// What there are at most of series with labels that the machine decides about. With those of
// fixed labels they are below maxSeries.
const (
	maxActive  = 60 // findings that are on, with two series each, where the others leave as much room
	maxSpaces  = 30 // namespaces with a table, of those with most entries
	maxEngines = 14
	maxPorts   = 20 // outside addresses, by protocol
	maxTalkers = 10
	maxPools   = 5 // of engines, fullest first, with seven series each
	maxRefused = 5 // subscribers that were refused something
	maxLogs    = 3 // of translations, with two series each
	maxSinks   = 3 // of these, with three series each, those furthest behind
	maxTunings = 8 // settings that would be changed
	maxSeries  = 500
)

// All families of the monitor. The dashboard is made from this list.
var (
	famBuild      = "build_info"
	descFinding   = exposition.Metric("finding", "Whether a cause is at work: 1 after two windows that show it, 0 after five that do not. Causes at work nowhere have one series, of the host.", "cause", "severity", "namespace")
	descImpact    = exposition.Metric("finding_impact", "Packets or connections that the cause lost in the last window; below 1 how near the limit is.", "cause", "namespace")
	descOmitted   = exposition.Metric("findings_omitted", "Findings at work that have no series because there are too many.")
	descSpaces    = exposition.Metric("namespaces", "Network namespaces that are watched.")
	descUnwatched = exposition.Metric("namespaces_unwatched", "Network namespaces that are not watched because there are too many.")
	descEntries   = exposition.Metric("conntrack_entries", "Entries of the connection tracking table.", "namespace")
	descLimit     = exposition.Metric("conntrack_entries_limit", "Maximum number of entries of a namespace: nf_conntrack_max.", "namespace")
	descOthers    = exposition.Metric("conntrack_entries_others", "Entries of the namespaces that have no series of their own.")
	descFull      = exposition.Metric("conntrack_full_seconds", "In how many seconds the table is full if it grows as it does; absent if it does not grow.", "namespace")
	descFullEarly = exposition.Metric("conntrack_full_early_seconds", "Earliest time until the table is full, by the error of the forecast.", "namespace")
	descFullLate  = exposition.Metric("conntrack_full_late_seconds", "Latest time until the table is full, by the error of the forecast; absent if it may never be.", "namespace")
	descChecked   = exposition.Metric("conntrack_forecasts_checked_total", "Forecasts of the number of entries five minutes ahead that were compared with it.")
	descHeld      = exposition.Metric("conntrack_forecasts_held_total", "Forecasts of which the number of entries was within the range.")
	descStats     = exposition.Metric("conntrack_events_total", "What connection tracking counted in all namespaces: drop without insert_failed is a full table, drop with insert_failed a port or slot that was not found.", "event")
	descDrops     = exposition.Metric("dropped_packets_total", "Packets that the kernel dropped in all namespaces, by what that means for NAT; other are those that mean nothing for it.", "cause")
	descDropsLost = exposition.Metric("dropped_packets_uncounted_total", "Dropped packets that the tracer had no room for.")
	descTracing   = exposition.Metric("drop_tracing", "Whether dropped packets are traced.")
	descPortsUsed = exposition.Metric("snat_ports_used", "Ports of an external address in use towards the destination that uses most, by a reading of the table in the last 15 minutes.", "address", "protocol")
	descTopShare  = exposition.Metric("snat_top_destination_ratio", "Share of that destination among all translated flows of the address.", "address", "protocol")
	descReadAt    = exposition.Metric("conntrack_read_timestamp_seconds", "When the entries of a table were read last, if that was in the last 15 minutes; they are read when the fill, failures or drops give reason to.")
	descTalkers   = exposition.Metric("top_talker_entries", "Entries of the sources with most of them, by a reading of the table in the last 15 minutes.", "source", "namespace")
	descEngine    = exposition.Metric("engine_up", "Whether natkit translates or accelerates in a namespace, by kind.", "engine", "namespace")
	descEngineUse = exposition.Metric("engine_sessions_ratio", "Sessions of an engine, as a share of its limit.", "engine", "namespace")
	descDrift     = exposition.Metric("engine_drift", "Differences between the machine and what the engine was configured for.", "engine", "namespace")
	descSubs      = exposition.Metric("engine_subscribers", "Subscribers of an engine with a session or a port.", "engine", "namespace")
	descPoolUsed  = exposition.Metric("engine_pool_used_ratio", "Share of a pool of external addresses that is taken: of its port blocks, or of the ports of the protocol with fewest left.", "pool", "namespace")
	descPoolSubs  = exposition.Metric("engine_pool_subscribers", "Subscribers of a pool.", "pool", "namespace")
	descPoolNear  = exposition.Metric("engine_pool_subscribers_near_limit", "Subscribers of a pool that have 80 % or more of a limit of theirs: sessions, ports, or port blocks.", "pool", "namespace")
	descPoolPorts = exposition.Metric("engine_pool_ports_free", "Free ports of a pool, of the protocol with fewest left.", "pool", "namespace")
	descPoolBlock = exposition.Metric("engine_pool_blocks", "Port blocks of a pool, without computed ones: used by subscribers, and free ones of the first block's size.", "pool", "namespace", "state")
	descLogGaps   = exposition.Metric("log_gaps", "Gaps of the last day in the log of translations, at most 50.", "namespace")
	descLogAge    = exposition.Metric("log_written_age_seconds", "How long ago the log of translations had been written when it was looked at.", "namespace")
	descSinkUp    = exposition.Metric("log_sink_up", "Whether a sink of the log takes records.", "sink", "namespace")
	descSinkLate  = exposition.Metric("log_sink_behind_seconds", "How long something has been unsent to a sink.", "sink", "namespace")
	descSinkWait  = exposition.Metric("log_sink_unsent_records", "Records that were not sent to a sink yet.", "sink", "namespace")
	descRefused   = exposition.Metric("engine_refused_per_second", "Packets of subscribers that would have opened a session and were refused in the last examination, by reason.", "reason")
	descTopSubs   = exposition.Metric("engine_subscriber_refused_per_second", "Packets refused in the last examination, of the subscribers that were refused most.", "subscriber", "namespace")
	descIntervals = exposition.Metric("monitor_intervals_total", "Intervals that are over.")
	descLast      = exposition.Metric("monitor_last_interval_timestamp_seconds", "When the last interval ended.")
	descLooks     = exposition.Metric("monitor_examinations_total", "Namespaces examined.")
	descDumps     = exposition.Metric("monitor_table_reads_total", "Readings of all entries of a table.")
	descHistory   = exposition.Metric("monitor_history_errors_total", "Intervals that could not be written to the history.")
	descTuneWould = exposition.Metric("tune_proposed", "Value that natkit would give a setting (--tune advise).", "setting", "namespace")
	descTuned     = exposition.Metric("tune_changes_total", "Settings that natkit proposed, applied, kept, took back after measuring, or failed to change (--tune).", "result")
	descCausesLot = exposition.Metric("causes", "Causes that natkit knows.")
)

// Families are all of the monitor's own, in the order of the dashboard.
var Families = []*exposition.Family{
	descFinding, descImpact, descOmitted, descSpaces, descUnwatched, descEntries, descLimit, descOthers, descFull, descFullEarly, descFullLate, descChecked, descHeld, descStats, descDrops, descDropsLost,
	descTracing, descPortsUsed, descTopShare, descReadAt, descTalkers, descEngine, descEngineUse, descDrift, descSubs, descPoolUsed, descPoolSubs, descPoolNear, descPoolPorts, descPoolBlock, descRefused, descTopSubs, descLogGaps, descLogAge, descSinkUp, descSinkLate, descSinkWait, descIntervals, descLast, descLooks, descDumps, descHistory, descTuneWould, descTuned, descCausesLot,
	kubernetes.Families[0], kubernetes.Families[1], kubernetes.Families[2], kubernetes.Families[3],
}

// statNames are the counters of the table that have a series.
var statNames = []string{"drop", "early_drop", "insert_failed", "invalid", "error", "clash_resolve", "chaintoolong", "search_restart"}

// state is what a scrape reads.
type state struct {
	build         map[string]string
	at            time.Time
	active        []Active
	hostname      string
	configuration map[string]string // of the host's namespace, to compare nodes by
	titles        map[uint64]string // of all namespaces
	unwatched     int               // namespaces
	spaces        []spaceState
	trends        map[uint64]*tableTrend
	checked, held int // of namespaces that are gone, too
	stats         map[string]uint64
	drops         map[string]uint64
	dropsLost     uint64
	noDrops       error
	tables        map[uint64]*tableState
	engines       map[uint64]*snapshot.Engine
	logs          map[uint64]logState
	windows       map[uint64]float64 // seconds, that increases of engines are of
	intervals     uint64
	looks, dumps  uint64
	historyErrors uint64
	proposed      []history.Tuning
	tuned         map[string]uint64 // by kind; nil where settings are left alone
	historyError  error
}

// spaceState is a namespace with a table.
type spaceState struct {
	netns        snapshot.Netns
	count, limit uint64
	forecast     *Forecast
}

// tableState is what the last reading of a table showed.
type tableState struct {
	at    time.Time
	table *snapshot.Table
	netns snapshot.Netns
}

func newState(o Options) state {
	s := state{build: o.Build, trends: map[uint64]*tableTrend{}, stats: map[string]uint64{}, drops: map[string]uint64{}, tables: map[uint64]*tableState{}, engines: map[uint64]*snapshot.Engine{}, logs: map[uint64]logState{}, windows: map[uint64]float64{}}
	for _, name := range statNames {
		s.stats[name] = 0
	}
	s.drops[otherDrops] = 0
	for _, cause := range snapshot.NATCauses {
		s.drops[string(cause)] = 0
	}
	return s
}

// otherDrops are those that mean nothing for NAT.
const otherDrops = "other"

// observe takes what a round has shown.
func (m *monitor) observe(r *probe.Round) {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := &m.state
	st.at, st.active, st.noDrops = r.At, m.findings.active(), r.NoDrops
	st.intervals++
	st.looks += uint64(len(r.Looks))
	st.spaces = st.spaces[:0]
	there := map[uint64]bool{}
	st.titles, st.unwatched = map[uint64]string{}, r.Unwatched
	for _, s := range r.Samples {
		there[s.Netns.Inode] = true
		st.titles[s.Netns.Inode] = Title(s.Netns)
		st.sample(s)
	}
	for _, s := range r.Looks {
		if s.Netns.Init || s.Netns.Name == "" {
			st.hostname, st.configuration = s.Host.Hostname, snapshot.Comparable(s)
		}
		st.logs[s.Netns.Inode] = logState{s.Log, s.TakenAt}
		st.engines[s.Netns.Inode], st.windows[s.Netns.Inode] = s.Engine, s.WindowSeconds
		if ct := s.Conntrack; ct != nil && ct.Table != nil && ct.Table.Entries > 0 {
			if t := st.tables[s.Netns.Inode]; t == nil || t.table != ct.Table { // else that of an earlier examination stood for it
				st.dumps++
				st.tables[s.Netns.Inode] = &tableState{r.At, ct.Table, s.Netns}
			}
		}
	}
	maps.DeleteFunc(st.tables, func(_ uint64, t *tableState) bool { return r.At.Sub(t.at) > readingHolds })
	maps.DeleteFunc(st.engines, func(_ uint64, e *snapshot.Engine) bool { return e == nil })
	maps.DeleteFunc(st.logs, func(_ uint64, l logState) bool { return l.Log == nil })
	st.gone(func(inode uint64) bool { return !there[inode] })
}

// gone forgets namespaces that are gone.
func (st *state) gone(is func(inode uint64) bool) {
	maps.DeleteFunc(st.tables, func(inode uint64, _ *tableState) bool { return is(inode) })
	maps.DeleteFunc(st.windows, func(inode uint64, _ float64) bool { return is(inode) })
	maps.DeleteFunc(st.engines, func(inode uint64, _ *snapshot.Engine) bool { return is(inode) })
	maps.DeleteFunc(st.logs, func(inode uint64, _ logState) bool { return is(inode) })
	for inode, t := range st.trends {
		if is(inode) {
			st.checked, st.held = st.checked+t.score.Checked, st.held+t.score.Held
			delete(st.trends, inode)
		}
	}
}

func (st *state) sample(s *snapshot.Snapshot) {
	if ct := s.Conntrack; ct != nil {
		for _, name := range statNames {
			st.stats[name] += ct.Stats[name]
		}
		if ct.Count > 0 || st.trends[s.Netns.Inode] != nil {
			t := st.trends[s.Netns.Inode]
			if t == nil {
				t = &tableTrend{}
				st.trends[s.Netns.Inode] = t
			}
			st.spaces = append(st.spaces, spaceState{s.Netns, ct.Count, ct.Max, t.add(s.TakenAt, ct.Count, ct.Max)})
		}
	}
	if s.Drops != nil {
		st.dropsLost += s.Drops.LostEvents
		for _, row := range s.Drops.Rows {
			if !row.Benign {
				st.drops[cmp.Or(string(row.Cause), otherDrops)] += row.Count
			}
		}
	}
}

func yes(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// collect is the answer to a scrape: what the last interval has shown. Nothing is read for it.
func (m *monitor) collect() *exposition.Exposition {
	e := exposition.New()
	e.Process()
	m.mu.Lock()
	defer m.mu.Unlock()
	st := &m.state
	names := slices.Sorted(maps.Keys(st.build))
	var values []string
	for _, name := range names {
		values = append(values, st.build[name])
	}
	e.Gauge(exposition.Metric(famBuild, "Always 1; the labels say which natkit this is.", names...), 1, values...)
	e.Counter(descIntervals, float64(st.intervals))
	if st.at.IsZero() {
		return e
	}
	e.Gauge(descLast, float64(st.at.UnixMilli())/1000)
	e.Counter(descLooks, float64(st.looks))
	e.Counter(descDumps, float64(st.dumps))
	e.Counter(descHistory, float64(st.historyErrors))
	st.exposeTables(e)
	for _, name := range statNames {
		e.Counter(descStats, float64(st.stats[name]), name)
	}
	for _, cause := range slices.Sorted(maps.Keys(st.drops)) {
		e.Counter(descDrops, float64(st.drops[cause]), cause)
	}
	e.Counter(descDropsLost, float64(st.dropsLost))
	e.Gauge(descTracing, yes(st.noDrops == nil))
	st.exposeReadings(e)
	st.exposeEngines(e)
	st.exposeLogs(e)
	if m.o.Kubernetes != nil {
		m.o.Kubernetes.Expose(e)
	}
	st.exposeTunings(e)
	st.exposeFindings(e) // in the room that is left
	return e
}

func (st *state) exposeFindings(e *exposition.Exposition) {
	on := map[string]bool{}
	for _, a := range st.active {
		on[a.Finding.Code] = true
	}
	catalogue := causes.Catalogue()
	e.Gauge(descCausesLot, float64(len(catalogue)))
	for _, c := range catalogue {
		if !on[c.Code] {
			e.Gauge(descFinding, 0, c.Code, slices.Max(c.Severities).String(), "host")
		}
	}
	room := min(maxActive, (maxSeries-1-e.Len())/2) // one is of those that are omitted
	shown := map[string]bool{}
	for _, a := range st.active {
		// Two pods may bear the same name: one series is enough to page.
		key := a.Finding.Code + "\x00" + Title(a.Netns)
		if len(shown) >= room || shown[key] {
			continue
		}
		shown[key] = true
		e.Gauge(descFinding, 1, a.Finding.Code, a.Finding.Severity.String(), Title(a.Netns))
		e.Gauge(descImpact, a.Finding.Impact, a.Finding.Code, Title(a.Netns))
	}
	e.Gauge(descOmitted, float64(len(st.active)-len(shown)))
}

func (st *state) exposeTables(e *exposition.Exposition) {
	spaces := slices.Clone(st.spaces)
	slices.SortStableFunc(spaces, func(a, b spaceState) int { return cmp.Compare(b.count, a.count) })
	e.Gauge(descSpaces, float64(len(st.titles)))
	e.Gauge(descUnwatched, float64(st.unwatched))
	others, shown := uint64(0), map[string]bool{}
	for _, s := range spaces {
		name := Title(s.netns)
		if len(shown) >= maxSpaces || shown[name] {
			others += s.count
			continue
		}
		shown[name] = true
		e.Gauge(descEntries, float64(s.count), name)
		e.Gauge(descLimit, float64(s.limit), name)
		if f := s.forecast; f != nil {
			e.Gauge(descFull, f.Full.Seconds(), name)
			e.Gauge(descFullEarly, f.Early.Seconds(), name)
			if f.Late > 0 {
				e.Gauge(descFullLate, f.Late.Seconds(), name)
			}
		}
	}
	e.Gauge(descOthers, float64(others))
	checked, held := st.checked, st.held
	for _, t := range st.trends {
		checked, held = checked+t.score.Checked, held+t.score.Held
	}
	e.Counter(descChecked, float64(checked))
	e.Counter(descHeld, float64(held))
}

// exposeReadings shows what the last readings of tables have shown.
func (st *state) exposeReadings(e *exposition.Exposition) {
	type use struct {
		address, protocol string
		used, most        uint64
	}
	uses := map[string]*use{}
	type talker struct {
		source, space string
		entries       uint64
	}
	var talkers []talker
	newest := time.Time{}
	for _, t := range st.tables {
		if t.at.After(newest) {
			newest = t.at
		}
		for _, u := range t.table.SNATPorts {
			key := u.Outside.String() + "\x00" + u.Protocol
			if uses[key] == nil {
				uses[key] = &use{address: u.Outside.String(), protocol: u.Protocol}
			}
			uses[key].used = max(uses[key].used+u.Used, entriesOf(t.table, u.Outside))
			uses[key].most = max(uses[key].most, u.Used)
		}
		for _, s := range t.table.Sources {
			talkers = append(talkers, talker{s.Addr.String(), Title(t.netns), s.Entries})
		}
	}
	if !newest.IsZero() {
		e.Gauge(descReadAt, float64(newest.UnixMilli())/1000)
	}
	sorted := slices.SortedFunc(maps.Values(uses), func(a, b *use) int {
		return cmp.Or(cmp.Compare(b.most, a.most), strings.Compare(a.address, b.address), strings.Compare(a.protocol, b.protocol))
	})
	for _, u := range sorted[:min(len(sorted), maxPorts)] {
		e.Gauge(descPortsUsed, float64(u.most), u.address, u.protocol)
		e.Gauge(descTopShare, float64(u.most)/float64(max(u.used, 1)), u.address, u.protocol)
	}
	slices.SortFunc(talkers, func(a, b talker) int {
		return cmp.Or(cmp.Compare(b.entries, a.entries), strings.Compare(a.source, b.source), strings.Compare(a.space, b.space))
	})
	shown := map[talker]bool{}
	for _, t := range talkers {
		key := talker{t.source, t.space, 0}
		if len(shown) < maxTalkers && !shown[key] {
			shown[key] = true
			e.Gauge(descTalkers, float64(t.entries), t.source, t.space)
		}
	}
}

func (st *state) exposeEngines(e *exposition.Exposition) {
	shown := map[string]bool{}
	for _, inode := range slices.Sorted(maps.Keys(st.engines)) {
		engine, name := st.engines[inode], st.titles[inode]
		if name == "" || len(shown) >= maxEngines || shown[name] {
			continue
		}
		shown[name] = true
		e.Gauge(descEngine, 1, engine.Kind, name)
		e.Gauge(descDrift, float64(len(engine.Drift)), engine.Kind, name)
		if engine.SessionsMax > 0 {
			e.Gauge(descEngineUse, float64(engine.Sessions)/float64(engine.SessionsMax), engine.Kind, name)
		}
		if engine.Tracks() {
			e.Gauge(descSubs, float64(engine.Subscribers), engine.Kind, name)
		}
	}
	st.exposePools(e, shown)
	st.exposeRefused(e, shown)
}

// logState is how a log was kept when it was looked at.
type logState struct {
	*snapshot.Log
	at time.Time
}

// exposeLogs shows how the logs of translations and their sinks are.
func (st *state) exposeLogs(e *exposition.Exposition) {
	type row struct {
		snapshot.LogSink
		name, space string
	}
	var rows []row
	shown := map[string]bool{}
	for _, inode := range slices.Sorted(maps.Keys(st.logs)) {
		l, space := st.logs[inode], st.titles[inode]
		if space == "" || shown[space] || len(shown) >= maxLogs {
			continue
		}
		shown[space] = true
		e.Gauge(descLogGaps, float64(l.GapCount), space)
		if !l.Written.IsZero() {
			e.Gauge(descLogAge, l.at.Sub(l.Written).Seconds(), space)
		}
		for _, s := range l.Sinks {
			rows = append(rows, row{s, s.Name(), space})
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.Behind, a.Behind) })
	series := map[[2]string]bool{}
	for _, s := range rows {
		key := [2]string{s.name, s.space}
		if len(series) >= maxSinks || series[key] {
			continue
		}
		series[key] = true
		e.Gauge(descSinkUp, yes(s.Connected), s.name, s.space)
		e.Gauge(descSinkLate, s.Behind, s.name, s.space)
		e.Gauge(descSinkWait, float64(s.Unsent), s.name, s.space)
	}
}

// exposePools shows the fullest pools of the engines that are shown.
func (st *state) exposePools(e *exposition.Exposition, shown map[string]bool) {
	type row struct {
		snapshot.EnginePool
		space string
	}
	var rows []row
	for _, inode := range slices.Sorted(maps.Keys(st.engines)) {
		if name := st.titles[inode]; shown[name] {
			for _, p := range st.engines[inode].Pools {
				rows = append(rows, row{p, name})
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.Share, a.Share) })
	series := map[[2]string]bool{}
	for _, p := range rows {
		key := [2]string{p.Name, p.space}
		if len(series) >= maxPools || series[key] {
			continue
		}
		series[key] = true
		e.Gauge(descPoolUsed, p.Share, p.Name, p.space)
		e.Gauge(descPoolSubs, float64(p.Subscribers), p.Name, p.space)
		e.Gauge(descPoolNear, float64(p.NearLimit), p.Name, p.space)
		e.Gauge(descPoolPorts, float64(min(p.FreeTCP, p.FreeUDP, p.FreeICMP)), p.Name, p.space)
		if p.BlockSize > 0 {
			e.Gauge(descPoolBlock, float64(p.BlocksUsed), p.Name, p.space, "used")
			e.Gauge(descPoolBlock, float64(p.BlocksFree), p.Name, p.space, "free")
		}
	}
}

// exposeRefused shows what subscribers were refused, and who most.
func (st *state) exposeRefused(e *exposition.Exposition, shown map[string]bool) {
	type row struct {
		subscriber, space string
		perSecond         float64
	}
	var rows []row
	sums := map[string]float64{}
	engines := false
	for _, inode := range slices.Sorted(maps.Keys(st.engines)) {
		engine, name, seconds := st.engines[inode], st.titles[inode], st.windows[inode]
		if !engine.Tracks() || seconds <= 0 {
			continue
		}
		engines = true
		for _, reason := range rulefile.Refusals {
			sums[reason] += float64(engine.Packets[reason]) / seconds
		}
		for i := range engine.Sources {
			if n := engine.Sources[i].AllRefused(); n > 0 && shown[name] {
				rows = append(rows, row{engine.Sources[i].Name(), name, float64(n) / seconds})
			}
		}
	}
	if !engines {
		return
	}
	for _, reason := range rulefile.Refusals {
		e.Gauge(descRefused, sums[reason], reason)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.perSecond, a.perSecond) })
	series := map[[2]string]bool{}
	for _, r := range rows {
		if key := [2]string{r.subscriber, r.space}; len(series) < maxRefused && !series[key] {
			series[key] = true
			e.Gauge(descTopSubs, r.perSecond, r.subscriber, r.space)
		}
	}
}

// entriesOf is how many translated flows an address has, 0 where that was not counted.
func entriesOf(t *snapshot.Table, outside netip.Addr) uint64 {
	for _, o := range t.Outsides {
		if o.Addr == outside {
			return o.Entries
		}
	}
	return 0
}
