// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// DoWithSys is Do for starting or executing a program, and for whoever reads or writes
// /sys: fn sees the namespace's own devices there, in a private mount namespace, as under
// `ip netns exec`. Where that can't be, fn is not run: it would see, and change, the devices
// of another namespace. The thread is thrown away afterwards. A nil handle runs fn as it is.
func (h *Handle) DoWithSys(fn func() error) error {
	if h == nil {
		return fn()
	}
	return OnNewThread(func() error {
		if err := unix.Setns(h.Fd(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("show in /sys the devices of %s: %w", h.label(), err)
		}
		err := OwnMounts()
		if err == nil {
			err = mountSys()
		}
		if err != nil {
			return fmt.Errorf("%s: its devices cannot be shown in /sys, where those of another namespace are: %w", h.label(), err)
		}
		return fn()
	})
}

// OwnMounts gives the calling thread, which must be one of [OnNewThread], mounts of its own:
// what it mounts only those see that it starts.
func OwnMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	err := unix.Mount("", "/", "none", unix.MS_SLAVE|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) {
		err = outsideOfRoot(func() error { return unix.Mount("", "/", "none", unix.MS_SLAVE|unix.MS_REC, "") })
	}
	if err != nil {
		return fmt.Errorf("keep mounts private: %w", err)
	}
	return nil
}

// outsideOfRoot runs fn where "/" is the root of the thread's mount namespace. In a chroot it
// is not, and need not even be a mount. To enter a mount namespace, be it one's own, leads
// to its root.
func outsideOfRoot(fn func() error) error {
	open := func(path string, flags int) (*os.File, error) { return os.OpenFile(path, flags, 0) }
	root, err1 := open("/", unix.O_PATH|unix.O_DIRECTORY)
	work, err2 := open(".", unix.O_PATH|unix.O_DIRECTORY)
	mounts, err3 := open("/proc/thread-self/ns/mnt", os.O_RDONLY)
	for _, f := range []*os.File{root, work, mounts} {
		defer f.Close() // of none it is an error and nothing else
	}
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	if err := unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS); err != nil {
		return err
	}
	return errors.Join(fn(), unix.Fchdir(int(root.Fd())), unix.Chroot("."), unix.Fchdir(int(work.Fd())))
}

// mountSys mounts a sysfs of the thread's network namespace over the old one,
// and on top of it again what the old one carried and programs such as perf and
// bpftool look for. Where no sysfs is at /sys, and none can be, it does without.
func mountSys() error {
	kept := map[string]int{}
	for _, dir := range []string{"/sys/fs/bpf", "/sys/fs/cgroup", "/sys/kernel/debug", "/sys/kernel/tracing"} {
		fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err == nil {
			defer unix.Close(fd)
			kept[dir] = fd
		}
	}
	err := unix.Mount("sysfs", "/sys", "sysfs", 0, "")
	var fs unix.Statfs_t
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil // the namespace's own is there already
	case err != nil && (unix.Statfs("/sys", &fs) != nil || fs.Type != unix.SYSFS_MAGIC):
		return nil // nobody's devices are shown
	case err != nil:
		return fmt.Errorf("mount a sysfs on /sys: %w", err)
	}
	for dir, fd := range kept {
		_ = unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH) // missing: that one program says so
	}
	return nil
}
