// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Where an instance's pins are. Whoever has the folder has the instance: packets
// flow, and maps live, as long as it is there, with no process running.
//
//	maps/NAME       every map of the programs, the GC timers, and lifetime
//	programs/NAME   the programs, for interfaces that come later
//	links/HOOK-INDEX what is attached: tc or xdp, and the interface's index
const (
	mapsDir     = "maps"
	programsDir = "programs"
	linksDir    = "links"
)

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

// lifetime is the pinned map that reports when the namespace of an instance has ended: a
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

// Ended reports whether the namespace of the instance pinned as dir has ended, and false for
// known where nothing there shows it: it was made by an older natkit, or never whole.
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
