// SPDX-License-Identifier: Apache-2.0

package conntrack

// The counters of the table, which conntrack -S shows.

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Stats are the counters of each processor, by the names of conntrack -S, since the namespace was made. Each has 32 bits, and
// begins at zero again.
type Stats []map[string]uint64

// statsFile is where most kernels show them. A test points it elsewhere.
var statsFile = "/proc/thread-self/net/stat/nf_conntrack"

// ReadStats reads the counters of the calling thread's namespace, by ctnetlink where the kernel has no file of them: those
// of Red Hat's family are built without it.
func ReadStats() (Stats, error) {
	text, err := os.ReadFile(statsFile)
	if errors.Is(err, fs.ErrNotExist) {
		c, err := askStats()
		if err != nil {
			return nil, fmt.Errorf("read conntrack counters: %w", err)
		}
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read conntrack counters: %w", err)
	}
	return ParseStats(string(text))
}

// Sum is each counter of all processors.
func (c Stats) Sum() map[string]uint64 {
	out := map[string]uint64{}
	for _, row := range c {
		for name, n := range row {
			out[name] += n
		}
	}
	return out
}

// Since is by how much each counter grew since before, over all processors.
func (c Stats) Since(before Stats) map[string]uint64 {
	out := map[string]uint64{}
	for cpu := range min(len(before), len(c)) {
		for name, n := range c[cpu] {
			if b, ok := before[cpu][name]; ok {
				out[name] += increase(b, n)
			}
		}
	}
	return out
}

// increase is how much a counter of 32 bits grew, which may have passed zero. One that went backwards is of another
// namespace, which began at zero: what it has now is what is sure.
func increase(before, after uint64) uint64 {
	if d := uint64(uint32(after - before)); d < 1<<31 {
		return d
	}
	return after
}

// fileNames are the columns that conntrack -S calls otherwise.
var fileNames = map[string]string{"icmp_error": "error", "clashres": "clash_resolve", "chainlength": "chaintoolong"}

// ParseStats reads /proc/net/stat/nf_conntrack: a line of names, then a line of hexadecimal values for each processor.
// Columns came and went with the years, so that only the names count. The column entries is the same on each line, a
// level and not a counter, and is left out.
func ParseStats(text string) (Stats, error) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	names := strings.Fields(lines[0])
	if len(names) == 0 || len(lines) < 2 {
		return nil, errors.New("read conntrack counters: no line of names and of values")
	}
	var out Stats
	for i, line := range lines[1:] {
		fields := strings.Fields(line)
		if len(fields) != len(names) {
			return nil, fmt.Errorf("read conntrack counters: line %d has %d values for %d names", i+2, len(fields), len(names))
		}
		row := make(map[string]uint64, len(names))
		for j, name := range names {
			if name == "entries" {
				continue
			}
			n, err := strconv.ParseUint(fields[j], 16, 64)
			if err != nil {
				return nil, fmt.Errorf("read conntrack counters: line %d: %s is %.40q", i+2, name, fields[j])
			}
			row[cmp.Or(fileNames[name], name)] = n
		}
		out = append(out, row)
	}
	return out, nil
}

// Of linux/netfilter/nfnetlink_conntrack.h: the message, and the attributes of enum ctattr_stats_cpu.
const msgStatsCPU = unix.NFNL_SUBSYS_CTNETLINK<<8 | 4

var ctaStats = map[uint16]string{
	2: "found", 4: "invalid", 8: "insert", 9: "insert_failed", 10: "drop", 11: "early_drop",
	12: "error", 13: "search_restart", 14: "clash_resolve", 15: "chaintoolong",
}

// statsPatience is how long the kernel may take for them.
const statsPatience = 5 * time.Second

func askStats() (out Stats, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), statsPatience)
	defer cancel()
	s, err := openSocket(ctx, 0)
	if err != nil {
		return nil, err
	}
	defer s.close()
	var m message
	s.seq++
	m.begin(msgStatsCPU, unix.NLM_F_DUMP, s.seq, unix.AF_UNSPEC)
	m.end()
	if err := s.send(m.b); err != nil {
		return nil, err
	}
	var end error
	for end == nil {
		b, err := s.receive()
		if err != nil {
			return nil, err
		}
		if err := eachMessage(b, func(typ, _ uint16, seq uint32, payload []byte) bool {
			switch {
			case seq != s.seq:
			case typ == msgStatsCPU:
				out = append(out, parseCPU(payload))
			case typ == unix.NLMSG_DONE, typ == unix.NLMSG_ERROR:
				end = errDone
				if errno, ok := errorOf(payload); ok && errno != 0 {
					end = explain(errno)
				}
			}
			return end == nil
		}); err != nil {
			return nil, err
		}
	}
	if end != errDone {
		return nil, end
	}
	return out, nil
}

// parseCPU reads the counters of one processor.
func parseCPU(payload []byte) map[string]uint64 {
	row := map[string]uint64{}
	attrs := payload[min(nfHeaderLen, len(payload)):]
	for {
		typ, v, rest, ok := nextAttr(attrs)
		if !ok {
			return row
		}
		if name := ctaStats[typ]; name != "" && len(v) == 4 {
			row[name] = uint64(binary.BigEndian.Uint32(v))
		}
		attrs = rest
	}
}
