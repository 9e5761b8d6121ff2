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

// rsyslog parses header and structured data of messages over UDP, TCP and TLS.
func TestRsyslog(t *testing.T) {
	ktest.Collectors(t)
	for _, transport := range []string{"udp", "tcp", "tls"} {
		t.Run(transport, func(t *testing.T) {
			port, dir := freePort(t), t.TempDir()
			ca, keyed := selfSigned(t, dir)
			secure, query := "", ""
			if transport == "tls" {
				secure, query = ` StreamDriver.Name="gtls" StreamDriver.Mode="1" StreamDriver.AuthMode="anon"`, "?ca="+ca
			}
			out, conf := filepath.Join(dir, "out"), filepath.Join(dir, "conf")
			if err := os.WriteFile(conf, []byte(`global(workDirectory="`+dir+`" net.enableDNS="off" defaultNetstreamDriverCAFile="`+ca+`"
  defaultNetstreamDriverCertFile="`+keyed+`" defaultNetstreamDriverKeyFile="`+keyed+`")
module(load="mmpstrucdata")
module(load="imudp")
module(load="imtcp"`+secure+`)
input(type="imudp" address="127.0.0.1" port="`+port+`")
input(type="imtcp" address="127.0.0.1" port="`+port+`")
template(name="fields" type="string" string="%timereported:::date-rfc3339%\t%hostname%\t%app-name%\t%msgid%\t%syslogseverity-text%\t%syslogfacility-text%\t%$!rfc5424-sd!natkit@32473%\n")
action(type="mmpstrucdata")
action(type="omfile" file="`+out+`" template="fields")
`), 0o600); err != nil {
				t.Fatal(err)
			}
			collect(t, port, "rsyslogd", "-n", "-f", conf, "-i", filepath.Join(dir, "pid"))
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
			ktest.Wait(t, 30*time.Second, "rsyslogd to take records", send)
			ktest.Wait(t, 30*time.Second, "rsyslogd to write", func() bool {
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
				head := []string{r.Time.Time().Format(form), "gw1", "natkit", r.Event.String(), "info", "daemon"}
				if len(part) != 7 || !slices.Equal(part[:6], head) {
					t.Errorf("%q, want %q", part, head)
					continue
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
		})
	}
}
