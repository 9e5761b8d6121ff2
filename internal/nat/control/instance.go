// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
)

// instance is what natkit has in a namespace, held against other processes that would
// change it: its journal is the lock.
//
// What is where, and who removes it after a crash at any moment:
//
//	RUN/nat/INODE.journal  changes of the namespace, each before it is made: Down, or the next Up
//	RUN/nat/INODE.json     the record; Whole when Up has ended: as above
//	RUN/nat/INODE.past/    rules that were replaced, for the log: as above
//	BPFFS/natkit/INODE     maps, programs, links: as above
//	…-draft                an engine half pinned: the next Up, Down or Clean
type instance struct {
	ns    *netns.Handle
	inode uint64
	dir   string // of its pins
	j     *journal.Journal
	pins  *os.File // nil where there can be no pins
	// noPins is why: only what has none can be brought up, changed or taken down.
	noPins error
}

// hold takes the instance of a namespace, whether there is one or not.
func hold(ns *netns.Handle) (_ *instance, err error) {
	in := &instance{ns: ns, inode: ns.Inode()}
	in.pins, in.dir, err = holdPins(in.inode, unix.LOCK_SH)
	if errors.As(err, new(*datapath.NoRootError)) {
		in.dir, in.noPins = pinsOf(in.inode), err
	} else if err != nil {
		return nil, err
	}
	if in.j, err = journal.Open(instancePath(in.inode, ".journal")); err != nil {
		return nil, errors.Join(err, leavePins(in.pins))
	}
	return in, nil
}

// holdToRemove is hold for who takes down what is there: where nothing is, that nothing can be
// written does not matter, and none is the error.
func holdToRemove(ns *netns.Handle, none error) (*instance, error) {
	in, err := hold(ns)
	if err == nil || !errors.Is(err, unix.EROFS) && !errors.Is(err, fs.ErrPermission) {
		return in, err
	}
	inode := ns.Inode()
	for _, trace := range []string{instancePath(inode, ".json"), instancePath(inode, ".journal"), pinsOf(inode)} {
		if _, there := os.Lstat(trace); !errors.Is(there, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, none
}

// occupy holds the instance of a namespace in which nothing is to be yet: what a crash of
// an earlier one has left is removed, but for what is in left, each with why.
func occupy(ns *netns.Handle, by *serving) (in *instance, left []string, err error) {
	if err := refuseServed(ns, by); err != nil {
		return nil, nil, err
	}
	in, err = hold(ns)
	if err != nil {
		return nil, nil, err
	}
	rec, err := in.record()
	if err != nil && !errors.Is(err, ErrDown) {
		return nil, nil, errors.Join(err, in.release())
	}
	if rec != nil && rec.stands(in.dir) {
		return nil, nil, errors.Join(rec.Engine.translator().exists(rec), in.release())
	}
	left, err = in.takeDown(rec)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("remove what an earlier run left: %w", err), in.release())
	}
	return in, left, nil
}

// vacant refuses to plan for a namespace that something is up in, as occupy would.
func vacant(ns *netns.Handle, by *serving) error {
	if err := refuseServed(ns, by); err != nil {
		return err
	}
	rec, err := recordOf(ns)
	if errors.Is(err, ErrDown) {
		return nil
	}
	if err == nil && rec.stands(pinsOf(ns.Inode())) {
		err = rec.Engine.translator().exists(rec)
	}
	return err
}

// stands reports whether what the record is about is up, with its pins in dir.
func (r *record) stands(dir string) bool {
	if !r.Whole || !r.Engine.translator().pinned() {
		return r.Whole
	}
	_, err := os.Stat(dir)
	return err == nil
}

// holdPins locks the folder of pins: shared by those who make and remove their own,
// exclusive by Clean, which removes what nobody is making.
func holdPins(inode uint64, how int) (lock *os.File, dir string, err error) {
	if lock, err = datapath.LockRoot(runDir(), how); err != nil {
		return nil, "", err
	}
	return lock, datapath.InstanceDir(lock.Name(), inode), nil
}

// leavePins lets the folder of pins go.
func leavePins(lock *os.File) error {
	if lock == nil {
		return nil
	}
	return datapath.UnlockRoot(runDir(), lock)
}

// canPin is for who is about to bring up what has pins.
func (in *instance) canPin() error {
	if in.noPins != nil {
		return in.noPins
	}
	return canLoad()
}

// canLoad is for who is about to load programs.
func canLoad() error {
	// The kernel shows there its types and processors, without which nothing is loaded.
	const processors = "/sys/devices/system/cpu/possible"
	if _, err := os.Stat(processors); err != nil {
		return fmt.Errorf("no sysfs is mounted on /sys, which an eBPF program cannot be loaded without: run `mount -t sysfs sysfs /sys`; engine nft needs none (%w)", err)
	}
	return nil
}

// pinsOf is where the instance of a namespace is pinned, if there is one.
func pinsOf(inode uint64) string { return datapath.InstanceDir(datapath.Root(runDir()), inode) }

// release lets others have the instance, which goes on.
func (in *instance) release() error { return errors.Join(in.j.Close(), leavePins(in.pins)) }

// remove lets others have the namespace, in which nothing is left.
func (in *instance) remove() error {
	return errors.Join(removeRecord(in.inode), in.j.Remove(), leavePins(in.pins))
}

// pinned reports whether an engine is there.
func (in *instance) pinned() bool {
	_, err := os.Stat(in.dir)
	return err == nil
}

