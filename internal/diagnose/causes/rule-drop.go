// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"natkit/internal/diagnose/blame"
	"natkit/internal/kernel/ruleset"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A rule that drops was written by somebody. It is worth a word when it takes a
	// good part of what this machine's own clients send, or answers of connections
	// that it let begin.
	ruleFew   = 5
	ruleShare = 0.05 // of what came in by that interface: advice, of answers a warning
	ruleMost  = 0.50 // a warning, of answers critical
	ruleAll   = 0.90 // critical
)

var ruleDrop = Cause{
	Code:     "rule-drop",
	Title:    "A rule drops client traffic or its replies",
	Headline: "A firewall rule drops client traffic: which nftables or iptables rule is it?",
	Search: []string{
		"reason: NETFILTER_DROP",
		"Operation not permitted",
		"Packet filtered",
		"Communication administratively prohibited",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"clients-unreached"}, // replies among what a rule drops may not be among its samples
	Needs:      []string{snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanSets, snapshot.CanInterfaces, snapshot.CanCounters},
	Symptom:    "Some clients, or one protocol, get through and others do not. Connections open on one side only. Over IPv6 nobody finds this machine. It often began when a list of addresses, a limit or a rule was added.",
	Proof: fmt.Sprintf("Rules with a condition dropped packets (NETFILTER_DROP where a rule is evaluated) of clients in networks of this machine, or packets whose destination a rule had translated: at least %s of what arrived on that interface is advice, %s a warning, %s critical. %d packets for a published service that no connection reaches are advice; if their sources are private, a warning. Where clients cannot open connections because of a limit (a rate, a quota, a number of connections), %d packets are a warning, however small their share. Replies to connections that the rules let start, and other packets of open connections: %s are a warning (fewer if a client has at least %d connections half-open because of them), %s critical. Neighbour discovery and ARP: a warning from %d packets. natkit finds the rule from samples of the dropped packets: it follows each one through the rules and sets, as they were at the end of the window, and prints the rule with its handle and the quota, limit or set element that made it drop. Counters are not needed. If a sample does not show whether a condition held (limits, connection marks, sets that could not be read), counters decide. Without counters, natkit names all rules and policies that remain, with commands that count what reaches each one.",
		percent.Whole(ruleShare), percent.Whole(ruleMost), percent.Whole(ruleAll), ruleFew, ruleFew, percent.Whole(ruleShare), halfwayFew, percent.Whole(ruleMost), fewFailures),
	FalsePositive: "A firewall that drops traffic from elsewhere for this machine or its networks: scans are most of what a quiet line receives. A small part of what clients send. A block list at work is advice at most: the rule concerns some addresses, and connections of others get replies.",
	Cure:          "Remove the address from the set, reset the quota, raise the limit, narrow the rule, or delete it. Never put an accept rule in front of it: that would disable the rest of the list.",
	judge:         judgeRuleDrop,
}

// ruleVictims are packets of one kind that rules dropped.
type ruleVictims struct {
	count    uint64
	rows     []snapshot.Drop
	groups   []blamed
	received uint64 // by the interface that they came in by
	by       string // its name
}

func (r *ruleVictims) add(b blamed, in snapshot.Interface) {
	r.count = saturate(r.count, b.row.Count)
	r.rows = append(r.rows, b.row)
	r.groups = append(r.groups, b)
	if in.RxPackets < implausible && in.Name != "" && r.by == "" {
		r.received, r.by = in.RxPackets, in.Name
	}
}

func (r *ruleVictims) share() float64 {
	if r.by == "" {
		return 0
	}
	return share(r.count, max(r.count, r.received))
}

// ruleKinds are the packets that rules dropped, by what they mean.
type ruleKinds struct {
	discovery, own, published ruleVictims
	answers                   ruleVictims // and other packets of connections that it let start
	replies                   bool        // among them
}

