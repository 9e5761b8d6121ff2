// SPDX-License-Identifier: Apache-2.0

// Package natlog is what the log of translations consists of: one Record of a mapping, a
// session or a port block that began, ended or was alive, or of a gap in the log. Its
// sources make records, the store keeps them, sinks send them on. Pure.
package natlog

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Kind is what a record is about.
type Kind uint8

// Kinds.
const (
	NoKind  Kind = iota // a gap, a tick
	Mapping             // an internal endpoint with its external endpoint
	Session             // one conversation
	Block               // ports of an external address for one subscriber
)

// Event is what happened.
type Event uint8

// Events.
const (
	Tick Event = iota // the log was kept until here; in the journal only. With a Note: a mark of Source
	Created
	Ended
	Alive     // it was there when the file began, or after a gap
	Exhausted // no port or address was left, or few (Record.Nearly)
	Quota     // a subscriber reached its limit, or nearly
	Gap       // events are missing from Since to Time
	Applied   // the rules of the file that Note names came into force
)

// Source is what translated.
type Source uint8

// Sources.
const (
	NoSource Source = iota
	Kernel          // netfilter, also under accel: conntrack events
	Engine          // the eBPF engine
)

var (
	kinds   = []string{"", "mapping", "session", "block"}
	events  = []string{"tick", "created", "ended", "alive", "exhausted", "quota", "gap", "applied"}
	sources = []string{"", "kernel", "ebpf"}
)

func word(words []string, i uint8) string {
	if int(i) < len(words) {
		return words[i]
	}
	return strconv.Itoa(int(i))
}

func (k Kind) String() string   { return word(kinds, uint8(k)) }
func (e Event) String() string  { return word(events, uint8(e)) }
func (s Source) String() string { return word(sources, uint8(s)) }

func parseWord(words []string, s string) (uint8, bool) {
	for i, w := range words {
		if w == s {
			return uint8(i), true
		}
	}
	return 0, false
}

// ParseKind, ParseEvent and ParseSource are the inverse of String.
func ParseKind(s string) (Kind, bool) { n, ok := parseWord(kinds, s); return Kind(n), ok }

// ParseEvent is the inverse of Event.String.
func ParseEvent(s string) (Event, bool) { n, ok := parseWord(events, s); return Event(n), ok }

// ParseSource is the inverse of Source.String.
func ParseSource(s string) (Source, bool) { n, ok := parseWord(sources, s); return Source(n), ok }

// Micros is a time in microseconds since 1970; 0 is unknown. All files and sinks have it.
type Micros int64

// MicrosOf is a time as Micros.
func MicrosOf(t time.Time) Micros { return Micros(t.UnixMicro()) }

// Time is a Micros as a time in UTC.
func (m Micros) Time() time.Time { return time.UnixMicro(int64(m)).UTC() }

// Translation is who had which external endpoint. It can be compared: what began and what
// ended have the same one.
type Translation struct {
	Kind     Kind
	Source   Source
	Protocol uint8 // IP protocol; 0: all, as of a host with an address of its own
	Zone     uint16
	VLAN     uint16
	LastPort uint16 // of a block: its ports are those from External's to this one
	Internal netip.AddrPort
	External netip.AddrPort
	// Destination is known only where sessions are recorded with it.
	Destination netip.AddrPort
	Subscriber  string
}

// Record is one line of the log.
type Record struct {
	Translation
	Event Event
	Time  Micros
	Since Micros // when it was created, or the gap began; 0: unknown
	Note  string // why there is a gap; of which pool, which limit
}

// Mark is a tick by which a source notes how far it was recorded: the log has all marks of a
// source with the records that were appended with them, or neither.
func Mark(source Source, at Micros, note string) Record {
	return Record{Translation: Translation{Source: source}, Event: Tick, Time: at, Note: note}
}

// unseen is the note of an end that nobody saw: it was after a time.
const (
	unseen     = "ended unseen after "
	unseenTime = "2006-01-02T15:04:05.000000Z"
)

// Unseen is the note of an end that is recorded when it is found out.
func Unseen(after Micros) string { return unseen + after.Time().Format(unseenTime) }

// Least is the earliest time at which what has ended can have done so: Time, unless nobody saw it.
func (r *Record) Least() Micros {
	if _, after, ok := strings.Cut(r.Note, unseen); ok {
		if at, err := time.Parse(unseenTime, after); err == nil {
			return min(MicrosOf(at), r.Time)
		}
	}
	return r.Time
}

// nearly is in the note of a limit that is nearly reached, behind the share of it; inUse ends it.
const (
	nearly = "%: "
	inUse  = " in use"
)

// Nearly is the note of a record that so much of a limit is in use, and nothing was refused.
func Nearly(used, most int, what string) string {
	return fmt.Sprintf("%d%s%d of %d %s%s", used*100/most, nearly, used, most, what, inUse)
}

// Nearly reports whether a record of a limit is of its approach only.
func (r *Record) Nearly() bool {
	share, _, ok := strings.Cut(r.Note, nearly)
	_, err := strconv.ParseUint(share, 10, 63)
	return ok && err == nil && (r.Event == Exhausted || r.Event == Quota)
}

// ofPool precedes the name of a pool in a note.
const ofPool = "pool "

// OfPool is the note of a record about a pool, with what more there is to say.
func OfPool(name, more string) string {
	if more == "" {
		return ofPool + name
	}
	return ofPool + name + ": " + more
}

// NearlyOfPool is Nearly of what a pool has.
func NearlyOfPool(used, most int, what, name string) string {
	return Nearly(used, most, what+" of "+ofPool+name)
}

// Pool is the name of the pool that the note of a block or of a limit has, "" if it has none.
func (r *Record) Pool() string {
	if r.Nearly() {
		_, name, _ := strings.Cut(r.Note, " of "+ofPool)
		return strings.TrimSuffix(name, inUse)
	}
	name, ok := strings.CutPrefix(r.Note, ofPool)
	if !ok {
		return ""
	}
	name, _, _ = strings.Cut(name, ":")
	return name
}

// Has reports whether the translation had an external port. Port 0 is asked for where
// there are no ports.
func (t *Translation) Has(port uint16, protocol uint8) bool {
	if protocol != 0 && t.Protocol != 0 && protocol != t.Protocol {
		return false
	}
	if t.Kind == Block {
		return t.External.Port() <= port && port <= t.LastPort
	}
	return t.Protocol == 0 || port == t.External.Port()
}

// ProtocolName is the name of an IP protocol as the log has it.
func ProtocolName(p uint8) string {
	for name, n := range protocols {
		if n == p {
			return name
		}
	}
	return strconv.Itoa(int(p))
}

var protocols = map[string]uint8{"": 0, "icmp": 1, "tcp": 6, "udp": 17, "dccp": 33, "gre": 47, "icmpv6": 58, "sctp": 132, "udplite": 136}

// ParseProtocol is the inverse of ProtocolName.
func ParseProtocol(s string) (uint8, bool) {
	if n, ok := protocols[strings.ToLower(s)]; ok {
		return n, true
	}
	n, err := strconv.ParseUint(s, 10, 8)
	return uint8(n), err == nil
}
