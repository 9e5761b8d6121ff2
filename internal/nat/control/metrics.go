// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/exposition"
)

// metrics answers Prometheus at /metrics, and who asks whether the NAT works at /healthz.
// Nothing is gathered between scrapes. Labels are words of this package, or addresses of
// the rule file: what packets say is in none, so that there can't be more series
// than maxMetricAddresses allows.
type metrics struct {
	ns    *netns.Handle
	build map[string]string
	ports *portControl

	mu          sync.Mutex // guards what follows: one scrape at a time
	reloads     map[reload]int
	lastOK      bool
	lastSuccess time.Time
	rules       int
	file        *rulefile.File
	ruleset     nft.Ruleset // of engine nft: the file compiled, nil until it is asked for
	starting    error       // nil since rules are in use
}

// reload is what caused a reload, and its result.
type reload struct{ cause, result string }

// maxMetricAddresses is how many outside addresses have series of their own; of more
// there are the sums.
const maxMetricAddresses = 256

// What a reload can be caused by.
var reloadCauses = []string{"file", "signal", "machine"}

func newMetrics(ns *netns.Handle, build map[string]string, ports *portControl) *metrics {
	m := &metrics{ns: ns, build: build, ports: ports, reloads: map[reload]int{}}
	for _, cause := range reloadCauses {
		m.reloads[reload{cause, "ok"}], m.reloads[reload{cause, "failed"}] = 0, 0
	}
	return m
}

// use notes the rules in use.
func (m *metrics) use(p *Plan, file *rulefile.File) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rules, m.starting = len(file.Rules), nil
	if file != m.file {
		m.file, m.ruleset = file, p.ruleset
	}
}

// reloaded counts a reload.
func (m *metrics) reloaded(cause string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastOK = err == nil
	if err != nil {
		m.reloads[reload{cause, "failed"}]++
		return
	}
	m.reloads[reload{cause, "ok"}]++
	m.lastSuccess = time.Now()
}

// listen answers until it is stopped.
func (m *metrics) listen(l net.Listener) (stop func()) {
	return exposition.Listen(l, m.collect, m.health)
}

// health is why packets are not translated, nil if they are.
func (m *metrics) health() error {
	m.mu.Lock()
	starting := m.starting
	m.mu.Unlock()
	if starting != nil {
		return starting
	}
	return health(m.ns)
}

// Of both engines.
var (
	descUp          = exposition.Metric("up", "Whether the gateway runs, by its engine.", "engine")
	descReloads     = exposition.Metric("reloads_total", "Applies of the rules, by cause and result.", "cause", "result")
	descLastOK      = exposition.Metric("last_reload_successful", "Whether the last reload was applied; if not, the earlier rules are in use.")
	descLastSuccess = exposition.Metric("last_reload_success_timestamp_seconds", "When rules were last applied.")
	descRules       = exposition.Metric("rules", "Rules in use.")
	descRequests    = exposition.Metric("pcp_requests_total", "Requests for explicit mappings, by protocol, opcode and result; rate-limited and ignored ones got no answer.", "protocol", "opcode", "result")
)