// ruleKinds leaves out what other causes tell of: the end of a forward chain, and one-way
// connections.
func (f facts) ruleKinds(policy, oneWay bool) (k ruleKinds) {
	byRules := f.ruleDrops() // by counters: what a policy dropped on the same hook is not theirs
	for _, b := range f.blamed() {
		row := b.row
		in, _ := f.link(row.Interface)
		neighbours := b.kind == findNeighbour
		if d, sure := b.sure(); sure && isPolicy(d) && d.Chain.Hook == "forward" && !neighbours {
			continue
		}
		if policy && !b.known && f.hookOf(row) == "forward" && !neighbours && !f.silentRules("forward") {
			row.Count = min(row.Count, byRules)
			byRules -= row.Count
			b.row = row
		}
		switch {
		case row.Count == 0:
		case neighbours:
			k.discovery.add(b, in)
		case oneWay && b.kind == strayPacket:
			// what these causes tell of
		case slices.ContainsFunc(row.Samples, isAnswer) || slices.ContainsFunc(row.Samples, f.awaited):
			k.answers.add(b, in)
			k.replies = true
		case slices.ContainsFunc(row.Packets, ofOpenConnection) || slices.ContainsFunc(row.Samples, f.confirms):
			k.answers.add(b, in)
		default:
			if from, ok := f.sentByClients(row, in); ok {
				k.own.add(b, from)
			}
			if f.publishedLost([]snapshot.Drop{row}, onlyInside) > 0 {
				k.published.add(b, in)
			}
		}
	}
	return k
}

func judgeRuleDrop(f facts) *verdict {
	if f.Drops == nil {
		return nil
	}
	forward := judgeForwardPolicy(f)
	policy, oneWay := forward != nil, judgeAsymmetric(f) != nil
	k := f.ruleKinds(policy, oneWay)
	v := &verdict{}
	var victims ruleVictims
	what := ""
	switch {
	case k.answers.count >= ruleFew && (k.answers.share() >= ruleShare || f.leftHalfway()):
		v.Severity, victims, what = Warning, k.answers, "packets of open connections"
		if k.replies {
			what = "replies to connections that it let start"
		}
		if k.answers.share() >= ruleMost {
			v.Severity = Critical
		}
	case policy && k.own.count >= ruleFew && !slices.ContainsFunc(k.own.groups, func(b blamed) bool { return b.known }):
		k.own.received, k.own.by = 0, "" // by which interface they came in is not known beside the policy's
		v.Severity, victims, what = Advice, k.own, "packets"
	case k.own.count >= ruleFew && (k.own.share() >= ruleShare || f.refusesConnections(k.own)):
		v.Severity, victims, what = f.ownSeverity(k.own), k.own, "packets"
	case k.published.count > 0:
		v.Severity, victims, what = f.publishedLost(k.published.rows, onlyInside), k.published, "packets for a published service"
	}
	if v.Severity < Warning && k.discovery.count >= fewFailures {
		v.Severity, victims, what = Warning, k.discovery, neighbourPackets
	}
	if v.Severity == 0 {
		return judgeTTLRule(f)
	}
	return f.ruleFinding(v, victims, what, policy)
}

// ownSeverity is how bad it is that a rule drops what clients of this machine send.
func (f facts) ownSeverity(own ruleVictims) Severity {
	switch {
	case own.share() >= ruleAll:
		return Critical
	case own.share() >= ruleMost || f.refusesConnections(own):
		return Warning
	}
	return Advice
}

