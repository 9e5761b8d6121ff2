// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Engine is one NAT engine: the maps and programs of one network namespace. It is
// not a process: what Create made works on when the program that made it has ended.
type Engine struct {
	dir      string               // of its pins; "" lives as long as it is open
	maps     map[string]*ebpf.Map // by name, as they are pinned; m and common are these
	m        tcMaps               // of an engine; the tc object has every map that user space uses
	common   commonMaps           // of an engine or an accelerator
	programs map[string]*ebpf.Program
	before   map[string]*ebpf.Program // replaced by Upgrade, until Close
	links    []io.Closer              // of an engine without pins
	zones    map[uint8]string         // NameZones
	leases   leaseIndex
}

// commonMaps are those of bpf/lib.
type commonMaps struct {
	Control     *ebpf.Map `ebpf:"control"`
	Links       *ebpf.Map `ebpf:"links"`
	LinkIndices *ebpf.Map `ebpf:"link_indices"`
	Transmit    *ebpf.Map `ebpf:"transmit"`
}

// assign sets the fields of bpf2go's structs of maps to those that there are.
func (e *Engine) assign(structs ...any) error {
	for _, s := range structs {
		if err := (&ebpf.Collection{Maps: maps.Clone(e.maps)}).Assign(s); err != nil {
			return err
		}
	}
	return nil
}

// Programs of the hooks, by name: hook and side.
const (
	xdpInside    = "xdp_inside"
	xdpOutside   = "xdp_outside"
	xdpBoth      = "xdp_both"
	xdpZone      = "xdp_zone"
	tcInside     = "tc_inside"
	tcOutside    = "tc_outside"
	tcBoth       = "tc_both"
	tcZone       = "tc_zone"
	tcInsideRaw  = "tc_inside_raw"
	tcOutsideRaw = "tc_outside_raw"
	tcBothRaw    = "tc_both_raw"
	tcZoneRaw    = "tc_zone_raw"
	gcStart      = "gc_start"
	gcStop       = "gc_stop"
	portsChange  = "ports_change"
	blocksAdopt  = "blocks_adopt"
	leaseAsk     = "lease_ask"
	blocksKeep   = "blocks_keep"
)

// ofEvery are the programs that every engine has. Those of hooks are loaded when an interface
// needs them (need), lease_ask by who answers requests (ReadyForLeases): the kernel checks each for
// a tenth of a second of a processor's time.
var ofEvery = []string{gcStart, gcStop, portsChange, blocksAdopt, blocksKeep}

// ABIError says that an instance was made by a natkit whose maps this one does not know.
type ABIError struct {
	Dir        string
	Have, Want uint32
}

func (e *ABIError) Error() string {
	return fmt.Sprintf("what is at %s goes on as it is, but has data structures of version %d, and this natkit works with version %d", e.Dir, e.Have, e.Want)
}

// CheckABI gives an *ABIError if what is pinned as dir is of another make.
func CheckABI(dir string) error {
	control, err := openControl(dir)
	if err != nil {
		return err
	}
	return control.Close()
}

// openControl opens the map that says of which make the instance pinned as dir is.
func openControl(dir string) (*ebpf.Map, error) {
	pin := filepath.Join(dir, mapsDir, tcMapControl)
	control, err := ebpf.LoadPinnedMap(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, &DamagedError{pin}
	}
	if err != nil {
		return nil, fmt.Errorf("open NAT engine: %w", err)
	}
	// The first word has the same meaning in every version, what comes behind it not.
	c, err := control.LookupBytes(uint32(0))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open NAT engine: %w", err), control.Close())
	}
	if have := binary.NativeEndian.Uint32(c); have != abi {
		return nil, errors.Join(&ABIError{Dir: dir, Have: have, Want: abi}, control.Close())
	}
	return control, nil
}

// ErrExists says that the namespace has an engine already.
var ErrExists = errors.New("an engine is up already: `natkit apply` changes its rules, `natkit down` removes it")

// Create makes an engine of that size, with no rules, and starts its GC. It is
// pinned as dir, whole or not at all: everything is pinned beside first and then
// renamed. Nothing is attached yet.
func Create(dir string, size Size) (*Engine, error) {
	if _, err := os.Stat(dir); err == nil {
		return nil, ErrExists
	}
	e, err := New(size)
	if err != nil {
		return nil, err
	}
	e.dir = dir
	if err := e.pin(); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// New is Create without pins: the engine, and what it is attached to, ends with Close
// or with the process.
func New(size Size) (_ *Engine, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	e := &Engine{maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make NAT engine: %w", err), fewFiles(), e.Close())
		}
	}()
	if err := e.load(size, ofEvery); err != nil {
		return nil, err
	}
	if err := e.assign(&e.common, &e.m); err != nil {
		return nil, err
	}
	if err := putControl(&e.m, size); err != nil {
		return nil, err
	}
	return e, e.StartGC()
}

