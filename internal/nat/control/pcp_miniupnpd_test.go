// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"natkit/internal/testutil/ktest"
)

// miniupnpd is a gateway of netfilter with another program's server of PCP and NAT-PMP.
func miniupnpd(t *testing.T) *pcpTestbed {
	program := ktest.Tool(t, "miniupnpd")
	b := &pcpTestbed{&servedTestbed{testbed: makeTestbed(t)}, 1}
	dir := t.TempDir()
	conf := filepath.Join(dir, "miniupnpd.conf")
	if err := os.WriteFile(conf, []byte(`ext_ifname=out
ext_ip=1.1.1.1
listening_ip=in
enable_natpmp=yes
enable_upnp=no
min_lifetime=120
max_lifetime=86400
lease_file=`+filepath.Join(dir, "leases")+`
uuid=00000000-0000-0000-0000-000000000000
allow 1024-65535 10.0.0.0/24 1024-65535
`), 0o600); err != nil {
		t.Fatal(err)
	}
	b.nft(`table inet filter {
	chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
	chain miniupnpd { }
	chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
	chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; oifname out masquerade; }
	chain prerouting_miniupnpd { }
	chain postrouting_miniupnpd { }
}
`)
	b.in(b.gateway, func() error {
		cmd := exec.Command(program, "-d", "-f", conf, "-P", filepath.Join(dir, "pid"))
		out, err := os.Create(filepath.Join(dir, "out"))
		if err != nil {
			return err
		}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			return err
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if text, _ := os.ReadFile(out.Name()); t.Failed() {
				t.Logf("%s", text)
			}
			out.Close()
		})
		return nil
	})
	ktest.Wait(t, patient, "miniupnpd to answer", func() bool { return b.ask(b.client, "10.0.0.1:5351", []byte{0, 0}) != nil })
	return b
}

