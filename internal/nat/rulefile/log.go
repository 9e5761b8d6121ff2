// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"natkit/internal/natlog"
)

// LogRecord is what the log of translations consists of.
type LogRecord uint8

// What may be recorded. Port blocks are recorded in any case, where a pool has them.
const (
	LogDefault  LogRecord = iota // LogBlocks where a pool has blocks, otherwise LogMappings
	LogBlocks                    // blocks, and mappings of pools without them
	LogMappings                  // every mapping
	LogSessions                  // every session
)

var logRecordNames = []string{"", "blocks", "mappings", "sessions"}

func (l LogRecord) String() string { return logRecordNames[l] }

// Log says that translations are recorded, and how. The zero value: they are not.
type Log struct {
	On           bool
	Record       LogRecord
	Destinations bool          // of sessions: whom they are to
	Folder       string        // an absolute path; "" is the usual one
	Age          time.Duration // how long hours of the log are kept; 0 is the usual
	Bytes        int64         // how much is kept; 0 is the usual
	Sinks        []string      // URLs to which records are sent
}

// Bounds of the key log.
const (
	MinLogAge   = time.Hour
	MinLogBytes = 1 << 20
)

// HasBlocks reports whether a pool gives ports in blocks.
func (f *File) HasBlocks() bool {
	return slices.ContainsFunc(f.Pools, func(p Pool) bool { return !p.Blocks.IsZero() })
}

// Recorded is what the log consists of; LogDefault: nothing is recorded. Port blocks are
// recorded without the key log too, so that a log that begins later has those that there are.
func (f *File) Recorded() LogRecord {
	switch {
	case f.Log.Record != LogDefault:
		return f.Log.Record
	case f.HasBlocks():
		return LogBlocks
	case f.Log.On:
		return LogMappings
	}
	return LogDefault
}

// --- reading -------------------------------------------------------------------------

var logKeys = []string{"record", "destinations", "folder", "age", "size", "sinks"}

func (r *reader) log(n *yaml.Node) {
	l := &r.file.Log
	l.On = true
	for _, e := range r.entries(n, "log") {
		r.file.positions["log."+e.name] = position(e.key)
		switch e.name {
		case "record":
			l.Record = LogRecord(r.choice(e.value, e.name, logRecordNames))
		case "destinations":
			l.Destinations = r.truth(e.value, e.name)
		case "folder":
			if l.Folder = r.word(e.value, e.name); l.Folder != "" && (!filepath.IsAbs(l.Folder) || filepath.Clean(l.Folder) != l.Folder) {
				r.fail(e.value, "folder is a whole path, such as /var/lib/natkit/log, and not %q", l.Folder)
			}
		case "age":
			l.Age = r.logAge(e)
		case "size":
			l.Bytes = r.logBytes(e)
		case "sinks":
			l.Sinks = r.logSinks(e.value)
		default:
			r.unknown(e, "log", logKeys...)
		}
	}
}

// count reads a whole number that begins with no zero, with one of some units behind it.
func count[T any](s string, units map[string]T) (n uint64, unit T, ok bool) {
	at := strings.IndexFunc(s, func(c rune) bool { return c < '0' || c > '9' })
	if at <= 0 || s[0] == '0' {
		return 0, unit, false
	}
	unit, ok = units[s[at:]]
	n, err := strconv.ParseUint(s[:at], 10, 24)
	return n, unit, ok && err == nil
}

var (
	ageUnits  = map[string]time.Duration{"h": time.Hour, "d": 24 * time.Hour}
	sizeUnits = map[string]int64{"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
)

func (r *reader) logAge(e entry) time.Duration {
	s := r.word(e.value, e.name)
	n, unit, ok := count(s, ageUnits)
	if s != "" && (!ok || n > 36500) {
		r.fail(e.value, "age is hours or days such as 12h or 180d, at most 36500d, and not %q", s)
		return 0
	}
	return time.Duration(n) * unit
}

func (r *reader) logBytes(e entry) int64 {
	s := r.word(e.value, e.name)
	n, unit, ok := count(s, sizeUnits)
	if s != "" && (!ok || n > 1<<20) {
		r.fail(e.value, "size is a size such as 500MB, 10GB or 2TB, and not %q", s)
		return 0
	}
	return int64(n) * unit
}

func (r *reader) logSinks(n *yaml.Node) (sinks []string) {
	for _, element := range r.elements(n, "sinks") {
		s := r.word(element, "a sink")
		if s == "" {
			continue
		}
		if _, err := natlog.ParseSink(s); err != nil {
			r.fail(element, "sink %v", err)
			continue
		}
		if slices.Contains(sinks, s) {
			r.fail(element, "sink %s is listed twice", s)
			continue
		}
		sinks = append(sinks, s)
	}
	return sinks
}

// --- what must fit together -----------------------------------------------------------

func (r *reader) logFits() {
	l := &r.file.Log
	if l.Destinations && l.Record != LogSessions {
		r.add(r.file.at("log.destinations"), "destinations belong to sessions: write record: sessions")
	}
	if l.Record == LogBlocks && !r.file.HasBlocks() {
		r.add(r.file.at("log.record"), "record: blocks, and no pool has blocks: write record: mappings")
	}
}

// --- writing --------------------------------------------------------------------------

func (l *Log) write(b *strings.Builder) {
	if !l.On {
		return
	}
	var fields [][2]string
	add := func(key, value string) { fields = append(fields, [2]string{key, value}) }
	if l.Record != LogDefault {
		add("record", l.Record.String())
	}
	if l.Destinations {
		add("destinations", "true")
	}
	if l.Folder != "" {
		add("folder", strconv.Quote(l.Folder))
	}
	if l.Age != 0 {
		add("age", logAgeText(l.Age))
	}
	if l.Bytes != 0 {
		add("size", logBytesText(l.Bytes))
	}
	if len(l.Sinks) > 0 {
		quoted := make([]string, len(l.Sinks))
		for i, s := range l.Sinks {
			quoted[i] = strconv.Quote(s)
		}
		add("sinks", "["+strings.Join(quoted, ", ")+"]")
	}
	if fields == nil {
		b.WriteString("log: {}\n")
		return
	}
	block(b, "log", fields)
}

func logAgeText(d time.Duration) string {
	if day := 24 * time.Hour; d%day == 0 {
		return strconv.Itoa(int(d/day)) + "d"
	}
	return strconv.Itoa(int(d/time.Hour)) + "h"
}

func logBytesText(n int64) string {
	for _, unit := range []string{"TB", "GB", "MB"} {
		if n%sizeUnits[unit] == 0 {
			return strconv.FormatInt(n/sizeUnits[unit], 10) + unit
		}
	}
	return ""
}
