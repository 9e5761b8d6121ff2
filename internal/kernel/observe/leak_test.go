// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"os"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// Nothing stays open after an observer is closed: no map, no program, no clock.
func TestObserversCloseAll(t *testing.T) {
	ktest.Root(t)
	observeOnce := func() {
		d, err := OpenDrops(DropOptions{Stacks: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Read(); err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := Hooks(nil); err != nil {
			t.Fatal(err)
		}
		if _, err := TakeProfile(context.Background(), ProfileOptions{For: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	observeOnce() // what is opened once for the process, such as the poller, is open now
	before := open()
	for range 3 {
		observeOnce()
	}
	if after := open(); after > before {
		t.Errorf("%d files open, %d before", after, before)
	}
}
