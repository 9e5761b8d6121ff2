// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
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
	found := func(all []snapshot.Netns) {
		watched = all
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