// Of engine ebpf.
var (
	descGeneration    = exposition.Metric("generation", "Rule sets since the engine started.")
	descSessions      = exposition.Metric("sessions", "Sessions now.")
	descSessionsLimit = exposition.Metric("sessions_limit", "Maximum number of sessions.")
	descMappings      = exposition.Metric("mappings", "Mappings now, including those in hold-down.")
	descMappingsLimit = exposition.Metric("mappings_limit", "Maximum number of mappings.")
	descExplicit      = exposition.Metric("explicit_mappings", "Explicit mappings now, that hosts asked for by PCP or NAT-PMP.")
	descPorts         = exposition.Metric("ports", "Ports of an external address; address is all if there are more than 256.", "address", "class")
	descPortsFree     = exposition.Metric("ports_free", "Free ports of an external address.", "address", "class")
	descSubscribers   = exposition.Metric("subscribers", "Subscribers with a session or a port, by pool; pool is all if there are more than 64.", "pool")
	descSubsNear      = exposition.Metric("subscribers_near_limit", "Subscribers of a pool that have 80 % or more of a limit of theirs: sessions, ports, or port blocks.", "pool")
	descSubsLimit     = exposition.Metric("subscribers_limit", "Maximum number of subscribers: limits.sources.")
	descPoolAddresses = exposition.Metric("pool_addresses", "External addresses of a pool; draining: no rule uses them any more.", "pool", "state")
	descPoolUsed      = exposition.Metric("pool_used_ratio", "Share of a pool that is taken: of its port blocks, or of the ports of the protocol with fewest left.", "pool")
	descPoolBlocks    = exposition.Metric("pool_blocks", "Port blocks of a pool, without computed ones: used by subscribers, and free ones of the first block's size.", "pool", "state")
	descPoolRefused   = exposition.Metric("pool_refused_packets", "Packets that the present subscribers of a pool were refused for since they came, by reason; a subscriber that ends takes its part along.", "pool", "reason")
	descPackets       = exposition.Metric("packets_total", "Packets by outcome: passed to the stack, translated, or dropped, and the reason.", "verdict", "reason")
	descBytes         = exposition.Metric("bytes_total", "Bytes of IPv4 translated, by direction.", "direction")
	descRefused       = exposition.Metric("sessions_refused_total", "Packets that would have opened a session, dropped because a limit was reached.", "reason")
	descGCAge         = exposition.Metric("gc_age_seconds", "Time since garbage collection last ran.")
	descGCTime        = exposition.Metric("gc_seconds_total", "CPU time of garbage collection.")
	descGCExamined    = exposition.Metric("gc_examined_total", "Sessions and mappings that garbage collection examined.")
	descEventsLost    = exposition.Metric("events_lost_total", "Events lost because the reader's buffer was full.")
)

// descCounted are the reasons that are no packet's end, by their names.
var descCounted = map[string]*exposition.Family{
	"to-tc":           exposition.Metric("packets_left_to_tc_total", "Packets that XDP left to tc, where their outcome is counted."),
	"created":         exposition.Metric("sessions_created_total", "Sessions created."),
	"expired":         exposition.Metric("sessions_expired_total", "Sessions removed after their timeout."),
	"mapped":          exposition.Metric("mappings_created_total", "Mappings created."),
	"unmapped":        exposition.Metric("mappings_expired_total", "Mappings removed, their ports free again."),
	"hairpinned":      exposition.Metric("sessions_hairpinned_total", "Sessions between two internal hosts by an external address."),
	"mss-clamped":     exposition.Metric("mss_clamped_total", "SYN packets whose MSS was lowered."),
	"icmp-translated": exposition.Metric("icmp_errors_translated_total", "ICMP errors translated, with the packet inside."),
	"icmp-sent":       exposition.Metric("icmp_errors_sent_total", "ICMP errors sent by the engine."),
	"fragment-held":   exposition.Metric("fragments_held_total", "Fragments that arrived before their first one and were kept for it."),
}

// refusals are the reasons for which a packet does not open the session that it would.
var refusals = []string{"no-port", "no-block", "no-address", "sessions-full", "mappings-full", "source-limit", "port-limit", "rate-limit", "sources-full"}

// Of engine nft: the kernel's.
var (
	descEntries      = exposition.Metric("conntrack_entries", "Entries of the namespace's connection tracking table.")
	descEntriesLimit = exposition.Metric("conntrack_entries_limit", "Maximum entries of a namespace: nf_conntrack_max.")
	descCounters     = exposition.Metric("conntrack_events_total", "What connection tracking counts in the namespace: drop without insert_failed is a full table, drop with insert_failed a port or slot that was not found.", "event")
	descTranslated   = exposition.Metric("rule_uses_total", "Connections that the rules have translated since they were applied, and packets of stateless ones.")
)

// conntrackCounters are those that tell of packets and flows that did not go their way.
var conntrackCounters = []string{"drop", "early_drop", "insert_failed", "invalid", "error", "clash_resolve", "chaintoolong", "search_restart"}

