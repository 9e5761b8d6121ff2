// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// procSys is where settings are files. Tests put a tree of their own there.
const procSys = "/proc/sys"

// onlyInitial is a setting that every kernel shows in the initial network
// namespace and in no other: the way to tell that does not depend on numbers.
const onlyInitial = "net/core/netdev_max_backlog"

// space is the settings of one network namespace.
type space struct {
	ref    string        // as for --netns
	handle *netns.Handle // nil: the caller's own
	root   string        // procSys
}

func openSpace(ref, root string) (*space, error) {
	if ref == "" {
		return &space{root: root}, nil
	}
	h, err := netns.Open(ref)
	if err != nil {
		return nil, err
	}
	return &space{ref: ref, handle: h, root: root}, nil
}

func (s *space) close() { s.handle.Close() }

// do runs fn with the settings of the namespace. An os.Root does not follow a
// path out of it, whatever the path says.
func (s *space) do(fn func(*os.Root) error) error {
	return s.handle.Do(func() error {
		root, err := os.OpenRoot(s.root)
		if err != nil {
			return err
		}
		defer root.Close()
		return fn(root)
	})
}

// read returns a setting's value with single spaces.
func (s *space) read(name string) (string, error) {
	var text string
	var err error
	if isDevice(name) {
		text, err = s.readDevice(name)
	} else {
		err = s.do(func(root *os.Root) error {
			data, err := root.ReadFile(snapshot.SysctlPath(name))
			text = string(data)
			return err
		})
	}
	if err != nil {
		return "", fmt.Errorf("read %s%s: %w", name, s.where(), cause(err))
	}
	return strings.Join(strings.Fields(text), " "), nil
}

// write writes a setting, in one system call: the kernel takes each write as a
// whole value.
func (s *space) write(name, value string) error {
	var err error
	if isDevice(name) {
		err = s.writeDevice(name, value)
	} else {
		err = s.do(func(root *os.Root) error { return writeOnce(root, snapshot.SysctlPath(name), value) })
	}
	switch {
	case errors.Is(err, unix.EROFS): // as container engines mount it
		return fmt.Errorf("write %s%s: %w (in a container /proc/sys mostly is: run it on the host, with --netns pid:N for the container's namespace)", name, s.where(), cause(err))
	case err != nil:
		return fmt.Errorf("write %s%s: %w", name, s.where(), cause(err))
	}
	return nil
}

// writeOnce writes a file of the kernel's in one system call.
func writeOnce(root *os.Root, path, value string) error {
	f, err := root.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value + "\n")
	return errors.Join(err, f.Close())
}

// glob lists the settings that a name with "*" for an interface stands for.
func (s *space) glob(pattern string) ([]string, error) {
	var names []string
	err := s.do(func(root *os.Root) error {
		paths, err := fs.Glob(root.FS(), snapshot.SysctlPath(pattern))
		for _, p := range paths {
			names = append(names, snapshot.SysctlName(strings.Split(p, "/")...))
		}
		return err
	})
	return names, err
}

// initial says whether the namespace is the initial one, where the limits of
// the host can be written.
func (s *space) initial() bool {
	return s.do(func(root *os.Root) error {
		_, err := root.Stat(onlyInitial)
		return err
	}) == nil
}

// isOf says whether a plan's namespace is this one. A name says that by itself; where a plan has none, it is that of whoever
// read the facts.
func (s *space) isOf(n snapshot.Netns) bool {
	switch {
	case s.ref != "" || n.Inode == 0: // or not known
		return true
	case n.Init: // its number is another one on another kernel
		return s.initial()
	}
	return s.handle.Inode() == n.Inode
}

func (s *space) where() string {
	if s.ref == "" {
		return ""
	}
	return fmt.Sprintf(" in namespace %q", s.ref)
}

// cause takes the path away that os puts before an error: the setting is named
// already.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// openInitial finds the initial network namespace: the caller's own, or that of
// process 1. From inside a container it is neither.
func openInitial(root string) (*space, error) {
	for _, ref := range []string{"", "pid:1"} {
		s, err := openSpace(ref, root)
		if err != nil {
			continue
		}
		if s.initial() {
			return s, nil
		}
		s.close()
	}
	return nil, errors.New("it has one value for the whole machine and is read-only in this network namespace: run natkit in the initial one")
}

// findSpace finds the namespace that a journal entry is about, whatever it is
// called now; nil when it is no more. Names and inode numbers are given again: the
// identity tells which of two is meant.
func findSpace(ref string, want netns.ID, root string) (*space, error) {
	named, err := netns.List()
	if err != nil {
		return nil, err
	}
	refs := []string{ref, "", "pid:1"}
	for _, n := range named {
		refs = append(refs, n.Name)
	}
	processes, err := fs.Glob(os.DirFS("/proc"), "[0-9]*")
	if err != nil {
		return nil, err
	}
	seen := []uint64{}
	for _, pid := range processes {
		refs = append(refs, "pid:"+pid)
	}
	for _, r := range refs {
		s, err := openSpace(r, root)
		if err != nil {
			continue
		}
		inode := s.handle.Inode()
		if !slices.Contains(seen, inode) {
			seen = append(seen, inode)
			if id, err := s.handle.ID(); err == nil && id == want {
				return s, nil
			}
		}
		s.close()
	}
	return nil, nil
}
