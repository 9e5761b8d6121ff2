// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// CPUMeter reads what the processors did, again and again: for those who show it
// every second, where a whole Snapshot would cost too much.
type CPUMeter struct {
	ns    *netns.Handle
	began source
}

// NewCPUMeter begins to measure; ns is the namespace whose packets are counted.
func NewCPUMeter(ns *netns.Handle) (*CPUMeter, error) {
	m := &CPUMeter{ns: ns, began: cpus()}
	return m, ns.Do(func() error { return m.began.start(newView("")) })
}

// Read returns what each processor did since the last Read, or since NewCPUMeter.
func (m *CPUMeter) Read() ([]snapshot.CPU, error) {
	var s snapshot.Snapshot
	next := cpus()
	err := m.ns.Do(func() error {
		if err := m.began.end(newView(""), &s); err != nil {
			return err
		}
		return next.start(newView(""))
	})
	m.began = next
	return s.CPUs, err
}
