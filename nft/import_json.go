// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"natkit/nat"
)

// What nft -j list ruleset prints, see libnftables-json(5). Of it the chains of type
// nat of the families ip and inet, what they lead to, and the sets and maps they use.

// nftObject is one element of the list "nftables".
type nftObject struct {
	Chain *struct {
		Family, Table, Name, Type, Hook string
		Prio                            any // a number, but names in old versions
	}
	Set, Map *struct {
		Family, Table, Name string
		Elem                []any
	}
	Rule *struct {
		Family, Table, Chain string
		Handle               int
		Expr                 []map[string]any
	}
}

// nftInput collects the objects; rules are read when all sets are known.
type nftInput struct {
	lists ruleLists
	sets  map[string][]any // by "family table name"
	rules []nftRule
	bases []nftBase
}

type nftRule struct {
	line   int
	object nftObject
}

type nftBase struct {
	hook  int
	prio  float64
	chain string
}

// parseNFTJSON reads the list element by element, so that a mistake has a line.
func parseNFTJSON(data []byte, name string) (ruleLists, error) {
	n := nftInput{lists: ruleLists{chains: map[string][]listed{}}, sets: map[string][]any{}}
	dec := json.NewDecoder(bytes.NewReader(data))
	line, at := 1, int64(0)
	here := func(offset int64) int { // of what begins behind the offset
		offset = min(offset, int64(len(data)))
		for offset < int64(len(data)) && strings.IndexByte(" \t\r\n,:", data[offset]) >= 0 {
			offset++
		}
		line += bytes.Count(data[at:offset], []byte("\n"))
		at = offset
		return line
	}
	fail := func(err error) (ruleLists, error) {
		offset := dec.InputOffset()
		if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
			offset = max(at, syntax.Offset)
		}
		return ruleLists{}, &SyntaxError{name, here(offset), err}
	}
	for _, want := range []any{json.Delim('{'), "nftables", json.Delim('[')} {
		token, err := dec.Token()
		if err != nil {
			return fail(err)
		}
		if token != want {
			return fail(fmt.Errorf("%q where the output of nft -j list ruleset has %q", fmt.Sprint(token), fmt.Sprint(want)))
		}
	}
	for dec.More() {
		line := here(dec.InputOffset())
		var o nftObject
		if err := dec.Decode(&o); err != nil {
			return fail(err)
		}
		n.take(line, o)
	}
	if _, err := dec.Token(); err != nil {
		return fail(err)
	}
	// Of chains of one priority the kernel asks the one first that was made last (Linux
	// net/netfilter/core.c, nf_hook_entries_grow); they are listed as they were made.
	slices.Reverse(n.bases)
	slices.SortStableFunc(n.bases, func(a, b nftBase) int { return cmp.Compare(a.prio, b.prio) })
	for _, b := range n.bases {
		n.lists.bases[b.hook] = append(n.lists.bases[b.hook], b.chain)
	}
	for _, r := range n.rules {
		chain := chainKey(r.object.Rule.Family, r.object.Rule.Table, r.object.Rule.Chain)
		rules, err := n.rule(r)
		if err != nil {
			return ruleLists{}, &SyntaxError{name, r.line, fmt.Errorf("rule %d of chain %s: %w", r.object.Rule.Handle, chain, err)}
		}
		n.lists.chains[chain] = append(n.lists.chains[chain], rules...)
	}
	return n.lists, nil
}

func chainKey(family, table, name string) string { return family + " " + table + " " + name }

func ofIPv4(family string) bool { return family == "ip" || family == "inet" }

func (n *nftInput) take(line int, o nftObject) {
	switch {
	case o.Chain != nil && ofIPv4(o.Chain.Family):
		c := o.Chain
		k := chainKey(c.Family, c.Table, c.Name)
		n.lists.chains[k] = nil
		hook := slices.Index([]string{"prerouting", "output", "postrouting"}, c.Hook)
		if c.Type == "nat" && hook >= 0 {
			prio, _ := c.Prio.(float64)
			n.bases = append(n.bases, nftBase{hook, prio, k})
		}
	case o.Set != nil:
		n.sets[chainKey(o.Set.Family, o.Set.Table, o.Set.Name)] = o.Set.Elem
	case o.Map != nil:
		n.sets[chainKey(o.Map.Family, o.Map.Table, o.Map.Name)] = o.Map.Elem
	case o.Rule != nil && ofIPv4(o.Rule.Family):
		n.rules = append(n.rules, nftRule{line, o})
	}
}