// ruleFinding fills in who dropped the packets, and how to spare them.
func (f facts) ruleFinding(v *verdict, victims ruleVictims, what string, policy bool) *verdict {
	v.impact = float64(victims.count)
	suspects, sure := f.droppingRules(victims)
	if sure && suspects[0].Chain.Table == guardTable {
		return nil // what a cure of this doctor's keeps out
	}
	var over exceeded
	limited := false
	if sure {
		over, limited = f.exceeded(suspects[0])
	}
	if sure && !limited && what != neighbourPackets && f.selective(suspects[0]) {
		v.Severity = min(v.Severity, Advice) // it is about this address, and others get through
	}
	v.Title = f.ruleTitle(victims, suspects, sure, what)
	v.Evidence = []Evidence{{what + " dropped by rules", strconv.FormatUint(victims.count, 10) + cameInBy(victims.rows), fromTracer}}
	if !policy || sure { // otherwise it is not known which of the packets were the policy's
		v.Evidence = append(v.Evidence, sampleEvidence(victims.rows)...)
	}
	if victims.by != "" {
		v.Evidence = append(v.Evidence, Evidence{"packets received on " + victims.by, strconv.FormatUint(victims.received, 10), fromLinks})
	}
	for _, s := range suspects {
		v.Evidence = append(v.Evidence, s.evidence(f)...)
	}
	if sure {
		v.Evidence = append(v.Evidence, f.near(suspects[0])...)
	}
	if limited {
		v.Evidence = append(v.Evidence, f.overBy(victims.rows)...)
	}
	v.Why = "The sender of a dropped packet gets no error; it retransmits and waits. A rule that was meant for other hosts, or for another time, looks like a network fault."
	if sure && suspects[0].Rule != nil && suspects[0].Rule.Verdict == "reject" {
		v.Why = "The sender gets an error (a reset, or ICMP). A rule that was meant for other hosts, or for another time, looks like a network fault."
	}
	v.Remedy = f.spare(victims, suspects, sure)
	if over.by != nil {
		v.Remedy = f.raise(over)
	}
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
}

const neighbourPackets = "packets of ARP and neighbour discovery"

// ruleTitle names the rule, or all that may have been it.
func (f facts) ruleTitle(victims ruleVictims, suspects []culprit, sure bool, what string) string {
	part := ""
	if victims.by != "" {
		part = fmt.Sprintf(", %s of what arrived on %s", percent.Whole(victims.share()), victims.by)
	}
	if sure {
		title, used := "", ""
		for _, w := range []string{what, briefly(what), "packets"} {
			title = fmt.Sprintf("%s dropped %d %s %s", suspects[0].short(), victims.count, w, f.window())
			used = f.usedUp(suspects[0], title)
			if utf8.RuneCountInString(title+used) <= titleMost {
				break
			}
		}
		return titled(title, used, part)
	}
	if !slices.ContainsFunc(suspects, func(c culprit) bool { return c.blamed || c.Rule == nil }) || len(suspects) < 2 {
		return fmt.Sprintf("a rule dropped %d %s %s%s", victims.count, what, f.window(), part)
	}
	names := []string{}
	for _, s := range suspects[:2] {
		names = append(names, s.short())
	}
	if len(suspects) > 2 {
		names[1] += " or another"
	}
	return titled(fmt.Sprintf("%d %s dropped %s by %s", victims.count, what, f.window(), strings.Join(names, " or ")), "; natkit cannot tell which")
}

// briefly is what was dropped in a word or two, where a rule's text leaves little room.
func briefly(what string) string {
	if strings.HasPrefix(what, "replies") {
		return "replies"
	}
	return what
}

// usedUp is what made a rule drop, in a word, behind a title.
func (f facts) usedUp(c culprit, title string) string {
	for _, state := range f.states(c) {
		var used, limit uint64
		if _, counts, ok := strings.Cut(state, ": "); ok && strings.HasPrefix(state, "quota") {
			if n, _ := fmt.Sscanf(counts, "%d of %d bytes used", &used, &limit); n == 2 && used >= limit {
				return ": the quota is used up"
			}
		}
	}
	if over, ok := f.exceeded(c); ok && over.by != nil {
		return over.overTitle(title)
	}
	return ""
}

