// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/json"
	"slices"
	"testing"
)

func TestPortList(t *testing.T) {
	for _, text := range []string{"", "80", "80,443", "1000-2000,3000", "0-65535"} {
		ports, err := ParsePortList(text)
		if got := ports.String(); err != nil || got != text {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"x", "5-", "9-3", "70000"} {
		if _, err := ParsePortList(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
	if got := (PortList{5, 9}).With(7, 6, 9); !slices.Equal(got, PortList{5, 6, 7, 9}) {
		t.Errorf("5, 9 with 7, 6, 9: %d", got)
	}
}

// A record has a line for what was 28 232 numbers; those of before are read as well.
func TestPortListJSON(t *testing.T) {
	list := PortList{80}.With(list(32768, 60999)...)
	data, err := json.Marshal(ExternalAddress{Reserved: list})
	if err != nil || len(data) > 400 {
		t.Errorf("%d bytes, %v: %.400s", len(data), err, data)
	}
	var back ExternalAddress
	if err := json.Unmarshal(data, &back); err != nil || !slices.Equal(back.Reserved, list) {
		t.Errorf("read back: %v, %v", err, back.Reserved)
	}
	for text, want := range map[string]PortList{`{"Reserved":[80,443]}`: {80, 443}, `{"Reserved":null}`: nil, `{}`: nil} {
		var a ExternalAddress
		if err := json.Unmarshal([]byte(text), &a); err != nil || !slices.Equal(a.Reserved, want) {
			t.Errorf("%s: %v, %v", text, a.Reserved, err)
		}
	}
	for _, text := range []string{`{"Reserved":"9-3"}`, `{"Reserved":{}}`, `{"Reserved":[-1]}`} {
		if err := json.Unmarshal([]byte(text), new(ExternalAddress)); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}

func list(first, last uint16) (ports []uint16) {
	for p := uint32(first); p <= uint32(last); p++ {
		ports = append(ports, uint16(p))
	}
	return ports
}
