// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/kubernetes"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/diagnose/probe"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/testutil/ktest"
)

// allEvents names a file: TestFaultsBecomeEvents plays all faults then, and adds a row for each, as docs/kubernetes.md
// has them. make test-kubernetes sets it.
const allEvents = "NATKIT_ALL_EVENTS"

// sampledEvents are the faults that it plays without: one that drops, one of the table, one of a rule.
var sampledEvents = map[string]bool{"ip-forward-off": true, "snat-ports-exhausted": true, "rule-drop": true}

// noEvent are the faults that no monitor can be shown in a lab.
var noEvent = map[string]string{"conntrack-hash-too-small": "the lab changes the facts that the doctor reads"}

// lostBeyond is clients-unreached where nothing of it is on the router: no neighbour is set, no packet dropped, and others' traffic
// goes on.
var lostBeyond = Fault{
	Code:    "clients-unreached",
	Broken:  "the replies to the client are lost behind the router",
	healthy: do(browse, swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", 200, 10))),
	broken:  do(atLeast(3*time.Second), onClient("nft 'table ip lost { chain in { type filter hook input priority 0; tcp flags & (syn|ack) == syn|ack drop; }; }'")),
	cure:    onClient("nft delete table ip lost"),
}

// announcedDuplicate is duplicate-address as it is mostly: the second host announces the address when it takes it.
var announcedDuplicate = Fault{
	Code:    "duplicate-address",
	Broken:  "the second host takes the gateway's address, too, and announces it",
	clients: 2,
	healthy: browse,
	broken:  on("client2", "ip addr add {near-net} dev eth0 && arping -U -c 1 -I eth0 {near}"),
	cure:    do(on("client2", "ip addr del {near-net} dev eth0"), follow("arping -U")),
}

// eventProbes is --arp-probes where it is not the default: a host that takes an address and says nothing is found by asking
// all the time, or when a client has lost packets by it.
var eventProbes = map[string]monitor.ARPProbes{silentDuplicate: monitor.ProbesAlways}

// silentDuplicate is what the lab's second host does.
const silentDuplicate = "the second host also has the gateway's address"

const (
	eventWithin   = 30 * time.Second
	clearedWithin = 75 * time.Second // five windows, the one in which the cure falls, and the request
)

// cluster is an API that accepts what the monitor sends, and keeps the Events.
type cluster struct {
	mu       sync.Mutex
	statuses int // of the node, that were sent
	events   map[string]*clusterEvent
}

type clusterEvent struct {
	Reason, Message, Type string
	at                    time.Time // of the last change
}

func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var body struct {
		Metadata struct{ Name string }
		clusterEvent
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	name := cmp.Or(body.Metadata.Name, filepath.Base(r.URL.Path))
	switch e := c.events[name]; {
	case strings.HasSuffix(r.URL.Path, "/status"):
		c.statuses++
	case r.Method == http.MethodPost && e == nil:
		c.events[name] = &body.clusterEvent
		c.events[name].at = time.Now()
		w.WriteHeader(http.StatusCreated)
	case r.Method == http.MethodPatch && e != nil:
		e.Message, e.Type, e.at = body.Message, body.Type, time.Now()
	default:
		w.WriteHeader(http.StatusConflict)
	}
	_, _ = w.Write([]byte("{}"))
}

// event is the one with a cause's reason.
func (c *cluster) event(code string) (clusterEvent, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.events {
		if strings.EqualFold(e.Reason, strings.ReplaceAll(code, "-", "")) {
			return *e, true
		}
	}
	return clusterEvent{}, false
}

// open are the Events of causes that are at work.
func (c *cluster) open() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.events {
		if e.Type == "Warning" {
			out = append(out, e.Reason+": "+e.Message)
		}
	}
	slices.Sort(out)
	return out
}

