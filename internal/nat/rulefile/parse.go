// SPDX-License-Identifier: Apache-2.0

// A rule file's text becomes a File. This reads the structure; what single values may
// look like is in parse_value.go, what must fit together in validate.go. YAML is read
// to nodes, which have positions, and values are taken as they are written, whatever
// YAML would make of them: an interface may be called no.

package rulefile

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
)

// Bounds of a rule file's text. A value takes YAML about 700 bytes of memory, and of
// what is between commas and ends of lines there are two, a key and a value.
const (
	maxFileBytes = 16 << 20
	maxItems     = 600000 // commas and ends of lines: 250 000 rules
	maxDepth     = 16     // of lists and maps in each other; a sound file has 6
)

// items counts what separates values.
func items(data []byte) (n int) {
	for _, separator := range []string{",", "\n", "\r", "\u0085", "\u2028", "\u2029"} {
		n += bytes.Count(data, []byte(separator))
	}
	return n
}

// Stdin is the name of a file that was read from there.
const Stdin = "stdin"

// Argument is how a file of that name is given on a command line.
func Argument(name string) string {
	if name == Stdin {
		return "-"
	}
	return name
}

// ParseFile reads a rule file, until ctx ends.
func ParseFile(ctx context.Context, path string) (*File, error) {
	data, err := ReadFile(ctx, path)
	if err != nil {
		return nil, err
	}
	return Parse(path, data)
}

// ReadFile reads the text of a rule file, until ctx ends: of a pipe nobody may ever write.
func ReadFile(ctx context.Context, path string) ([]byte, error) {
	return wait(ctx, func() (_ []byte, err error) {
		in, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer in.Close() // it was only read
		return readText(in)
	})
}

// Read reads the text of a rule file from a stream, until ctx ends.
func Read(ctx context.Context, in io.Reader) ([]byte, error) {
	return wait(ctx, func() ([]byte, error) { return readText(in) })
}

// readText reads as much as a rule file may have, and a byte more, by which Parse knows
// that there was more.
func readText(in io.Reader) ([]byte, error) { return io.ReadAll(io.LimitReader(in, maxFileBytes+1)) }

// wait waits for what reads or for the end of ctx. What reads then goes on alone, as
// nothing can stop it, and its result is nobody's.
func wait(ctx context.Context, read func() ([]byte, error)) ([]byte, error) {
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := read()
		done <- result{data, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, fmt.Errorf("read rule file: %w", r.err)
		}
		return r.data, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("read rule file: %w", context.Cause(ctx))
	}
}

// Parse reads a rule file's text; name is what messages call the file. An error is of
// type Problems and has everything that is wrong.
func Parse(name string, data []byte) (*File, error) {
	return (&reader{collector: collector{name: name}, file: New()}).parse(name, data)
}

// ParseRecorded is Parse for the text of rules that are in use, which an earlier natkit may have
// written down: it takes keys by the names that they had then.
func ParseRecorded(name string, data []byte) (*File, error) {
	return (&reader{collector: collector{name: name}, file: New(), recorded: true}).parse(name, data)
}

func (r *reader) parse(name string, data []byte) (*File, error) {
	r.file.Name = name
	r.file.positions = map[string]Position{}
	if root := r.load(data); root != nil && r.document(root) {
		r.validate()
	}
	if found := r.sorted(); len(found) > 0 {
		return nil, found
	}
	return r.file, nil
}

// reader fills a file from the nodes of its text.
type reader struct {
	collector
	file     *File
	recorded bool // keys by their earlier names are taken
}

func (r *reader) fail(n *yaml.Node, format string, args ...any) {
	r.add(position(n), format, args...)
}

func position(n *yaml.Node) Position { return Position{n.Line, n.Column} }