// record reads what is known of the instance, ErrDown if there is nothing. What an
// earlier namespace of the same number has left is removed: it died with everything
// that was changed in it.
func (in *instance) record() (*record, error) {
	rec, err := readRecord(in.inode)
	if err != nil {
		return nil, err
	}
	id, err := in.ns.ID()
	if err != nil {
		return nil, err
	}
	if rec.ID == id {
		if rec.Engine.translator().pinned() && in.noPins != nil {
			return nil, in.noPins
		}
		return rec, nil
	}
	if err := errors.Join(datapath.Unload(in.dir), removeRecord(in.inode), in.j.Remove()); err != nil {
		return nil, err
	}
	if in.j, err = journal.Open(instancePath(in.inode, ".journal")); err != nil {
		return nil, err
	}
	return nil, ErrDown
}

// takeDown removes everything of the instance, whole or not, and puts the namespace
// back. What somebody else has changed since is kept, and reported.
func (in *instance) takeDown(rec *record) (kept []string, err error) {
	changes, err := standing(in.j.Path())
	if err != nil {
		return nil, err
	}
	// Who is killed here leaves what the next Up makes again. Where there is no room to
	// write it down, what is up can be taken down all the same.
	if rec != nil && rec.Whole {
		half := *rec
		half.Whole = false
		_ = half.write(in.inode)
	}
	// Before nobody translates any more, or packets of hosts inside would leave as they are.
	if _, forwarding := splitForwarding(changes); len(forwarding) > 0 {
		if _, err := undo(in.ns, in.j, forwarding); err != nil {
			return nil, err
		}
	}
	var untold []string
	if rec != nil {
		if untold, err = rec.Engine.translator().remove(in, rec); err != nil {
			return nil, err
		}
	}
	accelerated := rec != nil && rec.Accel != nil && rec.Accel.TCPTimeout > 0 && in.pinned() // or it was refused
	if err := datapath.Unload(in.dir); err != nil {
		return nil, err
	}
	if accelerated {
		stalled, err := exceptConnections(in.ns)
		if err != nil {
			return nil, err
		}
		untold = append(untold, stalled...)
	}
	kept, err = undo(in.ns, in.j, changes)
	kept = append(kept, untold...)
	if err != nil {
		return kept, err
	}
	// What comes next, here or in a later namespace of that number, must not be put back by it.
	return kept, errors.Join(in.j.Empty(), removeRecord(in.inode))
}

// lower takes down what is of the instance, and lets the namespace go.
func (in *instance) lower(rec *record) (kept []string, err error) {
	if kept, err = in.takeDown(rec); err != nil {
		return kept, errors.Join(err, in.release()) // the next one goes on from the journal
	}
	return kept, in.remove()
}

// Clean removes what is left of namespaces that are gone: their engines carry nothing,
// and hold memory. It leaves alone what it can't be sure of, and does nothing while
// somebody makes or changes an engine. It reports how many it removed.
func Clean() (removed int, err error) {
	lock, dir, err := holdPins(0, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.As(err, new(*datapath.NoRootError)) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, leavePins(lock)) }()
	inodes, err := datapath.Instances(filepath.Dir(dir))
	if err != nil {
		return 0, err
	}
	places, err := netns.All()
	if err != nil {
		return 0, err
	}
	for _, inode := range append(inodes, recorded(inodes)...) {
		dir := datapath.InstanceDir(filepath.Dir(dir), inode)
		// What one namespace's files say wrong must not stop commands in others.
		if err := datapath.RemoveDraft(dir); err != nil {
			continue
		}
		if gone, err := isGone(inode, dir, places); err != nil || !gone {
			continue
		}
		// What somebody else has put among its files stays, and with it the folder: it is tried again each time.
		if err := errors.Join(datapath.Unload(dir), removeRecord(inode), removeJournal(inode), forgetServing(inode)); err == nil {
			removed++
		}
	}
	return removed, nil
}

// isGone reports whether the namespace of an instance has ended. One that neither a name
// nor a process leads to may be held by a socket or a mount. Of an instance that an older
// natkit made, which can't say, it has ended if there are links, and none of them has an
// interface any more.
func isGone(inode uint64, dir string, places []netns.Place) (bool, error) {
	if by, err := served(inode); err != nil || by != nil {
		return false, err
	}
	rec, err := readRecord(inode)
	if err != nil && !errors.Is(err, ErrDown) {
		return false, err
	}
	ended, known, err := datapath.Ended(dir)
	if err != nil || ended {
		return ended, err
	}
	i := slices.IndexFunc(places, func(p netns.Place) bool { return p.Inode == inode })
	if i < 0 {
		if known {
			return false, nil
		}
		links, alive, err := datapath.Hold(dir)
		return err == nil && alive == 0 && (links > 0 || rec == nil || !rec.stands(dir)), err
	}
	ns, err := netns.Open(places[i].Ref)
	if err != nil || rec == nil {
		return false, nil // it is there, or has just ended
	}
	id, err := ns.ID()
	return err == nil && id != rec.ID, errors.Join(err, ns.Close())
}

// recorded lists the inodes of instances that have a record or a journal, and are not
// among those known.
func recorded(known []uint64) (out []uint64) {
	entries, err := os.ReadDir(filepath.Join(runDir(), "nat"))
	if err != nil {
		return nil // there was none yet
	}
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Name(), ".")
		inode, err := strconv.ParseUint(name, 10, 64)
		if err == nil && !slices.Contains(known, inode) && !slices.Contains(out, inode) {
			out = append(out, inode)
		}
	}
	return out
}

func removeJournal(inode uint64) error {
	if err := os.Remove(instancePath(inode, ".journal")); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
