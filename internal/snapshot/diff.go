// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"natkit/internal/words/plural"
)

// Difference is something that is configured otherwise in one snapshot than in another.
type Difference struct {
	What   string `json:"what"`                   // "setting net.ipv4.ip_forward", "rule of ip filter FORWARD"
	Before string `json:"value_before,omitempty"` // "" where it was not there
	After  string `json:"value_after,omitempty"`
}

// Differences lists what is configured otherwise in b than in a: settings, limits of the table,
// interfaces, chains with their rules, and natkit's engine. What is counted or how full something
// is does not matter; a part that one of them does not know is left out.
func Differences(a, b *Snapshot) []Difference {
	before, after := configuration(a), configuration(b)
	var out []Difference
	for kind, was := range before {
		is, known := after[kind]
		if !known {
			continue
		}
		for what, value := range was {
			if now, ok := is[what]; !ok || now != value {
				out = append(out, Difference{what, value, now})
			}
		}
		for what, value := range is {
			if _, ok := was[what]; !ok {
				out = append(out, Difference{what, "", value})
			}
		}
	}
	slices.SortFunc(out, func(a, b Difference) int { return cmp.Compare(a.What, b.What) })
	return out
}

// configuration is what is configured, by kind and name; a kind that is not known is not there.
func configuration(s *Snapshot) map[string]map[string]string {
	out := map[string]map[string]string{}
	put := func(kind, what, value string) {
		if out[kind] == nil {
			out[kind] = map[string]string{}
		}
		for n := 2; out[kind][what] != ""; n++ { // two rules alike
			what = fmt.Sprintf("%s (%d)", strings.TrimSuffix(what, fmt.Sprintf(" (%d)", n-1)), n)
		}
		out[kind][what] = value
	}
	for name, value := range s.Sysctls {
		if name != "net.netfilter.nf_conntrack_count" {
			put("settings", "setting "+name, value)
		}
	}
	if ct := s.Conntrack; ct != nil {
		put("table", "limit of the connection tracking table", fmt.Sprint(ct.Max))
		put("table", "buckets of the connection tracking table", fmt.Sprint(ct.Buckets))
	}
	for _, i := range s.Interfaces {
		state := "down"
		if i.Up {
			state = "up"
		}
		if i.NoCarrier {
			state += ", no carrier"
		}
		words := []string{state, fmt.Sprintf("MTU %d", i.MTU)}
		for _, p := range i.Addresses {
			words = append(words, p.String())
		}
		if i.Master != "" {
			words = append(words, "in "+i.Master)
		}
		put("interfaces", "interface "+i.Name, strings.Join(words, ", "))
	}
	for _, c := range s.Chains {
		name := strings.Join([]string{c.Backend, c.Family, c.Table, c.Name}, " ")
		words := []string{fmt.Sprintf("rules: %d", c.Rules)}
		if c.Policy != "" {
			words = append(words, "policy "+c.Policy)
		}
		put("chains", "chain "+name, strings.Join(words, ", "))
		for _, r := range c.Walk {
			put("chains", "rule of "+name+": "+r.Text, "there")
		}
	}
	if s.Can(CanEngine) {
		put("engine", "natkit's engine", engineInWords(s.Engine))
	}
	return out
}

// Comparable is what machines that do the same work are expected to have in common: settings, and
// of each table of rules how many there are with a digest of their texts.
func Comparable(s *Snapshot) map[string]string {
	out := map[string]string{}
	if s.Host.Kernel != "" {
		out["kernel"] = s.Host.Kernel
	}
	for name, value := range s.Sysctls {
		if name != "net.netfilter.nf_conntrack_count" {
			out["setting "+name] = value
		}
	}
	type table struct {
		chains, rules int
		digest        uint64 // of chains, in whatever order they are listed
	}
	tables := map[string]*table{}
	for _, c := range s.Chains {
		name := strings.Join([]string{"rules of", c.Backend, c.Family, c.Table}, " ")
		t := tables[name]
		if t == nil {
			t = &table{}
			tables[name] = t
		}
		h := fnv.New64a()
		fmt.Fprintln(h, c.Name, c.Hook, c.Type, c.Priority, c.Policy, c.Rules)
		for _, r := range c.Walk {
			fmt.Fprintln(h, r.Text)
		}
		t.chains, t.rules, t.digest = t.chains+1, t.rules+c.Rules, t.digest+h.Sum64()
	}
	for name, t := range tables {
		out[name] = fmt.Sprintf("%s in %s, digest %08x", plural.Count(t.rules, "rule"), plural.Count(t.chains, "chain"), uint32(t.digest))
	}
	if s.Can(CanEngine) {
		out["natkit's engine"] = engineInWords(s.Engine)
	}
	return out
}

func engineInWords(e *Engine) string {
	if e == nil {
		return "none"
	}
	return strings.TrimSpace(fmt.Sprintf("%s, rules: %d %s", e.Kind, e.Rules, e.File))
}