// rule reads one rule. Alternatives that a condition can't hold become rules one
// behind the other, as do the elements of a map.
func (n *nftInput) rule(in nftRule) ([]listed, error) {
	o := in.object.Rule
	r := listed{line: in.line, text: fmt.Sprintf("%s handle %d", chainKey(o.Family, o.Table, o.Chain), o.Handle)}
	rules := []listed{r}
	end := func(a action) {
		for k := range rules {
			rules[k].action = a
		}
	}
	for _, statement := range o.Expr {
		for word, arg := range statement {
			var err error
			switch word {
			case "match":
				rules, err = n.match(rules, in, arg)
			case "counter", "comment", "log", "notrack", "ct timeout", "ct helper":
			case "accept":
				end(actAccept)
			case "return":
				end(actReturn)
			case "jump", "goto":
				target, _ := object(arg)["target"].(string)
				err = n.lead(rules, in, word, target)
			case "masquerade":
				end(actMasquerade)
				err = each(rules, func(r *listed) (err error) { r.ports, err = portsOf(object(arg)["port"]); return err })
			case "snat":
				end(actSNAT)
				err = each(rules, func(r *listed) error { return r.translation(arg) })
			case "dnat":
				end(actDNAT)
				rules, err = n.dnat(rules, in, arg)
			case "vmap":
				rules, err = n.verdicts(rules, in, arg)
			case "redirect":
				end(actLost)
				_ = each(rules, func(r *listed) error {
					r.lost = "sends to the gateway itself, which a rule file does not do"
					return nil
				})
			case "drop", "reject":
				end(actLost)
				_ = each(rules, func(r *listed) error { r.lost = "drops packets, which a rule file does not do"; return nil })
			case "mangle":
				_ = each(rules, func(r *listed) error {
					r.lost = "changes packets or their marks, which a rule file does not do"
					return nil
				})
			case "xt":
				end(actLost)
				_ = each(rules, func(r *listed) error { r.lost = "is a rule of iptables: give the output of iptables-save"; return nil })
			default:
				_ = each(rules, func(r *listed) error { r.match.odd = append(r.match.odd, word); return nil })
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return rules, nil
}

func each(rules []listed, change func(*listed) error) error {
	for k := range rules {
		if err := change(&rules[k]); err != nil {
			return err
		}
	}
	return nil
}

func object(v any) map[string]any { o, _ := v.(map[string]any); return o }

// lead makes the rules lead to a chain.
func (n *nftInput) lead(rules []listed, in nftRule, word, target string) error {
	k := chainKey(in.object.Rule.Family, in.object.Rule.Table, target)
	if _, ok := n.lists.chains[k]; !ok {
		return fmt.Errorf("leads to chain %q, which is not there", target)
	}
	return each(rules, func(r *listed) error {
		r.chain, r.action = k, actJump
		if word == "goto" {
			r.action = actGoto
		}
		return nil
	})
}

// values lists the alternatives on the right of a condition, or a set's elements.
func (n *nftInput) values(in nftRule, v any) ([]any, error) {
	if name, ok := v.(string); ok && strings.HasPrefix(name, "@") {
		elements, ok := n.sets[chainKey(in.object.Rule.Family, in.object.Rule.Table, name[1:])]
		if !ok {
			return nil, fmt.Errorf("set %q is not there", name)
		}
		return elements, nil
	}
	if set, ok := object(v)["set"]; ok {
		list, ok := set.([]any)
		if !ok {
			return []any{set}, nil
		}
		return list, nil
	}
	return []any{v}, nil
}

// bare is an element without its counter, time-out or comment.
func bare(v any) any {
	if e := object(object(v)["elem"]); e != nil {
		return e["val"]
	}
	return v
}

// match adds one condition.
func (n *nftInput) match(rules []listed, in nftRule, arg any) ([]listed, error) {
	m := object(arg)
	op, _ := m["op"].(string)
	values, err := n.values(in, m["right"])
	if err != nil {
		return nil, err
	}
	if op != "==" && op != "!=" && op != "in" {
		return rules, each(rules, func(r *listed) error { r.match.odd = append(r.match.odd, "a comparison by "+op); return nil })
	}
	return alternatives(rules, m["left"], values, op == "!=")
}

// alternatives gives each rule for each of the values, those of one rule together
// where a condition can hold them.
func alternatives(rules []listed, left any, values []any, not bool) ([]listed, error) {
	var conditions []condition
	parts, concatenated := object(left)["concat"].([]any)
	for _, v := range values {
		v = bare(v)
		c := condition{}
		if !concatenated {
			if err := c.equal(left, v, not); err != nil {
				return nil, err
			}
			if len(conditions) > 0 && c.in == "" && c.out == "" {
				last := &conditions[len(conditions)-1]
				last.src, last.dst = slices.Concat(last.src, c.src), slices.Concat(last.dst, c.dst)
				last.notSrc, last.notDst = slices.Concat(last.notSrc, c.notSrc), slices.Concat(last.notDst, c.notDst)
				last.notIn, last.notOut = slices.Concat(last.notIn, c.notIn), slices.Concat(last.notOut, c.notOut)
				last.ports, last.odd = slices.Concat(last.ports, c.ports), slices.Concat(last.odd, c.odd)
				if !slices.Equal(last.protocols, c.protocols) {
					last.protocols = slices.Concat(last.protocols, c.protocols)
				}
				continue
			}
			conditions = append(conditions, c)
			continue
		}
		list, ok := object(v)["concat"].([]any)
		if !ok || len(list) != len(parts) || not {
			c.odd = append(c.odd, "a concatenation")
		} else {
			for k, part := range parts {
				if err := c.equal(part, list[k], false); err != nil {
					return nil, err
				}
			}
		}
		conditions = append(conditions, c)
	}
	var out []listed
	for _, r := range rules {
		for _, c := range conditions {
			m, ok := r.match.and(c)
			if !ok {
				continue
			}
			if len(out) == maxAlternativeRules {
				return nil, fmt.Errorf("has more than %d alternatives", maxAlternativeRules)
			}
			one := r
			one.match = m
			out = append(out, one)
		}
	}
	return out, nil
}

const maxAlternativeRules = 200_000

// equal adds the condition that a part of the packet has a value.
func (c *condition) equal(left, value any, not bool) error {
	odd := func(what string) error {
		c.odd = append(c.odd, negated(not, what))
		return nil
	}
	l := object(left)
	if meta := object(l["meta"]); meta != nil {
		key, _ := meta["key"].(string)
		text, _ := value.(string)
		switch key {
		case "iifname", "iif":
			return bindLink(strings.ReplaceAll(text, "*", "+"), not, &c.in, &c.notIn, func() { _ = odd("interfaces " + text) })
		case "oifname", "oif":
			return bindLink(strings.ReplaceAll(text, "*", "+"), not, &c.out, &c.notOut, func() { _ = odd("interfaces " + text) })
		case "l4proto", "protocol", "nfproto":
			if key != "l4proto" {
				if text == "ip" || text == "ipv4" {
					return nil
				}
				return odd(key + " " + text)
			}
			return c.protocol(value, not, odd)
		}
		return odd("meta " + key)
	}
	if fib := object(l["fib"]); fib != nil {
		if value == "local" && fib["result"] == "type" && !not && fmt.Sprint(fib["flags"]) == "[daddr]" {
			c.local = true
			return nil
		}
		return odd("fib")
	}
	p := object(l["payload"])
	header, _ := p["protocol"].(string)
	field, _ := p["field"].(string)
	switch {
	case header == "ip" && field == "saddr", header == "ip" && field == "daddr":
		prefixes, err := prefixesOf(value)
		if err != nil {
			return err
		}
		list := map[bool]*[]netip.Prefix{false: &c.src, true: &c.dst}[field == "daddr"]
		if not {
			list = map[bool]*[]netip.Prefix{false: &c.notSrc, true: &c.notDst}[field == "daddr"]
		}
		*list = append(*list, prefixes...)
	case header == "ip" && field == "protocol":
		return c.protocol(value, not, odd)
	case field == "dport" && !not:
		ports, err := portsOf(value)
		if err != nil {
			return err
		}
		c.ports = append(c.ports, ports)
		if header != "th" {
			return c.protocol(header, false, odd)
		}
	default:
		for word := range l {
			if word != "payload" {
				return odd(word)
			}
		}
		return odd(strings.TrimSpace(header + " " + field))
	}
	return nil
}

func (c *condition) protocol(value any, not bool, odd func(string) error) error {
	text, _ := value.(string)
	if number, ok := value.(float64); ok {
		text = fmt.Sprint(number)
	}
	p, err := protocolOf(text)
	if err != nil {
		return odd("protocol " + text)
	}
	if not {
		return odd("protocol " + text)
	}
	c.protocols = append(c.protocols, p)
	return nil
}

// prefixesOf reads an address, a prefix or a range of addresses.
func prefixesOf(value any) ([]netip.Prefix, error) {
	v := object(value)
	if p := object(v["prefix"]); p != nil {
		address, _ := p["addr"].(string)
		bits, _ := p["len"].(float64)
		prefix, err := parsePrefix(fmt.Sprintf("%s/%d", address, int(bits)))
		return []netip.Prefix{prefix}, err
	}
	if r, ok := v["range"].([]any); ok {
		all, err := rangeOf(r)
		if err != nil {
			return nil, err
		}
		return prefixesOfRange(all), nil
	}
	text, _ := value.(string)
	p, err := parsePrefix(text)
	return []netip.Prefix{p}, err
}

func rangeOf(r []any) (nat.AddressRange, error) {
	if len(r) == 2 {
		first, _ := r[0].(string)
		last, _ := r[1].(string)
		a, err1 := netip.ParseAddr(first)
		b, err2 := netip.ParseAddr(last)
		if err1 == nil && err2 == nil && a.Is4() && b.Is4() && !b.Less(a) {
			return nat.AddressRange{First: a, Last: b}, nil
		}
	}
	return nat.AddressRange{}, fmt.Errorf("%v are no IPv4 addresses", r)
}

// prefixesOfRange covers a range with prefixes, the largest that fit.
func prefixesOfRange(r nat.AddressRange) []netip.Prefix {
	var out []netip.Prefix
	for first, last := uint64(number(r.First)), uint64(number(r.Last)); first <= last; {
		bits := 32
		for bits > 0 && first&(1<<(33-bits)-1) == 0 && first+1<<(33-bits)-1 <= last {
			bits--
		}
		out = append(out, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(first >> 24), byte(first >> 16), byte(first >> 8), byte(first)}), bits))
		first += 1 << (32 - bits)
	}
	return out
}

