// SPDX-License-Identifier: Apache-2.0

// Package journal keeps lists of intended changes on disk, each written and
// synced before the change is made, so that a later process can undo what a
// killed one left behind. The lab (what it made) and tune (what a setting was)
// rely on it.
//
// A journal is one file of JSON lines. A crash can cut only its last line,
// which then was never acted on and is ignored.
package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Journal is an open journal file, locked against other processes until Close.
type Journal struct {
	file *os.File
	path string
}

// ErrLocked means that a living process has the journal open.
var ErrLocked = errors.New("in use by another natkit process")

// Open opens or creates the journal at path and locks it. It does not wait: a
// journal that another process has open gives ErrLocked. The kernel drops the
// lock when the process dies, however it dies.
func Open(path string) (*Journal, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make journal directory: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("journal %s: %w", path, ErrLocked)
		}
		return nil, fmt.Errorf("lock journal %s: %w", path, err)
	}
	// Whoever asks Held must not lock the file, or Open would find it in use. Only this kind of
	// lock can be asked about; the one above stays for natkits that know no other.
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock journal %s: %w", path, err)
	}
	// Its holder may have removed the file between our open and our lock.
	var byName, byFile unix.Stat_t
	if unix.Stat(path, &byName) != nil || unix.Fstat(int(f.Fd()), &byFile) != nil || byName.Ino != byFile.Ino {
		f.Close()
		return Open(path)
	}
	j := &Journal{file: f, path: path}
	if err := j.repair(); err != nil {
		f.Close()
		return nil, err
	}
	return j, syncDir(dir)
}

// Path is where the journal is.
func (j *Journal) Path() string { return j.path }

// Append writes v as one line and returns once it is on disk.
func (j *Journal) Append(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("journal %s: %w", j.path, err)
	}
	if n, err := j.file.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write journal: %w", errors.Join(err, j.cut(n)))
	}
	if err := j.file.Sync(); err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	return nil
}

// cut takes the last n bytes back, half a line that a full disk took: what comes after
// it would be one line with it.
func (j *Journal) cut(n int) error {
	if n == 0 {
		return nil
	}
	end, err := j.file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	return j.file.Truncate(end - int64(n))
}

// Read calls fn with each entry, oldest first.
func (j *Journal) Read(fn func(json.RawMessage) error) error {
	return Read(j.path, fn)
}

// Empty takes every entry out: all of it was undone. That needs no room on a full disk.
func (j *Journal) Empty() error {
	if err := errors.Join(j.file.Truncate(0), j.file.Sync()); err != nil {
		return fmt.Errorf("empty journal: %w", err)
	}
	return nil
}

// Remove deletes the journal: everything in it was undone. It closes it too.
func (j *Journal) Remove() error {
	err := os.Remove(j.path)
	return errors.Join(err, j.Close())
}

// Close releases the lock and keeps the file. To close it would not be enough: a program
// that another thread is about to start holds the file too, for a moment.
func (j *Journal) Close() error {
	return errors.Join(unix.FcntlFlock(j.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}), unix.Flock(int(j.file.Fd()), unix.LOCK_UN), j.file.Close())
}

// Held says whether somebody, this process or another, has the journal at path open.
func Held(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open journal: %w", err)
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return false, fmt.Errorf("ask for the lock of journal %s: %w", path, err)
	}
	return lock.Type != unix.F_UNLCK, nil
}

// Read calls fn with each entry of the journal at path without locking it. A
// cut last line is passed over; any other damage is an error with its line.
func Read(path string, fn func(json.RawMessage) error) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	n := 0
	for line := range bytes.Lines(data[:bytes.LastIndexByte(data, '\n')+1]) {
		n++
		line = bytes.TrimSuffix(line, []byte("\n"))
		if !json.Valid(line) {
			return fmt.Errorf("journal %s line %d: not JSON", path, n)
		}
		if err := fn(json.RawMessage(bytes.Clone(line))); err != nil {
			return fmt.Errorf("journal %s line %d: %w", path, n, err)
		}
	}
	return nil
}

// repair cuts off a last line that a crash left half written.
func (j *Journal) repair() error {
	data, err := os.ReadFile(j.path)
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	if end := bytes.LastIndexByte(data, '\n') + 1; end < len(data) {
		if err := j.file.Truncate(int64(end)); err != nil {
			return fmt.Errorf("repair journal: %w", err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync journal directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync journal directory: %w", err)
	}
	return nil
}
