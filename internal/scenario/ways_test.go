// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// way is one fault made in one way, or a machine that only looks like it.
type way struct {
	name  string
	setup string // shell, in the gateway; NFT is a file's worth for nft
	nft   string
	work  func(*testing.T, *faultRun) // traffic; nil: the client asks the server for pages
	// want is the code of the first finding of warning or above, "" for none; named is what
	// the finding must name.
	want  string
	least causes.Severity // of the findings that are looked at; 0 is warning
	named []string
	never []string // what no finding of warning or above may say
}

// forwardChain wraps rules into a base chain.
func forwardChain(policy, rules string) string {
	return "table ip f { chain fw { type filter hook forward priority 0; policy " + policy + ";\n" + rules + "\n}\n}"
}

// blocked are rules that drop all that the client sends, in the ways of the field. Each is run
// with a policy that accepts and, where it has one, with one that drops.
var blocked = []way{
	{name: "a rule with a counter", nft: forwardChain("accept", "ip saddr 192.168.0.2 counter drop"), named: []string{"ip saddr 192.168.0.2 counter drop # handle"}},
	{name: "a rule without", nft: forwardChain("accept", "ip saddr 192.168.0.2 drop"), named: []string{"ip saddr 192.168.0.2 drop # handle"}},
	{name: "a rule without, beside a policy", nft: forwardChain("drop", "ip saddr 192.168.0.2 drop\nip protocol tcp accept"), named: []string{"ip saddr 192.168.0.2 drop # handle"}},
	{name: "an anonymous set", nft: forwardChain("drop", "ip saddr { 10.0.0.1, 192.168.0.2 } drop\naccept"), named: []string{"ip saddr { 10.0.0.1, 192.168.0.2 } drop"}},
	{name: "a named set", nft: "table ip f { set bad { type ipv4_addr; elements = { 192.168.0.2 }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr @bad drop; accept; } }", named: []string{"ip saddr @bad drop", "element { 192.168.0.2 } of set bad", "delete element ip f bad { 192.168.0.2 }"}},
	{name: "a set whose elements end", nft: "table ip f { set bad { type ipv4_addr; flags timeout; elements = { 192.168.0.2 timeout 1h }; }\nchain fw { type filter hook forward priority 0; ip saddr @bad drop; } }", named: []string{"timeout 3600 s"}},
	{name: "a set of ranges", nft: "table ip f { set bad { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 192.168.0.1-192.168.0.9 }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr @bad drop; accept; } }", named: []string{"ip saddr @bad drop", "192.168.0.1-192.168.0.9"}},
	{name: "a concatenation", nft: "table ip f { set bad { type ipv4_addr . inet_service; elements = { 192.168.0.2 . 80 }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr . tcp dport @bad drop; accept; } }", named: []string{"ip saddr . tcp dport @bad drop", "192.168.0.2 . 80"}},
	{name: "a concatenation of ranges", nft: "table ip f { set bad { type ipv4_addr . inet_service; flags interval; elements = { 192.168.0.0/24 . 1-1023 }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr . tcp dport @bad drop; accept; } }", named: []string{"ip saddr . tcp dport @bad drop", "192.168.0.0/24 . 1-1023"}},
	{name: "a verdict map", nft: "table ip f { map bad { type ipv4_addr : verdict; elements = { 192.168.0.2 : drop }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr vmap @bad; accept; } }", named: []string{"ip saddr vmap @bad", "element { 192.168.0.2 }"}},
	{name: "an anonymous verdict map", nft: forwardChain("drop", "ip saddr vmap { 192.168.0.2 : drop, 10.0.0.1 : accept }\naccept"), named: []string{"ip saddr vmap {"}},
	{name: "a verdict map that jumps", nft: "table ip f { chain bad { tcp dport 80 drop; }\nchain fw { type filter hook forward priority 0; policy drop; iifname vmap { \"eth1\" : jump bad }; accept; } }", named: []string{"tcp dport 80 drop", "chain bad"}},
	{name: "a jump", nft: "table ip f { chain bad { ip saddr 192.168.0.0/24 drop; }\nchain fw { type filter hook forward priority 0; policy drop; tcp dport 1-1023 jump bad; accept; } }", named: []string{"ip saddr 192.168.0.0/24 drop"}},
	{name: "a goto", nft: "table ip f { chain bad { tcp dport 22 accept; drop; }\nchain fw { type filter hook forward priority 0; policy accept; iifname \"eth1\" goto bad; } }", named: []string{"chain bad"}},
	{name: "a set of interfaces", nft: forwardChain("drop", "iifname { \"eth1\", \"eth7\" } drop\naccept"), named: []string{"iifname { "}},
	{name: "a negation", nft: forwardChain("drop", "iifname \"eth1\" ip saddr != 192.168.0.0/30 accept\niifname != \"eth0\" drop\naccept"), named: []string{"iifname != \"eth0\" drop"}},
	{name: "a range of ports", nft: forwardChain("drop", "tcp dport 79-81 drop\naccept"), named: []string{"tcp dport 79-81 drop"}},
	{name: "a state", nft: forwardChain("drop", "ct state new drop\naccept"), named: []string{"ct state new drop"}},
	{name: "flags", nft: forwardChain("drop", "tcp flags & (fin|syn|rst|ack) == syn drop\naccept"), named: []string{"tcp flags"}},
	{name: "the TTL", nft: forwardChain("drop", "ip ttl < 60 accept\nip ttl < 64 drop\naccept"), named: []string{"ip ttl < 64 drop"}},
	{name: "a mark", nft: "table ip f { chain pre { type filter hook prerouting priority -150; ip saddr 192.168.0.2 meta mark set 7; }\nchain fw { type filter hook forward priority 0; policy drop; meta mark 7 drop; accept; } }", named: []string{"meta mark 0x7 drop"}},
	{name: "a quota", nft: "table ip f { quota month { over 1 kbytes used 1 kbytes }\nchain fw { type filter hook forward priority 0; policy accept; iifname \"eth1\" quota name \"month\" drop; } }", named: []string{"quota name \"month\"", "bytes used", "nft reset quota ip f month"}},
	{name: "a quota that a map chooses", nft: "table ip f { quota q1 { over 1 kbytes used 1 kbytes }\nmap byclient { type ipv4_addr : quota; elements = { 192.168.0.2 : \"q1\" }; }\nchain fw { type filter hook forward priority 0; policy accept; quota name ip saddr map @byclient drop; } }", named: []string{"quota name ip saddr map @byclient drop"}},
	{name: "a dynamic set with a limit", nft: "table ip f { set met { type ipv4_addr; flags dynamic; timeout 1m; }\nchain fw { type filter hook forward priority 0; ct state new add @met { ip saddr limit rate over 1/second burst 1 packets } drop; } }", named: []string{"add @met { ip saddr limit rate over 1/second burst 1 packet", "senders over the limit", "192.168.0.2 ("}},
	{name: "a number of connections of each source", nft: "table ip f { set who { type ipv4_addr; flags dynamic; }\nchain fw { type filter hook forward priority 0; ct state new add @who { ip saddr ct count over 1 } drop; } }", named: []string{"add @who { ip saddr ct count over 1 } drop", "senders over the limit", "192.168.0.2 ("}, least: causes.Advice},
	{name: "iptables-nft, connlimit", setup: "iptables-nft -A FORWARD -p tcp --syn -m connlimit --connlimit-above 1 -j DROP", named: []string{"--connlimit-above 1", "senders over the limit"}, least: causes.Advice},
	{name: "iptables-legacy, recent", setup: "iptables-legacy -A FORWARD -p tcp --syn -m recent --name w --set; iptables-legacy -A FORWARD -p tcp --syn -m recent --name w --update --seconds 60 --hitcount 4 -j DROP", named: []string{"-m recent --update --seconds 60 --hitcount 4", "senders over the limit"}},
	{name: "a limit that a rule accepts by, and a policy", nft: forwardChain("drop", "ct state established,related accept\nct state new limit rate 2/second burst 2 packets accept"), want: "forward-policy-drop", named: []string{": over a limit", "raise that limit", "senders over the limit"}, never: []string{"insert rule"}},
	{name: "a map of concatenated ranges to verdicts", nft: "table ip f { map bad { type ipv4_addr . inet_service : verdict; flags interval; elements = { 192.168.0.0/28 . 79-81 : drop, 10.0.0.0/8 . 0-65535 : accept }; }\nchain fw { type filter hook forward priority 0; ip saddr . tcp dport vmap @bad; } }", named: []string{"ip saddr . tcp dport vmap @bad", "192.168.0.0/28 . 79-81"}},
	{name: "the policy of a netdev chain", nft: "table netdev f { chain in { type filter hook ingress device \"eth1\" priority 0; policy drop; meta protocol arp accept; } }", named: []string{"policy of chain in"}},
	{name: "the policy of prerouting", nft: "table inet f { chain pre { type filter hook prerouting priority -300; policy drop; iifname \"eth0\" accept; udp dport 53 accept; } }", named: []string{"policy of chain pre"}},
	{name: "the direction and the mark of a connection", nft: "table ip f { chain pre { type filter hook prerouting priority -150; ct state new ct mark set 9; }\nchain fw { type filter hook forward priority 0; ct mark 9 ct direction reply drop; } }", named: []string{"ct mark 0x9 ct direction reply drop"}},
	{name: "raw bytes", nft: forwardChain("accept", "@th,16,16 80 drop"), named: []string{"th dport 80 drop"}},
	{name: "the hour", nft: forwardChain("accept", "meta hour \"00:00\"-\"23:59\" tcp dport 80 drop"), named: []string{"meta hour"}},
	{name: "iptables-legacy, hashlimit", setup: "iptables-legacy -A FORWARD -p tcp --dport 80 -m hashlimit --hashlimit-above 3/sec --hashlimit-burst 2 --hashlimit-mode srcip --hashlimit-name w -j DROP", named: []string{"--hashlimit-name w"}},
	{name: "iptables-legacy, u32", setup: "iptables-legacy -A FORWARD -m u32 --u32 '0>>22&0x3C@0&0xFFFF=80' -j DROP", named: []string{"-m u32"}},
	{name: "a limit that a rule accepts by", nft: forwardChain("accept", "iifname \"eth1\" ct state new limit rate 2/second accept\niifname \"eth1\" ct state new drop"), named: []string{"ct state new drop", "limit rate 2/second"}},
	{name: "a limit over which it drops", nft: forwardChain("accept", "iifname \"eth1\" limit rate over 2/second drop"), named: []string{"limit rate over 2/second drop"}},
	{name: "a number of connections", nft: forwardChain("accept", "ct count over 1 drop"), named: []string{"ct count over 1 drop"}, least: causes.Advice},
	{name: "an interface that is not there", nft: forwardChain("accept", "iifname \"eth9\" accept\nip saddr 192.168.0.0/24 drop"), named: []string{"ip saddr 192.168.0.0/24 drop", "there is no interface eth9"}},
	{name: "reject", nft: forwardChain("drop", "ip saddr 192.168.0.2 reject\naccept"), named: []string{"ip saddr 192.168.0.2 reject"}},
	{name: "prerouting, before connection tracking", nft: "table ip f { chain raw { type filter hook prerouting priority -300; ip saddr 192.168.0.2 drop; } }", named: []string{"ip saddr 192.168.0.2 drop", "chain raw"}},
	{name: "ingress of netdev", nft: "table netdev f { chain in { type filter hook ingress device \"eth1\" priority 0; ip saddr 192.168.0.2 drop; } }", named: []string{"ip saddr 192.168.0.2 drop", "netdev f"}},
	{name: "ingress of inet", nft: "table inet f { chain in { type filter hook ingress device \"eth1\" priority 0; ip saddr 192.168.0.2 drop; } }", named: []string{"ip saddr 192.168.0.2 drop", "inet f"}},
	{name: "the family inet", nft: "table inet f { chain fw { type filter hook forward priority 0; policy drop; ip saddr 192.168.0.2 tcp dport 80 drop; accept; } }", named: []string{"ip saddr 192.168.0.2 tcp dport 80 drop"}},
	{name: "of two chains with one priority the one that was made last", nft: "table inet f { chain fw { type filter hook forward priority 0; ip saddr 192.168.0.2 drop; } }\ntable ip g { chain fw { type filter hook forward priority 0; ip saddr 192.168.0.0/24 drop; } }", named: []string{"ip saddr 192.168.0.0/24 drop", "table ip g"}},
	{name: "postrouting", nft: "table ip f { chain post { type filter hook postrouting priority -10; ip daddr 203.0.113.2 drop; } }", named: []string{"ip daddr 203.0.113.2 drop"}},
	{name: "egress of netdev", nft: "table netdev f { chain out { type filter hook egress device \"eth0\" priority 0; ip daddr 203.0.113.2 drop; } }", named: []string{"ip daddr 203.0.113.2 drop"}},
	{name: "iptables-nft", setup: "iptables-nft -A FORWARD -s 192.168.0.2 -j DROP", named: []string{"-A FORWARD -s 192.168.0.2/32 -j DROP"}},
	{name: "iptables-nft beside a policy", setup: "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -i eth1 -p tcp -m multiport --dports 80,443 -j DROP; iptables-nft -A FORWARD -j ACCEPT", named: []string{"-m multiport --dports 80,443 -j DROP"}},
	{name: "iptables-nft, a chain", setup: "iptables-nft -N bad; iptables-nft -A bad -m conntrack --ctstate NEW -j REJECT; iptables-nft -A FORWARD -i eth1 -j bad", named: []string{"-A bad -m conntrack --ctstate NEW -j REJECT"}},
	{name: "iptables-legacy", setup: "iptables-legacy -A FORWARD -s 192.168.0.2 -j DROP", named: []string{"-A FORWARD -s 192.168.0.2/32 -j DROP", "iptables-legacy -t filter -D FORWARD 1"}},
	{name: "iptables-legacy beside a policy", setup: "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -p tcp --dport 80 -s 192.168.0.0/24 -j DROP; iptables-legacy -A FORWARD -j ACCEPT", named: []string{"-A FORWARD -s 192.168.0.0/24 -p tcp -m tcp --dport 80 -j DROP"}},
	{name: "iptables-legacy, a chain", setup: "iptables-legacy -N bad; iptables-legacy -A bad -m iprange --src-range 192.168.0.1-192.168.0.9 -j DROP; iptables-legacy -A FORWARD ! -i eth0 -g bad", named: []string{"-m iprange --src-range 192.168.0.1-192.168.0.9 -j DROP"}},
	{name: "iptables-legacy, raw", setup: "iptables-legacy -t raw -A PREROUTING -s 192.168.0.2 -j DROP", named: []string{"-A PREROUTING -s 192.168.0.2/32 -j DROP", "table ip raw"}},
	{name: "ipset", setup: "ipset create bad hash:ip timeout 3600; ipset add bad 192.168.0.2; iptables-legacy -A FORWARD -m set --match-set bad src -j DROP", named: []string{"-m set --match-set bad src -j DROP", "element { 192.168.0.2 } of set bad", "ipset del bad 192.168.0.2"}},
	{name: "ipset of networks and ports, by iptables-nft", setup: "ipset create badnet hash:net,port; ipset add badnet 192.168.0.0/24,tcp:80; iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -m set --match-set badnet src,dst -j DROP; iptables-nft -A FORWARD -j ACCEPT", named: []string{"--match-set badnet src,dst -j DROP", "192.168.0.0/24"}},
}

