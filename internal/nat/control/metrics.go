// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

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
	registry *prometheus.Registry
	ns       *netns.Handle

	reloads     *prometheus.CounterVec
	lastOK      prometheus.Gauge
	lastSuccess prometheus.Gauge
	rules       prometheus.Gauge
	running     prometheus.Gauge

	mu       sync.Mutex // guards what follows
	engine   Engine
	ruleset  nft.Ruleset // of engine nft, as it was applied; nil when it was adopted
	starting error       // nil since rules are in use
}

// maxMetricAddresses is how many outside addresses have series of their own; of more
// there are the sums.
const maxMetricAddresses = 256

// What a reload can be caused by.
var reloadCauses = []string{"file", "signal", "machine"}

func newMetrics(ns *netns.Handle, build map[string]string) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), ns: ns}
	m.reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "natkit_reloads_total", Help: "Times that rules were applied, by what caused it and its result.",
	}, []string{"cause", "result"})
	for _, cause := range reloadCauses {
		m.reloads.WithLabelValues(cause, "ok")
		m.reloads.WithLabelValues(cause, "failed")
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m.lastOK = gauge("natkit_last_reload_successful", "Whether the last reload was applied; if not, the rules before it are in use.")
	m.lastSuccess = gauge("natkit_last_reload_success_timestamp_seconds", "When rules were last applied.")
	m.rules = gauge("natkit_rules", "Rules in use.")
	m.running = prometheus.NewGauge(prometheus.GaugeOpts{Name: "natkit_build_info", Help: "Always 1; the labels say which natkit this is.", ConstLabels: build})
	m.running.Set(1)
	m.registry.MustRegister(m, m.reloads, m.lastOK, m.lastSuccess, m.rules, m.running,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// use notes the rules in use.
func (m *metrics) use(p *Plan, file *rulefile.File) {
	m.rules.Set(float64(len(file.Rules)))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.engine, m.starting = p.Engine, nil
	if p.ruleset != nil {
		m.ruleset = p.ruleset
	}
}

// reloaded counts a reload.
func (m *metrics) reloaded(cause string, err error) {
	if err != nil {
		m.reloads.WithLabelValues(cause, "failed").Inc()
		m.lastOK.Set(0)
		return
	}
	m.reloads.WithLabelValues(cause, "ok").Inc()
	m.lastOK.Set(1)
	m.lastSuccess.SetToCurrentTime()
}

// listen answers until it is stopped.
func (m *metrics) listen(l net.Listener) (stop func()) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		Registry: m.registry, MaxRequestsInFlight: 4, ErrorHandling: promhttp.HTTPErrorOnError,
	}))
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

func metric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("natkit_"+name, help, labels, nil)
}

// Of both engines.
var (
	descUp = metric("up", "Whether the NAT is up, by the engine that carries its rules out.", "engine")
)

// Of engine ebpf.
var (
	descGeneration    = metric("generation", "Rule sets that the engine has had since it was brought up.")
	descSessions      = metric("sessions", "Sessions now.")
	descSessionsLimit = metric("sessions_limit", "Sessions that there can be at once.")
	descMappings      = metric("mappings", "Mappings now, with those whose ports rest.")
	descMappingsLimit = metric("mappings_limit", "Mappings that there can be at once.")
	descPorts         = metric("ports", "Ports that an outside address gives; address is all where there are more than 256.", "address", "class")
	descPortsFree     = metric("ports_free", "Ports that an outside address has left.", "address", "class")
	descPackets       = metric("packets_total", "Packets by what became of them: passed to the stack, translated, or dropped, and why.", "verdict", "reason")
	descBytes         = metric("bytes_total", "Bytes of IPv4 translated, by direction.", "direction")
	descRefused       = metric("sessions_refused_total", "Packets that would have opened a session, dropped for want of room.", "reason")
	descSweepAge      = metric("sweep_age_seconds", "Time since expiry last ran.")
	descSweepTime     = metric("sweep_seconds_total", "Processor time of expiry.")
	descSweepLooked   = metric("sweep_looked_total", "Sessions and mappings that expiry looked at.")
	descEventsLost    = metric("events_lost_total", "Events that found no room while somebody read them.")
)

// descCounted are the reasons that are no packet's end, by their names.
var descCounted = map[string]*prometheus.Desc{
	"to-tc":           metric("packets_left_to_tc_total", "Packets that XDP left to tc, where their end is counted."),
	"created":         metric("sessions_created_total", "Sessions made."),
	"expired":         metric("sessions_expired_total", "Sessions removed after their time-out."),
	"mapped":          metric("mappings_created_total", "Mappings made."),
	"unmapped":        metric("mappings_expired_total", "Mappings removed, their ports free again."),
	"hairpinned":      metric("sessions_hairpinned_total", "Sessions of two inside hosts by an outside address."),
	"mss-clamped":     metric("mss_clamped_total", "SYN packets whose MSS was lowered."),
	"icmp-translated": metric("icmp_errors_translated_total", "ICMP errors translated, with the packet inside."),
	"icmp-sent":       metric("icmp_errors_sent_total", "ICMP errors sent by the engine."),
	"fragment-held":   metric("fragments_held_total", "Fragments that came before their first one and were kept for it."),
}

