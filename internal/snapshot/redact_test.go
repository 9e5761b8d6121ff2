// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// Addresses with a common prefix keep one of the same length, different ones stay
// different, and what is private stays so.
func TestRedactAddresses(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	r := newRedactor("key")
	common := func(a, b netip.Addr) int {
		for bits := a.BitLen(); ; bits-- {
			if p, _ := a.Prefix(bits); p.Contains(b) {
				return bits
			}
		}
	}
	networks := []string{"10.0.0.0/8", "192.168.7.0/24", "172.16.0.0/12", "100.64.0.0/10", "2001:db8::/32", "fd00:1:2::/48", "fe80::/64", "203.0.113.0/24"}
	for _, text := range networks {
		network := netip.MustParsePrefix(text)
		var before, after []netip.Addr
		for range 40 {
			b := network.Addr().AsSlice()
			for i := network.Bits() / 8; i < len(b); i++ {
				b[i] = byte(random.Uint32())
			}
			if network.Bits()%8 != 0 {
				b[network.Bits()/8] = network.Addr().AsSlice()[network.Bits()/8] | b[network.Bits()/8]&(0xff>>(network.Bits()%8))
			}
			a, _ := netip.AddrFromSlice(b)
			before, after = append(before, a), append(after, r.addr(a))
		}
		for i, a := range before {
			if keptBits(a) != keptBits(after[i]) {
				t.Errorf("%s became %s: of another kind", a, after[i])
			}
			for j := range i {
				if common(a, before[j]) != common(after[i], after[j]) {
					t.Errorf("%s and %s became %s and %s", a, before[j], after[i], after[j])
				}
			}
		}
	}
	for _, same := range []string{"127.0.0.1", "0.0.0.0", "255.255.255.0", "224.0.0.251", "::", "::1", "ff02::1"} {
		if got := r.addr(netip.MustParseAddr(same)); got.String() != same {
			t.Errorf("%s became %s", same, got)
		}
	}
}

