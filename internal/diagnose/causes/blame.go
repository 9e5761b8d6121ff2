// SPDX-License-Identifier: Apache-2.0

package causes

// Which rule or policy dropped which packets: samples of what was dropped, followed through
// the rules, and counters where the samples leave a choice.

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/diagnose/blame"
	"natkit/internal/snapshot"
)

// blamed is packets of one row that one rule or policy dropped, or one of several.
type blamed struct {
	row  snapshot.Drop // with the count and the packets of these only
	kind packetKind
	by   []blame.Dropper
	// known: the packets were followed through all rules. by is then one, or those that can't
	// be told apart; none where no rule that is known dropped them.
	known bool
}

// packetKind is what a dropped packet means to somebody.
type packetKind int

const (
	otherPacket   packetKind = iota
	replyPacket              // to a connection that rules here let begin
	strayPacket              // in the middle of a connection, and of none that is known
	sizeMessage              // ICMP about a packet that was too big
	findNeighbour            // ARP or neighbour discovery
)

func (f facts) kindOf(sample string) packetKind {
	switch {
	case findsNeighbours(sample):
		return findNeighbour
	case saysSize(sample):
		return sizeMessage
	case midStream(sample):
		return strayPacket
	case isAnswer(sample) || f.awaited(sample):
		return replyPacket
	}
	return otherPacket
}

// sure is the one that dropped the packets.
func (b blamed) sure() (blame.Dropper, bool) {
	if !b.known || len(b.by) != 1 {
		return blame.Dropper{}, false
	}
	return b.by[0], true
}

// isPolicy says whether a dropper is the end of a base chain: its policy, or a last rule
// without condition.
func isPolicy(d blame.Dropper) bool {
	return d.Rule == nil || d.Chain.Hook != "" && d.Rule.Map == "" && len(d.Rule.Matches) == 0
}

// memo keeps what several causes ask for and takes long to find.
type memo struct {
	blamed []blamed
	done   bool
}

func newFacts(s *snapshot.Snapshot) facts { return facts{Snapshot: s, memo: &memo{}} }

// blamed are the rows of packets that rules dropped, by what dropped them.
func (f facts) blamed() []blamed {
	if f.memo != nil && f.memo.done {
		return f.memo.blamed
	}
	_, rows, _ := f.dropped(snapshot.CauseRule)
	var out []blamed
	for _, row := range rows {
		out = append(out, f.followed(row)...)
	}
	out = settleByCounters(out)
	if f.memo != nil {
		f.memo.blamed, f.memo.done = out, true
	}
	return out
}

// followed divides a row by what dropped its packets.
func (f facts) followed(row snapshot.Drop) (out []blamed) {
	if len(row.Packets) == 0 || f.Chains == nil || !f.rulesKnown() {
		b := blamed{row: row}
		for _, sample := range row.Samples {
			b.kind = max(b.kind, f.kindOf(sample))
		}
		return []blamed{b}
	}
	left := row.Count
	for _, p := range row.Packets {
		stands := min(p.Stands, left)
		left -= stands
		a := blame.Follow(f.Snapshot, row, p)
		known := !a.Unread && len(a.Droppers) > 0
		kind, device := f.kindOf(p.Text), cmp.Or(p.In, row.Interface) // of what is on its way out, the tracer has the device it leaves by
		i := slices.IndexFunc(out, func(b blamed) bool {
			return b.known == known && b.kind == kind && b.row.Interface == device && slices.Equal(b.by, a.Droppers)
		})
		if i < 0 {
			part := row
			part.Count, part.Samples, part.Packets, part.Interface = 0, nil, nil, device
			out = append(out, blamed{part, kind, a.Droppers, known})
			i = len(out) - 1
		}
		part := &out[i].row
		part.Count = saturate(part.Count, stands)
		part.Packets = append(part.Packets, p)
		if !slices.Contains(part.Samples, p.Text) {
			part.Samples = append(part.Samples, p.Text)
		}
	}
	out[0].row.Count = saturate(out[0].row.Count, left)
	return slices.DeleteFunc(out, func(b blamed) bool { return b.row.Count == 0 })
}

// countedMost is the share of packets that a counter must have met to be what dropped them:
// rules are read a little before the drops and a little after.
const countedMost = 0.9

// settleByCounters gives packets that several may have dropped to the one whose counter met
// as many, besides those that are surely its own.
func settleByCounters(all []blamed) []blamed {
	own := map[blame.Dropper]uint64{}
	for _, b := range all {
		if d, ok := b.sure(); ok {
			own[d] = saturate(own[d], b.row.Count)
		}
	}
	for i, b := range all {
		if !b.known || len(b.by) < 2 {
			continue
		}
		var met []blame.Dropper
		for _, d := range b.by {
			n := d.Packets()
			if n != nil && *n < implausible && *n >= own[d] && float64(*n-own[d]) >= countedMost*float64(b.row.Count) {
				met = append(met, d)
			}
		}
		if len(met) == 1 {
			all[i].by = met
			own[met[0]] = saturate(own[met[0]], b.row.Count)
		}
	}
	return all
}

