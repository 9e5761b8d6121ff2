// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"natkit/nft"
)

// ImportYAML writes imported rules as a rule file, with what is not in it as comments.
func ImportYAML(w io.Writer, i *nft.Imported) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %d rules from %s\n", len(i.File.Rules), oneLine(i.File.Name))
	for _, lost := range []bool{true, false} {
		title := map[bool]string{true: "Not taken over, or decided otherwise:", false: "Taken over, with a difference:"}[lost]
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
	fmt.Fprintf(&b, "\ninside: [%s]\noutside: [%s]\n", quotedList(i.File.Inside), quotedList(i.File.Outside))
	if len(i.File.Pools) > 0 {
		b.WriteString("pools:\n")
		for _, p := range i.File.Pools {
			var ranges []string
			for _, r := range p.Addresses {
				ranges = append(ranges, r.String())
			}
			fmt.Fprintf(&b, "  %s: {addresses: [%s]", p.Name, strings.Join(ranges, ", "))
			if !p.Ports.IsZero() {
				fmt.Fprintf(&b, ", ports: %s", p.Ports)
			}
			b.WriteString("}\n")
		}
	}
	b.WriteString("rules:\n")
	for k := range i.File.Rules {
		fmt.Fprintf(&b, "  - {%s}\n", &i.File.Rules[k])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// quotedList quotes names only where YAML could read them as something else.
func quotedList(names []string) string {
	quoted := make([]string, len(names))
	for k, name := range names {
		quoted[k] = name
		letters := strings.IndexFunc(name, func(r rune) bool { return !(r >= 'a' && r <= 'z') }) // eth0, br0
		if letters < 2 || strings.Trim(name[letters:], "0123456789") != "" {
			quoted[k] = strconv.Quote(name)
		}
	}
	return strings.Join(quoted, ", ")
}

// oneLine keeps a comment a comment.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 || r == 0xfeff {
			return '?'
		}
		return r
	}, text)
}

// ImportView is what natkit import -o json prints.
type ImportView struct {
	Inside  []string     `json:"inside"`
	Outside []string     `json:"outside"`
	Pools   []ImportPool `json:"pools"`
	Rules   []string     `json:"rules"` // as a rule file has them between braces
	Notes   []nft.Note   `json:"notes"`
}

// ImportPool is a pool that rules name.
type ImportPool struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	Ports     string   `json:"ports,omitempty"`
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
