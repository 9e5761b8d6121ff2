// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
)

// DefaultStateDir is where the journal is kept: it must outlive a reboot, since
// what --persist wrote does.
const DefaultStateDir = "/var/lib/natkit"

// Place is where tune keeps its own files. The zero value is the machine's.
type Place struct {
	StateDir string // "" means DefaultStateDir
	EtcDir   string // "" means /etc

	root string // "" means procSys; tests put a tree there
}

func (p Place) journal() string {
	return filepath.Join(cmp.Or(p.StateDir, DefaultStateDir), "tune", "journal")
}
func (p Place) files() []persistFile {
	etc := cmp.Or(p.EtcDir, "/etc")
	return []persistFile{{path: filepath.Join(etc, "sysctl.d", persistName)}, {path: filepath.Join(etc, "udev", "rules.d", udevName), device: true}}
}
func (p Place) procSys() string { return cmp.Or(p.root, procSys) }

// op is what a line of the journal says. Each is on disk before what it
// announces is done.
type op string

const (
	opBegin     op = "begin"     // an apply begins
	opSet       op = "set"       // a setting is about to be written
	opFile      op = "file"      // the sysctl.d file or that of udev is about to be written
	opRollback  op = "rollback"  // a rollback begins
	opRestoring op = "restoring" // a setting is about to get its old value
	opRestored  op = "restored"  // a setting or the file was looked after
	opEnd       op = "end"       // it is complete, with this state
)

// entry is one line of the journal.
type entry struct {
	Op       op          `json:"op"`
	ID       string      `json:"id"`
	Time     time.Time   `json:"time,omitzero"`
	Boot     string      `json:"boot,omitempty"`
	By       string      `json:"by,omitempty"`
	Set      *set        `json:"set,omitempty"`
	File     *fileChange `json:"file,omitempty"`
	Restored *Restored   `json:"restored,omitempty"`
	State    State       `json:"state,omitempty"`
	// Along is what opRestoring gives the settings that the kernel changes with the one.
	Along map[string]string `json:"along,omitempty"`
}

// set is a change with what is needed to take it back.
type set struct {
	Change
	Space   netns.ID `json:"space"`
	Initial bool     `json:"initial,omitempty"` // in the initial network namespace
	// Along holds the old values of the settings that the kernel changes with it.
	Along map[string]string `json:"along,omitempty"`
	// Interfaces are the indices of the interfaces that Setting and Along name: a name may be another interface's later.
	Interfaces map[string]int `json:"interfaces,omitempty"`
}

// fileChange is what a file of settings was and is to be; nil: it was not there.
type fileChange struct {
	Path string  `json:"path"`
	Old  *string `json:"old"`
	New  string  `json:"new"`
}

// account is a record with all that the journal knows of it.
type account struct {
	Record
	boot      string
	sets      []set
	files     []*fileChange
	restoring map[string]map[string]string // settings whose restoring had begun, with Along
}

// undoable says whether there is something for a rollback to do.
func (a *account) undoable() bool { return a.State == StateApplied || a.State == StateInterrupted }

// History returns every apply of this machine, oldest first. It changes nothing.
func History(p Place) ([]Record, error) {
	accounts, err := readAccounts(p)
	if err != nil {
		return nil, err
	}
	out := make([]Record, len(accounts))
	for i, a := range accounts {
		out[i] = a.Record
	}
	if slices.ContainsFunc(accounts, func(a *account) bool { return a.State == StateInterrupted }) {
		held, err := journal.Held(p.journal())
		if err != nil {
			return nil, err
		}
		if !held {
			return out, nil
		}
		for i := range out { // unfinished, and somebody is at work: it is being done
			if out[i].State == StateInterrupted {
				out[i].State = StateRunning
			}
		}
	}
	return out, nil
}

// Lives says whether the namespace that a change of the history was made in is still there.
func (p Place) Lives(c Change) bool {
	at, err := findSpace(c.Netns, c.Space, p.procSys())
	if err != nil || at == nil {
		return false
	}
	at.close()
	return true
}

// readAccounts reads the journal. No journal is an empty one.
func readAccounts(p Place) ([]*account, error) {
	var list []*account
	byID := map[string]*account{}
	err := journal.Read(p.journal(), func(line json.RawMessage) error {
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		a := byID[e.ID]
		if e.Op == opBegin {
			a = &account{boot: e.Boot, restoring: map[string]map[string]string{}}
			a.ID, a.Time, a.By, a.State, a.Changes = e.ID, e.Time, e.By, StateInterrupted, []Change{}
			byID[e.ID] = a
			list = append(list, a)
			return nil
		}
		if a == nil {
			return fmt.Errorf("entry of %q before its beginning", e.ID)
		}
		return a.add(e)
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, fs.ErrPermission):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w; it contains the values from before each change: restore them yourself if necessary, then move it away", err)
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	var persistent []Change
	for _, f := range p.files() {
		if kept, err := f.read(); err == nil { // otherwise not natkit's: it carries nothing over a reboot
			persistent = append(persistent, kept...)
		}
	}
	for _, a := range list {
		if a.boot != boot && a.undoable() && !a.survives(persistent) {
			a.State = StateRebooted
		}
	}
	return list, nil
}

// add takes an entry that follows the account's beginning.
func (a *account) add(e entry) error {
	switch {
	case e.Op == opSet && e.Set != nil:
		a.sets = append(a.sets, *e.Set)
		c := e.Set.Change
		c.Space = e.Set.Space
		a.Changes = append(a.Changes, c)
	case e.Op == opFile && e.File != nil:
		a.files = append(a.files, e.File)
		a.Record.wrote(e.File.Path)
	case e.Op == opRollback:
		a.State, a.Restored = StateInterrupted, nil
	case e.Op == opRestoring && e.Restored != nil:
		a.restoring[e.Restored.Setting] = e.Along
	case e.Op == opRestored && e.Restored != nil:
		a.Restored = append(a.Restored, *e.Restored)
	case e.Op == opEnd:
		a.State = e.State
	default:
		return fmt.Errorf("entry %q is not one that this natkit knows", e.Op)
	}
	return nil
}

// survives says whether something of the record outlived a reboot: a file that it wrote is as it
// wrote it, or natkit's files set what it set.
func (a *account) survives(persistent []Change) bool {
	wrote := func(f *fileChange) bool {
		text, err := readFile(f.Path)
		return err == nil && text != nil && *text == f.New
	}
	return slices.ContainsFunc(a.files, wrote) || slices.ContainsFunc(a.sets, func(s set) bool {
		return s.Initial && slices.ContainsFunc(persistent, func(c Change) bool {
			return c.Setting == s.Setting && c.New == s.New
		})
	})
}

// newID names an apply after its time; two within a second are told apart.
func newID(now time.Time, accounts []*account) string {
	base := now.UTC().Format("20060102-150405")
	id := base
	for n := 2; slices.ContainsFunc(accounts, func(a *account) bool { return a.ID == id }); n++ {
		id = fmt.Sprintf("%s-%d", base, n)
	}
	return id
}

// bootID tells this boot of the machine from every other one.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot number: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
