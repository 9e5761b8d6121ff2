// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/nft"
	"natkit/internal/scenario"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// HookCost is what the packets of a namespace walk through, what it takes, and what
// of it is needless, as `natkit hooks --cost` shows it.
type HookCost struct {
	Netns     uint64              `json:"netns_inode"` // inode
	Seconds   float64             `json:"interval_s"`
	Samples   uint64              `json:"sample_count"`    // of all processors
	Whole     float64             `json:"hooks_share"`     // share of time below nf_hook_slow, 0 to 1
	Framework float64             `json:"framework_share"` // of that, nf_hook_slow itself
	Hooks     []HookCostRow       `json:"hooks"`
	Needless  []trim.Needless     `json:"needless"`
	Measured  *scenario.HookCosts `json:"measured,omitzero"`
	Unseen    []trimUnseen        `json:"unseen"`
	Engine    *EngineNote         `json:"natkit_engine,omitempty"`

	known bool // what hangs on the hooks
}

// HookCostRow is a function on a hook, with the rules of the chain behind it.
type HookCostRow struct {
	trim.Cost
	RuleUse []nft.RuleUse `json:"rule_use,omitzero"` // packets in the window
}

type trimUnseen struct {
	What   string `json:"what"`
	Reason string `json:"reason"`
}

// NewHookCost joins facts, a profile and the use of rules of the same time.
func NewHookCost(s *snapshot.Snapshot, p *observe.Profile, rules map[nft.ChainName][]nft.RuleUse) *HookCost {
	stacks := make([]snapshot.Stack, 0, len(p.Stacks))
	for _, stack := range p.Stacks {
		frames := make([]string, len(stack.Frames))
		for i, f := range stack.Frames {
			frames[i] = f.Function
		}
		stacks = append(stacks, snapshot.Stack{Count: stack.Count, Frames: frames})
	}
	r := &HookCost{Netns: s.Netns.Inode, Seconds: s.WindowSeconds, Samples: p.Samples, Hooks: []HookCostRow{},
		Needless: append([]trim.Needless{}, trim.Find(s)...), Unseen: []trimUnseen{}, Engine: NewHooksNote(s.Engine, s.Netns.Name), known: s.Hooks != nil}
	for _, c := range trim.Costs(s, stacks, p.Samples) {
		row := HookCostRow{Cost: c}
		if chain := trim.ChainOf(s, c.Hook); chain != nil && chain.Backend == "nft" {
			row.RuleUse = rules[nft.ChainName{Family: chain.Family, Table: chain.Table, Chain: chain.Name}]
		}
		r.Hooks = append(r.Hooks, row)
	}
	r.Framework, r.Whole = trim.Framework(stacks, p.Samples)
	for _, c := range s.Capabilities {
		switch c.Name {
		case snapshot.CanHooks, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanConntrackDump, snapshot.CanCounters:
			if !c.OK {
				r.Unseen = append(r.Unseen, trimUnseen{c.Name, c.Reason})
			}
		}
	}
	return r
}

// Miss notes what could not be seen.
func (r *HookCost) Miss(what string, err error) {
	r.Unseen = append(r.Unseen, trimUnseen{what, err.Error()})
}

// mostRules is how many rules of a chain are shown as text.
const mostRules = 10

// Text writes the hooks with their shares, then what is needless and how it goes.
func (r *HookCost) Text(w io.Writer) error {
	var p page
	head := fmt.Sprintf("%.1f s; time was not sampled.", r.Seconds)
	if r.Samples > 0 {
		head = fmt.Sprintf("%.1f s, %s of all processors: %s of the time below nf_hook_slow, %s in the function itself. "+
			"Samples are of the whole machine; packets are this namespace's.", r.Seconds, plural.Count(r.Samples, "sample"), percent.Of(r.Whole, 2), percent.Of(r.Framework, 2))
	}
	p.text("", "", head)
	r.hooksText(&p)
	r.measuredText(&p)
	r.needlessText(&p)
	for i, u := range r.Unseen {
		if i == 0 {
			p.b.WriteString("\nCould not be seen:\n")
		}
		p.text("  ", "    ", u.What+": "+u.Reason)
	}
	_, err := io.WriteString(w, trimLines(p.b.String()))
	return err
}