// daemonInterval is that of deploy/kubernetes.
func daemonInterval(t *testing.T) time.Duration {
	t.Helper()
	text, err := os.ReadFile("../../deploy/kubernetes/natkit.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`--interval=(\w+)`).FindSubmatch(text)
	if m == nil {
		t.Fatal("the DaemonSet has no --interval")
	}
	d, err := time.ParseDuration(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Every fault of the lab is an Event (or, where it is advice, in the history) within 30 s and ends after
// its cure, with a monitor that runs as the DaemonSet has it.
func TestFaultsBecomeEvents(t *testing.T) {
	ktest.Root(t)
	natkitInPath(t)
	for _, f := range append(Faults(), lostBeyond, announcedDuplicate) {
		if os.Getenv(allEvents) == "" && !sampledEvents[f.Code] || noEvent[f.Code] != "" {
			continue
		}
		name := f.Code
		switch f.Broken {
		case lostBeyond.Broken:
			name += "-beyond"
		case announcedDuplicate.Broken:
			name += "-announced"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			ktest.Lacking(t, func(t *testing.T) { becomesEvent(t, f) })
		})
	}
}

// docs/kubernetes.md says of every fault of the lab how soon it is an Event, or that it is advice or cannot be made.
func TestEventsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	advice := regexp.MustCompile(`(?m)^- Advice \(.*$`).Find(page)
	for _, f := range Faults() {
		row := regexp.MustCompile("(?m)^\\| `" + f.Code + "` \\| (critical|warning) \\| [0-9]+ s \\| [0-9]+ s \\|$").Match(page)
		if other := strings.Contains(string(advice), "`"+f.Code+"`") || noEvent[f.Code] != ""; row == other {
			t.Errorf("%s: in the table %v, and among the others %v", f.Code, row, other)
		}
	}
}

// natkitInPath has the cures that run natkit find the one under test; the processes that play the faults inherit it.
func natkitInPath(t *testing.T) {
	t.Helper()
	const done, path = "NATKIT_TEST_IN_PATH", "PATH"
	if os.Getenv(done) != "" {
		return
	}
	before := os.Getenv(path) // t.Setenv is not for tests that run side by side
	if err := errors.Join(os.Setenv(done, "1"), os.Setenv(path, filepath.Dir(ktest.Natkit(t))+":"+before)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = errors.Join(os.Unsetenv(done), os.Setenv(path, before))
	})
}

// watchedLab is a fault's lab with traffic that flows, and a monitor beside it.
type watchedLab struct {
	*faultRun
	t       *testing.T
	cluster *cluster

	endMonitor func()
	running    sync.WaitGroup // the monitor

	mu   sync.Mutex
	said []history.Event
}

// watchLab brings up the lab that a fault happens in.
func watchLab(t *testing.T, f Fault) *watchedLab {
	t.Helper()
	return watchedIn(t, upForTrace(t, cmp.Or(f.topology, "routed"), lab.Options{Clients: f.clients}))
}

func watchedIn(t *testing.T, l *lab.Lab) *watchedLab {
	w := &watchedLab{faultRun: &faultRun{lab: l, watched: l.NATNode(), options: FaultOptions{Progress: func(string, float64) {}}}, t: t,
		cluster: &cluster{events: map[string]*clusterEvent{}}}
	t.Cleanup(w.close)
	return w
}