// portsOf reads a port, a range of ports, or nothing.
func portsOf(value any) (nat.PortRange, error) {
	switch v := value.(type) {
	case nil:
		return nat.PortRange{}, nil
	case float64:
		return parsePorts(fmt.Sprint(int64(v)), "-")
	case string:
		return parsePorts(v, "-")
	}
	if r, ok := object(value)["range"].([]any); ok && len(r) == 2 {
		return parsePorts(fmt.Sprintf("%v-%v", r[0], r[1]), "-")
	}
	return nat.PortRange{}, fmt.Errorf("%v is no port", value)
}

// translation reads what snat or dnat translates to: "addr" and "port".
func (r *listed) translation(arg any) error {
	a := object(arg)
	if a == nil {
		a = map[string]any{"addr": arg}
	}
	var err error
	if r.ports, err = portsOf(a["port"]); err != nil {
		r.action, r.lost = actLost, "chooses the port by something else than a number"
		return nil
	}
	return r.address(a["addr"])
}

func (r *listed) address(value any) error {
	switch v := value.(type) {
	case string:
		a, err := netip.ParseAddr(v)
		if err != nil || !a.Is4() {
			return fmt.Errorf("%q is no IPv4 address", v)
		}
		r.pool = nat.AddressRange{First: a, Last: a}
		return nil
	case nil:
		r.action, r.lost = actLost, "changes the port only, of whatever address"
		return nil
	}
	o := object(value)
	if list, ok := o["range"].([]any); ok {
		all, err := rangeOf(list)
		r.pool = all
		return err
	}
	if list, ok := o["concat"].([]any); ok && len(list) == 2 {
		ports, err := portsOf(list[1])
		if err != nil {
			return err
		}
		r.ports = ports
		return r.address(list[0])
	}
	if o["prefix"] != nil {
		prefixes, err := prefixesOf(value)
		if err != nil {
			return err
		}
		r.net, r.action = prefixes[0], actNetmap
		return nil
	}
	r.action, r.lost = actLost, "chooses the address by something else than a rule file can"
	return nil
}