// findsNeighbours says whether a sampled packet is ARP, or IPv6's solicitation or
// advertisement of a neighbour.
func findsNeighbours(sample string) bool {
	return sample == "arp" || strings.HasPrefix(sample, "arp ") ||
		strings.HasPrefix(sample, "icmpv6 ") && (strings.Contains(sample, " type 135 ") || strings.Contains(sample, " type 136 "))
}

// isAnswer says whether a sampled packet goes against its connection's direction.
func isAnswer(sample string) bool {
	packet, ok1 := parseSample(sample)
	flow, ok2 := parseFlow(sample)
	return ok1 && ok2 && (packet.dest == flow.source || packet.source == flow.dest)
}

// ofOpenConnection says whether a dropped packet belongs to a connection that has seen packets of both directions.
func ofOpenConnection(p snapshot.DroppedPacket) bool {
	return p.State == "established" && slices.Contains(p.Status, "seen-reply")
}

// confirms says whether a sampled packet, dropped before connection tracking saw it, is one that a connection
// which was replied to waits for.
func (f facts) confirms(sample string) bool {
	packet, ok := parseSample(sample)
	return ok && midStream(sample) && f.Conntrack != nil && f.Conntrack.Table != nil &&
		slices.ContainsFunc(f.Conntrack.Table.Halfway, func(u snapshot.UnansweredUse) bool { return u.Recent > 0 && confirmation(u, packet) })
}

// leftHalfway says whether a client has several connections half-open for packets that were dropped here.
func (f facts) leftHalfway() bool {
	return f.Conntrack != nil && f.Conntrack.Table != nil && judgeSYNFlood(f) == nil && slices.ContainsFunc(f.Conntrack.Table.Halfway, func(u snapshot.UnansweredUse) bool {
		return u.Recent >= halfwayFew && u.Recent < implausible && !f.own(u.Source) && f.handshakeDropped(u)
	})
}

// confirmation says whether a packet is what a half-open connection's client sends next.
func confirmation(u snapshot.UnansweredUse, t tuple) bool {
	return t.protocol == "tcp" && t.source.Addr() == u.Source && (t.dest == u.Dest.AddrPort || t.dest == u.Target.AddrPort)
}

// awaited says whether a sampled packet, dropped before connection tracking saw it, answers
// a connection that waits for it. What answers to others' packets with forged sources does not.
func (f facts) awaited(sample string) bool {
	packet, ok := parseSample(sample)
	return ok && (packet.protocol == "udp" || packet.protocol == "tcp" && strings.Contains(sample, " SYN,ACK")) && f.Conntrack != nil && f.Conntrack.Table != nil &&
		slices.ContainsFunc(f.Conntrack.Table.Unanswered, func(u snapshot.UnansweredUse) bool {
			return u.Protocol == packet.protocol && u.Target.AddrPort == packet.source && (u.Protocol == "tcp" || u.SNAT && f.own(packet.dest.Addr()))
		})
}

// asSent is a sampled packet with the source that its sender gave it: what leaves may have one
// of this machine's addresses already. An ICMP message about a flow is this machine's own.
func (f facts) asSent(sample string) (tuple, bool) {
	t, ok := parseSample(sample)
	if flow, tracked := parseFlow(sample); tracked && f.own(t.source.Addr()) && !strings.HasPrefix(t.protocol, "icmp") {
		t.source = flow.source
	}
	return t, ok
}

// sentByClients says whether dropped packets were on their way through, from a network
// of this machine or to where a rule here had sent them, and by which interface they came.
func (f facts) sentByClients(row snapshot.Drop, in snapshot.Interface) (snapshot.Interface, bool) {
	for _, sample := range row.Samples {
		t, ok := f.asSent(sample)
		if !ok || f.own(t.dest.Addr()) || f.own(t.source.Addr()) || f.manifold(t.dest.Addr()) {
			continue
		}
		if flow, tracked := parseFlow(sample); tracked && flow.dest.Addr() != t.dest.Addr() {
			return in, true
		}
		if from, ok := f.linkTo(t.source.Addr()); ok && !f.fromOutside(t) {
			return from, true
		}
	}
	return in, false
}

