// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/journal"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// As long as an outside interface, or every internal one, carries no packets /healthz is 503
// and says why, and natkit status says the same; with both engines.
func TestHealthOfLinks(t *testing.T) {
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			other := b.namespace()
			b.join("in2", "10.0.2.1/24", other, "10.0.2.2/24")
			s := b.serve(strings.Replace(baseRules, "[in]", "[in, in2]", 1), ServeOptions{Options: Options{Engine: engine}})
			s.hears("up", "")
			healthy := func(code int, why string) {
				t.Helper()
				var got int
				var body []byte
				ktest.Wait(t, patient, "health "+why, func() bool {
					got, body = s.get("/healthz")
					return got == code && strings.Contains(string(body), why)
				})
				status, err := ReadStatus(b.gateway)
				if err != nil || code != http.StatusOK && !strings.Contains(strings.Join(status.Problems, "\n"), strings.Fields(why)[1]) {
					t.Errorf("health %d %s, status %q, %v", got, body, status.Problems, err)
				}
			}
			link := func(name string, change func(netlink.Link) error) {
				t.Helper()
				b.in(b.gateway, func() error {
					l, err := netlink.LinkByName(name)
					return errors.Join(err, change(l))
				})
			}
			peer := func(change func(netlink.Link) error) {
				t.Helper()
				b.in(b.server, func() error {
					l, err := netlink.LinkByName("eth0")
					return errors.Join(err, change(l))
				})
			}
			healthy(http.StatusOK, "ok")
			link("out", netlink.LinkSetDown)
			healthy(http.StatusServiceUnavailable, "interface out is down")
			link("out", netlink.LinkSetUp)
			healthy(http.StatusOK, "ok")
			peer(netlink.LinkSetDown)
			healthy(http.StatusServiceUnavailable, "interface out has no carrier")
			peer(netlink.LinkSetUp)
			healthy(http.StatusOK, "ok")
			b.move("out")
			healthy(http.StatusServiceUnavailable, "interface out has no address")
			b.move("out", "198.51.100.1/24")
			healthy(http.StatusOK, "ok")
			link("out", netlink.LinkDel)
			healthy(http.StatusServiceUnavailable, "interface out is gone")
			b.join("out", "198.51.100.1/24", b.server, "198.51.100.9/24")
			healthy(http.StatusOK, "ok")
			link("in2", netlink.LinkDel)
			link("in", netlink.LinkSetUp)
			healthy(http.StatusOK, "ok") // the other inside interface carries packets
			link("in", netlink.LinkSetDown)
			healthy(http.StatusServiceUnavailable, "interface in is down")
		})
	}
}

// While natkit serve starts it says so, and not that somebody was killed.
func TestHealthStarting(t *testing.T) {
	b := newTestbed(t)
	asked, goOn := make(chan bool), make(chan bool)
	s := b.serve(baseRules, ServeOptions{Filters: func() ([]snapshot.Chain, error) {
		asked <- true
		<-goOn
		return nil, nil
	}})
	<-asked
	const starting = "starting: natkit serve (process "
	if code, body := s.get("/healthz"); code != http.StatusServiceUnavailable || !strings.HasPrefix(string(body), starting) {
		t.Errorf("health %d %s", code, body)
	}
	if _, err := ReadStatus(b.gateway); err == nil || !strings.HasPrefix(err.Error(), starting) {
		t.Errorf("status: %v", err)
	}
	// As it is when the engine is half up.
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	id, err := b.gateway.ID()
	if err != nil {
		t.Fatal(err)
	}
	if err := (&record{ID: id, Engine: EngineEBPF}).write(b.gateway.Inode()); err != nil {
		t.Fatal(err)
	}
	if status, err := ReadStatus(b.gateway); err != nil || len(status.Problems) != 1 || !strings.HasPrefix(status.Problems[0], starting) {
		t.Errorf("status of half an engine: %+v, %v", status, err)
	}
	if err := errors.Join(removeRecord(b.gateway.Inode()), in.release()); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	s.hears("up", "")
	if code, body := s.get("/healthz"); code != http.StatusOK {
		t.Errorf("health %d %s", code, body)
	}
}

// An engine that is half up is somebody's work as long as he lives.
func TestHalf(t *testing.T) {
	b := newTestbed(t)
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	rec := &record{Engine: EngineEBPF}
	if err := rec.half(b.gateway); !errors.Is(err, errUnderway) {
		t.Errorf("held: %v", err)
	}
	if err := in.release(); err != nil {
		t.Fatal(err)
	}
	if err := rec.half(b.gateway); !errors.Is(err, errHalf) {
		t.Errorf("left: %v", err)
	}
	if held, err := journal.Held(instancePath(1, ".journal")); err != nil || held {
		t.Errorf("none: held %t, %v", held, err)
	}
}

// What apply refuses, its dry run refuses: where an up or a down was killed, no plan is made.
func TestPlanApplyHalf(t *testing.T) {
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			o := b.options()
			o.Engine = engine
			b.up(baseRules, o)
			b.rewrite(func(rec *record) { rec.Whole = false })
			o.Engine = ""
			if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, o); !errors.Is(err, errHalf) {
				t.Errorf("apply: %v", err)
			}
			if p, err := PlanApply(b.parse(baseRules), baseRules, o); !errors.Is(err, errHalf) {
				t.Errorf("dry run: %+v, %v", p, err)
			}
		})
	}
}

// Prometheus' own check has nothing to say about the metrics of either engine.
func TestPromtool(t *testing.T) {
	promtool := ktest.Tool(t, "promtool")
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			s := b.serve(baseRules, ServeOptions{Options: Options{Engine: engine}, Build: map[string]string{"version": "test"}})
			s.hears("up", "")
			b.ping(b.client, "198.51.100.9")
			code, text := s.get("/metrics")
			if code != http.StatusOK || !strings.Contains(string(text), `natkit_up{engine="`+string(engine)+`"} 1`) {
				t.Fatalf("metrics %d:\n%s", code, text)
			}
			cmd := exec.Command(promtool, "check", "metrics")
			cmd.Stdin = strings.NewReader(string(text))
			if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}
