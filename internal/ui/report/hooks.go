// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"natkit/internal/snapshot"
)

// Hooks is what a packet of a namespace walks through, as `natkit hooks` shows it.
type Hooks struct {
	Netns  uint64          `json:"netns_inode"` // inode
	Hooks  []snapshot.Hook `json:"hooks"`       // by family and hook, in the order of a packet's way
	Engine *EngineNote     `json:"natkit_engine,omitempty"`
}

// Text writes a table for each hook that has a function, the first one with headers.
func (r *Hooks) Text(w io.Writer) error {
	var b strings.Builder
	if len(r.Hooks) == 0 {
		b.WriteString("No function is registered on a netfilter hook here.\n")
	}
	place := func(h snapshot.Hook) string {
		return strings.Join(strings.Fields(h.Family+" "+h.Device+" "+h.Hook), " ")
	}
	for start := 0; start < len(r.Hooks); {
		end := start
		for end < len(r.Hooks) && place(r.Hooks[end]) == place(r.Hooks[start]) {
			end++
		}
		if start > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%s\n", place(r.Hooks[start]))
		t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
		if start == 0 {
			fmt.Fprintf(t, "%12s\t%s\t%s\t%s\n", "priority", "stage", "function (└: called by the one above)", "owner, chain")
		}
		for _, h := range r.Hooks[start:end] {
			fmt.Fprintf(t, "%12d\t%s\t%s\t%s\n", h.Priority, priorityName(h), functionCell(h), strings.TrimSpace(h.Owner+" "+h.Chain))
		}
		t.Flush()
		start = end
	}
	if r.Engine != nil {
		b.WriteString("\n" + r.Engine.Line())
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// functionCell sets what another function on the hook calls apart from what the
// hook itself calls.
func functionCell(h snapshot.Hook) string {
	if h.Via != "" {
		return "└ " + h.Function
	}
	return h.Function
}

// priorityName is the standard name of a priority: linux/netfilter_ipv4.h,
// linux/netfilter_bridge.h.
func priorityName(h snapshot.Hook) string {
	switch {
	case h.Via != "":
		return ""
	case h.Priority == math.MinInt32:
		return "first"
	case h.Priority == math.MaxInt32:
		return "last"
	}
	names := map[int]string{
		-450: "raw before defrag", -400: "defrag", -300: "raw", -225: "selinux first", -200: "conntrack",
		-150: "mangle", -100: "dstnat", 0: "filter", 50: "security", 100: "srcnat", 225: "selinux last",
		300: "helper",
	}
	switch h.Family {
	case "bridge":
		names = map[int]string{-300: "dstnat", -200: "filter", 0: "br_netfilter", 100: "out", 200: "filter other", 300: "srcnat"}
	case "arp", "netdev":
		names = map[int]string{0: "filter"}
	}
	return names[h.Priority]
}

// trimLines takes the blanks away that padding leaves at the ends of lines, and what a terminal would obey:
// an interface may be called anything.
func trimLines(s string) string {
	lines := strings.Split(snapshot.CleanLines(s), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}
