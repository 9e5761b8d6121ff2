// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// What an engine that is up can't become is said by a dry run as well, with what differs.
func TestApplyOtherLimits(t *testing.T) {
	b := newTestbed(t)
	o := Options{Namespace: b.gateway, Attach: AttachTC}
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); err != nil {
		t.Fatal(err)
	}
	wider := strings.Replace(baseRules, "sessions: 4096", "sessions: 5000", 1)
	_, planned := PlanApply(b.parse(wider), wider, o)
	_, applied := Apply(t.Context(), b.parse(wider), wider, o)
	for what, err := range map[string]error{"dry run": planned, "apply": applied} {
		if err == nil || !strings.Contains(err.Error(), "5000 instead of 4096 sessions") || strings.Contains(err.Error(), "sources") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := PlanApply(b.parse(baseRules), baseRules, o); err != nil {
		t.Errorf("dry run of the same: %v", err)
	}
}

func TestUpInterfaceMissing(t *testing.T) {
	b := newTestbed(t)
	text := strings.Replace(baseRules, "outside: [out]", "outside: [out, gone]", 1)
	_, err := Up(t.Context(), b.parse(text), text, Options{Namespace: b.gateway})
	if err == nil || !strings.HasSuffix(err.Error(), `:3:16: interface "gone" is not there`) {
		t.Errorf("up: %v", err)
	}
	// nftables knows interfaces by name; but the name may be wrong.
	p := b.up(text, Options{Namespace: b.gateway, Engine: EngineNFT})
	s, err := ReadStatus(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	for what, reported := range map[string][]string{"interface gone is not there": p.Warnings, "interface gone is gone": s.Problems} {
		if !slices.ContainsFunc(reported, func(w string) bool { return strings.HasPrefix(w, what) }) {
			t.Errorf("no %q in %q", what, reported)
		}
	}
}

// Chains by which the kernel translates too are reported: of connections that they send
// inside, the engine sees the answers only.
func TestKernelNATIsTold(t *testing.T) {
	chains := []snapshot.Chain{
		{Family: "ip", Table: "nat", Name: "DOCKER", NATRules: map[string]int{"dnat": 2, "redirect": 1}},
		{Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", NATRules: map[string]int{"masquerade": 4}},
		{Family: "ip6", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", NATRules: map[string]int{"masquerade": 4}},
		{Family: "ip", Table: "nat", Name: "OUTPUT", Hook: "output", Type: "nat"},
	}
	b := newTestbed(t)
	p, err := MakePlan(b.parse(baseRules), baseRules, Options{Namespace: b.gateway, Chains: chains})
	if err != nil {
		t.Fatal(err)
	}
	told := func(start string) bool {
		return slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.HasPrefix(w, start) })
	}
	if !told("chain ip nat/DOCKER has 3 rules by which the kernel sends connections") ||
		!told("chain ip nat/POSTROUTING has 4 rules by which the kernel translates sources") ||
		told("chain ip6") || told("chain ip nat/OUTPUT") || len(p.Bypassed) != 0 {
		t.Errorf("warnings %q, bypassed %v", p.Warnings, p.Bypassed)
	}
}

// One XDP program of somebody else is reported by its name before anything is done; filters of
// others that would see nothing any more are refused as all that is gone past.
func TestForeignPrograms(t *testing.T) {
	b := newTestbed(t)
	before := b.state()
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "theirs", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	xdp := func(fd int) {
		b.in(b.gateway, func() error {
			out, err := netlink.LinkByName("out")
			return errors.Join(err, netlink.LinkSetXdpFdWithFlags(out, fd, unix.XDP_FLAGS_DRV_MODE))
		})
	}
	xdp(pass.FD())
	o := b.options()
	o.Attach = AttachXDP
	_, err = Up(t.Context(), b.parse(baseRules), baseRules, o)
	for _, want := range []string{`:3:11: interface "out"`, `"theirs"`, "--attach tc"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %s in: %v", want, err)
		}
	}
	if after := b.state(); after != before {
		t.Errorf("after:\n%s\nbefore:\n%s", after, before)
	}
	xdp(-1)
	b.run("", "tc", "qdisc", "add", "dev", "in", "clsact")
	b.in(b.gateway, func() error {
		in, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		return netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: in.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 7, Protocol: unix.ETH_P_ALL},
			Fd:          b.classifier(), Name: "police", DirectAction: true,
		})
	})
	chains := []snapshot.Chain{{Family: "netdev", Table: "early", Name: "in", Hook: "ingress", Rules: 2, Devices: []string{"in"}}}
	o = b.options()
	o.Chains = chains
	_, err = Up(t.Context(), b.parse(baseRules), baseRules, o)
	for _, want := range []string{"chain netdev early/in: packets that natkit translates bypass its 2 rules", "tc filter bpf at ingress of in", "--bypass"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %s in: %v", want, err)
		}
	}
	// Its own programs are nobody else's.
	o.Bypass = true
	o.Attach = AttachXDP
	b.up(baseRules, o)
	if p, err := Apply(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway, Chains: chains}); err != nil || len(p.Bypassed) != 2 || !p.Placements[0].XDP {
		t.Errorf("apply of the same: %+v, %v", p, err)
	}
}