// Hosts of a network of this machine stay hosts, and its own and its broadcast address stay
// these, whatever else about addresses is kept.
func TestRedactKeepsHosts(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	special := func(a netip.Addr, bits int) string {
		n := netip.PrefixFrom(a, bits)
		b := a.As4()
		host := binary.BigEndian.Uint32(b[:]) & (1<<(32-bits) - 1)
		switch {
		case a == n.Masked().Addr():
			return "network"
		case host == 1<<(32-bits)-1:
			return "broadcast"
		}
		return "host"
	}
	for key := range 40 {
		for _, text := range []string{"192.168.7.64/28", "203.0.113.0/24", "198.18.4.4/30", "10.0.0.0/8", "172.17.0.0/16", "11.1.2.0/23", "10.9.8.0/24"} {
			network := netip.MustParsePrefix(text)
			r := newRedactor(fmt.Sprint(key))
			r.Meet(&Snapshot{Interfaces: []Interface{{Name: "eth0", Addresses: []netip.Prefix{network}}, {Name: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/16")}}}})
			first := binary.BigEndian.Uint32(network.Masked().Addr().AsSlice())
			size := uint32(1) << (32 - network.Bits())
			hosts := map[uint32]bool{0: true, 1: true, 2: true, size - 2: true, size - 1: true}
			for range 60 {
				hosts[random.Uint32N(size)] = true
			}
			was := map[netip.Addr]netip.Addr{}
			for host := range hosts {
				var b [4]byte
				binary.BigEndian.PutUint32(b[:], first+host)
				a := netip.AddrFrom4(b)
				to := r.addr(a)
				if before, now := special(a, network.Bits()), special(to, network.Bits()); before != now {
					t.Fatalf("%s of %s, a %s address, became %s, a %s address", a, network, before, to, now)
				}
				if other, twice := was[to]; twice {
					t.Fatalf("%s and %s became %s", a, other, to)
				}
				was[to] = a
			}
		}
	}
	// A network that is met too late changes nothing of what was replaced.
	r := newRedactor("key")
	host := netip.MustParseAddr("192.168.7.5")
	before := r.addr(host)
	r.Meet(&Snapshot{Interfaces: []Interface{{Addresses: []netip.Prefix{netip.MustParsePrefix("192.168.7.1/24")}}}})
	if after := r.addr(host); after != before {
		t.Errorf("%s became %s, and then %s", host, before, after)
	}
}

func TestRedactText(t *testing.T) {
	r := newRedactor("key")
	at := func(s string) string { return r.addr(netip.MustParseAddr(s)).String() }
	r.names, r.longest = map[string]string{"gw.example.org": "host-1", "gw": "host-1", "blue": "netns-1"}, []string{"gw.example.org", "blue", "gw"}
	mac := r.mac("52:54:00:12:34:56")
	if mac == "52:54:00:12:34:56" || !strings.HasPrefix(mac, "02:") {
		t.Fatalf("hardware address %s", mac)
	}
	for in, want := range map[string]string{
		"tcp 192.0.2.7:4000 -> 198.51.100.1:80 SYN":  "tcp " + at("192.0.2.7") + ":4000 -> " + at("198.51.100.1") + ":80 SYN",
		"[2001:db8::1]:443":                          "[" + at("2001:db8::1") + "]:443",
		"from 2001:db8::1.":                          "from " + at("2001:db8::1") + ".",
		"192.0.2.0/24 is up.":                        at("192.0.2.0") + "/24 is up.",
		"at 12:34:56, 5.10.0-21":                     "at 12:34:56, 5.10.0-21",
		"nft::add nf_conntrack::in":                  "nft::add nf_conntrack::in",
		"MAC 52:54:00:12:34:56":                      "MAC " + mac,
		"to ff:ff:ff:ff:ff:ff and 33:33:00:00:00:01": "to ff:ff:ff:ff:ff:ff and 33:33:00:00:00:01",
		// What the LOG target writes: to, from and the type of what follows.
		"MAC=52:54:00:12:34:56:52:54:00:12:34:56:08:00 SRC=192.0.2.7": "MAC=" + mac + ":" + mac + ":08:00 SRC=" + at("192.0.2.7"),
		"MAC=ff:ff:ff:ff:ff:ff:52:54:00:12:34:56:08:00":               "MAC=ff:ff:ff:ff:ff:ff:" + mac + ":08:00",
		"gw.example.org kernel: blue bluetooth":                       "host-1 kernel: netns-1 bluetooth",
		"gw":                                                          "host-1",
		"/run/netns/blue":                                             "/run/netns/netns-1",
		"version1.2.3.4x 1.2.3.4x":                                    "version1.2.3.4x 1.2.3.4x",
		"300.1.1.1":                                                   "300.1.1.1",
		"":                                                            "",
	} {
		if got := r.text(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

// No address or name of a snapshot is left anywhere, and the same is replaced by
// the same.
func TestRedact(t *testing.T) {
	s := full()
	s.Host.Hostname = "gw.example.org"
	s.Drops.Rows[0].Samples = []string{"tcp 192.168.0.2:4000 -> 192.0.2.1:80"}
	s.Drops.Rows[0].Namespace = "customer-a"
	s.KernelLog.Lines = append(s.KernelLog.Lines, "gw kernel: martian source 192.0.2.1 from 52:54:00:12:34:56")
	s.Owners = []Owner{{Setting: "x", Where: "/run/customer-a/1"}}
	s.Sysctls["net.ipv4.conf.192.0.2.1"] = "192.0.2.1"
	s.Netns.Container = "pod shop/cart-5d8f"
	s.Owners = append(s.Owners, Owner{Where: "cart-5d8f of shop/cart-5d8f"})
	newRedactor("key").Redact(s) // by another one a stand-in may begin like an address that was there
	if want := "pod-1 of pod-1"; s.Owners[1].Where != want || s.Netns.Container != "pod pod-1" {
		t.Errorf("%q, %q", s.Owners[1].Where, s.Netns.Container)
	}
	var b bytes.Buffer
	if err := Save(&b, s); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"192.0.2.1", "192.168.0.2", "2001:db8::1", "gw", "customer-a", "blue", "52:54"} {
		if strings.Contains(b.String(), secret) {
			t.Errorf("%q is left:\n%s", secret, b.String())
		}
	}
	source := s.Conntrack.Table.Sources[0].Addr.String()
	if !strings.Contains(s.Drops.Rows[0].Samples[0], source+":4000") {
		t.Errorf("%s in the table is not so in %q", source, s.Drops.Rows[0].Samples)
	}
	if s.Interfaces[0].Addresses[0].Addr() != s.Conntrack.Table.SNATPorts[0].Outside {
		t.Error("the interface's address is not the outside address any more")
	}
	if _, err := Load(&b); err != nil {
		t.Error(err)
	}
	// Nothing links two of them.
	again := full()
	Redact(again)
	if again.Interfaces[0].Addresses[0] == s.Interfaces[0].Addresses[0] {
		t.Error("two snapshots have the same stand-in")
	}
}

// What is called like a word of the kernel or of an engine leaves that word where it stands
// for itself, so that the snapshot is judged as before.
func TestRedactCommonNames(t *testing.T) {
	s := &Snapshot{
		Host: Host{Hostname: "net"}, Netns: Netns{Name: "nat", Container: "docker docker"},
		Drops:   &Drops{Rows: []Drop{{Namespace: "tcp", Samples: []string{"tcp 10.0.0.1:1 -> 10.0.0.2:2"}}}},
		Chains:  []Chain{{Table: "nat"}},
		Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
		Owners:  []Owner{{Where: "/etc/docker/daemon.json"}},
	}
	Redact(s)
	if s.Netns.Container != "docker docker" || s.Chains[0].Table != "nat" || s.Sysctls["net.ipv4.ip_forward"] != "1" ||
		s.Owners[0].Where != "/etc/docker/daemon.json" || !strings.HasPrefix(s.Drops.Rows[0].Samples[0], "tcp ") {
		t.Errorf("%+v", s)
	}
}

// A host's name takes along the domain behind it, which no field may hold.
func TestRedactDomain(t *testing.T) {
	s := &Snapshot{Host: Host{Hostname: "gw"}, Sysctls: map[string]string{"net.ipv4.conf.gw.forwarding": "1"}}
	for text, want := range map[string]string{
		"gw.shop.example kernel: gw":     "host-1 kernel: host-1",
		"from gw.shop.example.":          "from host-1.",
		"mail to root@gw.shop.example, ": "mail to root@host-1, ",
		"/etc/sysctl.d/gw.conf":          "/etc/sysctl.d/host-1.conf",
		"the end of gw. Then more":       "the end of host-1. Then more",
		"gw.2":                           "host-1.2",
		"gw2.shop.example":               "gw2.shop.example",
	} {
		s.KernelLog = &KernelLog{Lines: []string{text}}
		r := NewRedactor()
		one := *s
		one.Sysctls = nil
		if r.Redact(&one); one.KernelLog.Lines[0] != want {
			t.Errorf("%q is %q, want %q", text, one.KernelLog.Lines[0], want)
		}
	}
	if Redact(s); s.Sysctls["net.ipv4.conf.host-1.forwarding"] != "1" {
		t.Errorf("settings: %v", s.Sysctls)
	}
}

// A range of addresses holds other ones after they were replaced: it is not known
// any more.
func TestRedactRanges(t *testing.T) {
	first, last := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.9")
	s := &Snapshot{Chains: []Chain{{
		SNATTo: []AddrRange{{First: first, Last: last}, {First: last, Last: last}},
		DNATTo: []Target{{AddrRange: AddrRange{First: first, Last: last}}, {AddrRange: AddrRange{First: first, Last: first}}},
	}}}
	Redact(s)
	c := s.Chains[0]
	if len(c.SNATTo) != 1 || !c.SNATUnknown || len(c.DNATTo) != 1 || !c.DNATUnknown || c.SNATTo[0].First != c.SNATTo[0].Last {
		t.Errorf("%+v", c)
	}
}

func FuzzRedactText(f *testing.F) {
	f.Add("tcp 192.0.2.7:4000 -> [2001:db8::1]:80 52:54:00:12:34:56 ::ffff:192.0.2.1 fe80::1%eth0")
	f.Add("....::::1.2.3.4::")
	f.Fuzz(func(t *testing.T, s string) {
		r := newRedactor("key")
		once := r.text(s)
		if again := r.text(s); again != once {
			t.Errorf("%q, then %q", once, again)
		}
	})
}

// A snapshot of version 1, as it was first published, is read for ever, and every
// key of it still means something. A later version gets a file of its own; this one
// is not rewritten.
func TestLoadVersion1(t *testing.T) {
	file, err := os.ReadFile("testdata/snapshot-1.json")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Load(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	if s.Host.Hostname != "gw" || s.Conntrack.Table.SNATPorts[0].MaxPort != 5003 || s.Drops.Rows[0].Cause != CauseTableFull ||
		*s.Chains[0].PolicyPackets != 5 || s.Interfaces[0].Addresses[0].String() != "192.0.2.1/24" || s.KernelLog.TableFull != 2 {
		t.Errorf("%+v", s)
	}
	var again bytes.Buffer
	if err := Save(&again, s); err != nil {
		t.Fatal(err)
	}
	var was, is any
	if err := errors.Join(json.Unmarshal(file, &was), json.Unmarshal(again.Bytes(), &is)); err != nil {
		t.Fatal(err)
	}
	lost(t, "", was, is)
}

// lost reports what stands in was and not, or otherwise, in is.
func lost(t *testing.T, path string, was, is any) {
	t.Helper()
	switch was := was.(type) {
	case map[string]any:
		now, _ := is.(map[string]any)
		for key, value := range was {
			lost(t, path+"."+key, value, now[key])
		}
	case []any:
		now, _ := is.([]any)
		for i, value := range was {
			if i >= len(now) {
				t.Errorf("%s[%d] is gone", path, i)
				return
			}
			lost(t, fmt.Sprintf("%s[%d]", path, i), value, now[i])
		}
	default:
		if was != is {
			t.Errorf("%s was %v and is %v", path, was, is)
		}
	}
}
