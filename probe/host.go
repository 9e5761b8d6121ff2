// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/snapshot"
)

// host reads what the machine is: kernel, processors, memory.
func host() source {
	return source{
		name:  "host",
		costs: "sizes can't be compared with the machine's memory",
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
			s.Host.MemoryBytes, err = parseMemTotal(text)
			return err
		},
	}
}

// parseMemTotal returns the MemTotal of /proc/meminfo in bytes.
func parseMemTotal(meminfo string) (uint64, error) {
	for line := range strings.Lines(meminfo) {
		rest, ok := strings.CutPrefix(line, "MemTotal:")
		if !ok {
			continue
		}
		kb, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		if err != nil || kb > 1<<50 {
			return 0, fmt.Errorf("read /proc/meminfo: MemTotal is %q", short(rest))
		}
		return kb << 10, nil
	}
	return 0, fmt.Errorf("read /proc/meminfo: no MemTotal")
}
