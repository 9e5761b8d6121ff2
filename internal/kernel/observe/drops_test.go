// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// routed is a lab of client, gateway and server without rules.
//
//	client 10.0.0.2 ── 10.0.0.1 gateway 10.1.0.1 ── 10.1.0.2 server
func routed(t testing.TB, rules lab.RuleSet) *lab.Lab {
	t.Helper()
	ktest.Root(t)
	l, err := lab.Up(context.Background(), "routed", lab.Options{
		Name: ktest.Name(t), Rules: rules, Owned: true,
		Addresses: lab.Addresses{
			Client: netip.MustParsePrefix("10.0.0.2/24"), Near: netip.MustParseAddr("10.0.0.1"),
			Far: netip.MustParsePrefix("10.1.0.1/24"), Server: netip.MustParseAddr("10.1.0.2"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// run runs a program in the node's namespace; its words are separated by spaces.
func run(t testing.TB, node *lab.Node, command, stdin string) {
	t.Helper()
	words := strings.Fields(command)
	ktest.Tool(t, words[0])
	err := node.Do(func() error {
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Stdin = strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", command, err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// datagrams sends UDP packets from the node: one from each of count ports, all
// to the same address.
type datagrams struct {
	count int
	to    string
	bytes int
	ttl   int
	df    bool // never fragment, whatever the path's MTU is known to be
}

func (d datagrams) send(t testing.TB, node *lab.Node) {
	t.Helper()
	to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(d.to))
	for range d.count {
		err := node.Do(func() error {
			conn, err := net.ListenUDP("udp4", nil)
			if err != nil {
				return err
			}
			defer conn.Close()
			raw, err := conn.SyscallConn()
			if err != nil {
				return err
			}
			if err := raw.Control(func(fd uintptr) {
				if d.ttl != 0 {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, d.ttl)
				}
				if d.df && err == nil {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
				}
			}); err != nil {
				return err
			}
			if err != nil {
				return err
			}
			_, err = conn.WriteTo(make([]byte, d.bytes), to)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// totals joins rows over several windows as a reader of the report would.
type totals map[string]*snapshot.Drop

func (sum totals) add(rows []snapshot.Drop) {
	for _, row := range rows {
		key := fmt.Sprint(row.Location, row.Reason, row.Netns, row.Interface, row.Cause)
		if have := sum[key]; have != nil {
			have.Count += row.Count
			continue
		}
		sum[key] = &row
	}
}

// collect reads d until the rows that match count as many packets as wanted, and
// fails when there are more or the time is up. It returns these rows joined.
func collect(t testing.TB, d *Drops, want uint64, what string, match func(snapshot.Drop) bool) snapshot.Drop {
	t.Helper()
	all := totals{}
	var sum snapshot.Drop
	ktest.Wait(t, 10*time.Second, fmt.Sprintf("%d drops %s", want, what), func() bool {
		got, err := d.Read()
		if err != nil {
			t.Fatal(err)
		}
		if got.LostEvents != 0 {
			t.Fatalf("%d events lost", got.LostEvents)
		}
		all.add(got.Rows)
		sum = snapshot.Drop{}
		for _, row := range all {
			if match(*row) {
				count := sum.Count + row.Count
				sum = *row
				sum.Count = count
			}
		}
		if t.Failed() || sum.Count < want {
			for _, row := range got.Rows {
				t.Logf("%+v", row)
			}
		}
		return sum.Count >= want
	})
	if sum.Count != want {
		t.Fatalf("%d drops %s, want %d", sum.Count, what, want)
	}
	return sum
}

// rawPacket is an IPv4 packet; the kernel fills in its header's checksum.
func rawPacket(src, dst string, protocol byte, transport []byte) []byte {
	p := make([]byte, 20, 20+len(transport))
	p[0], p[8], p[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(p[2:], uint16(cap(p)))
	copy(p[12:], netip.MustParseAddr(src).AsSlice())
	copy(p[16:], netip.MustParseAddr(dst).AsSlice())
	return append(p, transport...)
}

// sendRaw sends a packet that begins with its IPv4 header.
func sendRaw(t testing.TB, node *lab.Node, packet []byte) {
	t.Helper()
	err := node.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte(packet[16:20])})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// device returns the node's interface that has the address.
func device(t testing.TB, node *lab.Node, addr string) (dev *net.Interface) {
	t.Helper()
	err := node.Do(func() error {
		all, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, d := range all {
			addrs, err := d.Addrs()
			if err != nil {
				return err
			}
			for _, a := range addrs {
				if strings.HasPrefix(a.String(), addr+"/") {
					dev = &d
					return nil
				}
			}
		}
		return fmt.Errorf("no interface has %s", addr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

// Every way to lose a packet on a NAT gateway: the right number, reason, cause,
// interface and packet.
func TestDropsOfFaults(t *testing.T) {
	const n = 7
	toServer := func(t *testing.T, l *lab.Lab) {
		datagrams{count: n, to: "10.1.0.2:9", bytes: 100}.send(t, l.Node(lab.RoleClient))
	}
	nft := func(hook, rule string) func(t *testing.T, l *lab.Lab) {
		return func(t *testing.T, l *lab.Lab) {
			run(t, l.NATNode(), "nft -f -", "table ip t {\nchain c {\ntype "+hook+";\n"+rule+"\n}\n}\n")
		}
	}
	sysctl := func(key, value string) func(t *testing.T, l *lab.Lab) {
		return func(t *testing.T, l *lab.Lab) {
			if err := l.NATNode().Sysctl(key, value); err != nil {
				t.Fatal(err)
			}
		}
	}
	legacy := func(rule string) func(t *testing.T, l *lab.Lab) {
		return func(t *testing.T, l *lab.Lab) {
			run(t, l.NATNode(), "iptables-legacy -A PREROUTING -t nat -j ACCEPT", "")
			run(t, l.NATNode(), "iptables-legacy "+rule, "")
		}
	}
	tests := []struct {
		name   string
		fault  func(t *testing.T, l *lab.Lab)
		send   func(t *testing.T, l *lab.Lab)
		role   string // of the node where it is lost; "": gateway
		want   uint64 // "": n
		reason string
		cause  snapshot.NATCause
		in     string // address of the interface; "": the gateway's towards the client
		sample string // in one of the samples
	}{
		{
			name:  "rule of nftables",
			fault: nft("filter hook forward priority 0", "ct state new udp dport 9 drop"),
			send:  toServer, reason: "NETFILTER_DROP", cause: snapshot.CauseRule, sample: "-> 10.1.0.2:9",
		},
		{
			name:  "rule of nftables before conntrack",
			fault: nft("filter hook prerouting priority -300", "udp dport 9 drop"),
			send:  toServer, reason: "NETFILTER_DROP", cause: snapshot.CauseRule,
		},
		{
			name:  "rule of iptables-legacy",
			fault: legacy("-A FORWARD -p udp --dport 9 -j DROP"),
			send:  toServer, reason: "NETFILTER_DROP", cause: snapshot.CauseRule,
		},
		{
			name:  "rule of iptables-legacy before conntrack",
			fault: legacy("-t raw -A PREROUTING -p udp --dport 9 -j DROP"),
			send:  toServer, reason: "NETFILTER_DROP", cause: snapshot.CauseRule,
		},
		{
			name:  "rule of iptables-legacy on invalid packets",
			fault: legacy("-A FORWARD -m conntrack --ctstate INVALID -j DROP"),
			send: func(t *testing.T, l *lab.Lab) {
				for range n { // a reset of no connection
					sendRaw(t, l.Node(lab.RoleClient), rawPacket("10.0.0.2", "10.1.0.2", unix.IPPROTO_TCP,
						[]byte{4, 0, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 5 << 4, 4, 0, 0, 0, 0, 0, 0}))
				}
			},
			reason: "NETFILTER_DROP", cause: snapshot.CauseRule, sample: "tcp 10.0.0.2:1024 -> 10.1.0.2:80 RST",
		},
		{
			name:  "ports of source translation exhausted",
			fault: nft("nat hook postrouting priority 100", "udp dport 9 masquerade to :5000-5003"),
			send: func(t *testing.T, l *lab.Lab) {
				datagrams{count: 12, to: "10.1.0.2:9"}.send(t, l.Node(lab.RoleClient))
			},
			want: 8, reason: "NETFILTER_DROP", cause: snapshot.CauseConfirm,
			in: "10.1.0.1", sample: "udp 10.1.0.1:500",
		},
		{
			name:  "forwarding off",
			fault: sysctl("net.ipv4.ip_forward", "0"),
			send:  toServer, reason: "IP_INADDRERRORS", cause: snapshot.CauseIPForwardOff,
		},
		{
			name:  "reverse path",
			fault: sysctl("net.ipv4.conf.all.rp_filter", "1"),
			send: func(t *testing.T, l *lab.Lab) {
				for range n {
					sendRaw(t, l.Node(lab.RoleClient), rawPacket("10.99.0.1", "10.1.0.2", unix.IPPROTO_UDP,
						[]byte{4, 0, 0, 9, 0, 8, 0, 0}))
				}
			},
			reason: "IP_RPFILTER", cause: snapshot.CauseReversePath, sample: "udp 10.99.0.1:1024 -> 10.1.0.2:9",
		},
		{
			name: "no route",
			send: func(t *testing.T, l *lab.Lab) {
				datagrams{count: n, to: "10.99.0.1:9"}.send(t, l.Node(lab.RoleClient))
			},
			reason: "IP_INNOROUTES", cause: snapshot.CauseNoRoute,
		},
		{
			name: "time to live",
			send: func(t *testing.T, l *lab.Lab) {
				datagrams{count: n, to: "10.1.0.2:9", ttl: 1}.send(t, l.Node(lab.RoleClient))
			},
			reason: "IP_INHDR", cause: snapshot.CauseTTL,
		},
		{
			name: "too big",
			fault: func(t *testing.T, l *lab.Lab) {
				gateway := l.NATNode()
				dev := device(t, gateway, "10.1.0.1")
				if err := gateway.Do(func() error {
					return netlink.LinkSetMTU(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: dev.Index}}, 1000)
				}); err != nil {
					t.Fatal(err)
				}
			},
			send: func(t *testing.T, l *lab.Lab) {
				datagrams{count: n, to: "10.1.0.2:9", bytes: 1200, df: true}.send(t, l.Node(lab.RoleClient))
			},
			reason: "PKT_TOO_BIG", cause: snapshot.CauseTooBig,
		},
		{
			name: "queue",
			fault: func(t *testing.T, l *lab.Lab) {
				gateway := l.NATNode()
				dev := device(t, gateway, "10.1.0.1")
				if err := gateway.Do(func() error { // a bucket that no packet fits in
					return netlink.QdiscAdd(&netlink.Tbf{
						QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
						Rate:       1000, Limit: 1000, Buffer: netlink.Xmittime(1000, 100),
					})
				}); err != nil {
					t.Fatal(err)
				}
			},
			send: toServer, reason: "QDISC_DROP", cause: snapshot.CauseQueue, in: "10.1.0.1",
		},
		{
			name: "neighbour that does not answer",
			fault: func(t *testing.T, l *lab.Lab) {
				dev := device(t, l.NATNode(), "10.1.0.1")
				sysctl("net/ipv4/neigh/"+dev.Name+"/mcast_solicit", "1")(t, l)
				sysctl("net/ipv4/neigh/"+dev.Name+"/retrans_time_ms", "100")(t, l)
			},
			send: func(t *testing.T, l *lab.Lab) {
				datagrams{count: n, to: "10.1.0.77:9"}.send(t, l.Node(lab.RoleClient))
			},
			reason: "NEIGH_FAILED", cause: snapshot.CauseNeighbour, in: "10.1.0.1",
		},
		{
			name: "checksum",
			send: func(t *testing.T, l *lab.Lab) {
				for range n {
					sendRaw(t, l.Node(lab.RoleClient), rawPacket("10.0.0.2", "10.0.0.1", unix.IPPROTO_UDP,
						[]byte{4, 0, 0, 9, 0, 8, 1, 1}))
				}
			},
			reason: "UDP_CSUM", cause: snapshot.CauseChecksum,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := routed(t, lab.RulesNone)
			if tt.fault != nil {
				tt.fault(t, l)
			}
			node := l.NATNode()
			d, err := OpenDrops(DropOptions{Netns: node.Handle().Inode()})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			tt.send(t, l)
			want := uint64(n)
			if tt.want != 0 {
				want = tt.want
			}
			row := collect(t, d, want, "for "+tt.reason, func(row snapshot.Drop) bool {
				return row.Reason == tt.reason
			})
			t.Logf("%+v", row)
			if row.Cause != tt.cause {
				t.Errorf("cause %q, want %q", row.Cause, tt.cause)
			}
			in := tt.in
			if in == "" {
				in = "10.0.0.1"
			}
			if dev := device(t, node, in); row.Interface != dev.Name {
				t.Errorf("interface %q, want %q", row.Interface, dev.Name)
			}
			if row.Netns != node.Handle().Inode() || row.Namespace != node.Netns {
				t.Errorf("namespace %d %q, want %d %q", row.Netns, row.Namespace, node.Handle().Inode(), node.Netns)
			}
			if !strings.Contains(strings.Join(row.Samples, "\n"), tt.sample) || len(row.Samples) == 0 {
				t.Errorf("samples %q, want one with %q", row.Samples, tt.sample)
			}
			if row.Benign {
				t.Error("it is called benign")
			}
		})
	}
}

// A full table refuses what comes by and what the gateway itself sends; the rule
// beside it, in a chain that looks the same to the tracer, keeps its own name.
func TestDropsOfFullTable(t *testing.T) {
	const n = 7
	l := routed(t, lab.RulesNone)
	gateway := l.NATNode()
	run(t, gateway, "iptables-legacy -A FORWARD -m conntrack --ctstate NEW -j ACCEPT", "")
	run(t, gateway, "iptables-legacy -t raw -A PREROUTING -p udp --dport 10 -j DROP", "")
	fill(t, gateway)
	d, err := OpenDrops(DropOptions{Netns: gateway.Handle().Inode()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, tt := range []struct {
		name  string
		send  func()
		cause snapshot.NATCause
		in    string
	}{
		{"received", func() {
			datagrams{count: n, to: "10.1.0.2:9"}.send(t, l.Node(lab.RoleClient))
		}, snapshot.CauseTableFull, "10.0.0.1"},
		{"sent by the gateway", func() {
			for range n {
				err := gateway.Do(func() error {
					conn, err := net.Dial("udp4", "10.1.0.2:9")
					if err != nil {
						return err
					}
					defer conn.Close()
					if _, err = conn.Write([]byte("x")); !errors.Is(err, unix.EPERM) {
						return fmt.Errorf("send: %v, want it refused", err)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		}, snapshot.CauseTableFull, "10.1.0.1"},
		{"by a rule before conntrack", func() {
			datagrams{count: n, to: "10.1.0.2:10"}.send(t, l.Node(lab.RoleClient))
		}, snapshot.CauseRule, "10.0.0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.send()
			row := collect(t, d, n, "by netfilter", func(row snapshot.Drop) bool { return row.Reason == "NETFILTER_DROP" })
			if dev := device(t, gateway, tt.in); row.Cause != tt.cause || row.Interface != dev.Name {
				t.Errorf("%+v, want cause %q on %s", row, tt.cause, dev.Name)
			}
		})
	}
}

// fill fills the conntrack table of the node's namespace.
func fill(t testing.TB, node *lab.Node) {
	t.Helper()
	err := node.Do(func() error {
		limits, err := conntrack.ReadLimits()
		if err != nil {
			return err
		}
		_, err = conntrack.Fill(context.Background(), conntrack.FillOptions{Count: int(limits.Max)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A reader that empties the windows all the time neither loses a drop nor counts
// one twice while a flood goes on: the rule's own counter agrees.
func TestDropsAreCountedOnce(t *testing.T) {
	l := routed(t, lab.RulesNone)
	gateway := l.NATNode()
	run(t, gateway, "nft -f -", "table ip t {\ncounter refused { }\nchain c {\ntype filter hook prerouting priority -300;\nudp dport 9 counter name refused drop\n}\n}\n")
	d, err := OpenDrops(DropOptions{Netns: gateway.Handle().Inode()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for port := range 2 {
		senders.Go(func() {
			flood(t, l.Node(lab.RoleClient).Handle(), &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 1, 0, byte(2 + port)}}, stop)
		})
	}
	counted, lost := uint64(0), uint64(0)
	read := func() uint64 {
		got, err := d.Read()
		if err != nil {
			t.Fatal(err)
		}
		n := uint64(0)
		for _, row := range got.Rows {
			if row.Reason == "NETFILTER_DROP" {
				n += row.Count
			}
		}
		counted += n
		lost += got.LostEvents
		return n
	}
	busy := 0
	for end := time.Now().Add(20 * time.Second); busy < 20 && time.Now().Before(end); {
		if read() > 0 {
			busy++
		}
	}
	close(stop)
	senders.Wait()
	ktest.Wait(t, 10*time.Second, "end of the flood", func() bool { return read() == 0 })
	want := nftCounter(t, gateway)
	t.Logf("%d counted in %d windows, %d lost", counted, busy, lost)
	// Lost are events of any kind; of these drops none may be missing without it.
	if counted > want || counted+lost < want || busy < 20 {
		t.Errorf("%d drops in %d windows and %d lost, the rule counted %d", counted, busy, lost, want)
	}
}

// nftCounter reads the counter "refused" of table t.
func nftCounter(t testing.TB, node *lab.Node) (packets uint64) {
	t.Helper()
	ktest.Tool(t, "nft")
	err := node.Do(func() error {
		out, err := exec.Command("nft", "list", "counter", "ip", "t", "refused").Output()
		if err != nil {
			return err
		}
		_, after, _ := strings.Cut(string(out), "packets ")
		_, err = fmt.Sscan(after, &packets)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return packets
}

// More different keys than there is room for: those without room are counted as
// lost, and the others are right.
func TestDropsWithoutRoom(t *testing.T) {
	const devices = 150
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()
	addr := func(i, host int) string { return fmt.Sprintf("10.%d.%d.%d", 100+i/200, i%200, host) }
	err = ns.Do(func() error {
		// IPv6 would send, and lose, packets of its own.
		err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for i := range devices {
			name := fmt.Sprintf("d%d", i)
			if i%2 == 0 {
				pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: fmt.Sprintf("d%d", i+1)}
				if err := netlink.LinkAdd(pair); err != nil {
					return err
				}
			}
			dev, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr(i, 1) + "/24")
			if err != nil {
				return err
			}
			if err := errors.Join(netlink.AddrAdd(dev, a), netlink.LinkSetUp(dev)); err != nil {
				return err
			}
		}
		cmd := exec.Command(ktest.Tool(t, "nft"), "-f", "-")
		cmd.Stdin = strings.NewReader("table ip t {\nchain c {\ntype filter hook postrouting priority 0;\nudp dport 9 drop\n}\n}\n")
		return cmd.Run()
	})
	if err != nil {
		t.Fatal(err)
	}
	d, err := OpenDrops(DropOptions{Netns: ns.Inode(), maxKeys: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for window := range 2 {
		err = ns.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			for i := range devices {
				to := &unix.SockaddrInet4{Port: 9, Addr: netip.MustParseAddr(addr(i, 2)).As4()}
				if err := unix.Sendto(fd, []byte("x"), 0, to); !errors.Is(err, unix.EPERM) {
					return fmt.Errorf("send to %v: %v, want it refused", to.Addr, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := d.Read()
		if err != nil {
			t.Fatal(err)
		}
		rows := 0
		for _, row := range got.Rows {
			if row.Reason != "NETFILTER_DROP" {
				continue
			}
			rows++
			if row.Count != 1 || !strings.HasPrefix(row.Interface, "d") {
				t.Errorf("window %d: row %+v, want one drop on its own device", window, row)
			}
		}
		if got.LostEvents == 0 || rows+int(got.LostEvents) != devices {
			t.Errorf("window %d: %d rows and %d lost, want %d together and some of both", window, rows, got.LostEvents, devices)
		}
	}
}

// With stacks each row shows how the packet came to its end, from the function
// that dropped it outwards.
func TestDropStacks(t *testing.T) {
	const n = 5
	l := routed(t, lab.RulesNone)
	run(t, l.NATNode(), "nft -f -", "table ip t {\nchain c {\ntype filter hook forward priority 0;\nudp dport 9 drop\n}\n}\n")
	d, err := OpenDrops(DropOptions{Stacks: true}) // of all namespaces
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	datagrams{count: n, to: "10.1.0.2:9"}.send(t, l.Node(lab.RoleClient))
	row := collect(t, d, n, "by the rule", func(row snapshot.Drop) bool {
		return row.Netns == l.NATNode().Handle().Inode() && row.Cause == snapshot.CauseRule
	})
	sum := uint64(0)
	for _, stack := range row.Stacks {
		sum += stack.Count
		if frames := strings.Join(stack.Frames, " "); stack.Frames[0] != row.Location || !strings.Contains(frames, " nf_hook_slow+") ||
			!strings.Contains(frames, " ip_forward+") {
			t.Errorf("stack %q, want from %s by nf_hook_slow and ip_forward", stack.Frames, row.Location)
		}
	}
	if sum == 0 || sum > n {
		t.Errorf("stacks of %d drops, want of %d", sum, n)
	}
}

// Connections that begin and end well through NAT lose nothing that is not
// called benign.
func TestDropsOfHealthyTraffic(t *testing.T) {
	const connections = 200
	l := routed(t, lab.RulesNft)
	server, err := l.ServerNode().ServeHTTP(context.Background(), ":80", lab.HTTPServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	d, err := OpenDrops(DropOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for range connections {
		err := l.Node(lab.RoleClient).Do(func() error {
			conn, err := net.Dial("tcp4", "10.1.0.2:80")
			if err != nil {
				return err
			}
			defer conn.Close()
			if _, err := fmt.Fprint(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, conn)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	got, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range got.Rows {
		for _, node := range l.Nodes() {
			if row.Netns != node.Handle().Inode() {
				continue
			}
			// A late ACK that finds TIME_WAIT looks like other drops without a reason.
			late := row.Reason == "NOT_SPECIFIED" && strings.HasPrefix(row.Location, "tcp_v4_rcv+") && row.Count < connections/20
			if row.Cause != snapshot.CauseNone || !row.Benign && !late {
				t.Errorf("in %s: %+v", node.Role, row)
			}
		}
	}
}

// The one packet that tells of a missing helper of FTP is not lost among others that nobody wants here: it is a
// row of its own.
func TestDropsOfFTPDataBesideOthers(t *testing.T) {
	l := routed(t, lab.RulesNone)
	gateway := l.NATNode()
	d, err := OpenDrops(DropOptions{Netns: gateway.Handle().Inode()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	const others = 500
	connect := func(from, to int) { // to where nobody listens
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{Port: from}}
		if c, err := dialer.DialContext(t.Context(), "tcp4", fmt.Sprintf("10.0.0.1:%d", to)); err == nil {
			c.Close()
			t.Fatalf("port %d is open", to)
		}
	}
	err = l.Node(lab.RoleClient).Do(func() error {
		for n := range others {
			connect(0, 3000+n)
			if n == others/2 {
				connect(20, 41000)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	var all uint64
	found := false
	for _, row := range got.Rows {
		if row.Reason != "NO_SOCKET" {
			continue
		}
		all += row.Count
		if len(row.Samples) == 1 && strings.Contains(row.Samples[0], ":20 -> 10.0.0.1:41000 SYN") && row.Count == 1 {
			found = true
		}
	}
	if !found || all != others+1 {
		t.Errorf("%d packets without a socket, want %d: %+v", all, others+1, got.Rows)
	}
}

// A packet that the kernel makes for a program's request and frees with the reply is no traffic
// of anybody: a test run of an eBPF program, a question to the routing tables.
func TestDropsOfRequests(t *testing.T) {
	gateway := routed(t, lab.RulesNone).Node(lab.RoleGateway)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R0, 0), asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	d, err := OpenDrops(DropOptions{Netns: gateway.Handle().Inode()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	requests := map[string]func() error{
		"bpf_prog_test_run": func() error {
			_, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			return err
		},
		"inet_rtm_getroute": func() error {
			if _, err := netlink.RouteGet(net.IPv4(192, 0, 2, 77)); err == nil {
				return errors.New("a route where there is none")
			}
			return nil
		},
	}
	for place, request := range requests {
		if err := gateway.Do(request); err != nil {
			t.Fatal(place, err)
		}
	}
	got, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range got.Rows {
		for place := range requests {
			if strings.HasPrefix(row.Location, place) {
				delete(requests, place)
			}
		}
		if !row.Benign {
			t.Errorf("not called benign: %+v", row)
		}
	}
	for place := range requests {
		t.Errorf("%s dropped nothing: this shows nothing of it", place)
	}
}