// hooksText is the table of functions, by hook.
func (r *HookCost) hooksText(p *page) {
	switch {
	case !r.known:
	case len(r.Hooks) == 0:
		p.text("", "", "No function is registered on a netfilter hook here.")
	default:
		fmt.Fprintf(&p.b, "\n%8s %9s %6s  hook\n", "of time", "packets", "rules")
	}
	place, shared := "", false
	for _, c := range r.Hooks {
		if here := strings.Join(strings.Fields(c.Family+" "+c.Device+" "+c.Hook.Hook), " "); here != place {
			place = here
			fmt.Fprintf(&p.b, "%26s%s\n", "", place)
		}
		rules, mark, share := "-", " ", "-"
		if c.Rules >= 0 {
			rules = strconv.Itoa(c.Rules)
		}
		if c.Shared && c.Samples > 0 {
			mark, shared = "*", true
		}
		if r.Samples > 0 {
			share = percent.Of(c.Share, 2)
		}
		name := strings.TrimSpace(functionCell(c.Hook) + "  " + strings.TrimSpace(c.Owner+" "+c.Chain))
		fmt.Fprintf(&p.b, "%8s%s%9s %6s    %s\n", share, mark, counted(c.Packets), rules, name)
		for i, use := range c.RuleUse {
			if i == mostRules {
				fmt.Fprintf(&p.b, "%28s%s: -o json\n", "", plural.Count(len(c.RuleUse)-mostRules, "more rule"))
				break
			}
			fmt.Fprintf(&p.b, "%8s %9s %6s    %srule handle %d\n", "", counted(use.Packets), "", map[bool]string{true: "  "}[c.Via != ""], use.Handle)
		}
	}
	if r.Engine != nil {
		p.b.WriteString("\n" + r.Engine.Line())
	}
	if shared {
		p.text("", "  ", "* sum of all functions of that name on the hook: a stack does not distinguish chains")
	}
}

// counted is a number that may be unknown.
func counted(n *uint64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatUint(*n, 10)
}

// measuredText is what the parts of the path cost in a lab.
func (r *HookCost) measuredText(p *page) {
	if r.Measured == nil {
		return
	}
	p.b.WriteString("\nMeasured in a lab on this kernel just now, cost of a forwarded 64-byte frame:\n")
	for _, part := range r.Measured.Parts {
		what := fmt.Sprintf("%s (%s less %s; middle half of the trials of both %.0f ns)", part.Name, part.More, part.Less, part.Noise)
		if part.NS <= part.Noise {
			what += ": within the noise"
		}
		p.text(fmt.Sprintf("%8.0f ns  ", part.NS), "             ", what)
	}
}

// needlessText is what no rule needs, and the commands that remove it.
func (r *HookCost) needlessText(p *page) {
	switch {
	case len(r.Needless) > 0:
		p.b.WriteString("\nNo rule in use needs:\n")
	case len(r.Hooks) > 0:
		p.b.WriteString("\nNothing superfluous was found.\n")
	}
	for _, n := range r.Needless {
		what := n.What
		if n.SavesNS != nil {
			what += fmt.Sprintf("; removing it saves %.0f ns per forwarded packet, by the measurement above", *n.SavesNS)
		}
		if n.Unmeasured != "" {
			what += "; the saving was not measured: " + n.Unmeasured
		}
		p.text("- ", "  ", what)
		p.text("    ", "    ", n.Why)
		for _, line := range n.Commands {
			if remark, ok := strings.CutPrefix(line, "# "); ok {
				p.text("    # ", "    # ", remark)
			} else {
				p.b.WriteString("    " + line + "\n")
			}
		}
	}
	if len(r.Needless) > 0 && r.Measured == nil {
		p.text("", "", "The saving was not measured: --measure compares routers in a lab on this kernel, which takes about forty seconds.")
	}
}
