// SPDX-License-Identifier: Apache-2.0

// Package monitor runs the doctor for years: facts, the doctor's own judgement, hysteresis, and
// then metrics, history and events. It judges nothing of its own.
//
// In each interval it takes a sample of every namespace, which is cheap, and examines those that
// the sample, a change or the clock gives reason to (attention.go), within a budget of processor
// time. Findings begin and end by several windows (findings.go).
package monitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/fleet"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/kubernetes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/service"
	"natkit/internal/snapshot"
	"natkit/internal/words/exposition"
)

// Options say how to watch, and whom to tell.
type Options struct {
	Interval     time.Duration
	History      *history.Writer // nil: nothing is stored
	Metrics      net.Listener    // nil: none. Closed at the end
	Build        map[string]string
	Engine       probe.EngineReader
	EngineSample probe.EngineSampler
	Log          probe.LogReader
	Say          func(Line) // what an administrator wants to read in the journal
	// Kubernetes is told of the findings; nil: nobody is. The caller runs it.
	Kubernetes *kubernetes.Reporter

	ARPProbes ARPProbes // ProbesOff or "": none is sent

	Tune       Tuning     // TuneOff or "": settings are left alone
	TunePlace  tune.Place // where changes are journalled
	HistoryDir string     // of History, to read how changes of an earlier process ended
}

// Line is something that happened: a finding began, changed or ended, or the monitor itself has
// a problem.
type Line struct {
	At             time.Time           `json:"time"`
	*history.Event `json:",omitempty"` // nil: it is about no finding
	Problem        string              `json:"problem,omitempty"`
	// Tuning is what was done about a setting, with --tune.
	Tuning *history.Tuning `json:"tuning,omitempty"`
}

// monitor is a Run.
type monitor struct {
	o         Options
	sampler   *probe.Sampler
	attention *attention
	findings  *findings
	tuner     *tuner        // nil: settings are left alone
	cpu       time.Duration // at the end of the last round
	idleCost  time.Duration // of a round without examinations, as they were
	problem   string        // that was said last
	refusal   string        // of the Kubernetes API, that was said last
	sysctls   map[uint64]map[string]string
	legacy    map[uint64]map[string]snapshot.Chain // of iptables-legacy, by their names
	begun     bool                                 // one round is over
	listed    time.Time                            // when the history last got a list of what is on

	mu    sync.Mutex // of what scrapes read
	state state
}

// Run watches until ctx ends, which is no error.
func Run(ctx context.Context, o Options) error {
	if within := service.Watchdog(); within > 0 && within < 2*o.Interval {
		return fmt.Errorf("systemd expects a sign of life within %v, which an interval of %v does not give: raise WatchdogSec", within, o.Interval)
	}
	sampler, err := probe.OpenSampler(probe.Options{Engine: o.Engine, EngineSample: o.EngineSample, Log: o.Log, Quiet: true})
	if err != nil {
		return err
	}
	defer sampler.Close()
	m := &monitor{o: o, sampler: sampler, attention: newAttention(), findings: newFindings(), sysctls: map[uint64]map[string]string{}, legacy: map[uint64]map[string]snapshot.Chain{}, state: newState(o)}
	if o.Metrics != nil {
		defer exposition.Listen(o.Metrics, m.collect, m.health, exposition.Page{Path: fleet.Path, Of: m.node})()
	}
	service.Notify(service.Ready)
	defer service.Notify(service.Stopping)
	earlier, err := m.beginTuning(ctx)
	if err != nil {
		return err
	}
	m.cpu = processorTime()
	for ctx.Err() == nil {
		if err := m.round(ctx, earlier); err != nil {
			return err
		}
		earlier = nil
		service.Notify(service.Alive)
	}
	return nil
}

