// SPDX-License-Identifier: Apache-2.0

// Package parquet writes and reads Parquet files of flat tables without nulls, which is
// what the log of translations needs. Pure.
//
// Of the format it knows: required columns of strings, 32-bit integers and times in
// microseconds; one data page a column and row group, with a checksum; strings by a
// dictionary (RLE_DICTIONARY), integers as differences (DELTA_BINARY_PACKED); gzip;
// smallest and largest value of each column in each row group. Every engine reads that.
// The format has no checksum of a file's end, which says what of the file is looked at: it
// is in a pair of texts of the file (checksum.go).
// It reads back only what it writes itself: another program's file is refused. A library
// for the whole format would make natkit half as large again.
//
// The format: https://github.com/apache/parquet-format (parquet.thrift, Encodings.md).
package parquet

import "errors"

// Type of a column.
type Type uint8

// Types.
const (
	String Type = iota
	Int32       // 0 to 2^31-1
	Time        // microseconds since 1970, UTC
)

// Field is a column of a file.
type Field struct {
	Name string
	Type Type
}

// Column is the values of a column in a row group: Dict and Index of strings, else Ints.
type Column struct {
	Dict  []string // each value once
	Index []uint32 // of each row: where in Dict
	Ints  []int64
}

// Strings makes a column of the values of n rows.
func Strings(n int, value func(i int) string) Column {
	c := Column{Index: make([]uint32, n)}
	seen := map[string]uint32{}
	for i := range n {
		s := value(i)
		at, ok := seen[s]
		if !ok {
			at = uint32(len(c.Dict))
			seen[s] = at
			c.Dict = append(c.Dict, s)
		}
		c.Index[i] = at
	}
	return c
}

// Ints makes a column of the values of n rows.
func Ints(n int, value func(i int) int64) Column {
	c := Column{Ints: make([]int64, n)}
	for i := range n {
		c.Ints[i] = value(i)
	}
	return c
}

func (c *Column) rows() int { return max(len(c.Index), len(c.Ints)) }

// String is the value of a row.
func (c *Column) String(row int) string { return c.Dict[c.Index[row]] }

// ErrDamaged is that a file is not what was written.
var ErrDamaged = errors.New("damaged")

const magic = "PAR1"

// Numbers of parquet.thrift.
const (
	physicalInt32, physicalInt64, physicalBytes = 1, 2, 6

	convertedUTF8, convertedMicros = 0, 10

	encodingPlain, encodingRLE, encodingDelta, encodingDictionary = 0, 3, 5, 8

	codecGzip = 2

	pageData, pageDictionary = 0, 2
)

func (t Type) physical() int64 {
	switch t {
	case Int32:
		return physicalInt32
	case Time:
		return physicalInt64
	}
	return physicalBytes
}
