// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/testutil/ktest"
)

// What docs/carrier.md shows works: every subscriber of the lab opens sessions through the rule file
// of that page, and is listed.
func TestCarrierLab(t *testing.T) {
	ktest.Root(t)
	t.Setenv("NATKIT_RUN_DIR", t.TempDir())
	page, err := os.ReadFile("../../docs/carrier.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	rules, _, _ := strings.Cut(rest, "```\n")
	file := filepath.Join(t.TempDir(), "carrier.yaml")
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	must := func(args ...string) string {
		t.Helper()
		code, out, errs := natkit(t, args...)
		if code != exitOK {
			t.Fatalf("%s: exit code %d: %s", strings.Join(args, " "), code, errs)
		}
		return out
	}
	name := fmt.Sprintf("carrier-test-%d", os.Getpid())
	must("lab", "up", "carrier", "--name", name, "--rules", "none", "--server", "none")
	t.Cleanup(func() { must("lab", "down", name) })
	l, err := lab.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	gateway := name + "-gateway"
	must("up", "--engine", "ebpf", "--netns", gateway, "-f", file)
	t.Cleanup(func() { must("down", "--netns", gateway) })

	const each = 3
	count := 0
	if err := l.Node(lab.RoleClient).Do(func() error {
		for host := l.Subscribers().Addr(); l.Subscribers().Contains(host); host = host.Next() {
			for port := range each {
				from := net.UDPAddrFromAddrPort(netip.AddrPortFrom(host, uint16(4000+port)))
				c, err := net.DialUDP("udp4", from, &net.UDPAddr{IP: l.ServerNode().Addr.AsSlice(), Port: 9})
				if err != nil {
					return err
				}
				_, _ = c.Write([]byte("x")) // nobody listens: an ICMP error may have come back
				c.Close()
			}
			count++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var got control.Subscribers
	out := must("subscribers", "--netns", gateway, "-o", "json")
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	if count != 1024 || len(got.Pools) != 1 || got.Pools[0].Subscribers != count || got.Pools[0].Sessions != each*count || got.Pools[0].Blocks != count {
		t.Errorf("of %d subscribers: %+v", count, got)
	}
}