// culprit is something that dropped packets, or may have.
type culprit struct {
	blame.Dropper
	packets uint64 // that it dropped, or may have
	sample  snapshot.DroppedPacket
	row     snapshot.Drop
	blamed  bool // found by following packets; else by counters
}

// culprits are what dropped these packets, or may have, most first; sure says that the first
// dropped nearly all of them.
func culprits(groups []blamed) (out []culprit, sure bool) {
	var all uint64
	certain := map[blame.Dropper]uint64{}
	for _, b := range groups {
		all = saturate(all, b.row.Count)
		for _, d := range b.by {
			i := slices.IndexFunc(out, func(c culprit) bool { return c.Dropper == d })
			if i < 0 {
				out = append(out, culprit{Dropper: d, row: b.row, blamed: true})
				i = len(out) - 1
				if len(b.row.Packets) > 0 {
					out[i].sample = b.row.Packets[0]
				}
			}
			out[i].packets = saturate(out[i].packets, b.row.Count)
		}
		if d, ok := b.sure(); ok {
			certain[d] = saturate(certain[d], b.row.Count)
		}
	}
	slices.SortStableFunc(out, func(a, b culprit) int { return cmp.Compare(b.packets, a.packets) })
	return out, len(out) > 0 && float64(certain[out[0].Dropper]) >= countedMost*float64(all)
}

// titleRule is how much of a rule's text a title has room for.
const titleRule = 44

// short names a culprit in a title.
func (c culprit) short() string {
	switch {
	case c.Rule == nil:
		return fmt.Sprintf("the policy of chain %s", c.Chain.Name)
	case c.Rule.Text == "":
		return fmt.Sprintf("rule %d of chain %s", c.Rule.Number, c.Chain.Name)
	}
	text := c.Rule.Text
	if runes := []rune(text); len(runes) > titleRule {
		if l := limit(c.Rule); l != "" { // what it drops by
			runes = []rune("... " + l + " " + c.Rule.Verdict)
		}
		if text = string(runes); len(runes) > titleRule {
			text = string(runes[:titleRule-3]) + "..."
		}
	}
	text = "`" + text + "`"
	if c.Rule.Handle != 0 {
		text += fmt.Sprintf(" (handle %d)", c.Rule.Handle)
	}
	return text
}

// place names where a culprit stands.
func (c culprit) place() string {
	where := fmt.Sprintf("chain %s of table %s %s", c.Chain.Name, c.Chain.Family, c.Chain.Table)
	if c.Rule == nil {
		return "policy of " + where
	}
	return fmt.Sprintf("rule %d of %s", c.Rule.Number, where)
}

// evidence shows a culprit as its own program prints it, and its present value.
func (c culprit) evidence(f facts) (out []Evidence) {
	source := fromRules + " (" + c.Chain.Backend + ")"
	value := "drop"
	if c.Rule != nil {
		if value = c.Rule.Text; value == "" {
			value = c.Rule.Verdict
		}
		if c.Rule.Handle != 0 {
			value += fmt.Sprintf(" # handle %d", c.Rule.Handle)
		}
	}
	if n := c.Packets(); n != nil && *n < implausible {
		value += "; its counter met " + number(*n, "packet")
	}
	out = append(out, Evidence{c.place(), value, source})
	for _, state := range f.states(c) {
		out = append(out, Evidence{"its current value", state, source})
	}
	return out
}

// states is what made a rule drop, as far as that is more than its conditions: a quota that is
// used up, an element of a set, an interface that is not there.
func (f facts) states(c culprit) (out []string) {
	if c.Rule == nil {
		return nil
	}
	out = append(out, c.Rule.State...)
	for _, e := range f.metElements(c) {
		if strings.HasPrefix(e.set.Name, "__") {
			continue // the rule's text has it
		}
		text := fmt.Sprintf("element { %s } of set %s", strings.Join(e.element.Key, " . "), e.set.Name)
		if e.element.TimeoutSeconds > 0 {
			text += fmt.Sprintf(", timeout %.0f s, expires in %.0f s", e.element.TimeoutSeconds, e.element.ExpiresSeconds)
		} else if e.element.ExpiresSeconds > 0 {
			text += fmt.Sprintf(", expires in %.0f s", e.element.ExpiresSeconds)
		}
		out = append(out, text)
	}
	for _, m := range c.Rule.Matches {
		if name, ok := f.noInterface(m); ok {
			out = append(out, "there is no interface "+name)
		}
		if len(m.Keys) == 0 && limits(m.Text) {
			out = append(out, "the condition `"+m.Text+"` depends on earlier packets")
		}
	}
	return out
}