// publishedLost is how bad it is that rows are packets of a published service which no
// connection gets through to, 0 if they are not: by their number they may be next to nothing.
// It may be published for some only, so that others who are refused are as it should be:
// clients says whose packets are surely wanted.
func (f facts) publishedLost(rows []snapshot.Drop, clients func(netip.Addr) bool) (s Severity) {
	if total(rows) < ruleFew {
		return 0
	}
	for _, row := range rows {
		for _, sample := range row.Samples {
			flow, ok := ledBy(sample)
			if packet, read := parseSample(sample); read && !ok { // or it was dropped before it could be led anywhere
				_, _, ok = f.publishes(packet.protocol, packet.dest)
				flow = packet
			}
			if !ok || f.reached(flow.dest) {
				continue
			}
			s = max(s, Advice)
			if clients(flow.source.Addr()) {
				s = Warning
			}
		}
	}
	return s
}

// ledBy is the flow of a sampled packet which a rule leads to another address.
func ledBy(sample string) (flow tuple, ok bool) {
	packet, ok1 := parseSample(sample)
	flow, ok2 := parseFlow(sample)
	return flow, ok1 && ok2 && !strings.HasPrefix(packet.protocol, "icmp") && !isAnswer(sample) && flow.dest.Addr() != packet.dest.Addr()
}

// reached says whether a connection to a translated destination was answered lately.
func (f facts) reached(dest netip.AddrPort) bool {
	return f.Conntrack != nil && f.Conntrack.Table != nil &&
		slices.ContainsFunc(f.Conntrack.Table.Targets, func(u snapshot.TargetUse) bool { return u.Dest.AddrPort == dest && u.Answered > 0 })
}

// guardTable is where rules go by which a cure keeps something out.
const guardTable = "natkit-guard"

// maxSuspects is how many of them a finding names.
const maxSuspects = 5

// droppingRules are the rules that dropped these packets, or may have; sure says that the first
// one did. Packets that were not followed through the rules leave the counters.
func (f facts) droppingRules(victims ruleVictims) (out []culprit, sure bool) {
	if out, sure = culprits(victims.groups); len(out) > 0 {
		return out[:min(len(out), maxSuspects)], sure
	}
	six := slices.ContainsFunc(samples(victims.rows), func(t tuple) bool { return t.dest.Addr().Is6() })
	four := slices.ContainsFunc(samples(victims.rows), func(t tuple) bool { return t.dest.Addr().Is4() })
	arp := slices.ContainsFunc(victims.rows, func(r snapshot.Drop) bool { return slices.Contains(r.Samples, "arp") })
	var silent []culprit
	for i := range f.Chains {
		c := &f.Chains[i]
		if c.Family == "arp" != arp && c.Family != "netdev" && c.Family != "bridge" || c.Family == "ip" && six && !four || c.Family == "ip6" && !six {
			continue
		}
		for _, r := range c.DropRules {
			switch {
			case r.Packets == nil:
				silent = append(silent, culpritOf(c, r))
			case *r.Packets > 0 && *r.Packets < implausible:
				out = append(out, culpritOf(c, r))
			}
		}
	}
	slices.SortStableFunc(out, func(a, b culprit) int {
		return cmp.Compare(*b.Rule.Packets, *a.Rule.Packets)
	})
	if sure = len(out) > 0 && *out[0].Rule.Packets >= (victims.count+1)/2; !sure {
		sure = len(out) == 0 && len(silent) == 1 && f.rulesKnown() && len(f.silentPolicies(victims)) == 0
		out = append(out, silent[:min(len(silent), maxSuspects-1)]...)
		if len(silent) > 0 {
			out = append(out, f.silentPolicies(victims)...)
		}
	}
	return out[:min(len(out), maxSuspects)], sure
}