// load reads YAML and gives the node that holds everything, nil if there is none.
func (r *reader) load(data []byte) *yaml.Node {
	if len(data) > maxFileBytes {
		r.add(Position{}, "the file is larger than %d MiB", maxFileBytes>>20)
		return nil
	}
	if n := items(data); n > maxItems {
		r.add(Position{}, "the file has %d lines and commas, of at most %d", n, maxItems)
		return nil
	}
	if !r.isText(data) {
		return nil
	}
	loader, err := yaml.NewLoader(bytes.NewReader(data), yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		r.syntax(err, data)
		return nil
	}
	var document, second yaml.Node
	err = loader.Load(&document)
	if errors.Is(err, io.EOF) {
		r.add(Position{1, 1}, "the file is empty")
		return nil
	}
	if err == nil {
		if err = loader.Load(&second); err == nil {
			r.fail(&second, "a second document begins here: a rule file is one")
			return nil
		}
	}
	if !errors.Is(err, io.EOF) {
		r.syntax(err, data)
		return nil
	}
	if document.Kind != yaml.DocumentNode || len(document.Content) != 1 {
		r.add(Position{1, 1}, "the file is empty")
		return nil
	}
	return document.Content[0]
}

// --- structure -------------------------------------------------------------------

// plain refuses what YAML can do and a rule file needs not.
func (r *reader) plain(n *yaml.Node) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		r.fail(n, aliasRefused)
	case n.Anchor != "":
		r.fail(n, anchorRefused)
	case n.Style&yaml.TaggedStyle != 0:
		r.fail(n, tagRefused)
	default:
		return true
	}
	return false
}

// entry is one key of a map with its value.
type entry struct {
	name       string
	key, value *yaml.Node
}

// entries gives a map's keys and values, without those that are there twice. what
// names the map in messages.
func (r *reader) entries(n *yaml.Node, what string) []entry {
	if !r.plain(n) {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, "%s must be keys with values, as in key: value", what)
		return nil
	}
	entries := make([]entry, 0, len(n.Content)/2)
	seen := make(map[string]*yaml.Node, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !r.plain(key) {
			continue
		}
		if key.Kind != yaml.ScalarNode {
			r.fail(key, "a key of %s must be a word", what)
			continue
		}
		if first := seen[key.Value]; first != nil {
			r.fail(key, "key %q is in line %d already", key.Value, first.Line)
			continue
		}
		seen[key.Value] = key
		entries = append(entries, entry{key.Value, key, value})
	}
	return entries
}

// elements gives those of a list; one value stands for a list of one.
func (r *reader) elements(n *yaml.Node, what string) []*yaml.Node {
	if !r.plain(n) {
		return nil
	}
	if n.Kind == yaml.SequenceNode && len(n.Content) > 0 {
		return n.Content
	}
	if n.Kind == yaml.ScalarNode && n.Value != "" {
		return []*yaml.Node{n}
	}
	if n.Kind == yaml.MappingNode {
		r.fail(n, "%s must be a list, as in [a, b]", what)
	} else {
		r.fail(n, "%s is empty", what)
	}
	return nil
}

// word gives the text of a value, "" after a complaint.
func (r *reader) word(n *yaml.Node, what string) string {
	if !r.plain(n) {
		return ""
	}
	if n.Kind != yaml.ScalarNode {
		r.fail(n, "%s must be one value", what)
		return ""
	}
	if n.Value == "" {
		r.fail(n, "%s has no value", what)
	}
	return n.Value
}

func (r *reader) unknown(e entry, what string, keys ...string) {
	r.fail(e.key, "unknown key %q in %s; known keys: %s%s", e.name, what, strings.Join(keys, ", "), didYouMean(e.name, keys))
}

// --- the file ----------------------------------------------------------------------

var fileKeys = []string{"inside", "outside", "pools", "defaults", "limits", "subscribers", "pcp", "log", "rules"}

// document reads the whole file. It is false if there are no keys, which is all that is wrong then.
func (r *reader) document(root *yaml.Node) bool {
	nodes := map[string]*yaml.Node{}
	entries := r.entries(root, "a rule file")
	if len(entries) == 0 && r.count > 0 {
		return false
	}
	for _, e := range entries {
		if !slices.Contains(fileKeys, e.name) {
			r.unknown(e, "a rule file", fileKeys...)
			if meant := nearest(e.name, fileKeys); meant != "" {
				r.file.positions[meant] = position(e.key) // it is not missing
			}
			continue
		}
		nodes[e.name] = e.value
		r.file.positions[e.name] = position(e.key)
	}
	read := map[string]func(*yaml.Node){
		"inside":  func(n *yaml.Node) { r.file.Inside = r.links(n, "inside") },
		"outside": func(n *yaml.Node) { r.file.Outside = r.links(n, "outside") },
		"pools":   r.pools, "defaults": r.defaults, "limits": r.limits, "subscribers": r.subscribers, "pcp": r.pcp, "log": r.log, "rules": r.rules,
	}
	// In this order, whatever the file's: rules name what the others define.
	for _, key := range fileKeys {
		if n := nodes[key]; n != nil {
			read[key](n)
		}
	}
	return true
}

