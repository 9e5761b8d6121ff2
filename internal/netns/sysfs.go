// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// DoWithSys is Do for starting or executing a program: fn also sees the
// namespace's own devices under /sys, in a private mount namespace, as under
// `ip netns exec`. Where /sys can't be mounted fn sees the caller's. The thread
// is thrown away afterwards. A nil handle runs fn as it is.
func (h *Handle) DoWithSys(fn func() error) error {
	if h == nil {
		return fn()
	}
	return onNewThread(func() error {
		if err := unix.Setns(h.Fd(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %q: %w", h.name, err)
		}
		if unix.Unshare(unix.CLONE_NEWNS) == nil && unix.Mount("", "/", "none", unix.MS_SLAVE|unix.MS_REC, "") == nil {
			mountSys()
		}
		return fn()
	})
}

// mountSys mounts a sysfs of the thread's network namespace over the old one,
// and on top of it again what the old one carried and programs such as perf and
// bpftool look for.
func mountSys() {
	kept := map[string]int{}
	for _, dir := range []string{"/sys/fs/bpf", "/sys/fs/cgroup", "/sys/kernel/debug", "/sys/kernel/tracing"} {
		fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err == nil {
			defer unix.Close(fd)
			kept[dir] = fd
		}
	}
	if unix.Mount("sysfs", "/sys", "sysfs", 0, "") != nil {
		return
	}
	for dir, fd := range kept {
		_ = unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH) // missing: that one program says so
	}
}