// dnat reads a destination, a map of destinations by parts of the packet, or several
// that take turns.
func (n *nftInput) dnat(rules []listed, in nftRule, arg any) ([]listed, error) {
	m := object(object(object(arg)["addr"])["map"])
	if m == nil {
		return rules, each(rules, func(r *listed) error {
			err := r.translation(arg)
			r.targets()
			if r.lost != "" {
				r.action = actLost
			}
			return err
		})
	}
	elements, err := n.values(in, m["data"])
	if err != nil {
		return nil, err
	}
	turns := takesTurns(m["key"])
	var out []listed
	for _, e := range elements {
		pair, ok := e.([]any)
		if !ok || len(pair) != 2 {
			return nil, fmt.Errorf("%v is no element of a map", e)
		}
		some := slices.Clone(rules)
		if !turns {
			if some, err = alternatives(some, m["key"], []any{pair[0]}, false); err != nil {
				return nil, err
			}
		}
		for _, r := range some {
			if err := r.address(pair[1]); err != nil {
				return nil, err
			}
			r.targets()
			if turns && len(out) == len(rules) {
				for k := range out {
					out[k].to = append(out[k].to, r.to...)
				}
				break
			}
			out = append(out, r)
		}
	}
	if turns {
		_ = each(out, func(r *listed) error {
			r.notes = append(r.notes, "a client keeps its target: it is chosen by the client's address, not for each connection")
			return nil
		})
	}
	return out, nil
}

