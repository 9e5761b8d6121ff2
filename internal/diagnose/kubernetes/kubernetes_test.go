// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"natkit/internal/words/exposition"
)

// fakeAPI is an API that does what natkit asks of a real one. (TestReplay holds against recorded
// answers of that.)
type fakeAPI struct {
	mu         sync.Mutex
	conditions map[string]map[string]string // of nodes
	events     map[string]map[string]any    // by path
	requests   []string
	fail       func(r request) (*response, error) // nil, or what to answer instead
	takes      time.Duration
}

func newFakeAPI() *fakeAPI {
	return &fakeAPI{conditions: map[string]map[string]string{}, events: map[string]map[string]any{}}
}

func (f *fakeAPI) do(ctx context.Context, r request) (*response, error) {
	time.Sleep(f.takes)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r.method+" "+r.path)
	if f.fail != nil {
		if answer, err := f.fail(r); answer != nil || err != nil {
			return answer, err
		}
	}
	var body map[string]any
	if err := json.Unmarshal(r.body, &body); err != nil {
		return nil, err
	}
	switch {
	case strings.HasPrefix(r.path, "/api/v1/nodes/"):
		var patch struct {
			Status struct{ Conditions []map[string]string }
		}
		_ = json.Unmarshal(r.body, &patch)
		if f.conditions[r.path] == nil {
			f.conditions[r.path] = map[string]string{}
		}
		for _, c := range patch.Status.Conditions {
			maps.Copy(f.conditions[r.path], c)
		}
		return &response{status: 200, body: mustJSON(map[string]any{"status": map[string]any{"conditions": []any{f.conditions[r.path]}}})}, nil
	case r.method == "POST":
		path := r.path + "/" + body["metadata"].(map[string]any)["name"].(string)
		if f.events[path] != nil {
			return &response{status: 409}, nil
		}
		f.events[path] = body
		return &response{status: 201}, nil
	default:
		if f.events[r.path] == nil {
			return &response{status: 404}, nil
		}
		maps.Copy(f.events[r.path], body)
		return &response{status: 200}, nil
	}
}

func (f *fakeAPI) condition(node string) map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.conditions["/api/v1/nodes/"+node+"/status"])
}

// texts are the Events as "KIND NAMESPACE/OBJECT REASON xCOUNT: MESSAGE".
func (f *fakeAPI) texts() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range f.events {
		object := e["involvedObject"].(map[string]any)
		out = append(out, fmt.Sprintf("%v %v/%v %v x%v: %v", e["type"], e["metadata"].(map[string]any)["namespace"], object["name"], e["reason"], e["count"], e["message"]))
	}
	slices.Sort(out)
	return out
}

func (f *fakeAPI) count() int { return len(f.asked()) }

// asked are the requests so far, as "METHOD PATH".
func (f *fakeAPI) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.requests)
}

// bubble runs a Reporter for node n1 on a clock of its own, which stands still while anything runs.
func bubble(t *testing.T, f func(t *testing.T, api *fakeAPI, r *Reporter)) {
	synctest.Test(t, func(t *testing.T) {
		api := newFakeAPI()
		r := newReporter(api, "n1")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		f(t, api, r)
		cancel()
		<-done
	})
}

// windows reports what is on, every ten seconds for so long.
func windows(r *Reporter, d time.Duration, on ...Finding) {
	for range max(1, d/(10*time.Second)) {
		r.Report(on)
		time.Sleep(10 * time.Second)
	}
}

func full(since time.Time) Finding {
	return Finding{Code: "conntrack-table-full", Title: "the table is full", Critical: true, Impact: 5, Since: since}
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if g, w := fmt.Sprintf("%q", got), fmt.Sprintf("%q", want); g != w {
		t.Errorf("%s: %s, want %s", what, g, w)
	}
}

