// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// object is one compiled file of bpf/.
type object struct {
	name     string
	load     func() (*ebpf.CollectionSpec, error)
	programs []string
}

// objects in the order in which they are loaded. The maps that an object does not
// share with those before it are its own.
var objects = []object{
	{"nat_tc", loadTc, []string{tcInside, tcOutside, tcBoth, tcInsideRaw, tcOutsideRaw, tcBothRaw}},
	{"nat_xdp", loadXdp, []string{xdpInside, xdpOutside, xdpBoth}},
	{"nat_sweep", loadSweep, []string{sweepStart, sweepStop}},
	{"nat_ports", loadPorts, []string{portsChange}},
}

// accelObjects are those of an accelerator, likewise.
var accelObjects = []object{
	{"nat_accel_tc", loadAccelTc, []string{accelTC, accelTCRest, accelEgress}},
	{"nat_accel_xdp", loadAccelXdp, []string{accelXDP}},
}

// StartSweep arms the timer that expires sessions, with the code that the engine has now.
// It lives as long as its map is pinned.
func (e *Engine) StartSweep() error {
	code, err := e.run(sweepStart, &ebpf.RunOptions{Data: make([]byte, 64)})
	if err == nil && code != 0 {
		err = fmt.Errorf("verdict %d", int32(code))
	}
	if err != nil {
		return fmt.Errorf("arm the sweep's timer: %w", err)
	}
	return nil
}
