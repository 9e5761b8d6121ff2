// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/words/plural"
)

// liveRouter is the eBPF engine as natkit up and natkit apply make it, with rules that change.
type liveRouter struct {
	t      *testing.T
	attach control.Attach
	rules  string
}

func (r *liveRouter) Name() string     { return "live" }
func (r *liveRouter) Describe() string { return "the engine of the test" }
func (r *liveRouter) NAT() bool        { return true }

func (r *liveRouter) file(b *Testbed) (*rulefile.File, string, error) {
	text := fmt.Sprintf("inside: [%s]\noutside: [%s]\n%s", b.InsideDev, b.OutsideDev, r.rules)
	file, err := rulefile.Parse("live.yaml", []byte(text))
	return file, text, err
}

func (r *liveRouter) Install(ctx context.Context, b *Testbed, _ RouterOptions) (func() error, error) {
	file, text, err := r.file(b)
	if err != nil {
		return nil, err
	}
	if _, err := control.Up(ctx, file, text, control.Options{Namespace: b.Router, Engine: control.EngineEBPF, Attach: r.attach}); err != nil {
		return nil, err
	}
	return func() error {
		_, err := control.Down(b.Router)
		return err
	}, nil
}

func (r *liveRouter) apply(b *Testbed, rules string) {
	r.t.Helper()
	r.rules = rules
	file, text, err := r.file(b)
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := control.Apply(r.t.Context(), file, text, control.Options{Namespace: b.Router}); err != nil {
		r.t.Fatal(err)
	}
}

// observed reads what the right end saw of each flow: its external endpoint, not valid if no packet
// came.
func observed(t *testing.T, s *tester, flows int) []netip.AddrPort {
	t.Helper()
	all := make([]generatorTranslation, s.translations.MaxEntries())
	keys := make([]uint32, len(all))
	var cursor ebpf.MapBatchCursor
	if n, err := s.translations.BatchLookup(&cursor, keys, all, nil); n != len(all) {
		t.Fatalf("read %d of %d translations: %v", n, len(all), err)
	}
	out := make([]netip.AddrPort, flows)
	for i, flow := range keys {
		if tr := all[i]; int(flow) < flows && tr.Known != 0 {
			var addr [4]byte
			binary.NativeEndian.PutUint32(addr[:], tr.Address)
			out[flow] = netip.AddrPortFrom(netip.AddrFrom4(addr), htons(tr.Port))
		}
	}
	return out
}

// Sessions go on through every change of port blocks, classes, limits and addresses, and to blocks
// from none: the other end sees each at the same external endpoint, no packet is lost while rules
// change, no endpoint has two owners, and blocks are one host's. NATKIT_FLOWS is how many are open
// when the first change comes; a tenth more begin after each.
func TestHitlessChange(t *testing.T) {
	ktest.Root(t)
	t.Setenv("NATKIT_RUN_DIR", t.TempDir())
	hooks := []control.Attach{control.AttachXDP, control.AttachTC}
	if testing.Short() {
		hooks = hooks[:1]
	}
	for _, attach := range hooks {
		t.Run(string(attach), func(t *testing.T) { hitlessChange(t, attach) })
	}
}

