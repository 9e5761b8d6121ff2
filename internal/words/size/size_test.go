// SPDX-License-Identifier: Apache-2.0

package size

import "testing"

func TestOf(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 3 << 20: "3.0 MiB", 5 << 29: "2.5 GiB"} {
		if got := Of(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
