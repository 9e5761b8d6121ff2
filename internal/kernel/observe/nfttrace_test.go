// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// pinned is a namespace with a name, until the test ends.
func pinned(t *testing.T) (ns *netns.Handle, name string) {
	t.Helper()
	ktest.Root(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	name = ktest.Name(t)
	if err := ns.Pin(name); err != nil {
		t.Fatal(err)
	}
	id, err := ns.ID()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Unpin(name, id) })
	return ns, name
}

// Rules for which the kernel found no room are an error, behind which the next ones are read.
func TestRulesLost(t *testing.T) {
	ns, name := pinned(t)
	var c net.Conn
	if err := ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			return err
		}
		for _, command := range []string{"add table ip fw", "add chain ip fw out { type filter hook output priority 0 ; }", "add rule ip fw out udp dport 9 counter", "add rule ip fw out udp dport 9 accept"} {
			if err := exec.Command(ktest.Tool(t, "nft"), strings.Fields(command)...).Run(); err != nil {
				return err
			}
		}
		c, err = net.Dial("udp4", "127.0.0.1:9")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	tr, err := OpenRuleTrace(HookedPlace{Place: netns.Place{Ref: name, Inode: ns.Inode()}}, PacketFilter{Protocol: unix.IPPROTO_UDP, Rate: 1_000_000})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if err := tr.events.SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	read := func() (rules int, lost bool) {
		for {
			events, err := tr.Read(time.Now().Add(100 * time.Millisecond))
			rules += len(events)
			switch {
			case errors.Is(err, ErrRulesLost):
				lost = true
			case errors.Is(err, os.ErrDeadlineExceeded):
				return rules, lost
			case err != nil:
				t.Fatal(err)
			}
		}
	}
	for range 1000 {
		_, _ = c.Write([]byte("x")) // nobody listens
	}
	if rules, lost := read(); !lost {
		t.Errorf("nothing is lost of %d rules", rules)
	}
	_, _ = c.Write([]byte("x"))
	_, _ = c.Write([]byte("x")) // the first one may be the error that nobody listens
	if rules, lost := read(); rules == 0 || lost {
		t.Errorf("later %d rules, lost: %v", rules, lost)
	}
}

// A rule that asks for a connection has the kernel track those of its table's family: a trace asks only where they are tracked.
func TestTraceTracksNothing(t *testing.T) {
	ns, name := pinned(t)
	if err := ns.Do(func() error {
		return exec.Command(ktest.Tool(t, "nft"), "table ip nat { chain post { type nat hook postrouting priority 100; masquerade; }; }").Run()
	}); err != nil {
		t.Fatal(err)
	}
	lister := OpenHooks()
	defer lister.Close()
	tracking := func() (families []string) {
		hooks, err := lister.List(ns)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range hooks {
			if h.Priority == conntrackPriority && !slices.Contains(families, h.Family) {
				families = append(families, h.Family)
			}
		}
		return families
	}
	before := tracking()
	place := HookedPlace{Place: netns.Place{Ref: name, Inode: ns.Inode()}, Tracks4: true}
	tr, err := OpenRuleTrace(place, PacketFilter{Protocol: unix.IPPROTO_UDP, Rate: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if after := tracking(); len(before) != 1 || !slices.Equal(after, before) {
		t.Errorf("tracked before: %v, while it traces: %v", before, after)
	}
}

// What the kernel refuses once is not taken for done, and its answers not for those of what comes next.
func TestFollowRefused(t *testing.T) {
	ns, name := pinned(t)
	tr, err := OpenRuleTrace(HookedPlace{Place: netns.Place{Ref: name, Inode: ns.Inode()}}, PacketFilter{Protocol: unix.IPPROTO_UDP, Rate: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	tuple := snapshot.TraceTuple{Protocol: "udp", Source: netip.MustParseAddrPort("192.0.2.1:1000"), Destination: netip.MustParseAddrPort("192.0.2.2:53")}
	tr.family = unix.NFPROTO_ARP // in which the table is not
	if err := tr.Follow(tuple); err == nil {
		t.Fatal("elements of a table that is not there are taken")
	}
	tr.family = unix.NFPROTO_INET
	if err := tr.Follow(tuple); err != nil {
		t.Fatal(err)
	}
	var rules []byte
	if err := ns.Do(func() (err error) {
		rules, err = exec.Command(ktest.Tool(t, "nft"), "list", "ruleset").Output()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(rules), "elements = {") || strings.Count(string(rules), followedSets[0]) < 1+len(markChains) {
		t.Errorf("the connection is not followed:\n%s", rules)
	}
}