// links reads the interfaces of a side.
func (r *reader) links(n *yaml.Node, side string) (names []string) {
	for _, element := range r.elements(n, side) {
		name := r.link(element, side)
		if name == "" {
			continue
		}
		key := side + "." + name
		if r.file.at(key).Line > 0 {
			r.fail(element, "interface %q is listed twice", name)
			continue
		}
		r.file.positions[key] = position(element)
		names = append(names, name)
	}
	return names
}

func (r *reader) pools(n *yaml.Node) {
	entries := r.entries(n, "pools")
	if len(entries) > MaxPools {
		r.fail(n, "%d pools, of at most %d", len(entries), MaxPools)
		return
	}
	for _, e := range entries {
		if !isPoolName(e.name) {
			r.fail(e.key, "%q can't name a pool: take letters, digits, - and _, a letter first, %d at most", e.name, maxPoolName)
			continue
		}
		r.file.Pools = append(r.file.Pools, r.pool(e))
	}
	slices.SortFunc(r.file.Pools, func(a, b Pool) int { return cmp.Compare(a.Name, b.Name) })
}

func (r *reader) pool(e entry) Pool {
	p := Pool{Name: e.name, Position: position(e.key)}
	listed := false
	for _, e := range r.entries(e.value, "a pool") {
		switch e.name {
		case "addresses":
			listed = true
			for _, element := range r.elements(e.value, "addresses") {
				if addresses, ok := r.addresses(element); ok {
					p.Addresses = append(p.Addresses, addresses)
				}
			}
		case "ports":
			if p.OneToOne = e.value.Value == "none"; !p.OneToOne {
				p.Ports = r.ports(e.value)
			}
		case "blocks":
			p.Blocks = r.blocks(e.value)
		case "drain":
			for _, element := range r.elements(e.value, "drain") {
				if addresses, ok := r.addresses(element); ok {
					r.file.positions["drain "+p.Name+" "+addresses.String()] = position(element)
					p.Drain = append(p.Drain, addresses)
				}
			}
		case "arp":
			p.Silent = r.silent(e.value)
		default:
			r.unknown(e, "a pool", "addresses", "ports", "blocks", "drain", "arp")
		}
	}
	if !listed {
		r.fail(e.key, "pool %s has no addresses", p.Name)
	}
	return p
}

func (r *reader) defaults(n *yaml.Node) {
	d := &r.file.Defaults
	for _, e := range r.entries(n, "defaults") {
		switch e.name {
		case "mapping":
			readPerClass(r, e, mappingNames, &d.Mapping)
		case "filtering":
			readPerClass(r, e, filteringNames, &d.Filtering)
		case "mss":
			d.MSS = MSSMode(r.choice(e.value, e.name, mssNames))
		case "inbound_refresh":
			d.InboundRefresh = r.truth(e.value, e.name)
		case "port_parity":
			d.PortParity = r.truth(e.value, e.name)
		case "timeouts":
			r.timeouts(e.value)
		default:
			r.unknown(e, "defaults", "mapping", "filtering", "mss", "inbound_refresh", "port_parity", "timeouts")
		}
	}
}

// transitory is the key that sets all time-outs of TCP but the established one, as
// RFC 5382 speaks of them; what a file says of a single one goes before it.
const transitory = "tcp_transitory"

// renamedTimeouts are names that keys had in earlier versions.
var renamedTimeouts = map[string]string{"port_rest": TimeoutHoldDown.String()}

func (r *reader) timeouts(n *yaml.Node) {
	entries := r.entries(n, "timeouts")
	slices.SortStableFunc(entries, func(a, b entry) int {
		switch transitory {
		case a.name:
			return -1
		case b.name:
			return 1
		}
		return 0
	})
	for _, e := range entries {
		if now := renamedTimeouts[e.name]; now != "" {
			if !r.recorded {
				r.fail(e.key, "%s is now called %s", e.name, now)
				continue
			}
			e.name = now
		}
		known := false
		for i, class := range timeoutClasses {
			if class.key != e.name && !(e.name == transitory && class.setByTransitory) {
				continue
			}
			d, ok := r.duration(e.value, e.name)
			if ok {
				r.file.Defaults.Timeouts[i] = d
				r.file.positions["timeouts."+class.key] = position(e.key)
			}
			known = true
			if !ok {
				break
			}
		}
		if !known {
			keys := []string{transitory}
			for _, class := range timeoutClasses {
				keys = append(keys, class.key)
			}
			r.unknown(e, "timeouts", keys...)
		}
	}
}

