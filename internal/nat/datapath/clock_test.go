// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// Jiffies and CLOCK_MONOTONIC go together: whenever the constants are measured they are
// the same, to a jiffy or two.
func TestClock(t *testing.T) {
	ktest.Root(t)
	jiffy, first, err := readClock()
	if err != nil {
		t.Fatal(err)
	}
	if jiffy < 1e6 || jiffy > 1e7 { // HZ is 100 to 1000
		t.Fatalf("a jiffy of %d ns", jiffy)
	}
	for began := time.Now(); time.Since(began) < 200*time.Millisecond; {
		_, offset, err := readClock()
		if err != nil {
			t.Fatal(err)
		}
		if apart := int64(offset - first); max(apart, -apart) > 2*int64(jiffy) {
			t.Fatalf("jiffies and the clock have drifted by %d ns, a jiffy is %d ns", apart, jiffy)
		}
	}
}
