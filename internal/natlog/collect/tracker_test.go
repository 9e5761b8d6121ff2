// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/natlog"
)

func tuple(src, dst string) conntrack.Tuple {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return conntrack.Tuple{Src: s.Addr(), Dst: d.Addr(), SrcPort: s.Port(), DstPort: d.Port()}
}

func flow(id uint32, proto uint8, orig, reply conntrack.Tuple) *conntrack.Flow {
	return &conntrack.Flow{ID: id, Family: unix.AF_INET, Proto: proto, Orig: orig, Reply: reply}
}

func TestTranslations(t *testing.T) {
	icmpOrig, icmpReply := tuple("10.0.0.9:79", "192.0.2.1:0"), tuple("192.0.2.1:80", "198.51.100.1:0")
	for _, c := range []struct {
		name string
		f    *conntrack.Flow
		want []string // internal external destination
	}{
		{"none", flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "10.0.0.9:1000")), nil},
		{"source", flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "198.51.100.1:5000")),
			[]string{"10.0.0.9:1000 198.51.100.1:5000 192.0.2.1:80"}},
		{"destination", flow(1, 17, tuple("192.0.2.1:777", "198.51.100.1:53"), tuple("10.0.0.3:5353", "192.0.2.1:777")),
			[]string{"10.0.0.3:5353 198.51.100.1:53 192.0.2.1:777"}},
		{"both", flow(1, 6, tuple("10.0.0.9:1000", "198.51.100.1:80"), tuple("10.0.0.3:8080", "198.51.100.1:5000")),
			[]string{"10.0.0.9:1000 198.51.100.1:5000 198.51.100.1:80", "10.0.0.3:8080 198.51.100.1:80 10.0.0.9:1000"}},
		{"icmp", flow(1, unix.IPPROTO_ICMP, icmpOrig, icmpReply), []string{"10.0.0.9:79 198.51.100.1:80 192.0.2.1:0"}},
	} {
		trs, n := translations(c.f, What{Destinations: true})
		var got []string
		for _, tr := range trs[:n] {
			got = append(got, tr.Internal.String()+" "+tr.External.String()+" "+tr.Destination.String())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if trs, n := translations(c.f, What{}); n > 0 && (trs[0].Destination.IsValid() || trs[0].Kind != natlog.Mapping) {
			t.Errorf("%s: %+v without destinations", c.name, trs[0])
		}
	}
}

// A mapping lives as long as one session uses it; an event that a dump had is no second one.
func TestTracker(t *testing.T) {
	var got []natlog.Event
	var last natlog.Record
	record := func(r natlog.Record) { got, last = append(got, r.Event), r }
	expect := func(what string, want ...natlog.Event) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
		got = nil
	}
	one := flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "198.51.100.1:5000"))
	two := flow(2, 6, tuple("10.0.0.9:1000", "192.0.2.2:80"), tuple("192.0.2.2:80", "198.51.100.1:5000"))
	other := flow(3, 6, tuple("10.0.0.8:1000", "192.0.2.2:80"), tuple("192.0.2.2:80", "198.51.100.1:6000"))
	tr := newTracker(What{})
	tr.begin(one, 10, record)
	tr.begin(two, 20, record)
	tr.begin(one, 30, record)
	expect("two sessions", natlog.Created)
	tr.end(one, 40, record)
	tr.end(one, 41, record)
	expect("one of them ended, twice")
	tr.end(two, 50, record)
	expect("both ended", natlog.Ended)

	tr.begin(one, 60, record)
	got = nil
	dump := func(flows ...*conntrack.Flow) *tracker {
		d := newTracker(What{})
		d.seed = tr.seed
		for _, f := range flows {
			d.begin(f, 0, func(natlog.Record) {})
		}
		return d
	}
	tr.replace(dump(one, other), 65, 70, record)
	expect("another began unseen", natlog.Alive)
	if l := tr.alive[func() natlog.Translation { trs, _ := translations(one, What{}); return trs[0] }()]; l.since != 60 {
		t.Errorf("since %d, want 60", l.since)
	}
	partial := dump(other)
	partial.partial = true
	tr.replace(partial, 72, 75, record)
	expect("a dump that may be incomplete ends nothing")
	tr.replace(dump(other), 77, 80, record)
	expect("one ended unseen", natlog.Ended)
	if last.Time != 80 || last.Least() != 77 {
		t.Errorf("it ended from %d to %d", last.Least(), last.Time)
	}
	tr.end(other, 90, record)
	expect("what a dump found ends by its event", natlog.Ended)
}

