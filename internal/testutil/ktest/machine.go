// SPDX-License-Identifier: Apache-2.0

package ktest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// Lack is something that a machine may be without.
type Lack string

const (
	NoBPFFS      Lack = "no BPF file system"
	NoTracefs    Lack = "no tracefs"
	NoSys        Lack = "an empty /sys"
	NoPrograms   Lack = "no programs"
	ReadOnlyRun  Lack = "a read-only /run"
	NoRights     Lack = "root without capabilities"
	NoRoot       Lack = "the user nobody"
	NotFresh     Lack = "where root has used natkit"        // its folders are there, and not for others
	RootNotMount Lack = "a root folder that is not a mount" // a chroot

	ready Lack = "nothing more to be taken away"
)

// Where the process that a test starts for itself finds what it is to be.
const (
	lackingTest = "NATKIT_TEST_LACKING" // the test's name
	lackingWhat = "NATKIT_TEST_LACKS"   // what is to be taken away from the machine
)

// Lacking runs fn where the machine lacks some things, and has a BPF file system and tracefs
// if they are not among them: in a process of the test binary with a network namespace with interfaces in and out, mounts,
// a /run, a /var/lib and process numbers of its own, in which the calling test comes here again. It should
// do nothing before that.
func Lacking(t *testing.T, fn func(t *testing.T), lacks ...Lack) {
	t.Helper()
	if os.Getenv(lackingTest) == t.Name() && os.Getenv(lackingWhat) == string(ready) {
		fn(t)
		return
	}
	Root(t)
	if os.Getenv(lackingTest) != t.Name() {
		again(t, "", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET}, func(cmd *exec.Cmd) error {
			if err := netns.OwnMounts(); err != nil || !slices.Contains(lacks, RootNotMount) {
				return err
			}
			return copyRoot(cmd, t.TempDir())
		})
		return
	}
	if err := takeAway(lacks); err != nil {
		t.Fatal(err)
	}
	again(t, ready, &syscall.SysProcAttr{}, func(cmd *exec.Cmd) error {
		switch {
		case slices.Contains(lacks, NoRoot):
			return becomeNobody(cmd)
		case slices.Contains(lacks, NoRights):
			return dropCapabilities()
		}
		return nil
	})
}

// WithAndWithoutBPFFS runs fn in a machine of its own that has a BPF file system, and in one
// that has none.
func WithAndWithoutBPFFS(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	t.Run("with a BPF file system", func(t *testing.T) { Lacking(t, fn) })
	t.Run("without", func(t *testing.T) { Lacking(t, fn, NoBPFFS) })
}

// again runs the calling test in another process, which is started by a thread that begin
// has made ready.
func again(t *testing.T, what Lack, attr *syscall.SysProcAttr, begin func(*exec.Cmd) error) {
	t.Helper()
	var parts []string
	for part := range strings.SplitSeq(t.Name(), "/") {
		parts = append(parts, "^"+regexp.QuoteMeta(part)+"$")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.v", "-test.run="+strings.Join(parts, "/"), fmt.Sprintf("-test.short=%t", testing.Short()))
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "NATKIT_RUN_DIR=") || strings.HasPrefix(v, "NATKIT_STATE_DIR=")
	})
	cmd.Env = append(cmd.Env, lackingTest+"="+t.Name(), lackingWhat+"="+string(what))
	cmd.SysProcAttr = attr
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	err = netns.OnNewThread(func() error {
		if err := begin(cmd); err != nil {
			return err
		}
		return cmd.Start()
	})
	if err == nil {
		err = cmd.Wait()
	}
	switch {
	case err == nil && strings.Contains(out.String(), "--- PASS: "+t.Name()+" "):
	case err == nil && strings.Contains(out.String(), "--- SKIP: "+t.Name()+" "):
		t.Skip(out.String()) // counted by that process
	default:
		t.Errorf("%v\n%s", err, out.String())
	}
}

// copyRoot has the command find the machine's files below a folder that is no mount.
func copyRoot(cmd *exec.Cmd, root string) error {
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(root, e.Name())
		switch {
		case e.IsDir():
			if err = os.Mkdir(path, 0o755); err == nil {
				err = unix.Mount("/"+e.Name(), path, "", unix.MS_BIND|unix.MS_REC, "")
			}
		case e.Type()&os.ModeSymlink != 0:
			var to string
			if to, err = os.Readlink("/" + e.Name()); err == nil {
				err = os.Symlink(to, path)
			}
		}
		if err != nil {
			return err
		}
	}
	cmd.SysProcAttr.Chroot = root
	cmd.Dir, err = os.Getwd()
	return err
}

// takeAway makes the process's machine one that lacks something.
func takeAway(lacks []Lack) error {
	without := func(lack Lack) bool { return slices.Contains(lacks, lack) }
	errs := []error{makeLinks(), unix.Mount("proc", "/proc", "proc", 0, "")}
	for _, dir := range []string{"/run", "/var/lib"} {
		errs = append(errs, os.MkdirAll(dir, 0o755), unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"))
	}
	if without(NotFresh) {
		errs = append(errs, useNatkit())
	}
	if without(NoSys) {
		errs = append(errs, unix.Mount("tmpfs", "/sys", "tmpfs", unix.MS_RDONLY, ""))
	} else {
		errs = append(errs, unix.Mount("sysfs", "/sys", "sysfs", 0, ""))
	}
	if !without(NoSys) && !without(NoBPFFS) {
		errs = append(errs, unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=0700"))
	}
	if !without(NoSys) && !without(NoTracefs) {
		errs = append(errs, unix.Mount("tracefs", "/sys/kernel/tracing", "tracefs", 0, "mode=0700"))
	}
	if without(ReadOnlyRun) {
		errs = append(errs, unix.Mount("", "/run", "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	}
	if without(NoPrograms) {
		errs = append(errs, os.Setenv("PATH", "/nonexistent"))
	}
	return errors.Join(errs...)
}

// useNatkit leaves the machine as root leaves it who has changed and taken back a setting, and
// has had a NAT and a lab up: with folders that are not for others.
func useNatkit() error {
	var errs []error
	for _, dir := range []string{"/run/natkit/nat", "/run/natkit/lab", "/var/lib/natkit/tune"} {
		errs = append(errs, os.MkdirAll(dir, 0o700))
	}
	return errors.Join(append(errs, os.WriteFile("/var/lib/natkit/tune/journal", nil, 0o600))...)
}

// makeLinks gives the machine a network: a loopback device that is up, and a gateway's
// interfaces in and out, whose other ends lead nowhere.
func makeLinks() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	errs := []error{netlink.LinkSetUp(lo)}
	for name, addr := range map[string]string{"in": "10.0.0.1/24", "out": "198.51.100.1/24"} {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
		a, err := netlink.ParseAddr(addr)
		errs = append(errs, err, netlink.LinkAdd(link), netlink.LinkSetUp(link), netlink.AddrAdd(link, a))
	}
	return errors.Join(errs...)
}

// becomeNobody has the command run as a user without rights, who may not come to where go test
// puts its programs.
func becomeNobody(cmd *exec.Cmd) error {
	const program, nobody = "/run/test", 65534
	f, err := os.Create(program)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Mount(cmd.Path, program, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("show the test's program to nobody: %w", err)
	}
	cmd.Path = program
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	return nil
}

// dropCapabilities has what the calling thread starts be without rights, though it is root.
func dropCapabilities() error {
	for c := uintptr(0); ; c++ {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); errors.Is(err, unix.EINVAL) && c > 0 {
			return nil // the last one that this kernel knows
		} else if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
}
