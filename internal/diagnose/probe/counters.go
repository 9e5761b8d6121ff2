// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// counters reads the stack's own counters of the namespace: what nstat(8) shows.
func counters() source {
	var before map[string]uint64
	return source{
		name:  snapshot.CanCounters,
		costs: "drops by forwarding, reverse path, MTU and full accept queues are not counted",
		start: func(v *view) (err error) {
			before, err = readCounters(v)
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			after, err := readCounters(v)
			if err != nil {
				return err
			}
			s.Counters = make(map[string]uint64, len(after))
			for name, n := range after {
				if b, ok := before[name]; ok {
					s.Counters[name] = increase(b, n)
				}
			}
			return nil
		},
	}
}

// readCounters reads them, since the namespace was made.
func readCounters(v *view) (map[string]uint64, error) {
	out := map[string]uint64{}
	for _, file := range []string{"snmp", "netstat"} {
		text, err := v.readNet(file)
		if err != nil {
			return nil, err
		}
		if err := parseCounters(text, out); err != nil {
			return nil, fmt.Errorf("read /proc/net/%s: %w", file, err)
		}
	}
	return out, nil
}

// gauges are the columns that are settings or levels, not counters.
var gauges = map[string]bool{
	"Ip.Forwarding": true, "Ip.DefaultTTL": true,
	"Tcp.RtoAlgorithm": true, "Tcp.RtoMin": true, "Tcp.RtoMax": true, "Tcp.MaxConn": true, "Tcp.CurrEstab": true,
}

// parseCounters reads /proc/net/snmp or netstat into out: pairs of lines, names
// and values, that begin with the same word. Which columns there are differs by
// kernel, so that only the names count.
func parseCounters(text string, out map[string]uint64) error {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		group, names, ok := strings.Cut(lines[i], ":")
		group2, values, ok2 := strings.Cut(lines[i+1], ":")
		if !ok || !ok2 || group != group2 {
			return fmt.Errorf("line %d and %d are no pair of names and values", i+1, i+2)
		}
		n, v := strings.Fields(names), strings.Fields(values)
		if len(n) != len(v) {
			return fmt.Errorf("line %d has %d names, line %d has %d values", i+1, len(n), i+2, len(v))
		}
		for j := range n {
			name := group + "." + n[j]
			if gauges[name] {
				continue
			}
			// A value below zero is a level in disguise; leave it out.
			if value, err := strconv.ParseUint(v[j], 10, 64); err == nil {
				out[name] = value
			}
		}
	}
	return nil
}
