// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
	"natkit/internal/testutil/golden"
)

// A row is one machine: the healthy gateway with something done to it.
type row struct {
	name   string
	change func(s *snapshot.Snapshot)
	want   string // severity and code of the first finding, "" for none of any severity
}

func run(t *testing.T, rows []row) {
	t.Helper()
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			s := gateway()
			r.change(s)
			got := ""
			found := Judge(s)
			checkTitles(t, found)
			if len(found) > 0 {
				got = found[0].Severity.String() + " " + found[0].Code
			}
			if got != r.want {
				t.Errorf("first finding is %q, want %q", got, r.want)
			}
		})
	}
}

// gateway is a router with traffic and nothing wrong: eth1 inside, eth0 outside,
// masquerading, ten seconds of a normal day. Everything is known.
func gateway() *snapshot.Snapshot {
	return &snapshot.Snapshot{
		WindowSeconds: 10,
		Host:          snapshot.Host{Hostname: "gw", Kernel: "6.12.0", CPUs: 4, MemoryBytes: 8 << 30},
		Netns:         snapshot.Netns{Inode: 4026531840, Init: true},
		Conntrack: &snapshot.Conntrack{
			Count: 20000, CountStart: 19900, Max: 262144, Buckets: 262144,
			ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8, HostObjects: 21000,
			Stats: map[string]uint64{"drop": 0, "insert_failed": 0, "early_drop": 0, "chaintoolong": 0, "search_restart": 0, "invalid": 3, "found": 40},
			Table: &snapshot.Table{
				Entries: 20000, DumpSeconds: 0.03,
				ByProtocol: map[string]uint64{"tcp": 17000, "udp": 3000},
				ByState:    map[string]uint64{"ESTABLISHED": 6000, "TIME_WAIT": 10800, "SYN_SENT": 200},
				ByStatus:   map[string]uint64{"ASSURED": 18000, "UNREPLIED": 900, "SNAT": 19000},
				Sources: []snapshot.Talker{{Addr: addr("192.168.1.20"), Entries: 4000, Unreplied: 100},
					{Addr: addr("192.168.1.21"), Entries: 3000, Unreplied: 80}},
				Destinations: []snapshot.Talker{{Addr: addr("203.0.113.80"), Entries: 5000}},
				SNATPorts: []snapshot.SNATUse{{Protocol: "tcp", Outside: addr("198.51.100.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443")),
					Used: 5000, MinPort: 1031, MaxPort: 65530}},
			},
		},
		Sysctls: map[string]string{
			"net.ipv4.ip_forward":                                "1",
			"net.ipv4.conf.all.forwarding":                       "1",
			"net.ipv4.conf.eth0.forwarding":                      "1",
			"net.ipv4.conf.eth1.forwarding":                      "1",
			"net.ipv4.conf.all.rp_filter":                        "0",
			"net.ipv4.conf.eth0.rp_filter":                       "1",
			"net.ipv4.conf.eth1.rp_filter":                       "1",
			"net.core.somaxconn":                                 "4096",
			"net.netfilter.nf_conntrack_tcp_timeout_time_wait":   "120",
			"net.netfilter.nf_conntrack_tcp_timeout_established": "432000",
		},
		Counters: map[string]uint64{
			"Ip.InReceives": 2_000_000, "Ip.InAddrErrors": 0, "Ip.ForwDatagrams": 1_990_000, "Ip.OutRequests": 4000, "Ip.OutTransmits": 1_994_000,
			"Ip.FragFails": 1, "Tcp.PassiveOpens": 12, "TcpExt.ListenOverflows": 0, "TcpExt.IPReversePathFilter": 4, "TcpExt.TCPSynRetrans": 0,
		},
		Drops: &snapshot.Drops{Rows: []snapshot.Drop{
			{Count: 300, Location: "sk_stream_kill_queues+0x4f", Reason: "QUEUE_PURGE", Netns: 4026531840, Benign: true},
			{Count: 4, Location: "ip_rcv_finish_core+0x1c2", Reason: "IP_RPFILTER", Netns: 4026531840, Interface: "eth0", Cause: snapshot.CauseReversePath},
		}},
		Hooks: []snapshot.Hook{{Family: "ipv4", Hook: "prerouting", Priority: -200, Function: "ipv4_conntrack_in"}},
		Chains: []snapshot.Chain{
			{Backend: "nft", Family: "ip", Table: "nat", Name: "postrouting", Hook: "postrouting", Type: "nat", Priority: 100, Policy: "accept",
				Rules: 1, NATRules: map[string]int{"masquerade": 1}, SNATRanges: []snapshot.PortRange{{}}},
			{Backend: "nft", Family: "inet", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Policy: "accept", Rules: 2},
		},
		Interfaces: []snapshot.Interface{
			{Name: "lo", Index: 1, Kind: "device", MTU: 65536, Up: true, Addresses: prefixes("127.0.0.1/8")},
			{Name: "eth0", Index: 2, Kind: "device", MTU: 1500, Up: true, Addresses: prefixes("198.51.100.1/24"), RxPackets: 1_000_000, TxPackets: 990_000},
			{Name: "eth1", Index: 3, Kind: "device", MTU: 1500, Up: true, Addresses: prefixes("192.168.1.1/24"), RxPackets: 1_000_000, TxPackets: 1_000_000},
		},
		Listeners: []snapshot.Listener{{Addr: snapshot.EndpointOf(netip.MustParseAddrPort("0.0.0.0:22")), Backlog: 128, Process: "sshd"}},
		KernelLog: &snapshot.KernelLog{TableFullBefore: 12},
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefixes(all ...string) (out []netip.Prefix) {
	for _, s := range all {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func drop(count uint64, cause snapshot.NATCause, device string, more ...func(*snapshot.Drop)) snapshot.Drop {
	d := snapshot.Drop{Count: count, Location: "somewhere+0x1", Reason: "SOME_REASON", Netns: 4026531840, Interface: device, Cause: cause}
	for _, f := range more {
		f(&d)
	}
	return d
}

func sample(s string) func(*snapshot.Drop) {
	return func(d *snapshot.Drop) { d.Samples = append(d.Samples, s) }
}

func stack(frames ...string) func(*snapshot.Drop) {
	return func(d *snapshot.Drop) { d.Stacks = append(d.Stacks, snapshot.Stack{Count: d.Count, Frames: frames}) }
}

func chain(s *snapshot.Snapshot, name string) *snapshot.Chain {
	for i := range s.Chains {
		if s.Chains[i].Name == name {
			return &s.Chains[i]
		}
	}
	panic("no chain " + name)
}

func link(s *snapshot.Snapshot, name string) *snapshot.Interface {
	for i := range s.Interfaces {
		if s.Interfaces[i].Name == name {
			return &s.Interfaces[i]
		}
	}
	panic("no interface " + name)
}

// examples are one machine for each cause where natkit finds it, for the golden
// files: testdata/CODE.json holds all that is said.
var examples = map[string]func(s *snapshot.Snapshot){}

func TestExamples(t *testing.T) {
	for _, c := range Catalogue() {
		t.Run(c.Code, func(t *testing.T) {
			change := examples[c.Code]
			if change == nil {
				t.Fatal("no example")
			}
			s := gateway()
			change(s)
			found := Judge(s)
			if len(found) == 0 || found[0].Code != c.Code {
				t.Fatalf("not found first: %+v", found)
			}
			f := found[0]
			if !slices.Contains(c.Severities, f.Severity) {
				t.Errorf("severity %v is not one of the catalogue's %v", f.Severity, c.Severities)
			}
			if f.Title == "" || f.Why == "" || len(f.Evidence) == 0 || len(f.Remedy) == 0 || len(f.Verify) == 0 {
				t.Errorf("a part is missing: %+v", f)
			}
			for _, e := range f.Evidence {
				if e.What == "" || e.Value == "" || e.Source == "" {
					t.Errorf("evidence without name, value or source: %+v", e)
				}
			}
			jsonIs(t, c.Code+".json", found)
		})
	}
	if len(examples) != len(Catalogue()) {
		t.Errorf("%d examples for %d causes", len(examples), len(Catalogue()))
	}
}

// A profile of one namespace leaves out what interrupts do, and so all that is forwarded:
// nobody is sent there.
func TestVerifyByProfile(t *testing.T) {
	for code, change := range examples {
		s := gateway()
		s.Netns.Name = "blue"
		change(s)
		for _, f := range Judge(s) {
			for _, line := range f.Verify {
				if strings.Contains(line, "profile") && strings.Contains(line, "--netns") {
					t.Errorf("%s: %s", code, line)
				}
			}
		}
	}
}

func jsonIs(t *testing.T, name string, value any) {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(value); err != nil {
		t.Fatal(err)
	}
	golden.Check(t, filepath.Join("testdata", name), b.Bytes())
}

// A finding read back is the finding that was written.
func TestFindingJSON(t *testing.T) {
	s := gateway()
	examples["conntrack-table-full"](s)
	b, err := json.Marshal(Judge(s))
	if err != nil {
		t.Fatal(err)
	}
	var back []Finding
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if back[0].Severity != Critical || !strings.Contains(string(b), `"severity":"critical"`) {
		t.Errorf("severity did not survive: %s", b)
	}
	var sev Severity
	if err := sev.UnmarshalText([]byte("fatal")); err == nil {
		t.Error(`severity "fatal" was taken`)
	}
	if _, err := Severity(0).MarshalText(); err == nil {
		t.Error("no severity was written as one")
	}
}

func TestCatalogue(t *testing.T) {
	byCode := map[string]Cause{}
	for _, c := range Catalogue() {
		if _, twice := byCode[c.Code]; twice {
			t.Errorf("%s stands there twice", c.Code)
		}
		byCode[c.Code] = c
		if _, err := os.Stat(c.Code + ".go"); err != nil {
			t.Errorf("%s has no file of its own", c.Code)
		}
		for _, text := range []string{c.Title, c.Headline, c.Symptom, c.Proof, c.FalsePositive, c.Cure} {
			if text == "" {
				t.Errorf("%s: a text is missing", c.Code)
			}
		}
		if len(c.Severities) == 0 || len(c.Needs) == 0 {
			t.Errorf("%s: no severities or no needs", c.Code)
		}
	}
	for _, c := range byCode {
		for _, code := range c.Explains {
			other, ok := byCode[code]
			if !ok {
				t.Errorf("%s explains %s, which does not exist", c.Code, code)
			}
			// Findings can't be folded in a circle of three; two that explain each
			// other are told apart by severity.
			for _, next := range other.Explains {
				if next != c.Code && slices.Contains(byCode[next].Explains, c.Code) {
					t.Errorf("%s explains %s explains %s explains %s", c.Code, code, next, c.Code)
				}
			}
		}
	}
}

func TestOrder(t *testing.T) {
	// Many things wrong at once: by severity, then by what was lost; what is
	// explained stands under its cause.
	s := gateway()
	for _, code := range []string{"br-netfilter-overhead", "mtu-drop", "listen-overflow", "conntrack-table-full"} {
		examples[code](s)
	}
	found := Judge(s)
	var got []string
	for _, f := range found {
		got = append(got, f.Severity.String()+" "+f.Code)
		for _, c := range f.Consequences {
			got = append(got, "  "+c.Severity.String()+" "+c.Code)
		}
	}
	want := []string{"critical conntrack-table-full", "  warning time-wait-heavy", "critical listen-overflow", "warning mtu-drop", "advice br-netfilter-overhead"}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestFolding(t *testing.T) {
	full := func(s *snapshot.Snapshot) {
		s.Conntrack.Count, s.Conntrack.CountStart, s.Conntrack.Table.Entries = 262144, 262144, 262144
	}
	flood := func(s *snapshot.Snapshot) {
		s.Conntrack.Table.ByStatus["UNREPLIED"] = 200000
		s.Conntrack.Table.Sources[0] = snapshot.Talker{Addr: addr("192.168.1.20"), Entries: 200000, Unreplied: 199000}
	}
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"full and refusing, because of a flood", func(s *snapshot.Snapshot) {
			full(s)
			flood(s)
			s.Conntrack.Stats["drop"] = 500
		}, "critical conntrack-table-full > warning unreplied-flood"},
		{"a flood that throws others out of a full table", func(s *snapshot.Snapshot) {
			full(s)
			flood(s)
			s.Conntrack.Stats["early_drop"] = 500
		}, "critical unreplied-flood > warning conntrack-table-full"},
		{"a flood nearly fills it", func(s *snapshot.Snapshot) {
			full(s)
			flood(s)
			s.Conntrack.Count, s.Conntrack.CountStart = 240000, 240000
		}, "warning unreplied-flood > warning conntrack-table-nearly-full"},
		{"full of connections that are over", func(s *snapshot.Snapshot) {
			full(s)
			s.Conntrack.Table.ByState = map[string]uint64{"TIME_WAIT": 250000, "ESTABLISHED": 12000}
			s.Conntrack.Stats["drop"] = 500
		}, "critical conntrack-table-full > warning time-wait-heavy"},
		{"nearly full of connections that are over", func(s *snapshot.Snapshot) {
			full(s)
			s.Conntrack.Count, s.Conntrack.CountStart = 240000, 240000
			s.Conntrack.Table.ByState = map[string]uint64{"TIME_WAIT": 230000, "ESTABLISHED": 12000}
		}, "warning conntrack-table-nearly-full > warning time-wait-heavy"},
	} {
		t.Run(r.name, func(t *testing.T) {
			s := gateway()
			r.change(s)
			var line func(f Finding) string
			line = func(f Finding) string {
				text := f.Severity.String() + " " + f.Code
				for _, c := range f.Consequences {
					text += " > " + line(c)
				}
				return text
			}
			var got []string
			for _, f := range Judge(s) {
				got = append(got, line(f))
			}
			if !slices.Equal(got, []string{r.want}) {
				t.Errorf("got %q, want %q", got, r.want)
			}
		})
	}
}

// What all namespaces share is told once, with the first that shows it; what
// followed from it in another one is that one's own.
func TestMachine(t *testing.T) {
	host, pod, quiet := gateway(), gateway(), gateway()
	examples["neighbour-table-full"](host)
	examples["neighbour-table-full"](pod)
	examples["ip-forward-off"](pod)
	examples["conntrack-hash-too-small"](quiet)
	var got []string
	var m Machine
	for _, s := range []*snapshot.Snapshot{host, pod, quiet, quiet} {
		line := ""
		for _, f := range m.Judge(s) {
			line += f.Code + " "
		}
		got = append(got, strings.TrimSpace(line))
	}
	want := []string{"neighbour-table-full", "ip-forward-off", "conntrack-hash-too-small", ""}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Two faults on one machine: both are told, the graver one first. Pairs of which
// one example overwrites facts of the other are left out: the order in which they
// are made shows it.
func TestPairs(t *testing.T) {
	// The second is not told beside the first, and why not.
	apart := map[[2]string]string{
		{"conntrack-chain-too-long", "snat-ports-exhausted"}:      "refused entries whose chain is too long are not those that found no port",
		{"conntrack-hash-too-small", "conntrack-chain-too-long"}:  "long chains in a small hash are chance, no attack",
		{"established-timeout-long", "br-netfilter-overhead"}:     "the example has kube-proxy, which needs br_netfilter",
		{"close-wait-heavy", "br-netfilter-overhead"}:             "the same",
		{"established-timeout-short", "established-timeout-long"}: "one time-out can't be both",
		{"forward-policy-drop", "rule-drop"}:                      "packets that a policy drops are not told apart from those that rules do",
		{"syn-flood", "clients-unreached"}:                        "a flood leaves connections that nobody confirms",
		{"duplicate-address", "routing-loop"}:                     "frames were read, and none came by again",
		{"wrong-destination-mac", "routing-loop"}:                 "the same",
		{"vlan-mismatch", "routing-loop"}:                         "the same",
		{"arp-refused", "routing-loop"}:                           "the same",
		{"conntrack-early-drop", "conntrack-no-memory"}:           "what a full table refuses it refuses for want of room",
	}
	pairs := 0
	for i, a := range catalogue {
		for _, b := range catalogue[i+1:] {
			ab, ba := gateway(), gateway()
			examples[a.Code](ab)
			examples[b.Code](ab)
			examples[b.Code](ba)
			examples[a.Code](ba)
			found := Judge(ab)
			said := codesOf(found)
			together := !overwritten(ab, ba)
			for k := 1; k < len(found); k++ {
				if found[k].Severity > found[k-1].Severity {
					t.Errorf("%s and %s: %s stands before %s, which is graver", a.Code, b.Code, found[k-1].Code, found[k].Code)
				}
			}
			for other, code := range map[string]string{a.Code: b.Code, b.Code: a.Code} {
				if !slices.Contains(said, code) && together && apart[[2]string{other, code}] == "" {
					t.Errorf("%s and %s: %s is not told", a.Code, b.Code, code)
				}
			}
			if together {
				pairs++
			}
		}
	}
	if pairs < 150 {
		t.Errorf("only %d pairs of causes can stand together", pairs)
	}
}

// overwritten says whether two machines differ otherwise than in the order of
// their rows.
func overwritten(a, b *snapshot.Snapshot) bool {
	for _, s := range []*snapshot.Snapshot{a, b} {
		slices.SortFunc(s.Drops.Rows, func(x, y snapshot.Drop) int { return strings.Compare(fmt.Sprint(x), fmt.Sprint(y)) })
		slices.SortFunc(s.Routes, func(x, y snapshot.RouteAnswer) int { return strings.Compare(fmt.Sprint(x), fmt.Sprint(y)) })
		slices.SortFunc(s.Interfaces, func(x, y snapshot.Interface) int { return strings.Compare(x.Name, y.Name) })
		slices.SortFunc(s.Chains, func(x, y snapshot.Chain) int { return strings.Compare(fmt.Sprint(x), fmt.Sprint(y)) })
	}
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX != nil || errY != nil || !bytes.Equal(x, y)
}

// codesOf are the codes of all findings, those folded under others included.
func codesOf(findings []Finding) (codes []string) {
	for _, f := range findings {
		codes = append(codes, f.Code)
		codes = append(codes, codesOf(f.Consequences)...)
	}
	return codes
}
