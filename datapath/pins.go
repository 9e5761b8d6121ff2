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

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Where an instance's pins are. Whoever has the folder has the instance: packets
// flow, and maps live, as long as it is there, with no process running.
//
//	maps/NAME       every map of bpf/maps.h, and the sweep's timers
//	programs/NAME   the programs, for interfaces that come later
//	links/HOOK-INDEX what is attached: tc or xdp, and the interface's index
const (
	mapsDir     = "maps"
	programsDir = "programs"
	linksDir    = "links"
)

// systemBPFFS is where most machines have the BPF file system. Where it is not
// mounted natkit mounts one of its own rather than change what others see.
const systemBPFFS = "/sys/fs/bpf"

// Root returns the folder under which instances are pinned, and makes it. runDir
// is natkit's folder of things that end with the next boot, "/run/natkit".
func Root(runDir string) (string, error) {
	if isBPFFS(systemBPFFS) {
		root := filepath.Join(systemBPFFS, "natkit")
		return root, os.MkdirAll(root, 0o700)
	}
	root := filepath.Join(runDir, "bpf")
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", err
	}
	if isBPFFS(root) {
		return root, nil
	}
	if err := unix.Mount("bpf", root, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return "", fmt.Errorf("mount a BPF file system on %s: %w", root, err)
	}
	return root, nil
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
				detach(path)
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