// Both servers answer each request with the same result, and grant the same, but where natkit has a
// reason: RFC 6887 has nonces (11.3) and one version; natkit gives no SCTP, not all ports, no PEER
// without a remote endpoint; and what is not there has ended.
func TestPCPBesideMiniupnpd(t *testing.T) {
	b := servePCP(t, pcpRules, AttachTC)
	beside := miniupnpd(t)
	option := func(q []byte, code byte, value ...byte) []byte {
		return append(q, append([]byte{code, 0, 0, byte(len(value))}, value...)...)
	}
	change := func(at int, to ...byte) func([]byte) {
		return func(q []byte) { copy(q[at:], to) }
	}
	peer := func(q []byte) {
		binary.BigEndian.PutUint16(q[60:], 9000)
		remote := netip.MustParseAddr("::ffff:198.51.100.9").As16()
		copy(q[64:], remote[:])
	}
	client := netip.MustParseAddr("::ffff:10.0.0.2").As16()
	for _, row := range []struct {
		name  string
		q     []byte
		want  byte
		other byte // of miniupnpd 2.3.1, where it differs
	}{
		{name: "NAT-PMP address", q: []byte{0, 0}},
		{name: "NAT-PMP UDP", q: []byte{0, 1, 0, 0, 0x1b, 0x58, 0x1b, 0x58, 0, 0, 2, 88}},
		{name: "NAT-PMP TCP", q: []byte{0, 2, 0, 0, 0x1b, 0x58, 0x1b, 0x58, 0, 0, 2, 88}},
		{name: "NAT-PMP end", q: []byte{0, 1, 0, 0, 0x1b, 0x58, 0, 0, 0, 0, 0, 0}},
		{name: "NAT-PMP end of all", q: []byte{0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
		{name: "NAT-PMP opcode 3", q: []byte{0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, want: 5},
		{name: "ANNOUNCE", q: b.request(0, 0, 0, 0, nil)[:24]},
		{name: "version 1", q: b.request(1, 17, 7100, 600, change(0, 1)), want: 1, other: 5},
		{name: "version 3", q: b.request(1, 17, 7100, 600, change(0, 3)), want: 1},
		{name: "opcode 3", q: b.request(3, 17, 7100, 600, nil), want: 4},
		{name: "cut short", q: b.request(1, 17, 7100, 600, nil)[:40], want: 3},
		{name: "no multiple of four", q: b.request(1, 17, 7100, 600, nil)[:59], want: 3},
		{name: "another address", q: b.request(1, 17, 7100, 600, change(23, 3)), want: 12},
		{name: "MAP UDP", q: b.request(1, 17, 7101, 600, change(42, 0x1b, 0xbd))},
		{name: "MAP UDP again", q: b.request(1, 17, 7101, 900, change(42, 0x1b, 0xbd))},
		{name: "MAP UDP, another nonce", q: b.request(1, 17, 7101, 600, change(24, 99)), want: 2, other: 0},
		{name: "MAP for a second", q: b.request(1, 17, 7101, 1, change(42, 0x1b, 0xbd))},
		{name: "MAP for years", q: b.request(1, 17, 7101, 1<<31, change(42, 0x1b, 0xbd))},
		{name: "MAP TCP, PREFER_FAILURE", q: option(b.request(1, 6, 7102, 600, change(42, 0x1b, 0xbe)), 2)},
		{name: "an option to ignore", q: option(b.request(1, 6, 7103, 600, change(42, 0x1b, 0xbf)), 200, 1, 2, 3, 4)},
		{name: "an option to know", q: option(b.request(1, 6, 7104, 600, nil), 100), want: 5},
		{name: "PREFER_FAILURE with a value", q: option(b.request(1, 6, 7104, 600, nil), 2, 1, 2, 3, 4), want: 6},
		{name: "THIRD_PARTY", q: option(b.request(1, 6, 7104, 600, nil), 1, client[:]...), want: 5},
		{name: "SCTP", q: b.request(1, 132, 7104, 600, nil), want: 9, other: 0},
		{name: "all ports", q: b.request(1, 17, 0, 600, nil), want: 9, other: 3},
		{name: "all protocols, a port", q: b.request(1, 0, 7104, 600, nil), want: 3},
		{name: "PEER", q: b.request(2, 17, 7105, 600, peer)},
		{name: "PEER without a remote endpoint", q: b.request(2, 17, 7105, 600, nil), want: 3, other: 0},
		{name: "end, another nonce", q: b.request(1, 17, 7101, 0, change(24, 99)), want: 2},
		{name: "end", q: b.request(1, 17, 7101, 0, nil)},
		{name: "end of nothing", q: b.request(1, 17, 7101, 0, nil), want: 0, other: 8},
	} {
		ours, theirs := b.ask(b.client, "10.0.0.1:5351", row.q), beside.ask(beside.client, "10.0.0.1:5351", row.q)
		if len(ours) < 8 || len(theirs) < 8 || ours[3] != row.want || theirs[3] != row.want && theirs[3] != row.other {
			t.Errorf("%s: result %d wanted\nnatkit    % x\nminiupnpd % x", row.name, row.want, ours, theirs)
			continue
		}
		if ours[3] == 0 && theirs[3] == 0 && !bytes.Equal(granted(ours), granted(theirs)) {
			t.Errorf("%s:\nnatkit    % x\nminiupnpd % x", row.name, ours, theirs)
		}
	}
}

// granted is what an answer grants, without the epoch, the external address and options.
func granted(a []byte) []byte {
	switch {
	case a[0] == 0 && len(a) == 16: // NAT-PMP: ports and lifetime
		return a[8:]
	case a[0] == 2 && len(a) >= 60: // lifetime, nonce, protocol, ports, and the endpoint of PEER
		out := append(bytes.Clone(a[4:8]), a[24:44]...)
		if a[1]&0x7f == 2 {
			out = append(out, a[60:80]...)
		}
		return out
	}
	return a[:2]
}
