// SPDX-License-Identifier: Apache-2.0

package parquet

import (
	"bytes"
	"fmt"
	"hash/crc32"
)

// The end of a file has a checksum of itself: its own eight digits count as zeros. A file of
// before has none, and another maker: so no single byte makes one of the other.
const (
	checksumKey  = "natkit.checksum"
	noChecksum   = "00000000"
	maker        = "natkit, with a checksum"
	makerWithout = "natkit"
)

// checksumAt is where the digits are in a file's end; -1: it has none.
func checksumAt(end []byte) int {
	const headers = 2 // of the value: a field, and its length
	at := bytes.LastIndex(end, []byte(checksumKey))
	if at < 0 || at+len(checksumKey)+headers+len(noChecksum) > len(end) {
		return -1
	}
	return at + len(checksumKey) + headers
}

// putChecksum writes it over the zeros.
func putChecksum(end []byte) {
	at := checksumAt(end)
	copy(end[at:], fmt.Sprintf("%08x", crc32.ChecksumIEEE(end)))
}

// checkEnd compares it. madeBy is what the end says of who wrote it.
func checkEnd(end []byte, madeBy string) error {
	at := checksumAt(end)
	if at < 0 {
		if madeBy == makerWithout {
			return nil
		}
		return fmt.Errorf("%w: the end of the file has no checksum", ErrDamaged)
	}
	zeros := bytes.Clone(end)
	copy(zeros[at:], noChecksum)
	if string(end[at:at+len(noChecksum)]) != fmt.Sprintf("%08x", crc32.ChecksumIEEE(zeros)) {
		return fmt.Errorf("%w: the checksum of the file's end is wrong", ErrDamaged)
	}
	return nil
}