// takesTurns tells whether a key is not of the packet: numgen, or a hash.
func takesTurns(key any) bool {
	k := object(key)
	return k["numgen"] != nil || k["jhash"] != nil || k["symhash"] != nil
}

// verdicts reads a map of verdicts.
func (n *nftInput) verdicts(rules []listed, in nftRule, arg any) ([]listed, error) {
	m := object(arg)
	elements, err := n.values(in, m["data"])
	if err != nil {
		return nil, err
	}
	turns := takesTurns(m["key"])
	var out []listed
	for k, e := range elements {
		pair, ok := e.([]any)
		if !ok || len(pair) != 2 {
			return nil, fmt.Errorf("%v is no element of a map", e)
		}
		some := slices.Clone(rules)
		if turns {
			_ = each(some, func(r *listed) error { r.share = k < len(elements)-1; return nil })
		} else if some, err = alternatives(some, m["key"], []any{pair[0]}, false); err != nil {
			return nil, err
		}
		for word, target := range object(pair[1]) {
			switch word {
			case "jump", "goto":
				name, _ := object(target)["target"].(string)
				err = n.lead(some, in, word, name)
			case "accept":
				err = each(some, func(r *listed) error { r.action = actAccept; return nil })
			case "return":
				err = each(some, func(r *listed) error { r.action = actReturn; return nil })
			default:
				err = each(some, func(r *listed) error {
					r.action, r.lost = actLost, word+"s packets, which a rule file does not do"
					return nil
				})
			}
			if err != nil {
				return nil, err
			}
		}
		out = append(out, some...)
	}
	return out, nil
}