// round is one interval; earlier is what happened to settings before it.
func (m *monitor) round(ctx context.Context, earlier []history.Tuning) error {
	now := time.Now()
	m.attention.pass(m.o.Interval)
	wants, alerts := m.attention.choose(m.sampler.Namespaces(), m.findings.urgent, now)
	r, err := m.sampler.Round(ctx, probe.RoundOptions{Window: m.o.Interval, Looks: wants, Close: m.near, Ask: m.probes(now)})
	if err != nil {
		return err
	}
	e := &history.Entry{At: r.At.UTC().Truncate(time.Millisecond), Seconds: r.Seconds, Begins: !m.begun, Tunings: earlier}
	m.begun = true
	for _, inode := range r.Renewed {
		e.Events = append(e.Events, m.forget(inode, e.At)...)
	}
	there := map[uint64]bool{}
	for _, s := range r.Samples {
		there[s.Netns.Inode] = true
		m.attention.sample(s, r.Unconfirmed[s.Netns.Inode])
		if p := moved(s); p != nil {
			e.Samples = append(e.Samples, p)
		}
	}
	for _, c := range r.Changes {
		m.attention.changed(c.Netns.Inode, now)
		e.Changes = append(e.Changes, history.Change{At: c.At.UTC().Truncate(time.Millisecond), Inode: c.Netns.Inode, Namespace: Title(c.Netns), What: c.What})
	}
	for _, s := range r.Looks {
		e.Changes = append(append(e.Changes, m.changedSettings(s)...), m.changedRules(s)...)
		events, shown := m.judge(s)
		e.Events = append(e.Events, events...)
		e.Tunings = append(e.Tunings, m.tune(ctx, s, shown)...)
		e.Looks = append(e.Looks, history.NewLook(s))
	}
	for _, inode := range r.Idle {
		m.attention.idleAgain(inode, now)
	}
	e.Events = append(e.Events, m.findings.gone(func(inode uint64) bool { return !there[inode] }, e.At)...)
	e.Tunings = append(e.Tunings, m.tuningDue(ctx, there)...)
	maps.DeleteFunc(m.sysctls, func(inode uint64, _ map[string]string) bool { return !there[inode] })
	maps.DeleteFunc(m.legacy, func(inode uint64, _ map[string]snapshot.Chain) bool { return !there[inode] })
	m.list(e, now)
	problem := m.store(e)
	if problem == nil && r.Unwatched > 0 {
		problem = fmt.Errorf("there are more than %d network namespaces: the others are not watched, %s says how many", probe.MaxNamespaces, descUnwatched.Name)
	}
	m.trouble(problem)
	m.observe(r)
	m.reportToKubernetes()
	for _, event := range e.Events {
		m.o.Say(Line{At: event.At, Event: &event})
	}
	m.observeTunings(e.Tunings)
	m.account(len(wants), alerts)
	return nil
}

// forget ends what was known of a number that another namespace has now.
func (m *monitor) forget(inode uint64, at time.Time) []history.Event {
	delete(m.attention.spaces, inode)
	delete(m.sysctls, inode)
	delete(m.legacy, inode)
	if m.tuner != nil {
		m.tuner.gone(func(n uint64) bool { return n == inode })
	}
	m.mu.Lock()
	m.state.gone(func(n uint64) bool { return n == inode })
	m.mu.Unlock()
	return m.findings.gone(func(n uint64) bool { return n == inode }, at)
}

// near says of whom each sample has more: the counters of the stack, and unconfirmed connections.
func (m *monitor) near(inode uint64) bool {
	r := m.attention.of(inode)
	return m.findings.urgent(inode) || len(r.symptoms) > 0 || r.busy()
}

// judge is the doctor's judgement of a look: what begins or ends by it, and all that it shows.
func (m *monitor) judge(s *snapshot.Snapshot) ([]history.Event, []causes.Finding) {
	shown := causes.JudgeAgain(s, m.findings.named(s.Netns.Inode))
	found := slices.ContainsFunc(shown, func(f causes.Finding) bool { return f.Severity > causes.Advice })
	m.attention.examined(s, found, time.Now())
	shown = flat(shown)
	events := m.findings.window(s.Netns, s.TakenAt, m.own(s.Netns.Inode, shown))
	r := m.attention.of(s.Netns.Inode)
	r.wanted, r.undecided = m.findings.needTable(s.Netns.Inode), m.findings.undecided(s.Netns.Inode)
	return events, shown
}

// own leaves out findings of the whole machine that another namespace has shown before.
func (m *monitor) own(inode uint64, shown []causes.Finding) (out []causes.Finding) {
	for _, f := range shown {
		if !ofMachine[f.Code] || !m.findings.elsewhere(inode, f.Code) {
			out = append(out, f)
		}
	}
	return out
}

// ofMachine are the causes that lie in what all namespaces share.
var ofMachine = func() map[string]bool {
	out := map[string]bool{}
	for _, c := range causes.Catalogue() {
		out[c.Code] = c.Host
	}
	return out
}()

// changedSettings compares the settings with those of the look before: the kernel announces only
// few of them.
func (m *monitor) changedSettings(s *snapshot.Snapshot) (out []history.Change) {
	before := m.sysctls[s.Netns.Inode]
	if s.Sysctls == nil {
		return nil
	}
	m.sysctls[s.Netns.Inode] = s.Sysctls
	for _, name := range slices.Sorted(maps.Keys(s.Sysctls)) {
		if was, ok := before[name]; ok && was != s.Sysctls[name] && !isLevel(name, before, s.Sysctls) {
			out = append(out, history.Change{At: s.TakenAt, Inode: s.Netns.Inode, Namespace: Title(s.Netns),
				What: fmt.Sprintf("setting %s: %s -> %s", name, was, s.Sysctls[name])})
		}
	}
	return out
}

// isLevel says whether a value is no setting but a level, or follows from another setting that changed.
func isLevel(name string, before, now map[string]string) bool {
	const forward = "net.ipv4.ip_forward"
	return name == "net.netfilter.nf_conntrack_count" ||
		strings.HasPrefix(name, "net.ipv4.conf.") && strings.HasSuffix(name, ".forwarding") && before[forward] != now[forward]
}

