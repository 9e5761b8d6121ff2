// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/snapshot"
)

const carrierRules = `
inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
pools:
  cgn:
    addresses: 198.51.100.128/31
    ports: 1024-4095
    blocks: {size: 64, extra: 64, at_most: 1}
subscribers:
  by: address
  classes:
    default: {sessions: 4000}
    business:
      of: 10.0.0.32/27
      ports: 40
rules:
  - {snat: 10.0.0.0/24, to: cgn}
`

// flows has so many sockets of an address of the client send a datagram each.
// They have the ports from first on.
func (b *testbed) flows(from string, first, n int) {
	b.t.Helper()
	b.in(b.client, func() error {
		l, err := netlink.LinkByName("eth0")
		a, _ := netlink.ParseAddr(from + "/32")
		if err := errors.Join(err, netlink.AddrReplace(l, a)); err != nil {
			return err
		}
		for i := range n {
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(from), Port: first + i}, &net.UDPAddr{IP: net.ParseIP("198.51.100.9"), Port: 5353})
			if err != nil {
				return err
			}
			_, _ = c.Write([]byte("x")) // refused: the answer is an ICMP error
			c.Close()
		}
		return nil
	})
}

// Who uses how much is told by names of the rule file, sorted and summed up; status, facts and
// metrics say the same.
func TestSubscribers(t *testing.T) {
	b := newTestbed(t)
	b.up(carrierRules, b.options())
	b.flows("10.0.0.2", 2000, 3)
	b.flows("10.0.0.7", 2000, 140) // its two blocks are full
	before, err := ReadFacts(b.gateway, nil, false)
	if err != nil || len(before.Sources) != 1 || before.Sources[0].AllRefused() != 12 {
		t.Fatalf("facts before the window %+v, %v", before.Sources, err)
	}
	b.flows("10.0.0.40", 2000, 45) // five more than its class may have
	b.flows("10.0.0.7", 3000, 4)

	s, err := ReadSubscribers(b.gateway, SubscriberOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, r := range s.Rows {
		ranges := map[netip.Addr]int{}
		for _, p := range r.Blocks {
			ranges[p.Address] += int(p.Last-p.First) + 1
		}
		if !r.External.IsValid() || len(ranges) != 1 || ranges[r.External] != 64*len(r.Blocks) {
			t.Errorf("%s: blocks %v of %s", r.Of, r.Blocks, r.External)
		}
		rows = append(rows, fmt.Sprintf("%s %s %s %d %d %d %d/%d %.3f %v", r.Of, r.Pool, r.Class, r.Sessions, *r.Ports, *r.HoldDown, len(r.Blocks), r.BlockLimit, r.Share, r.Refused))
	}
	want := []string{
		"10.0.0.7/32 cgn default 128 128 0 2/2 1.000 map[port-limit:16]",
		"10.0.0.40/32 cgn business 40 40 0 1/2 1.000 map[port-limit:5]",
		"10.0.0.2/32 cgn default 3 3 0 1/2 0.500 map[]",
	}
	if got := strings.Join(rows, "\n"); got != strings.Join(want, "\n") || s.Count != 3 {
		t.Errorf("%d subscribers:\n%s\nwant:\n%s", s.Count, got, strings.Join(want, "\n"))
	}
	if len(s.Pools) != 1 || s.Pools[0].Subscribers != 3 || s.Pools[0].Blocks != 4 || *s.Pools[0].Ports != 171 || s.Pools[0].Refused["port-limit"] != 21 || len(s.Classes) != 2 || s.Classes[0].Name != "business" {
		t.Errorf("totals %+v, %+v", s.Pools, s.Classes)
	}
	for name, o := range map[string]SubscriberOptions{
		"10.0.0.40/32 of 1": {Class: "business"},
		"10.0.0.2/32 of 1":  {Of: netip.MustParsePrefix("10.0.0.0/29"), Rows: 1, By: "sessions"},
		"10.0.0.7/32 of 3":  {Pool: "cgn", By: "refused", Rows: 1},
	} {
		if strings.HasPrefix(name, "10.0.0.2/") {
			o.Of = netip.MustParsePrefix("10.0.0.2/32")
		}
		s, err := ReadSubscribers(b.gateway, o)
		if err != nil || len(s.Rows) != 1 || fmt.Sprintf("%s of %d", s.Rows[0].Of, s.Count) != name {
			t.Errorf("%+v: %+v, %v; want %s", o, s, err, name)
		}
	}
	for says, o := range map[string]SubscriberOptions{`class "bussiness"`: {Class: "bussiness"}, `pool "cng"`: {Pool: "cng"}} {
		if _, err := ReadSubscribers(b.gateway, o); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "did you mean") {
			t.Errorf("%+v: %v", o, err)
		}
	}

	status, err := ReadStatus(b.gateway)
	if err != nil || len(status.Pools) != 1 {
		t.Fatalf("status %+v, %v", status, err)
	}
	p := status.Pools[0]
	if p.Name != "cgn" || p.Addresses != 2 || p.Subscribers != 3 || p.NearLimit != 2 || p.Refused["port-limit"] != 21 || p.Blocks == nil || p.Blocks.Used != 4 || p.Blocks.Free != 2*48-4 || p.FreeUDP != 2*3072-171 {
		t.Errorf("pool %+v, %+v", p, p.Blocks)
	}

	// Facts know what was refused since the begin of the window alone.
	facts, err := ReadFacts(b.gateway, before, true)
	if err != nil || len(facts.Sources) != 3 || facts.Subscribers != 3 {
		t.Fatalf("facts %+v, %v", facts, err)
	}
	business := snapshot.EngineSource{Addr: netip.MustParseAddr("10.0.0.40"), Pool: "cgn", Class: "business", Sessions: 40, Ports: 40, Blocks: 1, BlockPorts: 64, Refused: map[string]uint64{"port-limit": 5}}
	if got := fmt.Sprint(facts.Sources[0]); got != fmt.Sprint(business) || facts.Sources[1].AllRefused() != 4 || facts.Sources[2].Refused != nil {
		t.Errorf("subscribers %+v", facts.Sources)
	}
	if p := facts.Pools[0]; p.NearLimit != 2 || p.Refused["port-limit"] != 9 || fmt.Sprint(p.Lines) != "map[at_most:9 extra:9 size:9]" || p.Taken != 171 {
		t.Errorf("pool %+v", p)
	}
	sample, err := SampleEngine(b.gateway)
	if err != nil || len(sample.Pools) != 1 || len(sample.Addresses) != 2 {
		t.Fatalf("sample %+v, %v", sample, err)
	}
	if p := sample.Pools[0]; p.BlocksUsed != 4 || p.BlocksFree != 92 || sample.Sessions != facts.Sessions || sample.SessionsMax != facts.SessionsMax || sample.MappingsMax != facts.MappingsMax {
		t.Errorf("sample %+v, facts %+v", sample, facts)
	}
	if a, of := sample.Addresses[0], sample.Addresses[1]; a.Given != 3072 || a.FreeUDP+of.FreeUDP != 2*3072-171 {
		t.Errorf("sample's addresses %+v", sample.Addresses)
	}
	if i := len(facts.Classes); i != 2 || facts.Classes[0].Name != "business" || facts.Classes[0].Lines["ports"] != 16 || facts.Classes[1].Lines["sessions"] != 13 {
		t.Errorf("classes %+v", facts.Classes)
	}

	var text strings.Builder
	if err := newMetrics(b.gateway, nil, newPortControl(b.gateway)).collect().Write(&text); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`natkit_subscribers{pool="cgn"} 3`, `natkit_subscribers_near_limit{pool="cgn"} 2`, `natkit_subscribers_limit 256`, `natkit_pool_blocks{pool="cgn",state="used"} 4`, `natkit_pool_blocks{pool="cgn",state="free"} 92`,
		`natkit_pool_addresses{pool="cgn",state="in use"} 2`, `natkit_pool_refused_packets{pool="cgn",reason="port-limit"} 21`,
	} {
		if !strings.Contains(text.String(), line+"\n") {
			t.Errorf("metrics lack %s", line)
		}
	}
}