// silentPolicies are policies that drop and do not count, of hooks that the packets met.
func (f facts) silentPolicies(victims ruleVictims) (out []culprit) {
	for i := range f.Chains {
		c := &f.Chains[i]
		if c.Policy == "drop" && c.PolicyPackets == nil && slices.ContainsFunc(victims.rows, func(r snapshot.Drop) bool { return f.hookOf(r) == c.Hook }) {
			out = append(out, culprit{Dropper: blame.Dropper{Chain: c}})
		}
	}
	return out
}

// culpritOf is a rule that is known by its counter only, with its text where that was saved.
func culpritOf(c *snapshot.Chain, r snapshot.DropRule) culprit {
	rule := &snapshot.Rule{Number: r.Number, Verdict: r.Verdict, Packets: r.Packets}
	if i := slices.IndexFunc(c.Walk, func(w snapshot.Rule) bool { return w.Number == r.Number }); i >= 0 {
		rule.Text, rule.Handle, rule.Matches = c.Walk[i].Text, c.Walk[i].Handle, c.Walk[i].Matches
	}
	return culprit{Dropper: blame.Dropper{Chain: c, Rule: rule}}
}

// spare is how to let this traffic pass, or to find the rule: never more than the rule keeps out.
func (f facts) spare(victims ruleVictims, suspects []culprit, sure bool) (remedy []string) {
	if sure {
		return f.spareFrom(suspects[0])
	}
	listed := map[string]bool{}
	for _, s := range suspects {
		if line := f.run(listChain(*s.Chain)); !listed[line] {
			if len(listed) == 0 {
				remedy = append(remedy, "# natkit cannot tell which of these rules it was:")
			}
			listed[line] = true
			remedy = append(remedy, line)
		}
	}
	if counting := f.countSuspects(suspects); len(counting) > 0 {
		remedy = append(remedy, counting...)
	}
	packets := samples(victims.rows)
	if len(packets) == 0 {
		return append(remedy, "# all rules, then narrow the one that means this traffic:", f.run("nft -a list ruleset"))
	}
	return append(remedy, f.traceRules(packets[0])...)
}

// spareFrom is what to do about the rule that dropped packets.
func (f facts) spareFrom(s culprit) (remedy []string) {
	tool := iptables(*s.Chain)
	show := listChain(*s.Chain)
	if tool != "" && s.Rule != nil && s.Rule.Number > 0 && s.Rule.Handle == 0 {
		show = fmt.Sprintf("%s -t %s -S %s %d", tool, quote(s.Chain.Table), quote(s.Chain.Name), s.Rule.Number)
	}
	remedy = append(remedy, "# show the rule:", f.run(show))
	if f.ofEngine(*s.Chain) && limit(s.Rule) != "" {
		return append(remedy, fmt.Sprintf("# natkit made this rule from sessions_per_source in %s: these hosts have as many connections as it allows. If they need more, raise it there, and:", f.Engine.File), f.apply())
	}
	if f.ofEngine(*s.Chain) {
		return append(remedy, fmt.Sprintf("# natkit made this table from %s: it drops packets for external addresses that no rule translates. If this traffic is wanted, add a rule there:", f.Engine.File),
			f.natkit("rules"))
	}
	if s.Rule == nil {
		return append(remedy, "# nothing there accepts this traffic. If it is wanted, add a rule that accepts it, by its addresses and ports, where your firewall keeps its own")
	}
	for _, e := range f.metElements(s) {
		if e.set.Backend == "ipset" {
			remedy = append(remedy, "# if this traffic is wanted, remove the element from the set; the rule stays:", f.run("ipset del "+quote(e.set.Name)+" "+quote(ipsetElement(e.element))))
			return remedy
		}
		if s.Rule.Map == "" && !strings.HasPrefix(e.set.Name, "__") {
			return append(remedy, "# if this traffic is wanted, remove the element from the set; the rule stays:",
				f.run("nft "+quote(fmt.Sprintf("delete element %s %s %s { %s }", e.set.Family, e.set.Table, e.set.Name, strings.Join(e.element.Key, " . ")))))
		}
	}
	for _, m := range s.Rule.Matches {
		if name, ok := strings.CutPrefix(m.Text, "quota name "); ok {
			return append(remedy, "# if more traffic may pass, reset the quota, or set a larger one; the rule stays:",
				f.run(fmt.Sprintf("nft reset quota %s %s %s", s.Chain.Family, quote(s.Chain.Table), quote(strings.Trim(name, `"`)))))
		}
	}
	ways := "narrow the rule, or delete it"
	if limit(s.Rule) != "" {
		ways = "raise the limit, narrow the rule, or delete it"
	}
	remedy = append(remedy, "# if this traffic is wanted, "+ways+":")
	switch {
	case tool != "" && s.Rule.Number > 0 && s.Rule.Handle == 0:
		return append(remedy, f.deleteNumbered(tool, s))
	case s.Rule.Handle != 0: // of iptables-nft too: a handle stays the rule's, its number does not
		return append(remedy, f.run(fmt.Sprintf("nft delete rule %s %s %s handle %d", s.Chain.Family, quote(s.Chain.Table), quote(s.Chain.Name), s.Rule.Handle)))
	}
	remedy[len(remedy)-1] = fmt.Sprintf("# if this traffic is wanted, %s by the handle that the list shows: nft delete rule %s %s %s handle N", ways, s.Chain.Family, s.Chain.Table, s.Chain.Name)
	return remedy
}

