// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// setClock sets in the programs of a collection how jiffies and CLOCK_MONOTONIC belong
// together. Reading jiffies is one load; asking for the time is a call, and on some
// processors a call alone takes as long as a hash look-up.
//
// Jiffies advance by that clock and stop with it (suspend), so the constants hold for
// as long as the kernel runs.
func setClock(spec *ebpf.CollectionSpec) error {
	jiffyVar, offsetVar := spec.Variables["clock_jiffy_ns"], spec.Variables["clock_offset_ns"]
	if jiffyVar == nil || offsetVar == nil {
		return nil // the object does not look at the clock so
	}
	jiffy, offset, err := readClock()
	if err != nil {
		return fmt.Errorf("compare jiffies with the clock: %w", err)
	}
	if err := jiffyVar.Set(jiffy); err != nil {
		return err
	}
	return offsetVar.Set(offset)
}

// readClock returns the length of a jiffy, which is the resolution of the coarse clocks,
// and the difference between CLOCK_MONOTONIC and the jiffies since boot, in nanoseconds.
func readClock() (jiffyNs, offsetNs uint64, err error) {
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return 0, 0, err
	}
	jiffyNs = uint64(resolution.Nano())
	readings, err := ebpf.NewMap(&ebpf.MapSpec{Name: "clock", Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	if err != nil {
		return 0, 0, err
	}
	defer readings.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "clock", Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, readings.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.FnJiffies64.Call(),
		asm.StoreMem(asm.R6, 0, asm.R0, asm.DWord),
		asm.FnKtimeGetCoarseNs.Call(), // updated with the jiffies
		asm.StoreMem(asm.R6, 8, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"),
		asm.Return(),
	}})
	if err != nil {
		return 0, 0, err
	}
	defer program.Close()
	// A tick between the two makes the difference a jiffy too large or, as the kernel counts the
	// jiffy before it updates the clock, too small.
	var offsets [5]uint64
	for i := range offsets {
		if _, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 14)}); err != nil {
			return 0, 0, err
		}
		var at struct{ Jiffies, Ns uint64 }
		if err := readings.Lookup(uint32(0), &at); err != nil {
			return 0, 0, err
		}
		offsets[i] = at.Ns - at.Jiffies*jiffyNs
	}
	slices.Sort(offsets[:])
	return jiffyNs, offsets[len(offsets)/2], nil
}