func TestWays(t *testing.T) {
	ktest.Root(t)
	for _, tool := range []string{"nft", "iptables-nft", "iptables-legacy", "ipset", "conntrack"} {
		ktest.Tool(t, tool)
	}
	var rows []way
	for _, w := range faultWays {
		for i, row := range w.ways {
			if testing.Short() && i > 1 {
				break
			}
			row.name, row.want = w.name+": "+row.name, cmp.Or(row.want, w.want)
			rows = append(rows, row)
		}
	}
	runWays(t, "routed", wayLabs, rows)
}

// bridged are rules of the family bridge, before a container that is behind one.
var bridged = []way{
	{name: "on the way to the container", nft: "table bridge f { chain out { type filter hook output priority 0; ether type ip tcp dport 80 drop; } }", named: []string{"tcp dport 80 drop", "bridge f"}},
	{name: "behind a policy of the bridge", nft: "table bridge f { chain out { type filter hook postrouting priority 0; policy drop; ether type arp accept; tcp dport 80 drop; accept; } }", named: []string{"tcp dport 80 drop"}},
	{name: "replies, as they come in", nft: "table bridge f { chain in { type filter hook prerouting priority 0; tcp sport 80 drop; } }", named: []string{"tcp sport 80 drop", "replies"}},
	{name: "replies, on their way to the host", nft: "table bridge f { chain in { type filter hook input priority 0; tcp sport 80 drop; } }", named: []string{"tcp sport 80 drop", "replies"}},
}

