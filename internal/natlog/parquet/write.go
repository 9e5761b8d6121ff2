// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math"
	"slices"
)

// Writer writes a file. Close it: without its end a file can't be read.
type Writer struct {
	out    io.Writer
	fields []Field
	sorted []int // columns that the rows of each row group are sorted by
	at     int64
	rows   int64
	groups []writtenGroup
	gzip   *gzip.Writer
	page   bytes.Buffer
}

type writtenGroup struct {
	rows, plain int64
	columns     []writtenColumn
}

type writtenColumn struct {
	begin, data       int64 // where in the file; the dictionary, if there is one, is at begin
	plain, compressed int64
	least, most       string // as Parquet has them in statistics
}

// NewWriter begins a file. The rows of each row group are sorted by the columns named.
func NewWriter(out io.Writer, fields []Field, sortedBy ...string) (*Writer, error) {
	gz, err := gzip.NewWriterLevel(nil, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	w := &Writer{out: out, fields: fields, gzip: gz}
	for _, name := range sortedBy {
		w.sorted = append(w.sorted, slices.IndexFunc(fields, func(f Field) bool { return f.Name == name }))
	}
	return w, w.write([]byte(magic))
}

func (w *Writer) write(b []byte) error {
	n, err := w.out.Write(b)
	w.at += int64(n)
	return err
}

// RowGroup writes rows: a column of each field, all of the same length.
func (w *Writer) RowGroup(columns []Column) error {
	if len(columns) != len(w.fields) {
		return fmt.Errorf("write Parquet: %d columns, want %d", len(columns), len(w.fields))
	}
	g := writtenGroup{rows: int64(columns[0].rows())}
	for i := range columns {
		if int64(columns[i].rows()) != g.rows {
			return fmt.Errorf("write Parquet: column %s has %d rows, want %d", w.fields[i].Name, columns[i].rows(), g.rows)
		}
		c, err := w.column(w.fields[i].Type, &columns[i])
		if err != nil {
			return fmt.Errorf("write Parquet: %w", err)
		}
		g.columns = append(g.columns, c)
		g.plain += c.plain
	}
	w.rows += g.rows
	w.groups = append(w.groups, g)
	return nil
}

func (w *Writer) column(typ Type, c *Column) (wc writtenColumn, err error) {
	wc.begin = w.at
	var data []byte
	encoding := int64(encodingDelta)
	if typ == String {
		var dict []byte
		for _, s := range c.Dict {
			dict = append(binary.LittleEndian.AppendUint32(dict, uint32(len(s))), s...)
		}
		if err := w.writePage(&wc, pageDictionary, encodingPlain, len(c.Dict), dict); err != nil {
			return wc, err
		}
		encoding, data = encodingDictionary, appendIndex(nil, c.Index, len(c.Dict))
		if len(c.Dict) > 0 {
			wc.least, wc.most = slices.Min(c.Dict), slices.Max(c.Dict)
		}
	} else {
		data = appendDelta(nil, c.Ints)
		if len(c.Ints) > 0 {
			wc.least, wc.most = typ.plain(slices.Min(c.Ints)), typ.plain(slices.Max(c.Ints))
		}
	}
	wc.data = w.at
	return wc, w.writePage(&wc, pageData, encoding, c.rows(), data)
}

// plain is an integer as statistics have it.
func (t Type) plain(v int64) string {
	if t == Int32 {
		return string(binary.LittleEndian.AppendUint32(nil, uint32(v)))
	}
	return string(binary.LittleEndian.AppendUint64(nil, uint64(v)))
}

func (w *Writer) writePage(wc *writtenColumn, kind, encoding int64, values int, plain []byte) error {
	if len(plain) > math.MaxInt32 {
		return fmt.Errorf("a page of %d bytes", len(plain))
	}
	w.page.Reset()
	w.gzip.Reset(&w.page)
	if _, err := w.gzip.Write(plain); err != nil {
		return err
	}
	if err := w.gzip.Close(); err != nil {
		return err
	}
	var e encoder
	e.begin()
	e.i32(1, kind)
	e.i32(2, int64(len(plain)))
	e.i32(3, int64(w.page.Len()))
	e.i32(4, int64(int32(crc32.ChecksumIEEE(w.page.Bytes()))))
	if kind == pageDictionary {
		e.in(7, func() { e.i32(1, int64(values)); e.i32(2, encoding) })
	} else {
		e.in(5, func() { e.i32(1, int64(values)); e.i32(2, encoding); e.i32(3, encodingRLE); e.i32(4, encodingRLE) })
	}
	e.end()
	wc.plain += int64(len(e.b) + len(plain))
	wc.compressed += int64(len(e.b) + w.page.Len())
	if err := w.write(e.b); err != nil {
		return err
	}
	return w.write(w.page.Bytes())
}

// Close writes the end of the file, with pairs of texts about it.
func (w *Writer) Close(about map[string]string) error {
	var e encoder
	e.begin()
	e.i32(1, 2) // version of the format
	e.list(2, thriftStruct, len(w.fields)+1)
	w.schema(&e)
	e.i64(3, w.rows)
	e.list(4, thriftStruct, len(w.groups))
	for i := range w.groups {
		w.group(&e, &w.groups[i])
	}
	pairs := map[string]string{checksumKey: noChecksum}
	maps.Copy(pairs, about)
	e.list(5, thriftStruct, len(pairs))
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		e.begin()
		e.binary(1, key)
		e.binary(2, pairs[key])
		e.end()
	}
	e.binary(6, maker)
	e.list(7, thriftStruct, len(w.fields))
	for range w.fields { // statistics are in the order of the type
		e.begin()
		e.in(1, func() {})
		e.end()
	}
	e.end()
	putChecksum(e.b)
	e.b = append(binary.LittleEndian.AppendUint32(e.b, uint32(len(e.b))), magic...)
	return w.write(e.b)
}

