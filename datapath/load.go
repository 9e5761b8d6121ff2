// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// object is one compiled file of bpf/.
type object struct {
	name  string
	load  func() (*ebpf.CollectionSpec, error)
	adapt func(*ebpf.CollectionSpec) error // to this kernel
}

// objects in the order in which they are loaded: the first brings the maps.
var objects []object

// startSweep arms the timer that expires sessions. It lives as long as its map is pinned.
func (e *Engine) startSweep() error {
	code, err := e.programs[sweepStart].Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	if err == nil && code != 0 {
		err = fmt.Errorf("verdict %d", int32(code))
	}
	if err != nil {
		return fmt.Errorf("arm the sweep's timer: %w", err)
	}
	return nil
}
