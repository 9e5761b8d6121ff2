// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// nightFor is how long TestLongNight takes, such as 35m, dayFor is that of TestLongDay.
const (
	nightFor = "NATKIT_NIGHT"
	dayFor   = "NATKIT_DAY"
)

// nightFault is one that can come and go on a router that goes on.
type nightFault struct {
	code          string
	broken, cured action
}

// A busy router: web traffic in bursts, and flows to networks behind it.
var nightRouter = do(onGateway("nft 'flush ruleset; table ip nat { chain post { type nat hook postrouting priority 100; oifname eth0 masquerade; }; }'"), browseAt(50), swallow(lab.RoleServer, 5353),
	onServer("ip addr add 10.66.0.1/24 dev lo", "ip addr add 10.67.0.1/24 dev lo", "ip addr add {router}/24 dev eth0"),
	onClient("ip addr add 10.99.0.1/32 dev lo"),
	onGateway("ip route add 10.66.0.0/24 via {server}", "ip route add 10.67.0.0/24 via {router}", "ip route add 10.99.0.1/32 via {client}", "sysctl -qw net.ipv4.conf.eth1.rp_filter=1"),
	send(datagrams("10.66.0.1:5353", 5, 10), datagrams("10.67.0.1:5353", 5, 10), datagramsFrom("10.99.0.1", "{server}:5353", 5, 10, 10), bursts))

// bursts are a few seconds of many requests, now and then.
func bursts(ctx context.Context, s *faultRun) error {
	for ctx.Err() == nil {
		_ = wait(time.Duration(10+rand.IntN(40))*time.Second)(ctx, s)
		burst, stop := context.WithTimeout(ctx, time.Duration(2+rand.IntN(6))*time.Second)
		_ = requests("{url}", 400)(burst, s) // in a fault they fail
		stop()
	}
	return nil
}

var nightFaults = []nightFault{
	{"ip-forward-off", onGateway("sysctl -qw net.ipv4.ip_forward=0"), onGateway("sysctl -qw net.ipv4.ip_forward=1", "sysctl -qw net.ipv4.conf.eth1.rp_filter=1")},
	{"rule-drop", onGateway("nft 'table ip fw { chain forward { type filter hook forward priority 0; ip saddr {client} tcp dport 80 drop; }; }'"), onGateway("nft delete table ip fw")},
	{"forward-policy-drop", onGateway("nft 'table ip fw { chain forward { type filter hook forward priority 0; policy drop; udp dport 5353 accept; }; }'"), onGateway("nft delete table ip fw")},
	{"link-down", onGateway("ip link set eth1 down"), onGateway("ip link set eth1 up", "ip route add 10.99.0.1/32 via {client}")},
	{"no-route", onGateway("ip route del 10.66.0.0/24"), onGateway("ip route add 10.66.0.0/24 via {server}")},
	{"rp-filter-drop", onGateway("ip route replace 10.99.0.1/32 via {server}"), onGateway("ip route replace 10.99.0.1/32 via {client}")},
	{"qdisc-drop", onGateway("tc qdisc replace dev eth1 root handle 1: tbf rate 300kbit burst 16k limit 4000"), onGateway("tc qdisc del dev eth1 root")},
	{"clients-unreached", onGateway("ip neigh replace {client} lladdr 02:00:00:00:00:99 nud permanent dev eth1"), onGateway("ip neigh del {client} dev eth1")},
	{"wrong-destination-mac", onClient("ip neigh replace {near} lladdr 02:00:00:00:0e:ad nud permanent dev eth0"), onClient("ip neigh del {near} dev eth0")},
	// Without the entry of the neighbour, which may be good for the whole of the fault.
	{"next-hop-silent", do(onServer("ip addr del {router}/24 dev eth0"), onGateway("ip neigh flush to {router} dev eth0")), onServer("ip addr add {router}/24 dev eth0")},
	{"ttl-exceeded", onClient("sysctl -qw net.ipv4.ip_default_ttl=1"), onClient("sysctl -qw net.ipv4.ip_default_ttl=64")},
}

// A night, as long as NATKIT_NIGHT says: faults at random times on one busy router, with pauses in which
// all is well. The history has each from its beginning to its end, the stored facts of its middle show it, and
// no warning begins while all is well.
func TestLongNight(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv(nightFor))
	if err != nil {
		return // TestNight of cmd/natkit has a few minutes of it
	}
	ktest.Lacking(t, func(t *testing.T) { longNight(t, length) })
}

// A day, as long as NATKIT_DAY says: all healthy machines, most of them with bursts, under one monitor. No warning begins.
func TestLongDay(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv(dayFor))
	if err != nil {
		return // TestHealthyMachines has a look at each
	}
	ktest.Tool(t, "iptables-nft-restore")
	ktest.Lacking(t, func(t *testing.T) { longDay(t, length) })
}