func (w *Writer) schema(e *encoder) {
	e.begin()
	e.binary(4, "natkit_log")
	e.i32(5, int64(len(w.fields)))
	e.end()
	for _, f := range w.fields {
		e.begin()
		e.i32(1, f.Type.physical())
		e.i32(3, 0) // required
		e.binary(4, f.Name)
		switch f.Type {
		case String:
			e.i32(6, convertedUTF8)
			e.in(10, func() { e.in(1, func() {}) })
		case Time:
			e.i32(6, convertedMicros)
			e.in(10, func() { e.in(8, func() { e.bool(1, true); e.in(2, func() { e.in(2, func() {}) }) }) })
		}
		e.end()
	}
}

func (w *Writer) group(e *encoder, g *writtenGroup) {
	e.begin()
	e.list(1, thriftStruct, len(g.columns))
	for i := range g.columns {
		c, f := &g.columns[i], w.fields[i]
		e.begin()
		e.i64(2, c.begin)
		e.in(3, func() { c.meta(e, f, g.rows) })
		e.end()
	}
	e.i64(2, g.plain)
	e.i64(3, g.rows)
	e.list(4, thriftStruct, len(w.sorted))
	for _, column := range w.sorted {
		e.begin()
		e.i32(1, int64(column))
		e.bool(2, false)
		e.bool(3, false)
		e.end()
	}
	e.end()
}

func (c *writtenColumn) meta(e *encoder, f Field, rows int64) {
	e.i32(1, f.Type.physical())
	encodings := []int64{encodingDelta}
	if f.Type == String {
		encodings = []int64{encodingPlain, encodingDictionary}
	}
	e.list(2, thriftI32, len(encodings))
	for _, n := range encodings {
		e.zigzag(n)
	}
	e.list(3, thriftBinary, 1)
	e.str(f.Name)
	e.i32(4, codecGzip)
	e.i64(5, rows)
	e.i64(6, c.plain)
	e.i64(7, c.compressed)
	e.i64(9, c.data)
	if f.Type == String {
		e.i64(11, c.begin)
	}
	e.in(12, func() {
		e.i64(3, 0) // nulls
		e.binary(5, c.most)
		e.binary(6, c.least)
	})
}
