// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

// The folder of pins goes with the last who needs it, and so does a BPF file system that was
// mounted for it; what somebody has there stays.
func TestRoot(t *testing.T) {
	ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
		runDir := t.TempDir()
		there := func(path string) bool { _, err := os.Stat(path); return err == nil }
		lock := func(how int) (*os.File, string) {
			t.Helper()
			f, err := LockRoot(runDir, how)
			if err != nil {
				t.Fatal(err)
			}
			if root := Root(runDir); f.Name() != root || !isBPFFS(root) {
				t.Fatalf("locked %s, want %s on a BPF file system", f.Name(), root)
			}
			return f, f.Name()
		}
		one, root := lock(unix.LOCK_SH)
		two, _ := lock(unix.LOCK_SH)
		if err := UnlockRoot(runDir, one); err != nil || !there(root) {
			t.Errorf("somebody else has it: %v, there: %t", err, there(root))
		}
		theirs := filepath.Join(root, "theirs")
		if err := os.Mkdir(theirs, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := UnlockRoot(runDir, two); err != nil || !there(theirs) {
			t.Errorf("something is in it: %v, there: %t", err, there(theirs))
		}
		three, _ := lock(unix.LOCK_EX)
		if f, err := LockRoot(runDir, unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("locked twice: %v, %v", f, err)
		}
		if err := os.Remove(theirs); err != nil {
			t.Fatal(err)
		}
		if err := UnlockRoot(runDir, three); err != nil || there(root) {
			t.Errorf("empty: %v, there: %t", err, there(root))
		}
	})
}

// Many who need the folder of pins at the same time all get the same one, whatever comes and
// goes with others: what one has pinned is never hidden by another's mount.
func TestRootManyAtOnce(t *testing.T) {
	ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
		runDir := t.TempDir()
		var all sync.WaitGroup
		for range 12 {
			all.Go(func() {
				for range 50 {
					if err := useRoot(runDir, ktest.Name(t)); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		if _, err := os.Stat(Root(runDir)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after the last: %v, want %v", err, os.ErrNotExist)
		}
	})
}

// Somebody mounts the machine's BPF file system while pins are on natkit's own: they stay the ones
// that are found, and whoever comes has the same folder, until the last has gone.
func TestRootStays(t *testing.T) {
	ktest.Lacking(t, func(t *testing.T) {
		runDir := t.TempDir()
		lock, err := LockRoot(runDir, unix.LOCK_SH)
		if err != nil {
			t.Fatal(err)
		}
		own := lock.Name()
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				for range 50 {
					if err := useRoot(runDir, ktest.Name(t)); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		if err := unix.Mount("bpf", systemBPFFS, "bpf", 0, ""); err != nil {
			t.Fatal(err)
		}
		all.Wait()
		if root := Root(runDir); root != own {
			t.Errorf("pins are looked for in %s, and are in %s", root, own)
		}
		if err := UnlockRoot(runDir, lock); err != nil {
			t.Fatal(err)
		}
		if root, want := Root(runDir), filepath.Join(systemBPFFS, "natkit"); root != want {
			t.Errorf("after the last, %s, want %s", root, want)
		}
	}, ktest.NoBPFFS)
}

// A process decides for one of the two while another mounts either.
func TestRootManyAtOnceLater(t *testing.T) {
	ktest.Lacking(t, func(t *testing.T) {
		runDir := t.TempDir()
		var all sync.WaitGroup
		for i := range 12 {
			all.Go(func() {
				for n := range 50 {
					if i == 0 && n == 10 {
						if err := unix.Mount("bpf", systemBPFFS, "bpf", 0, ""); err != nil {
							t.Error(err)
						}
					}
					if err := useRoot(runDir, ktest.Name(t)); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	}, ktest.NoBPFFS)
}

// useRoot makes something in the folder of pins, looks whether it is there, and leaves.
func useRoot(runDir, name string) error {
	lock, err := LockRoot(runDir, unix.LOCK_SH)
	if err != nil {
		return err
	}
	mine := filepath.Join(Root(runDir), name)
	err = os.Mkdir(mine, 0o700)
	if err == nil {
		_, err = os.Stat(filepath.Join(lock.Name(), name))
	}
	return errors.Join(err, os.Remove(mine), UnlockRoot(runDir, lock))
}
