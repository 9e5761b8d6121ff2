// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

var smallSize = Size{Sessions: 1000, Mappings: 1000, Sources: 100, FilterEntries: 100}

// testDir is a place for an engine of this test alone.
func testDir(t *testing.T) string {
	t.Helper()
	ktest.Root(t)
	own := t.TempDir()
	lock, err := LockRoot(own, unix.LOCK_SH)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(lock.Name(), ktest.Name(t))
	t.Cleanup(func() {
		if err := errors.Join(Unload(dir), UnlockRoot(own, lock)); err != nil {
			t.Errorf("unload: %v", err)
		}
	})
	return dir
}

// An engine is there for whoever opens its folder, and gone without a trace after Unload.
func TestCreateOpenUnload(t *testing.T) {
	dir := testDir(t)
	if _, err := Open(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("before: %v, want %v", err, os.ErrNotExist)
	}
	e, err := Create(dir, smallSize)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Create(dir, smallSize); !errors.Is(err, ErrExists) {
		t.Errorf("second engine: %v, want %v", err, ErrExists)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	e, err = Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range ofEvery {
		if e.programs[name] == nil {
			t.Errorf("program %s is not there", name)
		}
	}
	if got := e.Size(); got != smallSize {
		t.Errorf("room for %+v, want %+v", got, smallSize)
	}
	// GC runs with nobody looking.
	var before, after abiNatControl
	if err := e.maps["control"].Lookup(uint32(0), &before); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 5*time.Second, "garbage collection to run", func() bool {
		return e.maps["control"].Lookup(uint32(0), &after) == nil && after.GcRan != before.GcRan
	})
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if err := Unload(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after: %v", err)
	}
}

// Whatever pin somebody has removed, the engine is reported as damaged, and can be taken down.
func TestOpenTellsDamage(t *testing.T) {
	dir := testDir(t)
	e, err := Create(dir, smallSize)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	var pins []string
	for _, sub := range []string{mapsDir, programsDir} {
		some, err := filepath.Glob(filepath.Join(dir, sub, "*"))
		if err != nil {
			t.Fatal(err)
		}
		pins = append(pins, some...)
	}
	if len(pins) < 20 {
		t.Fatalf("pins %q", pins)
	}
	for _, pin := range pins {
		if err := os.Rename(pin, dir+"/kept"); err != nil {
			t.Fatal(err)
		}
		e, err := Open(dir)
		if filepath.Base(filepath.Dir(pin)) == programsDir { // missed when it is needed: an upgrade has others
			if err != nil {
				t.Fatal(err)
			}
			_, err = e.run(filepath.Base(pin), &ebpf.RunOptions{Data: make([]byte, 64)})
			e.Close()
		}
		var damaged *DamagedError // to which control adds what to type
		if !errors.As(err, &damaged) || errors.Is(err, os.ErrNotExist) || damaged.Pin != pin {
			t.Errorf("without %s: %v", pin, err)
		}
		if err := os.Rename(dir+"/kept", pin); err != nil {
			t.Fatal(err)
		}
	}
	again, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// Maps of another version are refused, and can be taken down all the same.
func TestOpenRefusesOtherABI(t *testing.T) {
	dir := testDir(t)
	e, err := Create(dir, smallSize)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := e.maps["control"].Put(uint32(0), &abiNatControl{Abi: abi + 1}); err != nil {
		t.Fatal(err)
	}
	var other *ABIError
	if _, err := Open(dir); !errors.As(err, &other) || other.Have != abi+1 {
		t.Errorf("got %v, want an *ABIError", err)
	}
}

// That of an engine whose control was another struct is reported as well.
func TestOpenTellsOldABI(t *testing.T) {
	dir := testDir(t)
	if err := os.MkdirAll(filepath.Join(dir, mapsDir), 0o700); err != nil {
		t.Fatal(err)
	}
	control, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	if err := control.Put(uint32(0), &[6]uint32{3, 7}); err != nil {
		t.Fatal(err)
	}
	if err := control.Pin(filepath.Join(dir, mapsDir, "control")); err != nil {
		t.Fatal(err)
	}
	var other *ABIError
	if _, err := Open(dir); !errors.As(err, &other) || other.Have != 3 {
		t.Errorf("got %v, want an *ABIError that has 3", err)
	}
}

// The programs of hooks are loaded and pinned when an interface needs them, and upgraded from then on.
func TestProgramsOnDemand(t *testing.T) {
	dir := testDir(t)
	e, err := Create(dir, smallSize)
	if err != nil {
		t.Fatal(err)
	}
	if len(e.programs) != len(ofEvery) {
		t.Errorf("an engine without interfaces has programs %q", slices.Sorted(maps.Keys(e.programs)))
	}
	undo, err := e.need([]string{tcBoth, xdpBoth})
	if err != nil {
		t.Fatal(err)
	}
	if err := undo(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, programsDir, tcBoth)); !errors.Is(err, os.ErrNotExist) || len(e.programs) != len(ofEvery) {
		t.Errorf("taken back: %v, programs %q", err, slices.Sorted(maps.Keys(e.programs)))
	}
	if _, err := e.need([]string{tcBoth, tcBoth}); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if e, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	before := e.programs[tcBoth]
	if before == nil {
		t.Fatal("program tc_both is not pinned")
	}
	if e.programs[leaseAsk] != nil {
		t.Error("an engine that nobody asks for explicit mappings has lease_ask")
	}
	if _, err := e.Upgrade(); err != nil {
		t.Fatal(err)
	}
	if after := e.programs[tcBoth]; after == nil || after == before || len(e.programs) != len(ofEvery)+1 {
		t.Errorf("after the upgrade tc_both is %v, of programs %q", after, slices.Sorted(maps.Keys(e.programs)))
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// No memory for the timer at one moment does not refuse the engine; for long, and any other error, does.
func TestRoomForTimer(t *testing.T) {
	const none = ^uint32(unix.ENOMEM) + 1
	other := errors.New("other")
	for name, c := range map[string]struct {
		codes []uint32 // then 0
		err   error
		code  uint32
		runs  int
	}{
		"at once":         {nil, nil, 0, 1},
		"a moment later":  {[]uint32{none, none}, nil, 0, 3},
		"another verdict": {[]uint32{none, 7, none}, nil, 7, 2},
		"an error":        {[]uint32{none}, other, 0, 1},
		"never":           {slices.Repeat([]uint32{none}, 1000), nil, none, 20},
	} {
		runs := 0
		code, err := roomForTimer(func() (uint32, error) {
			runs++
			if c.err != nil {
				return 0, c.err
			}
			if runs <= len(c.codes) {
				return c.codes[runs-1], nil
			}
			return 0, nil
		})
		if code != c.code || !errors.Is(err, c.err) || runs != c.runs {
			t.Errorf("%s: %d, %v after %d runs", name, int32(code), err, runs)
		}
	}
}
