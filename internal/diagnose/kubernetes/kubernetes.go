// SPDX-License-Identifier: Apache-2.0

// Package kubernetes reports findings to a Kubernetes API: as condition NATProblem of the node
// and as Events of it and of its pods. It judges nothing; whether the API can be reached is no
// matter for who reports.
//
// What is reported is a state, not a stream: Report replaces what is to be reported, and a
// worker makes the API equal to it, one request at a time. So there is no queue that grows while
// the API is down, and what came and went in that time is one Event.
package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"natkit/internal/words/exposition"
)

// How much is sent. All nodes of a cluster share its API.
const (
	// heartbeat is how often a condition that stays is sent again, half of that to all of it.
	heartbeat = 10 * time.Minute
	// eventEvery is how often one cause of one object may have an Event of its own; what happens
	// to it before changes that Event.
	eventEvery = time.Hour
	// maxEvents are how many causes of objects are kept in mind.
	maxEvents = 200
	// burst requests may be sent at once, and one more every perRequest after that.
	burst      = 10
	perRequest = 6 * time.Second
	// firstPause is how long an API that failed is left alone, doubled up to longestPause.
	firstPause   = time.Second
	longestPause = 5 * time.Minute
	// reasonEvery is how often a condition that stays True may have another reason.
	reasonEvery = 2 * time.Minute
	// settled is how many reports there must be before a node without a critical finding is called
	// healthy: after a start the monitor has not seen all yet.
	settled = 3
)

// Finding is a finding that is on.
type Finding struct {
	Code, Title string
	Where       string // the namespace; "" is the node's own
	Critical    bool
	Impact      float64
	Since       time.Time
	Pod         Pod // zero: it is an Event of the node
}

// Pod is a pod that the API knows.
type Pod struct{ Namespace, Name, UID string }

// caller is what sends requests: an API.
type caller interface {
	do(ctx context.Context, r request) (*response, error)
}

// Reporter makes the API of a cluster equal to what was reported last.
type Reporter struct {
	node string
	api  caller
	wake chan struct{}

	mu        sync.Mutex
	reports   int
	condition condition
	events    map[string]*event
	tokens    float64
	refilled  time.Time
	pause     time.Duration
	notBefore time.Time
	problems  map[string]string // why the API refuses what, by the kind of request
	sent      map[string]uint64 // requests by result
	dropped   uint64
	omitted   map[string]bool // what is on without an Event, because there are too many
}

// Results of requests.
const (
	accepted = "accepted"
	refused  = "refused" // the same request would be refused again
	failed   = "failed"  // it is sent again
)

// New is a Reporter for the node of that name.
func New(api *API, node string) *Reporter { return newReporter(api, node) }

func newReporter(api caller, node string) *Reporter {
	return &Reporter{node: node, api: api, wake: make(chan struct{}, 1), events: map[string]*event{}, problems: map[string]string{}, omitted: map[string]bool{}, tokens: burst,
		sent: map[string]uint64{accepted: 0, refused: 0, failed: 0}}
}

// Report says what is on now. It does not wait.
func (r *Reporter) Report(findings []Finding) {
	now := time.Now()
	r.mu.Lock()
	r.reports++
	r.condition.want(findings, r.reports >= settled)
	r.noteEvents(findings, now)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Problem is why the API refuses what a configuration would have to change; "" if it does not.
func (r *Reporter) Problem() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(r.problems)) {
		all = append(all, r.problems[kind])
	}
	return strings.Join(all, "; ")
}

// Run sends until ctx ends.
func (r *Reporter) Run(ctx context.Context) {
	for ctx.Err() == nil {
		t, wait := r.next(time.Now())
		if t == nil {
			timer := time.NewTimer(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-r.wake:
			}
			timer.Stop()
			continue
		}
		answer, err := r.api.do(ctx, t.request)
		if ctx.Err() == nil {
			r.done(t, answer, err, time.Now())
		}
	}
}

// task is a request, and what its answer changes.
type task struct {
	request
	accepted func(answer *response, now time.Time)
	refused  func(status int, now time.Time)
	failed   *time.Time // when it was sent last without success
	node     bool       // it is about the node, which does not go away like a pod
}