// A critical finding: the condition and an Event at once, both change when it ends, and the
// condition's time of transition is that of the change.
func TestFinding(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		windows(r, 0)
		equal(t, "condition after one window", len(api.condition("n1")), 0)
		windows(r, 2*time.Minute)
		c := api.condition("n1")
		equal(t, "condition", []string{c["status"], c["reason"]}, []string{"False", "NATWorks"})
		began := time.Now()
		windows(r, time.Minute, full(began))
		c = api.condition("n1")
		equal(t, "condition", []string{c["status"], c["reason"], c["message"], c["lastTransitionTime"]}, []string{"True", "ConntrackTableFull", "the table is full", stamp(began)})
		equal(t, "Events", api.texts(), []string{"Warning default/n1 ConntrackTableFull x1: the table is full"})
		windows(r, time.Minute)
		c = api.condition("n1")
		equal(t, "condition", []string{c["status"], c["lastTransitionTime"]}, []string{"False", stamp(began.Add(time.Minute))})
		equal(t, "Events", api.texts(), []string{"Normal default/n1 ConntrackTableFull x1: ended after 1m0s: the table is full"})
	})
}

// A cause that comes and goes has one Event an hour, which counts; one that stays has one each hour.
func TestOneEventAnHour(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		for range 9 {
			windows(r, 3*time.Minute, full(time.Now()))
			windows(r, 3*time.Minute)
		}
		equal(t, "Events of one that comes and goes", api.texts(), []string{"Normal default/n1 ConntrackTableFull x9: ended after 51m0s: the table is full"})
		windows(r, 2*time.Hour)
		began := time.Now()
		windows(r, 3*time.Hour-time.Minute, full(began))
		if n := len(api.texts()); n != 4 {
			t.Errorf("%d Events after an hour and three more: %q", n, api.texts())
		}
	})
}

// Warnings are Events and no condition; the same cause of several namespaces that are no pods is
// one Event; each pod has its own, in its namespace.
func TestObjects(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		drop := func(where string, impact float64, pod Pod) Finding {
			return Finding{Code: "rule-drop", Title: "a rule drops", Where: where, Impact: impact, Since: time.Now(), Pod: pod}
		}
		windows(r, time.Minute, drop("docker a", 1, Pod{}), drop("docker b", 2, Pod{}), drop("", 1, Pod{}),
			drop("pod shop/cart", 1, Pod{"shop", "cart", "u1"}), drop("pod shop/till", 1, Pod{"shop", "till", "u2"}))
		equal(t, "Events", api.texts(), []string{
			"Warning default/n1 RuleDrop x1: in docker b: a rule drops (and in 2 more)",
			"Warning shop/cart RuleDrop x1: in pod shop/cart: a rule drops",
			"Warning shop/till RuleDrop x1: in pod shop/till: a rule drops",
		})
		equal(t, "condition", api.condition("n1")["status"], "False")
	})
}

// While the API is down nothing waits for it; afterwards it has what is on, and what came and went.
func TestDown(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		down := true
		api.fail = func(request) (*response, error) {
			if down {
				return nil, errors.New("connection refused")
			}
			return nil, nil
		}
		windows(r, 5*time.Minute, full(time.Now()))
		windows(r, 30*time.Minute)
		api.mu.Lock()
		tries := len(api.requests)
		down = false
		api.mu.Unlock()
		if tries < 5 || tries > 30 {
			t.Errorf("%d requests in 35 minutes without an answer", tries)
		}
		windows(r, 10*time.Minute)
		equal(t, "Events", api.texts(), []string{"Normal default/n1 ConntrackTableFull x1: ended after 5m0s: the table is full"})
		equal(t, "condition", api.condition("n1")["status"], "False")
		equal(t, "problem", r.Problem(), "")
		if r.sent[failed] != uint64(tries) {
			t.Errorf("%d requests counted as failed of %d", r.sent[failed], tries)
		}
	})
}

// What the API refuses is not sent again and again, and it is said why.
func TestRefused(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		api.fail = func(request) (*response, error) {
			return &response{status: 403, body: []byte(`{"message":"nodes is forbidden"}`)}, nil
		}
		windows(r, 2*time.Hour, full(time.Now()))
		if n := api.count(); n > 30 {
			t.Errorf("%d requests in two hours that all were refused", n)
		}
		if !strings.Contains(r.Problem(), "nodes is forbidden") {
			t.Errorf("problem %q", r.Problem())
		}
		api.mu.Lock()
		api.fail = nil
		api.mu.Unlock()
		windows(r, 15*time.Minute, full(time.Now()))
		equal(t, "condition", api.condition("n1")["status"], "True")
		equal(t, "problem", r.Problem(), "")
	})
}

