// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

// full returns a Snapshot with something in every kind of field.
func full() *Snapshot {
	return &Snapshot{
		TakenAt:       time.Date(2026, 11, 21, 1, 2, 3, 0, time.UTC),
		WindowSeconds: 10.002,
		Host:          Host{Hostname: "gw", Kernel: "6.18.0", CPUs: 2, MemoryBytes: 24 << 30},
		Netns:         Netns{Name: "blue", Inode: 4026532322},
		Capabilities:  []Capability{{Name: CanDrops, Reason: "no BPF", Costs: "places of drops"}},
		Conntrack: &Conntrack{
			Count: 1000, Max: 1000, Buckets: 65536, Stats: map[string]uint64{"drop": 17},
			Table: &Table{
				Entries: 1000, ByState: map[string]uint64{"TIME_WAIT": 900},
				Sources:   []Talker{{Addr: netip.MustParseAddr("192.168.0.2"), Entries: 990}},
				SNATPorts: []SNATUse{{Protocol: "tcp", Outside: netip.MustParseAddr("192.0.2.1"), Dest: EndpointOf(netip.MustParseAddrPort("[2001:db8::1]:80")), Used: 4, MinPort: 5000, MaxPort: 5003}},
			},
		},
		Sysctls:    map[string]string{"net.ipv4.ip_local_port_range": "32768 60999"},
		Counters:   map[string]uint64{"TcpExt.ListenOverflows": 3},
		CPUs:       []CPU{{Number: 1, Busy: 0.5, Softirq: 0.25}},
		Drops:      &Drops{Rows: []Drop{{Count: 17, Location: "nf_hook_slow+0xa6", Reason: "NETFILTER_DROP", Cause: CauseTableFull}}},
		Hooks:      []Hook{{Family: "ipv4", Hook: "prerouting", Priority: -200, Function: "ipv4_conntrack_in"}},
		Chains:     []Chain{{Backend: "nft", Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Policy: "drop", PolicyPackets: new(uint64(5)), DropRules: []DropRule{{Number: 1, Verdict: "drop", All: true}}}},
		Interfaces: []Interface{{Name: "eth0", MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}},
		Listeners:  []Listener{}, // known to be none
		KernelLog:  &KernelLog{TableFull: 2, Lines: []string{"nf_conntrack: table full, dropping packet"}},
	}
}

func TestSaveLoad(t *testing.T) {
	want := full()
	var b bytes.Buffer
	if err := Save(&b, want); err != nil {
		t.Fatal(err)
	}
	got, err := Load(&b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got.Listeners == nil {
		t.Error("an empty list became an unknown one")
	}
	if got.Owners != nil {
		t.Error("an unknown list became an empty one")
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"nothing", "", "it is empty"},
		{"not JSON", "conntrack v1.4.7\n", "line 1, column 1: this is not JSON"},
		{"cut", `{"schema": "natkit/snapshot/1", "sysctls": {"a"`, "line 1, column 47: it ends too early"},
		{"more after it", "{\"schema\": \"natkit/snapshot/1\"}\n{}", "line 2, column 1: this is not JSON"},
		{"another file", `{"findings": []}`, "not a file of natkit doctor --save"},
		{"a list", `[]`, "not a file of natkit doctor --save: a JSON array"},
		{"null", `null`, "not a file of natkit doctor --save"},
		{"later", `{"schema": "natkit/snapshot/2", "host": "of another type"}`, `it is "natkit/snapshot/2", this natkit reads "natkit/snapshot/1": use a newer natkit`},
		{"version zero", `{"schema": "natkit/snapshot/0"}`, "not a file of natkit doctor --save"},
		{"another kind", `{"schema": "natkit/doctor/1"}`, "not a file of natkit doctor --save"},
		{"of an earlier natkit", `{"version": 1, "taken_at": "2026-01-02T15:04:05Z"}`, "an earlier natkit saved it"},
		{"wrong type", "{\n \"schema\": \"natkit/snapshot/1\",\n \"conntrack\": {\"entries\": \"many\"}\n}", "line 3, column 32: conntrack.entries is a string, want uint64"},
		{"negative count", `{"schema": "natkit/snapshot/1", "conntrack": {"entries": -1}}`, "conntrack.entries is a number -1, want uint64"},
		{"bad address", `{"schema": "natkit/snapshot/1", "interfaces": [{"addresses": ["nonsense"]}]}`, "nonsense"},
		{"bad time", `{"schema": "natkit/snapshot/1", "time": "yesterday"}`, "yesterday"},
		{"negative window", `{"schema": "natkit/snapshot/1", "interval_s": -1}`, "interval_s is -1"},
		{"absurd table", `{"schema": "natkit/snapshot/1", "conntrack": {"entries_max": 5000000000}}`, "conntrack.entries_max is 5000000000, want at most 4294967295"},
		{"absurd object", `{"schema": "natkit/snapshot/1", "conntrack": {"entry_bytes": 70000}}`, "conntrack.entry_bytes is 70000"},
		{"absurd counter", `{"schema": "natkit/snapshot/1", "counters": {"Ip.InReceives": 18446744073709551615}}`, `counters["Ip.InReceives"] is 18446744073709551615`},
		{"absurd drop", `{"schema": "natkit/snapshot/1", "drops": {"rows": [{}, {"packets": 9223372036854775807}]}}`, "drops.rows[1].packets is 9223372036854775807"},
		{"absurd MTU", `{"schema": "natkit/snapshot/1", "interfaces": [{"mtu": 9223372036854775807}]}`, "interfaces[0].mtu is 9223372036854775807"},
		{"too many values", `{"schema": "natkit/snapshot/1", "capabilities": [` + strings.Repeat("0,", maxValues) + `0]}`, "more than 2097152 values"},
		{"too many objects", `{"schema": "natkit/snapshot/1", "chains": [` + strings.Repeat("{},", maxObjects) + `{}]}`, "more than 524288 objects"},
		{"too long", `{"schema": "natkit/snapshot/1"}` + strings.Repeat(" ", maxBytes), "longer than 64 MiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Load(strings.NewReader(c.in))
			if err == nil {
				t.Fatalf("accepted: %.1000s", fmt.Sprintf("%+v", s))
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q\nwant   %q", err, c.want)
			}
		})
	}
}