// classifier loads a program for tc that lets everything go on.
func (b *testbed) classifier() int {
	b.t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { p.Close() })
	return p.FD()
}

// A record that somebody has damaged is reported with what helps, and is in nobody's way
// other namespaces; down takes down what is there.
func TestDamagedRecord(t *testing.T) {
	b := newTestbed(t)
	before := b.state()
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		o := Options{Namespace: b.gateway, Engine: engine}
		if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(instancePath(b.gateway.Inode(), ".json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadStatus(b.gateway); !errors.Is(err, errRecord) || !strings.Contains(err.Error(), "natkit down") {
			t.Errorf("%s: status: %v", engine, err)
		}
		if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); !errors.Is(err, errRecord) {
			t.Errorf("%s: up: %v", engine, err)
		}
		if removed, err := Clean(); err != nil || removed != 0 {
			t.Errorf("%s: clean removed %d, %v", engine, removed, err)
		}
		if _, err := Down(b.gateway); err != nil {
			t.Errorf("%s: down: %v", engine, err)
		}
		if after := b.state(); after != before {
			t.Errorf("%s: after down:\n%s\nbefore up:\n%s", engine, after, before)
		}
		if there, err := nft.RulesThere(b.gateway); err != nil || there {
			t.Errorf("%s: table natkit is there: %t, %v", engine, there, err)
		}
	}
}

func TestDamagedJournal(t *testing.T) {
	b := newTestbed(t)
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err != nil {
		t.Fatal(err)
	}
	path := instancePath(b.gateway.Inode(), ".journal")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("no entry\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Down(b.gateway); err == nil || !strings.Contains(err.Error(), "without the file `natkit down`") {
		t.Errorf("down: %v", err)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A namespace that forwards only while natkit is up lets no packet out as it came in: not
// while an engine comes or goes either.
func TestNothingLeavesUntranslated(t *testing.T) {
	b := newTestbed(t)
	forward := func(value string) {
		b.in(b.gateway, func() error { return writeSetting(settingForward, value) })
	}
	var server, client net.PacketConn
	b.in(b.server, func() (err error) { server, err = net.ListenPacket("udp4", "198.51.100.9:53"); return err })
	b.in(b.client, func() (err error) { client, err = net.ListenPacket("udp4", "10.0.0.2:5353"); return err })
	var seen [2]atomic.Int64 // packets that were translated, and that were not
	var ends sync.WaitGroup
	ends.Go(func() {
		for buf := make([]byte, 100); ; {
			_, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			seen[strings.Count(from.String(), "10.0.0.2:")].Add(1)
		}
	})
	ends.Go(func() {
		to := &net.UDPAddr{IP: net.IPv4(198, 51, 100, 9), Port: 53}
		for {
			if _, err := client.WriteTo([]byte("x"), to); errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(100 * time.Microsecond)
		}
	})
	defer ends.Wait()
	defer func() { client.Close(); server.Close() }()

	forward("1")
	ktest.Wait(t, time.Minute, "a packet that nobody translates", func() bool { return seen[1].Load() > 0 })
	forward("0")
	ktest.Wait(t, time.Minute, "the last of them to arrive", func() bool {
		before := seen[1].Load()
		time.Sleep(50 * time.Millisecond)
		return seen[1].Load() == before
	})
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		for range 3 {
			seen[0].Store(0)
			seen[1].Store(0)
			b.up(baseRules, Options{Namespace: b.gateway, Engine: engine})
			ktest.Wait(t, time.Minute, "a packet that is translated", func() bool { return seen[0].Load() > 0 })
			if engine == EngineEBPF { // a down that was killed on its way, and an apply after it
				forward("0")
				b.detach()
				seen[0].Store(0)
				if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err != nil {
					t.Fatal(err)
				}
				ktest.Wait(t, time.Minute, "a packet that is translated after the apply", func() bool { return seen[0].Load() > 0 })
			}
			if _, err := Down(b.gateway); err != nil {
				t.Fatal(err)
			}
			if n := seen[1].Load(); n > 0 {
				t.Errorf("%s: %d packets left untranslated", engine, n)
			}
		}
	}
}

// detach takes the engine off all interfaces.
func (b *testbed) detach() {
	b.t.Helper()
	e, err := Open(b.gateway)
	if err != nil {
		b.t.Fatal(err)
	}
	defer e.Close()
	b.in(b.gateway, func() error { return e.DetachOthers(nil) })
}

// A network that is on both sides is named when the engine comes up and when the address
// comes later, by a lease.
func TestOverlappingNetworks(t *testing.T) {
	b := newTestbed(t)
	const both = "the network 10.0.0.0/24 is inside and 10.0.0.0/16 outside"
	names := func(list []string) bool {
		return slices.ContainsFunc(list, func(s string) bool { return strings.HasPrefix(s, both) })
	}
	problems := func() []string {
		s, err := ReadStatus(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		return s.Problems
	}
	if p := b.up(baseRules, b.options()); names(p.Warnings) || names(problems()) {
		t.Errorf("without one: warnings %q, problems %q", p.Warnings, problems())
	}
	b.in(b.gateway, func() error {
		out, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(out, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, 200, 1), Mask: net.CIDRMask(16, 32)}})
	})
	if !names(problems()) {
		t.Errorf("problems %q", problems())
	}
	p, err := PlanApply(b.parse(baseRules), baseRules, b.options())
	if err != nil || !names(p.Warnings) {
		t.Errorf("plan %+v, %v", p, err)
	}
}