// deleteNumbered deletes a rule of iptables by its number, if that is still its number: it is another rule's when rules
// before it were added or removed since. A rule is deleted by its text only as a whole, and comments are not read.
func (f facts) deleteNumbered(tool string, s culprit) string {
	table, chain, n := quote(s.Chain.Table), quote(s.Chain.Name), s.Rule.Number
	del := f.run(fmt.Sprintf("%s -t %s -D %s %d", tool, table, chain, n))
	if !strings.HasPrefix(s.Rule.Text, "-A ") || slices.ContainsFunc(s.Rule.Matches, func(m snapshot.Match) bool { return !spelledOut(m) }) {
		return del
	}
	return f.run(fmt.Sprintf("%s -t %s -S %s %d", tool, table, chain, n)) + ` | sed -E 's/ -m comment --comment ("([^"\\]|\\.)*"|[^ ]+)//' | grep -qxFe ` + quote(s.Rule.Text) +
		" && " + del + fmt.Sprintf(" || echo rule %d is another one now", n)
}

// spelledOut says whether the text of a condition of iptables is all of it.
func spelledOut(m snapshot.Match) bool {
	words := strings.Fields(m.Text)
	return len(words) != 2 && !strings.HasSuffix(m.Text, "...") && !strings.Contains(m.Text, "#") || len(words) == 2 && words[0] != "-m"
}

// ipsetElement writes an element as ipset(8) takes it: 10.0.0.1,tcp:80.
func ipsetElement(e snapshot.Element) string {
	out := ""
	for i, part := range e.Key {
		switch {
		case i+1 < len(e.Key) && i > 0 && ruleset.Protocols[e.Key[i+1]] != 0:
			out += "," + e.Key[i+1] + ":" + part
		case ruleset.Protocols[part] != 0:
		case i > 0:
			out += "," + part
		default:
			out = part
		}
	}
	return out
}