func (r *reader) limits(n *yaml.Node) {
	l := &r.file.Limits
	for _, e := range r.entries(n, "limits") {
		r.file.positions["limits."+e.name] = position(e.key)
		switch e.name {
		case "sessions":
			l.Sessions = r.number(e, 1, MaxSessions)
		case "mappings":
			l.Mappings = r.number(e, 1, MaxSessions)
		case "sources":
			l.Sources = r.number(e, 1, MaxSessions)
		case "sessions_per_source":
			l.SessionsPerSource = r.number(e, 0, MaxSessions)
		case "icmp_errors_per_second":
			l.ICMPErrorsPerSecond = r.number(e, 0, 1000000)
		default:
			r.unknown(e, "limits", "sessions", "mappings", "sources", "sessions_per_source", "icmp_errors_per_second")
		}
	}
}

// --- rules -------------------------------------------------------------------------

// ruleKeys are the keys that a rule of each kind may have beside its first.
var ruleKeys = map[string][]string{
	"masquerade": {"ports", "in", "out", "mapping", "filtering", "mss"},
	"snat":       {"to", "ports", "in", "out", "mapping", "filtering", "mss", "arp"},
	"dnat":       {"to", "weights", "in", "mss", "arp"},
	"map":        {"stateless", "in", "out", "mss", "arp"},
	"exclude":    {},
}

// misplaced says why a key of other rules is none of this kind's.
var misplaced = map[[2]string]string{
	{"masquerade", "to"}:  "it translates to the address of the interface that packets leave by; for another write snat",
	{"masquerade", "arp"}: "the gateway's own address is answered for by the gateway",
	{"dnat", "out"}:       "the egress interface follows from the translated destination, but with subscribers by interface",
	{"dnat", "ports"}:     "ports stand behind the address, as in tcp 100.100.100.100:8080",
	{"dnat", "mapping"}:   "the rule itself is the mapping",
	{"dnat", "filtering"}: "the rule lets everybody in",
	{"map", "to"}:         "both sides stand in its value, as in 192.168.0.9 <-> 100.100.100.101",
	{"map", "mapping"}:    "the rule itself is the mapping",
	{"map", "filtering"}:  "the rule lets everybody in",
	{"exclude", "in"}:     "it holds whatever the interface",
	{"exclude", "out"}:    "it holds whatever the interface",
	{"exclude", "to"}:     "the destination stands behind an arrow, as in 10.8.0.0/16 -> 10.0.0.0/8",
	{"exclude", "ports"}:  "ports stand behind the destination, as in tcp any -> 10.0.0.0/8:22",
}

func (r *reader) rules(n *yaml.Node) {
	if !r.plain(n) {
		return
	}
	if n.Kind == yaml.ScalarNode && n.Value == "" {
		return // all of them may be commented out
	}
	if n.Kind != yaml.SequenceNode {
		r.fail(n, "rules must be a list, each rule behind a dash")
		return
	}
	r.file.Rules = make([]Rule, 0, len(n.Content))
	for _, element := range n.Content {
		r.rule(element)
	}
}

