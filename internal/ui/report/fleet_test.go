// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/fleet"
)

// aFleet is twenty nodes: one with a finding of its own and another setting, all with the same advice.
func aFleet() *fleet.Report {
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const hostile = `<script>alert(1)</script>`
	var g fleet.Gather
	for i := range 20 {
		n := &fleet.Node{Name: fmt.Sprintf("node-%02d", i), At: noon.Add(time.Duration(i) * time.Second), Namespaces: 2,
			Findings:      []fleet.Finding{{Code: "needless-hooks", Severity: causes.Advice, Title: "12 hooks that no rule needs", Namespace: "host"}},
			Configuration: map[string]string{"setting net.ipv4.ip_forward": "1", "rules of nft ip nat": "3 rules"}, Unjudged: []string{"no-route"}}
		if i == 7 {
			n.Findings = append(n.Findings, fleet.Finding{Code: "no-route", Severity: causes.Critical, Title: hostile, Namespace: "pod shop/cart", Since: noon.Add(-time.Hour)})
			n.Configuration["setting net.ipv4.ip_forward"] = "0"
		}
		if i == 9 {
			delete(n.Configuration, "rules of nft ip nat")
		}
		g.Add(fleet.Input{Name: n.Name + ".json", Node: n})
	}
	g.Add(fleet.Input{Name: "http://gone:9641", Err: errors.New("no reply within 5s")})
	return g.Report()
}

func TestFleetText(t *testing.T) {
	var b strings.Builder
	if err := FleetText(&b, aFleet(), time.UTC, false); err != nil {
		t.Fatal(err)
	}
	const want = `20 nodes read, 1 not; facts taken between 2026-03-01 12:00:00 and 2026-03-01
  12:00:19.

On few nodes
CRITICAL no-route on 1 node: There is no route for packets to forward
  node-07, pod shop/cart: <script>alert(1)</script>, since 2026-03-01 11:00:00

On many nodes
ADVICE needless-hooks on 20 nodes: Packets pass netfilter functions that no rule needs
  node-00: 12 hooks that no rule needs
  node-01: 12 hooks that no rule needs
  node-02: 12 hooks that no rule needs
  node-03: 12 hooks that no rule needs
  node-04: 12 hooks that no rule needs
  also on node-05, node-06, node-07, node-08, node-09, node-10, node-11, node-12, node-13, node-14, node-15, node-16 and 3 more nodes

Configured otherwise than most
  rules of nft ip nat: 3 rules on 19 nodes
    none on node-09
  setting net.ipv4.ip_forward: 1 on 19 nodes
    0 on node-07

Nodes that differ most
  NODE     WORST     FINDINGS  DIFFERENCES  OUTLIERS
  node-07  critical         2            1         2
  node-09  advice           1            1         1

Not read
  http://gone:9641: no reply within 5s

Not judged, for lack of facts (natkit doctor --from FILE shows which): no-route
  on 20 nodes.
`
	if b.String() != want {
		t.Errorf("%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	var none fleet.Gather
	if err := FleetText(&b, none.Report(), time.UTC, false); err != nil || b.String() != "No node could be read.\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

func TestFleetHTML(t *testing.T) {
	var b strings.Builder
	if err := FleetHTML(&b, aFleet(), time.UTC); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"&lt;script&gt;", "On few nodes", "pod shop/cart", "2026-03-01 11:00:00", "Not read", "no reply within 5s", "20 findings", "none on node-09"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(b.String(), "<script") {
		t.Error("a script")
	}
}

// A node may run a newer natkit, with causes that this one does not know; columns are as wide as what is in them.
func TestFleetOfNewerNodes(t *testing.T) {
	var g fleet.Gather
	for _, name := range []string{"größe", "b", "c"} {
		n := &fleet.Node{Name: name, Namespaces: 1, Unjudged: []string{"of-tomorrow", "no-route"}}
		if name == "größe" {
			n.Findings = []fleet.Finding{{Code: "x", Severity: causes.Warning, Title: "x", Namespace: "host"}}
		}
		g.Add(fleet.Input{Name: name, Node: n})
	}
	var b strings.Builder
	if err := FleetText(&b, g.Report(), time.UTC, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"no-route\n  on 3 nodes, of-tomorrow on 3 nodes.", "\n  NODE   WORST ", "\n  größe  warning "} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, &b)
		}
	}
}

// A node that does not say when its facts were taken does not make the report two thousand years long.
func TestFleetWithoutTimes(t *testing.T) {
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for want, times := range map[string][]time.Time{
		"2 nodes read; facts taken at 2026-03-01 12:00:00.\n": {noon, {}},
		"2 nodes read.\n": {{}, {}},
	} {
		var g fleet.Gather
		for i, at := range times {
			g.Add(fleet.Input{Name: fmt.Sprint(i), Node: &fleet.Node{Name: fmt.Sprint(i), At: at, Namespaces: 1,
				Findings: []fleet.Finding{{Code: "x", Severity: causes.Warning, Title: "x", Namespace: "host"}}}})
		}
		var text, page strings.Builder
		if err := errors.Join(FleetText(&text, g.Report(), time.UTC, false), FleetHTML(&page, g.Report(), time.UTC)); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(text.String(), want) || strings.Contains(text.String()+page.String(), "0001-") {
			t.Errorf("want %q in\n%s\n%s", want, &text, &page)
		}
	}
}