func TestWaysOfBridges(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	var rows []way
	for _, w := range bridged {
		w.want = "rule-drop"
		rows = append(rows, w)
	}
	runWays(t, "published", 1, rows)
}

// Packets of connections whose other direction passes elsewhere are dropped by whichever rule a
// firewall has for what is invalid: it is asymmetric routing, and no policy's fault.
func TestWaysOfAsymmetricRouting(t *testing.T) {
	ktest.Root(t)
	chain := "nft 'add chain ip firewall forward { type filter hook forward priority filter; policy "
	for name, firewall := range map[string][]string{
		"nft without a counter": {"nft add table ip firewall", chain + "accept; }'", "nft add rule ip firewall forward ct state invalid drop"},
		"nft beside a policy": {"nft add table ip firewall", chain + "drop; }'", "nft add rule ip firewall forward ct state vmap { established : accept, related : accept, invalid : drop }",
			"nft add rule ip firewall forward accept"},
		"iptables-legacy": {"iptables-legacy -A FORWARD -m conntrack --ctstate INVALID -j DROP"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ktest.Tool(t, "iptables-legacy")
			steps, err := asymmetricBy(firewall...).Run(t.Context(), FaultOptions{Window: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range steps[1].Findings {
				if f.Code == "forward-policy-drop" {
					t.Errorf("the policy is blamed:\n%s", spoken(f))
				}
			}
		})
	}
}

// wayLabs is how many labs play at once.
const wayLabs = 6

// runWays plays each row on a gateway of its own rules; labs are used again and again.
func runWays(t *testing.T, topology string, labs int, rows []way) {
	next := make(chan way)
	go func() {
		defer close(next)
		for _, w := range rows {
			next <- w
		}
	}()
	var wg sync.WaitGroup
	for range labs {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
			defer cancel()
			l, err := lab.Up(ctx, topology, lab.Options{Owned: true})
			if err != nil {
				t.Error(err)
				for range next {
				}
				return
			}
			defer l.Down()
			before, err := l.NATNode().Command(ctx, "nft", "list", "ruleset").Output()
			if err != nil {
				t.Error(err)
			}
			for w := range next {
				t.Run(w.name, func(t *testing.T) { playWay(ctx, t, l, string(before), w) })
			}
		})
	}
	wg.Wait()
}

