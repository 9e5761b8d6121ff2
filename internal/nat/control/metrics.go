// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
)

// metrics answers Prometheus at /metrics, and who asks whether the NAT works at /healthz.
// Nothing is gathered between scrapes. Labels are words of this package, or addresses of
// the rule file: what packets say is in none, so that there can't be more series
// than maxMetricAddresses allows.
type metrics struct {
	ns    *netns.Handle
	build map[string]string

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

func newMetrics(ns *netns.Handle, build map[string]string) *metrics {
	m := &metrics{ns: ns, build: build, reloads: map[reload]int{}}
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

// mostScrapes are how many scrapes may wait for each other.
const mostScrapes = 4

// listen answers until it is stopped.
func (m *metrics) listen(l net.Listener) (stop func()) {
	mux := http.NewServeMux()
	scrapes := make(chan struct{}, mostScrapes)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case scrapes <- struct{}{}:
			defer func() { <-scrapes }()
		default:
			http.Error(w, fmt.Sprintf("%d scrapes are being answered: ask again later", mostScrapes), http.StatusServiceUnavailable)
			return
		}
		e := m.collect()
		if e.err != nil {
			http.Error(w, "read metrics: "+e.err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		e.write(w)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := m.health(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, WriteTimeout: time.Minute}
	go server.Serve(l)
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			server.Close()
		}
	}
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
	descUp          = metric("up", "Whether the gateway runs, by its engine.", "engine")
	descReloads     = metric("reloads_total", "Applies of the rules, by cause and result.", "cause", "result")
	descLastOK      = metric("last_reload_successful", "Whether the last reload was applied; if not, the earlier rules are in use.")
	descLastSuccess = metric("last_reload_success_timestamp_seconds", "When rules were last applied.")
	descRules       = metric("rules", "Rules in use.")
)

// Of engine ebpf.
var (
	descGeneration    = metric("generation", "Rule sets since the engine started.")
	descSessions      = metric("sessions", "Sessions now.")
	descSessionsLimit = metric("sessions_limit", "Maximum number of sessions.")
	descMappings      = metric("mappings", "Mappings now, including those in hold-down.")
	descMappingsLimit = metric("mappings_limit", "Maximum number of mappings.")
	descPorts         = metric("ports", "Ports of an external address; address is all if there are more than 256.", "address", "class")
	descPortsFree     = metric("ports_free", "Free ports of an external address.", "address", "class")
	descPackets       = metric("packets_total", "Packets by outcome: passed to the stack, translated, or dropped, and the reason.", "verdict", "reason")
	descBytes         = metric("bytes_total", "Bytes of IPv4 translated, by direction.", "direction")
	descRefused       = metric("sessions_refused_total", "Packets that would have opened a session, dropped because a limit was reached.", "reason")
	descSweepAge      = metric("sweep_age_seconds", "Time since garbage collection last ran.")
	descSweepTime     = metric("sweep_seconds_total", "CPU time of garbage collection.")
	descSweepLooked   = metric("sweep_looked_total", "Sessions and mappings that garbage collection examined.")
	descEventsLost    = metric("events_lost_total", "Events lost because the reader's buffer was full.")
)

// descCounted are the reasons that are no packet's end, by their names.
var descCounted = map[string]*family{
	"to-tc":           metric("packets_left_to_tc_total", "Packets that XDP left to tc, where their outcome is counted."),
	"created":         metric("sessions_created_total", "Sessions created."),
	"expired":         metric("sessions_expired_total", "Sessions removed after their timeout."),
	"mapped":          metric("mappings_created_total", "Mappings created."),
	"unmapped":        metric("mappings_expired_total", "Mappings removed, their ports free again."),
	"hairpinned":      metric("sessions_hairpinned_total", "Sessions between two internal hosts by an external address."),
	"mss-clamped":     metric("mss_clamped_total", "SYN packets whose MSS was lowered."),
	"icmp-translated": metric("icmp_errors_translated_total", "ICMP errors translated, with the packet inside."),
	"icmp-sent":       metric("icmp_errors_sent_total", "ICMP errors sent by the engine."),
	"fragment-held":   metric("fragments_held_total", "Fragments that arrived before their first one and were kept for it."),
}

// refusals are the reasons for which a packet does not open the session that it would.
var refusals = []string{"no-port", "no-address", "sessions-full", "mappings-full", "source-limit", "sources-full"}

// Of engine nft: the kernel's.
var (
	descEntries      = metric("conntrack_entries", "Entries of the namespace's connection tracking table.")
	descEntriesLimit = metric("conntrack_entries_limit", "Maximum entries of a namespace: nf_conntrack_max.")
	descCounters     = metric("conntrack_events_total", "What connection tracking counts in the namespace: drop without insert_failed is a full table, drop with insert_failed a port or slot that was not found.", "event")
	descTranslated   = metric("rule_uses_total", "Connections that the rules have translated since they were applied, and packets of stateless ones.")
)

// conntrackCounters are those that tell of packets and flows that did not go their way.
var conntrackCounters = []string{"drop", "early_drop", "insert_failed", "invalid", "error", "clash_resolve", "chaintoolong", "search_restart"}

// collect reads the engine that is up, and what serve itself has done.
func (m *metrics) collect() *exposition {
	e := newExposition()
	e.process()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collectServe(e)
	rec, err := ofEngine(recordOf(m.ns))
	up := err == nil && rec.Whole
	for _, engine := range Engines() {
		e.gauge(descUp, number(up && string(rec.Engine) == engine), engine)
	}
	switch {
	case errors.Is(err, ErrDown), err == nil && !rec.Whole:
	case err != nil:
		e.fail(descUp, err)
	default:
		running, err := rec.open(m.ns)
		if err == nil {
			running.collect(e, m, rec)
			err = running.Close()
		}
		if err != nil {
			e.fail(descUp, err)
		}
	}
	return e
}

// collectServe tells of reloads, and which natkit this is.
func (m *metrics) collectServe(e *exposition) {
	names := slices.Sorted(maps.Keys(m.build))
	build := metric("build_info", "Always 1; the labels say which natkit this is.", names...)
	var values []string
	for _, name := range names {
		values = append(values, m.build[name])
	}
	e.gauge(build, 1, values...)
	for _, cause := range reloadCauses {
		for _, result := range []string{"ok", "failed"} {
			e.counter(descReloads, float64(m.reloads[reload{cause, result}]), cause, result)
		}
	}
	e.gauge(descLastOK, number(m.lastOK))
	success := 0.0
	if !m.lastSuccess.IsZero() {
		success = float64(m.lastSuccess.UnixNano()) / 1e9
	}
	e.gauge(descLastSuccess, success)
	e.gauge(descRules, float64(m.rules))
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (engine *ebpfRunning) collect(e *exposition, _ *metrics, rec *record) {
	generation, err1 := engine.Generation()
	stats, err2 := engine.Stats()
	addresses, err3 := readAddresses(engine.Engine, rec)
	if err := errors.Join(err1, err2, err3); err != nil {
		e.fail(descGeneration, err)
		return
	}
	size := engine.Size()
	e.gauge(descGeneration, float64(generation))
	e.gauge(descSessions, float64(stats.Sessions))
	e.gauge(descSessionsLimit, float64(size.Sessions))
	e.gauge(descMappings, float64(stats.Mappings))
	e.gauge(descMappingsLimit, float64(size.Mappings))
	e.counter(descBytes, float64(stats.BytesIn), "in")
	e.counter(descBytes, float64(stats.BytesOut), "out")
	e.gauge(descSweepAge, max(stats.SweepAge.Seconds(), 0))
	e.counter(descSweepTime, stats.SweepTime.Seconds())
	e.counter(descSweepLooked, float64(stats.SweepLooked))
	e.counter(descEventsLost, float64(stats.EventsLost))
	for _, r := range rulefile.Reasons {
		n := float64(stats.Reasons[r.Name])
		if d := descCounted[r.Name]; d != nil {
			e.counter(d, n)
			continue
		}
		e.counter(descPackets, n, r.Kind, r.Name)
		if slices.Contains(refusals, r.Name) {
			e.counter(descRefused, n, r.Name)
		}
	}
	e.ports(addresses)
}

// ports tells of the addresses that give ports, one by one or all together.
func (e *exposition) ports(addresses []AddressStatus) {
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
			e.gauge(descPorts, float64(r.ports), name, class)
			e.gauge(descPortsFree, float64(free), name, class)
		}
	}
}

// collect reads what the kernel counts. Without connection tracking there is nothing
// to read, and nothing is translated.
func (engine nftRunning) collect(e *exposition, m *metrics, _ *record) {
	var limits conntrack.Limits
	err := m.ns.Do(func() (err error) { limits, err = conntrack.ReadLimits(); return err })
	if err != nil {
		e.fail(descEntries, err)
		return
	}
	e.gauge(descEntries, float64(limits.Count))
	e.gauge(descEntriesLimit, float64(limits.Max))
	counters, err := probe.ConntrackCounters(m.ns)
	if err != nil {
		e.fail(descCounters, err)
		return
	}
	for _, name := range conntrackCounters {
		if n, known := counters[name]; known {
			e.counter(descCounters, float64(n), name)
		}
	}
	if m.ruleset == nil && m.file != nil {
		m.ruleset, err = engine.compile(m.file)
	}
	if err != nil {
		e.fail(descTranslated, err)
		return
	}
	uses, err := m.ruleset.Uses(m.ns)
	if err != nil {
		e.fail(descTranslated, err)
		return
	}
	total := uint64(0)
	for _, u := range uses {
		total += u.Packets
	}
	e.counter(descTranslated, float64(total))
}
