// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
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

// makeOther gives the data structures of the gateway's engine another version, as those have that
// another natkit made.
func (b *testbed) makeOther() {
	b.t.Helper()
	control, err := ebpf.LoadPinnedMap(filepath.Join(pinsOf(b.gateway.Inode()), "maps", "control"), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer control.Close()
	c, err := control.LookupBytes(uint32(0))
	if err != nil {
		b.t.Fatal(err)
	}
	c[0]++ // its first word, on a processor that is little-endian
	if err := control.Put(uint32(0), c); err != nil {
		b.t.Fatal(err)
	}
}

// An engine whose data structures are another natkit's goes on with packets. Everything that would
// read or change it says so, with what replaces it, as an error that trying again does not help.
func TestOtherABI(t *testing.T) {
	b := newTestbed(t)
	dir := pinsOf(b.gateway.Inode())
	b.up(baseRules, b.options())
	if err := CheckTakeover(); err != nil && strings.Contains(err.Error(), dir+" ") {
		t.Errorf("an engine of this natkit: %v", err)
	}
	b.makeOther()
	file := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(file, []byte(baseRules), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := func() error { return Serve(t.Context(), ServeOptions{Options: b.options(), File: file}) }
	refuses := func(what string, err error, says string) {
		t.Helper()
		if err == nil || !errors.As(err, new(*ReplaceError)) || !strings.Contains(err.Error(), dir+" goes on as it is") || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q in a *ReplaceError", what, err, says)
		}
	}
	down := "`natkit --netns " + b.name + " down`, then "
	refuses("serve", serve(), down+"start natkit serve again; its sessions end")
	_, err := ReadStatus(b.gateway)
	refuses("status", err, down+"`natkit --netns "+b.name+" up -f ")
	_, err = Apply(t.Context(), b.parse(moreRules), moreRules, b.options())
	refuses("apply", err, down)
	_, err = ReadFacts(b.gateway, nil, true)
	refuses("facts", err, down)
	refuses("check", CheckTakeover(), down)
	// The earlier natkit serve still runs: down would be refused.
	hold, err := holdServing(b.gateway.Inode())
	if err != nil {
		t.Fatal(err)
	}
	if err := hold.say(ServeState{Process: 1, File: file}); err != nil {
		t.Fatal(err)
	}
	_, err = ReadStatus(b.gateway)
	refuses("status of one that is kept", err, "stop natkit serve (process 1), which keeps it, then "+down+"start natkit serve again")
	if err := hold.release(); err != nil {
		t.Fatal(err)
	}
	b.ping(b.client, "198.51.100.9")
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	if err := CheckTakeover(); err != nil && strings.Contains(err.Error(), dir+" ") {
		t.Errorf("after down: %v", err)
	}
	s := b.serve(baseRules, ServeOptions{Down: true})
	s.hears("up", "")
}

// What somebody else has to take down first, natkit serve does not wait for.
func TestServeCannotReplace(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	b.up(baseRules, o)
	o.Engine = EngineEBPF
	if err := Serve(t.Context(), ServeOptions{Options: o, File: "/etc/nat.yaml"}); !errors.As(err, new(*ReplaceError)) {
		t.Errorf("beside engine nft: %v", err)
	}
}

// The draft of a record, of who was killed as it wrote it, stays with nobody.
func TestKilledDraft(t *testing.T) {
	b := newTestbed(t)
	draft := instancePath(b.gateway.Inode(), ".json.draft")
	for name, remove := range map[string]func() error{
		"down":      func() error { _, err := Down(b.gateway); return err },
		"accel off": func() error { _, err := AccelOff(b.gateway); return err },
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(draft), 0o700), os.WriteFile(draft, []byte("{"), 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := remove(); !errors.Is(err, ErrDown) && !errors.Is(err, ErrAccelOff) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(draft); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s leaves %s: %v", name, draft, err)
		}
	}
}
