// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// Rules are kept once, with the time from which they were in force.
func TestKeepRules(t *testing.T) {
	r := newRig(t)
	r.open()
	keep := func(text string) natlog.Micros {
		t.Helper()
		r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), text))
		defer r.pass(time.Hour)
		return natlog.MicrosOf(r.now)
	}
	keep("") // none yet
	first := keep("rules: 1\n")
	keep("rules: 1\n")
	second := keep("rules: 2\n")
	none := keep("")
	list, err := RulesOf(r.dir)
	r.must(err)
	if len(list) != 3 || list[0].Since != first || list[1].Since != second || list[2].Since != none {
		t.Fatalf("kept are %v", list)
	}
	if text, err := os.ReadFile(list[1].Path); err != nil || string(text) != "rules: 2\n" {
		t.Errorf("%q, %v", text, err)
	}
	r.must(r.s.Close())
	var applied []string
	files, err := parts(r.dir)
	r.must(err)
	for _, p := range files {
		r.must(eachRecord(p, func(rec *natlog.Record) {
			if rec.Event == natlog.Applied {
				applied = append(applied, filepath.Base(rec.Note))
			}
		}))
	}
	if len(applied) != 3 || !strings.HasSuffix(list[0].Path, applied[0]) {
		t.Errorf("recorded are %q", applied)
	}
}

// Rules are kept as long as a file of the log has a time at which they were in force.
func TestRulesOutliveHours(t *testing.T) {
	r := newRig(t)
	r.o.Age = 5 * time.Hour
	r.open()
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesBefore))
	r.pass(time.Hour)
	r.must(r.s.Tick())
	r.pass(30 * time.Minute)
	asked := r.now.Add(-time.Minute)
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesAfter))
	for range 20 {
		r.pass(time.Hour)
		r.must(r.s.Tick())
		r.s.jobsDone(t)
		got := r.who("198.51.100.1:443", asked)
		if len(got.Gaps) > 0 { // the files of that time are gone
			break
		}
		if len(got.Rules) != 1 || got.Rules[0].Internal[0].Port() != 8443 {
			t.Fatalf("%v later: %+v", r.now.Sub(asked), got)
		}
	}
	r.pass(10 * time.Hour)
	r.must(r.s.Tick())
	if list, err := RulesOf(r.dir); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	r.must(r.s.Close())
}

const (
	rulesBefore = `inside: eth1
outside: eth0
pools:
  cgn: {addresses: [203.0.113.0/30], ports: 1024-65535, blocks: {size: 512, deterministic: true}}
rules:
  - {snat: 10.0.0.0/25, to: cgn}
  - {dnat: "tcp 198.51.100.1:443", to: "10.1.0.5:8443"}
  - {map: 10.2.0.0/24 <-> 198.51.101.0/24}
`
	rulesAfter = `inside: eth1
outside: eth0
pools:
  cgn: {addresses: [203.0.113.0/30], ports: 1024-65535, blocks: {size: 1024, deterministic: true}}
rules:
  - {snat: 10.0.0.0/25, to: cgn}
  - {dnat: "tcp 198.51.100.1:443", to: ["10.1.0.6:8443", "10.1.0.7:8443"]}
`
)

