// SPDX-License-Identifier: Apache-2.0

// Package netns opens, makes, lists and enters network namespaces.
//
// [Handle.Do] is the only place in natkit that locks an OS thread and moves it
// to another namespace. Everything that must happen inside a namespace (a
// socket, a netlink request, a sysctl, a child process) happens in a function
// given to Do.
package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/words/choice"
)

// Dir is where named namespaces are mounted, as ip-netns(8) does it.
const Dir = "/run/netns"

// Handle is an open network namespace. It keeps the namespace alive until
// Close, whatever happens to its name. A nil *Handle means the namespace of
// the caller.
type Handle struct {
	file  *os.File
	name  string
	inode uint64
}

// Open opens a namespace by reference:
//
//	""        the calling process's own
//	"blue"    the name of a namespace in /run/netns
//	"/path"   any namespace file, such as /proc/123/ns/net
//	"pid:123" the namespace of a process
func Open(ref string) (*Handle, error) {
	path, name := "", ref
	switch {
	case ref == "":
		// Not /proc/self: that is the first thread, which may be somewhere else just
		// now for another goroutine's Do.
		path = "/proc/thread-self/ns/net"
	case strings.HasPrefix(ref, "pid:"):
		pid, err := strconv.Atoi(ref[len("pid:"):])
		if err != nil || pid <= 0 {
			return nil, fmt.Errorf("network namespace %q: not a process number", ref)
		}
		path = fmt.Sprintf("/proc/%d/ns/net", pid)
	case strings.HasPrefix(ref, "/"):
		path = ref
	case checkName(ref) != nil:
		return nil, checkName(ref)
	default:
		path = filepath.Join(Dir, ref)
	}
	f, err := os.Open(path)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("network namespace %q: not found (looked for %s)%s", ref, path, meant(ref))
		}
		return nil, fmt.Errorf("open network namespace %q: %w", ref, err)
	}
	h := &Handle{file: f, name: name}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("stat network namespace %q: %w", ref, err)
	}
	h.inode = st.Ino
	// A plain file under that name would make setns fail later with EINVAL.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err == nil && fs.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("network namespace %q: %s is not a namespace", ref, path)
	}
	return h, nil
}

// meant names the namespace that was probably meant by a name that is not there.
func meant(ref string) string {
	all, _ := List()
	var names []string
	for _, n := range all {
		names = append(names, n.Name)
	}
	if name := choice.Nearest(ref, names); name != "" {
		return "; did you mean " + name + "?"
	}
	return ""
}

// Name is the reference the handle was opened with; "" for the caller's own.
func (h *Handle) Name() string {
	if h == nil {
		return ""
	}
	return h.name
}

// label names the namespace in an error.
func (h *Handle) label() string {
	if h.name == "" {
		return "the network namespace that natkit was started in"
	}
	return fmt.Sprintf("network namespace %q", h.name)
}

// Inode is the number the kernel prints for the namespace, as in
// "table full in netns 4026532322" and in struct net's ns.inum.
func (h *Handle) Inode() uint64 {
	if h == nil {
		return inodeOf("/proc/thread-self/ns/net")
	}
	return h.inode
}

// Fd is the namespace's file descriptor, valid until Close.
func (h *Handle) Fd() int { return int(h.file.Fd()) }

// Close releases the handle.
func (h *Handle) Close() error {
	if h == nil {
		return nil
	}
	return h.file.Close()
}