// What is refused stays a problem while other requests are accepted: it is one line of the journal, not one each time.
func TestRefusedInPart(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		api.fail = func(q request) (*response, error) {
			if q.contentType == patchNode {
				return &response{status: 403, body: []byte(`{"message":"nodes is forbidden"}`)}, nil
			}
			return nil, nil
		}
		said, before := 0, ""
		for range 60 {
			windows(r, time.Minute, full(time.Now()))
			windows(r, time.Minute)
			if now := r.Problem(); now != before {
				said, before = said+1, now
			}
		}
		if said != 1 || !strings.Contains(before, "nodes is forbidden") {
			t.Errorf("the problem changed %d times in two hours, and is %q", said, before)
		}
	})
}

// A 429 says when to come back.
func TestRetryAfter(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		api.fail = func(request) (*response, error) {
			return &response{status: 429, retryAfter: 10 * time.Minute}, nil
		}
		windows(r, 9*time.Minute, full(time.Now()))
		equal(t, "requests", api.count(), 1)
	})
}

// A restart within the hour adopts the Event of before and leaves the time of transition alone.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFakeAPI()
		began := time.Now()
		for i := range 3 {
			r := newReporter(api, "n1")
			ctx, cancel := context.WithCancel(t.Context())
			go r.Run(ctx)
			windows(r, time.Minute, full(began))
			if i == 2 {
				windows(r, time.Minute)
			}
			cancel()
			synctest.Wait()
		}
		equal(t, "Events", api.texts(), []string{"Normal default/n1 ConntrackTableFull x1: ended after 3m0s: the table is full"})
	})
	synctest.Test(t, func(t *testing.T) {
		api := newFakeAPI()
		began := time.Now()
		for range 3 {
			r := newReporter(api, "n1")
			ctx, cancel := context.WithCancel(t.Context())
			go r.Run(ctx)
			windows(r, time.Minute, full(began))
			cancel()
			synctest.Wait()
		}
		equal(t, "transition", api.condition("n1")["lastTransitionTime"], stamp(began))
	})
}

// Many findings at once, more than are kept: bounded, in turns, and counted.
func TestMany(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		var on []Finding
		for i := range 300 {
			on = append(on, Finding{Code: "rule-drop", Title: "x", Since: time.Now(), Pod: Pod{"shop", fmt.Sprintf("p%03d", i), fmt.Sprint(i)}})
		}
		windows(r, time.Minute, on...)
		if n := api.count(); n > burst+11 {
			t.Errorf("%d requests in a minute", n)
		}
		windows(r, 20*time.Minute, on...)
		if n := len(api.texts()); n != maxEvents || r.dropped != uint64(len(on)-maxEvents) {
			t.Errorf("%d Events, %d dropped", n, r.dropped)
		}
	})
}

// Two causes that are the worst by turns do not patch the node by turns.
func TestReasons(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		a, b := full(time.Now()), Finding{Code: "rule-drop", Title: "a rule drops", Critical: true, Impact: 9, Since: time.Now()}
		for range 180 {
			windows(r, 0, a, b)
			windows(r, 0, a)
			windows(r, 0, a, b)
		}
		patches := 0
		for _, q := range api.asked() {
			if strings.HasPrefix(q, "PATCH /api/v1/nodes/") {
				patches++
			}
		}
		if patches > 50 {
			t.Errorf("%d patches of the node in 90 minutes", patches)
		}
	})
}

// An API that takes its time does not hold up who reports.
func TestSlow(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		api.takes = 14 * time.Second
		for range 30 {
			began := time.Now()
			r.Report([]Finding{full(began)})
			if took := time.Since(began); took > 0 {
				t.Errorf("a report took %v", took)
			}
			time.Sleep(10 * time.Second)
		}
	})
}