// countSuspects are commands that count what reaches rules without a counter and what passes
// them: nothing else changes by them.
func (f facts) countSuspects(suspects []culprit) (remedy []string) {
	for _, s := range suspects {
		if s.Chain.Backend != "nft" || iptables(*s.Chain) != "" || s.Packets() != nil || f.ofEngine(*s.Chain) {
			continue
		}
		where := fmt.Sprintf("%s %s %s", s.Chain.Family, quote(s.Chain.Table), quote(s.Chain.Name))
		switch {
		case s.Rule == nil:
			remedy = append(remedy, "# count what reaches the policy:", f.run("nft add rule "+where+" counter"))
		case s.Rule.Handle != 0:
			remedy = append(remedy, fmt.Sprintf("# count packets before and after rule %d; it dropped the difference:", s.Rule.Number),
				f.run(fmt.Sprintf("nft insert rule %s handle %d counter", where, s.Rule.Handle)),
				f.run(fmt.Sprintf("nft add rule %s handle %d counter", where, s.Rule.Handle)))
		}
	}
	if len(remedy) > 0 {
		remedy = append(remedy, "# then read the counters, and delete these rules by their handles:", f.run(listChain(*suspects[0].Chain)))
	}
	return remedy
}

// traceRules are commands that follow one pair's packets through all rules.
func (f facts) traceRules(t tuple) []string {
	family := "ip"
	if t.dest.Addr().Is6() {
		family = "ip6"
	}
	const table = "inet natkit-trace"
	return []string{"# see which rule it is: trace the packets of one pair through all rules of nftables and iptables-nft, for 10 s:",
		f.run("nft add table " + table),
		f.run("nft " + quote("add chain "+table+" prerouting { type filter hook prerouting priority -350; }")),
		f.run("nft " + quote(fmt.Sprintf("add rule %s prerouting %s saddr %s %s daddr %s meta nftrace set 1", table, family, t.source.Addr(), family, t.dest.Addr()))),
		f.run("timeout 10 nft monitor trace"),
		f.run("nft delete table " + table),
		"# then narrow that rule, or delete it by its handle"}
}

// judgeTTLRule tells of a rule that sets the time to live so low that packets expire here.
func judgeTTLRule(f facts) *verdict {
	expired, rows, _ := f.dropped(snapshot.CauseTTL)
	rule, ok := f.ttlRule()
	if !ok || expired < ruleFew {
		return nil
	}
	v := &verdict{impact: float64(expired)}
	v.Severity = Warning
	v.Title = fmt.Sprintf("%s sets the TTL: %s exceeded it %s", rule.short(), number(expired, "packet"), f.window())
	v.Evidence = append([]Evidence{{"packets dropped with TTL exceeded", strconv.FormatUint(expired, 10) + cameInBy(rows), fromTracer}}, sampleEvidence(rows)...)
	v.Evidence = append(v.Evidence, rule.evidence(f)...)
	v.Why = "A router drops a packet whose TTL is used up. A rule that sets a low TTL prevents forwarding; this is not a routing loop."
	v.Remedy = f.spareFrom(rule)
	v.Verify = f.look(f.run("nstat -az IpInHdrErrors"))
	return v
}

// ttlRule is a rule that writes the time to live of packets that expired here, as far as its
// counter and its conditions tell.
func (f facts) ttlRule() (culprit, bool) {
	_, rows, _ := f.dropped(snapshot.CauseTTL)
	var packets []snapshot.DroppedPacket
	for _, row := range rows {
		for _, text := range row.Samples {
			packets = append(packets, snapshot.DroppedPacket{Text: text, In: row.Interface, Stage: snapshot.StageArrived})
		}
	}
	for i := range f.Chains {
		c := &f.Chains[i]
		for n := range c.Walk {
			r := &c.Walk[n]
			met := len(packets) == 0 || slices.ContainsFunc(packets, func(p snapshot.DroppedPacket) bool { return blame.MayMeet(f.Snapshot, c, r, p) })
			if slices.Contains(r.Sets, "ttl") && (r.Packets == nil || *r.Packets > 0) && met {
				return culprit{Dropper: blame.Dropper{Chain: c, Rule: r}}, true
			}
		}
	}
	return culprit{}, false
}
