// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// watcher wakes who reads C when something may have happened to a rule file or to what an
// engine depends on. What has happened it does not say: who is woken looks. So an
// event that the kernel could not deliver costs a later look, and nothing else.
type watcher struct {
	C       chan struct{}
	sources []*os.File
	inotify int // descriptor of the first source
}

// Groups of netlink, as bits.
const (
	onLinks      = unix.RTMGRP_LINK
	onAddresses  = unix.RTMGRP_IPV4_IFADDR
	onForwarding = 1 << (unix.RTNLGRP_IPV4_NETCONF - 1)
	onNFTables   = 1 << (unix.NFNLGRP_NFTABLES - 1)
)

// watch begins to watch interfaces and addresses of a namespace. A file is added by
// follow.
func watch(ns *netns.Handle) (*watcher, error) {
	w := &watcher{C: make(chan struct{}, 1)}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch files: %w", err)
	}
	w.inotify = fd
	w.add(fd, "inotify")
	err = ns.Do(func() error { return w.listen(unix.NETLINK_ROUTE, onLinks|onAddresses|onForwarding) })
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// nftables adds the rule set of a namespace.
func (w *watcher) nftables(ns *netns.Handle) error {
	return ns.Do(func() error { return w.listen(unix.NETLINK_NETFILTER, onNFTables) })
}

// listen opens a netlink socket in the namespace of the calling thread.
func (w *watcher) listen(family int, groups uint32) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, family)
	if err != nil {
		return fmt.Errorf("watch the namespace: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return errors.Join(fmt.Errorf("watch the namespace: %w", err), unix.Close(fd))
	}
	w.add(fd, "netlink")
	return nil
}

func (w *watcher) add(fd int, name string) {
	f := os.NewFile(uintptr(fd), name)
	w.sources = append(w.sources, f)
	go func() {
		events := make([]byte, 64<<10)
		for {
			_, err := f.Read(events)
			if err != nil && !errors.Is(err, unix.ENOBUFS) { // closed
				return
			}
			w.wake()
		}
	}()
}

// wake makes C readable; who is awake already is not woken twice.
func (w *watcher) wake() {
	select {
	case w.C <- struct{}{}:
	default:
	}
}

// follow watches the folders of a file: of its name, because editors and config maps put
// another file there, and of what it links to. To follow again is how a folder that was
// replaced is found.
func (w *watcher) follow(path string) error {
	folders := []string{filepath.Dir(path)}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		folders = append(folders, filepath.Dir(target))
	}
	for _, folder := range folders {
		const events = unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_CREATE | unix.IN_ATTRIB
		if _, err := unix.InotifyAddWatch(w.inotify, folder, events); err != nil {
			return fmt.Errorf("watch folder %s: %w", folder, err)
		}
	}
	return nil
}

// Close ends the watch; nobody is woken by it any more.
func (w *watcher) Close() error {
	var errs []error
	for _, f := range w.sources {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