// storedCounters are the counters of the stack that are worth their room in each interval.
var storedCounters = []string{"TcpExt.ListenOverflows", "TcpExt.ListenDrops", "TcpExt.TCPBacklogDrop", "TcpExt.IPReversePathFilter", "Tcp.RetransSegs", "Tcp.AttemptFails",
	"Ip.ForwDatagrams", "Ip.InDiscards", "Ip.OutDiscards", "Ip.OutNoRoutes", "Ip.FragFails", "Ip.ReasmFails", "Udp.RcvbufErrors", "Icmp.OutTimeExcds"}

// moved is what of a sample is stored; nil where nothing moved.
func moved(s *snapshot.Snapshot) *snapshot.Snapshot {
	out := &snapshot.Snapshot{TakenAt: s.TakenAt, Netns: s.Netns}
	any := false
	if ct := s.Conntrack; ct != nil && (ct.Count > 0 || ct.CountStart > 0) {
		any = true
		c := *ct
		c.Stats = nil
		for name, n := range ct.Stats {
			if n > 0 && name != "found" && name != "searched" && name != "search_restart" {
				if c.Stats == nil {
					c.Stats = map[string]uint64{}
				}
				c.Stats[name] = n
			}
		}
		out.Conntrack = &c
	}
	for _, name := range storedCounters {
		if n := s.Counters[name]; n > 0 {
			if out.Counters == nil {
				out.Counters = map[string]uint64{}
			}
			out.Counters[name], any = n, true
		}
	}
	if s.Drops != nil {
		d := &snapshot.Drops{Rows: []snapshot.Drop{}, LostEvents: s.Drops.LostEvents}
		for _, row := range s.Drops.Rows {
			if !row.Benign {
				d.Rows = append(d.Rows, snapshot.Drop{Count: row.Count, Location: row.Location, Reason: row.Reason, Netns: row.Netns, Interface: row.Interface, Cause: row.Cause})
			}
		}
		if len(d.Rows) > 0 || d.LostEvents > 0 {
			out.Drops, any = d, true
		}
	}
	if !any {
		return nil
	}
	return out
}

// listEvery is how often the history gets a list of what is on: well within report.HistoryLead.
const listEvery = 10 * time.Minute

// list adds what is on to an entry, when that is due.
func (m *monitor) list(e *history.Entry, now time.Time) {
	if m.listed.IsZero() || now.Sub(m.listed) >= listEvery {
		m.listed, e.On = now, m.findings.list(e.At)
	}
}

// store writes the history. That it can't be written ends nothing.
func (m *monitor) store(e *history.Entry) error {
	if m.o.History == nil {
		return nil
	}
	err := m.o.History.Add(e)
	m.mu.Lock()
	if err != nil {
		m.state.historyErrors++
		m.listed = time.Time{} // what began or ended in this interval is missing
	}
	m.state.historyError = err
	m.mu.Unlock()
	return err
}

// trouble says a problem of the monitor itself, once as long as it lasts.
func (m *monitor) trouble(err error) {
	now := ""
	if err != nil {
		now = err.Error()
	}
	if now != m.problem && now != "" {
		m.o.Say(Line{At: time.Now(), Problem: now})
	}
	m.problem = now
}

// reportToKubernetes reports what is on and above advice. It waits for nobody.
func (m *monitor) reportToKubernetes() {
	k := m.o.Kubernetes
	if k == nil {
		return
	}
	var on []kubernetes.Finding
	for _, a := range m.findings.active() {
		if a.Finding.Severity <= causes.Advice {
			continue
		}
		f := kubernetes.Finding{Code: a.Finding.Code, Title: a.Finding.Title, Critical: a.Finding.Severity == causes.Critical, Impact: a.Finding.Impact, Since: a.Since}
		if !a.Netns.Init {
			f.Where = Title(a.Netns)
		}
		if name, ok := strings.CutPrefix(a.Netns.Container, "pod "); ok && a.Netns.PodUID != "" {
			if namespace, name, ok := strings.Cut(name, "/"); ok {
				f.Pod = kubernetes.Pod{Namespace: namespace, Name: name, UID: a.Netns.PodUID}
			}
		}
		on = append(on, f)
	}
	k.Report(on)
	refusal := k.Problem()
	if refusal != m.refusal && refusal != "" {
		m.o.Say(Line{At: time.Now(), Problem: refusal})
	}
	m.refusal = refusal
}

// account takes what the round cost from the budget of examinations.
func (m *monitor) account(looks, alerts int) {
	now := processorTime()
	cost := now - m.cpu
	m.cpu = now
	if looks == 0 {
		if m.idleCost == 0 {
			m.idleCost = cost
		}
		m.idleCost = (7*m.idleCost + cost) / 8
		return
	}
	m.attention.paid(max(0, cost-m.idleCost), looks, alerts)
}

// processorTime is what this process has taken.
func processorTime() time.Duration {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// health is why the monitor does not do what it is there for; nil if it does.
func (m *monitor) health() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.at.IsZero() {
		return errors.New("the first interval is not over")
	}
	if late := time.Since(m.state.at); late > 3*m.o.Interval+time.Minute {
		return fmt.Errorf("no interval ended for %v", late.Round(time.Second))
	}
	return m.state.historyError
}