// collect reads the engine that is up, and what serve itself has done.
func (m *metrics) collect() *exposition.Exposition {
	e := exposition.New()
	e.Process()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collectServe(e)
	rec, err := ofEngine(recordOf(m.ns))
	up := err == nil && rec.Whole
	for _, engine := range Engines() {
		e.Gauge(descUp, number(up && string(rec.Engine) == engine), engine)
	}
	switch {
	case errors.Is(err, ErrDown), err == nil && !rec.Whole:
	case err != nil:
		e.Fail(descUp, err)
	default:
		running, err := rec.open(m.ns)
		if err == nil {
			running.collect(e, m, rec)
			err = running.Close()
		}
		if err != nil {
			e.Fail(descUp, err)
		}
	}
	return e
}

// collectServe reports reloads, and which natkit this is.
func (m *metrics) collectServe(e *exposition.Exposition) {
	names := slices.Sorted(maps.Keys(m.build))
	build := exposition.Metric("build_info", "Always 1; the labels say which natkit this is.", names...)
	var values []string
	for _, name := range names {
		values = append(values, m.build[name])
	}
	e.Gauge(build, 1, values...)
	for _, cause := range reloadCauses {
		for _, result := range []string{"ok", "failed"} {
			e.Counter(descReloads, float64(m.reloads[reload{cause, result}]), cause, result)
		}
	}
	e.Gauge(descLastOK, number(m.lastOK))
	success := 0.0
	if !m.lastSuccess.IsZero() {
		success = float64(m.lastSuccess.UnixNano()) / 1e9
	}
	e.Gauge(descLastSuccess, success)
	e.Gauge(descRules, float64(m.rules))
	for r, n := range m.ports.requests() {
		e.Counter(descRequests, float64(n), r.protocol, r.opcode, r.result)
	}
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (engine *ebpfRunning) collect(e *exposition.Exposition, m *metrics, rec *record) {
	generation, err1 := engine.Generation()
	stats, err2 := engine.Stats()
	addresses, err3 := readAddresses(engine.Engine, rec)
	pools, err4 := engine.pools(m, rec, addresses)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		e.Fail(descGeneration, err)
		return
	}
	size := engine.Size()
	e.Gauge(descGeneration, float64(generation))
	e.Gauge(descSessions, float64(stats.Sessions))
	e.Gauge(descSessionsLimit, float64(size.Sessions))
	e.Gauge(descMappings, float64(stats.Mappings))
	e.Gauge(descMappingsLimit, float64(size.Mappings))
	e.Gauge(descExplicit, float64(stats.Explicit))
	e.Counter(descBytes, float64(stats.BytesIn), "in")
	e.Counter(descBytes, float64(stats.BytesOut), "out")
	e.Gauge(descGCAge, max(stats.GCAge.Seconds(), 0))
	e.Counter(descGCTime, stats.GCTime.Seconds())
	e.Counter(descGCExamined, float64(stats.GCExamined))
	e.Counter(descEventsLost, float64(stats.EventsLost))
	for _, r := range rulefile.Reasons {
		n := float64(stats.Reasons[r.Name])
		if d := descCounted[r.Name]; d != nil {
			e.Counter(d, n)
			continue
		}
		e.Counter(descPackets, n, r.Kind, r.Name)
		if slices.Contains(refusals, r.Name) {
			e.Counter(descRefused, n, r.Name)
		}
	}
	exposePorts(e, addresses)
	exposePools(e, pools, size.Sources)
}

// pools reads what is left in each pool by the rules that serve keeps, or those of the record.
func (engine *ebpfRunning) pools(m *metrics, rec *record, addresses []AddressStatus) ([]PoolStatus, error) {
	file := m.file
	if file == nil {
		var err error
		if file, err = rec.rules(); err != nil {
			return nil, err
		}
	}
	b, totals := booksOf(rec, file), map[string]*SubscriberTotal{}
	if err := b.each(engine.Engine, func(s *Subscriber) bool { total(totals, s.Pool, s); return true }); err != nil {
		return nil, err
	}
	return b.poolStatus(engine.Engine, addresses, totals)
}

// maxMetricPools is how many pools have series of their own; of more there are the sums.
const maxMetricPools = 64

