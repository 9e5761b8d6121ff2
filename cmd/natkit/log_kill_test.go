// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// Subscribers of TestLogKilledUnderLoad: blocks of guests begin and end, those of residents stay.
const (
	guests         = 4000 // each comes again when its block has ended
	residents      = 200
	guestsASecond  = 500 // so 1000 records of blocks a second
	blockAddresses = 4
	killedRules    = `inside: [in]
outside: [out]
pools:
  cgn: {addresses: [203.0.113.16/30], blocks: {size: 64, at_most: 2}}
defaults: {timeouts: {udp: 2s, port_hold_down: 2s}}
limits: {sources: 8192}
log: {record: blocks}
rules:
  - {snat: 10.1.0.0/16, to: cgn}
`
)

// crowd sends packets of subscribers until it is stopped.
func (w *wire) crowd() (end func()) {
	w.t.Helper()
	network := netip.MustParsePrefix("10.1.0.0/16")
	if err := w.client.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			return err
		}
		return lab.Own(network)
	}); err != nil {
		w.t.Fatal(err)
	}
	if err := w.here.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: network.Addr().AsSlice(), Mask: net.CIDRMask(16, 32)}, Gw: net.IPv4(10, 0, 0, 2)})
	}); err != nil {
		w.t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() { stopped <- w.client.Do(func() error { return w.visits(stop) }) }()
	end = sync.OnceFunc(func() {
		close(stop)
		if err := <-stopped; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(end)
	return end
}

// visits sends of each guest in turn, and of each resident once a second.
func (w *wire) visits(stop chan struct{}) error {
	const turn = 20 * time.Millisecond
	ticks := time.NewTicker(turn)
	defer ticks.Stop()
	begin, guest, resident := time.Now(), 0, 0
	for {
		select {
		case <-stop:
			return nil
		case <-ticks.C:
		}
		passed := time.Since(begin)
		for ; guest < int(passed*guestsASecond/time.Second); guest++ {
			if err := w.datagram(subscriber(residents+guest%guests), 1024+guest/guests); err != nil {
				return err
			}
		}
		for ; resident < int(passed*residents/time.Second); resident++ {
			if err := w.datagram(subscriber(resident%residents), 1000); err != nil {
				return err
			}
		}
	}
}

func subscriber(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)})
}

// datagram sends one of a host to the server, who writes down whose it is.
func (w *wire) datagram(host netip.Addr, port int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: host.As4(), Port: port}); err != nil {
		return err
	}
	text := netip.AddrPortFrom(host, uint16(port)).String()
	return unix.Sendto(fd, []byte(text), 0, &unix.SockaddrInet4{Addr: [4]byte{203, 0, 113, 2}, Port: 53})
}

// blockOf is a block of the pool by its place: from the first to the last of all addresses.
func blockOf(n int) netip.AddrPort {
	const each = (65536 - 1024) / 64
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(16 + n/each)}), uint16(1024+64*(n%each)))
}

// owned is what the engine's tables have of a block.
type owned struct {
	by    netip.Addr
	since uint64 // CLOCK_MONOTONIC
	last  uint16
}

// blocks reads the engine's tables.
func (w *wire) blocks() map[netip.AddrPort]owned {
	w.t.Helper()
	engine, err := control.Open(w.here)
	if err != nil {
		w.t.Fatal(err)
	}
	defer engine.Close()
	if err := engine.LetGo(); err != nil {
		w.t.Fatal(err)
	}
	log, err := engine.OpenLog()
	if err != nil {
		w.t.Fatal(err)
	}
	defer log.Close()
	found := map[netip.AddrPort]owned{}
	if err := log.Alive(func(k datapath.LogKey, since uint64) {
		if k.Kind == datapath.LogBlock {
			found[netip.AddrPortFrom(netip.AddrFrom4(k.External), k.ExternalPort)] = owned{netip.AddrFrom4(k.Internal), since, k.LastPort}
		}
	}); err != nil {
		w.t.Fatal(err)
	}
	return found
}

