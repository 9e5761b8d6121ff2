// SPDX-License-Identifier: Apache-2.0

package control

import (
	"maps"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// pinned are the programs of the gateway's engine, by name.
func (b *testbed) pinned() map[string]ebpf.ProgramID {
	b.t.Helper()
	pins, err := filepath.Glob(filepath.Join(pinsOf(b.gateway.Inode()), "programs", "*"))
	if err != nil || len(pins) == 0 {
		b.t.Fatalf("programs %q, %v", pins, err)
	}
	out := map[string]ebpf.ProgramID{}
	for _, pin := range pins {
		p, err := ebpf.LoadPinnedProgram(pin, nil)
		if err != nil {
			b.t.Fatal(err)
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			b.t.Fatal(err)
		}
		out[filepath.Base(pin)], _ = info.ID()
	}
	return out
}

// An apply that replaces another natkit's programs and then fails leaves those programs.
func TestFailedUpgrade(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.rewrite(func(rec *record) { rec.Make = "another" })
	before := b.pinned()
	// Somebody else has the XDP of an interface.
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	var other link.Link
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		other, err = link.AttachXDP(link.XDPOptions{Program: pass, Interface: l.Attrs().Index})
		return err
	})
	defer other.Close()
	o := b.options()
	o.Attach = AttachXDP
	if _, err := Apply(t.Context(), b.parse(moreRules), moreRules, o); err == nil {
		t.Fatal("no error though XDP is somebody else's")
	}
	if after := b.pinned(); !maps.Equal(after, before) {
		t.Errorf("programs were %v and are %v", before, after)
	}
	if rec, err := readRecord(b.gateway.Inode()); err != nil || rec.Make != "another" {
		t.Errorf("record %+v, %v", rec, err)
	}
	b.ping(b.client, "198.51.100.9")
	o.Attach = AttachTC
	p, err := Apply(t.Context(), b.parse(moreRules), moreRules, o)
	if err != nil || !p.Upgrade {
		t.Fatalf("plan %+v, %v", p, err)
	}
	if after := b.pinned(); maps.Equal(after, before) {
		t.Error("programs were not replaced")
	}
	b.pingAs(b.client, "198.51.100.9", 0x61)
	if status, err := ReadStatus(b.gateway); err != nil || len(status.Problems) > 0 {
		t.Errorf("status %+v, %v", status, err)
	}
}