// Do runs fn on a thread that is in the namespace, and that belongs to fn until
// it returns, also for a nil handle. Sockets and child processes that fn makes
// stay in the namespace. fn must not start goroutines that expect to be in
// the namespace, and must not call Do of another handle from another thread's
// point of view: nesting is fine.
//
// Note for readers of /proc: /proc/net is the namespace of the process's first
// thread; inside Do read /proc/thread-self/net. /proc/sys/net follows the thread.
func (h *Handle) Do(fn func() error) error {
	runtime.LockOSThread()
	// A thread that is there already needs no privilege to stay: so natkit works
	// in its own namespace without root.
	if h == nil || h.inode == inodeOf("/proc/thread-self/ns/net") {
		defer runtime.UnlockOSThread()
		return fn()
	}
	old, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer old.Close()
	if err := unix.Setns(h.Fd(), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter %s: %w", h.label(), err)
	}
	defer func() {
		// A thread that can't come back stays locked, so that the runtime ends it
		// with its goroutine instead of giving it to somebody else.
		if unix.Setns(int(old.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return fn()
}

// New makes a namespace that has no name yet; unless Pin gives it one, it ends
// with the handle, however the process dies. The loopback device in it is down.
func New() (*Handle, error) {
	h := &Handle{name: "(new)"}
	err := OnNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		var err error
		h.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create network namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(h.Fd(), &st); err != nil {
		h.Close()
		return nil, fmt.Errorf("create network namespace: stat: %w", err)
	}
	h.inode = st.Ino
	return h, nil
}

// Pin gives the namespace of h a name in Dir. It fails when the name exists.
//
// Killed at any moment it leaves nothing that [Unpin] could take for somebody
// else's: the mount point is first a file with a name only natkit uses, which
// stays as a second link until the namespace is mounted.
func (h *Handle) Pin(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := prepareDir(); err != nil {
		return err
	}
	path, draft := filepath.Join(Dir, name), draftPath(h.inode)
	// A draft with our number is from a killed process: the number is ours now.
	if err := os.Remove(draft); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("name network namespace %q: %w", name, err)
	}
	f, err := os.OpenFile(draft, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("name network namespace %q: %w", name, err)
	}
	f.Close()
	defer os.Remove(draft)
	if err := os.Link(draft, path); err != nil {
		if errors.Is(err, os.ErrExist) {
			err = os.ErrExist
		}
		return fmt.Errorf("name network namespace %q: %w", name, err)
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", h.Fd()), path, "none", unix.MS_BIND, ""); err != nil {
		os.Remove(path)
		return fmt.Errorf("name network namespace %q: mount: %w", name, err)
	}
	h.name = name
	return nil
}

// ID tells a namespace from every other one, also from a later one that got the
// same inode number. Cookie is 0 before Linux 5.14, which has none.
type ID struct {
	Inode  uint64 `json:"inode"`
	Cookie uint64 `json:"cookie"`
}

// ID returns the identity of the namespace.
func (h *Handle) ID() (ID, error) {
	id := ID{Inode: h.Inode()}
	err := h.Do(func() (err error) {
		if id.Cookie, err = Cookie(); err != nil {
			err = fmt.Errorf("identify network namespace %q: %w", h.Name(), err)
		}
		return err
	})
	return id, err
}

// Cookie is that of the namespace that the thread is in.
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	return cookie, err
}

// Unpin takes the name away if it is that of namespace id, or what a killed Pin
// of it left. Anything else of that name is somebody else's and stays.
func Unpin(name string, id ID) error {
	if err := checkName(name); err != nil {
		return err
	}
	draft := draftPath(id.Inode)
	if mountPoint, err := os.Lstat(draft); err == nil {
		if st, err := os.Lstat(filepath.Join(Dir, name)); err == nil && os.SameFile(st, mountPoint) {
			if err := Delete(name); err != nil {
				return err
			}
		}
		if err := os.Remove(draft); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("delete network namespace %q: %w", name, err)
		}
	}
	h, err := Open(name)
	if err != nil {
		return nil // no namespace of that name
	}
	defer h.Close()
	if got, err := h.ID(); err != nil || got != id {
		return err
	}
	return Delete(name)
}

// draftPath is where Pin begins a mount point.
func draftPath(inode uint64) string { return fmt.Sprintf("%s/.natkit-%d", Dir, inode) }

// Create makes a namespace and gives it a name, as `ip netns add` does. The
// loopback device in it is down. It fails when the name exists.
func Create(name string) (*Handle, error) {
	h, err := New()
	if err != nil {
		return nil, err
	}
	if err := h.Pin(name); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// Delete takes the name away, as `ip netns del` does; the namespace itself ends
// with its last process, socket and handle. A name that is gone is no error.
func Delete(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	path := filepath.Join(Dir, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete network namespace %q: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("delete network namespace %q: %w", name, err)
	}
	return nil
}

// Named is a namespace with a name in /run/netns.
type Named struct {
	Name  string
	Inode uint64
}

// List returns the named namespaces, sorted by name. A machine without
// /run/netns has none.
func List() ([]Named, error) {
	entries, err := os.ReadDir(Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var out []Named
	for _, e := range entries {
		// A plain file is one being made, or what a reboot left of one.
		path := filepath.Join(Dir, e.Name())
		var fs unix.Statfs_t
		if unix.Statfs(path, &fs) != nil || fs.Type != unix.NSFS_MAGIC {
			continue
		}
		if ino := inodeOf(path); ino != 0 {
			out = append(out, Named{Name: e.Name(), Inode: ino})
		}
	}
	return out, nil
}

// checkName refuses what would leave /run/netns or confuse a shell.
func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > 200 || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("network namespace %q: not a valid name", name)
	}
	return nil
}

// prepareDir makes /run/netns a shared mount point, so that a namespace made
// here is seen, and can be deleted, from every mount namespace.
func prepareDir() error {
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", Dir, err)
	}
	// Two processes that both find it no mount point would stack two mounts, and
	// the second hide the first one's names. ip-netns takes the same lock.
	lock, err := os.Open(Dir)
	if err != nil {
		return fmt.Errorf("open %s: %w", Dir, err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", Dir, err)
	}
	err = unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		if err = unix.Mount(Dir, Dir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("share mount %s: %w", Dir, err)
	}
	return nil
}

// OnNewThread runs fn on a thread that is thrown away afterwards, whatever fn
// did to it.
func OnNewThread(fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			// The first thread never ends: it would keep what fn did, and with it
			// /proc/self. While this goroutine holds it, fn gets another one.
			defer runtime.UnlockOSThread()
			done <- OnNewThread(fn)
			return
		}
		done <- fn()
	}()
	return <-done
}

func inodeOf(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Ino
}
