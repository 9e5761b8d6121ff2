// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// cpus reads how busy each processor was, how much of that was softirq (where
// forwarding happens), and what its receive queue lost.
func cpus() source {
	var times map[int]cpuTimes
	var queues map[int]softnet
	read := func(v *view) (map[int]cpuTimes, map[int]softnet, error) {
		stat, err := v.read("proc/stat")
		if err != nil {
			return nil, nil, err
		}
		t := parseCPUTimes(stat)
		text, err := v.readNet("softnet_stat")
		if err != nil {
			return nil, nil, err
		}
		return t, parseSoftnet(text, t), nil
	}
	return source{
		name:  snapshot.CanCPUs,
		costs: "CPUs that are busy with packets, or lose them before the stack, are not found",
		start: func(v *view) (err error) {
			times, queues, err = read(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			t, q, err := read(v)
			if err != nil {
				return err
			}
			for _, n := range slices.Sorted(maps.Keys(t)) {
				before, ok := times[n]
				if !ok { // came on line in the window
					continue
				}
				cpu := snapshot.CPU{Number: n}
				total := 0.0
				var d cpuTimes
				for i := range d {
					d[i] = increase(before[i], t[n][i])
					total += float64(d[i])
				}
				if total > 0 {
					cpu.Busy = 1 - float64(d[cpuIdle]+d[cpuIOWait])/total
					cpu.Softirq = float64(d[cpuSoftirq]) / total
					cpu.Steal = float64(d[cpuSteal]) / total
				}
				cpu.Packets = increase32(queues[n].packets, q[n].packets)
				cpu.BacklogDropped = increase32(queues[n].dropped, q[n].dropped)
				cpu.Squeezed = increase32(queues[n].squeezed, q[n].squeezed)
				s.CPUs = append(s.CPUs, cpu)
			}
			return nil
		},
	}
}

// cpuTimes is a cpuN line of /proc/stat, in clock ticks: user nice system idle
// iowait irq softirq steal. The two columns of guests are part of user and nice.
type cpuTimes [8]uint64

const (
	cpuIdle    = 3
	cpuIOWait  = 4
	cpuSoftirq = 6
	cpuSteal   = 7
)

// parseCPUTimes reads the cpuN lines of /proc/stat. Columns that an old kernel
// does not have stay zero.
func parseCPUTimes(stat string) map[int]cpuTimes {
	out := map[int]cpuTimes{}
	for line := range strings.Lines(stat) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasPrefix(fields[0], "cpu") {
			continue
		}
		n, err := strconv.ParseUint(fields[0][len("cpu"):], 10, 16)
		if err != nil { // the sum over all has no number
			continue
		}
		var t cpuTimes
		for i := range t {
			if i+1 < len(fields) {
				t[i], _ = strconv.ParseUint(fields[i+1], 10, 64)
			}
		}
		out[int(n)] = t
	}
	return out
}

// softnet is a line of /proc/net/softnet_stat.
type softnet struct{ packets, dropped, squeezed uint64 }

// parseSoftnet reads /proc/net/softnet_stat: hexadecimal, one line an online
// processor, without a header. Since Linux 5.10 column 13 is the processor's
// number; before that lines are in the order of the online processors, which
// are those of times.
func parseSoftnet(text string, times map[int]cpuTimes) map[int]softnet {
	online := slices.Sorted(maps.Keys(times))
	out := map[int]softnet{}
	row := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		column := func(i int) uint64 {
			n, _ := strconv.ParseUint(fields[i], 16, 32)
			return n
		}
		number := -1
		if row < len(online) {
			number = online[row]
		}
		row++
		if len(fields) >= 13 {
			number = int(column(12))
		}
		if number >= 0 {
			out[number] = softnet{column(0), column(1), column(2)}
		}
	}
	return out
}
