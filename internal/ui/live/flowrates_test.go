// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

func TestFlowMeter(t *testing.T) {
	flow := func(port uint16, packets, bytes uint64) *conntrack.Flow {
		return &conntrack.Flow{Proto: 17, Has: conntrack.HasCounters, Orig: conntrack.Tuple{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("192.0.2.1"), SrcPort: port, DstPort: 53},
			OrigCounters: conntrack.Counters{Packets: packets, Bytes: bytes}}
	}
	var m flowMeter
	at := time.Unix(1000, 0)
	read := func(flows ...*conntrack.Flow) []FlowRate {
		m.begin()
		for _, f := range flows {
			m.add(f)
		}
		at = at.Add(10 * time.Second)
		return busiest(m.rates(at))
	}
	if got := read(flow(1, 100, 1000), flow(2, 5, 500), flow(3, 9, 900)); len(got) != 0 {
		t.Errorf("after one reading: %+v", got)
	}
	// 1 goes on, 2 stands still, 3 is another of the same ports, 4 is new.
	got := read(flow(1, 120, 3000), flow(2, 5, 500), flow(3, 1, 100), flow(4, 30, 9000))
	if len(got) != 3 || got[0].Source.Port() != 4 || got[0].BytesPerSecond != 900 || got[1].Source.Port() != 1 || got[1].PacketsPerSecond != 2 || got[1].BytesPerSecond != 200 || got[2].BytesPerSecond != 10 {
		t.Errorf("%+v", got)
	}
	// What was not read for want of room is not new.
	m.wasCut = true
	if got := read(flow(1, 121, 3100), flow(9, 1e6, 1e9)); len(got) != 1 || got[0].Source.Port() != 1 {
		t.Errorf("after a reading that was cut: %+v", got)
	}
	// A window without a reading changes nothing.
	m.begin()
	if got := read(flow(1, 122, 3200)); len(got) != 1 || got[0].BytesPerSecond != 10 {
		t.Errorf("after no reading: %+v", got)
	}
}

// The rates of a flow where the kernel counts, and how to have it count where it does not.
func TestTopFlows(t *testing.T) {
	ktest.Root(t)
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t), Owned: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Down()
	gateway := l.NATNode().Handle()
	watch := func(what string, is func(*Judged) bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		seen := errors.New("seen")
		var last *Judged
		err := Watch(ctx, Options{Netns: gateway, Interval: 100 * time.Millisecond, Window: 200 * time.Millisecond, Dump: true}, func(m *Moment) error {
			if err := l.Node("client").Do(func() error {
				c, err := net.DialUDP("udp4", &net.UDPAddr{Port: 4444}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.ServerNode().Addr, 9)))
				if err != nil {
					return err
				}
				_, _ = c.Write(make([]byte, 1000)) // nobody listens
				return c.Close()
			}); err != nil {
				return err
			}
			if last = m.Judged; last != nil && is(last) {
				return seen
			}
			return nil
		})
		if !errors.Is(err, seen) {
			t.Fatalf("%s: %v; last %+v", what, err, last)
		}
	}
	accounting := func(value string) {
		t.Helper()
		if err := l.NATNode().Sysctl("net.netfilter.nf_conntrack_acct", value); err != nil {
			t.Fatal(err)
		}
	}
	accounting("0")
	watch("without accounting", func(j *Judged) bool { return j.FlowsNote == NoAccounting && len(j.TopFlows) == 0 })
	accounting("1")
	if err := l.NATNode().Do(func() error { return conntrack.Flush(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	watch("with accounting", func(j *Judged) bool {
		for _, f := range j.TopFlows {
			if f.Protocol == "udp" && f.Source.Port() == 4444 && f.Destination.Addr() == l.ServerNode().Addr && f.PacketsPerSecond > 0 && f.BytesPerSecond > 1000*f.PacketsPerSecond/2 {
				return true
			}
		}
		return false
	})
}
