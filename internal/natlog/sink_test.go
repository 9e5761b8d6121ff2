// SPDX-License-Identifier: Apache-2.0

package natlog

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseSink(t *testing.T) {
	for _, tt := range []struct {
		url  string
		want Sink // what differs from the defaults
	}{
		{"ipfix+udp://192.0.2.1", Sink{Form: IPFIX, Transport: UDP, Addresses: []string{"192.0.2.1:4739"}, Size: 1400}},
		{"ipfix+tcp://collector.example.net:4740?domain=7&size=4096", Sink{Form: IPFIX, Transport: TCP, Addresses: []string{"collector.example.net:4740"}, Size: 4096, Domain: 7}},
		{"netflow9+udp://[2001:db8::1]:9995?refresh=10s&rate=500&interim=none", Sink{Form: NetFlow9, Transport: UDP, Addresses: []string{"[2001:db8::1]:9995"}, Size: 1400,
			Refresh: 10 * time.Second, Rate: 500, Interim: InterimNone}},
		{"netflow9+udp://[2001:db8::1]", Sink{Form: NetFlow9, Transport: UDP, Addresses: []string{"[2001:db8::1]:2055"}, Size: 1400}},
		{"syslog+udp://log?facility=local3", Sink{Form: Syslog, Transport: UDP, Addresses: []string{"log:514"}, Facility: 19}},
		{"syslog+tcp://log:601/", Sink{Form: Syslog, Transport: TCP, Addresses: []string{"log:601"}}},
		{"syslog+tls://log?ca=/etc/ca.pem&name=syslog.example.net", Sink{Form: Syslog, Transport: TLS, Secure: true, Addresses: []string{"log:6514"}, CA: "/etc/ca.pem", ServerName: "syslog.example.net"}},
		{"json:///var/log/nat.json", Sink{Form: JSON, Transport: File, Path: "/var/log/nat.json"}},
		{"json+tcp://127.0.0.1:5170?interim=all", Sink{Form: JSON, Transport: TCP, Addresses: []string{"127.0.0.1:5170"}, Interim: InterimAll}},
		{"kafka://b1,b2:9093/nat-log", Sink{Form: Kafka, Transport: Broker, Addresses: []string{"b1:9092", "b2:9093"}, Path: "nat-log"}},
		{"kafka://b1/nat?tls=yes&user=natkit&password-file=/etc/natkit/kafka&sasl=scram-sha-256", Sink{Form: Kafka, Transport: Broker, Addresses: []string{"b1:9092"}, Path: "nat",
			Secure: true, User: "natkit", PasswordFile: "/etc/natkit/kafka", SASL: "scram-sha-256"}},
	} {
		got, err := ParseSink(tt.url)
		if err != nil {
			t.Errorf("%s: %v", tt.url, err)
			continue
		}
		w := tt.want
		w.URL, w.defaultPort, w.needsPort, w.many = tt.url, got.defaultPort, got.needsPort, got.many
		if w.Interim == "" {
			w.Interim = InterimBlocks
		}
		if w.Refresh == 0 {
			w.Refresh = 30 * time.Second
		}
		if w.Rate == 0 {
			w.Rate = 20_000
		}
		if w.Domain == 0 {
			w.Domain = 1
		}
		if w.Facility == 0 {
			w.Facility = 3
		}
		if !slices.Equal(got.Addresses, w.Addresses) {
			t.Errorf("%s: %q, want %q", tt.url, got.Addresses, w.Addresses)
		}
		got.Addresses, w.Addresses = nil, nil
		if g, w := sinkText(got), sinkText(w); g != w {
			t.Errorf("%s:\n%s, want\n%s", tt.url, g, w)
		}
	}
}

func TestParseSinkRefuses(t *testing.T) {
	for _, tt := range []struct{ url, says string }{
		{"", "want a URL such as"},
		{"log.example.net:514", "want a URL such as syslog+tls://log.example.net:6514 (ipfix+tcp, ipfix+udp,"},
		{"ipfix://log", `"ipfix": want ipfix+tcp or ipfix+udp`},
		{"sylog+udp://log", "did you mean syslog+udp?"},
		{"syslog+tcp://log", "want a port, such as syslog+tcp://log.example.net:5140"},
		{"syslog+udp://", "want a host, such as syslog+udp://log.example.net:514"},
		{"syslog+udp://log:", "the port behind : is missing"},
		{"syslog+udp://[::1]:", "the port behind : is missing"},
		{"syslog+udp://log:70000", "a number from 1 to 65535"},
		{"syslog+udp://log:0", "a number from 1 to 65535"},
		{"syslog+udp://2001:db8::1", "written in brackets"},
		{"syslog+udp://[2001:db8:z]", "want an IPv6 address in brackets"},
		{"syslog+udp://[192.0.2.1]", "want an IPv6 address in brackets"},
		{"syslog+udp://log/path", "nothing can follow the port"},
		{"syslog+udp://log?facilty=local0", "did you mean facility?"},
		{"syslog+udp://log?facility=locl0", "did you mean local0?"},
		{"syslog+udp://log?facility", "want facility=VALUE"},
		{"syslog+udp://log?facility=user&facility=user", "given twice"},
		{"syslog+udp://log?ca=/etc/ca.pem", `"ca": want interim, facility or rate`},
		{"syslog+tls://log?ca=ca.pem", "begins with /"},
		{"syslog+tls://log?cert=/etc/c.pem", "want both, or none"},
		{"ipfix+udp://log?size=100", "a number from 768 to 9000"},
		{"ipfix+udp://log?domain=-1", "a number from 0 to 4294967295"},
		{"ipfix+udp://log?refresh=5", "a time from 1s to 10m"},
		{"ipfix+udp://log?interim=block", "did you mean blocks?"},
		{"json://nat.json", "want the path of a file, such as json:///var/log/nat.json"},
		{"json:///", "want the path of a file"},
		{"json:///var/log/", "want the path of a file"},
		{"kafka://b1", "want a topic"},
		{"kafka://b1/a/b", "want a topic"},
		{"kafka://user:secret@b1/nat", "a user is an option of kafka"},
		{"kafka://b1,/nat", "want a host"},
		{"kafka://b1/nat?user=x", "user and password-file: want both"},
		{"kafka://b1/nat?sasl=plain", "needs user and password-file"},
		{"kafka://b1/nat?ca=/etc/ca.pem", "need tls=yes"},
		{"kafka://b1/nat?tls=maybe", "want yes or no"},
	} {
		_, err := ParseSink(tt.url)
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%q: %v, want %q", tt.url, err, tt.says)
		}
		if err != nil && strings.Contains(err.Error(), "strconv") {
			t.Errorf("%q: %v", tt.url, err)
		}
	}
}

// Whatever is read, what is accepted is complete.
func FuzzParseSink(f *testing.F) {
	for _, s := range []string{"kafka://b1,b2:9093/nat?tls=yes", "syslog+tls://[::1]:1?ca=/x", "json:///x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSink(text)
		if err == nil && (s.URL != text || s.Form == "" || s.Transport == "" || s.Path == "" && len(s.Addresses) == 0) {
			t.Fatalf("%q: %+v", text, s)
		}
	})
}

func sinkText(s Sink) string { return fmt.Sprintf("%+v", s) }
