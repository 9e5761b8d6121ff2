// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// host reads what the machine is: kernel, processors, memory.
func host() source {
	return source{
		name:  "host",
		costs: "sizes cannot be compared with the machine's memory",
		end: func(v *view, s *snapshot.Snapshot) error {
			release, err := v.read("proc/sys/kernel/osrelease")
			if err != nil {
				return err
			}
			s.Host.Kernel = strings.TrimSpace(release)
			if name, err := v.read("proc/sys/kernel/hostname"); err == nil {
				s.Host.Hostname = strings.TrimSpace(name)
			}
			if stat, err := v.read("proc/stat"); err == nil {
				s.Host.CPUs = len(parseCPUTimes(stat))
			}
			text, err := v.read("proc/meminfo")
			if err != nil {
				return err
			}
			s.Host.AvailableBytes, _ = parseMeminfo(text, "MemAvailable") // not there before Linux 3.14
			s.Host.MemoryBytes, err = parseMeminfo(text, "MemTotal")
			return err
		},
	}
}

// parseMeminfo returns one of the sizes of /proc/meminfo in bytes.
func parseMeminfo(meminfo, name string) (uint64, error) {
	for line := range strings.Lines(meminfo) {
		rest, ok := strings.CutPrefix(line, name+":")
		if !ok {
			continue
		}
		kb, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		if err != nil || kb > 1<<50 {
			return 0, fmt.Errorf("read /proc/meminfo: %s is %q", name, short(rest))
		}
		return kb << 10, nil
	}
	return 0, fmt.Errorf("read /proc/meminfo: no %s", name)
}