// fewFiles is an error if the process may open fewer files than an engine has maps and
// programs: the kernel's refusal is taken for all kinds of things then.
func fewFiles() error {
	const enough = 256
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur >= enough {
		return err
	}
	return fmt.Errorf("this process may open %d files only (RLIMIT_NOFILE, `ulimit -n`), and needs up to %d", limit.Cur, enough)
}

// putControl writes what holds for the life of the maps, which are as large as they are to
// be. It is done before the first packet comes.
func putControl(m *tcMaps, size Size) error {
	zones := uint32(0)
	if size.Zones {
		zones = 1
	}
	c := abiNatControl{
		Abi:             abi,
		Seed:            [2]uint64{rand.Uint64(), rand.Uint64()},
		FlowMask:        m.FlowTable.MaxEntries() - 1,
		MappingMask:     m.MappingTable.MaxEntries() - 1,
		SessionsMax:     uint32(size.Sessions),
		MappingsMax:     uint32(size.Mappings),
		SubscriberHosts: hostBits(size.SubscriberPrefix),
		Zones:           zones,
	}
	return m.Control.Put(uint32(0), &c)
}

const abi = uint32(abiNatLimitNAT_ABI)

// load puts the maps, unless they are there, and on them the programs into the kernel.
func (e *Engine) load(size Size, programs []string) error {
	fresh := len(e.maps) == 0
	for _, object := range objects {
		if !fresh && !slices.ContainsFunc(programs, func(name string) bool { return slices.Contains(object.programs, name) }) {
			continue
		}
		spec, err := object.load()
		if err != nil {
			return err
		}
		maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(programs, name) })
		resize(spec, size)
		if err := setClock(spec); err != nil {
			return err
		}
		if err := e.loadSpec(object.name, spec); err != nil {
			return err
		}
	}
	return nil
}

// loadSpec puts an object into the kernel, on those of its maps that are there already.
// Its programs are checked at the same time.
func (e *Engine) loadSpec(object string, spec *ebpf.CollectionSpec) error {
	known := map[string]*ebpf.Map{}
	for name, m := range spec.Maps {
		if strings.HasPrefix(name, ".") {
			continue // a section of global variables, which each program gets for itself
		}
		if e.maps[name] == nil {
			made, err := ebpf.NewMap(m)
			if err != nil {
				return fmt.Errorf("make map %s: %w", name, err)
			}
			e.maps[name] = made
		}
		known[name] = e.maps[name]
	}
	var loads errgroup.Group
	loads.SetLimit(runtime.GOMAXPROCS(0))
	var mutex sync.Mutex // of e.programs
	for name := range spec.Programs {
		one := spec.Copy()
		one.Programs = map[string]*ebpf.ProgramSpec{name: one.Programs[name]}
		loads.Go(func() error {
			coll, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{MapReplacements: known})
			if err != nil {
				return fmt.Errorf("load %s: %w", object, err)
			}
			defer coll.Close()
			mutex.Lock()
			defer mutex.Unlock()
			e.programs[name] = coll.DetachProgram(name)
			return nil
		})
	}
	return loads.Wait()
}