func hitlessChange(t *testing.T, attach control.Attach) {
	flows := 50_000
	if text := os.Getenv("NATKIT_FLOWS"); text != "" {
		var err error
		if flows, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	scale := (flows + 99_999) / 100_000
	address := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{100, 64, byte(n >> 8), byte(n)}) }
	rules := func(addresses int, pool, more string) string {
		return fmt.Sprintf(`limits: {sessions: %d, mappings: %[1]d, sources: %d}
pools:
  cgn: {addresses: [%s-%s], ports: 1024-65535%s}
%srules:
  - {snat: 198.18.0.0/16, to: cgn}
`, 1<<18*scale, 1<<12*scale, address(0), address(addresses-1), pool, more)
	}
	const classes = `subscribers:
  classes:
    default: {ports: %d, sessions: %d, new_per_second: 100000}
    few: {of: [198.18.0.0/26], ports: %d, sessions: 20}
`
	drained := [2]netip.Addr{address(scale), address(3*scale - 1)} // with ports given one by one, and in blocks
	steps := []struct {
		name, rules string
		blocks      bool
	}{
		{"ports one by one", rules(2*scale, "", ""), false},
		{"blocks, more addresses", rules(7*scale, ", blocks: {size: 512, extra: 256, at_most: 7}", ""), true},
		{"other blocks", rules(7*scale, ", blocks: {size: 64, extra: 128, at_most: 3}", ""), true},
		{"limits below what some have", rules(7*scale, ", blocks: {size: 64, extra: 128, at_most: 3}", fmt.Sprintf(classes, 500, 400, 10)), true},
		{"other limits, more addresses", rules(11*scale, ", blocks: {size: 256, extra: 64, at_most: 1}", fmt.Sprintf(classes, 300, 300, 5)), true},
		{"an address drained", rules(11*scale, fmt.Sprintf(", blocks: {size: 256, extra: 64, at_most: 1}, drain: [%s-%s]", drained[0], drained[1]), ""), true},
		{"no drain, larger blocks, more addresses", rules(16*scale, ", blocks: {size: 1024, extra: 512, at_most: 1}", ""), true},
	}
	router := &liveRouter{t: t, attach: attach, rules: steps[0].rules}
	most := flows + (len(steps)-1)*flows/10
	l, err := newDUT(t.Context(), router, RouterOptions{}, most, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	cpu := l.tester.cpus[len(l.tester.cpus)-1:]
	load := frameLoad{frames: []int{MinFrame}, oneTarget: true, cpus: cpu}
	// send sends each of these flows once, again those that a busy machine's queues have lost.
	send := func(first, count int) {
		t.Helper()
		load := load
		load.first, load.flows, load.once, load.duration = first, count, true, fillTime(count)
		for range 4 {
			tr, err := l.tester.runLearning(t.Context(), load, true)
			if err != nil {
				t.Fatal(err)
			}
			if tr.received.frames == uint64(count) {
				return
			}
		}
	}
	began := time.Now()
	var kept []netip.AddrPort
	owners, granules := map[netip.AddrPort]int{}, map[netip.AddrPort]int{}
	open := 0
	for n, step := range steps {
		if n > 0 {
			// Packets of open sessions beside the change: none of them is lost in the router.
			beside := make(chan *trial)
			go func() {
				load := load
				load.flows, load.pps, load.duration = open, 20_000, time.Second
				tr, err := l.tester.run(t.Context(), load)
				if err != nil {
					t.Error(err)
				}
				beside <- tr
			}()
			router.apply(l.tester.testbed, step.rules)
			if tr := <-beside; tr != nil {
				for place, lost := range tr.lost {
					if place != LostBeforeRouter && place != LostBacklog && lost > 0 {
						t.Errorf("%s: %d of %s sent while the rules changed were lost: %s", step.name, lost, plural.Count(int(tr.sent.frames), "packet"), placesOf(tr.lost))
					}
				}
			}
			if err := l.tester.forgetFlows(); err != nil {
				t.Fatal(err)
			}
			send(0, open)
			for flow, saw := range observed(t, l.tester, open) {
				if saw != kept[flow] {
					t.Fatalf("%s: flow %d has had %v and has %v", step.name, flow, kept[flow], saw)
				}
			}
		}
		until := most
		if n < len(steps)-1 { // whole hosts
			until = (flows + n*flows/10 + HostSessions - 1) / HostSessions * HostSessions
		}
		send(open, until-open)
		now := observed(t, l.tester, until)
		for flow := open; flow < until; flow++ {
			end, host := now[flow], flow/HostSessions
			if !end.IsValid() {
				t.Fatalf("%s: flow %d was not opened", step.name, flow)
			}
			if other, taken := owners[end]; taken {
				t.Fatalf("%s: flows %d and %d both have %v", step.name, other, flow, end)
			}
			owners[end] = flow
			if step.name == "an address drained" && drained[0].Compare(end.Addr()) <= 0 && end.Addr().Compare(drained[1]) <= 0 {
				t.Fatalf("flow %d got %v, which is drained", flow, end)
			}
			granule := netip.AddrPortFrom(end.Addr(), end.Port()&^63)
			other, known := granules[granule]
			if step.blocks && known && other != host {
				t.Fatalf("%s: hosts %d and %d have ports of %v to %d", step.name, other, host, granule, granule.Port()+63)
			}
			granules[granule] = host
		}
		kept, open = now, until
	}
	status, err := control.ReadStatus(l.tester.testbed.Router)
	if err != nil {
		t.Fatal(err)
	}
	if p := status.Pools[0]; p.FreeUDP != p.Ports-most {
		t.Errorf("%d of %d ports are free, with %d sessions", p.FreeUDP, p.Ports, most)
	}
	t.Logf("%d sessions, then %d, %d rule files, in %v; %d subscribers, blocks %+v", flows, most, len(steps), time.Since(began).Round(time.Millisecond), status.Pools[0].Subscribers, *status.Pools[0].Blocks)
}
