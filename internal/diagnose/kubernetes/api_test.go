// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"natkit/internal/testutil/ktest"
)

var record = flag.Bool("record", false, "record the exchanges with the API of NATKIT_KUBE_API in testdata/exchanges.json")

const exchangesFile = "testdata/exchanges.json"

// exchange is a request and its answer, as a real kube-apiserver gave it.
type exchange struct {
	Method  string          `json:"method"`
	Path    string          `json:"path"`
	Type    string          `json:"content_type"`
	Request json.RawMessage `json:"request"`
	Status  int             `json:"status"`
	Answer  json.RawMessage `json:"answer"`
}

// What differs between two runs of the same course. The names of Events follow from the hour.
var (
	moments   = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z|after \d+[hms0-9]*`)
	eventName = regexp.MustCompile(`(n1|cart)\.[0-9a-f]{16}`)
)

func settledText(b []byte) []byte {
	return eventName.ReplaceAll(moments.ReplaceAll(b, []byte("MOMENT")), []byte("$1.NAME"))
}

// course is what happens to a node: healthy, a critical finding of its own and a warning of a pod,
// the first again within the hour, healthy again. It waits until the API has accepted each step.
func course(t *testing.T, r *Reporter, podUID string) {
	t.Helper()
	since := time.Now().Truncate(time.Second)
	node := Finding{Code: "conntrack-table-full", Title: "the table is full", Critical: true, Impact: 5, Since: since}
	pod := Finding{Code: "rule-drop", Title: "a rule drops", Where: "pod shop/cart", Impact: 2, Since: since, Pod: Pod{"shop", "cart", podUID}}
	for _, step := range []struct {
		status string
		on     []Finding
	}{{isFalse, nil}, {isTrue, []Finding{node, pod}}, {isFalse, []Finding{pod}}, {isTrue, []Finding{node, pod}}, {isFalse, nil}} {
		for range settled {
			r.Report(step.on)
		}
		ktest.Wait(t, time.Minute, "condition "+step.status, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, e := range r.events {
				if e.dirty {
					return false
				}
			}
			return r.condition.sent.status == step.status
		})
	}
}

// recorder keeps what goes through it to an API.
type recorder struct {
	caller
	exchanges []exchange
}

func (c *recorder) do(ctx context.Context, r request) (*response, error) {
	answer, err := c.caller.do(ctx, r)
	if err == nil {
		c.exchanges = append(c.exchanges, exchange{r.method, string(settledText([]byte(r.path))), r.contentType, settledText(r.body), answer.status, settledText(answer.body)})
	}
	return answer, err
}

// realAPI is the one that make test-kubernetes runs; nil without it.
func realAPI(t *testing.T) *API {
	if os.Getenv("NATKIT_KUBE_API") == "" {
		return nil
	}
	api, err := NewAPI(os.Getenv("NATKIT_KUBE_API"), os.Getenv("NATKIT_KUBE_CREDENTIALS"))
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// The course against a real API, which accepts every request.
func TestCourseReal(t *testing.T) {
	api := realAPI(t)
	if api == nil {
		return // TestCourseReplayed has its answers
	}
	c := &recorder{caller: api}
	r := newReporter(c, "n1")
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	course(t, r, os.Getenv("NATKIT_KUBE_POD"))
	cancel()
	running.Wait()
	for _, e := range c.exchanges {
		if e.Status/100 != 2 {
			t.Errorf("%s %s: %d %s", e.Method, e.Path, e.Status, e.Answer)
		}
	}
	if *record && !t.Failed() {
		text, err := json.MarshalIndent(c.exchanges, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(exchangesFile, append(text, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// replayer answers as the real API did, if it is asked the same.
type replayer struct {
	t         *testing.T
	exchanges []exchange
}

func (c *replayer) do(_ context.Context, r request) (*response, error) {
	if len(c.exchanges) == 0 {
		c.t.Errorf("a request more: %s %s %s", r.method, r.path, r.body)
		return &response{status: 500}, nil
	}
	e := c.exchanges[0]
	c.exchanges = c.exchanges[1:]
	var want bytes.Buffer
	if err := json.Compact(&want, e.Request); err != nil {
		c.t.Error(err)
	}
	if got := settledText(r.body); r.method != e.Method || string(settledText([]byte(r.path))) != e.Path || r.contentType != e.Type || !bytes.Equal(got, want.Bytes()) {
		c.t.Errorf("%s %s %s %s, recorded %s %s %s %s", r.method, r.path, r.contentType, got, e.Method, e.Path, e.Type, want.Bytes())
	}
	return &response{status: e.Status, body: e.Answer}, nil
}

// The same course sends what a real API has accepted, and takes its answers.
func TestCourseReplayed(t *testing.T) {
	text, err := os.ReadFile(exchangesFile)
	if err != nil {
		t.Fatal(err)
	}
	var exchanges []exchange
	if err := json.Unmarshal(text, &exchanges); err != nil {
		t.Fatal(err)
	}
	uid := ""
	for _, e := range exchanges {
		if m := regexp.MustCompile(`"uid": ?"([0-9a-f-]{36})"`).FindSubmatch(e.Request); m != nil {
			uid = string(m[1])
		}
	}
	synctest.Test(t, func(t *testing.T) {
		c := &replayer{t, exchanges}
		r := newReporter(c, "n1")
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer cancel()
		running.Go(func() { r.Run(ctx) })
		course(t, r, uid)
		cancel()
		running.Wait()
		if len(c.exchanges) > 0 {
			t.Errorf("%d requests were recorded and not sent", len(c.exchanges))
		}
	})
}

// A hundred nodes on a real API: all its answers, and how many requests that is.
func TestHundredNodesReal(t *testing.T) {
	api := realAPI(t)
	if api == nil {
		return // TestLoad counts without one
	}
	const nodes = 100
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var all []*Reporter
	for i := range nodes {
		r := New(api, fmt.Sprintf("node-%d", i))
		all = append(all, r)
		running.Go(func() { r.Run(ctx) })
	}
	sum := func() (out map[string]uint64) {
		out = map[string]uint64{}
		for _, r := range all {
			r.mu.Lock()
			for result, n := range r.sent {
				out[result] += n
			}
			r.mu.Unlock()
		}
		return out
	}
	begun := time.Now()
	for _, want := range []string{isFalse, isTrue, isFalse} {
		for _, r := range all {
			var on []Finding
			if want == isTrue {
				on = append(on, full(time.Now()))
			}
			for range settled {
				r.Report(on)
			}
		}
		ktest.Wait(t, 2*time.Minute, "all nodes are "+want, func() bool {
			for _, r := range all {
				r.mu.Lock()
				same := r.condition.sent.status == want
				for _, e := range r.events {
					same = same && !e.dirty
				}
				r.mu.Unlock()
				if !same {
					return false
				}
			}
			return true
		})
		t.Logf("%d nodes are %s after %v: requests %v", nodes, want, time.Since(begun).Round(time.Millisecond), sum())
	}
	cancel()
	running.Wait()
	if s := sum(); s[refused] > 0 || s[accepted] != 6*nodes {
		t.Errorf("requests %v, want %d", s, 6*nodes)
	}
}
