// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"encoding/binary"
	"fmt"
)

// Thrift's compact protocol, as much as Parquet's headers need.

// Types of fields.
const (
	thriftTrue, thriftFalse, thriftByte, thriftI16, thriftI32, thriftI64 = 1, 2, 3, 4, 5, 6
	thriftDouble, thriftBinary, thriftList, thriftSet, thriftStruct      = 7, 8, 9, 10, 12
)

// encoder appends one struct after the other; last is the number of the last field of each
// open struct.
type encoder struct {
	b    []byte
	last []int
}

func (e *encoder) begin() { e.last = append(e.last, 0) }

func (e *encoder) end() {
	e.b = append(e.b, 0)
	e.last = e.last[:len(e.last)-1]
}

func (e *encoder) field(id int, typ byte) {
	last := &e.last[len(e.last)-1]
	e.b = append(e.b, byte(id-*last)<<4|typ) // no field here is more than 15 behind the one before
	*last = id
}

func (e *encoder) zigzag(v int64) { e.b = binary.AppendVarint(e.b, v) }

func (e *encoder) i32(id int, v int64) { e.field(id, thriftI32); e.zigzag(v) }

func (e *encoder) i64(id int, v int64) { e.field(id, thriftI64); e.zigzag(v) }

func (e *encoder) bool(id int, v bool) {
	if v {
		e.field(id, thriftTrue)
	} else {
		e.field(id, thriftFalse)
	}
}

func (e *encoder) str(s string) {
	e.b = binary.AppendUvarint(e.b, uint64(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) binary(id int, s string) { e.field(id, thriftBinary); e.str(s) }

func (e *encoder) list(id int, typ byte, n int) {
	e.field(id, thriftList)
	if n < 15 {
		e.b = append(e.b, byte(n)<<4|typ)
		return
	}
	e.b = binary.AppendUvarint(append(e.b, 0xf0|typ), uint64(n))
}

// in writes a field that is a struct.
func (e *encoder) in(id int, fields func()) {
	e.field(id, thriftStruct)
	e.begin()
	fields()
	e.end()
}

// value is what a decoder makes of any field: a number, bytes, a list or a struct.
type value struct {
	n      int64
	s      []byte
	list   []value
	fields map[int]value
}

func (v value) at(id int) value { return v.fields[id] }

// decoder reads values; the first mistake makes it end.
type decoder struct {
	b     []byte
	depth int
	err   error
}

func (d *decoder) fail(what string) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", ErrDamaged, what)
	}
	d.b = nil
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail("a header is cut short")
		return 0
	}
	c := d.b[0]
	d.b = d.b[1:]
	return c
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail("a number in a header is cut short")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) varint() int64 {
	u := d.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}

func (d *decoder) value(typ byte) (v value) {
	switch typ {
	case thriftTrue:
		v.n = 1
	case thriftFalse:
	case thriftByte:
		v.n = int64(d.byte())
	case thriftI16, thriftI32, thriftI64:
		v.n = d.varint()
	case thriftBinary:
		n := d.uvarint()
		if n > uint64(len(d.b)) {
			d.fail("a text in a header is cut short")
			return v
		}
		v.s, d.b = d.b[:n], d.b[n:]
	case thriftList, thriftSet:
		head := d.byte()
		n := uint64(head >> 4)
		if n == 15 {
			n = d.uvarint()
		}
		if n > uint64(len(d.b)) {
			d.fail("a list in a header is cut short")
			return v
		}
		for range n {
			if d.err != nil {
				return v
			}
			v.list = append(v.list, d.value(head&15))
		}
	case thriftStruct:
		v = d.structure()
	default:
		d.fail("a header has a field of an unknown type")
	}
	return v
}

func (d *decoder) structure() value {
	const mostDepth = 16
	if d.depth++; d.depth > mostDepth {
		d.fail("a header is nested too deep")
	}
	defer func() { d.depth-- }()
	v := value{fields: map[int]value{}}
	id := 0
	for d.err == nil {
		head := d.byte()
		if head == 0 {
			break
		}
		if delta := int(head >> 4); delta > 0 {
			id += delta
		} else {
			id = int(d.varint())
		}
		v.fields[id] = d.value(head & 15)
	}
	return v
}
