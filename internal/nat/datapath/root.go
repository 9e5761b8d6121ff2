// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The folder of pins is on the machine's BPF file system:
//
//	/sys/fs/bpf/natkit
//
// Where none is mounted natkit mounts one of its own rather than change what others see, in
// its folder of things that end with the next boot:
//
//	/run/natkit/bpf
//
// Either is made by the first who needs it and removed by the last. Other programs mount the
// machine's when they need one (ip, bpftool, Cilium): natkit stays with its own until that goes,
// or it would not find its engines any more. Two locks keep them from doing so at the same time:
// one of the folder of pins itself, held as long as somebody needs it, and one of natkit's run
// folder, held while it is decided which, and while the mount in it comes or goes. Who holds the
// first may take the second, never the other way round.
//
// A process that was given a /sys of its own, as `ip netns exec` does, finds the BPF file
// system where its parents do: what it mounted itself would end with it, and all pins too.

// systemBPFFS is where most machines have the BPF file system.
const systemBPFFS = "/sys/fs/bpf"

// Root returns the folder below which instances are pinned, whether it is there or not.
func Root(runDir string) string {
	private := privateRoot(runDir)
	if isBPFFS(private) {
		return private
	}
	if system := findBPFFS(append([]string{""}, outerRoots()...)); system != "" {
		return filepath.Join(system, "natkit")
	}
	return private
}

func privateRoot(runDir string) string { return filepath.Join(runDir, "bpf") }

// NoRootError is why there can be no folder of pins: no engine can be brought up. What needs
// no pins works.
type NoRootError struct{ Err error }

func (e *NoRootError) Error() string { return e.Err.Error() }
func (e *NoRootError) Unwrap() error { return e.Err }

// LockRoot makes the folder of pins if needed and locks it: how is unix.LOCK_SH for those who
// make and remove their own pins, unix.LOCK_EX for who removes what nobody is making. The
// lock's name is the folder's path. The error is a *NoRootError where there can't be one.
func LockRoot(runDir string, how int) (*os.File, error) {
	for {
		root, err := makeRoot(runDir)
		if err != nil {
			return nil, &NoRootError{err}
		}
		lock, err := os.Open(root)
		if errors.Is(err, os.ErrNotExist) {
			continue // the last who needed it has just removed it
		}
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", root, err)
		}
		if err := unix.Flock(int(lock.Fd()), how); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", root, err), lock.Close())
		}
		if isSame(lock, root) && isBPFFS(fmt.Sprintf("/proc/self/fd/%d", lock.Fd())) {
			return lock, nil
		}
		lock.Close() // removed, or unmounted, before it was locked
	}
}

// UnlockRoot gives up a lock of LockRoot, and removes the folder if nothing is in it and
// nobody else has it.
func UnlockRoot(runDir string, lock *os.File) error {
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		_ = removeRoot(runDir, lock.Name()) // an empty folder is in nobody's way
	}
	return lock.Close()
}

// makeRoot makes the folder of pins, which whoever is the last to need it may remove again at
// once: LockRoot looks whether that has happened.
func makeRoot(runDir string) (string, error) {
	unlock, err := lockRunDir(runDir)
	if err != nil {
		return "", err
	}
	defer unlock()
	root, outer := privateRoot(runDir), outerRoots()
	if isBPFFS(root) {
		return root, nil
	}
	if system := findBPFFS(append([]string{""}, outer...)); system != "" {
		root := filepath.Join(system, "natkit")
		if err := os.Mkdir(root, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return "", fmt.Errorf("make a folder for the engine's maps and programs: %w", err)
		}
		return root, nil
	}
	if len(outer) > 0 {
		return "", fmt.Errorf("no BPF file system is mounted on this machine, and one that this process mounts ends with it: run `mount -t bpf bpf %s` outside of `ip netns exec` and the like", systemBPFFS)
	}
	if err := os.Mkdir(root, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make a folder for a BPF file system: %w", err)
	}
	if err := unix.Mount("bpf", root, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return "", fmt.Errorf("no BPF file system is mounted on %s, and none can be mounted on %s: %w", systemBPFFS, root, err)
	}
	return root, nil
}

// removeRoot removes what makeRoot has made, if nothing is pinned there. The caller has the
// folder locked for itself alone.
func removeRoot(runDir, root string) error {
	if root != privateRoot(runDir) {
		err := os.Remove(root)
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	unlock, err := lockRunDir(runDir)
	if err != nil {
		return err
	}
	defer unlock()
	// Each BPF file system begins with two files of its own.
	entries, err := os.ReadDir(root)
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".debug") }) {
		return err
	}
	if err := unix.Unmount(root, unix.MNT_DETACH); err != nil { // the lock has it open
		return fmt.Errorf("unmount %s: %w", root, err)
	}
	return os.Remove(root)
}

// lockRunDir locks natkit's run folder, which it makes.
func lockRunDir(runDir string) (unlock func(), err error) {
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return nil, fmt.Errorf("make natkit's folder for what ends with the next boot: %w", err)
	}
	f, err := os.Open(runDir)
	if err != nil {
		return nil, fmt.Errorf("open natkit's run folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", runDir, err), f.Close())
	}
	return func() { f.Close() }, nil
}

// isSame reports whether a path still leads to an open file.
func isSame(f *os.File, path string) bool {
	byName, err1 := os.Stat(path)
	byFile, err2 := f.Stat()
	return err1 == nil && err2 == nil && os.SameFile(byName, byFile)
}

// findBPFFS returns where the BPF file system is below the first of some roots that has it.
func findBPFFS(roots []string) string {
	for _, root := range roots {
		if isBPFFS(root + systemBPFFS) {
			return root + systemBPFFS
		}
	}
	return ""
}

// outerRoots are the roots of those of this process's parents that see other mounts than
// it does, the nearest first.
func outerRoots() (roots []string) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil
	}
	for pid := os.Getppid(); pid > 0; {
		proc := fmt.Sprintf("/proc/%d", pid)
		if mounts, err := os.Readlink(proc + "/ns/mnt"); err == nil && mounts != own {
			roots = append(roots, proc+"/root")
		}
		stat, err := os.ReadFile(proc + "/stat")
		if err != nil {
			break
		}
		// "pid (name) state parent": a name may have anything in it.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 {
			break
		}
		if pid, err = strconv.Atoi(fields[1]); err != nil {
			break
		}
	}
	return roots
}

func isBPFFS(path string) bool {
	var s unix.Statfs_t
	return unix.Statfs(path, &s) == nil && s.Type == unix.BPF_FS_MAGIC
}
