// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// The kernel changes other settings with forwarding: what was set before up is so after down, and
// what somebody has set since stays.
func TestForwardingKept(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	names := []string{settingForward, "net.ipv4.conf.in.forwarding", "net.ipv4.conf.out.forwarding", "net.ipv4.conf.default.forwarding", settingRedirects}
	write := func(values ...string) {
		b.in(b.gateway, func() (err error) {
			for i, v := range values {
				err = errors.Join(err, writeSetting(names[i], v))
			}
			return err
		})
	}
	read := func() (values []string) {
		b.in(b.gateway, func() error {
			for _, name := range names {
				v, err := readSetting(name)
				if err != nil {
					return err
				}
				values = append(values, v)
			}
			return nil
		})
		return values
	}
	for _, before := range [][]string{{"0", "1", "0", "1", "0"}, {"0", "0", "0", "0", "1"}} {
		write(before...)
		b.up(baseRules, o)
		if up := read(); up[0] != "1" || up[2] != "1" {
			t.Fatalf("up: %q of %q", up, names)
		}
		if kept, err := Down(b.gateway); err != nil || kept != nil {
			t.Fatalf("down: kept %q, %v", kept, err)
		}
		if after := read(); !slices.Equal(after, before) {
			t.Errorf("after down %q of %q, before up %q", after, names, before)
		}
	}
	write("0", "1", "1", "0", "0")
	b.up(baseRules, o)
	b.in(b.gateway, func() error { return writeSetting(names[1], "0") })
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	if after := read(); !slices.Equal(after, []string{"0", "0", "1", "0", "0"}) {
		t.Errorf("after down %q of %q, though somebody had set the second to 0 since", after, names)
	}
}

// A down that is killed just after it has put forwarding back leaves to the next one what the kernel
// has changed with it.
func TestForwardingKeptAfterKill(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	redirects := func() (value string) {
		b.in(b.gateway, func() (err error) {
			value, err = readSetting(settingRedirects)
			return err
		})
		return value
	}
	b.in(b.gateway, func() error { return writeSetting(settingRedirects, "0") })
	b.up(baseRules, o)
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	changes, err := standing(in.j.Path())
	if err != nil {
		t.Fatal(err)
	}
	_, forwarding := splitForwarding(changes)
	b.in(b.gateway, func() error {
		for _, c := range forwarding {
			c.along(in.j)
			if err := writeSetting(c.Setting, c.Old); err != nil {
				return err
			}
		}
		return nil
	})
	if now := redirects(); len(forwarding) != 1 || now != "1" {
		t.Fatalf("%s is %s after %v was put back", settingRedirects, now, forwarding)
	}
	if err := in.release(); err != nil {
		t.Fatal(err)
	}
	if kept, err := Down(b.gateway); err != nil || kept != nil {
		t.Fatalf("down: kept %q, %v", kept, err)
	}
	if now := redirects(); now != "0" {
		t.Errorf("after down %s is %s, before up 0", settingRedirects, now)
	}
}

// An apply of the same rules leaves the ports reserved that they give away, and those that
// somebody has reserved since.
func TestPortsStayReserved(t *testing.T) {
	b := newTestbed(t)
	const text = `
inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
pools:
  own: {addresses: [198.51.100.1], ports: 40000-40999}
rules:
  - snat: 10.0.0.0/24
    to: own
`
	setting := func(value string) (now string) {
		b.in(b.gateway, func() (err error) {
			if value != "" {
				err = writeSetting(settingReservedPorts, value)
			}
			if err == nil {
				now, err = readSetting(settingReservedPorts)
			}
			return err
		})
		return now
	}
	apply := func(text, want string) {
		t.Helper()
		if _, err := Apply(t.Context(), b.parse(text), text, b.options()); err != nil {
			t.Fatal(err)
		}
		if now := setting(""); now != want {
			t.Errorf("reserved %q, want %q", now, want)
		}
	}
	setting("8080")
	b.up(text, b.options())
	apply(text, "8080,40000-40999")
	setting("8080,40000-40999,50000")
	apply(text, "8080,40000-40999,50000")
	apply("inside: [in]\noutside: [out]\nlimits: {sessions: 4096, sources: 256}\nrules:\n  - map: 10.0.0.77 <-> 198.51.100.77\n", "8080,50000")
	apply(text, "8080,40000-40999,50000")
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
}

// Whatever has become of its interface, what was changed is put back as far as it is there.
func TestDownWithoutInterface(t *testing.T) {
	const onearmed = "inside: [in]\noutside: [in]\nlimits: {sessions: 4096, sources: 256}\nrules:\n  - masquerade: 10.0.0.0/24\n"
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			o := b.options()
			o.Engine = engine
			before := b.state()
			b.up(baseRules, o)
			b.in(b.gateway, func() error {
				l, err := netlink.LinkByName("out")
				if err != nil {
					return err
				}
				// Linux 6.1 and older rename no interface that is up, and this forgets the neighbours.
				if err = netlink.LinkSetName(l, "wan"); err != nil {
					err = errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "wan"))
				}
				return err
			})
			if kept, err := Down(b.gateway); err != nil || kept != nil {
				t.Fatalf("down: kept %q, %v", kept, err)
			}
			if after := strings.ReplaceAll(b.state(), "wan", "out"); after != before {
				t.Errorf("after down:\n%s\nbefore up:\n%s", after, before)
			}
			b.up(onearmed, o)
			b.in(b.gateway, func() error {
				l, err := netlink.LinkByName("in")
				return errors.Join(err, netlink.LinkDel(l))
			})
			if kept, err := Down(b.gateway); err != nil || kept != nil {
				t.Fatalf("down: kept %q, %v", kept, err)
			}
		})
	}
}

// What an up puts back that a killed one had changed is not in the journal any more.
func TestPutBackOnce(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	b.up(baseRules, o)
	path := instancePath(b.gateway.Inode(), ".journal")
	before, err := standing(path)
	if err != nil || len(before) == 0 {
		t.Fatalf("changes %v, %v", before, err)
	}
	b.rewrite(func(rec *record) { rec.Whole = false }) // as a killed down leaves it
	b.up(baseRules, o)
	if after, err := standing(path); err != nil || !slices.Equal(after, before) {
		t.Errorf("changes %v, %v, want %v", after, err, before)
	}
}
