// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// A gateway with one interface sends packets out where they came in, and traceroute has some expire there:
// that is no loop where none was seen to come by again.
func TestOneArmedGatewayHasNoLoop(t *testing.T) {
	s := gateway()
	examples["routing-loop"](s)
	s.Drops.Rows[len(s.Drops.Rows)-1].Count = 6
	s.Counters["Ip.InHdrErrors"] = 6
	s.Frames = &snapshot.Frames{}
	if found := Judge(s); severityOf(found, "routing-loop") != 0 {
		t.Error(titles(found))
	}
}

// A client whose address is the broadcast address of the gateway's narrower mask.
func TestClientAtBroadcastAddress(t *testing.T) {
	s := gateway()
	link(s, "eth1").Addresses = prefixes("192.168.1.1/30")
	row := drop(90, snapshot.CauseNone, "eth0", sample("icmp 203.0.113.80 -> 192.168.1.3 type 0 code 0 (flow 192.168.1.3 -> 203.0.113.80)"))
	row.Location, row.Reason = "icmp_rcv+0x1ff", "INVALID_PROTO"
	s.Drops.Rows = append(s.Drops.Rows, row)
	link(s, "eth0").RxPackets = 200
	found := Judge(s)
	if len(found) == 0 || found[0].Code != "other-drops" || !strings.Contains(found[0].Title, "broadcast address of 192.168.1.0/30") {
		t.Error(titles(found))
	}
	s.Drops.Rows[len(s.Drops.Rows)-1].Samples = []string{"udp 203.0.113.80:9 -> 192.168.1.3:9"} // a broadcast that nobody asked for
	if found := Judge(s); len(found) > 0 {
		t.Error(titles(found))
	}
}
