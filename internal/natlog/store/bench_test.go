// SPDX-License-Identifier: Apache-2.0

package store

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"natkit/internal/natlog"
)

// randomRecord is a mapping of one of 10 000 internal hosts that began or ended.
func randomRecord(r *rand.Rand, at natlog.Micros) natlog.Record {
	host, n := uint32(10<<24|r.IntN(10_000)), r.IntN(64)
	rec := natlog.Record{Event: natlog.Event(1 + r.IntN(2)), Time: at, Since: at - natlog.Micros(r.IntN(60_000_000))}
	rec.Kind, rec.Source, rec.Protocol = natlog.Mapping, natlog.Kernel, uint8(6+11*r.IntN(2))
	rec.Internal = netip.AddrPortFrom(netip.AddrFrom4([4]byte{byte(host >> 24), byte(host >> 16), byte(host >> 8), byte(host)}), uint16(1024+r.IntN(64512)))
	rec.External = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(n)}), uint16(1024+r.IntN(64512)))
	return rec
}

// BenchmarkAppend is the whole way: a journal, and its Parquet file.
func BenchmarkAppend(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	s, err := Open(Options{Dir: b.TempDir(), Node: "gw1", Alive: func(func(natlog.Record) bool) {}})
	if err != nil {
		b.Fatal(err)
	}
	batch := make([]natlog.Record, 1000)
	now := natlog.MicrosOf(time.Now())
	for i := range batch {
		now += 20
		batch[i] = randomRecord(r, now)
	}
	for b.Loop() {
		if err := s.Append(batch); err != nil {
			b.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N*len(batch))/b.Elapsed().Seconds(), "records/s")
}

// fromEnvironment is a number of the environment, otherwise another one.
func fromEnvironment(b *testing.B, name string, otherwise int) int {
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkWho asks a log of NATKIT_HOURS hours (20) with NATKIT_RECORDS records each (500 000, in thousands).
func BenchmarkWho(b *testing.B) {
	if testing.Short() {
		b.Skip("10 million records")
	}
	hours, records := fromEnvironment(b, "NATKIT_HOURS", 20), fromEnvironment(b, "NATKIT_RECORDS", 500_000)
	dir := b.TempDir()
	r := rand.New(rand.NewPCG(2, 2))
	at := time.Date(2026, 11, 24, 0, 0, 0, 0, time.UTC)
	begin := at
	s, err := Open(Options{Dir: dir, Node: "gw1", Alive: func(func(natlog.Record) bool) {}, Now: func() (time.Time, time.Duration) { return at, at.Sub(begin) }})
	if err != nil {
		b.Fatal(err)
	}
	batch := make([]natlog.Record, 1000)
	for range hours {
		for range records / len(batch) {
			for i := range batch {
				at = at.Add(time.Hour / time.Duration(records+1))
				batch[i] = randomRecord(r, natlog.MicrosOf(at))
			}
			if err := s.Append(batch); err != nil {
				b.Fatal(err)
			}
		}
		at = at.Truncate(time.Hour).Add(time.Hour)
		if err := s.Tick(); err != nil {
			b.Fatal(err)
		}
		s.jobsDone(b) // it is faster than a clock
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	var size int64
	list, err := parts(dir)
	for _, p := range list {
		info, err := os.Stat(p.path)
		if err != nil {
			b.Fatal(err)
		}
		size += info.Size()
	}
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		rec := randomRecord(r, 0)
		t := natlog.MicrosOf(begin.Add(time.Duration(r.Int64N(int64(time.Duration(hours) * time.Hour)))))
		if _, err := Who(dir, Question{Address: rec.External.Addr(), Port: rec.External.Port(), Since: t, Upto: t}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(size)/float64(hours*records), "bytes/record")
}

// BenchmarkWhoBlocks asks a log of NATKIT_DAYS days (30) of 10 000 subscribers with two blocks each, of
// which ten begin and end in a day.
func BenchmarkWhoBlocks(b *testing.B) {
	if testing.Short() {
		b.Skip("20 million records")
	}
	days := fromEnvironment(b, "NATKIT_DAYS", 30)
	const subscribers, perDay, size = 10_000, 10, 512
	dir := b.TempDir()
	r := rand.New(rand.NewPCG(3, 3))
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	begin := at
	alive := make([]natlog.Record, 2*subscribers)
	next := 0
	take := func(i int) natlog.Record { // round and round through 160 addresses
		next = (next + 1) % (160 * 126)
		var rec natlog.Record
		rec.Kind, rec.Source, rec.Event, rec.Time, rec.Since = natlog.Block, natlog.Engine, natlog.Created, natlog.MicrosOf(at), natlog.MicrosOf(at)
		host, port := uint32(10<<24|i/2), uint16(1024+next%126*size)
		rec.Internal = netip.AddrPortFrom(netip.AddrFrom4([4]byte{byte(host >> 24), byte(host >> 16), byte(host >> 8), byte(host)}), 0)
		rec.External = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(next / 126)}), port)
		rec.LastPort, rec.Subscriber, rec.Note = port+size-1, rec.Internal.Addr().String(), "pool cgn"
		return rec
	}
	for i := range alive {
		alive[i] = take(i)
	}
	s, err := Open(Options{
		Dir: dir, Node: "gw1", Now: func() (time.Time, time.Duration) { return at, at.Sub(begin) },
		Alive: func(yield func(natlog.Record) bool) {
			for _, rec := range alive {
				if !yield(rec) {
					return
				}
			}
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	records := 0
	for range days * 24 {
		var batch []natlog.Record
		const changes = subscribers * perDay / 24
		for range changes {
			at = at.Add(time.Hour / (changes + 1))
			i := r.IntN(len(alive))
			ended := alive[i]
			ended.Event, ended.Time = natlog.Ended, natlog.MicrosOf(at)
			alive[i] = take(i)
			batch = append(batch, ended, alive[i])
		}
		if err := s.Append(batch); err != nil {
			b.Fatal(err)
		}
		records += len(batch)
		at = at.Truncate(time.Hour).Add(time.Hour)
		if err := s.Tick(); err != nil {
			b.Fatal(err)
		}
		s.jobsDone(b) // it is faster than a clock
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	list, err := parts(dir)
	if err != nil {
		b.Fatal(err)
	}
	var bytes int64
	for _, p := range list {
		info, err := os.Stat(p.path)
		if err != nil {
			b.Fatal(err)
		}
		bytes += info.Size()
	}
	read := 0
	for b.Loop() {
		t := natlog.MicrosOf(begin.Add(time.Duration(r.Int64N(int64(time.Duration(days) * 24 * time.Hour)))))
		got, err := Who(dir, Question{Address: netip.AddrFrom4([4]byte{198, 51, 100, byte(r.IntN(160))}), Port: uint16(1024 + r.IntN(64512)), Protocol: 6, Since: t, Upto: t})
		if err != nil {
			b.Fatal(err)
		}
		read += got.FilesRead
	}
	b.ReportMetric(float64(bytes)/float64(records), "bytes/event")
	b.ReportMetric(float64(read)/float64(b.N), "files/look-up")
	b.ReportMetric(float64(records), "events")
}
