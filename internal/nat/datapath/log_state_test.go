// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// withRing has the log of the rig in a fresh ring of that size.
func (r *modelRig) withRing(t *testing.T, bytes int) *LogReader {
	t.Helper()
	had := LogBytes
	LogBytes = bytes
	t.Cleanup(func() { LogBytes = had })
	if err := r.engine.setLog(0); err != nil {
		t.Fatal(err)
	}
	log, err := r.engine.OpenLog()
	if err != nil {
		t.Fatal(err)
	}
	log.state.LostFirstNs = 0
	t.Cleanup(func() {
		if err := log.Close(); err != nil {
			t.Error(err)
		}
	})
	return log
}

// readLog reads all that there is, and releases it.
func readLog(t *testing.T, log *LogReader) (all []LogRecord) {
	t.Helper()
	for {
		some, err := log.Read(make([]LogRecord, 0, 100))
		if err != nil {
			t.Fatal(err)
		}
		log.Release()
		if len(some) == 0 {
			return all
		}
		all = append(all, some...)
	}
}

// follow has records begin and end what is alive; in order, each once.
func follow(t *testing.T, alive map[LogKey]uint64, records []LogRecord, next *uint32) {
	t.Helper()
	for _, r := range records {
		if r.Sequence != *next {
			t.Fatalf("record %d comes where %d was due: %+v", r.Sequence, *next, r)
		}
		*next++
		since, known := alive[r.LogKey]
		switch r.Event {
		case LogCreated:
			if known {
				t.Fatalf("%+v begins again", r)
			}
			alive[r.LogKey] = r.Time
		case LogEnded:
			if !known {
				t.Fatalf("%+v ends without a beginning", r)
			}
			if off := time.Duration(r.Since) - time.Duration(since); r.Since != 0 && off.Abs() > 50*time.Millisecond {
				t.Fatalf("%+v began at %d, by its end at %d", r, since, r.Since)
			}
			delete(alive, r.LogKey)
		}
	}
}

// snapshot is what the maps have of what is alive.
func snapshotOf(t *testing.T, log *LogReader) map[LogKey]uint64 {
	t.Helper()
	found := map[LogKey]uint64{}
	if err := log.Alive(func(k LogKey, since uint64) { found[k] = since }); err != nil {
		t.Fatal(err)
	}
	return found
}

func differs(got, want map[LogKey]uint64) string {
	for k, since := range got {
		if _, ok := want[k]; !ok {
			return fmt.Sprintf("%+v since %d is too much", k, since)
		}
	}
	for k, since := range want {
		if _, ok := got[k]; !ok {
			return fmt.Sprintf("%+v since %d is missing", k, since)
		}
	}
	return ""
}

// Sessions come and go while everything is recorded that can be: records and maps agree on what is
// alive, every packet's external endpoint was recorded as its host's, and at the end all has ended.
func TestLogRecords(t *testing.T) {
	for _, record := range []rulefile.LogRecord{rulefile.LogBlocks, rulefile.LogMappings, rulefile.LogSessions} {
		for _, blocks := range []rulefile.Blocks{{}, {Size: 128, Extra: 64, AtMost: 3}} {
			t.Run(fmt.Sprintf("%v of %d ports", record, blocks.Size), func(t *testing.T) {
				r := aModelRig(t)
				r.seed(11)
				f := blockFile(blocks, 2)
				f.Log = rulefile.Log{On: true, Record: record, Destinations: record == rulefile.LogSessions}
				if record == rulefile.LogBlocks && blocks.IsZero() {
					f.Log.Record = rulefile.LogDefault
				}
				f.Defaults.Mapping = rulefile.PerClass[rulefile.MappingMode]{rulefile.EndpointIndependent, rulefile.AddressAndPortDependent, rulefile.EndpointIndependent}
				r.forget(t, f)
				log := r.withRing(t, 1<<20)
				r.applied(t, f, nil)
				r.model = newModel(f, r.facts, r.route)
				r.collects(t)
				next, alive := log.Next(), map[LogKey]uint64{}
				for round := range 2 {
					for range 300 {
						host := netip.AddrFrom4([4]byte{192, 168, 2, byte(2 + r.random.IntN(50))})
						src, dport := netip.AddrPortFrom(host, uint16(1024+r.random.IntN(60000))), uint16(1+r.random.IntN(65535))
						saw := r.udp(t, src, dport)
						follow(t, alive, readLog(t, log), &next)
						if isTranslated(saw) && !hasKey(alive, src, saw.ends.src, netip.AddrPortFrom(world, dport), f) {
							t.Fatalf("round %d: nothing is recorded of %v as %v", round, src, saw.ends.src)
						}
					}
					// The two agree as soon as nothing happens between looking at either.
					ktest.Wait(t, 20*time.Second, "records and maps to agree", func() bool {
						follow(t, alive, readLog(t, log), &next)
						found := snapshotOf(t, log)
						return log.Next() == next && differs(alive, found) == ""
					})
				}
				ktest.Wait(t, time.Minute, "everything to end", func() bool {
					follow(t, alive, readLog(t, log), &next)
					return len(alive) == 0
				})
				if lost := log.Lost(); lost.First != 0 {
					t.Errorf("records were lost: %+v", lost)
				}
			})
		}
	}
}

// hasKey reports whether one of what is alive is of the packet.
func hasKey(alive map[LogKey]uint64, src, external, to netip.AddrPort, f *rulefile.File) bool {
	for k := range alive {
		if k.Internal != src.Addr().As4() || k.External != external.Addr().As4() {
			continue
		}
		switch k.Kind {
		case LogBlock:
			if k.ExternalPort <= external.Port() && external.Port() <= k.LastPort {
				return true
			}
		case LogMapping:
			if k.InternalPort == src.Port() && k.ExternalPort == external.Port() {
				return true
			}
		case LogSession:
			known := k.Destination == to.Addr().As4() && k.DestinationPort == to.Port()
			if k.InternalPort == src.Port() && k.ExternalPort == external.Port() && known == f.Log.Destinations {
				return true
			}
		}
	}
	return false
}

