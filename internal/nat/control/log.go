// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// ErrNoLog says that no engine is up that records.
var ErrNoLog = errors.New("no engine ebpf is up here, which records what it translates")

// Log is the log of the engine ebpf of a namespace, opened by the one process that reads it: it has a
// lock on RUN/nat/INODE.log, which the kernel lets go when it ends.
type Log struct {
	*datapath.LogReader
	engine *datapath.Engine
	lock   *os.File
	pin    os.FileInfo // of what was opened
	path   string
	inode  uint64 // of the namespace
	began  bool   // nothing was recorded before
}

// OpenLog opens the log of the engine that is up. Where the rules do not say what is recorded, it is
// record until CloseAsked.
func OpenLog(ns *netns.Handle, record rulefile.LogRecord, destinations bool) (_ *Log, err error) {
	rec, err := ofEngine(recordOf(ns))
	if errors.Is(err, ErrDown) || errors.Is(err, errAccelOn) || err == nil && (!rec.Whole || rec.Engine != EngineEBPF) {
		return nil, ErrNoLog
	}
	if err != nil {
		return nil, err
	}
	l := &Log{inode: ns.Inode()}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Abandon())
		}
	}()
	if err := l.hold(instancePath(ns.Inode(), ".log")); err != nil {
		return nil, err
	}
	l.path = filepath.Join(pinsOf(ns.Inode()), "maps", "control")
	if l.pin, err = os.Stat(l.path); err != nil {
		return nil, fmt.Errorf("open the log: %w", err)
	}
	if l.engine, err = Open(ns); err != nil {
		return nil, err
	}
	if err := l.engine.LetGo(); err != nil {
		return nil, err
	}
	if l.began, err = l.engine.AskLog(record, destinations); err != nil {
		return nil, err
	}
	l.LogReader, err = l.engine.OpenLog()
	return l, err
}

// hold takes the lock.
func (l *Log) hold(path string) error {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("lock the log: %w", err)
		}
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			pid, _ := io.ReadAll(f)
			return errors.Join(fmt.Errorf("process %s records this engine already: one does so at a time", strings.TrimSpace(string(pid))), f.Close())
		}
		if err == nil {
			err = f.Truncate(0)
		}
		if err == nil {
			_, err = f.WriteString(strconv.Itoa(os.Getpid()) + "\n")
		}
		if err != nil {
			return errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		byName, err := os.Stat(path)
		if byFile, err2 := f.Stat(); err == nil && err2 == nil && os.SameFile(byName, byFile) {
			l.lock = f
			return nil
		}
		f.Close() // who held it has removed it since
	}
}

// Interface is what a zone's hosts are behind (datapath.Engine.ZoneName). One that was added since
// is looked for in the record.
func (l *Log) Interface(zone uint8) string {
	if zone != 0 && !l.engine.NamesZone(zone) {
		if rec, err := readRecord(l.inode); err == nil {
			l.engine.NameZones(rec.linkNames())
		}
	}
	return l.engine.ZoneName(zone)
}

// Up reports whether the engine that was opened is the one that is up.
func (l *Log) Up() bool {
	now, err := os.Stat(l.path)
	return err == nil && os.SameFile(l.pin, now)
}

// CloseAsked closes it and ends what OpenLog has had recorded.
func (l *Log) CloseAsked() error { return errors.Join(l.engine.ForgetLog(), l.Close()) }

// Abandon closes one that could not be kept. What was recorded before it was opened goes on, with all
// that the ring has: the one who was killed left it to who comes.
func (l *Log) Abandon() error {
	if l.began {
		return l.CloseAsked()
	}
	return l.Close()
}

// Close lets go of the log. The engine goes on filling it.
func (l *Log) Close() error {
	var errs []error
	if l.LogReader != nil {
		errs = append(errs, l.LogReader.Close())
	}
	if l.engine != nil {
		errs = append(errs, l.engine.Close())
	}
	if l.lock != nil {
		errs = append(errs, os.Remove(l.lock.Name()), l.lock.Close())
	}
	return errors.Join(errs...)
}
