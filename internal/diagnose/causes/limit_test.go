// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// limited is a rule with a limit that dropped a few packets, 40 of a million.
func limited(text, packet string) func(s *snapshot.Snapshot) {
	return func(s *snapshot.Snapshot) {
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "f", Name: "fw", Hook: "forward", Type: "filter", Policy: "accept", Rules: 1,
			DropRules: []snapshot.DropRule{{Number: 1, Verdict: "drop"}},
			Walk:      []snapshot.Rule{{Number: 1, Handle: 4, Text: text + " drop", Verdict: "drop", Matches: []snapshot.Match{{Text: text}}}}})
		row := drop(40, snapshot.CauseRule, "eth1", sample(packet))
		row.Packets = []snapshot.DroppedPacket{{Text: packet, Stands: 40, Stage: snapshot.StageRouted, In: "eth1", Out: "eth0", State: "new", TTL: 63, Length: 60}}
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
}

// A client that can't open connections for a limit notices that, whatever else it sends: a limit of any kind.
func TestLimits(t *testing.T) {
	const syn = "tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"
	var rows []row
	for _, text := range []string{"add @who { ip saddr ct count over 5 }", "update @who { ip saddr timeout 60s limit rate over 10/minute }", "ct count over 7", "limit rate over 2/second",
		"quota over 1000 bytes", "-m connlimit --connlimit-above 5 --connlimit-mask 32 --connlimit-saddr", "-m hashlimit --hashlimit-above 5/sec --hashlimit-name w",
		"-m recent --update --seconds 60 --hitcount 10 --name w --rsource", "-m connbytes --connbytes 5: --connbytes-mode bytes --connbytes-dir both"} {
		rows = append(rows, row{text, limited(text, syn), "warning rule-drop"})
	}
	run(t, append(rows,
		row{"a condition that is no limit", limited("meta cpu 1", syn), ""},
		row{"packets that open nothing", limited("limit rate over 2/second", "udp 192.168.1.20:4000 -> 203.0.113.80:443"), ""},
		row{"a stranger's connections", limited("limit rate over 2/second", "tcp 203.0.113.9:4000 -> 192.168.1.80:22 SYN"), ""}))

	s := gateway()
	limited("add @who { ip saddr ct count over 5 }", syn)(s)
	s.Conntrack.Table.Sources = []snapshot.Talker{{Addr: addr("192.168.1.20"), Entries: 6}}
	f := Judge(s)[0]
	if want := "`add @who { ip saddr ct count over 5 } drop` (handle 4) dropped 40 packets"; !strings.HasPrefix(f.Title, want) {
		t.Errorf("title %q, want %q", f.Title, want)
	}
	if want := "192.168.1.20 (40 packets; 6 connections in the table)"; !slices.ContainsFunc(f.Evidence, func(e Evidence) bool { return strings.Contains(e.Value, want) }) {
		t.Errorf("nothing says %q: %+v", want, f.Evidence)
	}
}

// What a rule accepts up to a limit and the end of the chain drops is the limit's: no cure opens more.
func TestLimitBeforePolicy(t *testing.T) {
	const syn = "tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"
	accepting := snapshot.Rule{Number: 1, Handle: 4, Text: "limit rate 5/second accept", Verdict: "accept", Matches: []snapshot.Match{{Text: "limit rate 5/second"}}}
	for name, end := range map[string]snapshot.Chain{
		"forward-policy-drop": {Policy: "drop"},
		"rule-drop": {Policy: "accept", DropRules: []snapshot.DropRule{{Number: 2, Verdict: "drop"}}, Walk: []snapshot.Rule{
			{Number: 2, Handle: 5, Text: "ct state new drop", Verdict: "drop", Matches: []snapshot.Match{{Keys: []string{"ct state"}, Values: []string{"new"}, Text: "ct state new"}}}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := gateway()
			limited("meta cpu 1", syn)(s)
			c := &s.Chains[len(s.Chains)-1]
			c.Policy, c.DropRules, c.Walk = end.Policy, end.DropRules, append([]snapshot.Rule{accepting}, end.Walk...)
			found := Judge(s)
			if len(found) == 0 || found[0].Code != name || found[0].Severity != Warning {
				t.Fatalf("found %+v", found)
			}
			remedy := strings.Join(found[0].Remedy, "\n")
			if !strings.Contains(found[0].Title, ": over `limit rate 5/second`") || !strings.Contains(remedy, "raise that limit") || strings.Contains(remedy, "insert") || strings.Contains(remedy, "delete") {
				t.Errorf("%s\n%s", found[0].Title, remedy)
			}
		})
	}
}
