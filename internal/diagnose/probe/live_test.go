// SPDX-License-Identifier: Apache-2.0

package probe

// Tests on the running kernel, in namespaces of their own, against what the
// usual programs say.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// newNetns makes a namespace with its loopback device up.
func newNetns(t *testing.T) *netns.Handle {
	t.Helper()
	return newNetnsNamed(t, ktest.Name(t))
}

func newNetnsNamed(t *testing.T, name string) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(); netns.Delete(name) })
	in(t, h, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	return h
}

func in(t *testing.T, h *netns.Handle, fn func() error) {
	t.Helper()
	if err := h.Do(fn); err != nil {
		t.Fatal(err)
	}
}

// output runs a program in the namespace.
func output(t *testing.T, h *netns.Handle, stdin, name string, args ...string) string {
	t.Helper()
	path := ktest.Tool(t, name)
	var out []byte
	in(t, h, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Stdin = strings.NewReader(stdin)
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", cmd, err, out)
		}
		return nil
	})
	return string(out)
}

// takeWhile takes a Snapshot and calls fn in its window.
func takeWhile(t *testing.T, opts Options, fn func()) *snapshot.Snapshot {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	opts.Window = time.Minute
	opts.Progress = func(what string, _ float64) {
		if what == "watching" && ctx.Err() == nil {
			fn()
			cancel()
		}
	}
	s, err := Take(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Capabilities {
		t.Logf("%+v", c)
	}
	return s
}

// sendUDP sends n datagrams in the namespace, each from a port of its own.
func sendUDP(t *testing.T, h *netns.Handle, to string, n int) {
	t.Helper()
	in(t, h, func() error {
		for range n {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			c.Write([]byte("x")) // an answer of ICMP is no matter
			c.Close()
		}
		return nil
	})
}

func TestLiveCountersAreThoseOfNstat(t *testing.T) {
	h := newNetns(t)
	read := func() map[string]uint64 {
		var all struct{ Kernel map[string]uint64 }
		if err := json.Unmarshal([]byte(output(t, h, "", "nstat", "-asz", "--json")), &all); err != nil {
			t.Fatal(err)
		}
		return all.Kernel
	}
	var before, after map[string]uint64
	s := takeWhile(t, Options{Netns: h}, func() {
		before = read()
		in(t, h, func() error {
			for range 5 {
				if c, err := net.Dial("tcp", "127.0.0.1:9"); err == nil { // nobody listens
					c.Close()
				}
			}
			return nil
		})
		sendUDP(t, h, "127.0.0.1:9", 7)
		sendUDP(t, h, "10.99.99.99:9", 0)
		after = read()
	})
	compared := 0
	for name, n := range s.Counters {
		group, rest, _ := strings.Cut(name, ".")
		was, ok := before[group+rest]
		if !ok || strings.HasPrefix(name, "Udp") { // nstat makes Udp of UdpLite's names, too
			continue
		}
		compared++
		if want := after[group+rest] - was; n != want {
			t.Errorf("%s increased by %d, nstat says %d", name, n, want)
		}
	}
	if compared < 50 || s.Counters["Tcp.ActiveOpens"] != 5 || s.Counters["Udp.NoPorts"] != 7 {
		t.Errorf("%d counters compared; Tcp.ActiveOpens %d, want 5; Udp.NoPorts %d, want 7",
			compared, s.Counters["Tcp.ActiveOpens"], s.Counters["Udp.NoPorts"])
	}
	if s.Netns.Init || s.Netns.Inode != h.Inode() || s.Netns.Name != h.Name() {
		t.Errorf("namespace %+v", s.Netns)
	}
	if len(s.Interfaces) == 0 || s.Interfaces[0].Name != "lo" || !s.Interfaces[0].Up || s.Interfaces[0].RxPackets < 17 ||
		!slices.Contains(s.Interfaces[0].Addresses, netip.MustParsePrefix("127.0.0.1/8")) {
		t.Errorf("interfaces %+v", s.Interfaces)
	}
}

func TestLiveConntrackIsThatOfConntrack(t *testing.T) {
	h := newNetns(t)
	// Drops what leaves after it has an entry, which is never confirmed; and
	// everything is tracked.
	output(t, h, `table ip t {
		chain in { type filter hook input priority 0; ct state invalid drop; }
		chain out { type filter hook output priority 0; udp dport 7 drop; }
	}`, "nft", "-f", "-")
	pairs := regexp.MustCompile(`(\w+)=(\d+)`)
	read := func() map[string]uint64 {
		sum := map[string]uint64{}
		for _, m := range pairs.FindAllStringSubmatch(output(t, h, "", "conntrack", "-S"), -1) {
			n, err := strconv.ParseUint(m[2], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			if m[1] != "cpu" {
				sum[m[1]] += n
			}
		}
		return sum
	}
	var before, after map[string]uint64
	s := takeWhile(t, Options{Netns: h, Dump: true}, func() {
		before = read()
		sendUDP(t, h, "127.0.0.1:9", 12)
		// A packet that belongs to nothing is invalid: an ICMP answer without question.
		in(t, h, func() error {
			c, err := net.Dial("ip4:icmp", "127.0.0.1")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte{0, 0, 0xff, 0xfd, 0, 1, 0, 1})
			return err
		})
		in(t, h, func() error {
			_, err := conntrack.Fill(t.Context(), conntrack.FillOptions{Count: 30})
			return err
		})
		after = read()
	})
	if s.Conntrack == nil || s.Conntrack.Table == nil {
		t.Fatalf("no conntrack: %+v", s.Conntrack)
	}
	for name, n := range after {
		if got, ok := s.Conntrack.Stats[name]; ok && got != n-before[name] {
			t.Errorf("%s increased by %d, conntrack -S says %d", name, got, n-before[name])
		} else if !ok {
			t.Errorf("%s of conntrack -S is missing", name)
		}
	}
	if s.Conntrack.Stats["insert"] == 0 && s.Conntrack.Stats["invalid"] == 0 {
		t.Errorf("nothing was counted: %v", s.Conntrack.Stats)
	}
	want := strings.TrimSpace(output(t, h, "", "conntrack", "-C"))
	if got := strconv.FormatUint(s.Conntrack.Count, 10); got != want || s.Conntrack.Table.Entries != s.Conntrack.Count {
		t.Errorf("count %s, entries %d; conntrack -C says %s", got, s.Conntrack.Table.Entries, want)
	}
	if s.Conntrack.CountStart != 0 || s.Conntrack.ObjectBytes < 200 || s.Conntrack.BucketBytes == 0 {
		t.Errorf("conntrack %+v", s.Conntrack)
	}
}

func TestLiveNFTables(t *testing.T) {
	h := newNetns(t)
	if got := takeWhile(t, Options{Netns: h}, func() {}).Chains; got == nil || len(got) != 0 {
		t.Errorf("chains of an empty namespace: %v", got)
	}
	output(t, h, `
	table ip nat {
		chain post {
			type nat hook postrouting priority srcnat
			oifname "none" masquerade
			ip saddr 1.2.3.4 tcp dport 80 snat to 10.72.0.1:5000-5003
			ip saddr 1.2.3.4 udp dport 80 masquerade to :7000-7100 random
		}
		chain pre {
			type nat hook prerouting priority dstnat
			tcp dport 8080 dnat to 10.72.0.2:80
			ip daddr 10.1.1.1 udp dport 53-54 dnat to 10.72.0.3-10.72.0.4
			udp dport { 55, 56 } dnat to 10.72.0.5
			dnat to ip saddr map { 10.1.1.2 : 10.72.0.6 }
			tcp dport 8081 redirect to :80
		}
	}
	table inet f {
		chain output {
			type filter hook output priority 10; policy drop
			meta l4proto icmp accept
			udp dport 7 counter drop
			udp dport 8 counter reject
			udp dport 5 accept
			counter drop
		}
		chain user { counter; accept; }
	}
	table ip asleep { flags dormant; chain x { type filter hook forward priority 0; policy drop; } ; }
	`, "nft", "-f", "-")
	s := takeWhile(t, Options{Netns: h}, func() {
		sendUDP(t, h, "127.0.0.1:7", 3)
		sendUDP(t, h, "127.0.0.1:8", 4)
		sendUDP(t, h, "127.0.0.1:9", 5)
	})
	var all struct {
		Nftables []struct {
			Chain *struct {
				Family, Table, Name, Type, Hook, Policy string
				Prio                                    int
			}
			Rule *struct{ Family, Table, Chain string }
		}
	}
	if err := json.Unmarshal([]byte(output(t, h, "", "nft", "-j", "list", "ruleset")), &all); err != nil {
		t.Fatal(err)
	}
	var want []snapshot.Chain
	for _, x := range all.Nftables {
		if c := x.Chain; c != nil && c.Table != "asleep" {
			want = append(want, snapshot.Chain{Backend: "nft", Family: c.Family, Table: c.Table, Name: c.Name, Type: c.Type, Hook: c.Hook, Policy: c.Policy, Priority: c.Prio})
		}
		if r := x.Rule; r != nil {
			for i := range want {
				if c := &want[i]; c.Family == r.Family && c.Table == r.Table && c.Name == r.Chain {
					c.Rules++
				}
			}
		}
	}
	details := map[string]snapshot.Chain{
		"post": {NATRules: map[string]int{"masquerade": 2, "snat": 1}, SNATRanges: []snapshot.PortRange{{}, {Min: 5000, Max: 5003}, {Min: 7000, Max: 7100}}, SNATTo: []snapshot.AddrRange{addrRange("10.72.0.1", "10.72.0.1")}},
		"pre": {NATRules: map[string]int{"dnat": 4, "redirect": 1}, DNATUnknown: true, DNATTo: []snapshot.Target{
			{AddrRange: addrRange("10.72.0.2", "10.72.0.2"), Ports: snapshot.PortRange{Min: 80, Max: 80}, Protocol: "tcp", DestPorts: snapshot.PortRange{Min: 8080, Max: 8080}},
			{AddrRange: addrRange("10.72.0.3", "10.72.0.4"), Protocol: "udp", DestPorts: snapshot.PortRange{Min: 53, Max: 54}, Dest: netip.MustParseAddr("10.1.1.1")},
			{AddrRange: addrRange("10.72.0.5", "10.72.0.5"), Protocol: "udp"},
		}},
		"output": {DropRules: []snapshot.DropRule{
			{Number: 5, Verdict: "drop", All: true, Packets: new(uint64(5))},
			{Number: 3, Verdict: "reject", Packets: new(uint64(4))},
			{Number: 2, Verdict: "drop", Packets: new(uint64(3))},
		}},
	}
	for i := range want {
		d := details[want[i].Name]
		want[i].NATRules, want[i].SNATRanges, want[i].DropRules = d.NATRules, d.SNATRanges, d.DropRules
		want[i].SNATTo, want[i].DNATTo, want[i].DNATUnknown = d.SNATTo, d.DNATTo, d.DNATUnknown
	}
	slices.SortStableFunc(want, func(a, b snapshot.Chain) int { return base(b) - base(a) })
	for i := range s.Chains { // TestLiveRuleTextsAreThoseOfNFT
		s.Chains[i].Walk = nil
	}
	if !reflect.DeepEqual(s.Chains, want) {
		t.Errorf("chains\n%+v\nwant as nft lists them\n%+v", s.Chains, want)
	}
	if s.Drops == nil {
		t.Log("no tracer here")
		return
	}
	var dropped uint64
	for _, row := range s.Drops.Rows {
		if row.Cause == snapshot.CauseRule && (row.Netns == 0 || row.Netns == h.Inode()) {
			dropped += row.Count
		}
	}
	if dropped != 12 {
		t.Errorf("tracer saw %d packets dropped by rules, want 12: %+v", dropped, s.Drops.Rows)
	}
}

// Policies must be seen for each of the three ways to set one, with the counts
// that the programs show.
func TestLiveIPTables(t *testing.T) {
	for _, backend := range []string{"iptables-legacy", "iptables-nft"} {
		t.Run(backend, func(t *testing.T) {
			h := newNetns(t)
			ktest.Tool(t, backend)
			for _, args := range []string{
				"-P FORWARD DROP",
				"-P OUTPUT DROP",
				"-A OUTPUT -p icmp -j ACCEPT", // what REJECT answers
				"-A OUTPUT -p udp --dport 7 -j DROP",
				"-A OUTPUT -m comment --comment hello -p udp --dport 8 -j REJECT",
				"-N mine",
				"-A mine -m comment --comment hello -j DROP",
				"-t nat -A POSTROUTING -p tcp -j SNAT --to-source 10.72.0.1:1000-2000",
				"-t nat -A POSTROUTING -p tcp -j MASQUERADE --to-ports 3000-4000",
				"-t nat -A POSTROUTING -j MASQUERADE",
				"-t nat -A PREROUTING -p tcp --dport 99 -j DNAT --to-destination 10.72.0.2:80",
				"-t nat -A PREROUTING -p udp --dport 53:54 -d 10.1.1.1 -j DNAT --to-destination 10.72.0.3-10.72.0.4",
			} {
				output(t, h, "", backend, append([]string{"-w"}, strings.Fields(args)...)...)
			}
			sendUDP(t, h, "127.0.0.1:9", 2) // before the window: not in the increase
			s := takeWhile(t, Options{Netns: h}, func() {
				sendUDP(t, h, "127.0.0.1:7", 3)
				sendUDP(t, h, "127.0.0.1:8", 4)
				sendUDP(t, h, "127.0.0.1:9", 5)
			})
			chains := map[string]snapshot.Chain{}
			for _, c := range s.Chains {
				chains[c.Table+" "+c.Name] = c
			}
			kind := map[string]string{"iptables-legacy": "iptables-legacy", "iptables-nft": "nft"}[backend]
			policies := regexp.MustCompile(`(?m)^Chain (\w+) \((?:policy (\w+) (\d+) packets|\d+ references)`)
			for _, table := range []string{"filter", "nat"} {
				for _, m := range policies.FindAllStringSubmatch(output(t, h, "", backend, "-w", "-t", table, "-nvxL"), -1) {
					c, ok := chains[table+" "+m[1]]
					if backend == "iptables-nft" && m[2] == "ACCEPT" && !ok {
						continue // it lists chains that it has not made
					}
					if !ok || c.Backend != kind || c.Family != "ip" || c.Policy != strings.ToLower(m[2]) {
						t.Errorf("table %s, chain %s: %+v, want policy %s", table, m[1], c, m[2])
					}
				}
			}
			out := chains["filter OUTPUT"]
			if out.PolicyPackets == nil || *out.PolicyPackets != 5 || out.Hook != "output" {
				t.Errorf("OUTPUT %+v, want 5 packets that met the policy", out)
			}
			wantDrops := []snapshot.DropRule{
				{Number: 3, Verdict: "reject", Packets: new(uint64(4))},
				{Number: 2, Verdict: "drop", Packets: new(uint64(3))},
			}
			if !reflect.DeepEqual(out.DropRules, wantDrops) {
				t.Errorf("rules of OUTPUT that drop: %+v, want %+v", out.DropRules, wantDrops)
			}
			if f := chains["filter FORWARD"]; f.Hook != "forward" || f.Policy != "drop" || f.Rules != 0 || f.PolicyPackets == nil || *f.PolicyPackets != 0 {
				t.Errorf("FORWARD %+v", f)
			}
			if mine := chains["filter mine"]; mine.Hook != "" || mine.Rules != 1 || len(mine.DropRules) != 1 || !mine.DropRules[0].All {
				t.Errorf("chain of the user's %+v", mine)
			}
			post := chains["nat POSTROUTING"]
			wantRanges := []snapshot.PortRange{{Min: 1000, Max: 2000}, {Min: 3000, Max: 4000}, {}}
			if post.Type != "nat" || post.Priority != 100 || post.Rules != 3 || !reflect.DeepEqual(post.SNATRanges, wantRanges) ||
				!reflect.DeepEqual(post.NATRules, map[string]int{"snat": 1, "masquerade": 2}) {
				t.Errorf("POSTROUTING %+v", post)
			}
			if want := []snapshot.AddrRange{addrRange("10.72.0.1", "10.72.0.1")}; !slices.Equal(post.SNATTo, want) || post.SNATUnknown {
				t.Errorf("sources are translated to %v, want %v", post.SNATTo, want)
			}
			pre := chains["nat PREROUTING"]
			wantTargets := []snapshot.Target{
				{AddrRange: addrRange("10.72.0.2", "10.72.0.2"), Ports: snapshot.PortRange{Min: 80, Max: 80}, Protocol: "tcp", DestPorts: snapshot.PortRange{Min: 99, Max: 99}},
				{AddrRange: addrRange("10.72.0.3", "10.72.0.4"), Protocol: "udp", DestPorts: snapshot.PortRange{Min: 53, Max: 54}, Dest: netip.MustParseAddr("10.1.1.1")},
			}
			if pre.Priority != -100 || !reflect.DeepEqual(pre.NATRules, map[string]int{"dnat": 2}) || !slices.Equal(pre.DNATTo, wantTargets) {
				t.Errorf("PREROUTING %+v", pre)
			}
		})
	}
}

// IPv6 has tables and programs of its own.
func TestLiveIP6Tables(t *testing.T) {
	for _, backend := range []string{"ip6tables-legacy", "ip6tables-nft"} {
		t.Run(backend, func(t *testing.T) {
			h := newNetns(t)
			ktest.Tool(t, backend)
			for _, args := range []string{
				"-P FORWARD DROP",
				"-A FORWARD -s 2001:db8::/32 -m comment --comment hello -j DROP",
				"-A FORWARD -j DROP",
				"-t nat -A POSTROUTING -p tcp -j SNAT --to-source 2001:db8::1-2001:db8::9",
				"-t nat -A PREROUTING -p tcp --dport 99 -j DNAT --to-destination [2001:db8::2]:80",
				"-t nat -A PREROUTING -p udp --dport 53:54 -d 2001:db8:1::1 -j DNAT --to-destination 2001:db8::3",
			} {
				output(t, h, "", backend, append([]string{"-w"}, strings.Fields(args)...)...)
			}
			s := takeWhile(t, Options{Netns: h}, func() {})
			chains := map[string]snapshot.Chain{}
			for _, c := range s.Chains {
				if c.Family == "ip6" {
					chains[c.Table+" "+c.Name] = c
				}
			}
			zero := new(uint64(0))
			wantDrops := []snapshot.DropRule{{Number: 1, Verdict: "drop", Packets: zero}, {Number: 2, Verdict: "drop", All: true, Packets: zero}}
			if f := chains["filter FORWARD"]; f.Hook != "forward" || f.Policy != "drop" || !reflect.DeepEqual(f.DropRules, wantDrops) {
				t.Errorf("FORWARD %+v", f)
			}
			if want := []snapshot.AddrRange{addrRange("2001:db8::1", "2001:db8::9")}; !slices.Equal(chains["nat POSTROUTING"].SNATTo, want) {
				t.Errorf("POSTROUTING %+v", chains["nat POSTROUTING"])
			}
			wantTargets := []snapshot.Target{
				{AddrRange: addrRange("2001:db8::2", "2001:db8::2"), Ports: snapshot.PortRange{Min: 80, Max: 80}, Protocol: "tcp", DestPorts: snapshot.PortRange{Min: 99, Max: 99}},
				{AddrRange: addrRange("2001:db8::3", "2001:db8::3"), Protocol: "udp", DestPorts: snapshot.PortRange{Min: 53, Max: 54}, Dest: netip.MustParseAddr("2001:db8:1::1")},
			}
			if !slices.Equal(chains["nat PREROUTING"].DNATTo, wantTargets) {
				t.Errorf("PREROUTING %+v", chains["nat PREROUTING"])
			}
		})
	}
}

func addrRange(first, last string) snapshot.AddrRange {
	return snapshot.AddrRange{First: netip.MustParseAddr(first), Last: netip.MustParseAddr(last)}
}

// To look must not make the kernel load a table, or conntrack.
func TestLiveLooksWithoutTraces(t *testing.T) {
	h := newNetns(t)
	read := func() string {
		var out string
		in(t, h, func() error {
			names, err := newView("").readNet("ip_tables_names")
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			out = names
			return nil
		})
		return out
	}
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	takeWhile(t, Options{Netns: h, Dump: true}, func() {}) // what is opened once and kept
	before := descriptors()
	takeWhile(t, Options{Netns: h, Dump: true}, func() {})
	if got := read(); got != "" {
		t.Errorf("tables of iptables in an empty namespace: %q", got)
	}
	runtime.GC() // closes what was forgotten, so that it does not count against others
	if after := descriptors(); after > before {
		t.Errorf("%d file descriptors, %d before", after, before)
	}
	if out := output(t, h, "", "nft", "list", "ruleset"); out != "" {
		t.Errorf("rules in an empty namespace: %s", out)
	}
}

func TestLiveListenersAreThoseOfSS(t *testing.T) {
	h := newNetns(t)
	var full, idle net.Listener
	in(t, h, func() (err error) {
		if full, err = listen("127.0.0.1:0", 2); err != nil {
			return err
		}
		idle, err = listen("[::]:0", 100)
		return err
	})
	defer full.Close()
	defer idle.Close()
	var connections []net.Conn
	defer func() {
		for _, c := range connections {
			c.Close()
		}
	}()
	s := takeWhile(t, Options{Netns: h}, func() {
		in(t, h, func() error {
			for range 6 { // 3 fit in
				d := net.Dialer{Timeout: 300 * time.Millisecond}
				if c, err := d.Dial("tcp", full.Addr().String()); err == nil {
					connections = append(connections, c)
				}
			}
			return nil
		})
	})
	got := map[string][2]uint32{}
	for _, l := range s.Listeners {
		got[l.Addr.String()] = [2]uint32{l.Queue, l.Backlog}
		if want := comm(t); l.Process != want || l.Inode == 0 {
			t.Errorf("%+v, want process %q", l, want)
		}
	}
	want := map[string][2]uint32{}
	for line := range strings.Lines(output(t, h, "", "ss", "-Hltn")) {
		f := strings.Fields(line)
		queue, _ := strconv.Atoi(f[1])
		backlog, _ := strconv.Atoi(f[2])
		want[strings.Replace(f[3], "*:", "[::]:", 1)] = [2]uint32{uint32(queue), uint32(backlog)}
	}
	if !reflect.DeepEqual(got, want) || len(got) != 2 {
		t.Errorf("listeners %v, ss says %v", got, want)
	}
	first := s.Listeners[0]
	if first.Addr.String() != full.Addr().String() || first.Queue != 3 || first.Drops == 0 {
		t.Errorf("the full one is not first, or refused nothing: %+v", s.Listeners)
	}
	if overflows := s.Counters["TcpExt.ListenOverflows"]; first.Drops != overflows {
		t.Errorf("it refused %d, the namespace counted %d", first.Drops, overflows)
	}
	if s.Listeners[1].Drops != 0 {
		t.Errorf("the idle one refused %d", s.Listeners[1].Drops)
	}
}

// listen is net.Listen with a backlog.
func listen(addr string, backlog int) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		return nil, err
	}
	var errListen error
	err = raw.Control(func(fd uintptr) { errListen = unix.Listen(int(fd), backlog) })
	return l, errors.Join(err, errListen)
}

