// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// A fragment behind the first has no ports and no flags: what it carries is not taken for these.
func TestLeavingFragments(t *testing.T) {
	out := tappedFrame{link: 1, kind: unix.PACKET_OUTGOING}
	c := leavingCounter{rows: map[leavingPlace]*snapshot.Leaving{}}
	for offset := range uint16(3) {
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			b := make([]byte, 64)
			b[0], b[9] = 0x45, protocol
			binary.BigEndian.PutUint16(b[6:], offset*185)
			copy(b[12:], []byte{203, 0, 113, 1, 198, 51, 100, 7})
			binary.BigEndian.PutUint16(b[20:], 4000+offset)
			binary.BigEndian.PutUint16(b[22:], 53+offset)
			b[33] = 2 // SYN
			p, ok := parseLeaving(b)
			if !ok {
				t.Fatal("no packet")
			}
			c.add(p, out)
			if want := map[bool]string{true: ":4000 -> 198.51.100.7:53", false: " -> 198.51.100.7"}[offset == 0]; p.String()[4:] != "203.0.113.1"+want {
				t.Errorf("offset %d: %q", offset, p.String())
			}
		}
	}
	row := c.rows[leavingPlace{link: 1}]
	if len(row.Datagrams) != 1 || row.Datagrams[0].Port() != 53 {
		t.Errorf("datagrams to %v, want one to port 53", row.Datagrams)
	}
	if row.Samples == nil { // in JSON a list that is empty, not null
		t.Error("no list of examples")
	}
	if row.Others != 3+1 { // datagrams, and the segment that shows that it opens a connection
		t.Errorf("%d packets, want 4", row.Others)
	}
}