// clearRules takes away all rules of what rows used, and what connection tracking knows.
const clearRules = "nft flush ruleset; for t in raw mangle nat filter; do iptables-legacy -t $t -F; iptables-legacy -t $t -X; done 2>/dev/null; iptables-legacy -P FORWARD ACCEPT; iptables-legacy -P INPUT ACCEPT; ipset destroy; conntrack -F 2>/dev/null; true"

func playWay(ctx context.Context, t *testing.T, l *lab.Lab, base string, w way) {
	s := &faultRun{lab: l, watched: l.NATNode(), options: FaultOptions{Window: time.Second, Progress: func(string, float64) {}}}
	defer s.close()
	for _, err := range []error{s.run(ctx, s.watched, clearRules), nftText(base+strings.ReplaceAll(w.nft, "} }", "}\n}"))(ctx, s)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for line := range strings.SplitSeq(w.setup, "; ") {
		if err := s.run(ctx, s.watched, line); err != nil {
			t.Fatal(err)
		}
	}
	if w.work == nil {
		if err := browseAt(100)(ctx, s); err != nil {
			t.Fatal(err)
		}
	} else {
		w.work(t, s)
	}
	facts, err := s.watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	judgeWay(t, facts, w)
}

// judgeWay compares what the doctor found with what a row wants.
func judgeWay(t *testing.T, facts *snapshot.Snapshot, w way) {
	found := causes.Judge(facts)
	got, all := "", ""
	for _, f := range found {
		if f.Severity >= cmp.Or(w.least, causes.Warning) {
			all += spoken(f)
			if got == "" {
				got = f.Code
			}
		}
	}
	if got != w.want {
		t.Errorf("found %q, want %q\n%s", got, w.want, titles(found))
	}
	if again := redactedCode(t, facts, cmp.Or(w.least, causes.Warning)); again != got {
		t.Errorf("saved, redacted and read again, it is %q", again)
	}
	for _, part := range w.named {
		if !strings.Contains(all, part) {
			t.Errorf("nothing says %q:\n%s", part, all)
		}
	}
	for _, f := range found {
		if strings.Contains(spoken(f), "counted apart") {
			t.Errorf("numbers contradict each other:\n%s", spoken(f))
		}
	}
	for _, part := range w.never {
		if strings.Contains(all, part) {
			t.Errorf("%q is said:\n%s", part, all)
		}
	}
	if t.Failed() {
		for _, row := range facts.Drops.Rows {
			if !row.Benign {
				t.Logf("%d at %s by %s for %q, %q: %+v", row.Count, row.Location, row.Interface, row.Cause, row.Samples, row.Packets)
			}
		}
		for _, c := range facts.Chains {
			t.Logf("chain %s %s %s %s hook %s policy %s: %+v", c.Backend, c.Family, c.Table, c.Name, c.Hook, c.Policy, c.Walk)
		}
		t.Logf("sets %+v; %d drops were lost; interfaces %+v", facts.Sets, facts.Drops.LostEvents, facts.Interfaces)
		if facts.Conntrack != nil && facts.Conntrack.Table != nil {
			t.Logf("sources %+v, destinations %+v, outsides %+v", facts.Conntrack.Table.Sources, facts.Conntrack.Table.Destinations, facts.Conntrack.Table.Outsides)
		}
	}
}

// redactedCode is the first finding of the facts as they are in a bug report.
func redactedCode(t *testing.T, facts *snapshot.Snapshot, least causes.Severity) string {
	t.Helper()
	var b bytes.Buffer
	must(t, snapshot.Save(&b, facts))
	for range 4 {
		s, err := snapshot.Load(bytes.NewReader(b.Bytes()))
		must(t, err)
		snapshot.Redact(s)
		if found := causes.Judge(s); len(found) > 0 && found[0].Severity >= least {
			return found[0].Code
		}
		// One address in a hundred becomes the broadcast address of its network.
	}
	return ""
}

// spoken is all that a finding says.
func spoken(f causes.Finding) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s: %s\n", f.Code, f.Title)
	for _, e := range f.Evidence {
		fmt.Fprintf(&b, "    %s: %s (%s)\n", e.What, e.Value, e.Source)
	}
	b.WriteString("    " + f.Why + "\n")
	for _, line := range f.Remedy {
		fmt.Fprintf(&b, "    $ %s\n", line)
	}
	for _, c := range f.Consequences {
		b.WriteString(spoken(c))
	}
	return b.String()
}

