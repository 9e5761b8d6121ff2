// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// machineTime is how the whole machine, and of it this process, has spent its
// processors' time since boot. The kernel tells it in ticks of 10 ms.
type machineTime struct {
	busy   time.Duration // neither idle nor stolen, over all processors
	stolen time.Duration // the hypervisor gave it to others
	own    time.Duration // this process, its children that ended, and the kernel's threads for softirqs
}

// userTick is the unit of /proc/stat, USER_HZ, which is 100 on every architecture
// that natkit is built for.
const userTick = 10 * time.Millisecond

func readMachineTime() (m machineTime, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return m, fmt.Errorf("read CPU times: %w", err)
	}
	var user, nice, system, idle, iowait, irq, softirq, steal time.Duration
	first, _, _ := strings.Cut(string(text), "\n")
	if _, err := fmt.Sscanf(first, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal); err != nil {
		return m, fmt.Errorf("read CPU times: /proc/stat begins with %q: %w", first, err)
	}
	m.busy = (user + nice + system + irq + softirq) * userTick
	m.stolen = steal * userTick
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			return m, fmt.Errorf("read CPU time of process: %w", err)
		}
		m.own += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	for _, pid := range threadsNamed("ksoftirqd/*") {
		m.own += readSchedstat(pid).ran
	}
	return m, nil
}

func (m machineTime) since(before machineTime) machineTime {
	return machineTime{m.busy - before.busy, m.stolen - before.stolen, m.own - before.own}
}

// Shares of the machine's time beyond which a trial of a second is no measure of
// the router. Busy time is counted in ticks, the process's own exactly: a smaller
// share of other programs can't be told from the difference.
const (
	maxMachineSteal   = 0.02
	maxMachineForeign = 0.08
)

// noisy tells whether something else used the machine's processors while the time
// passed.
func (m machineTime) noisy(elapsed time.Duration) bool {
	all := elapsed.Seconds() * float64(runtime.NumCPU())
	return m.stolen.Seconds() > maxMachineSteal*all || (m.busy-m.own).Seconds() > maxMachineForeign*all
}
