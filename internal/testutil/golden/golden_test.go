// SPDX-License-Identifier: Apache-2.0

package golden

import "testing"

func TestDifference(t *testing.T) {
	for _, tt := range []struct {
		a, b     string
		line     int
		inA, inB string
	}{
		{"a\nb\n", "a\nb\n", 0, "", ""},
		{"a\nb\n", "a\nc\n", 2, "b", "c"},
		{"a\n", "a", 2, "", "(the end)"},
		{"", "a\n", 1, "", "a"},
		{"a\r\n", "a\n", 1, "a\r", "a"},
	} {
		if line, inA, inB := difference(tt.a, tt.b); line != tt.line || inA != tt.inA || inB != tt.inB {
			t.Errorf("%q and %q: line %d, %q, %q", tt.a, tt.b, line, inA, inB)
		}
	}
}
