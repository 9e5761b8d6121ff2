// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"

	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// ImportYAML writes imported rules as a rule file, with what is not in it as comments.
func ImportYAML(w io.Writer, i *nft.Imported) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s from %s\n", plural.Count(len(i.File.Rules), "rule"), oneLine(i.File.Name))
	for _, lost := range []bool{true, false} {
		title := map[bool]string{true: "Not converted, or with another effect:", false: "Converted, with a difference:"}[lost]
		for _, n := range i.Notes {
			if n.Lost != lost {
				continue
			}
			if title != "" {
				fmt.Fprintf(&b, "#\n# %s\n", title)
				title = ""
			}
			if n.Line > 0 {
				fmt.Fprintf(&b, "#   line %d: %s\n#     %s\n", n.Line, oneLine(n.Rule), oneLine(n.Why))
			} else {
				fmt.Fprintf(&b, "#   %s\n", oneLine(n.Why))
			}
		}
	}
	b.WriteString("\n" + i.File.Text())
	_, err := io.WriteString(w, b.String())
	return err
}

// oneLine keeps a comment a comment.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r == 0x2028 || r == 0x2029 { // a line ends there, for YAML
			return '?'
		}
		return r
	}, snapshot.CleanText(text))
}

// ImportView is what natkit import -o json prints.
type ImportView struct {
	Inside  []string     `json:"inside"`
	Outside []string     `json:"outside"`
	Pools   []ImportPool `json:"pools"`
	Rules   []string     `json:"rule_lines"` // as a rule file has them between braces
	Notes   []nft.Note   `json:"differences"`
}

// ImportPool is a pool that rules name.
type ImportPool struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	Ports     string   `json:"port_range,omitempty"`
}

// Import makes the view of imported rules.
func Import(i *nft.Imported) ImportView {
	v := ImportView{
		Inside: append([]string{}, i.File.Inside...), Outside: append([]string{}, i.File.Outside...),
		Pools: []ImportPool{}, Rules: []string{}, Notes: append([]nft.Note{}, i.Notes...),
	}
	for _, p := range i.File.Pools {
		pool := ImportPool{Name: p.Name, Ports: p.Ports.String()}
		for _, r := range p.Addresses {
			pool.Addresses = append(pool.Addresses, r.String())
		}
		v.Pools = append(v.Pools, pool)
	}
	for k := range i.File.Rules {
		v.Rules = append(v.Rules, i.File.Rules[k].String())
	}
	return v
}
