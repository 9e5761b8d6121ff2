// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	peer "github.com/parquet-go/parquet-go"
)

var testFields = []Field{{"name", String}, {"port", Int32}, {"time", Time}}

// testGroup is a row group with runs, single values and jumps.
func testGroup(r *rand.Rand, rows, names int) []Column {
	var name []string
	for len(name) < rows {
		v := fmt.Sprintf("10.0.%d.%d", r.IntN(names)/256, r.IntN(names))
		for range 1 + r.IntN(20) {
			name = append(name, v)
		}
	}
	return []Column{
		Strings(rows, func(i int) string { return name[i] }),
		Ints(rows, func(int) int64 { return r.Int64N(65536) }),
		Ints(rows, func(i int) int64 { return 1764000000_000000 + int64(i) - r.Int64N(1<<r.IntN(62)+1) }),
	}
}

func writeTest(t testing.TB, groups [][]Column) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := NewWriter(&out, testFields, "name")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		if err := w.RowGroup(g); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(map[string]string{"natkit.log": "1", "empty": ""}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// What is written is what another program's library reads, and this package.
func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var groups [][]Column
	for _, rows := range []int{1, 7, 8, 9, 128, 129, 130, 1000, 5000} {
		groups = append(groups, testGroup(r, rows, 1+r.IntN(300)))
	}
	file := writeTest(t, groups)
	read, err := Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(read.Fields, testFields) || read.About["natkit.log"] != "1" || len(read.Groups) != len(groups) {
		t.Fatalf("%+v", read)
	}
	type row struct {
		Name string `parquet:"name"`
		Port int32  `parquet:"port"`
		Time int64  `parquet:"time,timestamp(microsecond)"`
	}
	other := peer.NewGenericReader[row](bytes.NewReader(file))
	for i, g := range groups {
		var columns [3]Column
		for k := range columns {
			if columns[k], err = read.Column(i, k); err != nil {
				t.Fatal(err)
			}
		}
		rows := make([]row, g[0].rows())
		for n := 0; n < len(rows); {
			got, err := other.Read(rows[n:])
			if n += got; got == 0 {
				t.Fatalf("row group %d: %v", i, err)
			}
		}
		least, most := read.Groups[i].Ints(1)
		if least != slices.Min(g[1].Ints) || most != slices.Max(g[1].Ints) {
			t.Errorf("row group %d: from %d to %d", i, least, most)
		}
		for k, got := range rows {
			want := row{g[0].String(k), int32(g[1].Ints[k]), g[2].Ints[k]}
			if own := (row{columns[0].String(k), int32(columns[1].Ints[k]), columns[2].Ints[k]}); own != want || got != want {
				t.Fatalf("row group %d, row %d: read %+v, the other library %+v, want %+v", i, k, own, got, want)
			}
		}
	}
}

// A byte that was changed anywhere is found, or changes nothing that is read: also of what a look-up
// reads of a row group before its columns.
func TestDamageIsFound(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	good := writeTest(t, [][]Column{testGroup(r, 60, 10)})
	want, err := readAll(good)
	if err != nil {
		t.Fatal(err)
	}
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			got, err := readAll(bad)
			if err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatalf("byte %d of %d: %v", i, len(good), err)
			}
			if err == nil && got != want {
				t.Errorf("byte %d of %d, bit %d: another file is read, and no damage is found", i, len(good), bit)
			}
		}
	}
}

// A file from before the checksum of the end is read.
func TestWithoutChecksum(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	file := writeTest(t, [][]Column{testGroup(r, 30, 4)})
	end := file[len(file)-8-int(binary.LittleEndian.Uint32(file[len(file)-8:])) : len(file)-8]
	text := func(s string) []byte { return append([]byte{byte(len(s))}, s...) }
	other := bytes.Replace(end, text(maker), text(makerWithout), 1)
	other = bytes.Replace(other, []byte(checksumKey), []byte("natkit.anything"), 1)
	old := append(slices.Clone(file[:len(file)-8-len(end)]), other...)
	old = append(binary.LittleEndian.AppendUint32(old, uint32(len(other))), magic...)
	if _, err := readAll(old); err != nil || len(old) == len(file) {
		t.Errorf("%d bytes of %d: %v", len(old), len(file), err)
	}
}

// readAll reads all of a file, as a text.
func readAll(file []byte) (string, error) {
	f, err := Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		return "", err
	}
	text := fmt.Sprintln(f.Fields, f.Rows, f.About)
	for i := range f.Groups {
		for k := range f.Fields {
			c, err := f.Column(i, k)
			if err != nil {
				return "", err
			}
			least, most := f.Groups[i].Strings(k)
			text += fmt.Sprintf("%d %q %q %v\n", f.Groups[i].Rows, least, most, c)
		}
	}
	return text, nil
}

func FuzzOpen(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 6))
	f.Add(writeTest(f, [][]Column{testGroup(r, 20, 3), testGroup(r, 200, 100)}))
	f.Fuzz(func(t *testing.T, file []byte) {
		if _, err := readAll(file); err != nil && !errors.Is(err, ErrDamaged) {
			t.Errorf("%v", err)
		}
	})
}

func FuzzColumns(f *testing.F) {
	f.Add(appendIndex(nil, []uint32{1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0}, 4), 12)
	f.Add(appendDelta(nil, []int64{5, 7, -9, 1 << 62, -1 << 62}), 5)
	f.Fuzz(func(t *testing.T, page []byte, n int) {
		n = max(0, min(n, 100000))
		if index, err := readIndex(page, n, 4); err == nil && len(index) != n {
			t.Errorf("%d indices, want %d", len(index), n)
		}
		if ints, err := readDelta(page, n); err == nil && len(ints) != n {
			t.Errorf("%d integers, want %d", len(ints), n)
		}
	})
}
