// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// record is what natkit remembers of an instance: what the kernel can't tell. It is
// one file, replaced whole.
type record struct {
	Engine    Engine     `json:"engine"`
	Namespace string     `json:"namespace"` // as it was named
	ID        netns.ID   `json:"id"`
	Attach    Attach     `json:"attach,omitempty"`
	Accepted  []Bypassed `json:"accepted,omitempty"` // by --bypass
	Since     time.Time  `json:"since"`
	Whole     bool       `json:"whole"` // false: being brought up, or who did was killed

	Rules ruleText  `json:"rules"`
	Next  *ruleText `json:"next,omitempty"` // being applied: in use if the engine has its generation

	Accel *accelRecord `json:"accel,omitempty"` // instead of rules

	Make      string                     `json:"make,omitempty"` // datapath.Make of the programs
	Links     []linkRecord               `json:"links,omitempty"`
	Addresses []datapath.ExternalAddress `json:"addresses,omitempty"` // indices are for life

	forgotten []datapath.ExternalAddress // that refresh has taken out of Addresses
}

// ruleText is a rule file as it was applied.
type ruleText struct {
	File       string      `json:"file"`
	Text       string      `json:"text"`
	Generation uint32      `json:"generation"` // of the engine, that it was to become
	Placements []Placement `json:"placements,omitempty"`

	inForce
}

type linkRecord struct {
	Name    string `json:"name"`
	Index   int    `json:"index"`             // for life
	Ifindex int    `json:"ifindex"`           // 0: it is not there
	Awaited bool   `json:"awaited,omitempty"` // it, or its address, was not there
}

// linkIndex gives the index that an interface of that name has had, or a new one.
func (r *record) linkIndex(name string) int {
	if i := slices.IndexFunc(r.Links, func(l linkRecord) bool { return l.Name == name }); i >= 0 {
		return r.Links[i].Index
	}
	index := len(r.Links)
	r.Links = append(r.Links, linkRecord{Name: name, Index: index})
	return index
}

// linkNames are the interfaces by their indices.
func (r *record) linkNames() map[int]string {
	names := map[int]string{}
	for _, l := range r.Links {
		names[l.Index] = l.Name
	}
	return names
}

// settle makes the rules that were being applied the rules, if the engine has that generation:
// who applied them was killed before it could write that down.
func (r *record) settle(generation uint32) {
	if r.Next == nil {
		return
	}
	if generation >= r.Next.Generation {
		r.Rules = *r.Next
	}
	r.Next = nil
}

// rules is the file that is in use.
func (r *record) rules() (*rulefile.File, error) {
	return rulefile.ParseRecorded(r.Rules.File, []byte(r.Rules.Text))
}

// runDir is natkit's folder of what ends with the next boot.
func runDir() string { return cmp.Or(os.Getenv("NATKIT_RUN_DIR"), "/run/natkit") }

// instancePath is the place of the files of a namespace's instance.
func instancePath(inode uint64, suffix string) string {
	return filepath.Join(runDir(), "nat", strconv.FormatUint(inode, 10)+suffix)
}

// ErrDown says that nothing is up in the namespace.
var ErrDown = errors.New("natkit is not the gateway here: `natkit up -f FILE` starts it")

// errRecord says that somebody has damaged the record: natkit replaces it whole.
var errRecord = errors.New("this is not the record of an instance")

func readRecord(inode uint64) (*record, error) {
	data, err := os.ReadFile(instancePath(inode, ".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrDown
	}
	if err != nil {
		return nil, err
	}
	rec := &record{}
	err = json.Unmarshal(data, rec)
	if err == nil && rec.Engine.translator() == nil {
		err = fmt.Errorf("engine %q", rec.Engine)
	}
	if err != nil {
		return nil, fmt.Errorf("%w, which %s should be: `natkit down` takes down what is there (%w)", errRecord, instancePath(inode, ".json"), err)
	}
	return rec, nil
}

// recordOf reads the record of what is up in a namespace, and not that of an earlier one with
// the same number.
func recordOf(ns *netns.Handle) (*record, error) {
	rec, err := readRecord(ns.Inode())
	if err != nil {
		return nil, err
	}
	id, err := ns.ID()
	if err == nil && id != rec.ID {
		err = ErrDown
	}
	if err != nil {
		return nil, err
	}
	return rec, nil
}

func (r *record) write(inode uint64) error {
	path := instancePath(inode, ".json")
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	draft := path + ".draft"
	if err := os.WriteFile(draft, data, 0o600); err != nil {
		os.Remove(draft) // if it was made; the next one is written over it
		return fmt.Errorf("remember the instance: %w", err)
	}
	return os.Rename(draft, path)
}

func removeRecord(inode uint64) error {
	var errs []error
	for _, suffix := range []string{".json", ".json.draft"} {
		if err := os.Remove(instancePath(inode, suffix)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, removePast(inode))
	return errors.Join(errs...)
}
