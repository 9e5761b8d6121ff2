// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// ServeState is what a `natkit serve` says of itself to other natkits.
type ServeState struct {
	Process  int       `json:"pid"`
	Since    time.Time `json:"since"`
	File     string    `json:"file"`
	Starting bool      `json:"starting,omitempty"` // it has not brought up or adopted its NAT yet
	Metrics  string    `json:"metrics,omitempty"`  // where it answers Prometheus
	Error    string    `json:"error,omitempty"`    // why the file is not in use as it is, or the machine not followed
}

// serving is one process's hold on keeping a namespace's instance: a lock on a file, which
// the kernel lets go when the process ends, however that is. Who holds it is the only
// one to change the instance; others say so, and read ServeState.
//
//	RUN/nat/INODE.serve       the lock
//	RUN/nat/INODE.serve.json  ServeState; after a kill it stays, and nobody believes it
type serving struct {
	inode uint64
	lock  *os.File
}

// ServedError refuses to change what a natkit serve keeps.
type ServedError struct{ ServeState }

func (e *ServedError) Error() string {
	if e.Process == 0 {
		return "a natkit serve that has just been started keeps this NAT: try again, then natkit names its process and its file"
	}
	return fmt.Sprintf("natkit serve (process %d) keeps this NAT equal to %s: change that file, or stop natkit serve", e.Process, e.File)
}

// holdServing takes the hold on the namespace of that number, or gives a *ServedError.
func holdServing(inode uint64) (*serving, error) {
	s := &serving{inode: inode}
	path := instancePath(s.inode, ".serve")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			state, _ := readServeState(s.inode)
			return nil, errors.Join(&ServedError{state}, f.Close())
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		byName, err := os.Stat(path)
		if byFile, err2 := f.Stat(); err == nil && err2 == nil && os.SameFile(byName, byFile) {
			s.lock = f
			// What one that was killed has said of itself is not so any more.
			if err := os.Remove(instancePath(inode, ".serve.json")); err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, errors.Join(err, f.Close())
			}
			return s, nil
		}
		f.Close() // who held it has removed it since
	}
}

// release ends the hold and removes its files.
func (s *serving) release() error {
	return errors.Join(removeServing(s.inode), s.lock.Close())
}

// say informs other natkits how it stands.
func (s *serving) say(state ServeState) error {
	data, err := json.Marshal(state)
	if err != nil {
		return err
	}
	path := instancePath(s.inode, ".serve.json")
	draft := path + ".draft"
	if err := os.WriteFile(draft, data, 0o600); err != nil {
		return errors.Join(fmt.Errorf("say how natkit serve stands: %w", err), os.Remove(draft))
	}
	return os.Rename(draft, path)
}

// forgetServing removes what a natkit serve that was killed has left.
func forgetServing(inode uint64) error {
	if _, err := os.Stat(instancePath(inode, ".serve")); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	s, err := holdServing(inode)
	if err != nil {
		return err
	}
	return s.release()
}

func removeServing(inode uint64) error {
	var errs []error
	for _, suffix := range []string{".serve.json", ".serve.json.draft", ".serve"} {
		if err := os.Remove(instancePath(inode, suffix)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// served is the natkit serve that keeps a namespace, nil if there is none.
func served(inode uint64) (*ServeState, error) {
	f, err := os.OpenFile(instancePath(inode, ".serve"), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return nil, fmt.Errorf("ask for the lock on %s: %w", f.Name(), err)
	}
	if lock.Type == unix.F_UNLCK {
		return nil, nil
	}
	state, err := readServeState(inode)
	return &state, err
}

func readServeState(inode uint64) (state ServeState, err error) {
	data, err := os.ReadFile(instancePath(inode, ".serve.json"))
	if errors.Is(err, os.ErrNotExist) {
		return state, nil // it has just begun
	}
	if err != nil {
		return state, err
	}
	if err := json.Unmarshal(data, &state); err != nil {
		return state, fmt.Errorf("what natkit serve reports of itself in %s can't be read, restart it: %w", instancePath(inode, ".serve.json"), err)
	}
	return state, nil
}

// refuseServed refuses to change an instance that a natkit serve keeps, to all but it.
func refuseServed(ns *netns.Handle, by *serving) error {
	if by != nil {
		return nil
	}
	state, err := served(ns.Inode())
	if err == nil && state != nil {
		err = &ServedError{*state}
	}
	return err
}
