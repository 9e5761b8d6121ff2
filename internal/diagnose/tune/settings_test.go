// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"strings"
	"testing"
)

// Only what is listed may be written, and no name leads out of /proc/sys/net.
func TestFind(t *testing.T) {
	for name, path := range map[string]string{
		"net.netfilter.nf_conntrack_max":                  "net/netfilter/nf_conntrack_max",
		"net.ipv4.conf.eth0.rp_filter":                    "net/ipv4/conf/eth0/rp_filter",
		"net.ipv4.conf.eth0/100.rp_filter":                "net/ipv4/conf/eth0.100/rp_filter",
		"net.ipv4.conf.all.forwarding":                    "net/ipv4/conf/all/forwarding",
		"net.ipv6.conf.br-0123456789a.forwarding":         "net/ipv6/conf/br-0123456789a/forwarding",
		"net.netfilter.nf_conntrack_tcp_timeout_syn_sent": "net/netfilter/nf_conntrack_tcp_timeout_syn_sent",
	} {
		k, err := find(name)
		if err != nil {
			t.Errorf("find(%q): %v", name, err)
		} else if k.path() != path {
			t.Errorf("find(%q): path %q, want %q", name, k.path(), path)
		}
	}
	for _, name := range []string{
		"", "net", "kernel.panic", "kernel.core_pattern", "net.core.bpf_jit_harden", "net.ipv4.tcp_mem",
		"net.ipv4.conf.//.rp_filter",                           // "..": one folder up
		"net.ipv4.conf./.rp_filter",                            // "."
		"net.ipv4.conf..rp_filter",                             // no interface
		"net.ipv4.conf.*.rp_filter",                            // the pattern itself
		"net.ipv4.conf.//.//.//.//.//.//.etc.cron/d.rp_filter", // "../../.."
		"net/ipv4/ip_forward",                                  // slashes are dots within a part
		"net.ipv4.conf.a b.rp_filter",                          // no device is called so
		"net.ipv4.conf.sixteen-letters-.rp_filter",             // IFNAMSIZ
		"net.ipv4.conf.x\x00y.rp_filter", "net.ipv4.conf.\x1b[2J.rp_filter", "net.ipv4.conf.a=b.rp_filter", "net.ipv4.conf.eth?.rp_filter",
		"dev.*.threaded", "dev.//.threaded", "dev.eth0.threaded.x", "dev.eth0.ifalias", "dev..threaded", "dev.a b.threaded", "dev.x/../y.threaded",
		"net.ipv4.conf.eth0.rp_filter.x", "net.netfilter.nf_conntrack_max\n", "../net.netfilter.nf_conntrack_max",
	} {
		if k, err := find(name); err == nil {
			t.Errorf("find(%q) gives %q", name, k.path())
		}
	}
}

func TestValue(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{settingMax, " 131072\n", "131072"},
		{settingMax, "0", ""}, // no limit at all: never natkit's choice
		{settingMax, "2147483648", ""},
		{settingMax, "1 2", ""},
		{settingMax, "1; reboot", ""},
		{settingMax, "0x10", ""},
		{"net.netfilter.nf_conntrack_udp_timeout", "010", "10"}, // the kernel would read eight
		{"net.netfilter.nf_conntrack_udp_timeout", "0", ""},
		{"net.netfilter.nf_conntrack_udp_timeout", "2147484", ""},
		{"net.ipv4.ip_forward", "2", ""},
		{"net.ipv4.ip_forward", "", ""},
		{"net.ipv4.ip_local_port_range", "1024\t65535", "1024 65535"},
		{"net.ipv4.ip_local_port_range", "65535 1024", ""},
		{"net.ipv4.ip_local_port_range", "1024", ""},
	} {
		k, err := find(c.name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := k.value(c.text)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s value %q: %q, %v; want %q", c.name, c.text, got, err, c.want)
		}
	}
}

func TestTook(t *testing.T) {
	for _, c := range []struct {
		name, present, written string
		want                   bool
	}{
		{settingBuckets, "262144", "262144", true},
		{settingBuckets, "1024", "1000", true}, // rounded up to a page
		{settingBuckets, "1000", "1024", false},
		{settingBuckets, "65536", "1024", false},
		{settingMax, "1024", "1000", false},
	} {
		k, _ := find(c.name)
		if got := k.took(c.present, c.written); got != c.want {
			t.Errorf("%s shows %s after %s: %v, want %v", c.name, c.present, c.written, got, c.want)
		}
	}
}

func FuzzFind(f *testing.F) {
	for _, s := range []string{settingMax, "net.ipv4.conf.eth0/1.rp_filter", "net.ipv4.conf.//.forwarding", "net.ipv6.conf.all.forwarding"} {
		f.Add(s, "1")
	}
	f.Fuzz(func(t *testing.T, name, value string) {
		k, err := find(name)
		if err != nil {
			return
		}
		path := k.path()
		if device, _ := deviceOf(name); isDevice(name) && (device == "." || device == ".." || strings.ContainsAny(device, "/\x00")) {
			t.Errorf("%q is of the device %q", name, device)
		}
		if !isDevice(name) && path != "vm/min_free_kbytes" && !strings.HasPrefix(path, "net/") || strings.Contains("/"+path+"/", "/../") || strings.Contains("/"+path+"/", "/./") || strings.ContainsRune(path, 0) {
			t.Errorf("%q is the path %q", name, path)
		}
		if v, err := k.value(value); err == nil && strings.Trim(v, "0123456789abcdef, ") != "" {
			t.Errorf("%q takes the value %q", name, v)
		}
	})
}
