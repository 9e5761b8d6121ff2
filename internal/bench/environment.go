// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ReadEnvironment reads what a figure depends on besides the router. natkit is
// the program's own version. What this kernel does not tell is left out.
func ReadEnvironment(natkit string) Environment {
	e := Environment{Natkit: natkit, CPUs: runtime.NumCPU(), Settings: map[string]string{}, Mitigations: map[string]string{}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		e.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	e.CPU = readLine("/proc/cpuinfo", "model name")
	e.Hypervisor = strings.Contains(" "+readLine("/proc/cpuinfo", "flags")+" ", " hypervisor ")
	kilobytes, _ := strconv.ParseUint(strings.TrimSuffix(readLine("/proc/meminfo", "MemTotal"), " kB"), 10, 64)
	e.MemoryBytes = kilobytes << 10
	for _, key := range []string{"net/netfilter/nf_conntrack_buckets", "net/netfilter/nf_conntrack_max"} {
		if text, err := os.ReadFile("/proc/sys/" + key); err == nil {
			e.Settings[strings.ReplaceAll(key, "/", ".")] = strings.TrimSpace(string(text))
		}
	}
	paths, _ := filepath.Glob("/sys/devices/system/cpu/vulnerabilities/*") // fails for a bad pattern alone
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil && !strings.HasPrefix(string(text), "Not affected") {
			e.Mitigations[filepath.Base(path)] = strings.TrimSpace(string(text))
		}
	}
	return e
}

// readLine returns the value of the first line "name : value" of a file.
func readLine(path, name string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
