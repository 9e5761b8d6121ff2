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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Where an instance's pins are. Whoever has the folder has the instance: packets
// flow, and maps live, as long as it is there, with no process running.
//
//	maps/NAME       every map of bpf/maps.h, the sweep's timers, and lifetime
//	programs/NAME   the programs, for interfaces that come later
//	links/HOOK-INDEX what is attached: tc or xdp, and the interface's index
const (
	mapsDir     = "maps"
	programsDir = "programs"
	linksDir    = "links"
)

// systemBPFFS is where most machines have the BPF file system.
const systemBPFFS = "/sys/fs/bpf"

// Root returns the folder under which instances are pinned, and makes it. Where the BPF
// file system is not mounted natkit mounts one of its own rather than change what others
// see: in runDir, natkit's folder of things that end with the next boot, "/run/natkit".
//
// A process that was given a /sys of its own, as `ip netns exec` does, finds the BPF file
// system where its parents do: what it mounted itself would end with it, and all pins too.
func Root(runDir string) (string, error) {
	outer := outerRoots()
	for _, at := range append([]string{""}, outer...) {
		if at += systemBPFFS; isBPFFS(at) {
			root := filepath.Join(at, "natkit")
			if err := os.Mkdir(root, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
				return "", err
			}
			return root, nil
		}
	}
	root := filepath.Join(runDir, "bpf")
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", err
	}
	if isBPFFS(root) {
		return root, nil
	}
	if len(outer) > 0 {
		return "", errors.New("no BPF file system is mounted, and what this process mounts ends with it: outside of `ip netns exec` and the like, `mount -t bpf bpf " + systemBPFFS + "`")
	}
	if err := unix.Mount("bpf", root, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return "", fmt.Errorf("mount a BPF file system on %s: %w", root, err)
	}
	return root, nil
}

// RemoveRoot removes what Root has made, if nothing is pinned there. Nobody must be about to
// pin something.
func RemoveRoot(root string) error {
	err := os.Remove(root)
	if !errors.Is(err, unix.EBUSY) {
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	// The BPF file system that natkit has mounted. Each begins with two files of its own.
	entries, err := os.ReadDir(root)
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".debug") }) {
		return err
	}
	if err := unix.Unmount(root, unix.MNT_DETACH); err != nil { // whoever locks it has it open
		return fmt.Errorf("unmount %s: %w", root, err)
	}
	if err := os.Remove(root); err != nil && !errors.Is(err, unix.EBUSY) { // mounted anew
		return err
	}
	return nil
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

// InstanceDir is the folder of the instance of a network namespace: one each,
// named by the namespace's inode.
func InstanceDir(root string, namespace uint64) string {
	return filepath.Join(root, strconv.FormatUint(namespace, 10))
}

// Instances lists the namespaces, by inode, that have pins under root: engines, or what
// a crash has left of making one.
func Instances(root string) ([]uint64, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	var out []uint64
	for _, e := range entries {
		inode, err := strconv.ParseUint(strings.TrimSuffix(e.Name(), draftSuffix), 10, 64)
		if err == nil && !slices.Contains(out, inode) {
			out = append(out, inode)
		}
	}
	return out, nil
}

// lifetime is the pinned map that tells when the namespace of an instance has ended: a
// DEVMAP with the namespace's loopback device, which is there as long as the namespace is,
// and which the kernel takes out of the map with it (Linux 4.14).
const lifetime = "lifetime"

// PinLifetime has the instance pinned as dir know that the calling thread's namespace is its
// own, for Ended.
func PinLifetime(dir string) error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "nat_lifetime", Type: ebpf.DevMap, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return fmt.Errorf("make map %s: %w", lifetime, err)
	}
	defer m.Close()
	const loopback = 1 // LOOPBACK_IFINDEX of the kernel
	if err := m.Put(uint32(0), uint32(loopback)); err != nil {
		return fmt.Errorf("put the loopback device into map %s: %w", lifetime, err)
	}
	return m.Pin(filepath.Join(dir, mapsDir, lifetime))
}

// Ended says whether the namespace of the instance pinned as dir has ended, and false for
// known where nothing there tells: it was made by an older natkit, or never whole.
func Ended(dir string) (ended, known bool, err error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, mapsDir, lifetime), nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("open map %s: %w", lifetime, err)
	}
	defer m.Close()
	var index uint32
	err = m.Lookup(uint32(0), &index)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, true, nil
	}
	return false, err == nil, err
}

// removePins ends what is pinned under dir: links first, so that no program runs
// without its maps' other users. When it returns, no packet is met by them any more.
func removePins(dir string) error {
	var errs []error
	for _, sub := range []string{linksDir, programsDir, mapsDir} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			path := filepath.Join(dir, sub, e.Name())
			if sub == linksDir {
				errs = append(errs, unpin(path))
				continue
			}
			errs = append(errs, os.Remove(path))
		}
	}
	// Not os.RemoveAll: what natkit did not pin stays, and its folder with it.
	for _, sub := range []string{linksDir, programsDir, mapsDir, ""} {
		if err := os.Remove(filepath.Join(dir, sub)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// detach takes the program of a pinned link off now. Without it, or where it fails, the
// kernel does so some time after the pin is gone.
func detach(pin string) {
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		l.Detach()
		l.Close()
	}
}
