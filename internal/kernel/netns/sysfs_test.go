// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

const bpfFSMagic = "cafe4a11" // as stat shows it: BPF_FS_MAGIC

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
				mounts := ownMounts(t)
				folder := t.TempDir()
				t.Chdir(folder)
				var out []byte
				err = h.DoWithSys(func() error {
					out, err = exec.Command("/bin/sh", "-c", "ls /sys/class/net; pwd; stat -f -c %t /sys/fs/bpf").CombinedOutput()
					return err
				})
				got := strings.Fields(string(out))
				if err != nil || len(got) != 3 || got[0] != "lo" || got[1] != folder {
					t.Errorf("%v: a program saw %q, want lo alone, in %s", err, got, folder)
				}
				if bpffs := !slices.Contains(lacks, ktest.NoBPFFS); len(got) == 3 && (got[2] == bpfFSMagic) != bpffs {
					t.Errorf("at /sys/fs/bpf is %s, want a BPF file system: %t", got[2], bpffs)
				}
				if after := ownMounts(t); after != mounts {
					t.Errorf("mounts after:\n%s\nbefore:\n%s", after, mounts)
				}
			}, lacks...)
		})
	}
}

// ownMounts are the mounts of this process, but for those that come from other tests at any time:
// names of namespaces, and file systems for pins.
func ownMounts(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(slices.DeleteFunc(strings.SplitAfter(string(mounts), "\n"), func(line string) bool {
		return strings.HasPrefix(line, "nsfs ") || strings.HasPrefix(line, "bpf ") && !strings.Contains(line, "/sys/fs/bpf ")
	}), "")
}

// Where the namespace's devices can't be shown, nothing is run that would take another
// namespace's for them: in a container that may not mount them.
func TestDoWithSysRefuses(t *testing.T) {
	for name, lacks := range map[string][]ktest.Lack{"as usual": nil, "in a chroot": {ktest.RootNotMount}} {
		t.Run(name, func(t *testing.T) {
			ktest.Lacking(t, func(t *testing.T) {
				h, err := netns.New()
				if err != nil {
					t.Fatal(err)
				}
				defer h.Close()
				refuseMounts(t)
				err = h.DoWithSys(func() error { t.Error("was run"); return nil })
				if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "mount a sysfs on /sys") {
					t.Errorf("%v, want a reason that names /sys", err)
				}
			}, lacks...)
		})
	}
}

// refuseMounts has the kernel refuse this process, for good, to mount a file system; mounts can
// still be changed, which takes flags. Whether a user namespace may mount a sysfs depends on all
// other mounts of the machine; this does not.
func refuseMounts(t *testing.T) {
	t.Helper()
	const nr, flags = 0, 16 + 8*3 // in struct seccomp_data; the lower half of an argument
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_MOUNT, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	switch errno {
	case 0:
	case unix.EINVAL, unix.ENOSYS:
		ktest.Unsupported(t, "the kernel has no seccomp filters (CONFIG_SECCOMP_FILTER)")
	default:
		t.Fatalf("refuse mounts: %v", errno)
	}
}