// rule reads one rule; one that is wrong does not get into the file.
func (r *reader) rule(n *yaml.Node) {
	before := r.count
	entries := r.entries(n, "a rule")
	kinds := slices.IndexFunc(entries, func(e entry) bool { return ruleKeys[e.name] != nil })
	if kinds < 0 {
		if len(entries) > 0 {
			r.fail(entries[0].key, "a rule needs one of the keys %s; %q is none of them%s", strings.Join(ruleKinds, ", "), entries[0].name, didYouMean(entries[0].name, ruleKinds))
		} else if r.count == before {
			r.fail(n, "a rule needs one of the keys %s", strings.Join(ruleKinds, ", "))
		}
		return
	}
	first := entries[kinds]
	rule := Rule{Position: position(first.key)}
	var rest ruleRest
	for i, e := range entries {
		switch {
		case i == kinds:
		case ruleKeys[e.name] != nil:
			r.fail(e.key, "a rule is of one kind, and this one is %s: begin another with a dash", first.name)
		case slices.Contains(ruleKeys[first.name], e.name), first.name == "dnat" && e.name == "out" && r.file.Subscribers.ByInterface:
			r.ruleKey(e, &rule, &rest)
		case misplaced[[2]string{first.name, e.name}] != "":
			r.fail(e.key, "a rule %s has no key %s: %s", first.name, e.name, misplaced[[2]string{first.name, e.name}])
		default:
			r.unknown(e, "a rule "+first.name, slices.Concat([]string{first.name}, ruleKeys[first.name])...)
		}
	}
	rule.Action = r.action(first, rest)
	if r.count == before {
		r.file.Rules = append(r.file.Rules, rule)
	}
}

// ruleRest is what a rule's action needs of the keys behind its first.
type ruleRest struct {
	to        *yaml.Node
	weights   *entry
	ports     PortRange
	stateless bool
	ofPool    []entry // what only a single address may have
}

func (r *reader) ruleKey(e entry, rule *Rule, rest *ruleRest) {
	switch e.name {
	case "to":
		rest.to = e.value
	case "weights":
		rest.weights = &e
	case "ports":
		rest.ports = r.ports(e.value)
		rest.ofPool = append(rest.ofPool, e)
	case "stateless":
		rest.stateless = r.truth(e.value, e.name)
	case "in":
		rule.In = r.link(e.value, e.name)
	case "out":
		rule.Out = r.link(e.value, e.name)
	case "mapping":
		readPerClass(r, e, mappingNames, &rule.Mapping)
	case "filtering":
		readPerClass(r, e, filteringNames, &rule.Filtering)
	case "mss":
		rule.MSS = MSSMode(r.choice(e.value, e.name, mssNames))
	case "arp":
		rule.Silent = r.silent(e.value)
		rest.ofPool = append(rest.ofPool, e)
	}
}

// action reads what a rule is for and what it does.
func (r *reader) action(first entry, rest ruleRest) Action {
	if rest.to == nil && slices.Contains(ruleKeys[first.name], "to") {
		r.fail(first.key, "a rule %s needs a key to", first.name)
		return nil
	}
	text := r.word(first.value, first.name)
	if text == "" {
		return nil
	}
	switch first.name {
	case "masquerade":
		source, _ := r.prefix(first.value, text)
		return Masquerade{source, rest.ports}
	case "snat":
		source, _ := r.prefix(first.value, text)
		return r.snat(source, rest)
	case "dnat":
		return r.dnat(first.value, text, rest)
	case "map":
		return r.mapped(first.value, text, rest.stateless)
	}
	return r.exclude(first.value, text)
}

func (r *reader) snat(source netip.Prefix, rest ruleRest) Action {
	a := SNAT{Source: source, Ports: rest.ports}
	to := r.word(rest.to, "to")
	switch {
	case to == "":
	case r.file.Pool(to) != nil:
		a.Pool = to
		for _, e := range rest.ofPool {
			r.fail(e.key, "%s belongs to pool %s: write it there", e.name, to)
		}
	case isPoolName(to):
		r.fail(rest.to, "unknown pool %q%s", to, didYouMean(to, r.file.poolNames()))
	case strings.ContainsAny(to, "/-"):
		r.fail(rest.to, "%q is more than one address: make a pool of them, and name it here", to)
	default:
		a.Address, _ = r.host(rest.to, to)
	}
	return a
}

func (r *reader) dnat(n *yaml.Node, text string, rest ruleRest) Action {
	var a DNAT
	to := rest.to
	words := strings.Fields(text)
	if len(words) < 1 || len(words) > 2 {
		r.fail(n, "want [protocol] address[:port or range] and not %q", text)
		return a
	}
	if len(words) == 2 {
		a.Protocol = r.protocol(n, words[0])
	}
	var known bool
	if a.Address, a.Ports, known = r.endpoint(n, words[len(words)-1]); !known {
		return a
	}
	r.portsNeedProtocol(n, a.Protocol, a.Ports)
	elements := r.elements(to, "to")
	if len(elements) > maxTargets {
		r.fail(to, "%d targets, of which a rule can have %d", len(elements), maxTargets)
		return a
	}
	for _, element := range elements {
		text := r.word(element, "to")
		if text == "" {
			continue
		}
		if address, ports, ok := r.endpoint(element, text); ok {
			t := Target{address, ports}
			r.target(element, &a, t)
			a.Targets = append(a.Targets, t)
		}
	}
	if rest.weights != nil {
		a.Weights = r.weights(*rest.weights, elements)
	}
	return a
}

