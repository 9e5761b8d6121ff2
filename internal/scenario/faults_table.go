// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
)

// What can go wrong with connection tracking: its table, its timeouts, and what it makes of packets.

const byNetlink = "the entries are created by netlink, not by packets, and belong only to the gateway's namespace"

var tableFaults = []Fault{
	{
		Code:    "conntrack-table-full",
		Healthy: "web traffic through a gateway whose connection tracking table is half full of established connections",
		Broken:  "the table has room for 100 entries when the traffic starts",
		Cured:   "the connections that fill the table are ended, as the finding proposes, by netlink instead of the conntrack program; nf_conntrack_max is not changed, because it is one limit for the whole host",
		Note:    byNetlink,
		healthy: do(browse, fill(0.5, 0, "198.18.0.0/24", conntrack.FillOptions{})),
		broken:  fill(1, 100, "198.18.1.0/24", conntrack.FillOptions{}),
		cure:    empty(ofFill),
	},
	{
		Code:    "conntrack-table-nearly-full",
		Healthy: "web traffic through a gateway whose connection tracking table is half full",
		Broken:  "the table is 92 % full, and nothing is lost yet",
		Cured:   "the connections that fill the table are ended, as the finding proposes, by netlink instead of the conntrack program",
		Note:    byNetlink,
		healthy: do(browse, fill(0.5, 0, "198.18.0.0/24", conntrack.FillOptions{})),
		broken:  fill(0.42, 0, "198.18.1.0/24", conntrack.FillOptions{}),
		cure:    empty(ofFill),
	},
	{
		Code:    "time-wait-heavy",
		Healthy: "nearly all entries of the gateway's table are closed connections, and it has plenty of room",
		Broken:  "closed connections use more than two fifths of the table",
		Cured:   "their timeout is shortened and the current ones are removed, by netlink instead of the conntrack program",
		Note:    byNetlink,
		healthy: do(browse, fill(0.12, 0, "198.18.0.0/24", conntrack.FillOptions{State: conntrack.TCPTimeWait})),
		broken:  fill(0.32, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPTimeWait}),
		cure:    do(follow("sysctl -w"), empty(conntrack.Filter{States: 1 << conntrack.TCPTimeWait})),
	},
	{
		Code:    "close-wait-heavy",
		Healthy: "the timeout of CLOSE_WAIT is an hour, as kube-proxy sets it, and few connections are in that state",
		Broken:  "half of the gateway's table is connections that one side has closed",
		Cured:   "their timeout is set to the kernel's default, and the current ones are removed, by netlink instead of the conntrack program",
		Note:    byNetlink,
		healthy: do(onGateway("sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600"), browse,
			fill(0.1, 0, "198.18.0.0/24", conntrack.FillOptions{State: conntrack.TCPCloseWait})),
		broken: fill(0.4, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPCloseWait}),
		cure:   do(follow("sysctl -w"), empty(conntrack.Filter{States: 1 << conntrack.TCPCloseWait})),
	},
	{
		Code:    "established-timeout-long",
		Healthy: "a tenth of the gateway's table is connections that were idle for a day",
		Broken:  "half of the gateway's table is connections that were idle for a day",
		Cured:   "their timeout is shortened and the current ones are removed, by netlink instead of the conntrack program",
		Note:    "the entries are created by netlink, not by packets, with the remaining time of a day without a packet",
		// Whoever set it on the host: a namespace begins with the kernel's default.
		healthy: do(onGateway("sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_established=432000"), browse,
			fill(0.1, 0, "198.18.0.0/24", conntrack.FillOptions{Timeout: 4 * 24 * time.Hour})),
		broken: fill(0.4, 0, "198.18.1.0/24", conntrack.FillOptions{Timeout: 4 * 24 * time.Hour}),
		cure:   do(follow("sysctl -w"), empty(ofFill)),
	},
	{
		Code:    "established-timeout-short",
		Healthy: "clients ask a server that replies after one and a half seconds, with the kernel's timeouts",
		Broken:  "the gateway forgets open connections after one second without a packet",
		Cured:   "the timeout is set to a day",
		healthy: slowReplies(5000, slowReply),
		// Connections that are open have the old timeout; wait for those that have not, and then
		// until those that it has forgotten are over.
		broken: do(onGateway("sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_established=1"), wait(slowReply)),
		cure:   do(follow("sysctl -w"), wait(slowReply)),
	},
	{
		Code:    "conntrack-early-drop",
		Healthy: "web traffic through a gateway whose table is a third full",
		Broken:  "the table is full, mostly with half-open flows, and new ones evict them",
		Cured:   "the flows that fill the table are removed, including those of the burst, by netlink instead of the conntrack program; nf_conntrack_max is not changed, because it is one limit for the whole host",
		Note:    byNetlink,
		healthy: do(browse, fill(0.36, 0, "198.18.0.0/24", conntrack.FillOptions{})),
		broken: do(send(spray("{server}", 20000, 5000)), fill(0.3, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPSynRecv}),
			fill(1, 0, "198.18.2.0/24", conntrack.FillOptions{Protocol: unix.IPPROTO_UDP, Unreplied: true})),
		cure: do(unsend, empty(conntrack.Filter{})),
	},
	{
		Code:    "conntrack-hash-too-small",
		Healthy: "web traffic through a gateway with a tenth of its table in use, judged with the hash that this host has",
		Broken:  fmt.Sprintf("the same facts, judged as if the hash had %d buckets", smallHash),
		Cured:   "the same facts, judged with the number of buckets that the finding asks for",
		Note: "the hash belongs to the whole host, so it is not changed: the doctor judges its facts with another number of buckets, " +
			"and the cure is shown, not run",
		healthy: do(browse, fill(0.1, 0, "198.18.0.0/24", conntrack.FillOptions{})),
		broken:  read(func(facts *snapshot.Snapshot) { facts.Conntrack.Buckets = smallHash }),
		cure:    readFoundBuckets,
	},
	{
		Code:    "conntrack-accounting",
		Healthy: "web traffic through a gateway with fifteen thousand connections",
		Broken:  "each connection counts its packets and records its start",
		Cured:   "both are turned off",
		healthy: do(browse, func(ctx context.Context, s *faultRun) error {
			return s.watched.Do(func() error {
				_, err := conntrack.Fill(ctx, conntrack.FillOptions{Count: 15000})
				return err
			})
		}),
		broken: onGateway("sysctl -qw net.netfilter.nf_conntrack_acct=1 net.netfilter.nf_conntrack_timestamp=1"),
		cure:   follow("sysctl -w"),
	},
	{
		Code:    "unreplied-flood",
		Healthy: "a client sends to a few hundred ports without a reply, as a monitor does",
		Broken:  "a client scans ten thousand ports, and none replies",
		Cured:   "the gateway limits the client's packets before they cost an entry, and removes the current entries",
		healthy: send(spray("{server}", 300, 10000)),
		broken:  do(sendOnly(scan), before(time.Minute, scan)),
		cure:    follow("nft add", "nft 'add", "conntrack -D"),
	},
	{
		Code:    "syn-flood",
		Healthy: "web traffic through a gateway, two hundred connections a second",
		Broken:  "twelve thousand SYNs to the web server, from addresses that never reply",
		Cured:   "the kernel's SYNPROXY replies to SYNs with cookies, half-open connections are removed; the flood continues",
		Note:    "the flood has a source network of its own, which the gateway routes to the client",
		// So the replies vanish there.
		healthy: do(onGateway("ip route add 198.51.100.0/24 via {client}"), browse),
		broken:  do(send(synFlood), before(time.Second, synFlood)),
		cure:    follow("tcp_loose", "nft add", "nft 'add", "conntrack -D"),
	},
	{
		Code:    "conntrack-invalid-reset",
		Healthy: "ten connections through masquerading, and one segment a second outside its connection's window",
		Broken:  "two hundred segments a second are outside their connection's window, as after reordering or with offloads that conntrack does not follow",
		Cured:   "connection tracking accepts such segments, and the endpoints decide",
		Note:    "the segments have the server's own acknowledgement numbers and sequence numbers far ahead",
		healthy: outOfWindow(5000, 1),
		broken:  do(sendOnly(), outOfWindow(5001, 200)),
		cure:    follow("be_liberal"),
	},
	{
		Code:    "event-listener-lag",
		Healthy: "a program with a large buffer listens to the events of the gateway's connection tracking",
		Broken:  "a program with a small buffer does not read the events of the gateway's connection tracking",
		Cured:   "the program that does not read is ended",
		Note:    "the programs are sockets of this process; instead of a larger buffer the slow one is closed",
		healthy: do(browse, listenEvents(64<<20, true)),
		broken:  listenEvents(4<<10, false),
		cure:    closeLast(1),
	},
	{
		Code:    "checksum-errors",
		Healthy: "the doctor watches the gateway, which serves its clients on one of its ports",
		Broken:  "a client sends to that port with wrong checksums, like a card that does not fill them in",
		Cured:   "that client computes its checksums itself",
		Note:    "no device of a lab writes wrong checksums, so the client does; the cure is on the sender, so it is shown and not run",
		healthy: do(swallow(lab.RoleGateway, 5353), browse),
		broken:  send(toGateway(datagram{ttl: 64, id: 1, sum: 0xbad, payload: []byte("natkit lab")})),
		cure:    do(unsend, send(toGateway(datagram{ttl: 64, id: 1, payload: []byte("natkit lab")}))), // a datagram may leave it out
	},
	{
		Code:    "fragments-lost",
		Healthy: "the client sends datagrams of 4000 bytes, in three fragments each, which the gateway reassembles to translate them",
		Broken:  "the gateway has 64 KiB for waiting fragments, and a hundred first fragments whose others never arrive use it up",
		Cured:   "fragments get as much memory as the finding shows",
		healthy: do(swallow(lab.RoleServer, 5353), send(datagramsFrom("0.0.0.0", "{server}:5353", 1, 50, 4000)), browse),
		// The lower limit first: the kernel refuses an upper one below it. And what
		// waits must not time out before the end of the demo.
		broken: do(onGateway("sysctl -qw net.ipv4.ipfrag_low_thresh=32768", "sysctl -qw net.ipv4.ipfrag_high_thresh=65536", "sysctl -qw net.ipv4.ipfrag_time=120"),
			burst(lab.RoleClient, 200, func(s *faultRun, n int) []byte {
				const moreFragments = 0x2000
				return datagram{from: s.addr("{client}"), to: s.addr("{server}"), ttl: 64, id: uint16(n + 1), fragment: moreFragments, payload: make([]byte, 1400)}.packet()
			})),
		cure: follow("sysctl -w"),
	},
}

