// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// batchSize is how many elements one system call reads; a map of a million is read
// in a fraction of a second and never held whole.
const batchSize = 4096

// eachEntry calls fn with every element of a hash map until it returns false. The
// map may change during the call: an element that comes or goes may be missed, none is
// given twice by one batch. K and V are the map's types, of fixed size.
func eachEntry[K, V any](m *ebpf.Map, fn func(*K, *V) bool) error {
	var cursor ebpf.MapBatchCursor
	size := min(batchSize, int(m.MaxEntries()))
	for {
		// A bucket longer than the batch is refused with ENOSPC: read on with more room.
		keys, values := make([]K, size), make([]V, size)
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = errEnd
		}
		if err != nil && err != errEnd {
			return fmt.Errorf("read map %s: %w", m, err)
		}
		for i := range n {
			if !fn(&keys[i], &values[i]) {
				return nil
			}
		}
		if err == errEnd {
			return nil
		}
	}
}

var errEnd = errors.New("end of map")
