// SPDX-License-Identifier: Apache-2.0

package live

import (
	"reflect"
	"testing"

	"natkit/internal/snapshot"
)

func TestEngineRates(t *testing.T) {
	quarter := 0.25
	for _, c := range []struct {
		name string
		e    *snapshot.Engine
		want *EngineRates
	}{
		{"none", nil, nil},
		{"of the kernel's counters", &snapshot.Engine{Kind: "nft"}, nil},
		{"nothing came", &snapshot.Engine{Kind: "accel"}, &EngineRates{SlowPathPerSecond: map[string]float64{}}},
		{"the eBPF engine", &snapshot.Engine{Kind: "ebpf", Packets: map[string]uint64{"created": 20, "translated-in": 100, "translated-out": 300, "filtered": 5, "no-rule": 70}},
			&EngineRates{NewPerSecond: 2, TranslatedPerSecond: 40, DroppedPerSecond: map[string]float64{"filtered": 0.5}}},
		{"accel, of what it could forward", &snapshot.Engine{Kind: "accel", Packets: map[string]uint64{"forwarded": 100, "tcp-strict": 300, "local": 9000, "not-ipv4": 9000, "protocol": 9000}},
			&EngineRates{FastPath: &quarter, ForwardedPerSecond: 10, SlowPathPerSecond: map[string]float64{"tcp-strict": 30}}},
	} {
		if got := engineRates(c.e, 10); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}
