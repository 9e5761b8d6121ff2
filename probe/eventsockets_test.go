// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"slices"
	"testing"

	"natkit/snapshot"
)

const netlinkText = `sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000cda935af 0   0          00000000 0        0        0     2        0        4       
00000000d913e2e4 12  4711       00000007 212992   0        0     2        13       416     
00000000d913e2e5 12  4712       00000008 0        0        0     2        9        417     
00000000d913e2e6 9   4713       00000001 0        0        0     2        9        418     
00000000d913e2e7 12  4294963199 00000004 0        0        0     2        0        419     
`

func TestParseEventSockets(t *testing.T) {
	got, err := parseEventSockets(netlinkText)
	want := []snapshot.EventSocket{{PortID: 4711, QueueBytes: 212992, Drops: 13, Inode: 416}, {PortID: 4294963199, Inode: 419}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	for _, bad := range []string{"", "sk Eth Pid", netlinkText + "short line\n", netlinkText + "0 12 x 7 0 0 0 0 0 1\n"} {
		if got, err := parseEventSockets(bad); err == nil {
			t.Errorf("%q gives %+v", bad, got)
		}
	}
}

func FuzzEventSockets(f *testing.F) {
	f.Add(netlinkText)
	f.Fuzz(func(t *testing.T, text string) {
		if got, err := parseEventSockets(text); err == nil && len(got) > maxEventSockets {
			t.Errorf("%d sockets", len(got))
		}
	})
}
