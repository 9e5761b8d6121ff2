// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// A packet's session is found by the packet's ends, in both directions, whatever the protocol.
func TestFindSessions(t *testing.T) {
	g := aGateway(t)
	for _, send := range []func(*testing.T, *gateway){testOutbound, testForward, testHairpin} {
		g.reset(t)
		send(t, g)
		allFound(t, engineOn(t, g.maps))
	}
}

// allFound wants each session of an engine to be found by the packets of both its directions, and none
// by others.
func allFound(t *testing.T, e *Engine) {
	t.Helper()
	f, err := e.FindSessions()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const nobody = 61001
	n := 0
	err = e.Sessions(func(s *rulefile.Session) bool {
		n++
		or := func(a, b snapshot.Endpoint) netip.AddrPort {
			if a.IsValid() {
				return a.AddrPort
			}
			return b.AddrPort
		}
		from, to := s.Source.AddrPort, s.Destination.AddrPort
		for _, ends := range [][2]netip.AddrPort{{from, to}, {or(s.DestinationAfter, s.Destination), or(s.SourceAfter, s.Source)}} {
			if found, err := f.Of(s.Protocol, ends[0], ends[1]); err != nil || !slices.ContainsFunc(found, func(o rulefile.Session) bool { return sameSession(&o, s) }) {
				t.Errorf("%s %v -> %v is of %+v, found are %+v (%v)", s.Protocol, ends[0], ends[1], s, found, err)
			}
		}
		for _, ends := range [][2]netip.AddrPort{{netip.AddrPortFrom(from.Addr(), nobody), to}, {to, netip.AddrPortFrom(from.Addr(), nobody)}} {
			if found, err := f.Of(s.Protocol, ends[0], ends[1]); err != nil || len(found) > 0 {
				t.Errorf("%s %v -> %v is of nobody, found are %+v (%v)", s.Protocol, ends[0], ends[1], found, err)
			}
		}
		return true
	})
	if err != nil || n == 0 {
		t.Fatalf("%d sessions: %v", n, err)
	}
}

// sameSession says whether two are the same but for what time changes.
func sameSession(a, b *rulefile.Session) bool {
	x, y := *a, *b
	for _, s := range []*rulefile.Session{&x, &y} {
		s.Age, s.Idle, s.Expires = 0, 0, 0
	}
	return x == y
}
