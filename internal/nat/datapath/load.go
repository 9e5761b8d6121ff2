// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
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
	{"nat_tc", loadTc, []string{tcInside, tcOutside, tcBoth, tcZone, tcInsideRaw, tcOutsideRaw, tcBothRaw, tcZoneRaw}},
	{"nat_xdp", loadXdp, []string{xdpInside, xdpOutside, xdpBoth, xdpZone}},
	{"nat_gc", loadGc, []string{gcStart, gcStop}},
	{"nat_ports", loadPorts, []string{portsChange, blocksAdopt, blocksKeep}},
	{"nat_lease", loadLease, []string{leaseAsk}},
}

// accelObjects are those of an accelerator, likewise.
var accelObjects = []object{
	{"nat_accel_tc", loadAccelTc, []string{accelTC, accelTCRest, accelEgress}},
	{"nat_accel_xdp", loadAccelXdp, []string{accelXDP}},
}

// StartGC arms the timer that expires sessions, with the code that the engine has now.
// It lives as long as its map is pinned.
func (e *Engine) StartGC() error {
	code, err := roomForTimer(func() (uint32, error) { return e.run(gcStart, &ebpf.RunOptions{Data: make([]byte, 64)}) })
	if err == nil && code != 0 {
		err = fmt.Errorf("verdict %d", int32(code))
	}
	if err != nil {
		return fmt.Errorf("arm the timer of garbage collection: %w", err)
	}
	return nil
}

// roomForTimer runs what makes a timer again while there is no memory for it. bpf_timer_init does
// not wait for memory, so one refusal says nothing of the next moment.
func roomForTimer(run func() (uint32, error)) (code uint32, err error) {
	const tries, pause = 20, 10 * time.Millisecond
	for try := 1; ; try++ {
		code, err = run()
		if err != nil || int32(code) != -int32(unix.ENOMEM) || try == tries {
			return code, err
		}
		time.Sleep(pause)
	}
}
