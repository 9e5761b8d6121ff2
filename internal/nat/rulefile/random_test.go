// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// pick takes one.
func pick[T any](rng *rand.Rand, choices ...T) T { return choices[rng.IntN(len(choices))] }

// randomPerClass sets all, none or some.
func randomPerClass[T ~uint8](rng *rand.Rand, most int) (modes PerClass[T]) {
	switch rng.IntN(4) {
	case 0:
		m := T(1 + rng.IntN(most))
		return PerClass[T]{m, m, m}
	case 1:
		for i := range modes {
			modes[i] = T(rng.IntN(most + 1))
		}
	}
	return modes
}

func randomPorts(rng *rand.Rand) PortRange {
	first := 1 + rng.IntN(65000)
	return PortRange{uint16(first), uint16(first + pick(rng, 0, 0, 1, 99))}
}

// randomFile has whatever a rule file can have; not all of it fits together.
func randomFile(rng *rand.Rand) *File {
	f := New()
	f.Name = "random"
	f.Inside = pick(rng, []string{"eth1"}, []string{"eth1", "no", `a"b\`}, []string{"10", "br-é", "*x"})
	f.Outside = pick(rng, []string{"eth0"}, []string{"eth0", "null", "1e3"})
	f.Inside[0], f.Outside[0] = "eth1", "eth0"
	link := func(names []string) string { return pick(rng, "", "", pick(rng, names...)) }
	host := func(net byte) netip.Addr {
		return netip.AddrFrom4([4]byte{net, byte(rng.IntN(250)), byte(rng.IntN(256)), byte(rng.IntN(256))})
	}
	prefix := func(net byte) netip.Prefix {
		return pick(rng, Everywhere, netip.PrefixFrom(host(net), 8+rng.IntN(25)).Masked(), netip.PrefixFrom(host(net), 32))
	}
	for i := range rng.IntN(4) {
		p := Pool{Name: pick(rng, "true", "office", "no-one", "x_1") + string(rune('a'+i)), Silent: rng.IntN(3) == 0, OneToOne: rng.IntN(3) == 0}
		if !p.OneToOne && rng.IntN(2) == 0 {
			p.Ports = randomPorts(rng)
		} else if !p.OneToOne && rng.IntN(2) == 0 {
			p.Blocks = Blocks{Size: pick(rng, 64, 512), Extra: pick(rng, 64, 4096), AtMost: rng.IntN(8), Deterministic: pick(rng, DeterministicNone, DeterministicNone, DeterministicFirst, DeterministicAll)}
		}
		first := netip.AddrFrom4([4]byte{100, byte(64 + i), 0, byte(rng.IntN(100))})
		p.Addresses = []AddressRange{{first, first}, {netip.AddrFrom4([4]byte{100, byte(64 + i), 1, 7}), netip.AddrFrom4([4]byte{100, byte(64 + i), 1, byte(7 + rng.IntN(99))})}}
		p.Drain = pick(rng, nil, nil, p.Addresses[:1])
		f.Pools = append(f.Pools, p)
	}
	slices.SortFunc(f.Pools, func(a, b Pool) int { return strings.Compare(a.Name, b.Name) })
	f.Defaults.InboundRefresh, f.Defaults.PortParity = rng.IntN(2) == 0, rng.IntN(2) == 0
	f.Defaults.MSS = pick(rng, MSSKeep, MSSClamp)
	if modes := randomPerClass[FilteringMode](rng, 3); modes[0] > 0 && modes[1] > 0 && modes[2] > 0 {
		f.Defaults.Filtering = modes
	}
	for i := range f.Defaults.Timeouts {
		if rng.IntN(3) == 0 {
			f.Defaults.Timeouts[i] = time.Second + time.Duration(rng.Int64N(int64(time.Hour)))
		}
	}
	if rng.IntN(2) == 0 {
		f.Limits = Limits{1 + rng.IntN(MaxSessions), rng.IntN(2), 1 + rng.IntN(1000), rng.IntN(10), rng.IntN(1000)}
	}
	if rng.IntN(3) == 0 {
		f.Limits.SessionsPerSource = 0
		share := func() Share {
			s := Share{Ports: rng.IntN(3), Sessions: rng.IntN(3), NewPerSecond: rng.IntN(3)}
			s.Burst = s.NewPerSecond * (1 + rng.IntN(2))
			return s
		}
		f.Subscribers = Subscribers{Prefix: 24 + rng.IntN(9), Default: share()}
		for i := range rng.IntN(3) {
			of := []netip.Prefix{netip.PrefixFrom(host(byte(20+i)), 8+rng.IntN(17)).Masked()}
			f.Subscribers.Classes = append(f.Subscribers.Classes, SubscriberClass{Name: string(rune('a' + i)), Of: of, Share: share()})
		}
	}
	if rng.IntN(3) == 0 {
		f.Log = Log{On: true, Record: pick(rng, LogDefault, LogMappings, LogSessions), Folder: pick(rng, "", "/var/log/nat: 1"), Age: pick(rng, 0, 12*time.Hour, 48*time.Hour), Bytes: pick(rng, 0, int64(5<<20), int64(3<<40))}
		f.Log.Destinations = f.Log.Record == LogSessions && rng.IntN(2) == 0
		if rng.IntN(2) == 0 {
			f.Log.Sinks = []string{"syslog+tls://192.0.2.1:6514?interim=all", "ipfix+udp://[2001:db8::1]:4739"}
		}
	}
	for range rng.IntN(8) {
		r := Rule{MSS: pick(rng, MSSMode(0), MSSKeep, MSSClamp)}
		switch rng.IntN(5) {
		case 0:
			r.Action = Masquerade{Source: prefix(10)}
			r.In, r.Out = link(f.Inside), link(f.Outside)
		case 1:
			a := SNAT{Source: prefix(10)}
			if len(f.Pools) > 0 && rng.IntN(2) == 0 {
				a.Pool = pick(rng, f.Pools...).Name
			} else {
				a.Address, r.Silent = host(198), rng.IntN(2) == 0
				if rng.IntN(2) == 0 {
					a.Ports = randomPorts(rng)
				}
			}
			r.Action = a
			r.In, r.Out = link(f.Inside), link(f.Outside)
			r.Mapping, r.Filtering = randomPerClass[MappingMode](rng, 2), randomPerClass[FilteringMode](rng, 3)
		case 2:
			a := DNAT{Protocol: pick(rng, TCP, UDP, UDPLite), Address: host(203), Ports: randomPorts(rng)}
			t := Target{Address: host(10), Ports: pick(rng, a.Ports, PortRange{})}
			a.Targets = append(a.Targets, t)
			if t.Address = host(11); rng.IntN(2) == 0 {
				a.Targets = append(a.Targets, t)
			}
			if rng.IntN(2) == 0 {
				for range a.Targets {
					a.Weights = append(a.Weights, 1+rng.IntN(maxWeight))
				}
			}
			if rng.IntN(3) == 0 {
				a = DNAT{Protocol: pick(rng, AnyProtocol, GRE, Protocol(200)), Address: host(203), Targets: []Target{{Address: host(10)}}}
			}
			r.Action, r.In, r.Silent = a, link(append(f.Inside, f.Outside...)), rng.IntN(3) == 0
		case 3:
			bits := 8 + rng.IntN(25)
			r.Action = Map{netip.PrefixFrom(host(10), bits).Masked(), netip.PrefixFrom(host(192), bits).Masked(), rng.IntN(2) == 0}
			r.In, r.Out, r.Silent = link(f.Inside), link(f.Outside), rng.IntN(3) == 0
		case 4:
			a := Exclude{Source: prefix(10), Destination: prefix(10)}
			if a.Protocol = pick(rng, AnyProtocol, ICMP, TCP); a.Protocol == TCP {
				a.Ports = randomPorts(rng)
			}
			r = Rule{Action: a}
		}
		f.Rules = append(f.Rules, r)
	}
	return f
}

// What is written is read as the same.
func TestTextIsReadBack(t *testing.T) {
	read := 0
	for seed := range uint64(3000) {
		f := randomFile(rand.New(rand.NewPCG(seed, 0)))
		text := f.Text()
		got, err := Parse("random", []byte(text))
		if err != nil {
			if f.Validate() == nil {
				t.Fatalf("seed %d: %v\n%s", seed, err, text)
			}
			continue
		}
		read++
		if got = withoutPositions(got); len(got.Rules) == 0 {
			got.Rules = f.Rules
		}
		if !reflect.DeepEqual(got, f) {
			t.Fatalf("seed %d:\ngot  %+v\nwant %+v\n%s", seed, got, f, text)
		}
		if again := got.Text(); again != text {
			t.Fatalf("seed %d:\n%s\n%s", seed, text, again)
		}
	}
	if read < 1000 {
		t.Errorf("only %d of the random files were sound", read)
	}
}
