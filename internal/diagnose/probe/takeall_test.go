// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// Namespaces with a name and without one are seen in one window, each with its own
// counters and drops; one without an interface is left out.
func TestTakeAll(t *testing.T) {
	named := newNetns(t)
	idle := newNetns(t)
	nameless, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer nameless.Close()
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	in(t, nameless, cmd.Start)
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	for _, h := range []*netns.Handle{named, nameless} {
		output(t, h, "", "ip", "link", "set", "lo", "up")
		output(t, h, "", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
		output(t, h, "", "nft", "add table ip t")
		output(t, h, "", "nft", "add chain ip t output { type filter hook output priority 0; }")
		output(t, h, "", "nft", "add rule ip t output udp dport 9 drop")
	}
	const sends = 20
	var watched []snapshot.Netns
	// Every start value is read: what is sent now is in the window.
	var networks []netip.Prefix
	found := func(all []snapshot.Netns, there []netip.Prefix) {
		watched, networks = all, there
		in(t, nameless, func() error {
			c, err := net.Dial("udp4", "127.0.0.1:9")
			if err != nil {
				return err
			}
			defer c.Close()
			for range sends {
				_, _ = c.Write([]byte("x")) // the drop rule's EPERM is what is wanted
			}
			return nil
		})
	}
	var snapshots []*snapshot.Snapshot
	all, err := TakeAll(t.Context(), Options{Window: 200 * time.Millisecond}, found, func(s *snapshot.Snapshot) error {
		snapshots = append(snapshots, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if loopback := netip.MustParsePrefix("127.0.0.0/8"); !slices.Contains(networks, loopback) {
		t.Errorf("networks are %v, without %s", networks, loopback)
	}
	find := func(h *netns.Handle) *snapshot.Snapshot {
		i := slices.IndexFunc(snapshots, func(s *snapshot.Snapshot) bool { return s.Netns.Inode == h.Inode() })
		if i < 0 {
			return nil
		}
		return snapshots[i]
	}
	if s := snapshots[0]; s.Netns.Name != "" || s.Netns.Inode != (*netns.Handle)(nil).Inode() {
		t.Errorf("the first is %+v, not the caller's own", s.Netns)
	}
	if len(watched) < len(snapshots) || watched[0] != snapshots[0].Netns || !slices.Contains(watched, find(named).Netns) {
		t.Errorf("watched are %+v", watched)
	}
	if s := find(idle); s != nil || all.Idle == 0 {
		t.Errorf("a namespace without interfaces: %+v, %d left out", s, all.Idle)
	}
	if s := find(named); s == nil || s.Netns.Name != named.Name() || len(lost(s)) > 0 {
		t.Errorf("the namespace with a name: %+v", s)
	} else if !slices.ContainsFunc(s.Drops.Elsewhere, func(d snapshot.Drop) bool { return d.Netns == nameless.Inode() && d.Count == sends }) {
		t.Errorf("what the other namespace dropped: %+v", s.Drops.Elsewhere)
	}
	s := find(nameless)
	if s == nil || s.Netns.Name != fmt.Sprintf("pid:%d", cmd.Process.Pid) {
		t.Fatalf("the namespace of a process: %+v", s)
	}
	if d := lost(s); len(d) != 1 || d[0].Cause != snapshot.CauseRule || d[0].Count != sends {
		t.Errorf("dropped there: %+v, not known: %v", s.Drops, names(s, false))
	}
	if s.Series == nil || len(s.Series.Times) == 0 { // the last look is at the window's end
		t.Errorf("no curves of the window: %+v", s.Series)
	}
	if s.WindowSeconds < 0.2 || !strings.HasPrefix(s.Interfaces[1].Name, "veth") {
		t.Errorf("a window of %v s, interfaces %+v", s.WindowSeconds, s.Interfaces)
	}
}

// However many namespaces there are, one window is waited for: when it begins all start values
// are read, and no end value is before it is over.
func TestOneWindow(t *testing.T) {
	const many = 40
	for range many {
		ns := newNetns(t)
		in(t, ns, func() error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"})
		})
	}
	waits, watched, given := 0, 0, 0
	opts := Options{Window: time.Hour, Dump: true, wait: func(_ context.Context, window time.Duration, _ func(string, float64)) {
		if waits++; window != time.Hour || watched < many || given > 0 {
			t.Errorf("wait %d of %s: %d namespaces watched, %d read", waits, window, watched, given)
		}
	}}
	_, err := TakeAll(t.Context(), opts, func(all []snapshot.Netns, _ []netip.Prefix) { watched = len(all) }, func(s *snapshot.Snapshot) error {
		given++
		if waits != 1 {
			t.Errorf("Snapshot %d after %d waits", given, waits)
		}
		return nil
	})
	if err != nil || waits != 1 || given < many {
		t.Errorf("%d waits, %d Snapshots, %v", waits, given, err)
	}
}

// What is done at once comes in order, is never more than atOnce, and ends early with
// everything that was begun.
func TestInOrder(t *testing.T) {
	const n, enough = 100, 50
	var running, most, begun, taken atomic.Int32
	do := func(i int) int {
		begun.Add(1)
		now := running.Add(1)
		for {
			was := most.Load()
			if was >= now || most.CompareAndSwap(was, now) {
				break
			}
		}
		if b := begun.Load(); b <= atOnce { // the first so many wait for each other
			ktest.Wait(t, time.Minute, "others to be done at once", func() bool { return most.Load() == atOnce })
		}
		running.Add(-1)
		return 2 * i
	}
	inOrder(n, do, func(i, twice int) bool {
		if int32(i) != taken.Add(1)-1 || twice != 2*i {
			t.Errorf("call %d: %d, %d", taken.Load(), i, twice)
		}
		return i < enough
	})
	if most.Load() != atOnce {
		t.Errorf("%d at once, %d should be", most.Load(), atOnce)
	}
	if taken.Load() != begun.Load() || taken.Load() <= enough || taken.Load() > enough+1+atOnce {
		t.Errorf("%d begun, %d taken, ended after %d", begun.Load(), taken.Load(), enough)
	}
	inOrder(0, do, func(int, int) bool { t.Error("taken of none"); return true })
}

func TestNameContainers(t *testing.T) {
	rows := []snapshot.Drop{{Netns: 7}, {Netns: 8}}
	nameContainers(rows, []snapshot.Netns{{Inode: 8, Container: "docker web1"}, {Inode: 9, Container: "docker web2"}})
	if rows[0].Container != "" || rows[1].Container != "docker web1" {
		t.Errorf("%+v", rows)
	}
}

// lost are the drops of users' packets.
func lost(s *snapshot.Snapshot) (out []snapshot.Drop) {
	for _, row := range s.Drops.Rows {
		if !row.Benign && row.Cause != snapshot.CauseNone {
			out = append(out, row)
		}
	}
	return out
}

// Who gets the Snapshots may end it, and nothing stays open.
func TestTakeAllEnds(t *testing.T) {
	newNetns(t)
	stop := errors.New("enough")
	n := 0
	all, err := TakeAll(t.Context(), Options{Window: time.Millisecond}, nil, func(*snapshot.Snapshot) error {
		n++
		return stop
	})
	if all != nil || err != stop || n != 1 {
		t.Errorf("%d were given, %+v, %v", n, all, err)
	}
}
