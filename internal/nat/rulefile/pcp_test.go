// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const asking = `inside: [eth1, eth2, both]
outside: [eth0, both]
pcp: {on: [eth1, eth2], lifetime: {min: 5m, max: 2h}, mappings_per_subscriber: 8}
rules:
  - masquerade: 10.0.0.0/8
`

func TestPCP(t *testing.T) {
	f := must(Parse("f", []byte(asking)))
	want := PCP{[]string{"eth1", "eth2"}, 5 * time.Minute, 2 * time.Hour, 8}
	if !reflect.DeepEqual(f.PCP, want) {
		t.Errorf("got %+v, want %+v", f.PCP, want)
	}
	again := must(Parse("f", []byte(f.Text())))
	if !reflect.DeepEqual(again.PCP, want) {
		t.Errorf("written again: %+v", again.PCP)
	}
	usual := must(Parse("f", []byte(strings.Replace(asking, ", lifetime: {min: 5m, max: 2h}, mappings_per_subscriber: 8", "", 1))))
	if usual.PCP.MinLifetime != 2*time.Minute || usual.PCP.MaxLifetime != 24*time.Hour || usual.PCP.PerSubscriber != 64 {
		t.Errorf("by default %+v", usual.PCP)
	}
	if none := must(Parse("f", []byte("inside: a\noutside: b\nrules: []\n"))); !none.PCP.IsZero() || strings.Contains(none.Text(), "pcp") {
		t.Errorf("a file without: %+v", none.PCP)
	}
}

func TestPCPProblems(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"on: [eth1, eth2]", "on: [eth0]", `f:3:12: pcp is on "eth0", which is not an inside interface`},
		{"on: [eth1, eth2]", "on: [both]", `f:3:12: pcp is on "both", which is an outside interface too: hosts there could ask for mappings of internal ones`},
		{"on: [eth1, eth2]", "on: [eth1, eth1]", `f:3:18: interface "eth1" is listed twice`},
		{"on: [eth1, eth2], ", "", "f:3:6: pcp needs the key on: inside interfaces whose hosts may ask for mappings, as in {on: [eth1]}"},
		{"min: 5m", "min: 3h", "f:3:35: lifetime: min is 10800s and max 7200s, which is less"},
		{"max: 2h", "max: 240h", "f:3:50: max is at most 604800s, and not 864000s"},
		{"lifetime:", "lifetimes:", `f:3:25: unknown key "lifetimes" in pcp; known keys: on, lifetime, mappings_per_subscriber; did you mean lifetime?`},
		{"min:", "mni:", `f:3:36: unknown key "mni" in lifetime; known keys: min, max; did you mean min?`},
		{"subscriber: 8", "subscriber: x", `f:3:80: mappings_per_subscriber is a number from 0 to 65536, and not "x"`},
	} {
		_, err := Parse("f", []byte(strings.Replace(asking, c.old, c.new, 1)))
		problems, _ := err.(Problems)
		var got []string
		for _, p := range problems {
			got = append(got, p.String())
		}
		if !slices.Contains(got, c.want) || len(got) != 1 {
			t.Errorf("%s for %s:\ngot %q\nwant %q", c.new, c.old, got, c.want)
		}
	}
}
