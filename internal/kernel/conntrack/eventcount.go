// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// eventCounter counts events in the kernel, before they would get into a socket's
// buffer, where they never get: nobody has to read them, and none is lost. To read
// an event takes some ten microseconds, to count it so a tenth of one.
type eventCounter struct {
	counts  *ebpf.Map // of eventBegan and eventEnded
	program *ebpf.Program
	last    [2]uint64
}

const (
	eventBegan = 0
	eventEnded = 1
)

// newEventCounter loads the counter. Where it can't, events have to be read.
func newEventCounter() (*eventCounter, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Name: "ct_events", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2})
	if err != nil {
		return nil, fmt.Errorf("count conntrack events: %w", err)
	}
	const header, key = -8, -12 // where on the program's stack
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "ct_events", Type: ebpf.SocketFilter, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		// The first half of the message's header: length, type, flags. An event is a message by itself.
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, header),
		asm.Mov.Imm(asm.R4, 8),
		asm.FnSkbLoadBytes.Call(),
		asm.JNE.Imm(asm.R0, 0, "out"),
		asm.StoreImm(asm.RFP, key, eventEnded, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, header+4, asm.Half),
		asm.JEq.Imm(asm.R1, msgDelete, "count"),
		asm.JNE.Imm(asm.R1, msgNew, "out"),
		asm.LoadMem(asm.R1, asm.RFP, header+6, asm.Half),
		asm.And.Imm(asm.R1, unix.NLM_F_CREATE),
		asm.JEq.Imm(asm.R1, 0, "out"),
		asm.StoreImm(asm.RFP, key, eventBegan, asm.Word),
		asm.LoadMapPtr(asm.R1, counts.FD()).WithSymbol("count"),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, key),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), // so many bytes of it go into the buffer
		asm.Return(),
	}})
	if err != nil {
		counts.Close()
		return nil, fmt.Errorf("count conntrack events: %w", err)
	}
	return &eventCounter{counts: counts, program: program}, nil
}

func (c *eventCounter) close() {
	c.program.Close()
	c.counts.Close()
}

// attach makes a socket that is in no group yet a member of those of entries that begin and
// end, with the counter in front of it.
func (c *eventCounter) attach(s *socket) error {
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, c.program.FD()); err != nil {
		return fmt.Errorf("count conntrack events: %w", err)
	}
	for _, group := range []int{unix.NFNLGRP_CONNTRACK_NEW, unix.NFNLGRP_CONNTRACK_DESTROY} {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return explain(fmt.Errorf("join the group of conntrack events: %w", err))
		}
	}
	return nil
}

// read is how many entries began and ended since the last read.
func (c *eventCounter) read() (began, ended uint64, err error) {
	var now [2]uint64
	for i := range now {
		if err := c.counts.Lookup(uint32(i), &now[i]); err != nil {
			return 0, 0, fmt.Errorf("count conntrack events: %w", err)
		}
	}
	began, ended = now[eventBegan]-c.last[eventBegan], now[eventEnded]-c.last[eventEnded]
	c.last = now
	return began, ended, nil
}

// openCounted opens a socket whose events are counted in the kernel. The error is
// errNoCounter where that is not possible.
func openCounted(o *WatchOptions, open func(groups uint32) (*socket, error)) (*socket, *eventCounter, error) {
	if !o.NoStates || o.Filter != (Filter{}) { // these ask what is in an event
		return nil, nil, errNoCounter
	}
	c, err := newEventCounter()
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errNoCounter, err)
	}
	s, err := open(0)
	if err != nil {
		c.close()
		return nil, nil, err
	}
	if err := c.attach(s); err != nil {
		s.close()
		c.close()
		return nil, nil, err
	}
	return s, c, nil
}

var errNoCounter = errors.New("events have to be read")
