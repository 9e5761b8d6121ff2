// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"fmt"
	"os/exec"
	"slices"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

func TestAll(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	named, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { named.Close(); netns.Delete(name) })
	nameless, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer nameless.Close()
	// A process in each, as a container has.
	pids := map[uint64]int{}
	for _, h := range []*netns.Handle{named, nameless} {
		cmd := exec.CommandContext(t.Context(), "sleep", "60")
		if err := h.Do(cmd.Start); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		pids[h.Inode()] = cmd.Process.Pid
	}

	all, err := netns.All()
	if err != nil {
		t.Fatal(err)
	}
	if all[0].Ref != "" || all[0].Inode != (*netns.Handle)(nil).Inode() {
		t.Errorf("the first is %+v, not the caller's own", all[0])
	}
	for _, want := range []struct {
		ref string
		h   *netns.Handle
	}{{name, named}, {fmt.Sprintf("pid:%d", pids[nameless.Inode()]), nameless}} {
		i := slices.IndexFunc(all, func(p netns.Place) bool { return p.Inode == want.h.Inode() })
		if i < 0 {
			t.Errorf("namespace %d of %s is missing", want.h.Inode(), want.ref)
			continue
		}
		if p := all[i]; p.Ref != want.ref || !slices.Equal(p.Processes, []int{pids[p.Inode]}) {
			t.Errorf("found %+v, want %s with process %d", p, want.ref, pids[p.Inode])
		}
	}
	seen := map[uint64]bool{}
	for _, p := range all {
		if seen[p.Inode] {
			t.Errorf("namespace %d is there twice", p.Inode)
		}
		seen[p.Inode] = true
	}
}
