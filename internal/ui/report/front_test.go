// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

// Three lines of state, and what to type next: each says what was measured, and what was not.
func TestFront(t *testing.T) {
	docker := trim.Translator{Backend: "nft", Family: "ip", Table: "nat", Rules: 3, Programs: []string{"Docker", "libvirt"}}
	for _, tt := range []struct {
		name string
		f    Front
		want []string
	}{
		{"idle", Front{Table: conntrack.Limits{Count: 1, Max: 262144}, DropsSeconds: 0.5, Root: true}, []string{
			"table  1 of 262144 connection tracking entries used (<0.1 %)\n", "drops  none in the last 0.5 s\n",
			"NAT    nothing translates", "  natkit doctor  ", "  natkit demo  ", "evidence and cure",
		}},
		{"full", Front{Table: conntrack.Limits{Count: 100, Max: 100}, DropsSeconds: 0.5, Root: true, Kernel: []trim.Translator{docker}, In: "gw",
			Drops: snapshot.Drops{Rows: []snapshot.Drop{{Count: 7, Cause: snapshot.CauseTooBig}, {Count: 70, Cause: snapshot.CauseTableFull}, {Count: 9, Benign: true}, {Count: 1}}, LostEvents: 2}}, []string{
			"(100.0 %): FULL", "drops  80 packets in the last 0.5 s: conntrack-table-full 70, mtu 7, cause unknown 2, other 1\n",
			"NAT    kernel, 3 rules in nft table ip nat (Docker, libvirt)\n", "  natkit doctor --netns gw  ", "why: evidence",
		}},
		{"no rights", Front{Table: conntrack.Limits{Count: 1, Max: 10}, DropsUnseen: "root is needed", Create: 9, Confirm: 3, KernelUnseen: "root is needed", EngineUnseen: "root is needed"}, []string{
			"drops  not traced: root is needed; connection tracking itself refused 12 packets since this namespace was created (no entry 9, insertion failed 3)\n",
			"NAT    unknown: root is needed\n", "  sudo natkit doctor  ",
		}},
		{"nothing readable", Front{TableUnseen: "x", DropsUnseen: "y", RefusedUnseen: "z", KernelUnseen: "k"}, []string{
			"table  unknown: x\n", "drops  not traced: y\n", "NAT    rules of the kernel unknown: k\n",
		}},
		{"engine nft", Front{Root: true, Engine: &snapshot.Engine{Kind: "nft", Rules: 2, Table: "ip natkit"},
			Kernel: []trim.Translator{{Backend: "nft", Family: "ip", Table: "natkit", Rules: 2}}}, []string{"NAT    natkit's engine nft (2 rules)\n", "0 connection tracking entries, no limit"}},
		{"accelerated", Front{Engine: &snapshot.Engine{Kind: "accel", Sessions: 1}, Kernel: []trim.Translator{docker}}, []string{
			"NAT    accelerated by natkit accel (1 fast-path entry); kernel, 3 rules in",
		}},
	} {
		var b strings.Builder
		if err := tt.f.Text(&b); err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(b.String(), want) {
				t.Errorf("%s: no %q in\n%s", tt.name, want, b.String())
			}
		}
		state, _, _ := strings.Cut(b.String(), "\n\n")
		if strings.Count(state, "\n") != 2 {
			t.Errorf("%s: more than three lines of state\n%s", tt.name, b.String())
		}
	}
}