func longDay(t *testing.T, length time.Duration) {
	names := map[string]string{}
	up := func(what, topology string, o lab.Options) *watchedLab {
		o.Name = fmt.Sprintf("day%d", len(names))
		names[o.Name] = what
		return watchedIn(t, upForTrace(t, topology, o))
	}
	w := up("the night's router", "routed", lab.Options{})
	stops := []func(){w.change(nightRouter)}
	for _, m := range healthyMachines {
		machine := up(m.name, m.topology, m.options)
		if m.watch != nil {
			machine.watched = m.watch(machine.lab)
		}
		work := m.work
		if !m.steady {
			work = do(work, send(bursts))
		}
		stops = append(stops, machine.change(work))
	}
	dir := t.TempDir()
	w.startMonitor(watchedBy{Interval: 10 * time.Second, ARPProbes: monitor.ProbesOnSymptom, History: dir})
	_ = wait(length)(t.Context(), w.faultRun)
	w.stopMonitor()
	for _, stop := range stops {
		stop()
	}

	var episodes history.Episodes
	examined := map[string]int{}
	damaged, err := history.Read(dir, history.Span{}, func(e *history.Entry) error {
		episodes.Add(e)
		for _, l := range e.Looks {
			s, err := l.Snapshot()
			if err != nil {
				return err
			}
			examined[s.Netns.Name]++
		}
		return nil
	})
	if err != nil || len(damaged) > 0 {
		t.Fatal(err, damaged)
	}
	for name, what := range names {
		n := 0
		for ns, times := range examined {
			if strings.HasPrefix(ns, name+"-") {
				n += times
			}
		}
		if t.Logf("%s: %s, examined %d times", name, what, n); n == 0 {
			t.Errorf("%s, %s, was never examined: %v", name, what, examined)
		}
	}
	for _, e := range episodes.List() {
		line := fmt.Sprintf("%s %s in %s: %s, %s to %s", e.Severity, e.Code, e.Namespace, e.Title, e.Began.Format(time.TimeOnly), e.Ended.Format(time.TimeOnly))
		if t.Log(line); e.Severity != causes.Advice.String() {
			t.Error("nothing is wrong, and there was this")
		}
	}
}

func longNight(t *testing.T, length time.Duration) {
	w := watchLab(t, Fault{})
	stop := w.change(nightRouter)
	defer func() { stop() }()
	dir := t.TempDir()
	w.startMonitor(watchedBy{Interval: 10 * time.Second, ARPProbes: monitor.ProbesOnSymptom, History: dir})
	rest := func(d time.Duration) { _ = wait(d)(t.Context(), w.faultRun) }
	between := func(least, most time.Duration) time.Duration { return least + rand.N(most-least) }
	type made struct {
		nightFault
		began, over time.Time
	}
	var night []made
	end := time.Now().Add(length)
	rest(between(time.Minute, 2*time.Minute))
	faults := slices.Clone(nightFaults)
	rand.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for i := 0; time.Now().Before(end); i++ {
		f := made{nightFault: faults[i%len(faults)], began: time.Now()}
		if err := f.broken(t.Context(), w.faultRun); err != nil {
			t.Fatal(err)
		}
		rest(between(35*time.Second, 90*time.Second))
		f.over = time.Now()
		if err := f.cured(t.Context(), w.faultRun); err != nil {
			t.Fatal(err)
		}
		night = append(night, f)
		rest(between(75*time.Second, 2*time.Minute))
	}
	stop()
	stop = func() {}
	w.stopMonitor()

	var episodes history.Episodes
	looks := map[time.Time]history.Look{}
	_, err := history.Read(dir, history.Span{}, func(e *history.Entry) error {
		episodes.Add(e)
		for _, l := range e.Looks {
			if l.Inode() == w.watched.Handle().Inode() {
				looks[l.At()] = l
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	account := map[string][]string{}
	for _, e := range episodes.List() {
		i := slices.IndexFunc(night, func(f made) bool {
			return e.Began.After(f.began.Add(-time.Second)) && e.Began.Before(f.over.Add(15*time.Second))
		})
		line := fmt.Sprintf("%s %s in %s: %s, %s to %s", e.Code, e.Severity, e.Namespace, e.Title, e.Began.Format(time.TimeOnly), e.Ended.Format(time.TimeOnly))
		if i < 0 && e.Severity == causes.Advice.String() {
			continue
		}
		if i < 0 {
			t.Errorf("while all was well: %s", line)
			continue
		}
		account[night[i].began.String()] = append(account[night[i].began.String()], line)
		if e.Ended.IsZero() || e.Ended.After(night[i].over.Add(75*time.Second)) {
			t.Errorf("%s was cured at %s, and lasts: %s", night[i].code, night[i].over.Format(time.TimeOnly), line)
		}
	}
	for _, f := range night {
		seen := account[f.began.String()]
		t.Logf("%s %s to %s:\n\t%s", f.code, f.began.Format(time.TimeOnly), f.over.Format(time.TimeOnly), strings.Join(seen, "\n\t"))
		if !slices.ContainsFunc(seen, func(line string) bool { return strings.HasPrefix(line, f.code+" ") }) {
			t.Errorf("%s of %s is not in the history", f.code, f.began.Format(time.TimeOnly))
		}
		middle := f.began.Add(f.over.Sub(f.began) / 2)
		var nearest time.Time
		for at := range looks {
			if nearest.IsZero() || at.Sub(middle).Abs() < nearest.Sub(middle).Abs() {
				nearest = at
			}
		}
		look := looks[nearest]
		s, err := look.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		if found := flatFindings(causes.Judge(s)); !slices.ContainsFunc(found, func(g causes.Finding) bool { return g.Code == f.code }) {
			t.Errorf("doctor --at %s (facts of %s) finds %s, not %s", middle.Format(time.TimeOnly), nearest.Format(time.TimeOnly), titles(found), f.code)
		}
	}
}