func comm(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// A program's words in the kernel's log are not the kernel's.
func TestLiveKernelLogIgnoresPrograms(t *testing.T) {
	ktest.Root(t)
	log, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	if err != nil {
		ktest.Missing(t, "needs /dev/kmsg: %v", err)
	}
	defer log.Close()
	s := takeWhile(t, Options{}, func() {
		if _, err := log.WriteString("<12>nf_conntrack: table full, dropping packet (not true: a test of natkit)"); err != nil {
			t.Fatal(err)
		}
	})
	if s.KernelLog == nil || slices.ContainsFunc(s.KernelLog.Lines, func(l string) bool { return strings.Contains(l, "test of natkit") }) {
		t.Errorf("kernel log %+v", s.KernelLog)
	}
}

// By syslog(2) the log reads as by /dev/kmsg.
func TestLiveSyslog(t *testing.T) {
	ktest.Root(t)
	device, call := &kmsg{}, &kmsg{fd: -1}
	if err := device.open(); err != nil || device.fd < 0 {
		ktest.Missing(t, "needs /dev/kmsg: %v", err)
	}
	defer device.close()
	want, err := device.read()
	if err != nil {
		t.Fatal(err)
	}
	got, err := call.read()
	if err != nil {
		ktest.Missing(t, "needs syslog(2): %v", err)
	}
	// A record of several lines is one to /dev/kmsg, which writes its line feeds as \x0a.
	last := func(records []string) []string {
		lines := strings.Split(strings.ReplaceAll(strings.Join(records, "\n"), `\x0a`, "\n"), "\n")
		return lines[max(0, len(lines)-20):]
	}
	if len(got) == 0 || len(want) == 0 || !slices.Equal(last(got), last(want)) {
		t.Errorf("by syslog(2) %q\nby /dev/kmsg %q", last(got), last(want))
	}
	if again, err := call.read(); err != nil || len(again) > len(got)/2 && len(got) > 4 {
		t.Errorf("the second read gave %d lines of %d again, %v", len(again), len(got), err)
	}
}

// asThread runs fn on a thread of its own whose rights change gave away; the
// thread ends with it.
func asThread(t *testing.T, change func() error, fn func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock
		err := change()
		if err == nil {
			fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A user without rights gets what the files that everybody may read tell.
func TestLiveWithoutRoot(t *testing.T) {
	ktest.Root(t)
	var s *snapshot.Snapshot
	var err error
	asThread(t, func() error {
		for _, call := range []struct{ nr, a, b, c uintptr }{
			{unix.SYS_SETGROUPS, 0, 0, 0},
			{unix.SYS_SETRESGID, 65534, 65534, 65534},
			{unix.SYS_SETRESUID, 65534, 65534, 65534},
		} {
			if _, _, errno := unix.RawSyscall(call.nr, call.a, call.b, call.c); errno != 0 {
				return errno
			}
		}
		return nil
	}, func() {
		s, err = Take(t.Context(), Options{Window: 10 * time.Millisecond, Dump: true})
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{snapshot.CanDrops, snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanConntrackMemory} {
		i := slices.IndexFunc(s.Capabilities, func(c snapshot.Capability) bool { return c.Name == name })
		if i < 0 || s.Capabilities[i].OK || s.Capabilities[i].Costs == "" {
			t.Errorf("%s: %+v", name, s.Capabilities)
			continue
		}
		if reason := s.Capabilities[i].Reason; !regexp.MustCompile(`root|CAP_|not loaded`).MatchString(reason) {
			t.Errorf("%s: reason %q does not say what it needs", name, reason)
		}
	}
	if s.Counters == nil || s.Sysctls["net.ipv4.ip_forward"] == "" || s.Interfaces == nil || s.Listeners == nil || s.CPUs == nil || s.Host.Kernel == "" {
		t.Errorf("what everybody may see is missing: %+v", s)
	}
	if _, errStat := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max"); errStat == nil && s.Conntrack == nil {
		t.Error("the table's limits are missing")
	}
}

// Root without the right to use BPF, as in a container: all but the tracer.
func TestLiveWithoutBPF(t *testing.T) {
	h := newNetns(t)
	var s *snapshot.Snapshot
	var err error
	in(t, h, func() error { // entered while it is allowed
		asThread(t, func() error {
			if err := unix.Setns(h.Fd(), unix.CLONE_NEWNET); err != nil {
				return err
			}
			head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			if err := unix.Capget(&head, &data[0]); err != nil {
				return err
			}
			for _, c := range []uint{unix.CAP_SYS_ADMIN, unix.CAP_BPF, unix.CAP_PERFMON} {
				data[c/32].Effective &^= 1 << (c % 32)
				data[c/32].Permitted &^= 1 << (c % 32)
			}
			return unix.Capset(&head, &data[0])
		}, func() { s, err = Take(t.Context(), Options{Netns: h, Window: 10 * time.Millisecond, Dump: true}) })
		return err
	})
	if got := names(s, false); !slices.Contains(got, snapshot.CanDrops) || slices.Contains(got, snapshot.CanNFTables) || slices.Contains(got, snapshot.CanConntrackDump) {
		t.Errorf("could not see %v: %+v", got, s.Capabilities)
	}
	if s.Conntrack == nil || s.Sysctls == nil || s.Counters == nil {
		t.Errorf("%+v", s)
	}
}

func TestTakeRefusesClosedNamespace(t *testing.T) {
	h := newNetns(t)
	gone, err := netns.Open(h.Name())
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	if s, err := Take(t.Context(), Options{Netns: gone}); err == nil {
		t.Errorf("took %+v of a closed namespace", s)
	}
}

// A connection to a translated port behind which nobody listens is seen, though the table has
// forgotten it; one that is accepted, and one that nobody translates, are told apart.
func TestLiveRefused(t *testing.T) {
	h := newNetns(t)
	output(t, h, `table ip nat {
		chain output { type nat hook output priority -100; tcp dport 8080 dnat to 127.0.0.1:81; tcp dport 8081 dnat to 127.0.0.1:82; }
	}`, "nft", "-f", "-")
	in(t, h, func() error {
		l, err := net.Listen("tcp", "127.0.0.1:82")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
		return nil
	})
	const n = 25
	s := takeWhile(t, Options{Netns: h, Dump: true}, func() {
		in(t, h, func() error {
			for range n {
				for port, accepted := range map[int]bool{8080: false, 8081: true, 83: false} {
					c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
					if accepted != (err == nil) {
						return fmt.Errorf("port %d: %v", port, err)
					}
					if err != nil {
						continue
					}
					if _, err := c.Read(make([]byte, 1)); err != io.EOF { // both have closed it
						return fmt.Errorf("port %d: read %v", port, err)
					}
					c.Close()
				}
			}
			return nil
		})
	})
	got := map[string]uint64{}
	for _, r := range s.Conntrack.Refused {
		got[r.Dest.String()+" "+r.Target.String()] = r.Count
	}
	if want := map[string]uint64{"127.0.0.1:8080 127.0.0.1:81": n, "127.0.0.1:83 127.0.0.1:83": n}; !maps.Equal(got, want) {
		t.Errorf("refused %v, want %v; %+v", got, want, s.Capabilities)
	}
	want := []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(netip.MustParseAddrPort("127.0.0.1:8081")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("127.0.0.1:82")), Answered: n}}
	if !slices.Equal(s.Conntrack.Table.Targets, want) {
		t.Errorf("targets %+v, want %+v", s.Conntrack.Table.Targets, want)
	}
	if len(s.EventSockets) != 0 {
		t.Errorf("natkit tells of itself as one who listens to events: %+v", s.EventSockets)
	}
}

// What leaves for the Internet with a private source of others is seen, and told apart from
// what leaves with this machine's own, from what stays inside and from what comes back.
func TestLiveLeaving(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "address", "02:00:00:00:00:01")
	output(t, h, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth0")
	output(t, h, "", "ip", "link", "set", "veth0", "up")
	output(t, h, "", "ip", "link", "set", "veth1", "up")
	output(t, h, "", "ip", "route", "add", "default", "via", "198.51.100.2")
	output(t, h, "", "ip", "neigh", "add", "198.51.100.2", "lladdr", "02:00:00:00:00:01", "dev", "veth0")
	output(t, h, "", "ip", "link", "add", "veth2", "type", "veth", "peer", "name", "veth3")
	output(t, h, "", "ip", "link", "set", "veth2", "up")
	output(t, h, "", "ip", "route", "add", "10.7.0.0/24", "dev", "veth2")
	output(t, h, "", "ip", "addr", "add", "2001:db8::1/64", "dev", "veth0", "nodad")
	output(t, h, "", "ip", "route", "add", "default", "via", "2001:db8::2")
	output(t, h, "", "ip", "neigh", "add", "2001:db8::2", "lladdr", "02:00:00:00:00:01", "dev", "veth0")
	output(t, h, "", "ip", "route", "add", "fd00:7::/64", "dev", "veth2")
	send := func(n int, from, to string) {
		in(t, h, func() error {
			d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from)), Control: func(_, _ string, c syscall.RawConn) (err error) {
				return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1) }), err)
			}}
			c, err := d.Dial("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			for range n {
				if _, err := c.Write([]byte("x")); err != nil {
					return err
				}
			}
			return nil
		})
	}
	s := takeWhile(t, Options{Netns: h}, func() {
		send(7, "10.7.0.9:4000", "203.0.113.5:53")
		send(5, "198.51.100.1:4000", "203.0.113.5:53")
		send(3, "198.51.100.1:4000", "10.9.9.9:53")
		send(2, "10.7.0.9:4000", "172.31.0.1:53")
		send(4, "10.8.0.9:4000", "203.0.113.5:53") // whose network is out there
		send(6, "[fd00:7::9]:4000", "[2001:db8:1::5]:53")
		send(3, "[2001:db8::1]:4000", "[2001:db8:1::5]:53")
		send(2, "[2001:db8::1]:4000", "[fd00:8::5]:53")
		send(1, "[fd00:8::9]:4000", "[2001:db8:1::5]:53") // whose network is out there
	})
	want := []snapshot.Leaving{
		{Interface: "veth0", Inside: 7, Others: 9, Samples: []string{"udp 10.7.0.9:4000 -> 203.0.113.5:53"},
			Datagrams: []snapshot.Endpoint{snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.5:53"))}},
		{Interface: "veth0", Family: "ipv6", Inside: 6, Others: 4, Samples: []string{"udp [fd00:7::9]:4000 -> [2001:db8:1::5]:53"},
			Datagrams: []snapshot.Endpoint{snapshot.EndpointOf(netip.MustParseAddrPort("[2001:db8:1::5]:53"))}},
		{Interface: "veth1", Back: 3, Samples: []string{}},
		{Interface: "veth1", Family: "ipv6", Back: 2, Samples: []string{}},
	}
	if !reflect.DeepEqual(s.Leaving, want) {
		t.Errorf("%+v, want %+v; %+v", s.Leaving, want, s.Capabilities)
	}

	// Where there are too many, the tap is off the packets' way, and what it has is read, also when the
	// interface that it is bound to goes down.
	in(t, h, func() error {
		tap, err := openLeaving(false)
		if err != nil {
			return err
		}
		defer tap.close()
		send(4, "10.7.0.9:4000", "203.0.113.5:53")
		tap.mute()
		if tap.any() {
			t.Error("the kernel still keeps packets for it")
		}
		send(6, "10.7.0.9:4000", "203.0.113.5:53")
		output(t, h, "", "ip", "link", "set", "lo", "up")
		output(t, h, "", "ip", "link", "set", "lo", "down") // to which it is bound now
		rows, err := tap.readLeaving()
		if err != nil || len(rows) != 1 || rows[0].Inside != 4 {
			t.Errorf("after mute: %+v, %v", rows, err)
		}
		return nil
	})
}