// exposePools adds the pools, one by one or all together.
func exposePools(e *exposition.Exposition, pools []PoolStatus, subscribersLimit int) {
	e.Gauge(descSubsLimit, float64(subscribersLimit))
	if len(pools) > maxMetricPools {
		pools = []PoolStatus{allPools(pools)}
	}
	for _, p := range pools {
		e.Gauge(descSubscribers, float64(p.Subscribers), p.Name)
		e.Gauge(descSubsNear, float64(p.NearLimit), p.Name)
		e.Gauge(descPoolAddresses, float64(p.Addresses), p.Name, "in use")
		e.Gauge(descPoolAddresses, float64(p.Draining), p.Name, "draining")
		e.Gauge(descPoolUsed, p.Share, p.Name)
		if p.Blocks != nil {
			e.Gauge(descPoolBlocks, float64(p.Blocks.Used), p.Name, "used")
			e.Gauge(descPoolBlocks, float64(p.Blocks.Free), p.Name, "free")
		}
		for _, reason := range rulefile.Refusals {
			e.Gauge(descPoolRefused, float64(p.Refused[reason]), p.Name, reason)
		}
	}
}

// allPools is all pools as one, as full as the fullest.
func allPools(pools []PoolStatus) PoolStatus {
	sum := PoolStatus{Name: "all", Refused: map[string]uint64{}}
	for _, p := range pools {
		sum.Subscribers, sum.Addresses, sum.Draining = sum.Subscribers+p.Subscribers, sum.Addresses+p.Addresses, sum.Draining+p.Draining
		sum.NearLimit += p.NearLimit
		sum.Share = max(sum.Share, p.Share)
		if p.Blocks != nil {
			if sum.Blocks == nil {
				sum.Blocks = &PoolBlocks{}
			}
			sum.Blocks.Used, sum.Blocks.Free = sum.Blocks.Used+p.Blocks.Used, sum.Blocks.Free+p.Blocks.Free
		}
		for reason, n := range p.Refused {
			sum.Refused[reason] += n
		}
	}
	return sum
}

// exposePorts adds the addresses that give ports, one by one or all together.
func exposePorts(e *exposition.Exposition, addresses []AddressStatus) {
	type row struct{ ports, tcp, udp, icmp int }
	rows := map[string]row{}
	var names []string
	for _, a := range addresses {
		if a.FirstPort == 0 {
			continue
		}
		name := a.Address.String()
		if len(addresses) > maxMetricAddresses {
			name = "all"
		}
		if _, known := rows[name]; !known {
			names = append(names, name)
		}
		r := rows[name]
		rows[name] = row{r.ports + a.Ports, r.tcp + a.FreeTCP, r.udp + a.FreeUDP, r.icmp + a.FreeICMP}
	}
	for _, name := range names {
		r := rows[name]
		for class, free := range map[string]int{"tcp": r.tcp, "udp": r.udp, "icmp": r.icmp} {
			e.Gauge(descPorts, float64(r.ports), name, class)
			e.Gauge(descPortsFree, float64(free), name, class)
		}
	}
}

// collect reads what the kernel counts. Without connection tracking there is nothing
// to read, and nothing is translated.
func (engine nftRunning) collect(e *exposition.Exposition, m *metrics, _ *record) {
	var limits conntrack.Limits
	err := m.ns.Do(func() (err error) { limits, err = conntrack.ReadLimits(); return err })
	if err != nil {
		e.Fail(descEntries, err)
		return
	}
	e.Gauge(descEntries, float64(limits.Count))
	e.Gauge(descEntriesLimit, float64(limits.Max))
	counters, err := probe.ConntrackCounters(m.ns)
	if err != nil {
		e.Fail(descCounters, err)
		return
	}
	for _, name := range conntrackCounters {
		if n, known := counters[name]; known {
			e.Counter(descCounters, float64(n), name)
		}
	}
	if m.ruleset == nil && m.file != nil {
		m.ruleset, err = engine.compile(m.file)
	}
	if err != nil {
		e.Fail(descTranslated, err)
		return
	}
	uses, err := m.ruleset.Uses(m.ns)
	if err != nil {
		e.Fail(descTranslated, err)
		return
	}
	total := uint64(0)
	for _, u := range uses {
		total += u.Packets
	}
	e.Counter(descTranslated, float64(total))
}
