// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"natkit/internal/ktest"
	"natkit/internal/netns"
)

// Rules that must see every packet, by those who write them: nft and both iptables.
func TestPerPacket(t *testing.T) {
	ktest.Root(t)
	nft := ktest.Tool(t, "nft")
	for _, c := range []struct{ program, rules, chain, want string }{
		{nft, "-f -\ntable ip filter {\n quota q { over 10 mbytes\n }\n chain FORWARD { type filter hook forward priority 0\n ct state established limit rate 10/second accept\n ip dscp set cs1\n quota name q drop\n tcp dport 80 counter accept\n }\n}\n", "FORWARD", "limit objref payload"},
		{nft, "-f -\ntable ip filter {\n chain FORWARD { type filter hook forward priority 0\n ct state established,related counter accept\n meta mark set 1\n ip saddr 10.0.0.0/8 drop\n }\n}\n", "FORWARD", ""},
		{ktest.Tool(t, "iptables-nft"), "-A FORWARD -m limit --limit 5/sec -j ACCEPT", "FORWARD", "limit"},
		{ktest.Tool(t, "iptables-legacy"), "-A FORWARD -m length --length 100:200 -j LOG", "FORWARD", "LOG length"},
		{ktest.Tool(t, "iptables-legacy"), "-A FORWARD -p tcp --tcp-flags SYN,RST SYN -m conntrack --ctstate NEW -j ACCEPT", "FORWARD", ""},
	} {
		ns, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		args, stdin, _ := strings.Cut(c.rules, "\n")
		err = ns.Do(func() error {
			cmd := exec.Command(c.program, strings.Fields(args)...)
			cmd.Stdin = strings.NewReader(stdin)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s %s: %v", c.program, c.rules, err)
			ns.Close()
			continue
		}
		chains, err := Chains(ns)
		if err != nil {
			t.Error(err)
		}
		found := false
		for _, chain := range chains {
			if chain.Name == c.chain && chain.Table == "filter" {
				found = true
				if got := strings.Join(slices.Sorted(slices.Values(chain.PerPacket)), " "); got != c.want {
					t.Errorf("%s %s: per packet %q, want %q", c.program, c.rules, got, c.want)
				}
			}
		}
		if !found {
			t.Errorf("%s %s: no chain", c.program, c.rules)
		}
		ns.Close()
	}
}
