// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/ktest"
)

// The folder of pins goes when nothing is in it, and so does a BPF file system that was
// mounted for it; what somebody has there stays.
func TestRemoveRoot(t *testing.T) {
	ktest.Root(t)
	mounted := filepath.Join(t.TempDir(), "bpf")
	there := func(path string) bool {
		_, err := os.Stat(path)
		return !errors.Is(err, os.ErrNotExist)
	}
	if err := errors.Join(os.Mkdir(mounted, 0o700), unix.Mount("bpf", mounted, "bpf", 0, "mode=0700")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(mounted, unix.MNT_DETACH) })
	within := filepath.Join(mounted, "natkit")
	for _, root := range []string{within, mounted} {
		theirs := filepath.Join(root, "theirs")
		if err := os.MkdirAll(theirs, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := RemoveRoot(root); err != nil || !there(theirs) {
			t.Errorf("%s, not empty: %v, there %t", root, err, there(theirs))
		}
		if err := os.Remove(theirs); err != nil {
			t.Fatal(err)
		}
		lock, err := os.Open(root) // as whoever removes it has it open
		if err != nil {
			t.Fatal(err)
		}
		if err := RemoveRoot(root); err != nil || there(root) {
			t.Errorf("%s, empty: %v, there %t", root, err, there(root))
		}
		if err := RemoveRoot(root); err != nil {
			t.Errorf("%s, gone: %v", root, err)
		}
		lock.Close()
	}
}
