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
		end: func(v *view, s *snapshot.Snapshot) (err error) {
			s.Host, err = readHost(v)
			return err
		},
	}
}

// Host is what is known of this machine, without what cannot be read.
func Host() snapshot.Host {
	h, _ := readHost(newView("/"))
	return h
}

func readHost(v *view) (h snapshot.Host, err error) {
	release, err := v.read("proc/sys/kernel/osrelease")
	if err != nil {
		return h, err
	}
	h.Kernel = strings.TrimSpace(release)
	if name, err := v.read("proc/sys/kernel/hostname"); err == nil {
		h.Hostname = strings.TrimSpace(name)
	}
	if stat, err := v.read("proc/stat"); err == nil {
		h.CPUs = len(parseCPUTimes(stat))
	}
	text, err := v.read("proc/meminfo")
	if err != nil {
		return h, err
	}
	h.AvailableBytes, _ = parseMeminfo(text, "MemAvailable") // not there before Linux 3.14
	h.MemoryBytes, err = parseMeminfo(text, "MemTotal")
	return h, err
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
