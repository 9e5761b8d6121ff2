// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// What Linux 6.5 and older have instead of links goes with an engine without pins, too, whichever
// namespace that is closed in; and one that somebody has taken off already is no error.
func TestFilterWithoutPins(t *testing.T) {
	ktest.Root(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	in := func(fn func() error) {
		t.Helper()
		if err := ns.Do(fn); err != nil {
			t.Fatal(err)
		}
	}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	var l netlink.Link
	in(func() (err error) {
		err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d"}, PeerName: "peer"})
		if err == nil {
			l, err = netlink.LinkByName("d")
		}
		return err
	})
	index := l.Attrs().Index
	count := func() (n int) {
		in(func() error {
			in, err1 := countFilters(index, netlink.HANDLE_MIN_INGRESS)
			out, err2 := countFilters(index, netlink.HANDLE_MIN_EGRESS)
			n = in + out
			return errors.Join(err1, err2)
		})
		return n
	}
	for _, off := range []func() error{
		func() error { return nil },
		func() error { return DetachFilter(index) },
		func() error { return netlink.LinkDel(l) },
	} {
		e := &Engine{}
		in(func() error {
			_, err1 := e.attachFilter(index, HookTC, pass)
			_, err2 := e.attachFilter(index, HookEgress, pass)
			return errors.Join(err1, err2)
		})
		if n := count(); n != 2 {
			t.Fatalf("%d filters, want 2", n)
		}
		in(off)
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		there := false
		in(func() error { _, err := netlink.LinkByIndex(index); there = err == nil; return nil })
		if there && count() != 0 {
			t.Errorf("%d filters after Close", count())
		}
	}
	if err := pass.Close(); err != nil {
		t.Error(err)
	}
}
