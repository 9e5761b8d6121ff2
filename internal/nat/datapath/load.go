// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// object is one compiled file of bpf/.
type object struct {
	name string
	load func() (*ebpf.CollectionSpec, error)
}

// objects in the order in which they are loaded. The maps that an object does not
// share with those before it are its own.
var objects = []object{{"nat_tc", loadTc}, {"nat_xdp", loadXdp}, {"nat_sweep", loadSweep}, {"nat_ports", loadPorts}}

// StartSweep arms the timer that expires sessions, with the code that the engine has now.
// It lives as long as its map is pinned.
func (e *Engine) StartSweep() error {
	program, err := e.program(sweepStart)
	if err != nil {
		return err
	}
	code, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	if err == nil && code != 0 {
		err = fmt.Errorf("verdict %d", int32(code))
	}
	if err != nil {
		return fmt.Errorf("arm the sweep's timer: %w", err)
	}
	return nil
}