func becomesEvent(t *testing.T, f Fault) {
	w := watchLab(t, f)
	stop := w.change(f.healthy)
	w.startMonitor(watchedBy{Interval: daemonInterval(t), ARPProbes: cmp.Or(eventProbes[f.Broken], monitor.ProbesOnSymptom)})
	w.until(3*time.Minute, "the node is healthy", func() bool {
		w.cluster.mu.Lock()
		defer w.cluster.mu.Unlock()
		return w.cluster.statuses > 0
	})
	if on := w.on(); len(on) > 0 {
		t.Errorf("nothing is wrong, and there is %q", on)
	}
	stop()
	begun := time.Now()
	stop = w.change(f.broken)
	changed := time.Now()
	advice := false
	// Advice waits for the turn of its namespace (five minutes), and then a minute.
	if !w.until(8*time.Minute, "", func() bool {
		e, ok := w.cluster.event(f.Code)
		advice = w.last(f.Code).Severity == causes.Advice.String()
		return ok && e.Type == "Warning" && w.last(f.Code).Kind != "" || advice
	}) {
		t.Fatalf("no Event; the doctor finds %s; Events: %q", titles(w.examine()), w.cluster.open())
	}
	found := time.Since(changed)
	if found > eventWithin && !advice {
		t.Errorf("found only %v after the fault", found)
	}
	severity := w.last(f.Code).Severity
	title := w.last(f.Code).Title
	for w.found == nil {
		all := flatFindings(w.examine())
		if i := slices.IndexFunc(all, func(g causes.Finding) bool { return g.Code == f.Code }); i >= 0 {
			w.found = &all[i]
		} else if time.Since(changed) > 2*time.Minute {
			t.Fatalf("the monitor has found %s, and the doctor does not: %s", f.Code, titles(all))
		}
	}
	stop()
	stop = w.change(func(ctx context.Context, s *faultRun) error {
		if err := f.cure(ctx, s); err != nil {
			t.Logf("cure: %.300v", err) // conntrack -D finds entries that are just ending
		}
		return nil
	})
	cured := time.Now()
	if !w.until(4*time.Minute, "", func() bool {
		e, ok := w.cluster.event(f.Code)
		elsewhere := ok && !strings.Contains(e.Message, w.watched.Handle().Name()+":")
		return w.last(f.Code).Kind == history.Ended && (!ok || elsewhere || e.Type == "Normal" && strings.HasPrefix(e.Message, "ended after ")) ||
			advice && time.Since(cured) > clearedWithin // until the next examination
	}) {
		t.Fatalf("it does not end; the doctor finds %s; Events: %q", titles(w.examine()), w.cluster.open())
	}
	took := time.Since(cured)
	if took > clearedWithin && !advice {
		t.Errorf("ended only %v after the cure", took)
	}
	stop()
	row := fmt.Sprintf("| `%s` | %s | %.0f s | %.0f s |", f.Code, severity, found.Seconds(), took.Seconds())
	t.Logf("%s %s; the fault took %.0f s to make; others: %q", row, title, changed.Sub(begun).Seconds(), w.others(f.Code))
	if name := os.Getenv(allEvents); name != "" {
		file, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err == nil {
			_, err = file.WriteString(row + "\n")
			err = errors.Join(err, file.Close())
		}
		if err != nil {
			t.Error(err)
		}
	}
}

func flatFindings(list []causes.Finding) (out []causes.Finding) {
	for _, f := range list {
		out = append(append(out, f), flatFindings(f.Consequences)...)
	}
	return out
}

// change changes the lab, and lets its traffic flow until stop is called. What sends so much and then
// ends begins again.
func (w *watchedLab) change(a action) (stop func()) {
	w.t.Helper()
	if err := a(w.t.Context(), w.faultRun); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	var flowing sync.WaitGroup
	for _, run := range w.traffic {
		flowing.Go(func() {
			for begun := time.Now(); ctx.Err() == nil; begun = time.Now() {
				_ = run(ctx, w.faultRun) // what becomes of it the monitor sees
				if time.Since(begun) < time.Second {
					return // a few packets, once
				}
			}
		})
	}
	return func() { cancel(); flowing.Wait() }
}

// monitorProcess is the argument that makes the test binary a monitor. It is a process of its own: the time that
// the lab's traffic takes is none of what its examinations cost.
const monitorProcess = "monitor"

// watchedBy is what such a process is told.
type watchedBy struct {
	Interval         time.Duration
	ARPProbes        monitor.ARPProbes
	API, Credentials string
	History          string // its folder; "": nothing is stored
}

