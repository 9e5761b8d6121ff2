// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

func TestLeadsTo(t *testing.T) {
	for _, tt := range []struct {
		target, end string
		want        bool
	}{
		{"10.0.0.1:80", "10.0.0.1:80", true},
		{"10.0.0.1:80", "10.0.0.1:81", false},
		{"10.0.0.10:80", "10.0.0.1:80", false},
		{"10.0.0.1", "10.0.0.1:4000", true},
		{"10.0.0.1-10.0.0.9:1024-2047", "10.0.0.9:2047", true},
		{"10.0.0.1-10.0.0.9:1024-2047", "10.0.0.9:2048", false},
		{"10.0.0.1-10.0.0.9", "10.0.0.10:80", false},
		{":8080", "192.0.2.1:8080", true},
		{":8080", "192.0.2.1:80", false},
		{"[fd00::2]:80", "[fd00::2]:80", true},
		{"[fd00::2]:80", "[fd00::2]:81", false},
		{"[fd00::2]-[fd00::9]:80", "[fd00::a]:80", false},
		{"fd00::2", "[fd00::2]:80", true},
		{"fd00::2", "[fd00::22]:80", false},
		{"fd00::2-fd00::9", "[fd00::5]:80", true},
		{"10.0.0.1:80", "10.0.0.1:0", true}, // ICMP
		{"numgen", "10.0.0.1:80", true},
	} {
		if got := leadsTo(tt.target, netip.MustParseAddrPort(tt.end)); got != tt.want {
			t.Errorf("%s to %s: %v", tt.target, tt.end, got)
		}
	}
}

// Of rules whose conditions are the same, the target says which of them translated: as kube-proxy chooses an endpoint.
func TestSeveralTargets(t *testing.T) {
	l := up(t, "routed", lab.RulesNone)
	server := l.Options().Addresses.Server
	targets := []string{server.String() + ":80", server.Next().String() + ":80"}
	file := filepath.Join(t.TempDir(), "rules")
	if err := os.WriteFile(file, []byte(`*nat
-A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -m statistic --mode random --probability 0.5 -j DNAT --to-destination `+targets[0]+`
-A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination `+targets[1]+`
COMMIT
`), 0o600); err != nil {
		t.Fatal(err)
	}
	in(t, l, "gateway", "iptables-legacy-restore --noflush "+file)
	packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> 10.96.0.10:80")}, func() { dial(l, "client", "10.96.0.10:80", time.Second) },
		func(packets []trace.Packet) bool { return len(packets) > 0 })
	s := step(first(t, packets, "SYN", false), trace.Translated, "prerouting")
	if s == nil || s.Rule == nil || !strings.Contains(s.Rule.Text, "--to-destination "+s.After[strings.LastIndexByte(s.After, ' ')+1:]) {
		t.Errorf("translated by %+v", s)
	}
}

// Rules that have changed since the trace began are read again, also where the kernel reports none.
func TestRulesChange(t *testing.T) {
	l := up(t, "routed", lab.RulesIPTablesLegacy)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 80).String()
	packets := traced(t, l, Options{Flow: flowOf(t, "tcp any -> "+to)}, func() {
		in(t, l, "gateway", "iptables-legacy -t nat -I POSTROUTING -d 10.99.0.1 -j ACCEPT")
		time.Sleep(bookAge) // it is not read again before
		dial(l, "client", to, time.Second)
	}, func(packets []trace.Packet) bool { return len(packets) > 0 })
	s := step(first(t, packets, "SYN", false), trace.Translated, "postrouting")
	if s == nil || s.Rule == nil || s.Rule.Number != 2 {
		t.Errorf("translated by %+v, want rule 2", s)
	}
}

// What led to a namespace when it was found may lead to another one later, whose rules are not its own.
func TestRulesOfAnother(t *testing.T) {
	l := up(t, "routed", lab.RulesNft)
	b, err := newBook(netns.Place{Ref: l.NATNode().Netns, Inode: l.Node("client").Handle().Inode()})
	if err == nil || len(b.current().Chains) > 0 {
		t.Errorf("%v: %+v", err, b.current().Chains)
	}
}

// Rules are read once for many drops, and again when that is long ago. What was read of a large set for one packet says nothing
// of another.
func TestDropsShareRules(t *testing.T) {
	ktest.Root(t)
	h, err := netns.Open("")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b := &book{place: netns.Place{Inode: h.Inode()}}
	row := snapshot.Drop{Count: 1, Location: "nft_do_chain+0x0", Cause: snapshot.CauseRule,
		Packets: []snapshot.DroppedPacket{{Text: "tcp 192.0.2.1:4000 -> 192.0.2.2:80 SYN", Stage: snapshot.StageArrived, In: "lo"}}}
	first := b.forDrop(row)
	if first == nil {
		t.Fatal("the rules cannot be read")
	}
	b.askedAt = time.Now()
	if b.forDrop(row) != first {
		t.Error("the rules were read again at once")
	}
	b.askedAt = b.askedAt.Add(-2 * bookAge)
	if b.forDrop(row) == first {
		t.Error("the rules were not read again")
	}
	for _, c := range []struct {
		set  snapshot.Set
		want bool
	}{
		{snapshot.Set{Backend: "nft", Size: 1, Elements: make([]snapshot.Element, 1)}, true},
		{snapshot.Set{Backend: "nft", Size: 1000, Elements: make([]snapshot.Element, 1)}, false},
		{snapshot.Set{Backend: "ipset", Size: 1, Elements: make([]snapshot.Element, 1)}, false},
	} {
		if got := ofAnyPacket([]snapshot.Set{c.set}); got != c.want {
			t.Errorf("%s set of %d: %v, want %v", c.set.Backend, c.set.Size, got, c.want)
		}
	}
}
