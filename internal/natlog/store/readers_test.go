// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// program is one that other people wrote; its rows come as JSON objects.
type program string

func (p program) rows(t *testing.T, query string) (rows []map[string]any) {
	t.Helper()
	cmd := exec.Command(ktest.Tool(t, "python3"), "testdata/query.py", string(p), query)
	cmd.Env = append(os.Environ(), "TZ=Asia/Kolkata") // times are in UTC wherever they are read
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v for %s\n%s", p, err, query, problem.Bytes())
	}
	for d := json.NewDecoder(&out); d.More(); {
		var row map[string]any
		if err := d.Decode(&row); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, row)
	}
	return rows
}

// row is a record as the documentation describes the columns.
func row(r *natlog.Record, node string) map[string]any {
	in := func(a netip.AddrPort) string {
		if a.IsValid() {
			return a.Addr().String()
		}
		return ""
	}
	number := func(n uint16) float64 { return float64(n) }
	return map[string]any{
		"time": float64(r.Time), "event": r.Event.String(), "kind": r.Kind.String(), "translator": r.Source.String(), "node": node,
		"protocol":         map[uint8]string{0: "", 1: "icmp", 6: "tcp", 17: "udp", 99: "99"}[r.Protocol],
		"internal_address": in(r.Internal), "internal_port": number(r.Internal.Port()),
		"external_address": in(r.External), "external_port": number(r.External.Port()), "external_port_last": number(r.LastPort),
		"destination_address": in(r.Destination), "destination_port": number(r.Destination.Port()),
		"subscriber": r.Subscriber, "vlan": number(r.VLAN), "zone": number(r.Zone), "since": float64(r.Since), "note": r.Note,
	}
}

// asText is a row or several, so that they can be compared and sorted.
func asText(t *testing.T, rows ...map[string]any) []string {
	t.Helper()
	var texts []string
	for _, r := range rows {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(b))
	}
	return texts
}

// everything is a log of three hours with every kind of record, and with more than a row group.
func everything(t *testing.T) *rig {
	r := newRig(t)
	r.open()
	rnd := rand.New(rand.NewPCG(8, 9))
	address := netip.MustParseAddrPort
	list := []natlog.Translation{
		mapping("10.0.0.9:1000", "198.51.100.1:5000"),
		{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 17, Internal: address("10.0.0.9:1000"), External: address("198.51.100.1:5000"), Zone: 65535},
		{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 99, Internal: address("[2001:db8::9]:0"), External: address("[2001:db8:1::1]:0")},
		{Kind: natlog.Mapping, Source: natlog.Engine, Internal: address("10.0.0.10:0"), External: address("198.51.100.1:0")},
		{Kind: natlog.Session, Source: natlog.Engine, Protocol: 1, Internal: address("10.0.0.9:7"), External: address("198.51.100.1:65535"), Destination: address("192.0.2.1:0"),
			Subscriber: `line "7", näher`, VLAN: 4094},
		{Kind: natlog.Session, Source: natlog.Engine, Protocol: 6, Internal: address("[2001:db8::9]:1000"), External: address("198.51.100.1:5000"), Destination: address("[64:ff9b::c000:201]:443")},
		{Kind: natlog.Block, Source: natlog.Engine, Internal: address("100.64.0.7:0"), External: address("198.51.100.1:4608"), LastPort: 5119, Subscriber: "100.64.0.7"},
		{Kind: natlog.Block, Source: natlog.Engine, Internal: address("100.64.0.8:0"), External: address("198.51.100.1:5120"), LastPort: 5631, Subscriber: "100.64.0.8"},
	}
	for _, tr := range list {
		r.create(tr)
		r.pass(time.Duration(1+rnd.IntN(1000)) * time.Microsecond)
	}
	at := natlog.MicrosOf(r.now)
	r.must(r.s.Append([]natlog.Record{
		{Event: natlog.Exhausted, Time: at, Note: "pool cgn", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 6, External: address("198.51.100.1:0")}},
		{Event: natlog.Quota, Time: at + 1, Note: "ports", Translation: natlog.Translation{Source: natlog.Engine, Protocol: 17, Internal: address("100.64.0.7:0"), Subscriber: "100.64.0.7"}},
	}))
	r.must(r.s.Gap(natlog.Kernel, at-2_000_000, at-1_000_000, "events were lost"))
	r.must(r.s.KeepRules(natlog.Engine, at, "engine: ebpf\ninside: [lan]\noutside: [wan]\nrules: []\n"))
	for range 2 {
		r.pass(time.Hour)
		r.must(r.s.Tick())
		for i := range list {
			if _, ok := r.alive[list[i]]; ok && rnd.IntN(3) == 0 {
				r.end(list[i])
			}
		}
		var many []natlog.Record
		for range 4 * groupRows(0) { // several row groups
			m := randomRecord(rnd, natlog.MicrosOf(r.now))
			r.pass(time.Duration(rnd.IntN(20)) * time.Microsecond)
			many = append(many, m)
		}
		r.must(r.s.Append(many))
	}
	r.pass(time.Hour)
	r.must(r.s.Tick())
	r.must(r.s.Close())
	return r
}

