// SPDX-License-Identifier: Apache-2.0

package store

import (
	"math/rand/v2"
	"net/netip"
	"os"
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

// BenchmarkWho asks a log of 20 hours with half a million records each.
func BenchmarkWho(b *testing.B) {
	if testing.Short() {
		b.Skip("10 million records")
	}
	const hours, records = 20, 500_000
	dir := b.TempDir()
	r := rand.New(rand.NewPCG(2, 2))
	at := time.Date(2026, 11, 24, 0, 0, 0, 0, time.UTC)
	begin := at
	s, err := Open(Options{Dir: dir, Node: "gw1", Alive: func(func(natlog.Record) bool) {}, now: func() (time.Time, time.Duration) { return at, at.Sub(begin) }})
	if err != nil {
		b.Fatal(err)
	}
	batch := make([]natlog.Record, 1000)
	for range hours {
		for range records / len(batch) {
			for i := range batch {
				at = at.Add(time.Hour / (records + 1))
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
		t := natlog.MicrosOf(begin.Add(time.Duration(r.Int64N(int64(hours * time.Hour)))))
		if _, err := Who(dir, Question{Address: rec.External.Addr(), Port: rec.External.Port(), Since: t, Upto: t}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(size)/(hours*records), "bytes/record")
}
