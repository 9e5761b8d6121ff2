// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"

	"natkit/internal/ktest"
	"natkit/internal/netns"
)

func TestCreateDoDelete(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Delete(name) })
	defer h.Close()

	own := (*netns.Handle)(nil).Inode()
	if h.Inode() == own || h.Inode() == 0 {
		t.Fatalf("inode %d of the new namespace, own is %d", h.Inode(), own)
	}
	if _, err := netns.Create(name); !errors.Is(err, os.ErrExist) {
		t.Errorf("second Create: %v, want exists", err)
	}
	err = h.Do(func() error {
		if got := (*netns.Handle)(nil).Inode(); got != h.Inode() {
			return fmt.Errorf("inside Do: namespace %d, want %d", got, h.Inode())
		}
		ifs, err := net.Interfaces()
		if err != nil {
			return err
		}
		if len(ifs) != 1 || ifs[0].Name != "lo" {
			return fmt.Errorf("interfaces %v, want lo alone", ifs)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if got := (*netns.Handle)(nil).Inode(); got != own {
		t.Errorf("after Do: namespace %d, want %d", got, own)
	}

	list, err := netns.List()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, n := range list {
		found = found || n == netns.Named{Name: name, Inode: h.Inode()}
	}
	if !found {
		t.Errorf("List does not have %s: %v", name, list)
	}
	for range 2 { // a name that is gone is no error
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := netns.Open(name); err == nil {
		t.Error("Open after Delete succeeded")
	}
}

func TestOpenRefuses(t *testing.T) {
	file := t.TempDir() + "/plain"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"..", "a/b", "pid:", "pid:-1", "pid:x", "no-such-namespace-here", "/nowhere", file} {
		if h, err := netns.Open(ref); err == nil {
			h.Close()
			t.Errorf("Open(%q) succeeded", ref)
		}
	}
}

// The process's first thread, which /proc/self shows, never ends: a namespace
// made on it would stay with the process and be taken for its own.
func TestCreateSparesTheFirstThread(t *testing.T) {
	ktest.Root(t)
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for range 50 { // which thread a goroutine gets is up to the scheduler
		h, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		h.Close()
		if now, err := os.Readlink("/proc/self/ns/net"); err != nil || now != own {
			t.Fatalf("the process is in %s now, it was in %s (%v)", now, own, err)
		}
	}
}