// What a file may say and hardly means is said before it happens; what would cut the
// machine off is refused.
func TestCautions(t *testing.T) {
	b := newTestbed(t)
	plan := func(rules string) (string, error) {
		text := "inside: [in]\noutside: [out]\nlimits: {sessions: 4096, sources: 256}\n" + rules
		p, err := MakePlan(b.parse(text), text, b.options())
		if err != nil {
			return "", err
		}
		return strings.Join(p.Warnings, "\n"), nil
	}
	for _, tt := range []struct{ rules, warns string }{
		{"rules:\n  - masquerade: any\n  - map: 10.0.0.9 <-> 198.51.100.1\n", "test.yaml:6:5: 198.51.100.1 is the gateway's own: connections to itself there, and answers to its own, go to a host inside; hosts that are masqueraded"},
		{"rules:\n  - dnat: 198.51.100.1\n    to: 10.0.0.9\n", "test.yaml:5:5: 198.51.100.1 is the gateway's own"},
		{"rules:\n  - dnat: tcp 198.51.100.1:80\n    to: 10.0.0.1:80\n", "test.yaml:5:5: target 10.0.0.1 is the gateway itself"},
		{"rules:\n  - dnat: tcp 198.51.100.1:80\n    to: 10.0.0.9:80\n", ""},
		{"rules:\n  - map: 10.0.0.1 <-> 198.51.100.20\n", "test.yaml:5:5: 10.0.0.1 is the gateway itself"},
		{"rules:\n  - map: 10.0.0.0/28 <-> 198.51.100.32/28\n", ""},
		{"pools:\n  a: {addresses: 198.51.100.240/28}\nrules:\n  - {snat: any, to: a}\n", "external addresses 198.51.100.255 are the first or last"},
		{"pools:\n  a: {addresses: 198.51.100.240-198.51.100.254}\nrules:\n  - {snat: any, to: a}\n", ""},
	} {
		if warnings, err := plan(tt.rules); err != nil || tt.warns == "" && warnings != "" || !strings.Contains(warnings, tt.warns) {
			t.Errorf("%s: warnings %q, %v; want %q", tt.rules, warnings, err, tt.warns)
		}
	}

	b.in(b.gateway, func() error {
		out, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		host := &netlink.Neigh{LinkIndex: out.Attrs().Index, IP: net.IPv4(198, 51, 100, 17), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 17}, State: netlink.NUD_PERMANENT}
		route := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}, Gw: net.IPv4(198, 51, 100, 33)}
		return errors.Join(netlink.NeighSet(host), netlink.RouteAdd(route))
	})
	before := b.state()
	if warnings, err := plan("rules:\n  - snat: any\n    to: 198.51.100.17\n"); err != nil || !strings.Contains(warnings, "198.51.100.17 (02:00:00:00:00:11 on out)") {
		t.Errorf("another host's: %q, %v", warnings, err)
	}
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		text := "inside: [in]\noutside: [out]\npools:\n  a: {addresses: 198.51.100.32/28}\nrules:\n  - {snat: any, to: a}\n"
		_, err := Up(t.Context(), b.parse(text), text, Options{Namespace: b.gateway, Engine: engine})
		if err == nil || !strings.Contains(err.Error(), "198.51.100.33 is the next hop of a route") {
			t.Errorf("%s: the next hop as external address: %v", engine, err)
		}
	}
	if after := b.state(); after != before {
		t.Errorf("after refusals:\n%s\nbefore:\n%s", after, before)
	}
}