// listed is an address of the client's machine that rules refuse.
const listed = "192.168.0.66"

// faultWays are the rows by what they make.
var faultWays = []struct {
	name, want string
	ways       []way
}{
	{"a client is blocked", "rule-drop", blocked}, {"nothing accepts the client", "forward-policy-drop", policies}, {"undecided", "", undecided}, {"replies are dropped", "", replies},
	{"size messages are dropped", "", sizes}, {"the TTL", "", timesToLive}, {"not tracked", "", untracked}, {"a program drops", "", programs}, {"far away", "", farAway},
	{"healthy: a block list", "", healthyLists}, {"healthy: scans", "", scans},
}

// policies: nothing accepts what the client sends. The cure must not go before a block list.
var policies = []way{
	{name: "a policy", nft: forwardChain("drop", "tcp dport 443 accept"), named: []string{"chain fw of table ip f", "oifname \"eth0\" tcp dport 80 accept"}, never: []string{"oifname \"eth0\" accept"}},
	{name: "iptables, by port", setup: "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -p tcp --dport 443 -j ACCEPT", named: []string{"-o eth0 -p tcp --dport 80 -j ACCEPT"}, never: []string{"-o eth0 -j ACCEPT"}},
	{name: "iptables, by ports", setup: "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -p tcp -m multiport --dports 22,443 -j ACCEPT", named: []string{"-o eth0 -p tcp --dport 80 -j ACCEPT"}, never: []string{"-o eth0 -j ACCEPT"}},
	{name: "a policy behind a block list", nft: forwardChain("drop", "ip saddr 10.9.9.9 drop"), named: []string{"nft 'add rule ip f fw iifname"}, never: []string{"insert rule"}},
	{name: "a last rule", nft: forwardChain("accept", "ip saddr 10.9.9.9 drop\ntcp dport 443 accept\ndrop"), named: []string{"insert rule ip f fw handle"}},
	{name: "a last rule that counts", nft: forwardChain("accept", "tcp dport 443 accept\ncounter drop"), named: []string{"chain fw of table ip f"}},
	{name: "the second of two chains", nft: "table inet f { chain one { type filter hook forward priority -5; policy drop; accept; }\nchain two { type filter hook forward priority 5; policy drop; tcp dport 22 accept; } }", named: []string{"chain two (inet f) dropped"}},
	{name: "iptables-nft", setup: "iptables-nft -P FORWARD DROP", named: []string{"iptables-nft -I FORWARD -i eth1"}},
	{name: "iptables-nft behind a block list", setup: "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -s 10.9.9.9 -j DROP", named: []string{"iptables-nft -A FORWARD -i eth1"}, never: []string{"-I FORWARD"}},
	{name: "iptables-legacy", setup: "iptables-legacy -P FORWARD DROP", named: []string{"iptables-legacy -I FORWARD -i eth1"}},
	{name: "an interface that is not there", nft: forwardChain("drop", "iifname \"eth9\" accept"), named: []string{"chain fw", "would accept it", "there is no interface eth9"}},
	{name: "a quota that ends", nft: forwardChain("drop", "iifname \"eth1\" quota until 1 kbytes used 1 kbytes accept"), named: []string{"chain fw", "would accept it", "bytes used"}},
}

