// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// kernelLog reads what the kernel said about a full conntrack table: what is in
// its log when the window begins, and what comes in the window.
func kernelLog(opts Options) source {
	out := source{
		name:  snapshot.CanKernelLog,
		costs: "\"table full\" lines of the kernel are not counted",
		live:  true,
	}
	log := &logReader{kmsg: kmsg{fd: -1}}
	if opts.shared != nil {
		log = &opts.shared.log
	} else {
		out.start = func(*view) error { return log.begin() }
		out.stop = log.close
	}
	out.end = func(_ *view, s *snapshot.Snapshot) error {
		if opts.shared == nil {
			log.goOn()
		}
		if log.err != nil {
			return log.err
		}
		s.KernelLog = judgeLog(log.before, log.during, s.Netns)
		return nil
	}
	return out
}

// logReader is the log before a window and in it.
type logReader struct {
	kmsg
	before, during []string
	err            error
}

// begin reads what is there when the window begins.
func (l *logReader) begin() error {
	if l.err = l.open(); l.err == nil {
		l.before, l.err = l.readTelling()
	}
	return l.err
}

// goOn reads what has come since.
func (l *logReader) goOn() {
	if l.err == nil {
		l.during, l.err = l.readTelling()
	}
}

// keptLines is how many telling lines are kept from windows before.
const keptLines = 1000

// again begins another window.
func (l *logReader) again() {
	if l.err != nil {
		return
	}
	l.goOn()
	l.before = append(l.before, l.during...)
	l.before, l.during = l.before[max(0, len(l.before)-keptLines):], nil
}

func (l *logReader) readTelling() ([]string, error) {
	lines, err := l.read()
	return telling(lines), err
}

// telling are the lines, with one empty line for those side by side that judgeLog makes nothing of: it
// looks at all again for each namespace, which with a long log would take more time than all the rest.
func telling(lines []string) (out []string) {
	for _, line := range lines {
		if !tableFull.MatchString(line) && !suppressed.MatchString(line) && !noMemory.MatchString(line) && !helperDrop.MatchString(line) {
			if line = ""; len(out) > 0 && out[len(out)-1] == "" {
				continue
			}
		}
		out = append(out, line)
	}
	return out
}

// kmsg is a place in the kernel's log: each read gives the lines that came after
// the one before, the first read all that the log still has. It is /dev/kmsg or,
// where that is not there or not allowed, syslog(2).
type kmsg struct {
	fd   int
	seen []byte // by syslog(2): all that it said the last time
}

func (k *kmsg) open() (err error) {
	k.fd, err = unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		return nil
	}
	if _, errSyslog := unix.Klogctl(unix.SYSLOG_ACTION_SIZE_BUFFER, nil); errSyslog != nil {
		return fmt.Errorf("open /dev/kmsg: %w", err)
	}
	return nil
}

func (k *kmsg) close() {
	if k.fd >= 0 {
		unix.Close(k.fd)
		k.fd = -1
	}
}

func (k *kmsg) read() ([]string, error) {
	if k.fd < 0 {
		return k.readSyslog()
	}
	var lines []string
	buf := make([]byte, 16<<10) // a record has at most 8 KiB
	for {
		n, err := unix.Read(k.fd, buf)
		switch {
		case err == nil:
			if line, ok := parseKmsg(string(buf[:n])); ok {
				lines = append(lines, line)
			}
		case errors.Is(err, unix.EAGAIN):
			return lines, nil
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EINTR):
			// EPIPE: records were overwritten before they were read; the next read
			// continues with the oldest that is left.
		default:
			return nil, fmt.Errorf("read /dev/kmsg: %w", err)
		}
	}
}

func (k *kmsg) readSyslog() ([]string, error) {
	size, err := unix.Klogctl(unix.SYSLOG_ACTION_SIZE_BUFFER, nil)
	if err != nil {
		return nil, fmt.Errorf("read kernel log: %w", err)
	}
	buf := make([]byte, size)
	n, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, buf)
	if err != nil {
		return nil, fmt.Errorf("read kernel log: %w", err)
	}
	fresh := freshText(k.seen, buf[:n])
	k.seen = buf[:n]
	var lines []string
	for line := range strings.Lines(string(fresh)) {
		if text, ok := parseSyslog(strings.TrimSuffix(line, "\n")); ok {
			lines = append(lines, text)
		}
	}
	return lines, nil
}