// next is what to send now; nil, if nothing for so long.
func (r *Reporter) next(now time.Time) (*task, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refilled.IsZero() {
		r.refilled = now
	}
	r.tokens = min(burst, r.tokens+now.Sub(r.refilled).Seconds()/perRequest.Seconds())
	r.refilled = now
	// What the API fails to take (a webhook of one namespace may fail) does not hold up the rest.
	t, due := r.conditionTask(now)
	if e := r.eventTask(now); t == nil || e != nil && e.failed.Before(*t.failed) {
		t = e
	}
	if t == nil {
		return nil, max(due.Sub(now), time.Second)
	}
	if wait := r.notBefore.Sub(now); wait > 0 {
		return nil, wait
	}
	if r.tokens < 1 {
		return nil, max(time.Millisecond, time.Duration((1-r.tokens)*float64(perRequest)))
	}
	r.tokens--
	return t, 0
}

// done takes the answer to a task.
func (r *Reporter) done(t *task, answer *response, err error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil || answer.status == 401 || answer.status == 408 || answer.status == 429 || answer.status >= 500 || answer.status == 409 && t.method == "PATCH":
		// 401: a token that was replaced, which the next request reads again. 409: somebody else, such as the kubelet, changed
		// the object at the same time, and again each time that the API tried.
		r.sent[failed]++
		*t.failed = now
		r.pause = min(longestPause, max(firstPause, 2*r.pause))
		wait := jittered(r.pause)
		if answer != nil {
			wait = max(wait, answer.retryAfter)
		}
		r.notBefore = now.Add(wait)
	case answer.status >= 200 && answer.status < 300:
		r.sent[accepted]++
		r.pause, *t.failed = 0, time.Time{}
		if t.node {
			delete(r.problems, t.contentType)
		}
		t.accepted(answer, now)
	default:
		r.sent[refused]++
		r.pause = 0
		if t.node && (answer.status == 403 || t.contentType == patchNode) {
			r.problems[t.contentType] = fmt.Sprintf("the Kubernetes API refuses %s %s: %s", t.method, t.path, reason(answer))
		}
		t.refused(answer.status, now)
	}
}

// reason is what the API says of a refusal.
func reason(answer *response) string {
	var status struct{ Message string }
	_ = json.Unmarshal(answer.body, &status) // then without a message
	return cmp.Or(status.Message, fmt.Sprintf("status %d", answer.status))
}

// jittered is half of a time to all of it: nodes that fail together do not come back together.
func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// hash tells names apart.
func hash(words ...string) string {
	h := fnv.New64a()
	for _, w := range words {
		h.Write([]byte(w + "\x00"))
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// stamp is a time as the API has it.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// worst is the finding that speaks for several.
func worst(findings []Finding) Finding {
	return slices.MaxFunc(findings, func(a, b Finding) int {
		critical := func(f Finding) int {
			if f.Critical {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(critical(a), critical(b)), cmp.Compare(a.Impact, b.Impact), cmp.Compare(b.Where, a.Where), cmp.Compare(b.Code, a.Code))
	})
}

func (f Finding) text() string {
	if f.Where == "" {
		return f.Title
	}
	return "in " + f.Where + ": " + f.Title
}

// Metrics of a Reporter.
var (
	descRequests  = exposition.Metric("kubernetes_requests_total", "Requests to the Kubernetes API by result: accepted, refused (final), failed (retried); with --node-name.", "result")
	descCondition = exposition.Metric("kubernetes_condition", "Whether the API has the node's condition NATProblem as True.")
	descPending   = exposition.Metric("kubernetes_pending", "Events that the Kubernetes API has not accepted yet.")
	descDropped   = exposition.Metric("kubernetes_events_dropped_total", "Events that were not sent because there were too many.")

	// Families are all of them.
	Families = []*exposition.Family{descRequests, descCondition, descPending, descDropped}
)

// Expose adds the metrics.
func (r *Reporter) Expose(e *exposition.Exposition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, result := range []string{accepted, refused, failed} {
		e.Counter(descRequests, float64(r.sent[result]), result)
	}
	problem, pending := 0.0, 0
	if r.condition.sent.status == isTrue {
		problem = 1
	}
	for _, v := range r.events {
		if v.dirty {
			pending++
		}
	}
	e.Gauge(descCondition, problem)
	e.Gauge(descPending, float64(pending))
	e.Counter(descDropped, float64(r.dropped))
}