// What is done for each address of a pool is one line, not two for each.
func TestChangesText(t *testing.T) {
	b := newTestbed(t)
	text := "inside: [in]\noutside: [out]\nlimits: {sessions: 4096, sources: 256}\npools:\n  a: {addresses: 198.51.100.32/27}\nrules:\n  - {snat: any, to: a}\n"
	p, err := MakePlan(b.parse(text), text, b.options())
	if err != nil {
		t.Fatal(err)
	}
	got := ChangesText(p.Changes)
	if len(p.Changes) < 64 || len(got) > 4 || !slices.ContainsFunc(got, func(l string) bool {
		return strings.HasPrefix(l, "answer ARP for 198.51.100.32, 198.51.100.33, 198.51.100.34, 198.51.100.35, 198.51.100.36 and 27 more on out: ")
	}) {
		t.Errorf("%d changes: %q", len(p.Changes), got)
	}
}

// Flows that the kernel tracked before there were rules for them are translated as well,
// while they go on; those of before that no rule is about are left alone.
func TestFlowsOfBefore(t *testing.T) {
	b := newTestbed(t)
	b.in(b.gateway, func() error { return writeSetting(settingForward, "1") })
	b.nft("table ip track { chain c { type filter hook prerouting priority 0; ct state new accept; }; }")
	sockets := map[string]net.PacketConn{}
	for at, ns := range map[string]*netns.Handle{
		"10.0.0.2:80": b.client, "10.0.0.2:5353": b.client, "198.51.100.9:53": b.server, "198.51.100.9:6000": b.server, "198.51.100.1:123": b.gateway,
	} {
		b.in(ns, bound(func() (err error) { sockets[at], err = net.ListenPacket("udp4", at); return err }))
		defer sockets[at].Close()
	}
	send := func(from, to string) {
		sockets[from].WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	}
	sees := func(at, want string) bool {
		sockets[at].SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		_, from, err := sockets[at].ReadFrom(make([]byte, 10))
		return err == nil && from.String() == want
	}
	flows := func() {
		send("10.0.0.2:5353", "198.51.100.9:53")
		send("198.51.100.9:6000", "198.51.100.1:8053")
		send("198.51.100.9:6000", "198.51.100.1:123")
	}
	for what, want := range map[string][2]string{"out": {"198.51.100.9:53", "10.0.0.2:5353"}, "gateway": {"198.51.100.1:123", "198.51.100.9:6000"}} {
		ktest.Wait(t, time.Minute, what+" without rules", func() bool { flows(); return sees(want[0], want[1]) })
	}
	own := func() (id uint32) {
		b.in(b.gateway, func() error {
			_, err := conntrack.Dump(t.Context(), conntrack.Filter{Proto: unix.IPPROTO_UDP}, func(f *conntrack.Flow) error {
				if f.Orig.DstPort == 123 {
					id = f.ID
				}
				return nil
			})
			return err
		})
		return id
	}
	before := own()

	b.up(`
inside: [in]
outside: [out]
rules:
  - masquerade: 10.0.0.0/24
`, Options{Namespace: b.gateway, Engine: EngineNFT})
	ktest.Wait(t, time.Minute, "the flow out translated", func() bool { flows(); return sees("198.51.100.9:53", "198.51.100.1:5353") })
	text := `
inside: [in]
outside: [out]
rules:
  - masquerade: 10.0.0.0/24
  - dnat: udp 198.51.100.1:8053
    to: 10.0.0.2:80
`
	if _, err := Apply(t.Context(), b.parse(text), text, Options{Namespace: b.gateway}); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, time.Minute, "the flow in translated", func() bool { flows(); return sees("10.0.0.2:80", "198.51.100.9:6000") })
	if after := own(); before == 0 || after != before {
		t.Errorf("the gateway's own flow was %d and is %d", before, after)
	}
}