// Who had an endpoint by the rules alone is answered by the file that was in force, also where it
// was replaced, and nobody had it before the first one and after the last.
func TestWhoByRule(t *testing.T) {
	r := newRig(t)
	r.open()
	at := map[string]natlog.Micros{}
	pass := func(name string) {
		t.Helper()
		for range 60 { // the log is kept all the time
			r.pass(time.Second)
			r.must(r.s.Tick())
		}
		at[name] = natlog.MicrosOf(r.now)
		for range 60 {
			r.pass(time.Second)
			r.must(r.s.Tick())
		}
	}
	pass("none yet")
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesBefore))
	pass("before")
	change := natlog.MicrosOf(r.now)
	at["change"] = change
	r.must(r.s.KeepRules(natlog.Engine, change, rulesAfter))
	pass("after")
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), ""))
	pass("down")

	ask := func(moment natlog.Micros, within time.Duration, end string, protocol uint8) string {
		t.Helper()
		port := netip.MustParseAddrPort(end)
		margin := natlog.Micros(within.Microseconds())
		got, err := Who(r.dir, Question{Address: port.Addr(), Port: port.Port(), Protocol: protocol, Since: moment - margin, Upto: moment + margin})
		r.must(err)
		if len(got.Lives) > 0 || len(got.Gaps) > 0 {
			t.Errorf("%s: the log has %+v, gaps %+v", end, got.Lives, got.Gaps)
		}
		var names []string
		for _, o := range got.Rules {
			if o.Since > moment+margin+rulesWithin || o.Until != 0 && o.Until < moment-margin-rulesWithin {
				t.Errorf("%s: %s was in force from %v to %v, and not at %v", end, o.Path, o.Since.Time(), o.Until.Time(), moment.Time())
			}
			if o.Rule == nil {
				names = append(names, o.Block.Subscriber.Addr().String())
				continue
			}
			for _, i := range o.Internal {
				names = append(names, i.String())
			}
		}
		return strings.Join(names, " ")
	}
	const tcp, udp = 6, 17
	for _, c := range []struct {
		at     string
		within time.Duration
		end    string
		proto  uint8
		want   string
	}{
		{"none yet", 0, "198.51.100.1:443", tcp, ""},
		{"before", 0, "198.51.100.1:443", tcp, "10.1.0.5:8443"},
		{"before", 0, "198.51.100.1:443", udp, ""},
		{"before", 0, "198.51.100.1:444", tcp, ""},
		{"before", 0, "198.51.101.7:99", 0, "10.2.0.7:99"},
		{"after", 0, "198.51.101.7:99", 0, ""},
		{"after", 0, "198.51.100.1:443", tcp, "10.1.0.6:8443 10.1.0.7:8443"},
		{"after", 10 * time.Second, "198.51.100.1:443", tcp, "10.1.0.6:8443 10.1.0.7:8443"},
		{"after", 90 * time.Second, "198.51.100.1:443", tcp, "10.1.0.5:8443 10.1.0.6:8443 10.1.0.7:8443"},
		{"change", 0, "198.51.100.1:443", tcp, "10.1.0.5:8443 10.1.0.6:8443 10.1.0.7:8443"},
		{"down", 0, "198.51.100.1:443", tcp, ""},
		{"before", 0, "203.0.113.2:1600", tcp, "10.0.0.6"}, // blocks of 512 from 1024 on: the second of the third address
		{"after", 0, "203.0.113.2:1600", udp, "10.0.0.2"},  // of 1024
		{"change", 0, "203.0.113.2:1600", udp, "10.0.0.6 10.0.0.2"},
		{"down", 0, "203.0.113.2:1600", udp, ""},
	} {
		if got := ask(at[c.at], c.within, c.end, c.proto); got != c.want {
			t.Errorf("%s %s: by rule it was of %q, want %q", c.at, c.end, got, c.want)
		}
	}

	// Rules that cannot be read are a gap, and not nobody.
	list, err := RulesOf(r.dir)
	r.must(err)
	r.must(os.WriteFile(list[0].Path, []byte("rules: of a later natkit\n"), 0o600))
	got, err := Who(r.dir, Question{Address: netip.MustParseAddr("198.51.100.1"), Port: 443, Since: at["before"], Upto: at["before"]})
	r.must(err)
	if len(got.Rules) != 0 || len(got.Gaps) != 1 || !strings.Contains(got.Gaps[0].Why, list[0].Path) {
		t.Errorf("unreadable rules: %+v", got)
	}
	r.must(r.s.Close())
}

// Where another has a computed block still, by rules of before, the log's record is the answer.
func TestWhoByRuleAndRecord(t *testing.T) {
	r := newRig(t)
	r.open()
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesBefore))
	block := func(host string) natlog.Translation {
		return natlog.Translation{Kind: natlog.Block, Source: natlog.Engine, Internal: netip.AddrPortFrom(netip.MustParseAddr(host), 0),
			External: netip.MustParseAddrPort("203.0.113.2:1536"), LastPort: 2047, Subscriber: host}
	}
	who := func() (lives, rules []string) {
		r.pass(2 * time.Second)
		r.must(r.s.Tick())
		r.pass(2 * time.Second)
		r.must(r.s.Tick())
		at := natlog.MicrosOf(r.now.Add(-2 * time.Second))
		got, err := Who(r.dir, Question{Address: netip.MustParseAddr("203.0.113.2"), Port: 1600, Since: at, Upto: at})
		r.must(err)
		for _, l := range got.Lives {
			lives = append(lives, l.Internal.Addr().String())
		}
		for _, o := range got.Rules {
			rules = append(rules, o.Block.Subscriber.Addr().String())
		}
		return lives, rules
	}
	for _, c := range []struct{ has, lives, rules string }{
		{"", "[]", "[10.0.0.6]"}, {"10.0.0.6", "[10.0.0.6]", "[10.0.0.6]"}, {"10.0.0.99", "[10.0.0.99]", "[]"}, {"", "[]", "[10.0.0.6]"},
	} {
		if c.has != "" {
			r.must(r.s.Append([]natlog.Record{event(natlog.Created, block(c.has), r.now)}))
		}
		if lives, rules := who(); fmt.Sprint(lives) != c.lives || fmt.Sprint(rules) != c.rules {
			t.Errorf("while %q has the block: recorded %v, by rule %v", c.has, lives, rules)
		}
		if c.has != "" {
			r.must(r.s.Append([]natlog.Record{event(natlog.Ended, block(c.has), r.now)}))
			r.pass(time.Second)
		}
	}
	r.must(r.s.Close())
}

