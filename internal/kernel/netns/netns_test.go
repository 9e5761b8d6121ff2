// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
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

// The caller's own namespace is told while other goroutines are in another one, also
// when one of them has the process's first thread.
func TestOpenOwnBesideDo(t *testing.T) {
	ktest.Root(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	own := (*netns.Handle)(nil).Inode()
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	defer func() { cancel(); others.Wait() }()
	for range 8 {
		others.Go(func() {
			for ctx.Err() == nil {
				_ = h.Do(func() error { _, err := os.ReadFile("/proc/thread-self/stat"); return err })
			}
		})
	}
	for range 2000 {
		o, err := netns.Open("")
		if err != nil {
			t.Fatal(err)
		}
		inode := o.Inode()
		o.Close()
		if inode != own {
			t.Fatalf("opened %d, own is %d", inode, own)
		}
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

// What Pin makes Unpin takes back, at whatever moment Pin was killed; what is
// somebody else's it leaves.
func TestPinUnpin(t *testing.T) {
	ktest.Root(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	id, err := h.ID()
	if err != nil || id.Inode != h.Inode() {
		t.Fatalf("ID %+v, %v, want inode %d", id, err, h.Inode())
	}
	name := ktest.Name(t)
	path := filepath.Join(netns.Dir, name)
	draft := fmt.Sprintf("%s/.natkit-%d", netns.Dir, id.Inode)
	t.Cleanup(func() {
		netns.Delete(name)
		os.Remove(draft)
	})
	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	touch := func(path string) {
		t.Helper()
		if err := os.WriteFile(path, nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		moment string
		make   func() error
		stays  bool
	}{
		{"not begun", func() error { return nil }, false},
		{"drafted", func() error { touch(draft); return nil }, false},
		{"linked", func() error { touch(draft); return os.Link(draft, path) }, false},
		{"mounted", func() error {
			touch(draft)
			if err := os.Link(draft, path); err != nil {
				return err
			}
			return unix.Mount(fmt.Sprintf("/proc/self/fd/%d", h.Fd()), path, "none", unix.MS_BIND, "")
		}, false},
		{"done", func() error { return h.Pin(name) }, false},
		{"done, with the draft of one killed before", func() error { touch(draft); return h.Pin(name) }, false},
		{"drafted, and another makes the name", func() error { touch(draft); touch(path); return nil }, true},
		{"another namespace has the name", func() error {
			other, err := netns.Create(name)
			if err == nil {
				err = other.Close()
			}
			return err
		}, true},
	} {
		t.Run(c.moment, func(t *testing.T) {
			if err := c.make(); err != nil {
				t.Fatal(err)
			}
			if err := netns.Unpin(name, id); err != nil {
				t.Fatal(err)
			}
			if exists(path) != c.stays || exists(draft) {
				t.Errorf("name stays: %v, want %v; draft stays: %v", exists(path), c.stays, exists(draft))
			}
			if err := netns.Delete(name); err != nil {
				t.Fatal(err)
			}
		})
	}

	// The same inode number with another cookie is a later namespace.
	if err := h.Pin(name); err != nil {
		t.Fatal(err)
	}
	if err := h.Pin(name); !errors.Is(err, os.ErrExist) {
		t.Errorf("second Pin: %v, want os.ErrExist", err)
	}
	if id.Cookie != 0 {
		later := id
		later.Cookie++
		if err := netns.Unpin(name, later); err != nil || !exists(path) {
			t.Errorf("Unpin of another namespace with the same inode: %v, name stays: %v", err, exists(path))
		}
	}
}

func TestListPassesOverPlainFiles(t *testing.T) {
	ktest.Root(t)
	h, err := netns.Create(ktest.Name(t)) // so that the directory is there
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(h.Name())
	defer h.Close()
	plain := ktest.Name(t)
	path := filepath.Join(netns.Dir, plain)
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(path)
	list, err := netns.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range list {
		if n.Name == plain {
			t.Errorf("a plain file is listed as namespace %d", n.Inode)
		}
	}
}