// What a snapshot holds is printed to terminals.
func TestLoadMakesPrintable(t *testing.T) {
	in := `{"schema": "natkit/snapshot/1", "host": {"hostname": "\u001b[2Jgw\u202e"},
		"sysctls": {"net.\u0007": "1\t2\u0000"},
		"kernel_log": {"lines": ["` + "\xff" + `full"]},
		"drops": {"rows": [{"cause": "x\ny"}]},
		"listeners": [{"process": "nginx\r"}], "later_key": {"a": [1, 2]}}`
	s, err := Load(strings.NewReader(in))
	if err != nil {
		t.Fatal(err)
	}
	for got, want := range map[string]string{
		s.Host.Hostname:               "?[2Jgw?",
		s.Sysctls["net.?"]:            "1 2?",
		s.KernelLog.Lines[0]:          "\ufffdfull",
		string(s.Drops.Rows[0].Cause): "x?y",
		s.Listeners[0].Process:        "nginx?",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestCan(t *testing.T) {
	s := Snapshot{Capabilities: []Capability{{Name: CanDrops}, {Name: CanHooks, OK: true}}}
	for name, want := range map[string]bool{CanDrops: false, CanHooks: true, CanOwners: false} {
		if got := s.Can(name); got != want {
			t.Errorf("Can(%s) = %v", name, got)
		}
	}
}

func TestSysctlNames(t *testing.T) {
	name := SysctlName("net", "ipv4", "conf", "eth0.100", "rp_filter")
	if want := "net.ipv4.conf.eth0/100.rp_filter"; name != want {
		t.Errorf("name %q, want %q", name, want)
	}
	if got, want := SysctlPath(name), "net/ipv4/conf/eth0.100/rp_filter"; got != want {
		t.Errorf("path %q, want %q", got, want)
	}
}

// Whatever Load accepts can be saved and loaded again with the same result.
func FuzzLoad(f *testing.F) {
	b, err := json.Marshal(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"schema": "natkit/snapshot/1"}`))
	f.Add([]byte(`{"schema": "natkit/snapshot/1", "conntrack": {"table": {"sources": [{"addr": ""}]}}, "chains": [{"policy_packets": null}]}`))
	f.Add([]byte(`{"schema": "natkit/snapshot/1", "sysctls": {"\u0001": "a", "\u0002": "b", "?": "c"}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		s, err := Load(bytes.NewReader(in))
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := Save(&b, s); err != nil {
			t.Fatalf("save of what was loaded: %v", err)
		}
		again, err := Load(&b)
		if err != nil {
			t.Fatalf("load of what was saved: %v", err)
		}
		if !reflect.DeepEqual(s, again) {
			t.Errorf("first  %+v\nsecond %+v", s, again)
		}
	})
}