// Rules that could not be kept, or were removed with the folder, are kept later, with their time.
func TestRulesAreKeptAgain(t *testing.T) {
	r := newRig(t)
	r.open()
	since := natlog.MicrosOf(r.now)
	kept := func(what string) {
		t.Helper()
		list, err := RulesOf(r.dir)
		r.must(err)
		if len(list) != 1 || list[0].Since != since {
			t.Errorf("%s: kept are %v", what, list)
		}
	}
	rules := filepath.Join(r.dir, "rules")
	r.must(os.WriteFile(rules, nil, 0o600)) // in the way
	if err := r.s.KeepRules(natlog.Engine, since, rulesBefore); err == nil {
		t.Error("rules are kept in a file")
	}
	r.pass(time.Second)
	r.must(r.s.Tick())
	r.must(os.Remove(rules))
	r.pass(time.Second)
	r.must(r.s.Tick())
	kept("after a failure")
	r.must(os.RemoveAll(r.dir))
	r.pass(time.Second)
	r.must(r.s.Tick())
	kept("after the folder was removed")
	r.must(r.s.Close())
}

// Times of rules are those of the clock of then: where it was set back, a time was twice, and both
// times what was in force then answers.
func TestWhoByRuleWhenClockSetBack(t *testing.T) {
	r := newRig(t)
	r.open()
	forward := func(host string) {
		t.Helper()
		r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), strings.Replace(rulesBefore, "10.1.0.5", host, 1)))
	}
	pass := func(minutes int) {
		t.Helper()
		for range minutes * 60 {
			r.pass(time.Second)
			r.must(r.s.Tick())
		}
	}
	begin := r.now
	forward("10.1.0.1")
	pass(10)
	forward("10.1.0.2")
	pass(10)
	r.now = r.now.Add(-15 * time.Minute)
	r.must(r.s.ClockStepped(-15*time.Minute, natlog.MicrosOf(r.now.Add(15*time.Minute-time.Millisecond))))
	pass(2) // from minute 5 to 7
	forward("10.1.0.3")
	pass(1)
	r.must(r.s.RulesUnknown(natlog.Engine, natlog.MicrosOf(r.now)))
	pass(1)
	forward("10.1.0.4")
	pass(16) // to minute 25
	for _, c := range []struct {
		minute float64
		want   string
	}{
		{2, "10.1.0.1"}, {5.5, "10.1.0.1 10.1.0.2"}, {7.5, "10.1.0.1 10.1.0.3"}, {8.5, "10.1.0.1 unknown"}, {9.5, "10.1.0.1 10.1.0.4"},
		{12, "10.1.0.2 10.1.0.4"}, {19, "10.1.0.2 10.1.0.4"}, {22, "10.1.0.4"},
	} {
		at := natlog.MicrosOf(begin.Add(time.Duration(c.minute * float64(time.Minute))))
		got, err := Who(r.dir, Question{Address: netip.MustParseAddr("198.51.100.1"), Port: 443, Protocol: 6, Since: at, Upto: at})
		r.must(err)
		var names []string
		for _, o := range got.Rules {
			names = append(names, o.Internal[0].Addr().String())
		}
		for _, g := range got.Gaps {
			if strings.Contains(g.Why, "which rules were in force is not known") {
				names = append(names, "unknown")
			}
		}
		if have := strings.Join(names, " "); have != c.want {
			t.Errorf("minute %v: %q, want %q", c.minute, have, c.want)
		}
	}
	r.must(r.s.Close())
}

// What the clock has skipped is no time in which rules were in force; what it had shown before is no gap.
func TestWhoWhenClockSetForward(t *testing.T) {
	r := newRig(t)
	r.open()
	began := r.now
	set := func(by time.Duration) {
		t.Helper()
		known := natlog.MicrosOf(r.now)
		r.pass(10 * time.Millisecond)
		r.now = r.now.Add(by)
		r.must(r.s.ClockStepped(by, known))
	}
	for range 3 {
		r.pass(time.Hour)
		r.must(r.s.Tick())
	}
	set(-2 * time.Hour)
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesBefore))
	r.pass(10 * time.Second)
	r.must(r.s.Tick())
	set(5 * time.Hour)
	r.pass(10 * time.Second)
	r.must(r.s.KeepRules(natlog.Engine, natlog.MicrosOf(r.now), rulesAfter))
	r.must(r.s.Tick())
	ask := func(at time.Time) Answer { t.Helper(); return r.who("198.51.100.1:443", at) }
	if got := ask(began.Add(5 * time.Hour)); len(got.Rules) != 0 || len(got.Gaps) == 0 {
		t.Errorf("a time that the clock has skipped: %+v", got)
	}
	if got := ask(began.Add(2 * time.Hour)); len(got.Rules) != 0 || len(got.Gaps) != 0 {
		t.Errorf("a time that it had shown before, and skipped: %+v", got)
	}
	if got := ask(began.Add(time.Hour + 5*time.Second)); len(got.Rules) != 1 || len(got.Gaps) != 0 {
		t.Errorf("a time that was twice: %+v", got)
	}
	r.must(r.s.Close())
}