// runMonitor watches until its standard input ends, and writes a line of JSON for each that the monitor has to say.
func runMonitor(told string) error {
	var o watchedBy
	if err := json.Unmarshal([]byte(told), &o); err != nil {
		return err
	}
	api, err := kubernetes.NewAPI(o.API, o.Credentials)
	if err != nil {
		return err
	}
	var store *history.Writer
	if o.History != "" {
		if store, err = history.Create(o.History, history.Limits{Bytes: 64 << 20, Age: 24 * time.Hour}); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	reporter := kubernetes.New(api, "n1")
	var reporting sync.WaitGroup
	reporting.Go(func() { reporter.Run(ctx) })
	lines := json.NewEncoder(os.Stdout)
	err = monitor.Run(ctx, monitor.Options{Interval: o.Interval, ARPProbes: o.ARPProbes, History: store, Engine: control.ReadFacts, EngineSample: control.SampleEngine, Kubernetes: reporter,
		Say: func(l monitor.Line) { _ = lines.Encode(l) }})
	stop()
	reporting.Wait()
	if store != nil {
		err = errors.Join(err, store.Close())
	}
	return err
}

// startMonitor starts a monitor that reports to the cluster, and stores what it sees if it has a folder for that.
func (w *watchedLab) startMonitor(o watchedBy) {
	w.t.Helper()
	server := httptest.NewTLSServer(w.cluster)
	credentials := w.t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := errors.Join(os.WriteFile(filepath.Join(credentials, "ca.crt"), ca, 0o600), os.WriteFile(filepath.Join(credentials, "token"), []byte("t"), 0o600)); err != nil {
		w.t.Fatal(err)
	}
	o.API, o.Credentials = server.URL, credentials
	told, err := json.Marshal(o)
	if err != nil {
		w.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(self, monitorProcess, string(told))
	cmd.Stderr = os.Stderr
	stdin, errIn := cmd.StdinPipe()
	stdout, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut, cmd.Start()); err != nil {
		w.t.Fatal(err)
	}
	w.endMonitor = sync.OnceFunc(func() { stdin.Close() })
	w.running.Go(func() {
		for lines := json.NewDecoder(stdout); ; {
			var l monitor.Line
			if lines.Decode(&l) != nil {
				break
			}
			w.mu.Lock()
			if l.Event != nil && l.Inode == w.watched.Handle().Inode() {
				w.said = append(w.said, *l.Event)
			}
			w.mu.Unlock()
		}
		if err := cmd.Wait(); err != nil {
			w.t.Errorf("natkit monitor: %v", err)
		}
	})
	w.t.Cleanup(func() {
		w.stopMonitor()
		server.Close()
	})
}

// stopMonitor ends the monitor, and returns when it has.
func (w *watchedLab) stopMonitor() {
	w.endMonitor()
	w.running.Wait()
}

// last is the last that happened to a cause.
func (w *watchedLab) last(code string) (last history.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.said {
		if e.Code == code {
			last = e
		}
	}
	return last
}

// others are the other findings that began, of severity warning and above.
func (w *watchedLab) others(code string) (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.said {
		if e.Code != code && e.Kind == history.Began && e.Severity != causes.Advice.String() {
			out = append(out, fmt.Sprintf("%s in %s: %s", e.Code, e.Namespace, e.Title))
		}
	}
	return out
}

// examine is what the doctor finds now.
func (w *watchedLab) examine() []causes.Finding {
	w.t.Helper()
	facts, err := probe.Take(w.t.Context(), probe.Options{Netns: w.watched.Handle(), Window: max(2*time.Second, w.least), Dump: true, Engine: control.ReadFacts})
	if err != nil {
		w.t.Fatal(err)
	}
	if w.reads != nil {
		w.reads(facts)
	}
	return causes.Judge(facts)
}

// on are the findings above advice of the watched namespace.
func (w *watchedLab) on() (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	state := map[string]history.Event{}
	for _, e := range w.said {
		state[e.Code] = e
	}
	for code, e := range state {
		if e.Kind != history.Ended && e.Severity != causes.Advice.String() {
			out = append(out, code+": "+e.Title)
		}
	}
	return out
}

// until waits for a condition; with what, it fails the test if that does not come true in time.
func (w *watchedLab) until(limit time.Duration, what string, cond func() bool) bool {
	w.t.Helper()
	for deadline := time.Now().Add(limit); !cond(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			if what != "" {
				w.t.Fatalf("not within %v: %s", limit, what)
			}
			return false
		}
	}
	return true
}