// undecided: a sample of a packet does not tell whether the rule's condition held.
var undecided = []way{
	{name: "a mark of the connection, or the policy", nft: forwardChain("drop", "ct mark 1 drop"), want: "rule-drop", named: []string{"cannot tell which", "ct mark", "policy of chain fw", "nft add rule ip f fw counter", "handle 2 counter"}, never: []string{"accept'", "delete rule"}},
	{name: "a mark of the connection that counts, or the policy", nft: forwardChain("drop", "ct mark 1 counter drop"), want: "forward-policy-drop"},
	{name: "two marks", nft: forwardChain("accept", "ct mark != 1 drop\nct mark 0 drop"), want: "rule-drop", named: []string{"cannot tell which"}},
	{name: "two marks, one counts", nft: forwardChain("accept", "ct mark != 1 counter drop\nct mark 0 drop"), want: "rule-drop", named: []string{"rule 1 of chain fw"}, never: []string{"cannot tell"}},
}

var replies = []way{
	{name: "by address", nft: forwardChain("drop", "ip saddr 203.0.113.2 drop\naccept"), want: "rule-drop", named: []string{"ip saddr 203.0.113.2 drop", "replies"}},
	{name: "by interface", nft: forwardChain("accept", "iifname \"eth0\" drop"), want: "rule-drop", named: []string{"iifname \"eth0\" drop"}},
	{name: "by state", setup: "iptables-legacy -A FORWARD -i eth0 -m conntrack --ctstate ESTABLISHED -j DROP", want: "rule-drop", named: []string{"--ctstate ESTABLISHED -j DROP"}},
	{name: "before connection tracking", nft: "table ip f { chain raw { type filter hook prerouting priority -300; iifname \"eth0\" tcp sport 80 drop; } }", want: "rule-drop", named: []string{"iifname \"eth0\" tcp sport 80 drop"}},
	{name: "at ingress", nft: "table netdev f { chain in { type filter hook ingress device \"eth0\" priority 0; tcp sport 80 drop; } }", want: "rule-drop", named: []string{"tcp sport 80 drop"}},
	{name: "the client's confirmations", work: browseLonger, nft: forwardChain("accept", "iifname \"eth1\" tcp flags & (fin|syn|rst|ack) == ack drop"), want: "rule-drop", named: []string{"packets of open connections"}, never: []string{"clients-unreached"}},
	{name: "the client's confirmations, before connection tracking", nft: "table ip f { chain raw { type filter hook prerouting priority -300; iifname \"eth1\" tcp flags & (fin|syn|rst|ack) == ack drop; } }", work: browseLonger, want: "rule-drop",
		named: []string{"packets of open connections"}, never: []string{"clients-unreached"}},
	{name: "on their way out", nft: "table ip f { chain post { type filter hook postrouting priority 10; oifname \"eth1\" drop; } }", want: "rule-drop", named: []string{"oifname \"eth1\" drop"}},
}

// sizes: the gateway can't say that packets are too big, for its own output drops the message.
var sizes = []way{
	{name: "nft", setup: "ip link set dev eth0 mtu 1000", nft: "table inet f { chain out { type filter hook output priority 0; ip protocol icmp drop; } }", work: bigDatagrams, want: "mtu-drop",
		named: []string{"ip protocol icmp drop", "its own rules", "does not help UDP", "icmp code frag-needed accept"}, never: []string{"maxseg"}},
	{name: "iptables-legacy", setup: "ip link set dev eth0 mtu 1000; iptables-legacy -A OUTPUT -p icmp -j DROP", work: bigDatagrams, want: "mtu-drop",
		named: []string{"-A OUTPUT -p icmp -j DROP", "--icmp-type fragmentation-needed -j ACCEPT"}, never: []string{"maxseg"}},
	{name: "a policy", setup: "ip link set dev eth0 mtu 1000", nft: "table ip f { chain out { type filter hook output priority 0; policy drop; } }", work: bigDatagrams, want: "mtu-drop",
		named: []string{"policy of chain out", "nft 'add rule ip f out icmp type"}, never: []string{"maxseg"}},
}

var timesToLive = []way{
	{name: "a rule that drops by it", nft: forwardChain("accept", "ip ttl < 100 drop"), want: "rule-drop", named: []string{"ip ttl < 100 drop"}, never: []string{"routing-loop"}},
	{name: "a rule that sets it", nft: "table ip f { chain pre { type filter hook prerouting priority -150; iifname \"eth1\" ip ttl set 1; } }", want: "rule-drop", named: []string{"ip ttl set"}, never: []string{"routing-loop"}},
	{name: "a target that sets it", setup: "iptables-legacy -t mangle -A PREROUTING -i eth1 -j TTL --ttl-set 1", want: "rule-drop", named: []string{"-A PREROUTING -i eth1 -j TTL"}, never: []string{"routing-loop"}},
}

var untracked = []way{
	{name: "notrack of nft", nft: "table ip f { chain raw { type filter hook prerouting priority -300; notrack; } }", want: "answers-lost"},
	{name: "notrack of iptables", setup: "iptables-legacy -t raw -A PREROUTING -j CT --notrack", want: "answers-lost"},
}

