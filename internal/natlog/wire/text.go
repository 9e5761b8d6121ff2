// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode"

	"natkit/internal/natlog"
	"natkit/internal/snapshot"
	"natkit/internal/words/schema"
)

// Line is a record as JSON, in the sinks json and kafka.
type Line struct {
	Time        time.Time         `json:"time"`
	Event       string            `json:"event"`                // created, ended, alive, exhausted, quota, gap, applied
	Kind        string            `json:"kind,omitempty"`       // mapping, session, block
	Source      string            `json:"translator,omitempty"` // kernel, ebpf
	Node        string            `json:"node,omitempty"`       // the machine
	Protocol    string            `json:"protocol,omitempty"`   // its name or number; none: all
	Internal    snapshot.Endpoint `json:"internal,omitzero"`
	External    snapshot.Endpoint `json:"external,omitzero"`
	LastPort    uint16            `json:"external_port_last,omitempty"` // of a block
	Destination snapshot.Endpoint `json:"destination,omitzero"`
	Subscriber  string            `json:"subscriber,omitempty"`
	VLAN        uint16            `json:"vlan,omitempty"`
	Zone        uint16            `json:"zone,omitempty"`
	Since       time.Time         `json:"since,omitzero"` // when it was created, or the gap began
	Note        string            `json:"note,omitempty"` // why there is a gap; of which pool, which limit
}

// Kind and version of a Line.
const (
	LineKind    = "log-record"
	LineVersion = 1
)

// NewLine makes the Line of a record.
func NewLine(r *natlog.Record, node string) Line {
	l := Line{Time: r.Time.Time(), Event: r.Event.String(), Kind: r.Kind.String(), Source: r.Source.String(), Node: node,
		Protocol: natlog.ProtocolName(r.Protocol), Internal: snapshot.EndpointOf(r.Internal), External: snapshot.EndpointOf(r.External),
		LastPort: r.LastPort, Destination: snapshot.EndpointOf(r.Destination), Subscriber: r.Subscriber, VLAN: r.VLAN, Zone: r.Zone, Note: r.Note}
	if r.Since != 0 {
		l.Since = r.Since.Time()
	}
	return l
}

// JSON writes a record as an object, without a newline.
func JSON(r *natlog.Record, node string) ([]byte, error) {
	b, err := json.Marshal(NewLine(r, node))
	if err != nil {
		return nil, fmt.Errorf("write a record as JSON: %w", err)
	}
	return schema.Put(schema.Name(LineKind, LineVersion), b), nil
}

// syslogData is the name of the structured data. 32473 is the number that RFC 5612 has for
// whoever has none of its own.
const syslogData = "natkit@32473"

// Severities of syslog.
const (
	warning       = 4
	informational = 6
)

// syslogTime has microseconds, as RFC 5424 allows at most.
const syslogTime = "2006-01-02T15:04:05.000000Z"

// AppendSyslog appends a record as a message of RFC 5424. Its structured data has the
// columns of the log's files by their names, those that are empty left out.
func AppendSyslog(b []byte, r *natlog.Record, node string, facility uint8) []byte {
	severity := informational
	if r.Event == natlog.Gap || r.Event == natlog.Exhausted || r.Event == natlog.Quota {
		severity = warning
	}
	b = fmt.Appendf(b, "<%d>1 ", int(facility)*8+severity)
	b = r.Time.Time().AppendFormat(b, syslogTime)
	b = append(append(append(b, ' '), headerName(node, 255)...), " natkit - "...)
	b = append(append(b, r.Event.String()...), " ["+syslogData...)
	put := func(name, value string) {
		if value != "" {
			b = append(append(append(b, ' '), name...), '=', '"')
			b = append(appendValue(b, value), '"')
		}
	}
	endpoint := func(name string, a netip.AddrPort) {
		if a.IsValid() {
			put(name+"_address", a.Addr().String())
			put(name+"_port", strconv.Itoa(int(a.Port())))
		}
	}
	number := func(name string, n uint16) {
		if n != 0 {
			put(name, strconv.Itoa(int(n)))
		}
	}
	put("event", r.Event.String())
	put("kind", r.Kind.String())
	put("translator", r.Source.String())
	put("protocol", natlog.ProtocolName(r.Protocol))
	endpoint("internal", r.Internal)
	endpoint("external", r.External)
	number("external_port_last", r.LastPort)
	endpoint("destination", r.Destination)
	put("subscriber", cut(r.Subscriber, mostText))
	number("vlan", r.VLAN)
	number("zone", r.Zone)
	if r.Since != 0 {
		put("since", r.Since.Time().Format(syslogTime))
	}
	put("note", cut(r.Note, mostText))
	return append(append(b, "] "...), sentence(r)...)
}

// headerName is a field of the header: printable ASCII, "-" if there is none.
func headerName(s string, most int) string {
	s = strings.Map(func(c rune) rune {
		if c <= ' ' || c > '~' {
			return -1
		}
		return c
	}, s)
	if s == "" {
		return "-"
	}
	return cut(s, most)
}

// appendValue escapes a value of structured data. What could end a line becomes a space.
func appendValue(b []byte, s string) []byte {
	for _, c := range strings.ToValidUTF8(s, "?") {
		switch {
		case c == '"' || c == '\\' || c == ']':
			b = append(b, '\\', byte(c))
		case unicode.IsControl(c):
			b = append(b, ' ')
		default:
			b = append(b, string(c)...)
		}
	}
	return b
}

// sentence is a record for people, in ASCII.
func sentence(r *natlog.Record) string {
	if r.Event == natlog.Gap {
		return "events are missing"
	}
	words := []string{}
	add := func(list ...string) {
		for _, w := range list {
			if w != "" {
				words = append(words, w)
			}
		}
	}
	switch {
	case r.Nearly() && r.Event == natlog.Exhausted:
		add("few ports or addresses left")
	case r.Nearly():
		add("limit of a subscriber nearly reached")
	case r.Event == natlog.Exhausted:
		add("no", natlog.ProtocolName(r.Protocol), "port or address left")
	case r.Event == natlog.Quota:
		add("limit of a subscriber reached")
	default:
		add(natlog.ProtocolName(r.Protocol), r.Kind.String(), r.Event.String())
	}
	if r.Internal.IsValid() {
		add(r.Internal.String())
	}
	if r.External.IsValid() {
		external := r.External.String()
		if r.LastPort != 0 {
			external += "-" + strconv.Itoa(int(r.LastPort))
		}
		add("->", external)
	}
	if r.Destination.IsValid() {
		add("to", r.Destination.String())
	}
	return strings.Join(words, " ")
}
