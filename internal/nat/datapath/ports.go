// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// portChange says that a port is to be given to internal endpoints, or not: struct
// change of bpf/nat/ports.bpf.c.
type portChange struct {
	Index, Class, Port uint32
	Give               uint32
}

// anAddress stands for a class: the address itself, for pools without ports.
const anAddress = uint32(abiNatClassNAT_PORT_CLASSES)

const portChangesPerRun = 128

// changePorts makes changes between the packets that take and give ports.
func (e *Engine) changePorts(changes []portChange) error {
	for len(changes) > 0 {
		n := min(len(changes), portChangesPerRun)
		data := make([]byte, 14, 14+n*16)
		data, err := binary.Append(data, binary.NativeEndian, changes[:n])
		if err != nil {
			return err
		}
		if _, err := e.run(portsChange, &ebpf.RunOptions{Data: data}); err != nil {
			return fmt.Errorf("change free ports: %w", err)
		}
		changes = changes[n:]
	}
	return nil
}

// giveAddresses lets addresses be given whole, or not any more. One that a host has is not free, and
// is not taken from it.
func (e *Engine) giveAddresses(indices []uint32, give bool) error {
	changes := make([]portChange, len(indices))
	for i, index := range indices {
		changes[i] = portChange{Index: index, Class: anAddress, Port: index}
		if give {
			changes[i].Give = 1
		}
	}
	return e.changePorts(changes)
}
