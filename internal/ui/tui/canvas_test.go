// SPDX-License-Identifier: Apache-2.0

package tui

import "testing"

func TestSpark(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []float64
		want   string
	}{
		{"steady", []float64{14118, 14118, 14118}, "▄▄▄"},
		{"within a hundredth", []float64{14118, 14000, 14118}, "▄▄▄"},
		{"nothing", []float64{0, 0}, "▄▄"},
		{"grows", []float64{0, 50, 100}, "▁▄█"},
		{"more than there is room for", []float64{0, 0, 0, 0, 0, 0, 50, 100}, "▁▁▄█"},
	} {
		t.Run(c.name, func(t *testing.T) {
			row := make([]rune, 0, 4)
			(&canvas{w: 4, h: 1, put: func(_, _ int, r rune, _ style) { row = append(row, r) }}).spark(0, 0, 4, c.values)
			if string(row) != c.want {
				t.Errorf("%v: %q, want %q", c.values, string(row), c.want)
			}
		})
	}
}
