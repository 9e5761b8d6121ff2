// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/procfs"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
)

// A lab's journal is RUN/lab/NAME.journal. Who has it locked is making the lab,
// taking it down, or owns it; the kernel drops the lock when that process dies.
//
// Each line is a record, written before the thing exists that it names:
//
//	netns     a namespace made but still without its name: it dies with its maker
//	process   a program started but waiting for the word to go: likewise
//	dir       a directory about to be made
//
// So what is not in the journal does not outlive its maker, and what is there can
// be told from anything else of the same name.
type record struct {
	Lab      *header      `json:"lab,omitempty"` // the first line
	Netns    *netnsRecord `json:"netns,omitempty"`
	Process  *process     `json:"process,omitempty"`
	Dir      string       `json:"dir,omitempty"`
	Complete bool         `json:"complete,omitempty"` // the last line of Up
}

type header struct {
	Topology string  `json:"topology"`
	Options  Options `json:"options"`
	Maker    process `json:"maker"`
	Boot     string  `json:"boot"`
}

type netnsRecord struct {
	Name string   `json:"name"`
	ID   netns.ID `json:"id"`
}

// records is a journal, read.
type records struct {
	header    *header // nil: its maker died before the first line, or is just beginning
	netns     []netnsRecord
	processes []process
	dirs      []string
	complete  bool
}

// runDir holds what labs leave on disk while they are up. Tests set the variable.
func runDir() string {
	dir := os.Getenv("NATKIT_RUN_DIR")
	if dir == "" {
		dir = "/run/natkit"
	}
	return filepath.Join(dir, "lab")
}

const journalSuffix = ".journal"

func journalPath(name string) string { return filepath.Join(runDir(), name+journalSuffix) }

func readRecords(path string) (records, error) {
	var r records
	err := journal.Read(path, func(line json.RawMessage) error {
		var rec record
		if err := json.Unmarshal(line, &rec); err != nil {
			return err
		}
		switch {
		case rec.Lab != nil:
			r.header = rec.Lab
		case rec.Netns != nil:
			r.netns = append(r.netns, *rec.Netns)
		case rec.Process != nil:
			r.processes = append(r.processes, *rec.Process)
		case rec.Dir != "":
			r.dirs = append(r.dirs, rec.Dir)
		case rec.Complete:
			r.complete = true
		default:
			return fmt.Errorf("record of a kind this natkit does not know: %s", line)
		}
		return nil
	})
	return r, err
}

func (r records) thisBoot() bool {
	boot, err := bootID()
	return err == nil && r.header != nil && r.header.Boot == boot
}

// makerAlive says whether the process that made the lab still runs.
func (r records) makerAlive() bool { return r.thisBoot() && r.header.Maker.alive() }

// remains says whether nobody will ever use or remove the lab: its maker died
// before it was complete, or it was the maker's own.
func (r records) remains() bool {
	return !r.makerAlive() && !(r.complete && !r.header.Options.Owned && r.thisBoot())
}

func (r records) openNetns(name string) (*netns.Handle, error) {
	h, err := netns.Open(name)
	if err != nil {
		return nil, err
	}
	id, err := h.ID()
	if err == nil {
		err = fmt.Errorf("network namespace %q is not the one natkit made", name)
		for _, n := range r.netns {
			if n.Name == name && n.ID == id {
				return h, nil
			}
		}
	}
	h.Close()
	return nil, err
}

// nameTakenError means that a lab of that name exists.
type nameTakenError struct{ name string }

func (e nameTakenError) Error() string {
	return fmt.Sprintf("lab %q exists: choose another name, or take it down first (natkit lab down %s)", e.name, e.name)
}

// netnsTakenError means that a namespace that the lab needs is somebody else's.
type netnsTakenError struct{ name string }

func (e netnsTakenError) Error() string {
	return fmt.Sprintf("network namespace %q exists and is not this lab's: choose another name", e.name)
}

// claimName makes the journal of a new lab, which holds the name.
func claimName(name string, p plan) (*journal.Journal, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	maker, err := identify(os.Getpid())
	if err != nil {
		return nil, err
	}
	j, r, err := lockJournal(name)
	if errors.Is(err, journal.ErrLocked) {
		return nil, nameTakenError{name}
	}
	if err != nil {
		return nil, err
	}
	if r.header != nil {
		return nil, errors.Join(nameTakenError{name}, j.Close())
	}
	p.options.Name = name
	if err := j.Append(record{Lab: &header{p.topology, p.options, maker, boot}}); err != nil {
		return nil, errors.Join(err, j.Remove())
	}
	return j, nil
}

// lockJournal opens a lab's journal, made if there is none, and reads it. It does
// not wait for the lab's living maker. Anybody else is about to let go of it: one
// who writes its first line, one who removes it, or a killed maker's child that
// was just about to be executed.
func lockJournal(name string) (*journal.Journal, records, error) {
	path := journalPath(name)
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		j, err := journal.Open(path)
		if errors.Is(err, journal.ErrLocked) {
			r, rerr := readRecords(path)
			if (rerr == nil && !r.makerAlive() || errors.Is(rerr, os.ErrNotExist)) && time.Now().Before(deadline) {
				continue
			}
			return nil, r, err
		}
		if err != nil {
			return nil, records{}, err
		}
		r, err := readRecords(path)
		if err != nil {
			return nil, r, errors.Join(err, j.Close())
		}
		return j, r, nil
	}
}

