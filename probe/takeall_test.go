// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/netns"
	"natkit/snapshot"
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
	sent := make(chan error, 1)
	go func() {
		// The drop rule's EPERM is what is wanted.
		sent <- nameless.Do(func() error {
			c, err := net.Dial("udp4", "127.0.0.1:9")
			if err != nil {
				return err
			}
			defer c.Close()
			for range 40 {
				_, _ = c.Write([]byte("x"))
				time.Sleep(50 * time.Millisecond) // in the window, however long it takes to begin
			}
			return nil
		})
	}()
	all, err := TakeAll(t.Context(), Options{Window: time.Second})
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	find := func(h *netns.Handle) *snapshot.Snapshot {
		i := slices.IndexFunc(all.Snapshots, func(s *snapshot.Snapshot) bool { return s.Netns.Inode == h.Inode() })
		if i < 0 {
			return nil
		}
		return all.Snapshots[i]
	}
	if s := all.Snapshots[0]; s.Netns.Name != "" || s.Netns.Inode != (*netns.Handle)(nil).Inode() {
		t.Errorf("the first is %+v, not the caller's own", s.Netns)
	}
	if s := find(idle); s != nil || all.Idle == 0 {
		t.Errorf("a namespace without interfaces: %+v, %d left out", s, all.Idle)
	}
	if s := find(named); s == nil || s.Netns.Name != named.Name() || len(lost(s)) > 0 {
		t.Errorf("the namespace with a name: %+v", s)
	}
	s := find(nameless)
	if s == nil || s.Netns.Name != fmt.Sprintf("pid:%d", cmd.Process.Pid) {
		t.Fatalf("the namespace of a process: %+v", s)
	}
	if d := lost(s); len(d) != 1 || d[0].Cause != snapshot.CauseRule || d[0].Count < 5 || d[0].Count > 40 {
		t.Errorf("dropped there: %+v, not known: %v", s.Drops, names(s, false))
	}
	if s.WindowSeconds < 1 || !strings.HasPrefix(s.Interfaces[1].Name, "veth") {
		t.Errorf("a window of %v s, interfaces %+v", s.WindowSeconds, s.Interfaces)
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