// programs drop at the places of rules' neighbours.
var programs = []way{
	{name: "tc", work: dropByTC, want: "other-drops", named: []string{"traffic control", "tc -s filter show dev eth1 ingress"}},
	{name: "XDP", work: dropByXDP, want: "other-drops", least: causes.Advice, named: []string{"XDP"}},
	{name: "tc, what was translated", work: far(dropByTCAt("eth0", netlink.HANDLE_MIN_EGRESS)), want: "other-drops", named: []string{"traffic control", "were to leave by eth0", "tc -s filter show dev eth0 egress"}},
	{name: "tc, replies before they are translated back", work: far(dropByTCAt("eth0", netlink.HANDLE_MIN_INGRESS)), want: "other-drops", named: []string{"traffic control", "arrived on eth0"}},
}

// farAway are rules that drop what clients send to a host that only a default route leads to: what is
// not translated yet, and what has this machine's own source already.
var farAway = []way{
	{name: "forward", nft: forwardChain("accept", "ip daddr 198.51.100.7 drop"), work: far(nil), want: "rule-drop", named: []string{"ip daddr 198.51.100.7 drop"}},
	{name: "a policy", nft: forwardChain("drop", "ip daddr 198.51.100.9 accept"), work: far(nil), want: "forward-policy-drop", named: []string{"chain fw"}},
	{name: "behind source translation", nft: "table ip f { chain post { type filter hook postrouting priority 200; tcp dport 80 drop; } }", work: far(nil), want: "rule-drop", named: []string{"tcp dport 80 drop"}},
	{name: "egress of netdev", nft: "table netdev f { chain out { type filter hook egress device \"eth0\" priority 0; tcp dport 80 drop; } }", work: far(nil), want: "rule-drop", named: []string{"tcp dport 80 drop", "netdev f"}},
	{name: "replies at ingress", nft: "table netdev f { chain in { type filter hook ingress device \"eth0\" priority 0; tcp sport 80 drop; } }", work: far(nil), want: "rule-drop", named: []string{"tcp sport 80 drop"}, never: []string{"answers-lost"}},
	{name: "not translated, beside what is published", setup: "nft flush chain ip nat POSTROUTING", work: far(publish), want: "answers-lost", named: []string{"left untranslated"}},
}

// healthyLists block one address, as they should, however much it sends.
var healthyLists = []way{
	{name: "nobody meets it", nft: forwardChain("accept", "ip saddr 10.9.9.9 drop")},
	{name: "a rule", nft: forwardChain("accept", "ip saddr 192.168.0.66 drop"), work: browseAndFlood},
	{name: "a rule that counts", nft: forwardChain("accept", "ip saddr 192.168.0.66 counter drop"), work: browseAndFlood},
	{name: "a rule beside a policy", nft: forwardChain("drop", "ip saddr 192.168.0.66 drop\nct state established,related accept\niifname \"eth1\" accept"), work: browseAndFlood},
	{name: "a set", nft: "table ip f { set bad { type ipv4_addr; flags interval; elements = { 192.168.0.64/26 }; }\nchain fw { type filter hook forward priority 0; policy drop; ip saddr @bad drop; accept; } }", work: browseAndFlood},
	{name: "a verdict map", nft: "table ip f { map bad { type ipv4_addr : verdict; elements = { 192.168.0.66 : drop }; }\nchain fw { type filter hook forward priority 0; ip saddr vmap @bad; } }", work: browseAndFlood},
	{name: "before connection tracking", nft: "table ip f { chain raw { type filter hook prerouting priority -300; ip saddr 192.168.0.66 drop; } }", work: browseAndFlood},
	{name: "at ingress", nft: "table netdev f { chain in { type filter hook ingress device \"eth1\" priority 0; ip saddr 192.168.0.66 drop; } }", work: browseAndFlood},
	{name: "iptables-nft", setup: "iptables-nft -A FORWARD -s 192.168.0.66 -j DROP", work: browseAndFlood},
	{name: "iptables-legacy, raw", setup: "iptables-legacy -t raw -A PREROUTING -s 192.168.0.66 -j DROP", work: browseAndFlood},
	{name: "ipset", setup: "ipset create bad hash:net; ipset add bad 192.168.0.64/27; iptables-legacy -A FORWARD -m set --match-set bad src -j DROP", work: browseAndFlood},
	{name: "of destinations", nft: forwardChain("drop", "ip daddr 203.0.113.9 drop\naccept"), work: browseAnd("203.0.113.9:5353", 40)},
	{name: "of destinations, met often", nft: forwardChain("drop", "ip daddr 203.0.113.9 drop\naccept"), work: browseAnd("203.0.113.9:5353", 4000)},
}

// scans come from outside, and are refused.
var scans = []way{
	{name: "a policy", nft: forwardChain("drop", "ct state established,related accept\niifname \"eth1\" accept"), work: browseAndScan},
	{name: "a policy that counts", setup: "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT; iptables-nft -A FORWARD -i eth1 -j ACCEPT", work: browseAndScan},
	{name: "a last rule", nft: forwardChain("accept", "ct state established,related accept\niifname \"eth1\" accept\ndrop"), work: browseAndScan},
	{name: "a rule", nft: forwardChain("accept", "iifname \"eth0\" ct state new drop"), work: browseAndScan},
	{name: "before connection tracking", nft: "table ip f { chain raw { type filter hook prerouting priority -300; iifname \"eth0\" udp dport 5353 drop; } }", work: browseAndScan},
}

// browseAnd browses, and sends datagrams to somebody else.
func browseAnd(to string, perSecond float64) func(*testing.T, *faultRun) {
	return by(browseAt(100), send(datagrams(to, 1, perSecond)))
}

