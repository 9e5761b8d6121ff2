// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// appendPacked packs values of width bits, the first in the lowest bits.
func appendPacked(b []byte, values []uint64, width int) []byte {
	var have uint64
	n := 0
	for _, v := range values {
		for left := width; left > 0; { // v may not fit beside what is there
			take := min(left, 64-n)
			have |= v << n
			v >>= take % 64
			if take == 64 {
				v = 0
			}
			n, left = n+take, left-take
			for n >= 8 {
				b = append(b, byte(have))
				have >>= 8
				n -= 8
			}
		}
	}
	if n > 0 {
		b = append(b, byte(have))
	}
	return b
}

// packed is the value at index i of what appendPacked wrote, which must be there.
func packed(b []byte, i, width int) uint64 {
	var v uint64
	for bit, n := i*width, 0; n < width; {
		take := min(8-bit%8, width-n)
		v |= uint64(b[bit/8]>>(bit%8)) & (1<<take - 1) << n
		bit, n = bit+take, n+take
	}
	return v
}

// appendIndex writes indices as RLE_DICTIONARY has them: the width, then runs, of one value
// repeated or of groups of eight.
func appendIndex(b []byte, index []uint32, dict int) []byte {
	width := max(1, bits.Len(uint(max(dict-1, 0))))
	b = append(b, byte(width))
	var groups []uint64 // not written yet
	flush := func() {
		if len(groups) > 0 {
			b = binary.AppendUvarint(b, uint64(len(groups)/8)<<1|1)
			b = appendPacked(b, groups, width)
			groups = groups[:0]
		}
	}
	for i := 0; i < len(index); {
		run := 1
		for i+run < len(index) && index[i+run] == index[i] {
			run++
		}
		if run >= 8 {
			flush()
			b = binary.AppendUvarint(b, uint64(run)<<1)
			for n := 0; n < width; n += 8 {
				b = append(b, byte(index[i]>>n))
			}
			i += run
			continue
		}
		for n := range 8 {
			v := uint64(0)
			if i+n < len(index) {
				v = uint64(index[i+n])
			}
			groups = append(groups, v)
		}
		i += 8
	}
	flush()
	return b
}

// readIndex reads n indices into a dictionary.
func readIndex(b []byte, n, dict int) ([]uint32, error) {
	if len(b) == 0 || b[0] == 0 || b[0] > 32 {
		return nil, fmt.Errorf("%w: a column has no width", ErrDamaged)
	}
	width := int(b[0])
	b = b[1:]
	index := make([]uint32, 0, n)
	add := func(v uint64) bool {
		if len(index) < n {
			index = append(index, uint32(v))
		}
		return v < uint64(dict)
	}
	for len(index) < n {
		head, size := binary.Uvarint(b)
		if size <= 0 || head>>1 == 0 || head>>1 > uint64(n) {
			return nil, fmt.Errorf("%w: a run of a column is cut short", ErrDamaged)
		}
		b = b[size:]
		run, bytes := int(head>>1), (width+7)/8
		if head&1 == 1 {
			bytes = run * width
			run *= 8
		}
		if bytes > len(b) {
			return nil, fmt.Errorf("%w: a run of a column is cut short", ErrDamaged)
		}
		for i := range run {
			at := i
			if head&1 == 0 {
				at = 0
			}
			if len(index) == n {
				break
			}
			if !add(packed(b, at, width)) {
				return nil, fmt.Errorf("%w: a value of a column is not in its dictionary", ErrDamaged)
			}
		}
		b = b[bytes:]
	}
	return index, nil
}

// A block of DELTA_BINARY_PACKED has four packs, each of its own width.
const (
	deltaPack  = 32
	deltaPacks = 4
	deltaBlock = deltaPack * deltaPacks
)

func appendDelta(b []byte, values []int64) []byte {
	b = binary.AppendUvarint(b, deltaBlock)
	b = binary.AppendUvarint(b, deltaPacks)
	b = binary.AppendUvarint(b, uint64(len(values)))
	first := int64(0)
	if len(values) > 0 {
		first = values[0]
	}
	b = binary.AppendVarint(b, first)
	var deltas [deltaBlock]uint64
	for i := 1; i < len(values); i += deltaBlock {
		n := min(deltaBlock, len(values)-i)
		least := values[i] - values[i-1]
		for k := range n {
			least = min(least, values[i+k]-values[i+k-1])
		}
		clear(deltas[:])
		for k := range n {
			deltas[k] = uint64(values[i+k] - values[i+k-1] - least)
		}
		b = binary.AppendVarint(b, least)
		var widths [deltaPacks]byte
		for p := range deltaPacks {
			for _, d := range deltas[p*deltaPack:][:deltaPack] {
				widths[p] = max(widths[p], byte(bits.Len64(d)))
			}
		}
		b = append(b, widths[:]...)
		for p := range (n + deltaPack - 1) / deltaPack {
			b = appendPacked(b, deltas[p*deltaPack:][:deltaPack], int(widths[p]))
		}
	}
	return b
}

// readDelta reads n integers.
func readDelta(b []byte, n int) ([]int64, error) {
	short := fmt.Errorf("%w: a column of numbers is cut short", ErrDamaged)
	var head [3]uint64
	for i := range head {
		v, size := binary.Uvarint(b)
		if size <= 0 {
			return nil, short
		}
		head[i], b = v, b[size:]
	}
	if head != [3]uint64{deltaBlock, deltaPacks, uint64(n)} {
		return nil, fmt.Errorf("%w: a column of numbers has another size than its row group", ErrDamaged)
	}
	last, size := binary.Varint(b)
	if size <= 0 {
		return nil, short
	}
	b = b[size:]
	values := make([]int64, 0, n)
	if n > 0 {
		values = append(values, last)
	}
	for len(values) < n {
		least, size := binary.Varint(b)
		if size <= 0 || len(b) < size+deltaPacks {
			return nil, short
		}
		widths := b[size : size+deltaPacks]
		b = b[size+deltaPacks:]
		for _, width := range widths {
			if len(values) == n {
				break
			}
			bytes := int(width) * deltaPack / 8
			if width > 64 || bytes > len(b) {
				return nil, short
			}
			for i := 0; i < deltaPack && len(values) < n; i++ {
				last += least + int64(packed(b, i, int(width)))
				values = append(values, last)
			}
			b = b[bytes:]
		}
	}
	return values, nil
}
