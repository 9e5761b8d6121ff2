// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// What nft -j list ruleset prints, see libnftables-json(5).

// nftObject is one element of the list "nftables".
type nftObject struct {
	Table *struct {
		Family, Name string
		Flags        any // one word or a list of them
	}
	Chain *struct {
		Family, Table, Name, Type, Hook, Policy string
		Prio                                    any // a number, but names in old versions
	}
	Set, Map *nftSet
	Rule     *struct {
		Family, Table, Chain, Comment string
		Handle                        int
		Expr                          []map[string]any
	}
}

type nftSet struct {
	Family, Table, Name string
	Flags               any
	Timeout             any
	Elem                []any
}

// nftReader collects the objects; rules are read when all sets are known.
type nftReader struct {
	set    *Ruleset
	tables map[string]*Table // by "family name"
	sets   map[string]*Set   // by "family table name"
	chains map[string]*Chain
	rules  []nftRule
}

type nftRule struct {
	line   int
	object nftObject
}

// ReadNFTables reads the list element by element, so that a mistake has a line.
func ReadNFTables(data []byte, name string) (*Ruleset, error) {
	n := nftReader{&Ruleset{Source: NFTables}, map[string]*Table{}, map[string]*Set{}, map[string]*Chain{}, nil}
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
	fail := func(err error) (*Ruleset, error) {
		offset := dec.InputOffset()
		if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
			offset = max(at, syntax.Offset)
		}
		return nil, &SyntaxError{name, here(offset), err}
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
	for _, r := range n.rules {
		if err := n.rule(r); err != nil {
			return nil, &SyntaxError{name, r.line, fmt.Errorf("rule %d of chain %s: %w", r.object.Rule.Handle, n.chainOf(r), err)}
		}
	}
	n.set.Tables, n.set.Dormant = apart(n.set.Tables, func(t *Table) bool { return !t.dormant })
	return n.set, nil
}

// apart are the tables that are kept, and the others.
func apart(tables []*Table, keep func(*Table) bool) (kept, others []*Table) {
	for _, t := range tables {
		if keep(t) {
			kept = append(kept, t)
		} else {
			others = append(others, t)
		}
	}
	return kept, others
}

func (n *nftReader) table(family, name string) *Table {
	key := family + " " + name
	if n.tables[key] == nil {
		n.tables[key] = &Table{Family: family, Name: name}
		n.set.Tables = append(n.set.Tables, n.tables[key])
	}
	return n.tables[key]
}

func (n *nftReader) chain(family, table, name string) *Chain {
	key := family + " " + table + " " + name
	if n.chains[key] == nil {
		t := n.table(family, table)
		n.chains[key] = t.add(&Chain{Table: t, Name: name})
	}
	return n.chains[key]
}

func (n *nftReader) chainOf(r nftRule) *Chain {
	return n.chain(r.object.Rule.Family, r.object.Rule.Table, r.object.Rule.Chain)
}