// The kernel finds an interface by an alternative name too, by which no packet is known.
func TestAlternativeName(t *testing.T) {
	b := newTestbed(t)
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("in")
		return errors.Join(err, netlink.LinkAddAltName(l, "lan0"))
	})
	before := b.state()
	text := strings.Replace(baseRules, "[in]", "[lan0]", 1)
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		for _, wait := range []bool{false, true} {
			_, err := Up(t.Context(), b.parse(text), text, Options{Namespace: b.gateway, Engine: engine, Wait: wait})
			if err == nil || !strings.HasSuffix(err.Error(), `:2:10: "lan0" is an alternative name of interface "in": use that`) {
				t.Errorf("engine %s: %v", engine, err)
			}
		}
	}
	if _, err := PlanAccel(AccelOptions{Namespace: b.gateway, Interfaces: []string{"in", "lan0"}}); err == nil || !strings.Contains(err.Error(), `interface "in"`) {
		t.Errorf("accel: %v", err)
	}
	if after := b.state(); after != before {
		t.Errorf("after:\n%s\nbefore:\n%s", after, before)
	}
}

// refusing is the kernel's NAT where the kernel does not take the rules.
type refusing struct{ nftRunning }

func (refusing) replace(context.Context, *Plan) error { return errors.New("refused") }

// Rules that the kernel refuses are not taken for those of an apply that was killed.
func TestApplyRefusedByKernel(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	b.up(baseRules, o)
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := in.record()
	if err != nil {
		t.Fatal(err)
	}
	text := baseRules + "  - map: 10.0.0.78 <-> 198.51.100.78\n"
	_, err = in.apply(t.Context(), rec, b.parse(text), text, o, refusing{nftRunning{b.gateway}})
	if err == nil || err.Error() != "refused" {
		t.Errorf("apply: %v", err)
	}
	if err := in.release(); err != nil {
		t.Fatal(err)
	}
	if s, err := ReadStatus(b.gateway); err != nil || len(s.Problems) > 0 {
		t.Errorf("problems %q, %v", s.Problems, err)
	}
	if rules, err := Rules(b.gateway); err != nil || len(rules) != len(b.parse(baseRules).Rules) {
		t.Errorf("rules %v, %v", rules, err)
	}
}

// detaching is engine ebpf where what comes after the rules fails.
type detaching struct{ *ebpfRunning }

func (e detaching) replace(ctx context.Context, p *Plan) error {
	return errors.Join(e.ebpfRunning.replace(ctx, p), errors.New("not detached"))
}

// What fails once the rules are in force takes back nothing that they need.
func TestApplyFailsAfterRules(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	rec, err1 := in.record()
	e, err2 := ebpfEngine{}.open(b.gateway)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	text := baseRules + "  - map: 10.0.0.78 <-> 198.51.100.78\n"
	_, err = in.apply(t.Context(), rec, b.parse(text), text, b.options(), detaching{e.(*ebpfRunning)})
	if err == nil || err.Error() != "not detached" {
		t.Errorf("apply: %v", err)
	}
	if err := errors.Join(e.Close(), in.release()); err != nil {
		t.Fatal(err)
	}
	rules, err := Rules(b.gateway)
	var proxies []datapath.ProxyNeighbour
	b.in(b.gateway, func() (err error) { proxies, err = proxied(); return err })
	if err != nil || len(rules) != 4 || len(proxies) != 2 {
		t.Errorf("rules %v, %v; ARP is answered for %v", rules, err, proxies)
	}
}

// Who is refused because of a natkit serve is told whose it is, or that it has just begun, or which file is damaged.
func TestServedErrors(t *testing.T) {
	b := newTestbed(t)
	inode := b.gateway.Inode()
	s, err := holdServing(inode)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.release() })
	refused := func(want ...string) {
		t.Helper()
		err := refuseServed(b.gateway, nil)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("error %v, want %q", err, w)
			}
		}
	}
	refused("just been started")
	if err := s.say(ServeState{Process: 7, File: "/etc/nat.yaml"}); err != nil {
		t.Fatal(err)
	}
	refused("process 7", "/etc/nat.yaml")
	path := instancePath(inode, ".serve.json")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused(path)
}