// The load of a hundred nodes: while all is well, and with faults that come and go everywhere.
func TestLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 100
		api := newFakeAPI()
		ctx, cancel := context.WithCancel(t.Context())
		var all []*Reporter
		for i := range nodes {
			r := newReporter(api, fmt.Sprintf("n%d", i))
			all = append(all, r)
			go r.Run(ctx)
		}
		each := func(d time.Duration, on ...Finding) float64 {
			before := api.count()
			for range d / (10 * time.Second) {
				for _, r := range all {
					r.Report(on)
				}
				time.Sleep(10 * time.Second)
			}
			return float64(api.count()-before) / d.Minutes()
		}
		start := each(time.Minute)
		calm := each(2 * time.Hour)
		busy := 0.0
		for range 12 {
			busy += each(5*time.Minute, full(time.Now()))/24 + each(5*time.Minute)/24
		}
		t.Logf("requests a minute of %d nodes: %.0f in the first minute, %.1f while all is well, %.1f with a fault on all for every other five minutes", nodes, start, calm, busy)
		if start > 2*nodes || calm > 15 || busy > 0.5*nodes {
			t.Errorf("requests a minute: %.0f, %.1f, %.1f", start, calm, busy)
		}
		cancel()
		synctest.Wait()
	})
}

func TestExpose(t *testing.T) {
	bubble(t, func(t *testing.T, _ *fakeAPI, r *Reporter) {
		windows(r, time.Minute, full(time.Now()))
		e := exposition.New()
		r.Expose(e)
		var b strings.Builder
		if err := e.Write(&b); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`natkit_kubernetes_requests_total{result="accepted"} 3`, `natkit_kubernetes_requests_total{result="failed"} 0`, "natkit_kubernetes_condition 1", "natkit_kubernetes_pending 0"} {
			if !strings.Contains(b.String(), want+"\n") {
				t.Errorf("no %s in\n%s", want, b.String())
			}
		}
	})
}

func TestReasonOf(t *testing.T) {
	for code, want := range map[string]string{"conntrack-table-full": "ConntrackTableFull", "snat-port-race": "SnatPortRace", "": ""} {
		equal(t, code, reasonOf(code), want)
	}
}

// What the API fails to take, such as the Events of a namespace whose webhook fails, does not hold up the rest.
func TestOneFails(t *testing.T) {
	for broken, want := range map[string]string{
		"/api/v1/namespaces/shop/": "condition, Event of the node",
		"/api/v1/nodes/":           "Event of the node, Event of the pod",
	} {
		bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
			api.fail = func(req request) (*response, error) {
				if strings.HasPrefix(req.path, broken) {
					return &response{status: 500}, nil
				}
				return nil, nil
			}
			windows(r, 10*time.Minute, Finding{Code: "a", Title: "of a pod", Critical: true, Pod: Pod{"shop", "cart", "1-2"}}, Finding{Code: "b", Title: "of the node"})
			var got []string
			if api.condition("n1")["status"] == isTrue {
				got = append(got, "condition")
			}
			for _, text := range api.texts() {
				if strings.Contains(text, " default/n1 ") {
					got = append(got, "Event of the node")
				} else {
					got = append(got, "Event of the pod")
				}
			}
			if got := strings.Join(got, ", "); got != want {
				t.Errorf("%s fails: %s, want %s", broken, got, want)
			}
		})
	}
}

// A conflict with another writer of the node is no refusal: the patch is repeated at once.
func TestConflict(t *testing.T) {
	bubble(t, func(t *testing.T, api *fakeAPI, r *Reporter) {
		conflicts := 2
		api.fail = func(req request) (*response, error) {
			if strings.Contains(string(req.body), conditionType) && conflicts > 0 {
				conflicts--
				return &response{status: 409}, nil
			}
			return nil, nil
		}
		windows(r, time.Minute, Finding{Code: "a", Title: "of the node", Critical: true})
		if got := api.condition("n1")["status"]; got != isTrue || r.Problem() != "" {
			t.Errorf("condition %q, problem %q", got, r.Problem())
		}
	})
}