// weights reads those of as many targets.
func (r *reader) weights(e entry, targets []*yaml.Node) (weights []int) {
	elements := r.elements(e.value, e.name)
	if len(elements) == 0 || len(targets) == 0 {
		return nil
	}
	if len(elements) != len(targets) {
		r.fail(e.value, "want a weight for each of the %d targets, in the order of to, and not %d", len(targets), len(elements))
		return nil
	}
	total, least := 0, maxWeight
	for _, element := range elements {
		before := r.count
		if element.Value == "0" {
			r.fail(element, "a target of weight 0 gets nobody: take it out of to, and its weight")
			continue
		}
		w := r.number(entry{"a weight", e.key, element}, 1, maxWeight)
		if r.count == before {
			weights, total, least = append(weights, w), total+w, min(least, w)
		}
	}
	if total > least*maxRatio {
		r.fail(e.value, "weight %d of %d in all is less than one client of %d: the engines' tables are not that fine", least, total, maxRatio)
	}
	return weights
}

// target checks one of a rule's targets against what the rule matches and the others.
func (r *reader) target(n *yaml.Node, a *DNAT, t Target) {
	switch {
	case slices.Contains(a.Targets, t):
		r.fail(n, "target %s is listed twice", t)
	case len(a.Targets) > 0 && t.Ports.IsZero() != a.Targets[0].Ports.IsZero():
		r.fail(n, "either all targets name ports or none does")
	case t.Ports.IsZero():
	case a.Ports.IsZero():
		r.fail(n, "target %s names ports, but the rule is for all of %s", t, a.Address)
	case t.Ports.Count() != a.Ports.Count():
		r.fail(n, "target %s must have as many ports as the rule, %d; named without ports, they stay as they are", t, a.Ports.Count())
	}
}

func (r *reader) mapped(n *yaml.Node, text string, stateless bool) Action {
	a := Map{Stateless: stateless}
	inside, outside, ok := strings.Cut(text, "<->")
	if !ok {
		r.fail(n, "want inside <-> outside and not %q", text)
		return a
	}
	var okInside, okOutside bool
	a.Inside, okInside = r.prefix(n, strings.TrimSpace(inside))
	a.Outside, okOutside = r.prefix(n, strings.TrimSpace(outside))
	switch {
	case !okInside || !okOutside:
	case a.Inside.Bits() != a.Outside.Bits():
		r.fail(n, "a map is one to one, but %s and %s are not of equal length", prefixText(a.Inside), prefixText(a.Outside))
	case a.Inside.Bits() == 0:
		r.fail(n, "a map of all addresses to themselves translates nothing")
	default:
		r.hosts(n, RangeOf(a.Inside))
		r.hosts(n, RangeOf(a.Outside))
	}
	return a
}

func (r *reader) exclude(n *yaml.Node, text string) Action {
	var a Exclude
	source, to, ok := strings.Cut(text, "->")
	from := strings.Fields(source)
	if to = strings.TrimSpace(to); !ok || len(from) < 1 || len(from) > 2 || to == "" {
		r.fail(n, "want [protocol] source -> destination[:port or range] and not %q", text)
		return a
	}
	if len(from) == 2 {
		a.Protocol = r.protocol(n, from[0])
	}
	a.Source, _ = r.prefix(n, from[len(from)-1])
	if prefix, ports, named := strings.Cut(to, ":"); named && !strings.Contains(ports, ":") {
		to = prefix
		a.Ports = r.portRange(n, ports)
	}
	a.Destination, _ = r.prefix(n, to)
	r.portsNeedProtocol(n, a.Protocol, a.Ports)
	return a
}

// portsNeedProtocol: a port is a port of something.
func (r *reader) portsNeedProtocol(n *yaml.Node, p Protocol, ports PortRange) {
	if !ports.IsZero() && !p.HasPorts() {
		r.fail(n, "ports need a protocol that has them: write tcp, udp or udplite in front")
	}
}