// takeDown undoes what a journal says, programs first, then removes the journal. When something can't be undone the journal stays, for another try. It
// closes the journal.
func takeDown(j *journal.Journal) error {
	r, err := readRecords(j.Path())
	if err != nil {
		return errors.Join(err, j.Close())
	}
	var errs []error
	if r.thisBoot() {
		for _, p := range r.processes {
			errs = append(errs, p.kill())
		}
		for _, n := range r.netns {
			errs = append(errs, netns.Unpin(n.Name, n.ID))
		}
	}
	for _, dir := range r.dirs {
		errs = append(errs, removeDir(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(err, j.Close())
	}
	return j.Remove()
}

// downByName removes a lab that this process does not hold, if it is one of those
// that which names.
func downByName(name string, which func(records) bool) error {
	if _, err := os.Stat(journalPath(name)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	j, r, err := lockJournal(name)
	if errors.Is(err, journal.ErrLocked) {
		return inUseError{name, r}
	}
	if err != nil {
		return err
	}
	if !which(r) {
		return j.Close()
	}
	return takeDown(j)
}

func whatever(records) bool { return true }

// inUseError means that a living process is making the lab, or owns it.
type inUseError struct {
	name string
	r    records
}

func (e inUseError) Error() string {
	if e.r.header == nil {
		return fmt.Sprintf("lab %q: another natkit is creating it", e.name)
	}
	return fmt.Sprintf("lab %q: in use by process %d: end that process, which removes its lab", e.name, e.r.header.Maker.PID)
}

// names lists the labs that have a journal.
func names() ([]string, error) {
	entries, err := os.ReadDir(runDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var out []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), journalSuffix); ok && validName.MatchString(name) {
			out = append(out, name)
		}
	}
	return out, nil
}

// removeRemains removes what dead processes left, and says so.
func removeRemains() (notes []string) {
	all, err := names()
	if err != nil {
		return []string{err.Error()}
	}
	for _, name := range all {
		r, err := readRecords(journalPath(name))
		if errors.Is(err, os.ErrNotExist) || err == nil && !r.remains() {
			continue
		}
		if err == nil {
			err = downByName(name, records.remains)
		}
		switch {
		case errors.As(err, new(inUseError)): // a new one has begun since
		case err != nil:
			notes = append(notes, fmt.Sprintf("remains of lab %q could not be removed: %v", name, err))
		case r.header != nil:
			notes = append(notes, fmt.Sprintf("removed the remains of lab %q: process %d ended without removing it", name, r.header.Maker.PID))
		}
	}
	return notes
}

// Down removes the lab of that name.
func Down(name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("lab %q: not a valid name", name)
	}
	if _, err := os.Stat(journalPath(name)); errors.Is(err, os.ErrNotExist) {
		return notThere(name)
	} else if err != nil {
		return fmt.Errorf("lab %q: %w", name, err)
	}
	return downByName(name, whatever)
}

// DownAll removes every lab that natkit made, and what killed processes left of
// theirs. Labs that living processes make or own are left, as inUse says.
func DownAll() (down, inUse []string, err error) {
	all, err := names()
	if err != nil {
		return nil, nil, err
	}
	down, inUse = []string{}, []string{}
	var errs []error
	for _, name := range all {
		err := downByName(name, whatever)
		switch {
		case err == nil:
			down = append(down, name)
		case errors.As(err, new(inUseError)):
			inUse = append(inUse, err.Error())
		default:
			errs = append(errs, fmt.Errorf("lab %q: %w", name, err))
		}
	}
	return down, inUse, errors.Join(errs...)
}

// removeDir removes a folder of a lab with what is in it. Where something is mounted on it or
// below, whatever put it there is not the lab's, and may be anybody's files: then nothing is removed.
func removeDir(dir string) error {
	path, err := filepath.EvalSymlinks(dir) // as the kernel names mount points
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	own, errOwn := filepath.EvalSymlinks(runDir())
	if err := errors.Join(err, errOwn); err != nil {
		return fmt.Errorf("remove a folder of a lab: %w", err)
	}
	if filepath.Dir(path) != own {
		return fmt.Errorf("%s is no folder of a lab: left as it is", dir)
	}
	mounts, err := procfs.GetMounts()
	if err != nil {
		return fmt.Errorf("see whether something is mounted below %s: %w", path, err)
	}
	for _, m := range mounts {
		if m.MountPoint == path || strings.HasPrefix(m.MountPoint, path+"/") {
			return fmt.Errorf("%s is left as it is: something is mounted at %s", path, m.MountPoint)
		}
	}
	return os.RemoveAll(path)
}
