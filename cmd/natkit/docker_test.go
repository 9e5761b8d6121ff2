// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// dockersRules are what dockerd makes for one container with a published port, as
// iptables-save lists them.
const dockersRules = `*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -o docker0 -j DOCKER
-A DOCKER-FORWARD -i docker0 -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
`

// The way of the README from Docker's rules to the engine, step by step: up refuses, and
// each command line that the refusal ends with works.
func TestFromDockersRulesToTheEngine(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close(); netns.Delete(name) })
	err = ns.Do(func() error {
		var errs []error
		for _, l := range []struct{ name, address string }{{"docker0", "172.17.0.1/16"}, {"eth0", "198.51.100.1/24"}} {
			errs = append(errs, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: l.name}, PeerName: l.name + "-peer"}))
			link, err := netlink.LinkByName(l.name)
			ip, network, err2 := net.ParseCIDR(l.address)
			network.IP = ip
			errs = append(errs, err, err2, netlink.AddrAdd(link, &netlink.Addr{IPNet: network}), netlink.LinkSetUp(link))
		}
		restore := exec.Command(ktest.Tool(t, "iptables-nft-restore"))
		restore.Stdin = strings.NewReader(dockersRules)
		if out, err := restore.CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("iptables-nft-restore: %w: %s", err, out))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Fatal(err)
	}

	t.Chdir(t.TempDir())
	code, rules, stderr := observed(t.Context(), "import --from iptables --inside docker0 --outside eth0 --netns "+name)
	if code != exitOK && code != exitFindings || !strings.Contains(rules, "dnat: tcp 198.51.100.1:8080") {
		t.Fatalf("import: exit %d: %s%s", code, rules, stderr)
	}
	if err := os.WriteFile("nat.yaml", []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, stderr := observed(t.Context(), "up -f nat.yaml --dry-run --netns "+name); code != exitOK || !strings.Contains(out, "FORWARD") {
		t.Errorf("dry run: exit %d: %s%s", code, out, stderr)
	}
	code, _, refusal := observed(t.Context(), "up -f nat.yaml --netns "+name)
	if code != exitError || !strings.Contains(refusal, "FORWARD") {
		t.Fatalf("up: exit %d: %s", code, refusal)
	}
	commands := regexp.MustCompile(`(?m)^\s+natkit (.*)$`).FindAllStringSubmatch(refusal, -1)
	if len(commands) != 2 {
		t.Fatalf("the refusal has %d commands: %s", len(commands), refusal)
	}
	for _, command := range commands {
		if code, out, stderr := observed(t.Context(), command[1]); code != exitOK {
			t.Errorf("natkit %s: exit %d: %s%s", command[1], code, out, stderr)
		}
		if code, out, stderr := observed(t.Context(), "down --netns "+name); code != exitOK {
			t.Errorf("down: exit %d: %s%s", code, out, stderr)
		}
	}
	if !strings.HasSuffix(commands[0][1], "--bypass") || !strings.HasSuffix(commands[1][1], "--engine nft") {
		t.Errorf("commands %v", commands)
	}
}
