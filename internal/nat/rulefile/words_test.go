// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"encoding/json"
	"testing"
)

// A protocol is a word in JSON, and a number, as text, where there is no word.
func TestProtocolText(t *testing.T) {
	for protocol, want := range map[Protocol]string{TCP: `"tcp"`, ICMP: `"icmp"`, UDPLite: `"udplite"`, 89: `"89"`} {
		data, err := json.Marshal(protocol)
		if err != nil || string(data) != want {
			t.Errorf("%d: %s, %v; want %s", uint8(protocol), data, err, want)
		}
		var back Protocol
		if err := json.Unmarshal(data, &back); err != nil || back != protocol {
			t.Errorf("%s: %d, %v", data, uint8(back), err)
		}
	}
	var p Protocol
	if err := json.Unmarshal([]byte(`"xyz"`), &p); err == nil {
		t.Error("a protocol called xyz")
	}
}