// asked is what the log has of an endpoint at a time.
func (w *wire) asked(dir string, end netip.AddrPort, at natlog.Micros) store.Answer {
	w.t.Helper()
	got, err := store.Who(dir, store.Question{Address: end.Addr(), Port: end.Port(), Protocol: unix.IPPROTO_UDP, Since: at, Upto: at})
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

// Blocks begin and end, 1000 records a second, while natkit log is killed and starts again a minute later
// (with -short ten seconds). Then it has each block that is alive as the engine's tables have it, and no other; who
// had which before is right; and what found no room in the ring is a gap with its times. With the ring
// as it is there is none.
func TestLogKilledUnderLoad(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	away, each := time.Minute, 1
	if testing.Short() {
		away, each = 10*time.Second, 11 // look-ups are most of what the test works
	}
	for _, c := range []struct {
		name string
		ring int
		gap  bool
	}{
		{"ring of 2730 records", 128 << 10, true},
		{"ring as it is", datapath.LogBytes, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, dir := makeWire(t), filepath.Join(t.TempDir(), "log")
			had := datapath.LogBytes
			datapath.LogBytes = c.ring
			w.rules("up", killedRules)
			datapath.LogBytes = had
			t.Parallel() // most of the time is waiting
			end := w.logs(dir)
			quiet := w.crowd()
			time.Sleep(6 * time.Second) // longer than a block lives, so that as many end as begin: the load is what is to last
			end(unix.SIGKILL)
			killed := time.Now()
			time.Sleep(away) // what the test is about: nobody reads for so long
			before, restarted := w.blocks(), time.Now()
			end = w.logs(dir)
			at, after := time.Now(), w.blocks()
			time.Sleep(3 * time.Second) // packets of so long are to be asked about that came after the gap
			quiet()
			time.Sleep(apart) // the end of what is recorded has no mark to wait for, but natkit log takes no longer than that
			end(unix.SIGTERM)

			w.rightThen(dir, natlog.MicrosOf(at), each, before, after)
			inGap := w.rightAlways(dir, killed, restarted)
			w.gapOf(dir, c.gap, killed, restarted, at)
			// In a short gap hardly anything ends that has begun in it.
			if inGap > 0 && !c.gap || inGap == 0 && c.gap && away == time.Minute {
				t.Errorf("of %d packets the log does not know the sender, in a gap", inGap)
			}
		})
	}
}

// rightThen compares the log with the engine's tables of just before and just after a time, of each so
// many blocks one.
func (w *wire) rightThen(dir string, at natlog.Micros, step int, before, after map[netip.AddrPort]owned) {
	w.t.Helper()
	alive, wrong := 0, 0
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		w.t.Fatal(err)
	}
	offset := time.Now().UnixNano() - ts.Nano()
	for n := 0; n < blockAddresses*(65536-1024)/64; n += step {
		first := blockOf(n)
		was, is := before[first], after[first]
		got := w.asked(dir, netip.AddrPortFrom(first.Addr(), first.Port()+uint16(n%64)), at)
		ok := len(got.Gaps) == 0
		if was == is {
			if is == (owned{}) {
				ok = ok && len(got.Lives) == 0
			} else {
				alive++
				ok = ok && len(got.Lives) == 1 && got.Lives[0].Kind == natlog.Block && got.Lives[0].Internal.Addr() == is.by &&
					got.Lives[0].External == first && got.Lives[0].LastPort == is.last
				began := time.Unix(0, int64(is.since)+offset)
				ok = ok && began.Sub(got.Lives[0].Since.Time()).Abs() < 100*time.Millisecond
			}
		} else {
			for _, l := range got.Lives {
				ok = ok && (l.Internal.Addr() == was.by || l.Internal.Addr() == is.by)
			}
		}
		if !ok {
			if wrong++; wrong < 5 {
				w.t.Errorf("%v: the engine had %+v and then %+v, the log has %+v, gaps %+v", first, was, is, got.Lives, got.Gaps)
			}
		}
		if ok && was == is && n/step%100 == 1 { // and by the command, as somebody would ask
			code, stdout, stderr := observed(w.t.Context(), fmt.Sprintf("who %v udp --at %s --dir %s", first, at.Time().Format("2006-01-02T15:04:05.000000Z"), dir))
			if is == (owned{}) && code != exitFindings || is != (owned{}) && (code != exitOK || !strings.Contains(stdout, is.by.String())) {
				w.t.Errorf("who %v, %+v: exit %d: %s%s", first, is, code, stdout, stderr)
			}
		}
	}
	w.t.Logf("%d blocks were alive at the restart, %d wrong", alive, wrong)
	if alive*step < guestsASecond {
		w.t.Error("hardly any")
	}
}