// freshText is the part of now that was not in seen: what comes after seen's end.
// The log is a ring, so its beginning moves; its lines have time stamps, so the
// last few are unique.
func freshText(seen, now []byte) []byte {
	if len(seen) == 0 {
		return now
	}
	tail := seen[max(0, len(seen)-512):]
	if i := bytes.LastIndex(now, tail); i >= 0 {
		return now[i+len(tail):]
	}
	return now // all of it was overwritten
}

// parseKmsg reads a record of /dev/kmsg: "6,1234,5678901,-;text", and after a
// newline fields that are not of interest. Only the kernel's own records count:
// programs can write there too.
func parseKmsg(record string) (string, bool) {
	head, text, ok := strings.Cut(record, ";")
	if !ok {
		return "", false
	}
	priority, _, _ := strings.Cut(head, ",")
	if !fromKernel(priority) {
		return "", false
	}
	text, _, _ = strings.Cut(text, "\n")
	return text, true
}

// parseSyslog reads a line of syslog(2): "<6>[ 5678.901234] text". Time stamps
// may be off, and with CONFIG_PRINTK_CALLER a second pair of brackets follows.
func parseSyslog(line string) (string, bool) {
	rest, ok := strings.CutPrefix(line, "<")
	priority, text, ok2 := strings.Cut(rest, ">")
	if !ok || !ok2 || !fromKernel(priority) {
		return "", false
	}
	for strings.HasPrefix(text, "[") {
		_, text, _ = strings.Cut(text, "]")
		text = strings.TrimPrefix(text, " ")
	}
	return text, true
}

// fromKernel says whether a priority has facility 0, which programs can't set.
func fromKernel(priority string) bool {
	n, err := strconv.ParseUint(priority, 10, 32)
	return err == nil && n>>3 == 0
}

var (
	// "nf_conntrack: table full, dropping packet", on old kernels with the name
	// twice, or as ip_conntrack, or with a dot at its end. New ones (6.18 does) name
	// any namespace but the initial one: "table full in netns 4026532322, dropping packet".
	tableFull  = regexp.MustCompile(`\b(?:nf|ip)_conntrack: table full(?: in netns (\d+))?, dropping packet`)
	suppressed = regexp.MustCompile(`\bnet_ratelimit: (\d+) callbacks suppressed`)

	// What the allocators of pages and of slabs say (warn_alloc, slab_out_of_memory),
	// and a helper that refuses a packet (nf_ct_helper_log).
	noMemory   = regexp.MustCompile(`page allocation failure: order:|\bSLUB: Unable to allocate memory on `)
	helperDrop = regexp.MustCompile(`\bnf_ct_\w+: dropping packet`)
)

// maxLogLines is how many lines a Snapshot quotes.
const maxLogLines = 5

// judgeLog counts the lines about a full table of the namespace ns. A line that
// names none is taken for the initial one's; an old kernel may have meant another.
//
// Suppressed lines may have been any message under the limit that all of the
// network code shares: they count only if the line before or after is one about
// this full table.
func judgeLog(before, during []string, ns snapshot.Netns) *snapshot.KernelLog {
	out := &snapshot.KernelLog{}
	isOurs := func(line string) (full, ours bool) {
		m := tableFull.FindStringSubmatch(line)
		if m == nil {
			return false, false
		}
		if m[1] == "" {
			return true, ns.Init
		}
		return true, m[1] == strconv.FormatUint(ns.Inode, 10)
	}
	quote := func(line string) { out.Lines = append(out.Lines, line) }
	all := append(before[:len(before):len(before)], during...)
	for i, line := range all {
		inWindow := i >= len(before)
		switch {
		case !inWindow:
		case noMemory.MatchString(line):
			out.NoMemory++
			quote(line)
		case helperDrop.MatchString(line):
			out.HelperDrops++
			quote(line)
		}
		if full, ours := isOurs(line); full {
			switch {
			case ours && inWindow:
				out.TableFull++
				fallthrough
			case ours:
				out.TableFullBefore++
				quote(line)
			case inWindow:
				out.OtherTableFull++
			}
			continue
		}
		m := suppressed.FindStringSubmatch(line)
		if m == nil || !inWindow {
			continue
		}
		adjacent := false
		for _, j := range []int{i - 1, i + 1} {
			if j >= 0 && j < len(all) {
				_, ours := isOurs(all[j])
				adjacent = adjacent || ours
			}
		}
		if n, err := strconv.ParseUint(m[1], 10, 64); err == nil && adjacent {
			out.Suppressed += n
			quote(line)
		}
	}
	out.Lines = out.Lines[max(0, len(out.Lines)-maxLogLines):]
	return out
}
