// SPDX-License-Identifier: Apache-2.0

package lab

import "testing"

// FailStep makes the steps of Up fail as fn says, until the test ends.
func FailStep(t *testing.T, fn func(what string) error) {
	beforeStep = fn
	t.Cleanup(func() { beforeStep = nil })
}

// NoPrograms hides all programs until the test ends.
func NoPrograms(t *testing.T) {
	t.Setenv("PATH", "")
	old := sbin
	sbin = t.TempDir()
	t.Cleanup(func() { sbin = old })
}

// PlanDrawing is what Drawing would return.
func PlanDrawing(topology string, o Options) (string, error) {
	p, err := newPlan(topology, o)
	return p.drawing, err
}
