// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
)

// Make distinguishes the programs of this natkit from those of another: a hash of its objects.
func Make() string { return hashOf(_TcBytes, _XdpBytes, _GcBytes, _PortsBytes, _LeaseBytes) }

func hashOf(objects ...[]byte) string {
	h := sha256.New()
	for _, object := range objects {
		h.Write(object)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Upgrade puts this natkit's programs in place of those that a pinned engine runs, on
// the same maps: no session is lost, and each packet meets the old program or the new.
// Interfaces get them by the next Attach. On an error, and by undo, everything is as
// before. The calling thread may be in any namespace.
//
//  1. every program that it needs is loaded; a kernel that refuses one has changed nothing
//  2. the GC timer gets its new code
//  3. pins are replaced one by one, each by a rename
func (e *Engine) Upgrade() (undo func() error, err error) {
	fresh := &Engine{maps: maps.Clone(e.maps), m: e.m, common: e.common, programs: map[string]*ebpf.Program{}}
	names := append(slices.Collect(maps.Keys(e.programs)), ofEvery...)
	if err := fresh.load(e.Size(), names); err != nil {
		return nil, errors.Join(fmt.Errorf("upgrade NAT engine: %w", err), closePrograms(fresh.programs))
	}
	old := e.programs
	undo = func() error {
		err := closePrograms(e.programs)
		e.programs, e.before = old, nil
		return errors.Join(err, e.usePrograms())
	}
	e.programs, e.before = fresh.programs, old
	if err := e.usePrograms(); err != nil {
		return nil, errors.Join(fmt.Errorf("upgrade NAT engine: %w", err), undo())
	}
	return undo, nil
}

// usePrograms makes the programs the ones that expire sessions and that are pinned.
func (e *Engine) usePrograms() error {
	draft := e.dir + draftSuffix
	if err := removePins(draft); err != nil {
		return err
	}
	if err := e.StartGC(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(draft, programsDir), 0o700); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(e.programs)) {
		made, pin := filepath.Join(draft, programsDir, name), filepath.Join(e.dir, programsDir, name)
		if err := pinFresh(e.programs[name], made); err != nil {
			return errors.Join(fmt.Errorf("pin program %s: %w", name, err), removePins(draft))
		}
		if err := os.Rename(made, pin); err != nil {
			return errors.Join(fmt.Errorf("pin program %s: %w", name, err), removePins(draft))
		}
	}
	return removePins(draft)
}

// pinFresh pins a program at a path, whatever is where it was pinned before: the library
// would move that.
func pinFresh(p *ebpf.Program, path string) error {
	fresh, err := p.Clone()
	if err != nil {
		return err
	}
	return errors.Join(fresh.Pin(path), fresh.Close())
}

func closePrograms(programs map[string]*ebpf.Program) error {
	var errs []error
	for _, p := range programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// Generation counts the rule sets that the engine has had.
func (e *Engine) Generation() (uint32, error) {
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return 0, fmt.Errorf("read generation: %w", err)
	}
	return control.Generation, nil
}
