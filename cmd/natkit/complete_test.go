// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// offered is what a shell would offer for a command line, the last word of which has been begun.
func offered(t *testing.T, line string) []string {
	t.Helper()
	root := testRoot()
	var out strings.Builder
	root.SetOut(&out)
	root.SetArgs(append([]string{cobra.ShellCompNoDescRequestCmd}, strings.Split(line, " ")...))
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	return lines[:len(lines)-1] // the last one is the directive
}

func TestCompletion(t *testing.T) {
	for line, want := range map[string]string{
		"doc":                                  "doctor",
		"doctor -o ":                           "text json html",
		"doctor --output=h":                    "html",
		"conntrack list --state TIME":          "TIME_WAIT",
		"conntrack list --state time":          "TIME_WAIT",
		"conntrack list --state SYN_SENT,TIME": "SYN_SENT,TIME_WAIT",
		"sessions --state tcp_e":               "tcp_established",
		"conntrack top --by d":                 "destination dport",
		"up --engine ":                         "ebpf nft",
		"serve --attach x":                     "xdp",
		"accel on l":                           "lo",
		"accel on eth0 l":                      "lo",
		"bench udp --router ebpf-":             "ebpf-tc",
		"bench subscribers --router ebpf-b":    "ebpf-blocks",
		"bench udp --router none,ebpf-":        "none,ebpf-tc",
		"drops --cause conn":                   "conntrack-table-full",
		"tune plan --confirm conntrack-acc":    "conntrack-accounting",
		"lab run mtu":                          "mtu-drop",
		"lab up pub":                           "published",
		"lab up --rules iptables-":             "iptables-legacy",
		"events --kind created,re":             "created,refused",
		"bench cps --protocol ":                "udp tcp",
		"import --from ":                       "iptables nft",
		"bench udp --tx l":                     "lo",
		"down x":                               "",
	} {
		got := offered(t, line)
		for _, w := range strings.Fields(want) {
			if !slices.Contains(got, w) {
				t.Errorf("natkit %s<TAB>: %q, want %s", line, got, want)
			}
		}
		if want == "" && len(got) > 0 {
			t.Errorf("natkit %s<TAB>: %q, want nothing", line, got)
		}
	}
}

func TestCompletionOfNamespaces(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	ns.Close()
	if got := offered(t, "doctor --netns "+name[:len(name)-1]); !slices.Contains(got, name) {
		t.Errorf("%q, want %s", got, name)
	}
	code, _, stderr := observed(t.Context(), "conntrack stats --netns "+name+"x")
	if code != exitError || !strings.Contains(stderr, "did you mean "+name+"?") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}

// A flag whose help lists its values completes them, and what is in the tables of completions is there.
func TestCompletionIsWhole(t *testing.T) {
	used := map[string]bool{}
	leaves(testRoot(), nil, func(cmd *cobra.Command, _ []string) {
		path := cmd.CommandPath()
		if argumentWords[path] != nil {
			used[path] = true
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			used[path+" "+f.Name], used[f.Name] = true, true
			_, completes := cmd.GetFlagCompletionFunc(f.Name)
			if strings.Contains(f.Usage, " or ") && strings.Contains(f.Usage, ": ") && f.Value.Type() == "string" && !completes && f.Name != "from" && f.Name != "netns" {
				t.Errorf("%s --%s: nothing to complete, but %q", path, f.Name, f.Usage)
			}
		})
	})
	for name := range flagWords {
		if name != "netns" && !used[name] {
			t.Errorf("no flag %s", name)
		}
	}
	for path := range argumentWords {
		if !used[path] {
			t.Errorf("no command %s", path)
		}
	}
}
