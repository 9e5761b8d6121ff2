// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"encoding/json"
	"net/netip"
	"testing"
	"time"
)

func TestEndpointJSON(t *testing.T) {
	type holder struct {
		E Endpoint `json:"e,omitzero"`
		S Seconds  `json:"s"`
	}
	for _, c := range []struct {
		value holder
		want  string
	}{
		{holder{EndpointOf(netip.MustParseAddrPort("192.0.2.1:80")), Seconds(1500 * time.Millisecond)}, `{"e":{"address":"192.0.2.1","port":80},"s":1.5}`},
		{holder{EndpointFrom(netip.MustParseAddr("2001:db8::1"), 0), Seconds(-time.Second)}, `{"e":{"address":"2001:db8::1","port":0},"s":-1}`},
		{holder{}, `{"s":0}`},
	} {
		b, err := json.Marshal(c.value)
		if err != nil || string(b) != c.want {
			t.Errorf("%s, %v, want %s", b, err, c.want)
		}
		var back holder
		if err := json.Unmarshal(b, &back); err != nil || back != c.value {
			t.Errorf("%s is read as %+v, %v", b, back, err)
		}
	}
	for _, bad := range []string{`"192.0.2.1:80"`, `{"port":80}`, `{"address":"x","port":80}`, `{"address":"192.0.2.1","port":65536}`} {
		var e Endpoint
		if err := json.Unmarshal([]byte(bad), &e); err == nil {
			t.Errorf("%s is read as %v", bad, e)
		}
	}
}
