// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/snapshot"
)

func take(t *testing.T, opts Options) *snapshot.Snapshot {
	t.Helper()
	s, err := Take(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func names(s *snapshot.Snapshot, ok bool) []string {
	var out []string
	for _, c := range s.Capabilities {
		if c.OK == ok {
			out = append(out, c.Name)
		}
	}
	slices.Sort(out)
	return out
}

// A kernel of today: the files as Linux 6.18 has them.
var newKernel = map[string]string{
	"proc/sys/kernel/osrelease":                           "6.18.44\n",
	"proc/sys/kernel/hostname":                            "gw1\n",
	"proc/meminfo":                                        "MemTotal:       24684096 kB\nMemFree:  1 kB\n",
	"proc/stat":                                           "cpu  10 0 10 960 0 0 20 0 0 0\ncpu0 5 0 5 480 0 0 10 0 0 0\ncpu1 5 0 5 480 0 0 10 0 0 0\nintr 5 0\n",
	"proc/net/softnet_stat":                               strings.Repeat("000030e8 00000007 00000002 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000\n", 1),
	"proc/net/snmp":                                       "Ip: Forwarding DefaultTTL InReceives InAddrErrors\nIp: 1 64 1000 5\nTcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens CurrEstab\nTcp: 1 200 120000 -1 7 3\n",
	"proc/net/netstat":                                    "TcpExt: SyncookiesSent ListenOverflows\nTcpExt: 0 12\nIpExt: InNoRoutes\nIpExt: 2\n",
	"proc/net/stat/nf_conntrack":                          newStats,
	"proc/sys/net/netfilter/nf_conntrack_count":           "180\n",
	"proc/sys/net/netfilter/nf_conntrack_max":             "1000\n",
	"proc/sys/net/netfilter/nf_conntrack_buckets":         "65536\n",
	"proc/sys/net/netfilter/nf_conntrack_log_invalid":     "0\n",
	"proc/sys/net/core/netdev_max_backlog":                "1000\n",
	"proc/sys/net/core/somaxconn":                         "4096\n",
	"proc/sys/net/ipv4/ip_forward":                        "1\n",
	"proc/sys/net/ipv4/ip_local_port_range":               "32768\t60999\n",
	"proc/sys/net/ipv4/conf/all/rp_filter":                "1\n",
	"proc/sys/net/ipv4/conf/eth0.100/rp_filter":           "2\n",
	"proc/sys/net/ipv4/neigh/default/gc_thresh3":          "1024\n",
	"proc/sys/net/bridge/bridge-nf-call-iptables":         "1\n",
	"proc/sys/net/ipv4/tcp_fastopen_key":                  "secret\n",
	"proc/sys/net/ipv6/conf/all/stable_secret":            "secret\n",
	"etc/sysctl.conf":                                     "net.ipv4.ip_forward = 1\n",
	"proc/sys/net/netfilter/nf_log/0":                     "NONE\n",
	"proc/sys/net/netfilter/nf_conntrack_tcp_timeout_foo": "60\n",
}

const newStats = `entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error  expect_new expect_create expect_delete search_restart
000000b4  00000002 00000001 00000000 00000000 00000000 00000000 00000003 00000000 0000000a 00000010 00000000 00000004  00000000 00000000 00000000 00000000
000000b4  00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000001 000000ff 00000000 00000000  00000000 00000000 00000000 00000005
`

func TestTakeFromFiles(t *testing.T) {
	root := tree(t, newKernel)
	s := take(t, Options{Root: root, Dump: true})

	if want := (snapshot.Host{Hostname: "gw1", Kernel: "6.18.44", CPUs: 2, MemoryBytes: 24684096 << 10}); s.Host != want {
		t.Errorf("host %+v, want %+v", s.Host, want)
	}
	if !s.Netns.Init {
		t.Error("not taken for the initial namespace")
	}
	ct := s.Conntrack
	if ct == nil || ct.Count != 180 || ct.CountStart != 180 || ct.Max != 1000 || ct.Buckets != 65536 {
		t.Errorf("conntrack %+v", ct)
	}
	wantSysctls := map[string]string{
		"net.netfilter.nf_conntrack_count": "180", "net.netfilter.nf_conntrack_max": "1000",
		"net.netfilter.nf_conntrack_buckets": "65536", "net.netfilter.nf_conntrack_log_invalid": "0",
		"net.netfilter.nf_conntrack_tcp_timeout_foo": "60",
		"net.core.netdev_max_backlog":                "1000", "net.core.somaxconn": "4096",
		"net.ipv4.ip_forward": "1", "net.ipv4.ip_local_port_range": "32768 60999",
		"net.ipv4.conf.all.rp_filter": "1", "net.ipv4.conf.eth0/100.rp_filter": "2",
		"net.ipv4.neigh.default.gc_thresh3":  "1024",
		"net.bridge.bridge-nf-call-iptables": "1",
	}
	if !maps.Equal(s.Sysctls, wantSysctls) {
		t.Errorf("sysctls\n%v\nwant\n%v", s.Sysctls, wantSysctls)
	}
	for _, name := range []string{"Ip.InAddrErrors", "TcpExt.ListenOverflows", "IpExt.InNoRoutes", "Tcp.ActiveOpens"} {
		if n, ok := s.Counters[name]; !ok || n != 0 {
			t.Errorf("counter %s increased by %d (known: %v) though nothing changed", name, n, ok)
		}
	}
	if len(s.CPUs) != 2 {
		t.Errorf("processors %+v", s.CPUs)
	}
	// What asks the kernel is left out, and nothing of this machine is mixed in.
	wantMissing := []string{"conntrack-dump", "conntrack-memory", "drop-tracing", "engine", "event-sockets", "frames", "hooks", "interfaces", "ipsec", "iptables-legacy", "kernel-log", "leaving-packets", "listeners", "local-ports", "neighbours",
		"nftables", "nics", "process-names", "qdiscs", "refused-connections", "routes", "rule-sets", "softirq-wait"}
	if got := names(s, false); !slices.Equal(got, wantMissing) {
		t.Errorf("could not see %v, want %v", got, wantMissing)
	}
	if s.Interfaces != nil || s.Listeners != nil || s.Chains != nil || s.Drops != nil || s.KernelLog != nil || s.Conntrack.Table != nil {
		t.Errorf("facts of another machine: %+v", s)
	}
}

// Whatever is missing or damaged costs its part, says so, and nothing else.
func TestTakeFromDamagedFiles(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  map[string]string // "-" removes the file
		missing []string          // besides what files never tell
		reason  string
	}{
		{"no conntrack", map[string]string{"proc/sys/net/netfilter/nf_conntrack_count": "-", "proc/net/stat/nf_conntrack": "-"},
			[]string{"conntrack", "conntrack-stats"}, "not loaded"},
		{"absurd limit", map[string]string{"proc/sys/net/netfilter/nf_conntrack_max": "99999999999999999999999\n"},
			[]string{"conntrack"}, "is not a number"},
		{"limit above 32 bits", map[string]string{"proc/sys/net/netfilter/nf_conntrack_max": "5000000000\n"},
			[]string{"conntrack"}, "5000000000"},
		{"empty statistics", map[string]string{"proc/net/stat/nf_conntrack": ""},
			[]string{"conntrack-stats"}, "no line of names"},
		{"a column too few", map[string]string{"proc/net/stat/nf_conntrack": "entries found drop\n0 0\n"},
			[]string{"conntrack-stats"}, "line 2 has 2 values for 3 names"},
		{"not hexadecimal", map[string]string{"proc/net/stat/nf_conntrack": "entries found\n0 -1\n"},
			[]string{"conntrack-stats"}, `found is "-1"`},
		{"names without values", map[string]string{"proc/net/snmp": "Ip: InReceives\nTcp: ActiveOpens\n"},
			[]string{"counters"}, "no pair"},
		{"no netstat", map[string]string{"proc/net/netstat": "-"}, []string{"counters"}, "no such file"},
		{"no memory", map[string]string{"proc/meminfo": "MemTotal: lots kB\n"}, []string{"host"}, `MemTotal is "lots kB"`},
		{"no /proc/stat", map[string]string{"proc/stat": "-"}, []string{"cpus"}, "no such file"},
		{"huge file", map[string]string{"proc/net/snmp": strings.Repeat("Ip: x\n", maxFile/5)}, []string{"counters"}, "longer than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := maps.Clone(newKernel)
			for path, text := range c.change {
				if files[path] = text; text == "-" {
					delete(files, path)
				}
			}
			whole := take(t, Options{Root: tree(t, newKernel)})
			s := take(t, Options{Root: tree(t, files)})
			want := append(slices.Clone(c.missing), names(whole, false)...)
			slices.Sort(want)
			if got := names(s, false); !slices.Equal(got, want) {
				t.Errorf("could not see %v, want %v", got, want)
			}
			i := slices.IndexFunc(s.Capabilities, func(x snapshot.Capability) bool { return x.Name == c.missing[0] })
			if got := s.Capabilities[i]; !strings.Contains(got.Reason, c.reason) || got.Costs == "" {
				t.Errorf("%+v, want a reason with %q and what it costs", got, c.reason)
			}
		})
	}
}