// by does these for a row.
func by(actions ...action) func(*testing.T, *faultRun) {
	return func(t *testing.T, s *faultRun) { must(t, do(actions...)(t.Context(), s)) }
}

// browseLonger browses for as long as it takes until connections count as never confirmed.
func browseLonger(t *testing.T, s *faultRun) {
	must(t, browseAt(100)(t.Context(), s))
	s.least = 3 * time.Second
	t.Cleanup(func() { // connections that hang would be taken up in the next row
		_ = do(onClient("ss -K dst 0.0.0.0/0 >/dev/null"), onServer("ss -K dst 0.0.0.0/0 >/dev/null"))(context.Background(), s)
	})
}

// browseAndFlood browses, and floods from the address that is listed.
var browseAndFlood = by(browseAt(100), onClient("ip addr replace "+listed+"/24 dev eth0"), send(datagramsFrom(listed, "{server}:5353", 1, 4000, 10)))

// browseAndScan browses, and has the server's machine try what is behind the gateway.
var browseAndScan = by(browseAt(100), onServer("ip route replace 192.168.0.0/24 via 203.0.113.1"), send(sending(lab.RoleServer, "192.168.0.77:5353", 16, 1000, 0)))

// farHost is an address that only the gateway's default route leads to, behind the server.
const farHost = "198.51.100.7"

// far has the client ask farHost for pages, and does the rest beside it. The server knows no way
// to the client's own address, as it is on the Internet.
func far(work func(*testing.T, *faultRun)) func(*testing.T, *faultRun) {
	return func(t *testing.T, s *faultRun) {
		t.Cleanup(func() {
			_ = onGateway("ip route del default")(context.Background(), s)
			_ = onServer("ip route del blackhole 192.168.0.0/24; ip addr del "+farHost+"/32 dev lo")(context.Background(), s)
		})
		by(onGateway("ip route replace default via {server}"), onServer("ip route replace blackhole 192.168.0.0/24; ip addr replace "+farHost+"/32 dev lo"),
			serve(lab.HTTPServerOptions{}), send(requests("http://"+farHost+"/", 100)))(t, s)
		if work != nil {
			work(t, s)
		}
	}
}

// publish has the server's machine ask the gateway for what a client publishes.
var publish = by(swallow(lab.RoleClient, 5354), onGateway("nft add table ip published", "nft 'add chain ip published pre { type nat hook prerouting priority dstnat; }'",
	"nft add rule ip published pre iifname eth0 udp dport 5354 dnat to {client}"), send(sending(lab.RoleServer, "203.0.113.1:5354", 16, 50, 0)))

// bigDatagrams sends what does not fit and must not be fragmented.
func bigDatagrams(t *testing.T, s *faultRun) {
	t.Cleanup(func() { _ = onGateway("ip link set dev eth0 mtu 1500")(context.Background(), s) })
	by(send(sending(lab.RoleClient, "{server}:5353", 1400, 50, unix.IP_PMTUDISC_PROBE)))(t, s)
}

// sending sends datagrams of a size from a node.
func sending(role, to string, size, perSecond, discover int) action {
	return func(ctx context.Context, s *faultRun) error {
		var c *net.UDPConn
		err := s.node(role).Do(func() (err error) {
			c, err = net.ListenUDP("udp4", nil)
			return err
		})
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		if discover != 0 {
			err = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, discover) })
			if err != nil {
				return err
			}
		}
		remote := s.addrPort(to)
		return every(ctx, time.Second/time.Duration(perSecond), func() error {
			_, _ = c.WriteToUDPAddrPort(make([]byte, size), remote)
			return nil
		})
	}
}

// dropping is a program that returns a number, whatever the packet is.
func dropping(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "drops_all", Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func dropByTC(t *testing.T, s *faultRun) {
	must(t, browseAt(100)(t.Context(), s))
	dropAt(t, s, "eth1", netlink.HANDLE_MIN_INGRESS)
}

// dropByTCAt drops at one end of an interface.
func dropByTCAt(device string, at uint32) func(*testing.T, *faultRun) {
	return func(t *testing.T, s *faultRun) { dropAt(t, s, device, at) }
}

func dropAt(t *testing.T, s *faultRun, device string, at uint32) {
	p := dropping(t, ebpf.SchedCLS, 2) // TC_ACT_SHOT
	must(t, s.watched.Do(func() error {
		dev, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
		if err := netlink.QdiscAdd(qdisc); err != nil {
			return err
		}
		t.Cleanup(func() { _ = s.watched.Do(func() error { return netlink.QdiscDel(qdisc) }) })
		return netlink.FilterAdd(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{LinkIndex: dev.Attrs().Index, Parent: at, Handle: 1, Protocol: unix.ETH_P_IP, Priority: 1},
			Fd: p.FD(), Name: "drops_all", DirectAction: true})
	}))
}

func dropByXDP(t *testing.T, s *faultRun) {
	must(t, browseAt(100)(t.Context(), s))
	p := dropping(t, ebpf.XDP, 1) // XDP_DROP
	must(t, s.watched.Do(func() error {
		dev, err := netlink.LinkByName("eth1")
		if err != nil {
			return err
		}
		t.Cleanup(func() {
			_ = s.watched.Do(func() error { return netlink.LinkSetXdpFdWithFlags(dev, -1, unix.XDP_FLAGS_SKB_MODE) })
		})
		return netlink.LinkSetXdpFdWithFlags(dev, p.FD(), unix.XDP_FLAGS_SKB_MODE)
	}))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