// ClickHouse (as chDB), DuckDB and pandas read every field of every record, and the SQL of the
// documentation answers what it says. make test-collectors runs it: chDB has half a gigabyte.
func TestColumnReaders(t *testing.T) {
	ktest.Collectors(t)
	r := everything(t)
	list, err := allParts(r.dir)
	r.must(err)
	var records []natlog.Record
	var rows []map[string]any
	for _, p := range list {
		if p.journal {
			t.Errorf("%s is no Parquet file", p.path)
		}
		r.must(eachRecord(p, func(rec *natlog.Record) {
			records = append(records, *rec)
			rows = append(rows, row(rec, "gw1"))
		}))
	}
	kinds := map[string]int{}
	for _, rec := range records {
		kinds[rec.Event.String()]++
		kinds[rec.Kind.String()]++
	}
	t.Logf("%d files, %d records: %v", len(list), len(records), kinds)
	for _, word := range []string{"created", "ended", "alive", "exhausted", "quota", "gap", "applied", "mapping", "session", "block"} {
		if kinds[word] == 0 {
			t.Errorf("no record is %s", word)
		}
	}
	want := asText(t, rows...)
	slices.Sort(want)
	for p, all := range map[program]string{
		"chdb":   "SELECT * FROM file('" + r.dir + "/*.parquet', Parquet)",
		"duckdb": "SELECT * FROM read_parquet('" + r.dir + "/*.parquet')",
		"pandas": "",
	} {
		t.Run(string(p), func(t *testing.T) {
			if p == "pandas" { // it reads one file at a time
				var read []string
				for _, f := range list {
					read = append(read, asText(t, p.rows(t, f.path)...)...)
				}
				compareTexts(t, read, want)
				return
			}
			compareTexts(t, asText(t, p.rows(t, all)...), want)
		})
	}

	text, err := os.ReadFile("../../../docs/log.md")
	r.must(err)
	var had, most []string
	for i := range records {
		rec := &records[i]
		if rec.Kind != natlog.NoKind && rec.External.IsValid() && rec.External.Addr() == netip.MustParseAddr("198.51.100.1") && rec.Has(5000, 6) {
			full := rows[i]
			shown := map[string]any{}
			for _, name := range []string{"time", "event", "kind", "since", "subscriber", "internal_address", "internal_port"} {
				shown[name] = full[name]
			}
			had = append(had, asText(t, shown)...)
		}
	}
	if len(had) < 8 {
		t.Errorf("%d records of the port", len(had))
	}
	created := map[string]int{}
	for i := range records {
		if records[i].Event == natlog.Created && records[i].Kind == natlog.Mapping {
			created[address(records[i].Internal)]++
		}
	}
	hosts := slices.SortedFunc(maps.Keys(created), func(a, b string) int { return cmp.Or(created[b]-created[a], cmp.Compare(a, b)) })
	for _, host := range hosts[:20] {
		most = append(most, asText(t, map[string]any{"internal_address": host, "mappings": created[host]})...)
	}
	queries := regexp.MustCompile(`(?m)^    SELECT .*\n(?:    .*\n)*`).FindAllString(string(text), -1)
	asked := map[string]int{}
	for _, q := range queries {
		var p program = "duckdb"
		if strings.Contains(q, " file('") {
			p = "chdb"
		}
		want, name := had, "who"
		if strings.Contains(q, "count(*)") {
			want, name = most, "most"
		}
		asked[fmt.Sprint(p, name)]++
		t.Run(fmt.Sprintf("%s by %s", name, p), func(t *testing.T) {
			here := strings.ReplaceAll(q, "/var/lib/natkit/log/", r.dir+"/")
			if here == q {
				t.Fatalf("the query names no file: %s", q)
			}
			compareTexts(t, asText(t, p.rows(t, here)...), want)
		})
	}
	if len(queries) != 4 || len(asked) != 4 {
		t.Errorf("the documentation has %v", asked)
	}
}

// compareTexts compares rows without their order.
func compareTexts(t *testing.T, got, want []string) {
	t.Helper()
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	if len(got) != len(want) {
		t.Errorf("%d rows, want %d", len(got), len(want))
	}
	different := 0
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			if different++; different <= 5 {
				t.Errorf("row %d is\n%s, want\n%s", i, got[i], want[i])
			}
		}
	}
	if different > 5 {
		t.Errorf("%d rows differ", different)
	}
	t.Logf("%d rows are the same", len(want)-different)
}
