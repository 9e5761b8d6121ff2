// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/ethtool"
	"natkit/internal/snapshot"
)

func TestSchedstat(t *testing.T) {
	got, err := parseSchedstat("47672619260 512420936729 740123\n")
	if want := (schedstat{waitNS: 512420936729, runs: 740123}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for _, text := range []string{"", "1 2", "a b c", "1 -2 3", "1 99999999999999999999999 3"} {
		if got, err := parseSchedstat(text); err == nil {
			t.Errorf("%q was taken for %+v", text, got)
		}
	}
}

// The waiting time is that of each processor's own thread; without a view of the
// kernel's threads the processors are known all the same.
func TestSoftirqWait(t *testing.T) {
	files := maps.Clone(newKernel)
	maps.Copy(files, map[string]string{
		"proc/2/comm": "kthreadd\n", "proc/2/task/2/children": "3 17 21 ", "proc/3/comm": "rcu_gp\n",
		"proc/17/comm": "ksoftirqd/0\n", "proc/17/schedstat": "1 2 3\n",
		"proc/21/comm": "ksoftirqd/1\n", "proc/21/schedstat": "5 6 7\n",
	})
	s := take(t, Options{Root: tree(t, files)})
	for _, c := range s.CPUs {
		if c.KsoftirqdRuns == nil || *c.KsoftirqdRuns != 0 || c.KsoftirqdWait == nil || *c.KsoftirqdWait != 0 {
			t.Errorf("processor %d: %v runs, waited %v, though nothing changed", c.Number, c.KsoftirqdRuns, c.KsoftirqdWait)
		}
	}
	files["proc/2/comm"] = "nginx\n" // a container
	if s = take(t, Options{Root: tree(t, files)}); len(s.CPUs) != 2 || s.CPUs[0].KsoftirqdRuns != nil || s.Can(snapshot.CanSoftirqWait) {
		t.Errorf("in a container: %+v", s.CPUs)
	}
	if i := slices.IndexFunc(s.Capabilities, func(c snapshot.Capability) bool { return c.Name == snapshot.CanSoftirqWait }); !s.Capabilities[i].Waived {
		t.Error("a healthy container is told as not judged")
	}
}

func TestNeighbourStats(t *testing.T) {
	const head = "entries  allocs   destroys hash_grows lookups  hits     res_failed rcv_probes_mcast rcv_probes_ucast periodic_gc_runs forced_gc_runs unresolved_discards table_fulls\n"
	got, err := parseNeighbourStats(head +
		"000003fe 000015ce 00001a65 00000002 000081b7 00000738 0000001f 0 0 308 00000010 74fe9 00000005\n" +
		"000003fe 000015ce 00001a65 00000002 000081b7 00000738 00000001 0 0 308 00000001 74fe9 00000020\n")
	if want := (neighbourStats{entries: 1022, tableFulls: 37, forcedRuns: 17, failed: 32}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	got, err = parseNeighbourStats("entries allocs\n00000005 00000001 00000009\n")
	if want := (neighbourStats{entries: 5}); err != nil || got != want {
		t.Errorf("an old kernel: got %+v, %v, want %+v", got, err, want)
	}
	for _, text := range []string{"", "00000001 2\n", "entries table_fulls\n1 x\n", "entries\nffffffffffffffffff\n"} {
		if got, err := parseNeighbourStats(text); err == nil {
			t.Errorf("%q was taken for %+v", text, got)
		}
	}
}

func TestLostCounters(t *testing.T) {
	before := map[string]uint64{"rx_missed_errors": 5, "rx_packets": 1}
	after := map[string]uint64{
		"rx_missed_errors": 9, "rx_packets": 1000, "tx_dropped": 5, "rx_no_buffer_count": 3, "rx_queue_0_drops": 7, "rx0_drops": 7,
		"rx_xdp_drops": 40, "rx_drops": 7, "rx_out_of_buffer": 2, "rx3_alloc_fail": 1, "rx_fifo_errors": 0, "bw_in_allowance_exceeded": 11, "tx_timeout": 3,
		"pkts rx OOB": 9, "pkts rx err": 8, "drv dropped tx total": 7,
	}
	want := map[string]uint64{"rx_missed_errors": 4, "rx_no_buffer_count": 3, "rx_drops": 7, "rx_out_of_buffer": 2, "bw_in_allowance_exceeded": 11, "pkts rx OOB": 9}
	if got := lostCounters(before, after); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A driver's own counters, as one of the kernel's virtual devices has them.
func TestDriverCounters(t *testing.T) {
	ns := newNetns(t)
	var got map[string]uint64
	err := ns.Do(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}); err != nil {
			return err
		}
		peer, err := netlink.LinkByName("b")
		if err != nil {
			return err
		}
		return withEthtool(func(c *ethtool.Conn) (err error) {
			got, err = ethtoolStats(c, "a")
			if err == nil && got["peer_ifindex"] != uint64(peer.Attrs().Index) {
				t.Errorf("got %v, want peer_ifindex %d", got, peer.Attrs().Index)
			}
			return err
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestReadQueues(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"e*0/queues/rx-0/rps_cpus": "00000000,00000000\n", "e*0/queues/rx-1/rps_cpus": "00000000,0000000e\n", "e*0/queues/tx-0/xps_cpus": "1\n",
		"e*0/threaded": "1\n", "ex0/queues/rx-7/rps_cpus": "f\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var nic snapshot.NIC
	readQueues(dir, "e*0", &nic)
	if want := (snapshot.NIC{RxQueues: 2, RPSQueues: 1, Threaded: true}); !reflect.DeepEqual(nic, want) {
		t.Errorf("got %+v, want %+v", nic, want)
	}
	if readQueues(dir, "gone", &nic); nic.RxQueues != 0 || nic.Threaded {
		t.Errorf("no interface: %+v", nic)
	}
}

// What was tried before a short window began is not of now.
func TestRecentSeconds(t *testing.T) {
	for window, want := range map[time.Duration]uint64{0: 3, time.Second: 3, 4 * time.Second: 4, 4500 * time.Millisecond: 5, time.Hour: 10} {
		if got := recentSeconds(window); got != want {
			t.Errorf("window of %v: %d, want %d", window, got, want)
		}
	}
}

func TestRouteQuestion(t *testing.T) {
	for sample, want := range map[string]string{
		"udp 10.0.0.2:53 -> 10.0.1.2:53":                               "10.0.0.2 10.0.1.2",
		"icmp 10.0.0.2 -> 10.0.1.2 type 8 code 0":                      "10.0.0.2 10.0.1.2",
		"tcp [2001:db8::1]:4000 -> [2001:db8::2]:80 SYN (flow x -> y)": "2001:db8::1 2001:db8::2",
		"icmpv6 :: -> ff02::1:ff68:ad59 type 135 code 0":               "", // goes to no route
		"arp":        "",
		"udp - -> -": "",
		"ip-protocol-47 10.0.0.2 -> somewhere (flow 10.0.0.2 -> 10.0.0.3:1)": "",
	} {
		got := ""
		if q, ok := routeQuestion(sample, "eth0"); ok {
			got = q.Source.String() + " " + q.Dest.String()
		}
		if got != want {
			t.Errorf("%q: got %q, want %q", sample, got, want)
		}
	}
}

// What is read of devices, neighbours and routes is what was set up.
func TestDevices(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
	output(t, h, "", "ip", "addr", "add", "10.9.0.1/24", "dev", "veth0")
	for _, dev := range []string{"veth0", "veth1"} {
		output(t, h, "", "ip", "link", "set", dev, "up")
	}
	output(t, h, "", "sysctl", "-qw", "net.ipv4.ip_forward=1")
	output(t, h, "", "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "1mbit", "burst", "4096", "limit", "8192")
	for kind, dst := range map[string]string{"blackhole": "10.66.0.0/16", "unreachable": "10.67.0.0/16", "prohibit": "10.68.0.0/16"} {
		output(t, h, "", "ip", "route", "add", kind, dst)
	}
	output(t, h, "", "ip", "route", "add", "10.70.0.0/16", "via", "10.9.0.7")
	output(t, h, "", "ip", "route", "add", "10.71.0.0/16", "nexthop", "via", "10.9.0.7", "nexthop", "via", "10.9.0.8")
	for i := range 5 {
		output(t, h, "", "ip", "neigh", "add", fmt.Sprintf("10.9.0.%d", 100+i), "lladdr", "02:00:00:00:00:01", "dev", "veth0")
	}
	if err := h.DoWithSys(func() error { return os.WriteFile("/sys/class/net/veth0/queues/rx-0/rps_cpus", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	for _, policy := range []string{"src 10.1.0.0/24 dst 10.2.0.0/24 dir out", "src 10.1.0.1 dst 10.2.0.1 dir fwd", "src 10.2.0.0/24 dst 10.1.0.0/24 dir in"} {
		output(t, h, "", "ip", strings.Fields("xfrm policy add "+policy+" tmpl src 10.9.0.1 dst 10.9.0.2 proto esp mode tunnel")...)
	}
	s := take(t, Options{Netns: h})
	if s.Xfrm == nil || *s.Xfrm != (snapshot.Xfrm{Policies: 2, Prefixes: 1}) {
		t.Errorf("policies of IPsec: %+v", s.Xfrm)
	}
	for _, name := range []string{snapshot.CanQdiscs, snapshot.CanNICs, snapshot.CanNeighbours, snapshot.CanRoutes} {
		if !s.Can(name) {
			t.Errorf("could not see %s: %v", name, s.Capabilities)
		}
	}
	i := slices.IndexFunc(s.Interfaces, func(l snapshot.Interface) bool { return l.Name == "veth0" })
	veth := s.Interfaces[i]
	if q := veth.Qdisc; q == nil || q.Kind != "tbf" || q.LimitBytes != 8192 || q.RateBytes != 125000 || q.BurstBytes < 4000 || q.BurstBytes > 4200 {
		t.Errorf("queue %+v", q)
	}
	if nic := veth.NIC; nic == nil || nic.Driver != "veth" || nic.RxQueues < 1 || nic.RPSQueues != 1 || nic.Threaded {
		t.Errorf("driver %+v", nic)
	}
	j := slices.IndexFunc(s.Neighbours, func(n snapshot.Neighbours) bool { return n.Family == "ipv4" })
	if n := s.Neighbours[j]; n.Here != 5 || n.Busiest != "veth0" || n.Entries < 5 || n.Thresh3 == 0 || n.Thresh2 == 0 {
		t.Errorf("neighbours %+v", n)
	}

	// What each kind of route answers. The route of the packet's own way leads back.
	in(t, h, func() error {
		for dst, want := range map[string]snapshot.RouteKind{
			"10.65.0.1": snapshot.RouteNone, "10.66.0.1": snapshot.RouteBlackhole, "10.67.0.1": snapshot.RouteUnreachable,
			"10.68.0.1": snapshot.RouteProhibited, "10.70.0.1": snapshot.RouteFound,
		} {
			q := snapshot.RouteAnswer{In: "veth0", Source: netip.MustParseAddr("10.9.0.9"), Dest: netip.MustParseAddr(dst)}
			got, err := askRoute(q, true)
			if err != nil || got.Answer != want {
				t.Errorf("%s: %+v, %v, want %q", dst, got, err, want)
			}
			if _, refuses := refusingRoutes[want]; refuses && (got.Match != netip.PrefixFrom(got.Dest, 16).Masked() || got.Table != 254) {
				t.Errorf("%s: said by %v of table %d", dst, got.Match, got.Table)
			}
			if want == snapshot.RouteFound && (got.Out != "veth0" || got.Via != netip.MustParseAddr("10.9.0.7")) {
				t.Errorf("%s: %+v", dst, got)
			}
		}
		q := snapshot.RouteAnswer{In: "veth0", Source: netip.MustParseAddr("10.9.0.1"), Dest: netip.MustParseAddr("10.70.0.1")}
		if got, err := askRoute(q, false); err != nil || got.Answer != snapshot.RouteFound || got.Out != "veth0" {
			t.Errorf("from this machine itself: %+v, %v", got, err)
		}
		// Where answers go that a client did not confirm.
		s := &snapshot.Snapshot{Conntrack: &snapshot.Conntrack{Table: &snapshot.Table{Halfway: []snapshot.UnansweredUse{
			{Source: netip.MustParseAddr("10.70.0.1"), Target: snapshot.EndpointOf(netip.MustParseAddrPort("10.9.0.9:80"))}, {}}}}}
		answers(s)
		want := snapshot.RouteAnswer{In: "veth0", Source: netip.MustParseAddr("10.9.0.9"), Dest: netip.MustParseAddr("10.70.0.1"),
			Answer: snapshot.RouteFound, Out: "veth0", Via: netip.MustParseAddr("10.9.0.7"), Table: 254}
		if len(s.Routes) != 1 || s.Routes[0] != want {
			t.Errorf("way of answers: %+v, want %+v", s.Routes, want)
		}
		// Of several ways, the one that is silent is named, whichever a look-up takes.
		for _, silent := range []string{"10.9.0.7", "10.9.0.8"} {
			neighbour := &netlink.Neigh{LinkIndex: veth.Index, Family: netlink.FAMILY_V4, IP: net.ParseIP(silent).To4(), State: netlink.NUD_FAILED}
			if err := netlink.NeighSet(neighbour); err != nil {
				return err
			}
			got := snapshot.RouteAnswer{Dest: netip.MustParseAddr("10.71.0.1"), Out: "other", Via: netip.MustParseAddr("10.9.0.6")}
			if chooseSilent(&got); got.Via.String() != silent || got.Out != "veth0" {
				t.Errorf("%s is silent, and named is %s on %s", silent, got.Via, got.Out)
			}
			if err := netlink.NeighDel(neighbour); err != nil {
				return err
			}
		}
		asked := snapshot.RouteAnswer{Dest: netip.MustParseAddr("10.71.0.1"), Out: "veth0", Via: netip.MustParseAddr("10.9.0.6")}
		got := asked
		if chooseSilent(&got); got != asked {
			t.Errorf("nobody is silent: %+v, want %+v", got, asked)
		}
		return nil
	})

	// What the queue drops in the window is its increase.
	before := take(t, Options{Netns: h}).Interfaces[i].Qdisc
	if before.Dropped != 0 {
		t.Errorf("dropped %d in an idle window", before.Dropped)
	}
	src := qdiscs()
	in(t, h, func() error {
		if err := src.start(nil); err != nil {
			return err
		}
		link, err := netlink.LinkByName("veth0")
		if err != nil {
			return err
		}
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.IPv4(10, 9, 0, 50), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}); err != nil {
			return err
		}
		c, err := net.Dial("udp4", "10.9.0.50:9")
		if err != nil {
			return err
		}
		defer c.Close()
		for range 40 {
			_, _ = c.Write([]byte(strings.Repeat("x", 1000))) // ENOBUFS: dropped by the queue
		}
		return src.end(nil, s)
	})
	if q := s.Interfaces[i].Qdisc; q.Dropped < 20 || q.Dropped > 40 {
		t.Errorf("dropped %d of 40 packets, with room for 8 and a burst of 4", q.Dropped)
	}
}

// An interface that is up has no carrier while the other end of its pair is down.
func TestNoCarrier(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "up", "type", "veth", "peer", "name", "veth1")
	look := func() (up, carrier bool) {
		for _, l := range take(t, Options{Netns: h}).Interfaces {
			if l.Name == "veth0" {
				return l.Up, !l.NoCarrier
			}
		}
		t.Fatal("no veth0")
		return
	}
	if up, carrier := look(); !up || carrier {
		t.Errorf("the other end is down: up %v, carrier %v", up, carrier)
	}
	output(t, h, "", "ip", "link", "set", "veth1", "up")
	if up, carrier := look(); !up || !carrier {
		t.Errorf("both ends are up: up %v, carrier %v", up, carrier)
	}
}