func TestTakeFromNothing(t *testing.T) {
	s := take(t, Options{Root: t.TempDir(), Dump: true})
	if got := names(s, true); len(got) != 0 {
		t.Errorf("saw %v in an empty folder", got)
	}
	for _, c := range s.Capabilities {
		if c.Reason == "" || c.Costs == "" {
			t.Errorf("%s is missing without a reason and what it costs: %+v", c.Name, c)
		}
	}
}

// The window is real time between two readings, and ends with the context.
func TestTakeWindow(t *testing.T) {
	root := tree(t, newKernel)
	change := func(what string, part float64) {
		if what != "watching" {
			return
		}
		for path, text := range map[string]string{
			"proc/net/snmp":                             strings.Replace(newKernel["proc/net/snmp"], "1000 5", "1500 8", 1),
			"proc/net/netstat":                          "TcpExt: SyncookiesSent Newcomer\nTcpExt: 3 99\nIpExt: InNoRoutes\nIpExt: 1\n",
			"proc/net/stat/nf_conntrack":                strings.Replace(strings.Replace(newStats, "00000010", "00000021", 1), "000000ff", "00000100", 1),
			"proc/sys/net/netfilter/nf_conntrack_count": "200\n",
			"proc/stat":                                 "cpu0 5 0 5 480 0 0 10 0 0 0\ncpu1 30 0 25 490 0 0 50 5 0 0\ncpu2 9 9 9 9 9 9 9 9\n",
			"proc/net/softnet_stat":                     strings.Replace(newKernel["proc/net/softnet_stat"], "00000007", "0000000a", 1),
		} {
			if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
				t.Error(err)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := Take(ctx, Options{Root: root, Window: time.Hour, Progress: func(what string, part float64) {
		change(what, part)
		if what == "watching" {
			cancel()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if s.WindowSeconds <= 0 || s.WindowSeconds > 60 {
		t.Errorf("window of %v s", s.WindowSeconds)
	}
	for name, want := range map[string]uint64{"Ip.InReceives": 500, "Ip.InAddrErrors": 3, "TcpExt.SyncookiesSent": 3, "IpExt.InNoRoutes": 1} {
		if got, ok := s.Counters[name]; !ok || got != want {
			t.Errorf("%s increased by %d (known: %v), want %d", name, got, ok, want)
		}
	}
	for _, name := range []string{"TcpExt.ListenOverflows", "TcpExt.Newcomer", "Ip.Forwarding", "Tcp.CurrEstab"} {
		if n, ok := s.Counters[name]; ok {
			t.Errorf("%s is said to have increased by %d", name, n)
		}
	}
	if ct := s.Conntrack; ct.CountStart != 180 || ct.Count != 200 || ct.Stats["drop"] != 0x11+1 || ct.Stats["insert_failed"] != 0 {
		t.Errorf("conntrack %+v", ct)
	}
	want := []snapshot.CPU{
		{Number: 0, BacklogDropped: 3},
		{Number: 1, Busy: 0.9, Softirq: 0.4, Steal: 0.05},
	}
	if len(s.CPUs) != 2 || s.CPUs[0] != want[0] || !near(s.CPUs[1].Busy, 0.9) || !near(s.CPUs[1].Softirq, 0.4) || !near(s.CPUs[1].Steal, 0.05) {
		t.Errorf("processors %+v, want %+v", s.CPUs, want)
	}
}

func near(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 }

func TestIncrease(t *testing.T) {
	for _, c := range []struct{ before, after, want, want32 uint64 }{
		{0, 0, 0, 0},
		{5, 12, 7, 7},
		{12, 5, 5, 5},            // began again
		{1<<32 - 3, 2, 2, 5},     // 32 bits passed zero
		{0, 1 << 40, 1 << 40, 0}, // no 32-bit counter has that
	} {
		if got := increase(c.before, c.after); got != c.want {
			t.Errorf("increase(%d, %d) = %d, want %d", c.before, c.after, got, c.want)
		}
		if got := increase32(c.before, c.after); c.after < 1<<32 && got != c.want32 {
			t.Errorf("increase32(%d, %d) = %d, want %d", c.before, c.after, got, c.want32)
		}
	}
}

func TestSoftnetOfOldKernels(t *testing.T) {
	online := map[int]cpuTimes{0: {}, 2: {}} // processor 1 is off
	for _, c := range []struct {
		name, text string
		want       map[int]softnet
	}{
		{"Linux 2.6.36: nine columns", "0000000a 00000001 00000002 00000000 00000000 00000000 00000000 00000000 00000000\n0000000b 00000003 00000004 00000000 00000000 00000000 00000000 00000000 00000000\n",
			map[int]softnet{0: {10, 1, 2}, 2: {11, 3, 4}}},
		{"Linux 5.10: with the number", "0000000a 1 2 0 0 0 0 0 0 0 0 0 00000002\n", map[int]softnet{2: {10, 1, 2}}},
		{"nothing", "", map[int]softnet{}},
		{"no numbers", "x y z\n", map[int]softnet{0: {}}},
		{"more lines than processors", "1 0 0\n2 0 0\n3 0 0\n", map[int]softnet{0: {packets: 1}, 2: {packets: 2}}},
	} {
		if got := parseSoftnet(c.text, online); !maps.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestCPUTimes(t *testing.T) {
	got := parseCPUTimes("cpu  9 9 9 9\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu11 1 2 3 4\ncpux 1 2 3 4\ncpu99999999 1 2 3 4\ncpu5\nsoftirq 1 2 3\n")
	want := map[int]cpuTimes{0: {1, 2, 3, 4, 5, 6, 7, 8}, 11: {1, 2, 3, 4}}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestLoaded(t *testing.T) {
	modular := map[string]string{"proc/modules": "", "proc/sys/kernel/osrelease": "6.1.0-1-amd64\n"}
	with := func(path, text string) map[string]string {
		files := maps.Clone(modular)
		files[path] = text
		return files
	}
	const builtin = "lib/modules/6.1.0-1-amd64/modules.builtin"
	for _, c := range []struct {
		name  string
		files map[string]string
		want  bool
	}{
		{"kernel without modules", nil, true},
		{"loaded", with("sys/module/nf_tables/refcnt", "1"), true},
		{"built in", with(builtin, "kernel/net/netfilter/nf_conntrack.ko\nkernel/net/netfilter/nf_tables.ko\n"), true},
		{"absent", with(builtin, "kernel/net/netfilter/nf_tables_other.ko\nkernel/net/xnf_tables.ko\n"), false},
		{"no list of what is built in", modular, true},
	} {
		if got := newView(tree(t, c.files)).loaded("nf_tables"); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestEscapeGlob(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `we[i]r*d?`)
	if err := os.MkdirAll(filepath.Join(dir, "proc/sys/net/ipv4"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "proc/sys/net/ipv4/ip_forward"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	if s := take(t, Options{Root: dir}); s.Sysctls["net.ipv4.ip_forward"] != "1" {
		t.Errorf("sysctls below %s: %v", dir, s.Sysctls)
	}
}

func TestCapabilityReason(t *testing.T) {
	denied := capability("x", "y", &fs.PathError{Op: "open", Path: "/dev/kmsg", Err: fs.ErrPermission})
	if hint := strings.Contains(denied.Reason, "as root"); denied.OK || hint != (os.Geteuid() != 0) {
		t.Errorf("%+v as user %d", denied, os.Geteuid())
	}
	if c := capability("x", "y", nil); !c.OK || c.Reason != "" || c.Costs != "" {
		t.Errorf("%+v", c)
	}
	if c := capability("x", "y", errors.Join(errors.New("no"), errors.New("nor"))); c.OK || c.Reason != "no; nor" || c.Costs != "y" {
		t.Errorf("%+v", c)
	}
}

func FuzzReaders(f *testing.F) {
	f.Add(newStats)
	f.Add(newKernel["proc/net/snmp"])
	f.Add(newKernel["proc/stat"])
	f.Add(newKernel["proc/net/softnet_stat"])
	f.Add(newKernel["proc/meminfo"])
	f.Fuzz(func(t *testing.T, text string) {
		parseCounters(text, map[string]uint64{})
		times := parseCPUTimes(text)
		for n := range parseSoftnet(text, times) {
			if n < 0 {
				t.Errorf("processor %d", n)
			}
		}
		if n, err := parseMeminfo(text, "MemTotal"); err == nil && n > 1<<60 {
			t.Errorf("%d bytes of memory", n)
		}
	})
}