// dumped is a tracker that has taken over a dump of two entries at 100, of which it knew the second one since 60.
func dumped(record func(natlog.Record)) (tr *tracker, one, two *conntrack.Flow) {
	one = flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "198.51.100.1:5000"))
	two = flow(2, 6, tuple("10.0.0.8:1000", "192.0.2.2:80"), tuple("192.0.2.2:80", "198.51.100.1:6000"))
	tr = newTracker(What{})
	tr.begin(two, 60, record)
	found := newTracker(What{})
	found.seed = tr.seed
	for _, f := range []*conntrack.Flow{one, two} {
		found.begin(f, 0, func(natlog.Record) {})
	}
	tr.replace(found, 100, 100, record)
	return tr, one, two
}

// What a dump found may have ended while it was read: its end comes after the record that it is alive,
// or the rows of a file, in the order of time, would have it alive for ever. What was known before
// keeps the time of its end.
func TestEndDuringDump(t *testing.T) {
	var got []natlog.Record
	record := func(r natlog.Record) { got = append(got, r) }
	tr, one, two := dumped(record)
	tr.end(one, 95, record)
	tr.end(two, 95, record)
	if len(got) != 4 || got[1].Event != natlog.Alive || got[2].Time != 100 || got[3].Time != 95 {
		t.Errorf("%+v", got)
	}
	tr.begin(one, 110, record)
	tr.reported(200) // it joins a log
	if tr.end(one, 150, record); got[len(got)-1].Time != 200 {
		t.Errorf("%+v", got[len(got)-1])
	}
}

// So does what begins again after that, also when another end, which keeps its time, came in between.
func TestBeginAfterEndDuringDump(t *testing.T) {
	var got []natlog.Record
	record := func(r natlog.Record) { got = append(got, r) }
	tr, one, two := dumped(record)
	tr.end(one, 95, record)
	tr.end(two, 96, record)
	tr.begin(one, 97, record)
	if last := got[len(got)-1]; last.Event != natlog.Created || last.Time != 100 || last.Since != 97 {
		t.Errorf("%+v", last)
	}
}

// What a dump no longer found may have begun again while it was read: that comes after the end, or the
// rows of a file, in the order of time, would have it ended. When it began stays.
func TestBeginDuringDump(t *testing.T) {
	var got []natlog.Record
	record := func(r natlog.Record) { got = append(got, r) }
	one := flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "198.51.100.1:5000"))
	tr := newTracker(What{})
	tr.begin(one, 60, record)
	tr.replace(newTracker(What{}), 90, 100, record)
	tr.begin(one, 95, record)
	if len(got) != 3 || got[1].Event != natlog.Ended || got[2].Time != 100 || got[2].Since != 95 {
		t.Errorf("%+v", got)
	}
	tr.reported(0) // the clock was set back
	tr.end(one, 40, record)
	if tr.begin(one, 45, record); got[len(got)-1].Time != 45 {
		t.Errorf("%+v", got[len(got)-1])
	}
}

// What a dump found may end without an event, until another dump no longer finds it; what was heard
// does not, whenever it began.
func TestUnheard(t *testing.T) {
	one := flow(1, 6, tuple("10.0.0.9:1000", "192.0.2.1:80"), tuple("192.0.2.1:80", "198.51.100.1:5000"))
	same := flow(2, 6, tuple("10.0.0.9:1000", "192.0.2.2:80"), tuple("192.0.2.2:80", "198.51.100.1:5000"))
	two := flow(3, 6, tuple("10.0.0.8:1000", "192.0.2.2:80"), tuple("192.0.2.2:80", "198.51.100.1:6000"))
	quiet := func(natlog.Record) {}
	dump := func(tr *tracker, flows ...*conntrack.Flow) *tracker {
		d := newTracker(What{})
		d.seed, d.dump = tr.seed, true
		for _, f := range flows {
			d.begin(f, 50, quiet) // the kernel knows since when
		}
		return d
	}
	tr := newTracker(What{})
	tr = dump(tr, two)
	tr.dump = false
	tr.begin(one, 60, quiet)
	if n := tr.unheard(); n != 1 {
		t.Errorf("%d after the start, want 1", n)
	}
	tr.replace(dump(tr, one, two), 70, 70, quiet)
	if n := tr.unheard(); n != 1 {
		t.Errorf("%d after a look, want 1", n)
	}
	tr.replace(dump(tr, one, same), 80, 80, quiet)
	if n := tr.unheard(); n != 1 {
		t.Errorf("%d with a session of a mapping that was not heard, want 1", n)
	}
	tr.replace(dump(tr), 90, 90, quiet)
	if n := tr.unheard(); n != 0 {
		t.Errorf("%d when all have ended, want 0", n)
	}
}
