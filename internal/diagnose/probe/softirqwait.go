// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// softirqWait reads how long ksoftirqd waited for its processor: the time for
// which packets lay there because other work had it. It adds to what cpus read.
func softirqWait() source {
	var threads map[int]string // processor -> the thread's folder below proc
	var before map[int]schedstat
	return source{
		name:  snapshot.CanSoftirqWait,
		costs: "packets that wait for a busy CPU are not distinguished from slow ones",
		start: func(v *view) (err error) {
			if threads, err = ksoftirqd(v); err != nil {
				return err
			}
			before, err = readSchedstats(v, threads)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readSchedstats(v, threads)
			if err != nil {
				return err
			}
			for i := range s.CPUs {
				n := s.CPUs[i].Number
				was, ok1 := before[n]
				now, ok2 := after[n]
				if !ok1 || !ok2 {
					continue
				}
				runs := increase(was.runs, now.runs)
				wait := float64(increase(was.waitNS, now.waitNS)) / 1e9
				s.CPUs[i].KsoftirqdRuns, s.CPUs[i].KsoftirqdWait = &runs, &wait
			}
			return nil
		},
	}
}

// ksoftirqd finds the threads by their names among the children of kthreadd,
// which is process 2 of the initial process namespace.
func ksoftirqd(v *view) (map[int]string, error) {
	if name, err := v.read("proc/2/comm"); err != nil || strings.TrimSpace(name) != "kthreadd" {
		// Waived: a container's doctor could never say that nothing is wrong, for the sake of one
		// rare cause that slows packets down and loses none.
		return nil, waived("the kernel's threads are not visible in this process namespace (run natkit on the host to see them)")
	}
	children, err := v.read("proc/2/task/2/children")
	if err != nil {
		return nil, err
	}
	out := map[int]string{}
	for _, pid := range strings.Fields(children) {
		name, err := v.read("proc/" + pid + "/comm")
		if err != nil {
			continue
		}
		number, ok := strings.CutPrefix(strings.TrimSpace(name), "ksoftirqd/")
		if n, err := strconv.ParseUint(number, 10, 16); ok && err == nil {
			out[int(n)] = "proc/" + pid
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no thread ksoftirqd found")
	}
	return out, nil
}

// schedstat is /proc/PID/schedstat: time on the processor and time waiting for
// it, in nanoseconds, and how often it was given it.
type schedstat struct{ waitNS, runs uint64 }

func readSchedstats(v *view, threads map[int]string) (map[int]schedstat, error) {
	out := map[int]schedstat{}
	var last error
	for n, dir := range threads {
		text, err := v.read(dir + "/schedstat")
		if err != nil {
			last = err
			continue
		}
		s, err := parseSchedstat(text)
		if err != nil {
			return nil, fmt.Errorf("read %s/schedstat: %w", dir, err)
		}
		out[n] = s
	}
	if len(out) == 0 {
		return nil, last
	}
	return out, nil
}

func parseSchedstat(text string) (schedstat, error) {
	fields := strings.Fields(text)
	if len(fields) < 3 {
		return schedstat{}, fmt.Errorf("%q: want three numbers", short(text))
	}
	wait, err1 := strconv.ParseUint(fields[1], 10, 64)
	runs, err2 := strconv.ParseUint(fields[2], 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return schedstat{}, fmt.Errorf("%q: want three numbers", short(text))
	}
	return schedstat{waitNS: wait, runs: runs}, nil
}
