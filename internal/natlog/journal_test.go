// SPDX-License-Identifier: Apache-2.0

package natlog

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"testing"
)

var testRecords = []Record{
	{Event: Tick, Time: 1764000000_000000},
	{Event: Created, Time: 1764000000_000500, Since: 1764000000_000500, Translation: Translation{Kind: Mapping, Source: Kernel, Protocol: 6,
		Internal: netip.MustParseAddrPort("10.0.0.1:1000"), External: netip.MustParseAddrPort("198.51.100.1:5000")}},
	{Event: Ended, Time: 1764000001_000000, Since: 1, Translation: Translation{Kind: Session, Source: Engine, Protocol: 17, Zone: 7, VLAN: 12,
		Internal: netip.MustParseAddrPort("[2001:db8::1]:1000"), External: netip.MustParseAddrPort("[2001:db8:1::1]:5000"), Destination: netip.MustParseAddrPort("[2001:db8:2::1]:443")}},
	{Event: Alive, Time: 1764000000_000000, Translation: Translation{Kind: Block, Source: Engine, LastPort: 65535,
		External: netip.MustParseAddrPort("198.51.100.1:65024"), Subscriber: "line 7"}},
	{Event: Gap, Time: 1764000000_000000, Since: 1763999000_000000, Note: "natkit log was not running"},
}

func TestFrames(t *testing.T) {
	b := AppendFrame(AppendFrame(nil, testRecords[:2]), testRecords[2:])
	got, rest, err := NextFrame(b, nil)
	if err != nil || !slices.Equal(got, testRecords[:2]) {
		t.Fatalf("%+v %v", got, err)
	}
	if got, rest, err = NextFrame(rest, got); err != nil || len(rest) != 0 || !slices.Equal(got, testRecords) {
		t.Fatalf("%+v %v", got, err)
	}
}

// A byte that is changed costs its frame and nothing else.
func TestDamagedFrame(t *testing.T) {
	one := AppendFrame(nil, testRecords[:2])
	whole := AppendFrame(bytes.Clone(one), testRecords[2:])
	for i := range one {
		bad := bytes.Clone(whole)
		bad[i] ^= 0x20
		got, rest, err := NextFrame(bad, nil)
		if !errors.Is(err, ErrDamagedFrame) || len(got) != 0 {
			t.Fatalf("byte %d: %+v %v", i, got, err)
		}
		if got, _, err = NextFrame(rest, nil); err != nil || !slices.Equal(got, testRecords[2:]) {
			t.Fatalf("byte %d: behind it %+v %v", i, got, err)
		}
	}
}

// The pool that a note is about can be told from the rest of it.
func TestPool(t *testing.T) {
	for _, c := range []struct {
		event      Event
		note, pool string
	}{
		{Created, OfPool("cgn", ""), "cgn"},
		{Exhausted, OfPool("cgn", "no port left"), "cgn"},
		{Exhausted, "no port left", ""},
		{Exhausted, NearlyOfPool(812, 1000, "ports", "cgn"), "cgn"},
		{Exhausted, NearlyOfPool(8, 10, "ports in blocks", "203.0.113.1"), "203.0.113.1"},
		{Quota, OfPool("in_use-1", "port-limit: 4 packets refused until then"), "in_use-1"},
		{Quota, "rate-limit: 1 packet refused until then", ""},
		{Quota, Nearly(90, 100, "port blocks"), ""},
	} {
		r := Record{Event: c.event, Note: c.note}
		if got := r.Pool(); got != c.pool {
			t.Errorf("%q: pool %q, want %q", c.note, got, c.pool)
		}
	}
}

func TestWords(t *testing.T) {
	for e := Tick; e <= Gap; e++ {
		if got, ok := ParseEvent(e.String()); !ok || got != e {
			t.Errorf("%v", e)
		}
	}
	for p := range 256 {
		if got, ok := ParseProtocol(ProtocolName(uint8(p))); !ok || int(got) != p {
			t.Errorf("protocol %d: %d", p, got)
		}
	}
}

// Reading ends, whatever is read, and what was read can be written and read again.
func FuzzNextFrame(f *testing.F) {
	f.Add(AppendFrame(AppendFrame(nil, testRecords[:2]), testRecords[2:]))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			records, rest, err := NextFrame(b, nil)
			if len(rest) >= len(b) {
				t.Fatal("it does not go on")
			}
			if err == nil {
				again, _, err := NextFrame(AppendFrame(nil, records), nil)
				if err != nil || !slices.Equal(again, records) {
					t.Fatalf("%+v, read again %+v: %v", records, again, err)
				}
			}
			b = rest
		}
	})
}