// slowReply is longer than the timeout that is too short.
const slowReply = 1500 * time.Millisecond

// smallHash is the number of buckets of a machine with 64 MB of memory; the
// kernel gives a bucket for each 16 KB.
const smallHash = 4096

// readFoundBuckets has the doctor judge with the size of the hash that the finding proposes.
func readFoundBuckets(_ context.Context, s *faultRun) error {
	for _, set := range s.found.Settings {
		if set.Name == "net.netfilter.nf_conntrack_buckets" {
			buckets, err := strconv.ParseUint(set.Value, 10, 64)
			s.reads = func(facts *snapshot.Snapshot) { facts.Conntrack.Buckets = buckets }
			return err
		}
	}
	return fmt.Errorf("the finding sets no number of buckets: %v", s.found.Settings)
}

var scan = spray("{server}", 10000, 20000)

// synFlood pretends to come from 198.51.100.0/24.
var synFlood = packets(lab.RoleClient, 12000, func(s *faultRun, n int) []byte {
	from := netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + n%250)})
	return segment{from: netip.AddrPortFrom(from, uint16(1024+n/250)), to: netip.AddrPortFrom(s.lab.ServerNode().Addr, 80), seq: uint32(n), flags: tcpSYN}.packet()
})

// toGateway has the client send a datagram to the gateway, a hundred times a second.
func toGateway(d datagram) action {
	return packets(lab.RoleClient, 100, func(s *faultRun, _ int) []byte {
		d := d
		d.from, d.to = s.addr("{client}"), s.addr("{near}")
		return d.packet()
	})
}