// pin writes the instance into the BPF file system: into a folder beside first,
// which a crash leaves without effect and the next Create removes.
func (e *Engine) pin() (err error) {
	draft := e.dir + draftSuffix
	if err := removePins(draft); err != nil {
		return err
	}
	for _, sub := range []string{mapsDir, programsDir, linksDir} {
		if err := os.MkdirAll(filepath.Join(draft, sub), 0o700); err != nil {
			return err
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removePins(draft))
		}
	}()
	for _, name := range slices.Sorted(maps.Keys(e.maps)) {
		if err := e.maps[name].Pin(filepath.Join(draft, mapsDir, name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.programs)) {
		if err := e.programs[name].Pin(filepath.Join(draft, programsDir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
	}
	return os.Rename(draft, e.dir)
}

// A bpffs refuses names with dots.
const draftSuffix = "-draft"

// Open opens the engine that is pinned as dir. The error is os.ErrNotExist when
// there is none, and an *ABIError when it is of another make.
func Open(dir string) (*Engine, error) {
	e, err := openPins(dir)
	if err != nil {
		return nil, err
	}
	for _, maps := range []any{tcMapSpecs{}, xdpMapSpecs{}, gcMapSpecs{}, portsMapSpecs{}, leaseMapSpecs{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(maps)) {
			name := field.Tag.Get("ebpf")
			if e.maps[name] == nil && !strings.HasPrefix(name, ".") {
				return nil, errors.Join(&DamagedError{filepath.Join(dir, mapsDir, name)}, e.Close())
			}
		}
	}
	if err := e.assign(&e.common, &e.m); err != nil {
		return nil, errors.Join(fmt.Errorf("open NAT engine: %w", err), e.Close())
	}
	return e, nil
}

// DamagedError says that an engine lacks a pin.
type DamagedError struct{ Pin string }

func (e *DamagedError) Error() string {
	return fmt.Sprintf("open NAT engine: somebody has removed its pin %s", e.Pin)
}

// need loads those of the programs of hooks that the engine does not have. On an error, and by
// undo, it has none of them.
func (e *Engine) need(names []string) (undo func() error, err error) {
	var missing []string
	for _, name := range names {
		if e.programs[name] == nil && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
	}
	undo = func() error {
		var errs []error
		for _, name := range missing {
			if p := e.programs[name]; p != nil {
				errs = append(errs, p.Unpin(), p.Close())
				delete(e.programs, name)
			}
		}
		return errors.Join(errs...)
	}
	if len(missing) == 0 {
		return undo, nil
	}
	if err := e.load(e.Size(), missing); err != nil {
		return nil, errors.Join(err, undo())
	}
	if e.dir == "" {
		return undo, nil
	}
	for _, name := range missing {
		if err := e.programs[name].Pin(filepath.Join(e.dir, programsDir, name)); err != nil {
			return nil, errors.Join(fmt.Errorf("pin program %s: %w", name, err), undo())
		}
	}
	return undo, nil
}

// run runs a program that every engine has.
func (e *Engine) run(name string, o *ebpf.RunOptions) (uint32, error) {
	p := e.programs[name]
	if p == nil {
		return 0, &DamagedError{filepath.Join(e.dir, programsDir, name)}
	}
	return p.Run(o)
}

// openPins opens what is pinned as dir.
func openPins(dir string) (_ *Engine, err error) {
	e := &Engine{dir: dir, maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if _, err := os.Stat(dir); err != nil {
		return nil, err
	}
	control, err := openControl(dir)
	if err != nil {
		return nil, err
	}
	e.maps[tcMapControl] = control
	err = eachPin(filepath.Join(dir, mapsDir), func(name, path string) error {
		if e.maps[name] != nil {
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		e.maps[name] = m
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open NAT engine: %w", err)
	}
	err = eachPin(filepath.Join(dir, programsDir), func(name, path string) error {
		p, err := ebpf.LoadPinnedProgram(path, nil)
		e.programs[name] = p
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open NAT engine: %w", err)
	}
	return e, nil
}

func eachPin(dir string, fn func(name, path string) error) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := fn(entry.Name(), filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Size is how much the engine can hold.
func (e *Engine) Size() Size {
	var c abiNatControl
	_ = e.m.Control.Lookup(uint32(0), &c) // cannot fail: Open has read it
	s := Size{
		Sessions: int(c.SessionsMax), Mappings: int(c.MappingsMax),
		Sources: int(e.m.Sources.MaxEntries()), FilterEntries: int(e.m.FilterEntries.MaxEntries()), SubscriberPrefix: prefixOf(c.SubscriberHosts),
		Zones: c.Zones != 0,
	}
	s.HoldDown = int(e.m.MappingQueue.MaxEntries()) - s.Mappings
	if s.FilterEntries == 1 { // a map has one entry at least
		s.FilterEntries = 0
	}
	return s
}

// SessionBytes is the kernel memory that a session takes when the engine is full: itself
// and the ways to it, its mapping and the way to that, and its places in the queues.
func (e *Engine) SessionBytes() (float64, error) {
	total := 0.0
	for _, m := range []*ebpf.Map{e.m.Flows, e.m.FlowDetails, e.m.FlowBits, e.m.FreeFlows, e.m.FlowTable, e.m.MappingTable, e.m.MappingQueue} {
		info, err := m.Info()
		if err != nil {
			return 0, fmt.Errorf("memory of map %s: %w", m, err)
		}
		bytes, known := info.Memlock()
		if !known {
			return 0, fmt.Errorf("memory of map %s: the kernel does not say", m)
		}
		total += float64(bytes)
	}
	const slot = 16 // struct nat_slot
	return total/float64(e.Size().Sessions) + slot, nil
}

// Close lets go of the engine. What is pinned works on.
func (e *Engine) Close() error {
	var errs []error
	for _, l := range e.links {
		errs = append(errs, l.Close())
	}
	for _, p := range e.programs {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	errs = append(errs, closePrograms(e.before))
	for _, m := range e.maps {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// RemoveDraft removes what a crash has left of pinning an engine as dir.
func RemoveDraft(dir string) error { return removePins(dir + draftSuffix) }

// Unload ends the engine that is pinned as dir: its links are detached, sessions
// are lost. It needs nothing of what is pinned to be of this version.
func Unload(dir string) error {
	return errors.Join(removePins(dir+draftSuffix), removePins(dir))
}
