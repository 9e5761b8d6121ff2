// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"reflect"
	"testing"
	"time"
)

func TestLogKey(t *testing.T) {
	head := "inside: lan\noutside: wan\nrules:\n  - masquerade: 10.0.0.0/8\n"
	blocks := "pools:\n  home: {addresses: [198.51.100.0/28], blocks: {size: 512}}\n"
	for _, c := range []struct {
		text     string
		want     Log
		recorded LogRecord
	}{
		{head, Log{}, LogDefault},
		{head + blocks, Log{}, LogBlocks},
		{head + "log: {}\n", Log{On: true}, LogMappings},
		{head + blocks + "log: {}\n", Log{On: true}, LogBlocks},
		{head + blocks + "log: {record: mappings}\n", Log{On: true, Record: LogMappings}, LogMappings},
		{head + "log:\n  record: sessions\n  destinations: true\n  folder: /srv/log\n  age: 90d\n  size: 20GB\n  sinks: [ipfix+udp://192.0.2.9:4739, json:///var/log/nat.json]\n",
			Log{On: true, Record: LogSessions, Destinations: true, Folder: "/srv/log", Age: 90 * 24 * time.Hour, Bytes: 20 << 30,
				Sinks: []string{"ipfix+udp://192.0.2.9:4739", "json:///var/log/nat.json"}}, LogSessions},
	} {
		f, err := Parse("nat.yaml", []byte(c.text))
		if err != nil {
			t.Errorf("%q: %v", c.text, err)
			continue
		}
		if !reflect.DeepEqual(f.Log, c.want) {
			t.Errorf("%q: got %+v, want %+v", c.text, f.Log, c.want)
		}
		if f.Recorded() != c.recorded {
			t.Errorf("%q: records %v, want %v", c.text, f.Recorded(), c.recorded)
		}
		again, err := Parse("text", []byte(f.Text()))
		if err != nil {
			t.Errorf("%q: its own text: %v", c.text, err)
		} else if !reflect.DeepEqual(again.Log, c.want) {
			t.Errorf("%q: own text gives %+v", c.text, again.Log)
		}
	}
}
