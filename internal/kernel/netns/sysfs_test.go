// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// A program in a namespace sees that namespace's devices in /sys, whatever the machine's root
// folder and /sys are, and what was mounted below /sys.
func TestDoWithSys(t *testing.T) {
	for name, lacks := range map[string][]ktest.Lack{
		"as usual": nil, "in a chroot": {ktest.RootNotMount}, "empty sys": {ktest.NoSys, ktest.NoBPFFS}, "chroot, empty sys": {ktest.RootNotMount, ktest.NoSys, ktest.NoBPFFS},
	} {
		t.Run(name, func(t *testing.T) {
			ktest.Lacking(t, func(t *testing.T) {
				h, err := netns.New()
				if err != nil {
					t.Fatal(err)
				}
				defer h.Close()
				mounts, err := os.ReadFile("/proc/self/mounts")
				if err != nil {
					t.Fatal(err)
				}
				folder := t.TempDir()
				t.Chdir(folder)
				var out []byte
				err = h.DoWithSys(func() error {
					out, err = exec.Command("/bin/sh", "-c", "ls /sys/class/net; pwd; stat -f -c %T /sys/fs/bpf").CombinedOutput()
					return err
				})
				got := strings.Fields(string(out))
				if err != nil || len(got) != 3 || got[0] != "lo" || got[1] != folder {
					t.Errorf("%v: a program saw %q, want lo alone, in %s", err, got, folder)
				}
				if bpffs := !slices.Contains(lacks, ktest.NoBPFFS); len(got) == 3 && (got[2] == "bpf_fs") != bpffs {
					t.Errorf("at /sys/fs/bpf is %s, want a BPF file system: %t", got[2], bpffs)
				}
				if after, err := os.ReadFile("/proc/self/mounts"); err != nil || string(after) != string(mounts) {
					t.Errorf("%v: mounts after:\n%s\nbefore:\n%s", err, after, mounts)
				}
			}, lacks...)
		})
	}
}

// Where the namespace's devices can't be shown, nothing is run that would take another
// namespace's for them: in a container without the right to mount them.
func TestDoWithSysRefuses(t *testing.T) {
	const inside = "NATKIT_TEST_CONTAINER"
	ktest.Lacking(t, func(t *testing.T) {
		if os.Getenv(inside) != "" {
			h, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			err = h.DoWithSys(func() error { t.Error("was run"); return nil })
			if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "/sys") {
				t.Errorf("%v, want a reason that names /sys", err)
			}
			return
		}
		// A user namespace may not mount a sysfs while part of the one that it sees is hidden.
		if err := unix.Mount("tmpfs", "/sys/class", "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run=^TestDoWithSysRefuses$")
		cmd.Env = append(os.Environ(), inside+"=1")
		root := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWNET, UidMappings: root, GidMappings: root}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestDoWithSysRefuses") {
			t.Errorf("%v: %s", err, out)
		}
	})
}
