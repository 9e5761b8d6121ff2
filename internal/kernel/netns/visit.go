// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Visit runs a function in one namespace after the other, on one thread: for those who look into
// hundreds again and again, where Do would spend more time on the way than there. It holds no
// namespace beyond its visit. skip, if not nil, is told of those that could not be entered: they
// end while others are visited.
func Visit(places []Place, visit func(p Place), skip func(p Place, err error)) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close()
	defer func() {
		// As in Do: a thread that can't come back ends.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	for _, p := range places {
		enter := enterPlace
		if p.Ref == "" {
			enter = func(Place) error { return unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) }
		}
		if err := enter(p); err == nil {
			visit(p)
		} else if skip != nil {
			skip(p, err)
		}
	}
	return nil
}

// enterPlace moves the thread, by the first of the namespace's references that still leads there.
func enterPlace(p Place) error {
	last := fmt.Errorf("namespace %d is gone", p.Inode)
	for _, path := range p.paths() {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			last = &os.PathError{Op: "open", Path: path, Err: err}
			continue
		}
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil && st.Ino == p.Inode {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
			if err == nil {
				return nil
			}
			last = fmt.Errorf("enter namespace %s: %w", p.Ref, err)
			continue
		}
		unix.Close(fd)
	}
	return last
}

// paths are the files that lead to the namespace.
func (p Place) paths() (out []string) {
	if checkName(p.Ref) == nil {
		out = append(out, filepath.Join(Dir, p.Ref))
	}
	for _, pid := range p.Processes {
		out = append(out, fmt.Sprintf("/proc/%d/ns/net", pid))
	}
	return out
}