// A gateway that masquerades has subscribers too: internal hosts. Their ports are not counted.
func TestSubscribersMasquerade(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.flows("10.0.0.9", 2000, 2)
	s, err := ReadSubscribers(b.gateway, SubscriberOptions{By: "share"})
	if err != nil || len(s.Rows) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	if r := s.Rows[0]; r.Pool != "out" || r.External.String() != "198.51.100.1" || r.Sessions != 2 || r.Ports != nil || r.HoldDown != nil || r.BlockLimit != 0 {
		t.Errorf("%+v", r)
	}
	// The kernel counts none.
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	o := b.options()
	o.Engine = EngineNFT
	b.up(baseRules, o)
	if _, err := ReadSubscribers(b.gateway, SubscriberOptions{}); err == nil || !strings.Contains(err.Error(), "engine nft counts no subscribers") {
		t.Error(err)
	}
}

// What rules send to a host, and what it opens from the address of a map, has the host's limits for itself.
func TestSubscribersPublished(t *testing.T) {
	b := newTestbed(t)
	b.up(strings.Replace(baseRules, "sources: 256", "sources: 256, sessions_per_source: 3", 1), b.options())
	b.echo(b.client, "10.0.0.2:80")
	for range 3 {
		b.ask(b.server, "198.51.100.1:8080")
	}
	b.in(b.server, func() error {
		conn, err := net.DialTimeout("tcp4", "198.51.100.1:8080", time.Second) // refused: the answer is an ICMP error
		if err == nil {
			conn.Close()
			t.Error("a fourth connection was let in")
		}
		return nil
	})
	b.flows("10.0.0.77", 2000, 3)
	b.flows("10.0.0.2", 2000, 3) // its own are not touched
	s, err := ReadSubscribers(b.gateway, SubscriberOptions{By: "refused"})
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, r := range s.Rows {
		rows = append(rows, fmt.Sprintf("%s %s %d/%d %v %v", r.Of, r.Pool, r.Sessions, r.SessionLimit, r.External.IsValid(), r.Refused["source-limit"] > 0))
	}
	want := []string{"10.0.0.2/32 (published) 3/3 false true", "10.0.0.2/32 out 3/3 true false", "10.0.0.77/32 (map) 3/3 false false"}
	if !slices.Equal(rows, want) {
		t.Errorf("%q, want %q", rows, want)
	}
	for _, pool := range []string{OfPublished, OfMap} {
		if s, err := ReadSubscribers(b.gateway, SubscriberOptions{Pool: pool}); err != nil || s.Count != 1 {
			t.Errorf("%s: %+v, %v", pool, s, err)
		}
	}
}
