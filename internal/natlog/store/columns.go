// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/natlog"
	"natkit/internal/natlog/parquet"
)

// schemaVersion of the files; a file of a higher one is refused.
const schemaVersion = 2 // 2: event applied, kind block

// groupRows is how many rows each row group of a file of n rows has but the last. A look-up reads some
// columns of one or two of them, so smaller ones are read sooner; the end of the file, which lists
// them, is read whole, so of a large file they are larger.
func groupRows(n int) int { return min(max(n/16, 1<<12), 1<<15) }

// column is a field of a record in a file. A text has get and set, a number geti and seti.
type column struct {
	name string
	typ  parquet.Type
	get  func(r *natlog.Record) string
	set  func(r *natlog.Record, s string) bool
	geti func(r *natlog.Record) int64
	seti func(r *natlog.Record, v int64)
}

func address(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.Addr().String()
}

func endpoint(name string, of func(r *natlog.Record) *netip.AddrPort) []column {
	return []column{{
		name: name + "_address", typ: parquet.String,
		get: func(r *natlog.Record) string { return address(*of(r)) },
		set: func(r *natlog.Record, s string) bool {
			a, err := netip.ParseAddr(s)
			*of(r) = netip.AddrPortFrom(a, of(r).Port())
			return err == nil || s == ""
		},
	}, {
		name: name + "_port", typ: parquet.Int32,
		geti: func(r *natlog.Record) int64 { return int64(of(r).Port()) },
		seti: func(r *natlog.Record, v int64) { *of(r) = netip.AddrPortFrom(of(r).Addr(), uint16(v)) },
	}}
}

// text is a column of UTF-8, whatever the record has: a name of an interface, or of a file in an error, may be
// other bytes, and most readers refuse the whole file for them.
func text(name string, of func(r *natlog.Record) *string) column {
	return column{
		name: name, typ: parquet.String,
		get: func(r *natlog.Record) string { return strings.ToValidUTF8(*of(r), "?") },
		set: func(r *natlog.Record, s string) bool { *of(r) = s; return true },
	}
}

func number(name string, of func(r *natlog.Record) *uint16) column {
	return column{
		name: name, typ: parquet.Int32,
		geti: func(r *natlog.Record) int64 { return int64(*of(r)) },
		seti: func(r *natlog.Record, v int64) { *of(r) = uint16(v) },
	}
}

func moment(name string, of func(r *natlog.Record) *natlog.Micros) column {
	return column{
		name: name, typ: parquet.Time,
		geti: func(r *natlog.Record) int64 { return int64(*of(r)) },
		seti: func(r *natlog.Record, v int64) { *of(r) = natlog.Micros(v) },
	}
}

// columns of a file, but that of the node's name, which is the last.
var columns = slices.Concat(
	[]column{
		moment("time", func(r *natlog.Record) *natlog.Micros { return &r.Time }),
		{name: "event", typ: parquet.String, get: func(r *natlog.Record) string { return r.Event.String() },
			set: func(r *natlog.Record, s string) (ok bool) { r.Event, ok = natlog.ParseEvent(s); return ok }},
		{name: "kind", typ: parquet.String, get: func(r *natlog.Record) string { return r.Kind.String() },
			set: func(r *natlog.Record, s string) (ok bool) { r.Kind, ok = natlog.ParseKind(s); return ok }},
		{name: "translator", typ: parquet.String, get: func(r *natlog.Record) string { return r.Source.String() },
			set: func(r *natlog.Record, s string) (ok bool) { r.Source, ok = natlog.ParseSource(s); return ok }},
		{name: "protocol", typ: parquet.String, get: func(r *natlog.Record) string { return natlog.ProtocolName(r.Protocol) },
			set: func(r *natlog.Record, s string) (ok bool) { r.Protocol, ok = natlog.ParseProtocol(s); return ok }},
	},
	endpoint("internal", func(r *natlog.Record) *netip.AddrPort { return &r.Internal }),
	endpoint("external", func(r *natlog.Record) *netip.AddrPort { return &r.External }),
	[]column{number("external_port_last", func(r *natlog.Record) *uint16 { return &r.LastPort })},
	endpoint("destination", func(r *natlog.Record) *netip.AddrPort { return &r.Destination }),
	[]column{
		text("subscriber", func(r *natlog.Record) *string { return &r.Subscriber }),
		number("vlan", func(r *natlog.Record) *uint16 { return &r.VLAN }),
		number("zone", func(r *natlog.Record) *uint16 { return &r.Zone }),
		moment("since", func(r *natlog.Record) *natlog.Micros { return &r.Since }),
		text("note", func(r *natlog.Record) *string { return &r.Note }),
	})