// noInterface is an interface that a condition names and that is not there.
func (f facts) noInterface(m snapshot.Match) (name string, missing bool) {
	if len(m.Keys) != 1 || len(f.Interfaces) == 0 || len(f.Interfaces) >= snapshot.MaxInterfaces {
		return "", false
	}
	switch m.Keys[0] {
	case "iifname", "oifname", "iif", "oif":
	default:
		return "", false
	}
	for _, v := range m.Values {
		if _, ok := f.link(v); ok || strings.HasSuffix(v, "*") || v == "" {
			return "", false
		}
		name = v
	}
	return name, name != ""
}

// metElement is an element of a set that a dropped packet met.
type metElement struct {
	set     *snapshot.Set
	element snapshot.Element
}

func (f facts) metElements(c culprit) (out []metElement) {
	if c.Rule == nil || c.sample.Text == "" {
		return nil
	}
	add := func(name string, keys []string) {
		if set := blame.Set(f.Snapshot, c.Chain, name); set != nil && len(keys) > 0 {
			for _, e := range blame.Elements(f.Snapshot, c.Chain, set, keys, c.sample) {
				out = append(out, metElement{set, e})
			}
		}
	}
	for _, m := range c.Rule.Matches {
		if m.Set != "" && !m.Not {
			add(m.Set, m.Keys)
		}
	}
	if c.Rule.Map != "" {
		add(c.Rule.Map, c.Rule.MapKeys)
	}
	return out
}

// near are rules that would have accepted a packet but for one condition: a limit, or an
// interface that is not there.
func (f facts) near(c culprit) (out []Evidence) {
	if c.sample.Text == "" {
		return nil
	}
	for _, d := range f.accepting(c) {
		a := culprit{Dropper: d}
		out = append(out, Evidence{a.place() + " would accept it", a.Rule.Text + handle(a.Rule), fromRules + " (" + d.Chain.Backend + ")"})
		for _, state := range f.states(a) {
			out = append(out, Evidence{"but", state, fromRules + " (" + d.Chain.Backend + ")"})
		}
	}
	return out
}

func handle(r *snapshot.Rule) string {
	if r.Handle == 0 {
		return ""
	}
	return fmt.Sprintf(" # handle %d", r.Handle)
}

// selective says whether a rule is about some addresses only, and others get through: a block
// list at work. The packet with another's address, who was answered lately, passes the rule.
func (f facts) selective(c culprit) bool {
	packet, ok := parseSample(c.sample.Text)
	if !ok || f.Conntrack == nil || f.Conntrack.Table == nil || c.Rule == nil {
		return false
	}
	t := f.Conntrack.Table
	sources, dests := t.Sources, t.Destinations
	if f.kindOf(c.sample.Text) == replyPacket {
		sources, dests = dests, sources
	}
	spared := func(source, dest netip.Addr) bool {
		other := c.sample
		other.Text = strings.Join([]string{packet.protocol, endOf(source, packet.source), "->", endOf(dest, packet.dest)}, " ") + afterEnds(c.sample.Text)
		a := blame.Follow(f.Snapshot, c.row, other)
		return !a.Unread && !slices.Contains(a.Droppers, c.Dropper)
	}
	answered := func(of snapshot.Talker, than netip.Addr) bool {
		return of.Addr != than && of.Addr.Is4() == than.Is4() && of.Unreplied < of.Entries && of.Entries < implausible
	}
	here, _ := f.linkTo(packet.source.Addr())
	for _, o := range sources {
		there, _ := f.linkTo(o.Addr)
		if answered(o, packet.source.Addr()) && there.Name == here.Name && spared(o.Addr, packet.dest.Addr()) {
			return true
		}
	}
	for _, o := range dests {
		if answered(o, packet.dest.Addr()) && !f.own(o.Addr) && spared(packet.source.Addr(), o.Addr) {
			return true
		}
	}
	return false
}

// endOf is an address with the port of another end, as samples have it.
func endOf(a netip.Addr, like netip.AddrPort) string {
	if like.Port() == 0 {
		return a.String()
	}
	return netip.AddrPortFrom(a, like.Port()).String()
}

// afterEnds is what a sample says besides its addresses.
func afterEnds(sample string) string {
	rest := ""
	if fields := strings.Fields(sample); len(fields) > 4 {
		rest = " " + strings.Join(fields[4:], " ")
	}
	return rest
}
