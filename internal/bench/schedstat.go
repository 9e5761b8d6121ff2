// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"time"
)

// schedstat is the scheduler's account of one thread. It is zero on kernels that
// keep none (CONFIG_SCHED_INFO).
type schedstat struct {
	ran    time.Duration
	waited time.Duration // ready to run while something else ran
}

// readSchedstat reads a thread's account: a process number, or "thread-self".
func readSchedstat(thread string) (s schedstat) {
	text, err := os.ReadFile("/proc/" + thread + "/schedstat")
	if err == nil {
		_, _ = fmt.Sscan(string(text), &s.ran, &s.waited)
	}
	return s
}