// What finds no room is counted, with its times, and everything that was read before that is right; a
// reader that is killed before it has released what it read leaves that to the next.
func TestLogFull(t *testing.T) {
	if room := LogBytes / logRecordBytes; room < 10*60*1000 {
		t.Errorf("without a reader the ring is full after %d records, want those of ten minutes of 1000 a second", room)
	}
	r := aModelRig(t)
	r.seed(12)
	f := blockFile(rulefile.Blocks{}, 1)
	f.Log = rulefile.Log{On: true, Record: rulefile.LogSessions}
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	r.forget(t, f)
	log := r.withRing(t, 4096)
	r.applied(t, f, nil)
	before := log.Lost().Total
	room := 4096 / logRecordBytes
	var began [2]uint64
	host := netip.MustParseAddr("192.168.2.2")
	for i := range room + 10 {
		if i == room {
			began[0] = monotonic()
		}
		r.udp(t, netip.AddrPortFrom(host, uint16(2000+i)), 53)
	}
	began[1] = monotonic()
	if lost := log.Lost(); lost.Total-before != 10 || lost.First < began[0] || lost.Last < lost.First || lost.Last > began[1] {
		t.Errorf("lost are %+v, want 10 from %v", lost, began)
	}
	read := func() []LogRecord {
		t.Helper()
		again, err := r.engine.OpenLog()
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		records, err := again.Read(make([]LogRecord, 0, 1000))
		if err != nil || len(records) != room {
			t.Fatalf("%d records are read (%v), want %d", len(records), err, room)
		}
		return records
	}
	if first, second := read(), read(); !slices.Equal(first, second) {
		t.Error("what was not released was not read again")
	}
	if got := len(readLog(t, log)); got != room {
		t.Errorf("%d records are read, want %d", got, room)
	}
	lost := log.Lost()
	log.Recorded(lost)
	r.udp(t, netip.AddrPortFrom(host, 5000), 53)
	if got := readLog(t, log); len(got) != 1 || got[0].InternalPort != 5000 {
		t.Errorf("after that %+v is read", got)
	}
	if now := log.Lost(); now.First != 0 || now.Total != lost.Total {
		t.Errorf("lost are %+v", now)
	}
}

// A flood of refused packets makes a few records.
func TestLogOfRefusals(t *testing.T) {
	r := aModelRig(t)
	r.seed(13)
	f := blockFile(rulefile.Blocks{Size: 64, AtMost: 0, Extra: 64}, 1)
	f.Pools[0].Ports = rulefile.PortRange{First: 1024, Last: 1151}
	f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Ports: 10}}
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	r.forget(t, f)
	log := r.withRing(t, 1<<20)
	r.applied(t, f, nil)
	for i := range 3000 {
		r.udp(t, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 2, byte(2 + i%5)}), uint16(2000+i)), 53)
	}
	seen := map[string]int{}
	for _, rec := range readLog(t, log) {
		if rec.Kind == LogNothing {
			seen[fmt.Sprintf("%d %s", rec.Event, rec.Reason)]++
		}
	}
	// Two subscribers have the two blocks, and are refused an eleventh port: 590 times each. Three
	// have none.
	want := map[string]int{fmt.Sprintf("%d port-limit", LogQuota): 20, fmt.Sprintf("%d no-block", LogExhausted): 1}
	if !maps.Equal(seen, want) {
		t.Errorf("recorded are %v, want %v", seen, want)
	}
}

// Nobody reads for ten minutes, in which 1000 blocks a second begin: the ring has a record of each.
// It takes ten seconds here, since nothing waits for the minutes to pass.
func TestLogHoldsTenMinutes(t *testing.T) {
	if testing.Short() {
		return // TestLogFull has a ring that is full, and what the real one has room for
	}
	const want, hosts, atOnce = 10 * 60 * 1000, 4000, 500
	r := newModelRig(t, false, false) // of aModelRig's ring other tests are to know nothing
	f := blockFile(rulefile.Blocks{Size: granulePorts, Extra: granulePorts, AtMost: 1}, 4)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	f.Log = rulefile.Log{On: true, Record: rulefile.LogBlocks}
	r.forget(t, f)
	log := r.withRing(t, LogBytes)
	open := r.load(t, loadSessionTest).Programs["scatter"]
	for log.Next() < want {
		r.forget(t, f)
		r.applied(t, f, nil)
		for first := uint32(0); first < hosts && log.Next() < want; first += atOnce {
			if opened, _ := r.scatter(t, open, atOnce, first, 0, 63*hosts); opened != atOnce {
				t.Fatalf("after %d blocks: %d of %d sessions began", log.Next(), opened, atOnce)
			}
		}
	}
	if lost := log.Lost(); lost.First != 0 {
		t.Errorf("records were lost: %+v", lost)
	}
	next := uint32(0)
	for records := make([]LogRecord, 0, 4096); ; log.Release() {
		var err error
		if records, err = log.Read(records[:0]); err != nil {
			t.Fatal(err)
		}
		if len(records) == 0 {
			break
		}
		for _, rec := range records {
			if rec.Sequence != next || rec.Kind != LogBlock || rec.Event != LogCreated {
				t.Fatalf("record %d is %+v", next, rec)
			}
			next++
		}
	}
	if next != log.Next() {
		t.Errorf("%d records are read, want %d", next, log.Next())
	}
}
