// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"natkit/internal/natlog"
)

func TestSyslogText(t *testing.T) {
	for _, tt := range []struct {
		r    natlog.Record
		want string
	}{
		{examples[0], `<30>1 2025-11-24T16:00:00.123456Z gw1 natkit - created [natkit@32473 event="created" kind="mapping" translator="kernel" protocol="tcp" ` +
			`internal_address="10.0.0.9" internal_port="1000" external_address="198.51.100.1" external_port="5000" since="2025-11-24T16:00:00.123456Z"] ` +
			`tcp mapping created 10.0.0.9:1000 -> 198.51.100.1:5000`},
		{examples[2], `<30>1 2025-11-24T16:00:00.123456Z gw1 natkit - created [natkit@32473 event="created" kind="session" translator="kernel" protocol="udp" ` +
			`internal_address="10.0.0.9" internal_port="1000" external_address="198.51.100.1" external_port="5000" ` +
			`destination_address="192.0.2.1" destination_port="443" vlan="12" zone="7"] udp session created 10.0.0.9:1000 -> 198.51.100.1:5000 to 192.0.2.1:443`},
		{examples[5], `<30>1 2025-11-24T16:00:00.123456Z gw1 natkit - created [natkit@32473 event="created" kind="block" translator="ebpf" ` +
			`internal_address="100.64.0.7" internal_port="0" external_address="198.51.100.1" external_port="1024" external_port_last="1535" subscriber="line 7"] ` +
			`block created 100.64.0.7:0 -> 198.51.100.1:1024-1535`},
		{examples[9], `<28>1 2025-11-24T16:00:00.123456Z gw1 natkit - exhausted [natkit@32473 event="exhausted" translator="ebpf" protocol="tcp" ` +
			`external_address="198.51.100.1" external_port="0" note="pool main: no port left"] no tcp port or address left -> 198.51.100.1:0`},
		{examples[12], `<28>1 2025-11-24T16:00:00.123956Z gw1 natkit - gap [natkit@32473 event="gap" since="2025-11-24T15:59:59.123456Z" note="natkit log was not running"] events are missing`},
		{examples[13], `<28>1 2025-11-24T16:00:00.123456Z gw1 natkit - exhausted [natkit@32473 event="exhausted" translator="ebpf" ` +
			`external_address="198.51.100.1" external_port="0" note="81%: 812 of 1000 ports of pool main in use"] few ports or addresses left -> 198.51.100.1:0`},
		{examples[14], `<28>1 2025-11-24T16:00:00.123456Z gw1 natkit - quota [natkit@32473 event="quota" translator="ebpf" ` +
			`internal_address="100.64.0.7" internal_port="0" subscriber="line 7" note="90%: 90 of 100 ports in use"] limit of a subscriber nearly reached 100.64.0.7:0`},
	} {
		if got := string(AppendSyslog(nil, &tt.r, "gw1", 3)); got != tt.want {
			t.Errorf("\n%s, want\n%s", got, tt.want)
		}
	}
}

// Structured data has the columns of the log's files by their names, as the documentation says.
func TestSyslogNames(t *testing.T) {
	text, err := os.ReadFile("../../../docs/log.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| Column | Meaning |")
	table, _, _ = strings.Cut(table, "\n\n")
	for i := range examples {
		for _, m := range regexp.MustCompile(` ([a-z_]+)="`).FindAllStringSubmatch(string(AppendSyslog(nil, &examples[i], "gw1", 3)), -1) {
			if !strings.Contains(table, "`"+m[1]+"`") {
				t.Errorf("%s is no column", m[1])
			}
		}
	}
}

// syslogForm is what RFC 5424 allows.
var syslogForm = regexp.MustCompile(`^<\d{1,3}>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z [!-~]{1,255} natkit - [!-~]{1,32} ` +
	`\[natkit@32473( [a-z_]{1,32}="(?:[^"\\\]\x00-\x1f]|\\["\\\]])*")+\] [ -~]*$`)

// Names and notes can't break out of their place.
func FuzzSyslog(f *testing.F) {
	f.Add("gw1", `line "7"`, "a]b\\c\n<13>1 evil")
	f.Add("", "\x00\xff", strings.Repeat("ä", 200))
	f.Fuzz(func(t *testing.T, node, subscriber, note string) {
		r := examples[5]
		r.Subscriber, r.Note = subscriber, note
		got := string(AppendSyslog(nil, &r, node, 23))
		if !syslogForm.MatchString(got) {
			t.Errorf("%q", got)
		}
		if len(got) > 2048 { // what RFC 5424, section 6.1, wants receivers to take
			t.Errorf("%d bytes", len(got))
		}
	})
}

func TestJSONText(t *testing.T) {
	for i := range examples {
		b, err := JSON(&examples[i], "gw1")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(b), `{"schema":"natkit/log-record/1","time":"`) || strings.Contains(string(b), "\n") {
			t.Errorf("%s", b)
		}
		var l Line
		if err := json.Unmarshal(b, &l); err != nil {
			t.Fatal(err)
		}
		r := &examples[i]
		if !l.Time.Equal(r.Time.Time()) || r.Since != 0 && !l.Since.Equal(r.Since.Time()) || l.Event != r.Event.String() || l.Kind != r.Kind.String() ||
			l.Source != r.Source.String() || l.Node != "gw1" || l.Protocol != natlog.ProtocolName(r.Protocol) || l.Internal.AddrPort != r.Internal ||
			l.External.AddrPort != r.External || l.LastPort != r.LastPort || l.Destination.AddrPort != r.Destination || l.Subscriber != r.Subscriber ||
			l.VLAN != r.VLAN || l.Zone != r.Zone || l.Note != r.Note {
			t.Errorf("%s is of %+v", b, *r)
		}
	}
	b, _ := JSON(&examples[2], "gw1")
	want := `{"schema":"natkit/log-record/1","time":"2025-11-24T16:00:00.123456Z","event":"created","kind":"session","translator":"kernel","node":"gw1","protocol":"udp",` +
		`"internal":{"address":"10.0.0.9","port":1000},"external":{"address":"198.51.100.1","port":5000},"destination":{"address":"192.0.2.1","port":443},"vlan":12,"zone":7}`
	if string(b) != want {
		t.Errorf("\n%s, want\n%s", b, want)
	}
}
