// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// up is a lab with a listener on its server, port 80.
func up(t *testing.T, topology string, rules lab.RuleSet) *lab.Lab {
	t.Helper()
	ktest.Root(t)
	l, err := lab.Up(t.Context(), topology, lab.Options{Name: ktest.Name(t), Rules: rules, Owned: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	var listener net.Listener
	if err := l.ServerNode().Do(func() (err error) {
		listener, err = net.Listen("tcp", ":80")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	return l
}

// in runs commands in a node of a lab, one a line.
func in(t *testing.T, l *lab.Lab, role, commands string) {
	t.Helper()
	for line := range strings.Lines(commands) {
		words := strings.Fields(line)
		ktest.Tool(t, words[0])
		if err := l.Node(role).Do(func() error {
			out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %s", line, out)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// traced traces what send does in a lab, until enough says that the packets suffice. Labs of other
// tests have the same addresses.
func traced(t *testing.T, l *lab.Lab, o Options, send func(), enough func([]trace.Packet) bool) []trace.Packet {
	t.Helper()
	o.Netns = l.Node("client").Handle().Inode()
	if o.Rate == 0 {
		o.Rate = 1000
	}
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, m := range r.Missing() {
		t.Logf("missing: %+v", m)
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		send()
	}()
	var packets []trace.Packet
	err = r.Watch(ctx, func(p trace.Packet) error {
		if !strings.HasPrefix(p.Steps[0].Namespace, l.Name()+"-") {
			return nil
		}
		packets = append(packets, p)
		if enough(packets) {
			stop()
		}
		return nil
	})
	<-done
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for i := range packets {
			if t.Failed() { // what a step that is missing was seen as
				t.Logf("%+v", packets[i])
			}
		}
	})
	return packets
}

// dial connects from a node, and reports nothing: what becomes of it the trace shows.
func dial(l *lab.Lab, role, address string, timeout time.Duration) {
	_ = l.Node(role).Do(func() error {
		c, err := net.DialTimeout("tcp4", address, timeout)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func flowOf(t *testing.T, text string) trace.Flow {
	t.Helper()
	f, err := trace.ParseFlow(text)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// replied: a packet of each direction is there.
func replied(packets []trace.Packet) bool {
	return slices.ContainsFunc(packets, func(p trace.Packet) bool { return p.Reply && p.Kind != "SYN,ACK" })
}

func dropped(packets []trace.Packet) bool {
	return slices.ContainsFunc(packets, func(p trace.Packet) bool { return p.End.Outcome == trace.Died })
}

// first is the first packet of a kind and direction.
func first(t *testing.T, packets []trace.Packet, kind string, reply bool) trace.Packet {
	t.Helper()
	i := slices.IndexFunc(packets, func(p trace.Packet) bool { return p.Kind == kind && p.Reply == reply })
	if i < 0 {
		t.Fatalf("no packet %s, reply %v, among %d: %+v", kind, reply, len(packets), packets)
	}
	return packets[i]
}

// step is the first step of a packet that does this in a hook.
func step(p trace.Packet, what trace.What, hook string) *trace.Step {
	i := slices.IndexFunc(p.Steps, func(s trace.Step) bool { return s.What == what && s.Hook == hook })
	if i < 0 {
		return nil
	}
	return &p.Steps[i]
}

// Whoever reads packets may take long, and natkit may not get the CPU: what has come until then belongs together all the same.
func TestSlowReader(t *testing.T) {
	l := up(t, "routed", lab.RulesNft)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 80).String()
	syns := 0
	packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> "+to)}, func() { dial(l, "client", to, time.Second) }, func(packets []trace.Packet) bool {
		if len(packets) == 1 {
			dial(l, "client", to, time.Second)
			time.Sleep(time.Second) // longer than until a packet is complete
		}
		if packets[len(packets)-1].Kind == "SYN" {
			syns++
		}
		return syns == 2
	})
	for _, p := range packets {
		if p.Kind == "SYN" && step(p, trace.Translated, "postrouting") == nil {
			t.Errorf("not translated: %+v", p.Steps)
		}
	}
}

// A connection to a published port, and one that is masqueraded: every translation where it
// happens, whoever has the rules.
func TestTranslations(t *testing.T) {
	for _, rules := range []lab.RuleSet{lab.RulesNft, lab.RulesIPTables, lab.RulesIPTablesLegacy} {
		t.Run("published/"+string(rules), func(t *testing.T) {
			l := up(t, "published", rules)
			packets := traced(t, l, Options{Flow: flowOf(t, "tcp 192.168.0.2 -> 192.168.0.96:8080")},
				func() { dial(l, "client", "192.168.0.96:8080", time.Second) }, replied)
			syn := first(t, packets, "SYN", false)
			if s := step(syn, trace.Translated, "prerouting"); s == nil || !strings.HasSuffix(s.After, "172.17.0.2:80") || !strings.HasSuffix(s.Before, "192.168.0.96:8080") {
				t.Errorf("no destination translation in prerouting: %+v", syn.Steps)
			} else if s.Rule == nil || !strings.Contains(s.Rule.Chain, "DOCKER") || s.Rule.Derived != (rules == lab.RulesIPTablesLegacy) {
				t.Errorf("translated by %+v", s.Rule)
			}
			if step(syn, trace.NewEntry, "prerouting") == nil {
				t.Errorf("no new entry: %+v", syn.Steps)
			}
			if syn.End.Outcome != trace.Arrived || syn.End.Namespace != l.Name()+"-container" {
				t.Errorf("the SYN ended as %+v", syn.End)
			}
			synack := first(t, packets, "SYN,ACK", true)
			if s := step(synack, trace.Translated, "postrouting"); s == nil || !strings.HasPrefix(s.After, "192.168.0.96:8080") {
				t.Errorf("the reply is not translated back: %+v", synack.Steps)
			}
			if synack.End.Namespace != l.Name()+"-client" || synack.Connection != syn.Connection {
				t.Errorf("the reply is of connection %d, and ended as %+v", synack.Connection, synack.End)
			}
		})
		t.Run("routed/"+string(rules), func(t *testing.T) {
			l := up(t, "routed", rules)
			a := l.Options().Addresses
			to := netip.AddrPortFrom(a.Server, 80).String()
			packets := traced(t, l, Options{Flow: flowOf(t, "tcp "+a.Client.Addr().String()+" -> "+to)},
				func() { dial(l, "client", to, time.Second) }, replied)
			syn := first(t, packets, "SYN", false)
			if s := step(syn, trace.Translated, "postrouting"); s == nil || !strings.HasPrefix(s.After, a.Far.Addr().String()+":") {
				t.Errorf("no source translation in postrouting: %+v", syn.Steps)
			} else if s.Rule == nil || !strings.Contains(strings.ToUpper(s.Rule.Chain), "POSTROUTING") || s.Rule.Derived != (rules == lab.RulesIPTablesLegacy) {
				t.Errorf("translated by %+v", s.Rule)
			}
			synack := first(t, packets, "SYN,ACK", true)
			if s := step(synack, trace.Translated, "prerouting"); s == nil || !strings.Contains(s.After, "-> "+a.Client.Addr().String()+":") {
				t.Errorf("the reply is not translated back: %+v", synack.Steps)
			}
		})
	}
}

// A trace that waits attaches nothing until a new connection matches. Of its first packet it has the
// rules and the translation, of the next ones everything; then it waits again.
func TestWait(t *testing.T) {
	was := idle
	idle = 1_000_000_000
	t.Cleanup(func() { idle = was })
	l := up(t, "routed", lab.RulesNft)
	a := l.Options().Addresses
	in(t, l, "gateway", `nft add table ip fw
nft add chain ip fw forward { type filter hook forward priority 10 ; }
nft add rule ip fw forward tcp dport 81 drop`)
	to := netip.AddrPortFrom(a.Server, 80).String()
	// Other labs of this machine have the same addresses.
	r, err := Open(Options{Flow: flowOf(t, "tcp "+a.Client.Addr().String()+" -> any"), Netns: l.NATNode().Handle().Inode(), Rate: 1000, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	if !r.Waiting() {
		t.Fatal("it does not wait")
	}
	for round := range 2 { // it waits again after the first
		ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
		defer stop()
		var refused, packets []trace.Packet
		var whole atomic.Bool // a connection was seen from its first packet on
		send := make(chan struct{})
		go func() {
			defer close(send)
			dial(l, "client", netip.AddrPortFrom(a.Server, 81).String(), 300*time.Millisecond)
			pace := time.NewTicker(100 * time.Millisecond) // more connections than natkit follows on a busy machine show nothing
			defer pace.Stop()
			for ctx.Err() == nil && !whole.Load() {
				dial(l, "client", to, time.Second)
				<-pace.C
			}
		}()
		watched := make(chan error)
		go func() {
			watched <- r.Watch(ctx, func(p trace.Packet) error {
				if strings.HasSuffix(p.Tuple, ":81") {
					refused = append(refused, p)
				} else {
					packets = append(packets, p)
				}
				whole.Store(replied(packets))
				return nil
			})
		}()
		<-send
		ktest.Wait(t, 20*time.Second, "it waits again", r.Waiting)
		stop()
		if err := <-watched; err != nil {
			t.Fatal(err)
		}
		if len(refused) == 0 || !replied(packets) {
			t.Fatalf("round %d: %d and %d packets", round, len(refused), len(packets))
		}
		if refused[0].Length != 60 {
			t.Errorf("round %d: a SYN of %d bytes", round, refused[0].Length)
		}
		end := refused[0].End
		if end.Outcome != trace.Died || end.Rule == nil || end.Rule.Text != "tcp dport 81 drop" || end.Rule.Derived {
			t.Errorf("round %d: the first packet ended as %+v", round, end)
		}
	}
}

// kubeProxyIPTables and kubeProxyNFT are rules as kube-proxy writes them in its two modes, for a service 10.96.0.10 with the
// endpoint SERVER and a service 10.96.0.11 with none.
const kubeProxyIPTables = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
:KUBE-SEP-JK3ZTJIVAXQTXBLL - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "shop/cart cluster IP" -m tcp --dport 80 -j KUBE-SVC-ERIFXISQEP7F7OF4
-A KUBE-SVC-ERIFXISQEP7F7OF4 -m comment --comment "shop/cart cluster IP" -j KUBE-MARK-MASQ
-A KUBE-SVC-ERIFXISQEP7F7OF4 -m comment --comment "shop/cart -> SERVER:80" -m statistic --mode random --probability 1.0 -j KUBE-SEP-JK3ZTJIVAXQTXBLL
-A KUBE-SEP-JK3ZTJIVAXQTXBLL -p tcp -m comment --comment "shop/cart" -m tcp -j DNAT --to-destination SERVER:80
COMMIT
*filter
:KUBE-SERVICES - [0:0]
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m comment --comment "shop/empty has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
`

const kubeProxyNFT = `table ip kube-proxy {
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; elements = { 10.96.0.10 . tcp . 80 : goto service-shop/cart } ; }
	map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict ; elements = { 10.96.0.11 . tcp . 80 : goto reject-chain } ; }
	chain filter-forward { type filter hook forward priority -110; ct state new jump service-endpoints-check; }
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain reject-chain { reject; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
	chain masquerading { mark & 0x4000 == 0 return; mark set mark ^ 0x4000; masquerade fully-random; }
	chain mark-for-masquerade { mark set mark | 0x4000; }
	chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
	chain service-shop/cart { jump mark-for-masquerade; numgen random mod 1 vmap { 0 : goto endpoint-shop/cart }; }
	chain endpoint-shop/cart { meta l4proto tcp dnat to SERVER:80; }
}
`

// Rules as kube-proxy writes them: the rule of the endpoint translates the service's address, that of postrouting the source,
// and the rule of a service without endpoints refuses the packet.
func TestKubeProxy(t *testing.T) {
	for _, tt := range []struct {
		name                         string
		load, rules                  string
		endpoint, masquerade, refuse string // in the names of the rules
	}{
		{"iptables", "iptables-nft-restore --noflush", kubeProxyIPTables, "ip nat KUBE-SEP-JK3ZTJIVAXQTXBLL handle ", "ip nat KUBE-POSTROUTING handle ", "ip filter KUBE-SERVICES handle "},
		{"legacy", "iptables-legacy-restore --noflush", kubeProxyIPTables, "iptables-legacy nat KUBE-SEP-JK3ZTJIVAXQTXBLL rule 1", "iptables-legacy nat KUBE-POSTROUTING rule 3", "iptables-legacy filter KUBE-SERVICES rule 1"},
		{"nft", "nft -f", kubeProxyNFT, "ip kube-proxy endpoint-shop/cart handle ", "ip kube-proxy masquerading handle ", "ip kube-proxy reject-chain handle "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := up(t, "routed", lab.RulesNone)
			a := l.Options().Addresses
			file := filepath.Join(t.TempDir(), "rules")
			if err := os.WriteFile(file, []byte(strings.ReplaceAll(tt.rules, "SERVER", a.Server.String())), 0o600); err != nil {
				t.Fatal(err)
			}
			in(t, l, "gateway", "ip route add 10.96.0.0/24 via "+a.Server.String()+"\n"+tt.load+" "+file)
			packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> 10.96.0.10:80")}, func() { dial(l, "client", "10.96.0.10:80", time.Second) }, replied)
			syn := first(t, packets, "SYN", false)
			for _, want := range []struct{ hook, rule, after string }{{"prerouting", tt.endpoint, "-> " + a.Server.String() + ":80"}, {"postrouting", tt.masquerade, a.Far.Addr().String() + ":"}} {
				s := step(syn, trace.Translated, want.hook)
				if s == nil || !strings.Contains(s.After, want.after) || s.Rule == nil || !strings.Contains(s.Rule.String(), want.rule) {
					t.Errorf("in %s: %+v, want a translation to %s by %s", want.hook, s, want.after, want.rule)
				}
			}
			packets = traced(t, l, Options{Flow: flowOf(t, "tcp any -> 10.96.0.11:80")}, func() { dial(l, "client", "10.96.0.11:80", time.Second) }, dropped)
			end := first(t, packets, "SYN", false).End
			if end.Cause != snapshot.CauseRule || end.Rule == nil || !strings.Contains(end.Rule.String(), tt.refuse) {
				t.Errorf("without endpoints: %+v, want a drop by %s", end, tt.refuse)
			}
		})
	}
}

// A packet that a rule drops: the rule that did, by what the kernel reports or, of iptables-legacy,
// by following the saved rules.
func TestDropRules(t *testing.T) {
	for _, tt := range []struct {
		name           string
		rules          lab.RuleSet
		role, commands string
		want           string // in the rule's name
		derived        bool
	}{
		{"nft/forward", lab.RulesNft, "gateway", `nft add table inet fw
nft add chain inet fw forward { type filter hook forward priority 10 ; }
nft add chain inet fw bad
nft add rule inet fw forward tcp dport 443 accept
nft add rule inet fw forward jump bad
nft add rule inet fw bad tcp dport 80 drop`, "inet fw bad handle ", false},
		{"nft/policy", lab.RulesNft, "gateway", `nft add table inet fw
nft add chain inet fw forward { type filter hook forward priority 10 ; policy drop ; }
nft add rule inet fw forward tcp dport 443 accept`, "inet fw forward policy drop", false},
		{"nft/raw", lab.RulesNft, "gateway", `nft add table ip fw
nft add chain ip fw early { type filter hook prerouting priority -300 ; }
nft add rule ip fw early tcp dport 80 drop`, "ip fw early handle ", false},
		{"nft/output", lab.RulesNone, "client", `nft add table ip fw
nft add chain ip fw out { type filter hook output priority 0 ; }
nft add rule ip fw out tcp dport 80 drop`, "ip fw out handle ", false},
		{"nft/set", lab.RulesNft, "gateway", `nft add table ip fw
nft add set ip fw bad { type ipv4_addr ; elements = { 10.0.0.66, CLIENT } ; }
nft add chain ip fw forward { type filter hook forward priority 10 ; }
nft add rule ip fw forward ip saddr @bad drop`, "ip fw forward handle ", false},
		{"iptables/forward", lab.RulesIPTables, "gateway", `iptables-nft -N bad
iptables-nft -I FORWARD -j bad
iptables-nft -A bad -p tcp --dport 80 -j DROP`, "ip filter bad handle ", false},
		{"iptables/mangle", lab.RulesIPTables, "gateway", `iptables-nft -t mangle -A POSTROUTING -p tcp --dport 80 -j DROP`, "ip mangle POSTROUTING handle ", false},
		{"legacy/forward", lab.RulesIPTablesLegacy, "gateway", `iptables-legacy -N bad
iptables-legacy -I FORWARD -p tcp --dport 443 -j DROP
iptables-legacy -A FORWARD -j bad
iptables-legacy -A bad -p tcp --dport 80 -j DROP`, "iptables-legacy filter bad rule 1", true},
		{"legacy/policy", lab.RulesIPTablesLegacy, "gateway", `iptables-legacy -P FORWARD DROP`, "iptables-legacy filter FORWARD policy drop", true},
		{"legacy/raw", lab.RulesIPTablesLegacy, "gateway", `iptables-legacy -t raw -A PREROUTING -p tcp --dport 80 -j DROP`, "iptables-legacy raw PREROUTING rule 1", true},
		{"legacy/mangle", lab.RulesIPTablesLegacy, "gateway", `iptables-legacy -t mangle -A POSTROUTING -p tcp --dport 80 -j DROP`, "iptables-legacy mangle POSTROUTING rule 1", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := up(t, "routed", tt.rules)
			a := l.Options().Addresses
			in(t, l, tt.role, strings.ReplaceAll(tt.commands, "CLIENT", a.Client.Addr().String()))
			to := netip.AddrPortFrom(a.Server, 80).String()
			packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> "+to)},
				func() { dial(l, "client", to, 300*time.Millisecond) }, dropped)
			end := first(t, packets, "SYN", false).End
			if end.Outcome != trace.Died || end.Cause != snapshot.CauseRule || end.Namespace != l.Name()+"-"+tt.role {
				t.Fatalf("got %+v, want a drop by a rule in %s", end, tt.role)
			}
			if end.Rule == nil || !strings.HasPrefix(end.Rule.String(), tt.want) || end.Rule.Derived != tt.derived {
				t.Errorf("got rule %+v, %q, want %s, derived: %v", end.Rule, end.Why, tt.want, tt.derived)
			}
		})
	}
}

// What the kernel drops for reasons of its own.
func TestDrops(t *testing.T) {
	for _, tt := range []struct {
		name, role, commands string
		want                 snapshot.NATCause
	}{
		{"ip-forward-off", "gateway", "sysctl -qw net.ipv4.ip_forward=0", snapshot.CauseIPForwardOff},
		{"no-route", "gateway", "ip route replace unreachable 203.0.113.0/24", snapshot.CauseNoRoute},
		{"ttl", "client", "sysctl -qw net.ipv4.ip_default_ttl=1", snapshot.CauseTTL},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := up(t, "routed", lab.RulesNft)
			in(t, l, tt.role, tt.commands)
			to := netip.AddrPortFrom(l.Options().Addresses.Server, 80).String()
			if tt.want == snapshot.CauseNoRoute {
				to = "203.0.113.9:80"
			}
			packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> "+to)},
				func() { dial(l, "client", to, 300*time.Millisecond) }, dropped)
			end := first(t, packets, "SYN", false).End
			if end.Outcome != trace.Died || end.Cause != tt.want || end.Namespace != l.Name()+"-gateway" || end.Why == "" {
				t.Errorf("got %+v, want a drop by %s in the gateway", end, tt.want)
			}
		})
	}
}

// What connection tracking and routing refuse, told apart from rules by the place on the path.
func TestNATDrops(t *testing.T) {
	for _, tt := range []struct {
		name, commands string
		fill           bool // the table, so that nothing more gets in
		want           snapshot.NATCause
	}{
		{"conntrack-table-full", "true", true, snapshot.CauseTableFull},
		{"snat-ports-exhausted", `nft flush ruleset
nft add table ip nat
nft add chain ip nat post { type nat hook postrouting priority 100 ; }
nft add rule ip nat post oifname eth0 udp dport 5353 masquerade to :5000-5001`, false, snapshot.CauseConfirm},
		{"mtu", "ip link set eth0 mtu 600", false, snapshot.CauseTooBig},
		{"queue-full", "tc qdisc add dev eth0 root tbf rate 8bit burst 1000 limit 1000", false, snapshot.CauseQueue},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := up(t, "routed", lab.RulesNft)
			a := l.Options().Addresses
			if tt.fill {
				if _, err := l.NATNode().FillConntrack(t.Context(), 0, nil); err != nil {
					t.Fatal(err)
				}
			}
			in(t, l, "gateway", tt.commands)
			to := netip.AddrPortFrom(a.Server, 5353)
			there := func(p trace.Packet) bool { // the server's port is closed, and drops what arrives
				return p.End.Outcome == trace.Died && p.End.Namespace == l.Name()+"-gateway"
			}
			packets := traced(t, l, Options{Flow: flowOf(t, "udp any -> "+to.String())}, func() {
				_ = l.Node("client").Do(func() error {
					for range 8 {
						c, err := net.Dial("udp4", to.String())
						if err != nil {
							return err
						}
						_, _ = c.Write(make([]byte, 900)) // what becomes of it the trace shows
						c.Close()
					}
					return nil
				})
			}, func(packets []trace.Packet) bool { return slices.ContainsFunc(packets, there) })
			i := slices.IndexFunc(packets, there)
			if i < 0 {
				t.Fatalf("none of %d packets was dropped in the gateway", len(packets))
			}
			if end := packets[i].End; end.Cause != tt.want || end.Why == "" {
				t.Errorf("got %+v, want a drop by %s in the gateway", end, tt.want)
			}
		})
	}
}

// waited runs a trace that waits beside what send does, until enough says that the packets suffice.
func waited(t *testing.T, o Options, send func(), enough func([]trace.Packet) bool) (packets []trace.Packet) {
	t.Helper()
	o.Rate, o.Wait = 1000, true
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	if !r.Waiting() {
		t.Fatal("it does not wait")
	}
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			send()
		}
	}()
	err = r.Watch(ctx, func(p trace.Packet) error {
		if packets = append(packets, p); enough(packets) {
			stop()
		}
		return nil
	})
	<-done
	if err != nil {
		t.Fatal(err)
	}
	if !enough(packets) {
		t.Fatalf("of %d packets none is as wanted: %+v", len(packets), packets)
	}
	return packets
}

// A trace that waits notices what no NAT is asked about: a packet that is dropped before, a new connection where
// connections are tracked and not translated, and one through a namespace that was made, and got its rules, after it began.
func TestWaitNotices(t *testing.T) {
	t.Run("drop", func(t *testing.T) {
		l := up(t, "routed", lab.RulesNft)
		in(t, l, "gateway", "nft add table ip fw\nnft add chain ip fw early { type filter hook prerouting priority -300 ; }\nnft add rule ip fw early udp dport 7 drop")
		to := netip.AddrPortFrom(l.Options().Addresses.Server, 7).String()
		packets := waited(t, Options{Flow: flowOf(t, "udp any -> "+to), Netns: l.NATNode().Handle().Inode()}, func() { datagram(l, to) }, dropped)
		if end := packets[0].End; end.Outcome != trace.Died || end.Namespace != l.Name()+"-gateway" {
			t.Errorf("the first packet ended as %+v", end)
		}
	})
	t.Run("without NAT", func(t *testing.T) {
		l := up(t, "routed", lab.RulesNone)
		in(t, l, "gateway", "nft add table ip fw\nnft add chain ip fw forward { type filter hook forward priority 0 ; }\nnft add rule ip fw forward ct state established,related accept")
		to := netip.AddrPortFrom(l.Options().Addresses.Server, 80).String()
		waited(t, Options{Flow: flowOf(t, "tcp any -> "+to), Netns: l.NATNode().Handle().Inode()}, func() { dial(l, "client", to, time.Second) }, replied)
	})
	t.Run("IPv6 beside NAT of IPv4", func(t *testing.T) {
		l := up(t, "routed", lab.RulesNft)
		withIPv6(t, l)
		const to = "[fd00:2::2]:9"
		o := Options{Flow: flowOf(t, "udp any -> "+to), Netns: l.NATNode().Handle().Inode()}
		untracked := o
		untracked.Rate, untracked.Wait = 1, true
		r, err := Open(untracked)
		if err != nil {
			t.Fatal(err)
		}
		if r.Waiting() {
			t.Error("it waits where no connection of IPv6 is tracked")
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		in(t, l, "gateway", "nft add table ip6 fw\nnft add chain ip6 fw forward { type filter hook forward priority 0 ; }\nnft add rule ip6 fw forward ct state established,related accept")
		waited(t, o, func() { datagram(l, to) }, func(packets []trace.Packet) bool { return len(packets) > 0 })
	})
	t.Run("not what others mark", func(t *testing.T) {
		l := up(t, "routed", lab.RulesNft)
		in(t, l, "gateway", "nft add table ip other\nnft add chain ip other early { type filter hook prerouting priority -300 ; }\nnft add rule ip other early udp dport 7 meta nftrace set 1")
		server := l.Options().Addresses.Server
		to, others := netip.AddrPortFrom(server, 9).String(), netip.AddrPortFrom(server, 7).String()
		packets := waited(t, Options{Flow: flowOf(t, "udp any -> "+to), Netns: l.NATNode().Handle().Inode()}, func() { datagram(l, others); datagram(l, to) },
			func(packets []trace.Packet) bool {
				return slices.ContainsFunc(packets, func(p trace.Packet) bool { return strings.HasSuffix(p.Tuple, to) })
			})
		for _, p := range packets {
			if strings.HasSuffix(p.Tuple, others) {
				t.Errorf("a packet of another flow is shown: %s", p.Tuple)
			}
		}
	})
	t.Run("made later", func(t *testing.T) {
		up(t, "routed", lab.RulesNft) // there must be something to wait in
		const to = "203.0.113.77:9"
		var later *lab.Lab
		waited(t, Options{Flow: flowOf(t, "udp 192.168.0.2 -> "+to)}, func() {
			if later == nil {
				later = up(t, "routed", lab.RulesNft)
			}
			datagram(later, to)
		}, func(packets []trace.Packet) bool {
			return slices.ContainsFunc(packets, func(p trace.Packet) bool {
				return slices.ContainsFunc(p.Steps, func(s trace.Step) bool { return s.Namespace == later.Name()+"-gateway" && s.What == trace.RuleMet })
			})
		})
	})
}

// A connection that is in a table already is followed at once, also if the flow is what it is behind the translation.
func TestConnected(t *testing.T) {
	l := up(t, "published", lab.RulesNft)
	dial(l, "client", "192.168.0.96:8080", time.Second)
	for _, flow := range []string{"tcp any -> 192.168.0.96:8080", "tcp any -> 172.17.0.2:80"} {
		r, err := Open(Options{Flow: flowOf(t, flow), Netns: l.NATNode().Handle().Inode(), Rate: 1, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		if r.Waiting() {
			t.Errorf("%s: it waits", flow)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A datagram's ports are found behind any extension headers of IPv6.
func TestExtensionHeaders(t *testing.T) {
	l := up(t, "routed", lab.RulesNone)
	withIPv6(t, l)
	const to = "[fd00:2::2]:9"
	options := func(size int) string { // a header of that size, with nothing but padding
		b := make([]byte, size)
		b[1], b[2], b[3] = byte(size/8-1), 1, byte(size-4) // PadN
		return string(b)
	}
	for _, tt := range []struct {
		name string
		sets map[int]string // options of the socket
		size int
	}{
		{"none", nil, 1},
		{"hop-by-hop", map[int]string{unix.IPV6_HOPOPTS: options(8)}, 1},
		{"destination", map[int]string{unix.IPV6_DSTOPTS: options(16)}, 1},
		{"both", map[int]string{unix.IPV6_HOPOPTS: options(8), unix.IPV6_DSTOPTS: options(16)}, 1},
		{"fragment", nil, 3000},
		{"hop-by-hop and fragment", map[int]string{unix.IPV6_HOPOPTS: options(8)}, 3000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			arrived := func(p trace.Packet) bool {
				return strings.HasSuffix(p.Tuple, " -> "+to) && slices.ContainsFunc(p.Steps, func(s trace.Step) bool { return s.Namespace == l.Name()+"-server" })
			}
			packets := traced(t, l, Options{Flow: flowOf(t, "udp fd00:1::2 -> "+to)}, func() {
				if err := l.Node("client").Do(func() error {
					c, err := net.Dial("udp6", to)
					if err != nil {
						return err
					}
					defer c.Close()
					raw, err := c.(*net.UDPConn).SyscallConn()
					if err != nil {
						return err
					}
					_ = raw.Control(func(fd uintptr) { // it can't fail: nobody closes the socket
						for option, value := range tt.sets {
							err = errors.Join(err, unix.SetsockoptString(int(fd), unix.IPPROTO_IPV6, option, value))
						}
					})
					if err == nil {
						_, err = c.Write(make([]byte, tt.size))
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			}, func(packets []trace.Packet) bool {
				return slices.ContainsFunc(packets, arrived)
			})
			if !slices.ContainsFunc(packets, arrived) {
				t.Errorf("none of %d packets is followed to the server", len(packets))
			}
		})
	}
}

// withIPv6 gives the nodes of the lab "routed" addresses of IPv6: fd00:1::2 to the client, fd00:2::2 to the server.
func withIPv6(t *testing.T, l *lab.Lab) {
	t.Helper()
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		ktest.Unsupported(t, "this kernel has no IPv6")
	}
	in(t, l, "gateway", `sysctl -qw net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.all.forwarding=1
ip addr add fd00:1::1/64 dev eth1 nodad
ip addr add fd00:2::1/64 dev eth0 nodad`)
	for role, n := range map[string]string{"client": "1", "server": "2"} {
		in(t, l, role, "sysctl -qw net.ipv6.conf.all.disable_ipv6=0\nip addr add fd00:"+n+"::2/64 dev eth0 nodad\nip -6 route add default via fd00:"+n+"::1")
	}
}

// A trace that waits for a connection by an interface notices it by the one that it comes in by and the one that it leaves by,
// and by no other.
func TestWaitInterface(t *testing.T) {
	for _, rules := range []lab.RuleSet{lab.RulesNft, lab.RulesNone} {
		l := up(t, "routed", rules)
		if rules == lab.RulesNone { // connections are tracked, and not translated
			in(t, l, "gateway", "nft add table ip fw\nnft add chain ip fw forward { type filter hook forward priority 0 ; }\nnft add rule ip fw forward ct state established,related accept")
		}
		to := netip.AddrPortFrom(l.Options().Addresses.Server, 9).String()
		for _, device := range []string{"eth1", "eth0", "lo"} {
			t.Run(string(rules)+"/"+device, func(t *testing.T) {
				o := Options{Flow: flowOf(t, "udp any -> "+to), Netns: l.NATNode().Handle().Inode()}
				if err := l.NATNode().Do(func() error {
					dev, err := net.InterfaceByName(device)
					if err == nil {
						o.Ifindex = uint32(dev.Index)
					}
					return err
				}); err != nil {
					t.Fatal(err)
				}
				if device != "lo" {
					in(t, l, "gateway", "conntrack -F")
					waited(t, o, func() { datagram(l, to) }, func(packets []trace.Packet) bool {
						return slices.ContainsFunc(packets, func(p trace.Packet) bool { return p.End.Outcome != trace.Died })
					})
					return
				}
				in(t, l, "gateway", "conntrack -F")
				o.Wait = true
				r := watching(t, o, func(p trace.Packet) { t.Errorf("seen: %+v", p.Steps) })
				for range 5 {
					datagram(l, to)
				}
				if !r.Waiting() {
					t.Error("it follows a connection by another interface")
				}
			})
		}
	}
}

// datagram sends one from a port of its own, and waits a bit.
func datagram(l *lab.Lab, to string) {
	_ = l.Node("client").Do(func() error {
		c, err := net.Dial("udp", to)
		if err == nil {
			_, _ = c.Write([]byte("x")) // what becomes of it the trace shows
			c.Close()
		}
		return err
	})
	time.Sleep(100 * time.Millisecond)
}
