// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// A syslogDaemon writes what it parsed of each message as a line: time, host name, name of the program,
// identifier of the message, severity, facility, and the structured data as JSON, with tabs between.
type syslogDaemon struct {
	command string
	// conf is its configuration for one transport.
	conf func(transport, port, dir, ca, keyed, out string) string
	args []string // behind the name of its configuration
}

var syslogDaemons = []syslogDaemon{
	{
		command: "rsyslogd",
		conf: func(transport, port, dir, ca, keyed, out string) string {
			secure := ""
			if transport == "tls" {
				secure = ` StreamDriver.Name="gtls" StreamDriver.Mode="1" StreamDriver.AuthMode="anon"`
			}
			return `global(workDirectory="` + dir + `" net.enableDNS="off" defaultNetstreamDriverCAFile="` + ca + `"
  defaultNetstreamDriverCertFile="` + keyed + `" defaultNetstreamDriverKeyFile="` + keyed + `")
module(load="mmpstrucdata")
module(load="imudp")
module(load="imtcp"` + secure + `)
input(type="imudp" address="127.0.0.1" port="` + port + `")
input(type="imtcp" address="127.0.0.1" port="` + port + `")
template(name="fields" type="string" string="%timereported:::date-rfc3339%\t%hostname%\t%app-name%\t%msgid%\t%syslogseverity-text%\t%syslogfacility-text%\t%$!rfc5424-sd!natkit@32473%\n")
action(type="mmpstrucdata")
action(type="omfile" file="` + out + `" template="fields")
`
		},
		args: []string{"-n", "-i", "pid", "-f"},
	},
	{
		command: "syslog-ng",
		conf: func(transport, port, dir, ca, keyed, out string) string {
			secure, streams := "", ""
			if transport == "tls" {
				secure = ` tls(key-file("` + keyed + `") cert-file("` + keyed + `") peer-verify(no))`
			}
			if transport != "udp" {
				streams = ` syslog(ip("127.0.0.1") port(` + port + `) transport("` + transport + `")` + secure + `);`
			}
			return `@version: 3.38
options { keep-hostname(yes); keep-timestamp(yes); frac-digits(6); time-zone("UTC"); use-dns(no); };
source s { syslog(ip("127.0.0.1") port(` + port + `) transport("udp"));` + streams + ` };
destination d { file("` + out + `" template("${ISODATE}\t${HOST}\t${PROGRAM}\t${MSGID}\t${LEVEL}\t${FACILITY}\t$(format-json --key .SDATA.natkit@32473.* --rekey .SDATA.natkit@32473.* --shift-levels 3)\n")); };
log { source(s); destination(d); };
`
		},
		args: []string{"-F", "--no-caps", "-p", "pid", "-R", "persist", "-c", "control", "-f"},
	},
}

// rsyslog and syslog-ng parse header and structured data of messages over UDP, TCP and TLS.
func TestSyslog(t *testing.T) {
	ktest.Collectors(t)
	for _, daemon := range syslogDaemons {
		for _, transport := range []string{"udp", "tcp", "tls"} {
			t.Run(daemon.command+"/"+transport, func(t *testing.T) { daemon.reads(t, transport) })
		}
	}
}

func (d *syslogDaemon) reads(t *testing.T, transport string) {
	port, dir := freePort(t), t.TempDir()
	ca, keyed := selfSigned(t, dir)
	query := ""
	if transport == "tls" {
		query = "?ca=" + ca
	}
	out, conf := filepath.Join(dir, "out"), filepath.Join(dir, "conf")
	if err := os.WriteFile(conf, []byte(d.conf(transport, port, dir, ca, keyed, out)), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	collect(t, port, d.command, append(slices.Clone(d.args), conf)...)
	records := slices.Clone(sentRecords)
	records[2].Subscriber = `line "7" ]\ x`
	var lines []string
	send := func() bool {
		s, err := natlog.ParseSink("syslog+" + transport + "://127.0.0.1:" + port + query)
		if err != nil {
			t.Fatal(err)
		}
		o, err := dial(s, "gw1")
		if err != nil {
			return false // TCP listens a little later
		}
		defer o.close()
		n, err := o.send(t.Context(), records)
		return err == nil && n == len(records)
	}
	ktest.Wait(t, 30*time.Second, d.command+" to take records", send)
	ktest.Wait(t, 30*time.Second, d.command+" to write", func() bool {
		b, _ := os.ReadFile(out)
		lines = strings.Split(strings.TrimSpace(string(b)), "\n")
		return len(lines) >= len(records)
	})
	if len(lines) != len(records) {
		t.Fatalf("%d lines: %q", len(lines), lines)
	}
	for i, line := range lines {
		r := &records[i]
		const form = "2006-01-02T15:04:05.000000Z"
		part := strings.Split(line, "\t")
		head := []string{"gw1", "natkit", r.Event.String(), "info", "daemon"}
		if len(part) != 7 || !slices.Equal(part[1:6], head) {
			t.Errorf("%q, want %q in the middle", part, head)
			continue
		}
		if at, err := time.Parse(time.RFC3339, part[0]); err != nil || !at.Equal(r.Time.Time()) {
			t.Errorf("record %d is of %s, want %s", i, part[0], r.Time.Time().Format(form))
		}
		want := map[string]any{"event": r.Event.String(), "kind": r.Kind.String(), "translator": "ebpf",
			"internal_address": r.Internal.Addr().String(), "internal_port": strconv.Itoa(int(r.Internal.Port())),
			"external_address": r.External.Addr().String(), "external_port": strconv.Itoa(int(r.External.Port()))}
		if r.Subscriber != "" {
			want["subscriber"] = r.Subscriber
		}
		if r.Kind == natlog.Session {
			want["protocol"], want["destination_address"], want["destination_port"] = "tcp", "192.0.2.1", "443"
		} else {
			want["external_port_last"] = "1535"
		}
		if r.Since != 0 {
			want["since"] = r.Since.Time().Format(form)
		}
		var got map[string]any
		if err := json.Unmarshal([]byte(part[6]), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("record %d is %v (%v), want %v", i, got, err, want)
		}
	}
}