// refusals are the reasons for which a packet does not open the session that it would.
var refusals = []string{"no-port", "no-address", "sessions-full", "mappings-full", "source-limit", "sources-full"}

// Of engine nft: the kernel's.
var (
	descEntries      = metric("conntrack_entries", "Entries of the namespace's connection tracking table.")
	descEntriesLimit = metric("conntrack_entries_limit", "Entries that a namespace can have at once: nf_conntrack_max.")
	descCounters     = metric("conntrack_events_total", "What connection tracking counts in the namespace: drop without insert_failed is a full table, drop with insert_failed a port or slot that was not found.", "event")
	descTranslated   = metric("rule_uses_total", "Connections that the rules have translated since they were applied, and packets of stateless ones.")
)

// conntrackCounters are those that tell of packets and flows that did not go their way.
var conntrackCounters = []string{"drop", "early_drop", "insert_failed", "invalid", "error", "clash_resolve", "chaintoolong", "search_restart"}

// Describe tells every series' name.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descUp, descGeneration, descSessions, descSessionsLimit, descMappings, descMappingsLimit, descPorts, descPortsFree,
		descPackets, descBytes, descRefused, descSweepAge, descSweepTime, descSweepLooked, descEventsLost,
		descEntries, descEntriesLimit, descCounters, descTranslated,
	} {
		ch <- d
	}
	for _, d := range descCounted {
		ch <- d
	}
}

// Collect reads the engine that is up.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock() // one scrape at a time
	defer m.mu.Unlock()
	c := collecting{ch}
	rec, err := ofEngine(readRecord(m.ns.Inode()))
	up := err == nil && rec.Whole
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		n := 0.0
		if up && rec.Engine == engine {
			n = 1
		}
		c.gauge(descUp, n, string(engine))
	}
	switch {
	case errors.Is(err, ErrDown), err == nil && !rec.Whole:
	case err != nil:
		c.fail(descUp, err)
	case rec.Engine == EngineNFT:
		m.collectNFT(c)
	default:
		c.ebpf(m.ns, rec)
	}
}

type collecting struct{ ch chan<- prometheus.Metric }

func (c collecting) gauge(d *prometheus.Desc, value float64, labels ...string) {
	c.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func (c collecting) counter(d *prometheus.Desc, value float64, labels ...string) {
	c.ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, value, labels...)
}

func (c collecting) fail(d *prometheus.Desc, err error) { c.ch <- prometheus.NewInvalidMetric(d, err) }

func (c collecting) ebpf(ns *netns.Handle, rec *record) {
	e, err := Open(ns)
	if err != nil {
		c.fail(descGeneration, err)
		return
	}
	defer e.Close()
	generation, err1 := e.Generation()
	stats, err2 := e.Stats()
	addresses, err3 := readAddresses(e, rec)
	if err := errors.Join(err1, err2, err3); err != nil {
		c.fail(descGeneration, err)
		return
	}
	size := e.Size()
	c.gauge(descGeneration, float64(generation))
	c.gauge(descSessions, float64(stats.Sessions))
	c.gauge(descSessionsLimit, float64(size.Sessions))
	c.gauge(descMappings, float64(stats.Mappings))
	c.gauge(descMappingsLimit, float64(size.Mappings))
	c.counter(descBytes, float64(stats.BytesIn), "in")
	c.counter(descBytes, float64(stats.BytesOut), "out")
	c.gauge(descSweepAge, max(stats.SweepAge.Seconds(), 0))
	c.counter(descSweepTime, stats.SweepTime.Seconds())
	c.counter(descSweepLooked, float64(stats.SweepLooked))
	c.counter(descEventsLost, float64(stats.EventsLost))
	for _, r := range rulefile.Reasons {
		n := float64(stats.Reasons[r.Name])
		if d := descCounted[r.Name]; d != nil {
			c.counter(d, n)
			continue
		}
		c.counter(descPackets, n, r.Kind, r.Name)
		if slices.Contains(refusals, r.Name) {
			c.counter(descRefused, n, r.Name)
		}
	}
	c.ports(addresses)
}

// ports tells of the addresses that give ports, one by one or all together.
func (c collecting) ports(addresses []AddressStatus) {
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
			c.gauge(descPorts, float64(r.ports), name, class)
			c.gauge(descPortsFree, float64(free), name, class)
		}
	}
}

// collectNFT reads what the kernel counts. Without connection tracking there is nothing
// to read, and nothing is translated.
func (m *metrics) collectNFT(c collecting) {
	var limits conntrack.Limits
	err := m.ns.Do(func() (err error) { limits, err = conntrack.ReadLimits(); return err })
	if err != nil {
		c.fail(descEntries, err)
		return
	}
	c.gauge(descEntries, float64(limits.Count))
	c.gauge(descEntriesLimit, float64(limits.Max))
	counters, err := probe.ConntrackCounters(m.ns)
	if err != nil {
		c.fail(descCounters, err)
		return
	}
	for _, name := range conntrackCounters {
		if n, known := counters[name]; known {
			c.counter(descCounters, float64(n), name)
		}
	}
	if m.ruleset == nil {
		return
	}
	uses, err := m.ruleset.Uses(m.ns)
	if err != nil {
		c.fail(descTranslated, err)
		return
	}
	total := uint64(0)
	for _, u := range uses {
		total += u.Packets
	}
	c.counter(descTranslated, float64(total))
}