// What a look-up reads first, by place in columns.
var (
	columnTime     = columnNamed("time")
	columnExternal = columnNamed("external_address")
	columnPort     = columnNamed("external_port")
	columnLast     = columnNamed("external_port_last")
	columnProtocol = columnNamed("protocol")
)

func columnNamed(name string) int {
	return slices.IndexFunc(columns, func(c column) bool { return c.name == name })
}

func fields() (f []parquet.Field) {
	for _, c := range columns {
		f = append(f, parquet.Field{Name: c.name, Type: c.typ})
	}
	return append(f, parquet.Field{Name: "node", Type: parquet.String})
}

// sortRecords gives the order of the rows of a file: by external address and port, so that a
// look-up finds all about one together, and then as it happened.
func sortRecords(records []natlog.Record) []int32 {
	rank := map[netip.Addr]int32{}
	var addresses []netip.Addr
	for i := range records {
		a := records[i].External.Addr()
		if _, ok := rank[a]; !ok {
			rank[a] = 0
			addresses = append(addresses, a)
		}
	}
	slices.SortFunc(addresses, func(a, b netip.Addr) int {
		return cmp.Compare(address(netip.AddrPortFrom(a, 0)), address(netip.AddrPortFrom(b, 0)))
	})
	for i, a := range addresses {
		rank[a] = int32(i)
	}
	type key struct {
		place uint64 // rank and port
		at    natlog.Micros
		row   int32
	}
	keys := make([]key, len(records))
	for i := range records {
		keys[i] = key{uint64(rank[records[i].External.Addr()])<<16 | uint64(records[i].External.Port()), records[i].Time, int32(i)}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.place, b.place), cmp.Compare(a.at, b.at), cmp.Compare(a.row, b.row))
	})
	order := make([]int32, len(keys))
	for i, k := range keys {
		order[i] = k.row
	}
	return order
}

// rowGroup makes the columns of some rows.
func rowGroup(records []natlog.Record, rows []int32, node string) []parquet.Column {
	var group []parquet.Column
	for _, c := range columns {
		if c.typ == parquet.String {
			group = append(group, parquet.Strings(len(rows), func(i int) string { return c.get(&records[rows[i]]) }))
		} else {
			group = append(group, parquet.Ints(len(rows), func(i int) int64 { return c.geti(&records[rows[i]]) }))
		}
	}
	return append(group, parquet.Strings(len(rows), func(int) string { return node }))
}

// checkFile refuses a file that a newer natkit, or another program, wrote.
func checkFile(f *parquet.File) error {
	version, err := strconv.Atoi(f.About["natkit.log"])
	if err != nil {
		return fmt.Errorf("%w: it is no file of natkit's log", parquet.ErrDamaged)
	}
	if version > schemaVersion {
		return fmt.Errorf("it has schema %d, and this natkit reads up to %d: use a newer natkit", version, schemaVersion)
	}
	if !slices.Equal(f.Fields, fields()) {
		return fmt.Errorf("%w: it has other columns than schema %d", parquet.ErrDamaged, version)
	}
	return nil
}

// readRows reads rows of a row group as records. have are the columns that were read before.
func readRows(f *parquet.File, group int, rows []int, have map[int]parquet.Column) ([]natlog.Record, error) {
	records := make([]natlog.Record, len(rows))
	for i, c := range columns {
		values, ok := have[i]
		if !ok {
			var err error
			if values, err = f.Column(group, i); err != nil {
				return nil, err
			}
		}
		for k, row := range rows {
			if c.typ != parquet.String {
				c.seti(&records[k], values.Ints[row])
			} else if !c.set(&records[k], values.String(row)) {
				return nil, fmt.Errorf("%w: %q in column %s", parquet.ErrDamaged, values.String(row), c.name)
			}
		}
	}
	return records, nil
}
