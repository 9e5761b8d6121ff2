// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// What user space reads of subscribers is what packets made: sessions, ports with those in
// hold-down, blocks, refusals, class; with mappings and with ports of sessions alone.
func TestSubscribersRead(t *testing.T) {
	for _, mapping := range []rulefile.MappingMode{rulefile.EndpointIndependent, rulefile.AddressAndPortDependent} {
		t.Run(mapping.String(), func(t *testing.T) {
			r := aModelRig(t)
			r.seed(11)
			f := blockFile(rulefile.Blocks{Size: 128, Extra: 64, AtMost: 1}, 2)
			f.Defaults.Timeouts = rulefile.DefaultTimeouts()
			for class := range f.Defaults.Mapping {
				f.Defaults.Mapping[class] = mapping
			}
			f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Ports: 250}, Classes: []rulefile.SubscriberClass{
				{Name: "small", Of: []netip.Prefix{netip.MustParsePrefix("192.168.7.0/24")}, Share: rulefile.Share{Ports: 5}},
			}}
			r.forget(t, f)
			r.model = newModel(f, r.facts, r.route)
			began := time.Now()
			addresses := r.applied(t, f, nil)
			blocks := func() (sum BlockUse) {
				for i := range addresses {
					use, err := r.engine.BlockUse(&addresses[i])
					if err != nil {
						t.Fatal(err)
					}
					sum.Used, sum.Free = sum.Used+use.Used, sum.Free+use.Free
				}
				return sum
			}
			before := blocks()
			if want := 2 * (65536/128 - 1024/128); before.Free != want || before.Used != 0 {
				t.Errorf("blocks %+v; want %d free", before, want)
			}
			// One fills both blocks and is refused 8 ports, one meets its class's limit.
			greedy, small := netip.MustParseAddr("192.168.2.9"), netip.MustParseAddr("192.168.7.9")
			for i := range 200 {
				r.udp(t, netip.AddrPortFrom(greedy, uint16(2000+i)), 53)
			}
			for i := range 9 {
				r.udp(t, netip.AddrPortFrom(small, uint16(2000+i)), 53)
			}
			read := func() map[netip.Addr]Subscriber {
				t.Helper()
				out := map[netip.Addr]Subscriber{}
				if err := r.engine.Subscribers(func(s *Subscriber) bool { out[s.Addr] = *s; return true }); err != nil {
					t.Fatal(err)
				}
				return out
			}
			line := func(s Subscriber) string {
				ports := 0
				for _, b := range s.Blocks {
					ports += b.Ports.Count()
					if b.Address != s.External || int(b.Ports.First)%b.Ports.Count() != 0 {
						t.Errorf("block %v of %v", b, s)
					}
				}
				held, err := r.engine.HoldDown([]Subscriber{s})
				if err != nil {
					t.Fatal(err)
				}
				want := [4]uint32{abiNatRefusalNAT_REFUSED_PORTS: map[netip.Addr]uint32{greedy: 8, small: 4}[s.Addr]}
				if s.Refused != want {
					t.Errorf("%v was refused %v, want %v", s.Addr, s.Refused, want)
				}
				return fmt.Sprintf("%d sessions, %d ports, %d in hold-down, %d blocks of %d ports, class %d", s.Sessions, s.Ports, held[0], len(s.Blocks), ports, s.Class)
			}
			have := read()
			for of, want := range map[netip.Addr]string{
				greedy: "192 sessions, 192 ports, 0 in hold-down, 2 blocks of 192 ports, class 0",
				small:  "5 sessions, 5 ports, 0 in hold-down, 1 blocks of 128 ports, class 1",
			} {
				if got := line(have[of]); got != want {
					t.Errorf("%v: %s; want %s", of, got, want)
				}
				if s := have[of]; s.Since.Before(began.Add(-time.Second)) || s.Since.After(time.Now().Add(time.Second)) || !s.External.IsValid() || s.Pool != addresses[0].Pool {
					t.Errorf("%+v", s)
				}
			}
			// The log reads the same, with the limits that it is to be compared with.
			log, err := r.engine.OpenLog()
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			uses := map[netip.Addr]SubscriberUse{}
			if err := log.Use(func(u SubscriberUse) { uses[u.Subscriber] = u }); err != nil {
				t.Fatal(err)
			}
			for of, want := range map[netip.Addr]SubscriberUse{
				greedy: {Ports: 192, MostPorts: 250, Blocks: 2, MostBlocks: 2}, small: {Ports: 5, MostPorts: 5, Blocks: 1, MostBlocks: 2},
			} {
				want.Subscriber, want.External, want.Pool = of, have[of].External, have[of].Pool
				if uses[of] != want {
					t.Errorf("use %+v, want %+v", uses[of], want)
				}
			}
			var all AddressUse
			if err := log.Addresses(func(u AddressUse) { all.Used, all.Total = all.Used+u.Used, all.Total+u.Total }); err != nil || all.Used != 320 || all.Total != 2*64512 {
				t.Errorf("%d of %d ports are in blocks (%v), want 320 of %d", all.Used, all.Total, err, 2*64512)
			}
			if use := blocks(); use.Used != 3 || use.Free != before.Free-3 {
				t.Errorf("blocks %+v; were %+v", use, before)
			}
			// All sessions end; their ports are in hold-down.
			changeFlows(t, r.maps, func(flow *abiNatFlow) { flow.Seen -= Ticks(time.Hour) })
			r.collects(t)
			ktest.Wait(t, time.Minute, "all sessions to end", func() bool { return read()[greedy].Sessions == 0 && read()[small].Sessions == 0 })
			have = read()
			if got, want := line(have[greedy]), "0 sessions, 192 ports, 192 in hold-down, 2 blocks of 192 ports, class 0"; got != want {
				t.Errorf("%s; want %s", got, want)
			}
			// Rules of a new generation: its class is looked up with its next session.
			r.applied(t, f, addresses)
			if s := read()[small]; s.Class != -1 {
				t.Errorf("class %d of a subscriber that has opened nothing by these rules", s.Class)
			}
		})
	}
}

// The bits at which a block may begin are those of bpf/nat/block.h, told by trying all.
func TestBlockStarts(t *testing.T) {
	for order := uint8(0); order <= 6; order++ {
		for _, free := range []uint64{0, ^uint64(0), 0xf0f0_ffff_0000_0ff0, 0xffff_ffff_ffff_fffe} {
			want := uint64(0)
			for at := 0; at < 64; at += 1 << order {
				ones := uint64(1)<<(1<<order) - 1
				if order == 6 {
					ones = ^uint64(0)
				}
				if free>>at&ones == ones {
					want |= 1 << at
				}
			}
			if got := blockStarts(free, order); got != want {
				t.Errorf("order %d of %#x: %#x, want %#x", order, free, got, want)
			}
		}
	}
}