// priorities by name, which old versions print.
var priorities = map[string]int{"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}

func (n *nftReader) take(line int, o nftObject) {
	switch {
	case o.Table != nil:
		n.takeTable(line, n.table(o.Table.Family, o.Table.Name), o.Table.Flags)
	case o.Chain != nil:
		c := n.chain(o.Chain.Family, o.Chain.Table, o.Chain.Name)
		c.Line, c.Type, c.Hook, c.Policy = line, o.Chain.Type, o.Chain.Hook, o.Chain.Policy
		switch p := o.Chain.Prio.(type) {
		case float64:
			c.Priority = int(max(min(p, math.MaxInt32), math.MinInt32))
		case string:
			c.Priority = priorities[p]
		}
	case o.Set != nil:
		n.takeSet(o.Set)
	case o.Map != nil:
		n.takeSet(o.Map)
	case o.Rule != nil:
		n.rules = append(n.rules, nftRule{line, o})
	}
}

// takeTable reads a table's flags. nftables before 1.0.8 prints other words in the place
// of a flag that is alone, so an unknown word may stand for dormant.
func (n *nftReader) takeTable(line int, t *Table, flags any) {
	t.Line = line
	words, ok := flags.([]any)
	if !ok && flags != nil {
		words = []any{flags}
	}
	for _, word := range words {
		switch word {
		case "dormant":
			t.dormant = true
		case "owner", "persist": // who may change it
		default:
			t.UnknownFlag = true
		}
	}
}

func (n *nftReader) takeSet(s *nftSet) {
	set := &Set{Name: s.Name, elements: s.Elem}
	flags := fmt.Sprint(s.Flags)
	set.Expires = s.Timeout != nil || strings.Contains(flags, "timeout") || strings.Contains(flags, "dynamic")
	for _, e := range s.Elem {
		if pair, ok := e.([]any); ok && len(pair) == 2 {
			e = pair[0]
		}
		set.Expires = set.Expires || object(object(e)["elem"])["expires"] != nil
	}
	t := n.table(s.Family, s.Table)
	t.Sets = append(t.Sets, set)
	n.sets[s.Family+" "+s.Table+" "+s.Name] = set
}

func object(v any) map[string]any { o, _ := v.(map[string]any); return o }

// nftRuleReader reads the statements of one rule.
type nftRuleReader struct {
	*nftReader
	*Rule
	negated bool // the fields are read for what they must not be
}

func (n *nftReader) rule(in nftRule) error {
	o := in.object.Rule
	c := n.chainOf(in)
	r := &Rule{Chain: c, Line: in.line, Handle: o.Handle, Comment: o.Comment, IPv4: o.Family == "ip", IPv6: o.Family == "ip6"}
	c.Rules = append(c.Rules, r)
	reader := nftRuleReader{nftReader: n, Rule: r}
	var texts []string
	for _, statement := range o.Expr {
		for word, arg := range statement {
			texts = append(texts, statementText(word, arg))
			if err := reader.statement(word, arg); err != nil {
				return err
			}
		}
	}
	if o.Comment != "" {
		texts = append(texts, "comment "+quote(o.Comment))
	}
	r.Text = strings.Join(texts, " ")
	return nil
}

func (r nftRuleReader) add(s Statement) { r.Statements = append(r.Statements, s) }

// nftHarmless neither change packets nor where they go.
var nftHarmless = []string{"comment", "log", "last", "ct helper", "ct timeout", "ct expectation"}

func (r nftRuleReader) statement(word string, arg any) error {
	switch word {
	case "match":
		return r.match(arg)
	case "counter":
		r.Counter = true
	case "accept", "drop", "return", "continue", "jump", "goto":
		v, err := r.verdict(word, arg)
		r.add(v)
		return err
	case "vmap":
		return r.verdictMap(arg)
	case "masquerade", "snat", "dnat", "redirect":
		return r.translate(word, arg)
	case "mangle":
		r.mangle(word, arg)
	case "notrack":
		r.add(Other{Name: "NOTRACK", Text: word})
	case "limit", "quota", "ct count", "connlimit":
		r.add(unknown(statementText(word, arg), false))
	case "reject", "queue", "tproxy", "synproxy", "fwd":
		r.add(Other{Name: strings.ToUpper(word), Text: statementText(word, arg), Ends: true})
	case "xt":
		r.add(Other{Name: "xt", Text: "a rule of iptables", Ends: true})
	default:
		r.add(Other{Name: word, Text: statementText(word, arg), Harmless: slices.Contains(nftHarmless, word)})
	}
	return nil
}

var verdictKinds = map[string]VerdictKind{"accept": Accept, "drop": Drop, "return": Return, "continue": Continue, "jump": Jump, "goto": Goto}

func (r nftRuleReader) verdict(word string, arg any) (Verdict, error) {
	kind, ok := verdictKinds[word]
	if !ok {
		return Verdict{}, fmt.Errorf("verdict %q is unknown", word)
	}
	v := Verdict{Kind: kind}
	if kind == Jump || kind == Goto {
		v.Chain, _ = object(arg)["target"].(string)
		if r.chains[r.Chain.Table.Family+" "+r.Chain.Table.Name+" "+v.Chain] == nil {
			return v, fmt.Errorf("leads to chain %q, which is not there", v.Chain)
		}
	}
	return v, nil
}

// elements lists the alternatives on the right of a condition, or a set's elements.
func (r nftRuleReader) elements(v any) ([]any, *Set, error) {
	if name, ok := v.(string); ok && strings.HasPrefix(name, "@") {
		set := r.sets[r.Chain.Table.Family+" "+r.Chain.Table.Name+" "+name[1:]]
		if set == nil {
			return nil, nil, fmt.Errorf("set %q is not there", name)
		}
		return set.elements, set, nil
	}
	if set, ok := object(v)["set"]; ok {
		v = set
	}
	if list, ok := v.([]any); ok {
		return list, nil, nil
	}
	return []any{v}, nil, nil
}

// bare is an element without its counter, time-out or comment.
func bare(v any) any {
	if e := object(object(v)["elem"]); e != nil {
		return e["val"]
	}
	return v
}

// errForeign is a value or field that is not understood, errIPv6 one of IPv6.
var (
	errForeign = errors.New("not understood")
	errIPv6    = errors.New("of IPv6")
)

// match adds one condition.
func (r nftRuleReader) match(arg any) error {
	m := object(arg)
	op, _ := m["op"].(string)
	not := op == "!="
	text := exprText(m["left"]) + " " + exprText(m["right"])
	if op != "==" && op != "in" && !not { // that of !=, too, is the condition that is not to hold
		text = exprText(m["left"]) + " " + op + " " + exprText(m["right"])
	}
	if done := r.family(m, not); done {
		return nil
	}
	r.negated = not
	fields, err := r.fields(m["left"])
	if err == nil && len(fields) == 1 && fields[0].Kind == State {
		return r.state(m["right"], not, text)
	}
	var elements []any
	var set *Set
	if err == nil {
		if elements, set, err = r.elements(m["right"]); err != nil {
			return err
		}
	}
	var values []Tuple
	if err == nil {
		values, err = tuples(fields, elements)
	}
	if err == nil && op != "==" && op != "!=" && op != "in" {
		values, err = compared(op, fields, values)
	}
	switch {
	case errors.Is(err, errIPv6):
		r.IPv6 = true
	case err != nil:
		r.add(unknown(text, not))
	default:
		r.add(Match{Fields: fields, Values: values, Not: not, Set: set})
	}
	return nil
}

// family reads a condition on the version of IP, which no IPv4 packet fails or all do.
func (r nftRuleReader) family(m map[string]any, not bool) bool {
	left := object(m["left"])
	key, _ := object(left["meta"])["key"].(string)
	p := object(left["payload"])
	version := p["protocol"] == "ip" && p["field"] == "version"
	if key != "nfproto" && key != "protocol" && !version {
		return false
	}
	elements, _, err := r.elements(m["right"])
	if err != nil {
		return false
	}
	four, other := false, false
	for _, e := range elements {
		switch fmt.Sprint(bare(e)) {
		case "ipv4", "ip", "2048", "4":
			four = true
		case "2":
			four = four || key == "nfproto"
		default:
			other = true
		}
	}
	if four == not {
		r.IPv6 = true
	} else if !other || not {
		r.IPv4 = r.IPv4 || !not
	}
	return true
}

// state: packets that NAT rules are asked about are of new connections.
func (r nftRuleReader) state(right any, not bool, text string) error {
	elements, _, err := r.elements(right)
	if err != nil {
		return err
	}
	isNew := uint32(0)
	for _, e := range elements {
		word, ok := bare(e).(string)
		if !ok {
			r.add(unknown(text, not))
			return nil
		}
		if word == "new" {
			isNew = 1
		}
	}
	r.add(Match{Fields: []Field{{Kind: State}}, Values: []Tuple{{number(isNew)}}, Not: not})
	return nil
}

// compared turns a comparison with one value into a range.
func compared(op string, fields []Field, values []Tuple) ([]Tuple, error) {
	if len(values) != 1 || len(fields) != 1 || values[0][0].Name != "" || fields[0].Mask != 0 && fields[0].Mask != math.MaxUint32 {
		return nil, errForeign
	}
	v := values[0][0]
	r := Value{First: 0, Last: math.MaxUint32}
	switch {
	case op == "<=":
		r.Last = v.Last
	case op == ">=":
		r.First = v.First
	case op == "<" && v.First > 0:
		r.Last = v.First - 1
	case op == ">" && v.Last < math.MaxUint32:
		r.First = v.Last + 1
	default:
		return nil, errForeign
	}
	return []Tuple{{r}}, nil
}

// fields reads what is on the left of a condition, or the key of a map. What it asks of
// the packet silently (tcp dport: that it is TCP) becomes a condition before it.
func (r nftRuleReader) fields(left any) ([]Field, error) {
	if parts, ok := object(left)["concat"].([]any); ok {
		var all []Field
		for _, part := range parts {
			f, err := r.field(part)
			if err != nil {
				return nil, err
			}
			all = append(all, f)
		}
		return all, nil
	}
	f, err := r.field(left)
	return []Field{f}, err
}

func (r nftRuleReader) field(left any) (Field, error) {
	l := object(left)
	if parts, ok := l["&"].([]any); ok && len(parts) == 2 {
		f, err := r.field(parts[0])
		mask, known := parts[1].(float64)
		if err != nil || f.Kind != Mark || !known {
			return f, errForeign
		}
		return Field{Kind: Mark, Mask: uint32(mask)}, nil
	}
	if key, ok := object(l["meta"])["key"].(string); ok {
		kinds := map[string]Field{
			"iifname": {Kind: In}, "iif": {Kind: In}, "oifname": {Kind: Out}, "oif": {Kind: Out},
			"l4proto": {Kind: ProtocolField}, "mark": {Kind: Mark, Mask: math.MaxUint32},
		}
		if f, ok := kinds[key]; ok {
			return f, nil
		}
		return Field{}, errForeign
	}
	if fib := object(l["fib"]); fib != nil && fib["result"] == "type" {
		switch flags := strings.Trim(fmt.Sprint(fib["flags"]), "[]"); flags {
		case "daddr":
			return Field{Kind: DestinationLocal}, nil
		case "saddr":
			return Field{Kind: SourceLocal}, nil
		}
		return Field{}, errForeign
	}
	if object(l["ct"])["key"] == "state" {
		return Field{Kind: State}, nil
	}
	if f, ok := draw(l); ok {
		return f, nil
	}
	return r.payload(object(l["payload"]))
}

// draw reads numgen and the hashes.
func draw(l map[string]any) (Field, bool) {
	for word, arg := range l {
		o := object(arg)
		mod, ok := o["mod"].(float64)
		if !ok || mod < 1 || mod > 1<<31 || word != "numgen" && word != "jhash" && word != "symhash" {
			return Field{}, false
		}
		f := Field{Kind: Draw, Mod: uint32(mod)}
		if word == "symhash" || o["seed"] != nil { // without a seed the kernel draws one for each rule
			f.Key = exprText(l)
		}
		if offset, _ := o["offset"].(float64); offset != 0 {
			f.Offset = uint32(offset)
		}
		return f, true
	}
	return Field{}, false
}

func (r nftRuleReader) payload(p map[string]any) (Field, error) {
	header, _ := p["protocol"].(string)
	name, _ := p["field"].(string)
	switch {
	case header == "ip6" || header == "icmpv6":
		return Field{}, errIPv6
	case header == "ip" && name == "saddr":
		r.IPv4 = true
		return Field{Kind: Source}, nil
	case header == "ip" && name == "daddr":
		r.IPv4 = true
		return Field{Kind: Destination}, nil
	case header == "ip" && name == "protocol":
		r.IPv4 = true
		return Field{Kind: ProtocolField}, nil
	case name == "sport" || name == "dport":
		m := Match{Fields: []Field{{Kind: ProtocolField}}, Values: portProtocols}
		if header != "th" {
			m.Values = []Tuple{{number(Protocols[header])}}
		}
		if header != "th" || !r.negated { // the kernel looks where ports would be, and other protocols have none that is meant
			r.add(m)
		}
		return Field{Kind: map[string]FieldKind{"sport": SourcePort, "dport": DestinationPort}[name]}, nil
	}
	return Field{}, errForeign
}

// tuples reads values of the fields.
func tuples(fields []Field, elements []any) ([]Tuple, error) {
	all := make([]Tuple, 0, len(elements))
	for _, e := range elements {
		t, err := tuple(fields, bare(e))
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

func tuple(fields []Field, v any) (Tuple, error) {
	parts := []any{v}
	if len(fields) > 1 {
		parts, _ = object(v)["concat"].([]any)
	}
	if len(parts) != len(fields) {
		return nil, errForeign
	}
	t := make(Tuple, 0, len(fields))
	for k, f := range fields {
		one, err := value(f, bare(parts[k]))
		if err != nil {
			return nil, err
		}
		t = append(t, one)
	}
	return t, nil
}

func value(f Field, v any) (Value, error) {
	if v == "*" { // the element for all others
		return Value{}, errForeign
	}
	if f.Kind == In || f.Kind == Out {
		if name, ok := v.(string); ok && name != "" {
			return Value{Name: name}, nil
		}
		return Value{}, errForeign
	}
	if list, ok := object(v)["range"].([]any); ok && len(list) == 2 {
		a, err1 := value(f, list[0])
		b, err2 := value(f, list[1])
		if err := errors.Join(err1, err2); err != nil {
			return Value{}, err
		}
		if a.First > b.Last {
			return Value{}, errForeign
		}
		return Value{First: a.First, Last: b.Last}, nil
	}
	switch f.Kind {
	case Source, Destination:
		return addressValue(v)
	case DestinationLocal, SourceLocal:
		if v == "local" {
			return number(1), nil
		}
		return Value{}, errForeign
	case ProtocolField:
		if name, ok := v.(string); ok {
			if n, ok := Protocols[name]; ok {
				return number(n), nil
			}
		}
	}
	switch n := v.(type) {
	case float64:
		if n >= 0 && n <= math.MaxUint32 && n == math.Trunc(n) {
			return number(uint32(n)), nil
		}
	case string:
		if parsed, err := strconv.ParseUint(n, 0, 32); err == nil {
			return number(uint32(parsed)), nil
		}
	}
	return Value{}, errForeign
}

// addressValue reads an address or a prefix.
func addressValue(v any) (Value, error) {
	text, _ := v.(string)
	if p := object(object(v)["prefix"]); p != nil {
		address, _ := p["addr"].(string)
		bits, _ := p["len"].(float64)
		text = fmt.Sprintf("%s/%d", address, int(bits))
	}
	if strings.Contains(text, ":") {
		return Value{}, errIPv6
	}
	a, _, err := parsePrefix(text)
	if err != nil {
		return Value{}, errForeign
	}
	return a, nil
}

// verdictMap reads a map of verdicts.
func (r nftRuleReader) verdictMap(arg any) error {
	m := object(arg)
	elements, set, err := r.elements(m["data"])
	if err != nil {
		return err
	}
	fields, foreign := r.fields(m["key"])
	if errors.Is(foreign, errIPv6) {
		r.IPv6 = true
		return nil
	}
	v := VerdictMap{Fields: fields, Set: set}
	for _, e := range elements {
		pair, ok := e.([]any)
		if !ok || len(pair) != 2 {
			return fmt.Errorf("%v is no element of a map", e)
		}
		var verdict Verdict
		switch to := pair[1].(type) {
		case map[string]any:
			for word, target := range to {
				if verdict, err = r.verdict(word, target); err != nil {
					return err
				}
			}
		default:
			return fmt.Errorf("%v is no verdict", to)
		}
		key, err := tuple(fields, bare(pair[0]))
		if errors.Is(err, errIPv6) {
			continue
		}
		if foreign != nil || err != nil {
			r.add(Other{Name: "vmap", Text: statementText("vmap", arg), Ends: true})
			return nil
		}
		v.Elements = append(v.Elements, VerdictElement{key, verdict})
	}
	r.add(v)
	return nil
}

// translate reads snat, dnat, masquerade and redirect.
func (r nftRuleReader) translate(word string, arg any) error {
	t := Translate{Kind: map[string]TranslateKind{"snat": SNAT, "dnat": DNAT, "masquerade": Masquerade, "redirect": Redirect}[word]}
	a := object(arg)
	if a == nil && arg != nil {
		a = map[string]any{"addr": arg}
	}
	if a["addr"] == nil && (object(arg)["map"] != nil || object(arg)["range"] != nil || object(arg)["prefix"] != nil || object(arg)["concat"] != nil) {
		a = map[string]any{"addr": arg}
	}
	if a["family"] == "ip6" {
		r.IPv6 = true
	}
	if a["family"] == "ip" {
		r.IPv4 = true
	}
	for _, key := range []string{"flags", "type_flags"} {
		elements, _, _ := r.elements(a[key])
		for _, f := range elements {
			if f == "prefix" { // newer versions of nft
				f = "netmap"
			}
			if name, ok := f.(string); ok {
				t.Flags = append(t.Flags, name)
			}
		}
	}
	ports := Choice{}
	if err := ports.nftPorts(a["port"]); err != nil {
		t.Lost = "chooses the port by " + exprText(a["port"])
	}
	if m := object(object(a["addr"])["map"]); m != nil {
		return r.translateMap(t, m, ports)
	}
	c := ports
	t.Kind, t.Lost = c.address(a["addr"], t)
	if t.Lost == errIPv6.Error() {
		t.Lost, r.IPv6 = "", true
	}
	t.Choices = []Choice{c}
	r.add(t)
	return nil
}

// address reads where to; it may make a netmap of the translation.
func (c *Choice) address(v any, t Translate) (TranslateKind, string) {
	if list, ok := object(v)["concat"].([]any); ok && len(list) == 2 {
		if err := c.nftPorts(list[1]); err != nil {
			return t.Kind, "chooses the port by " + exprText(list[1])
		}
		v = list[0]
	}
	if v == nil {
		return t.Kind, t.Lost
	}
	a, err := value(Field{Kind: Source}, v)
	switch {
	case errors.Is(err, errIPv6):
		return t.Kind, errIPv6.Error()
	case err != nil:
		return t.Kind, "chooses the address by " + exprText(v)
	}
	c.First, c.Last = a.First, a.Last
	// A range that happens to be a prefix is written as one too: the flag tells.
	if p := object(object(v)["prefix"]); p != nil && slices.Contains(t.Flags, "netmap") {
		bits, _ := p["len"].(float64)
		c.Bits = int(bits)
		return Netmap, t.Lost
	}
	return t.Kind, t.Lost
}

func (c *Choice) nftPorts(v any) error {
	if v == nil {
		return nil
	}
	p, err := value(Field{Kind: DestinationPort}, v)
	if err != nil || p.First == 0 || p.Last > 65535 {
		return errForeign
	}
	c.Ports = [2]uint16{uint16(p.First), uint16(p.Last)}
	return nil
}

// translateMap reads a translation whose address is looked up.
func (r nftRuleReader) translateMap(t Translate, m map[string]any, ports Choice) error {
	elements, set, err := r.elements(m["data"])
	if err != nil {
		return err
	}
	fields, err := r.fields(m["key"])
	t.Fields, t.Set = fields, set
	if errors.Is(err, errIPv6) {
		r.IPv6 = true
		return nil
	}
	if err != nil {
		t.Lost = "looks the address up by " + exprText(m["key"])
	}
	kind := t.Kind
	for _, e := range elements {
		pair, ok := e.([]any)
		if !ok || len(pair) != 2 {
			return fmt.Errorf("%v is no element of a map", e)
		}
		c := ports
		to, why := c.address(bare(pair[1]), t)
		if why == errIPv6.Error() {
			continue
		} else if why != "" {
			t.Lost = why
		}
		if to == Netmap {
			kind = to
		}
		if c.Key, err = tuple(fields, bare(pair[0])); err != nil && !errors.Is(err, errIPv6) {
			t.Lost = "looks the address up by " + exprText(m["key"])
		}
		t.Choices = append(t.Choices, c)
	}
	t.Kind = kind
	t.singles()
	r.add(t)
	return nil
}

// singles are the elements of a map of prefixes that have one address: nft writes no prefix there.
func (t *Translate) singles() {
	for k := range t.Choices {
		switch c := &t.Choices[k]; {
		case t.Kind != Netmap || c.Bits != 0:
		case c.First == c.Last:
			c.Bits = 32
		default:
			t.Lost = "maps to addresses that are no prefix"
		}
	}
}

// mangle reads the setting of a mark; every other change of a packet is only named.
func (r nftRuleReader) mangle(word string, arg any) {
	m := object(arg)
	key := object(m["key"])
	switch object(key["meta"])["key"] {
	case "mark":
		r.add(markOf(m["value"]))
		return
	case "nftrace", "priority", "pkttype":
		return
	}
	name := "mangle"
	if p := object(key["payload"]); p != nil {
		name = fmt.Sprintf("%v %v", p["protocol"], p["field"])
	} else if o := object(key["tcp option"]); o != nil {
		name = fmt.Sprintf("tcp option %v", o["name"])
	} else if ct := object(key["ct"]); ct != nil {
		name = fmt.Sprintf("ct %v", ct["key"])
	}
	r.add(Other{Name: name, Text: statementText(word, arg), Harmless: name == "ct mark" || name == "ct label"})
}

// markOf reads an expression of the mark and numbers.
func markOf(v any) SetMark {
	if n, ok := v.(float64); ok {
		return SetMark{And: math.MaxUint32, Xor: uint32(n)}
	}
	o := object(v)
	if object(o["meta"])["key"] == "mark" {
		return SetMark{}
	}
	for op, arg := range o {
		parts, _ := arg.([]any)
		if len(parts) < 2 {
			return SetMark{Unknown: true}
		}
		m := markOf(parts[0])
		for _, part := range parts[1:] {
			n, ok := part.(float64)
			if !ok || m.Unknown {
				return SetMark{Unknown: true}
			}
			x := uint32(n)
			switch op {
			case "&":
				m.And, m.Xor = m.And|^x, m.Xor&x
			case "|":
				m.And, m.Xor = m.And|x, m.Xor|x
			case "^":
				m.Xor ^= x
			default:
				return SetMark{Unknown: true}
			}
		}
		return m
	}
	return SetMark{Unknown: true}
}
