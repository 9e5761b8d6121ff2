// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
)

// File is a file that a Writer wrote. It reads what it is asked for and keeps nothing.
type File struct {
	Fields []Field
	Rows   int64
	About  map[string]string
	Groups []Group

	in io.ReaderAt
}

// Group is a row group.
type Group struct {
	Rows    int
	columns []chunk
}

// chunk is where a column of a row group is.
type chunk struct {
	begin, data, size int64
	least, most       string
	typ               Type
}

// mostGroupRows is how many rows a row group can have: more would be no file of natkit's.
const mostGroupRows = 1 << 24

// Open reads the end of a file.
func Open(in io.ReaderAt, size int64) (*File, error) {
	var tail [8]byte
	if size < int64(len(magic)+len(tail)) {
		return nil, fmt.Errorf("%w: %d bytes are no Parquet file", ErrDamaged, size)
	}
	if _, err := in.ReadAt(tail[:], size-int64(len(tail))); err != nil {
		return nil, err
	}
	length := int64(binary.LittleEndian.Uint32(tail[:]))
	if string(tail[4:]) != magic || length > size-int64(len(magic)+len(tail)) {
		return nil, fmt.Errorf("%w: the end of a Parquet file is missing", ErrDamaged)
	}
	b := make([]byte, length)
	if _, err := in.ReadAt(b, size-int64(len(tail))-length); err != nil {
		return nil, err
	}
	d := &decoder{b: b}
	meta := d.structure()
	if d.err != nil {
		return nil, d.err
	}
	if err := checkEnd(b, string(meta.at(6).s)); err != nil {
		return nil, err
	}
	f := &File{in: in, Rows: meta.at(3).n, About: map[string]string{}}
	for _, pair := range meta.at(5).list {
		f.About[string(pair.at(1).s)] = string(pair.at(2).s)
	}
	if err := f.schema(meta.at(2).list); err != nil {
		return nil, err
	}
	for _, g := range meta.at(4).list {
		if err := f.group(g, size); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *File) schema(list []value) error {
	for i, v := range list {
		if i == 0 { // the table itself
			continue
		}
		typ := String
		switch v.at(1).n {
		case physicalInt32:
			typ = Int32
		case physicalInt64:
			typ = Time
		case physicalBytes:
		default:
			return fmt.Errorf("%w: column %q has a type that natkit does not write", ErrDamaged, v.at(4).s)
		}
		f.Fields = append(f.Fields, Field{string(v.at(4).s), typ})
	}
	return nil
}

func (f *File) group(v value, size int64) error {
	g := Group{Rows: int(v.at(3).n)}
	columns := v.at(1).list
	if len(columns) != len(f.Fields) || v.at(3).n < 0 || v.at(3).n > mostGroupRows {
		return fmt.Errorf("%w: a row group with columns: %d, rows: %d", ErrDamaged, len(columns), v.at(3).n)
	}
	for i, c := range columns {
		m := c.at(3)
		if m.at(4).n != codecGzip {
			return fmt.Errorf("%w: column %s is compressed in a way that natkit does not write", ErrDamaged, f.Fields[i].Name)
		}
		at := chunk{begin: c.at(2).n, data: m.at(9).n, size: m.at(7).n, most: string(m.at(12).at(5).s), least: string(m.at(12).at(6).s), typ: f.Fields[i].Type}
		if at.begin < 0 || at.size < 0 || at.size > size || at.begin > size-at.size || at.data < at.begin || at.data > at.begin+at.size {
			return fmt.Errorf("%w: column %s is outside the file", ErrDamaged, f.Fields[i].Name)
		}
		g.columns = append(g.columns, at)
	}
	f.Groups = append(f.Groups, g)
	return nil
}

// Strings are the least and the greatest value of a column of strings.
func (g *Group) Strings(column int) (least, most string) {
	return g.columns[column].least, g.columns[column].most
}

// Ints are the least and the greatest value of a column of numbers.
func (g *Group) Ints(column int) (least, most int64) {
	c := &g.columns[column]
	return c.typ.number(c.least), c.typ.number(c.most)
}

func (t Type) number(s string) int64 {
	switch {
	case t == Int32 && len(s) == 4:
		return int64(int32(binary.LittleEndian.Uint32([]byte(s))))
	case t == Time && len(s) == 8:
		return int64(binary.LittleEndian.Uint64([]byte(s)))
	}
	return 0
}

// Column reads a column of a row group.
func (f *File) Column(group, column int) (c Column, err error) {
	g := &f.Groups[group]
	at := g.columns[column]
	b := make([]byte, at.size)
	if _, err := f.in.ReadAt(b, at.begin); err != nil {
		return c, err
	}
	if at.typ == String {
		dict, values, rest, err := readPage(b, pageDictionary)
		if err != nil {
			return c, fmt.Errorf("column %s: %w", f.Fields[column].Name, err)
		}
		if c.Dict, err = readDict(dict, values); err != nil {
			return c, fmt.Errorf("column %s: %w", f.Fields[column].Name, err)
		}
		b = rest
	}
	data, values, _, err := readPage(b, pageData)
	if err != nil {
		return c, fmt.Errorf("column %s: %w", f.Fields[column].Name, err)
	}
	if values != g.Rows {
		return c, fmt.Errorf("column %s: %w: %d values in a row group of %d", f.Fields[column].Name, ErrDamaged, values, g.Rows)
	}
	if at.typ == String {
		c.Index, err = readIndex(data, values, len(c.Dict))
	} else {
		c.Ints, err = readDelta(data, values)
	}
	if err != nil {
		return c, fmt.Errorf("column %s: %w", f.Fields[column].Name, err)
	}
	return c, nil
}

// readPage reads the page that b begins with.
func readPage(b []byte, kind int64) (plain []byte, values int, rest []byte, err error) {
	d := &decoder{b: b}
	head := d.structure()
	if d.err != nil {
		return nil, 0, nil, d.err
	}
	size, length := head.at(2).n, head.at(3).n
	if head.at(1).n != kind || length < 0 || length > int64(len(d.b)) || size < 0 || size > 1<<30 {
		return nil, 0, nil, fmt.Errorf("%w: a page's header is wrong", ErrDamaged)
	}
	body := d.b[:length]
	if int64(int32(crc32.ChecksumIEEE(body))) != head.at(4).n {
		return nil, 0, nil, fmt.Errorf("%w: the checksum of a page is wrong", ErrDamaged)
	}
	gz, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return nil, 0, nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	var out bytes.Buffer
	out.Grow(int(min(size, 16<<20)))
	if n, err := io.Copy(&out, io.LimitReader(gz, size+1)); err != nil || n != size {
		return nil, 0, nil, fmt.Errorf("%w: a page has %d bytes, want %d", ErrDamaged, n, size)
	}
	number := head.at(5).at(1).n
	if kind == pageDictionary {
		number = head.at(7).at(1).n
	}
	if number < 0 || number > mostGroupRows {
		return nil, 0, nil, fmt.Errorf("%w: a page of %d values", ErrDamaged, number)
	}
	return out.Bytes(), int(number), d.b[length:], nil
}

func readDict(b []byte, n int) ([]string, error) {
	var dict []string
	text := string(b) // once, for all of them
	for range n {
		if len(b) < 4 {
			return nil, fmt.Errorf("%w: a dictionary is cut short", ErrDamaged)
		}
		size := int64(binary.LittleEndian.Uint32(b))
		if size > int64(len(b)-4) {
			return nil, fmt.Errorf("%w: a dictionary is cut short", ErrDamaged)
		}
		dict = append(dict, text[4:4+size])
		b, text = b[4+size:], text[4+size:]
	}
	return dict, nil
}