// rightAlways asks the log who sent packets that came to the server: of how many nobody is known, in a gap.
// Whose end nobody saw, who shows as that, beside the right one.
func (w *wire) rightAlways(dir string, killed, restarted time.Time) (inGap int) {
	w.t.Helper()
	seen := w.sightings()
	step, wrong, in := len(seen)/300+1, 0, map[string]int{}
	for i := 0; i < len(seen); i += step {
		s := seen[i]
		s.at = s.at.Add(time.Duration(i/step%8) * 500 * time.Millisecond) // a block lives for 4 s after a packet
		if s.at.After(seen[len(seen)-1].at) {
			continue
		}
		got := w.asked(dir, s.external, natlog.MicrosOf(s.at))
		has, another := false, false
		for _, l := range got.Lives {
			unseen := l.Until != 0 && natlog.MicrosOf(s.at) > l.Least || l.Gap
			own := l.Internal.Addr() == s.host.Addr()
			has, another = has || own, another || !own && !unseen
		}
		switch {
		case s.at.Before(killed):
			in["before"]++
		case s.at.Before(restarted):
			in["while it was dead"]++
		default:
			in["after"]++
		}
		if !has && len(got.Gaps) > 0 {
			inGap++
		}
		if another || !has && len(got.Gaps) == 0 {
			if wrong++; wrong < 5 {
				w.t.Errorf("at %v %v was %v's, and the log has %+v, gaps %+v", s.at.UTC(), s.external, s.host, got.Lives, got.Gaps)
			}
		}
	}
	w.t.Logf("of packets asked about, %v; %d in a gap, %d wrong", in, inGap, wrong)
	return inGap
}

// gapOf looks for the gap of the time in which the log was dead: it begins when the ring was full, and ends when
// it was read again.
func (w *wire) gapOf(dir string, want bool, killed, restarted, at time.Time) {
	w.t.Helper()
	state, err := store.ReadState(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	if !want {
		if len(state.Gaps) != 0 {
			w.t.Errorf("gaps %+v, want none", state.Gaps)
		}
		return
	}
	i := slices.IndexFunc(state.Gaps, func(g snapshot.LogGap) bool { return g.Until.After(killed) })
	if i < 0 {
		w.t.Fatalf("there is no gap since %v: %+v", killed, state.Gaps)
	}
	g := state.Gaps[i]
	// 2730 records are those of 2.7 s; a machine that stood still makes it longer.
	if g.Since.Before(killed.Add(time.Second)) || g.Since.After(restarted) || g.Until.Before(restarted.Add(-time.Second)) || g.Until.After(at) || !strings.Contains(g.Why, "the engine's log was full") {
		w.t.Errorf("killed %v, restarted from %v to %v, the gap is %+v", killed.UTC(), restarted.UTC(), at.UTC(), g)
	}
	middle := g.Since.Add(g.Until.Sub(g.Since) / 2)
	if got := w.asked(dir, netip.MustParseAddrPort("203.0.113.16:1024"), natlog.MicrosOf(middle)); len(got.Gaps) != 1 || got.Gaps[0].Since.Time() != g.Since || got.Gaps[0].Until.Time() != g.Until {
		w.t.Errorf("asked about %v, gaps are %+v, want %+v", middle, got.Gaps, g)
	}
}
