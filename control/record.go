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

	"natkit/datapath"
)

// Engine is what carries rules out.
type Engine string

// The engines.
const (
	EngineEBPF Engine = "ebpf"
	EngineNFT  Engine = "nft"
)

// record is what natkit remembers of an instance: what the kernel can't tell. It is
// one file, replaced whole.
type record struct {
	Engine    Engine    `json:"engine"`
	Namespace string    `json:"namespace"`
	File      string    `json:"file"`  // the rule file's name
	Rules     string    `json:"rules"` // and text
	Attach    Attach    `json:"attach,omitempty"`
	Since     time.Time `json:"since"`

	Links      []linkRecord              `json:"links,omitempty"` // indices are for life
	Addresses  []datapath.OutsideAddress `json:"addresses,omitempty"`
	Placements []Placement               `json:"placements,omitempty"`
}

type linkRecord struct {
	Name    string `json:"name"`
	Index   int    `json:"index"`
	Ifindex int    `json:"ifindex"`
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

// runDir is natkit's folder of what ends with the next boot.
func runDir() string { return cmp.Or(os.Getenv("NATKIT_RUN_DIR"), "/run/natkit") }

// place of the files of a namespace's instance.
func instancePath(inode uint64, suffix string) string {
	return filepath.Join(runDir(), "nat", strconv.FormatUint(inode, 10)+suffix)
}

// ErrDown says that nothing is up in the namespace.
var ErrDown = errors.New("no NAT of natkit's is up here: `natkit up -f FILE` brings one up")

func readRecord(inode uint64) (*record, error) {
	data, err := os.ReadFile(instancePath(inode, ".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrDown
	}
	if err != nil {
		return nil, err
	}
	rec := &record{}
	if err := json.Unmarshal(data, rec); err != nil {
		return nil, fmt.Errorf("%s: %w", instancePath(inode, ".json"), err)
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
		return err
	}
	return os.Rename(draft, path)
}
