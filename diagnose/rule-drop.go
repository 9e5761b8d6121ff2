// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/snapshot"
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
	Code:       "rule-drop",
	Title:      "A rule drops what clients send, or the answers to it",
	Severities: []Severity{Advice, Warning, Critical},
	Explains:   []string{"clients-unreached"}, // answers among what a rule drops may not be among its samples
	Needs:      []string{snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces, snapshot.CanCounters},
	Symptom:    "Some clients, or one protocol, get through and others do not; connections open on one side only; over IPv6 nobody finds this machine. Often since a list of addresses, a limit or a rule was added.",
	Proof: fmt.Sprintf("Rules with a condition dropped packets (NETFILTER_DROP where a rule is evaluated) of clients in networks of this machine, or packets whose destination a rule had translated: at least %s of what came in by that interface "+
		"is advice, %s a warning, %s critical; %d of a published service that no connection gets through to are advice, a warning where their sources are private. Of answers to connections that rules here let begin, %s are a warning, %s critical. Neighbour discovery and ARP: from %d packets on a warning.",
		percent(ruleShare), percent(ruleMost), percent(ruleAll), ruleFew, percent(ruleShare), percent(ruleMost), fewFailures),
	Lookalike: "A firewall that drops what comes from elsewhere for this machine or its networks: scans are most of what a quiet line receives. A small part of what clients send.",
	Cure:      "Taking the rule away, or giving it a condition that spares this traffic. Which one it is its counter tells, or nftables' trace.",
	judge:     judgeRuleDrop,
}

// ruleVictims are packets of one kind that rules dropped.
type ruleVictims struct {
	count    uint64
	rows     []snapshot.Drop
	received uint64 // by the interface that they came in by
	by       string // its name
}

func (r *ruleVictims) add(row snapshot.Drop, in snapshot.Interface) {
	r.count = saturate(r.count, row.Count)
	r.rows = append(r.rows, row)
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

func judgeRuleDrop(f facts) *verdict {
	_, rows, tracing := f.dropped(snapshot.CauseRule)
	if !tracing {
		return nil
	}
	policy, oneWay := judgeForwardPolicy(f) != nil, judgeAsymmetric(f) != nil
	var discovery, answers, own, published ruleVictims
	byRules := f.ruleDrops() // by counters: what a policy dropped on the same hook is not theirs
	for _, row := range rows {
		in, _ := f.link(row.Interface)
		if policy && f.hookOf(row) == "forward" && !slices.ContainsFunc(row.Samples, findsNeighbours) {
			row.Count = min(row.Count, byRules)
			byRules -= row.Count
		}
		switch {
		case row.Count == 0:
		case slices.ContainsFunc(row.Samples, findsNeighbours):
			discovery.add(row, in)
		case oneWay && slices.ContainsFunc(row.Samples, midStream):
			// what these causes tell of
		case slices.ContainsFunc(row.Samples, isAnswer) || slices.ContainsFunc(row.Samples, f.awaited):
			answers.add(row, in)
		default:
			if from, ok := f.sentByClients(row, in); ok {
				own.add(row, from)
			}
			if f.publishedLost([]snapshot.Drop{row}, onlyInside) > 0 {
				published.add(row, in)
			}
		}
	}
	v := &verdict{}
	var victims ruleVictims
	what := ""
	switch {
	case answers.count >= ruleFew && answers.share() >= ruleShare:
		v.Severity, victims, what = Warning, answers, "answers to connections that it let begin"
		if answers.share() >= ruleMost {
			v.Severity = Critical
		}
	case policy && own.count >= ruleFew: // by which interface they came in is not known beside the policy's
		own.received, own.by = 0, ""
		v.Severity, victims, what = Advice, own, "packets"
	case own.count >= ruleFew && own.share() >= ruleShare:
		v.Severity, victims, what = Advice, own, "packets"
		switch {
		case own.share() >= ruleAll:
			v.Severity = Critical
		case own.share() >= ruleMost:
			v.Severity = Warning
		}
	case published.count > 0:
		v.Severity, victims, what = f.publishedLost(published.rows, onlyInside), published, "packets for a published service"
	}
	if v.Severity < Warning && discovery.count >= fewFailures {
		v.Severity, victims, what = Warning, discovery, "packets by which hosts find each other's hardware addresses"
	}
	if v.Severity == 0 {
		return nil
	}
	v.harm = float64(victims.count)
	suspects, sure := f.droppingRules(victims)
	if sure && suspects[0].chain.Table == guardTable {
		return nil // what a cure of this doctor's keeps out
	}
	who := "a rule"
	if sure {
		who = suspects[0].name()
	}
	v.Title = fmt.Sprintf("%s dropped %d %s %s", who, victims.count, what, f.window())
	if victims.by != "" {
		v.Title += fmt.Sprintf(", %s of what came in by %s", percent(victims.share()), victims.by)
	}
	v.Evidence = []Evidence{{"packets dropped by rules", strconv.FormatUint(victims.count, 10) + cameInBy(victims.rows), fromTracer}}
	if !policy { // which of the packets were the policy's is not known
		v.Evidence = append(v.Evidence, sampleEvidence(victims.rows)...)
	}
	if victims.by != "" {
		v.Evidence = append(v.Evidence, Evidence{"packets that came in by " + victims.by, strconv.FormatUint(victims.received, 10), fromLinks})
	}
	v.Evidence = append(v.Evidence, ruleEvidence(suspects)...)
	v.Why = "What a rule drops is lost without a word to its sender, who tries again and waits. A rule that was meant for others, or for another time, looks like a fault of the network."
	v.Remedy = f.spare(victims, suspects, sure)
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
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

// awaited says whether a sampled packet, dropped before connection tracking saw it, answers
// a connection that waits for it. What answers to others' packets with forged sources does not.
func (f facts) awaited(sample string) bool {
	packet, ok := parseSample(sample)
	return ok && (packet.protocol == "udp" || packet.protocol == "tcp" && strings.Contains(sample, " SYN,ACK")) && f.Conntrack != nil && f.Conntrack.Table != nil &&
		slices.ContainsFunc(f.Conntrack.Table.Unanswered, func(u snapshot.UnansweredUse) bool {
			return u.Protocol == packet.protocol && u.Target == packet.source && (u.Protocol == "tcp" || u.SNAT && f.own(packet.dest.Addr()))
		})
}

// sentByClients says whether dropped packets were on their way through, from a network
// of this machine or to where a rule here had sent them, and by which interface they came.
func (f facts) sentByClients(row snapshot.Drop, in snapshot.Interface) (snapshot.Interface, bool) {
	for _, sample := range row.Samples {
		t, ok := parseSample(sample)
		source := t.source.Addr()
		flow, tracked := parseFlow(sample)
		if tracked && f.own(source) && !strings.HasPrefix(t.protocol, "icmp") {
			source = flow.source.Addr() // it was translated already; an ICMP message about the flow is this machine's
		}
		if !ok || f.own(t.dest.Addr()) || f.own(source) || f.manifold(t.dest.Addr()) {
			continue
		}
		if tracked && flow.dest.Addr() != t.dest.Addr() {
			return in, true
		}
		if from, ok := f.linkTo(source); ok {
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
		slices.ContainsFunc(f.Conntrack.Table.Targets, func(u snapshot.TargetUse) bool { return u.Dest == dest && u.Answered > 0 })
}

// suspect is a rule that may have dropped something.
type suspect struct {
	chain snapshot.Chain
	rule  snapshot.DropRule
}

func (s suspect) name() string {
	return fmt.Sprintf("rule %d of chain %s of table %s %s", s.rule.Number, s.chain.Name, s.chain.Family, s.chain.Table)
}

func ruleEvidence(suspects []suspect) (out []Evidence) {
	for _, s := range suspects {
		value := s.rule.Verdict
		if s.rule.Packets != nil {
			value += ", met by " + number(*s.rule.Packets, "packet")
		}
		out = append(out, Evidence{s.name(), value, fromRules + " (" + s.chain.Backend + ")"})
	}
	return out
}

// guardTable is where rules go by which a cure keeps something out.
const guardTable = "natkit-guard"

// maxSuspects is how many of them a finding names.
const maxSuspects = 5

// droppingRules are the rules that may have dropped these packets, those first that
// counted something; sure says that the first one did.
func (f facts) droppingRules(victims ruleVictims) (out []suspect, sure bool) {
	six := slices.ContainsFunc(samples(victims.rows), func(t tuple) bool { return t.dest.Addr().Is6() })
	four := slices.ContainsFunc(samples(victims.rows), func(t tuple) bool { return t.dest.Addr().Is4() })
	arp := slices.ContainsFunc(victims.rows, func(r snapshot.Drop) bool { return slices.Contains(r.Samples, "arp") })
	var silent []suspect
	for _, c := range f.Chains {
		if c.Family == "arp" != arp && c.Family != "netdev" && c.Family != "bridge" || c.Family == "ip" && six && !four || c.Family == "ip6" && !six {
			continue
		}
		for _, r := range c.DropRules {
			switch {
			case r.Packets == nil:
				silent = append(silent, suspect{c, r})
			case *r.Packets > 0 && *r.Packets < implausible:
				out = append(out, suspect{c, r})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b suspect) int {
		return int(min(*b.rule.Packets, 1<<31)) - int(min(*a.rule.Packets, 1<<31))
	})
	if sure = len(out) > 0 && *out[0].rule.Packets >= (victims.count+1)/2; !sure {
		sure = len(out) == 0 && len(silent) == 1 && f.rulesKnown()
		out = append(out, silent...)
	}
	return out[:min(len(out), maxSuspects)], sure
}

// spare is how to find the rule, and to let this traffic pass.
func (f facts) spare(victims ruleVictims, suspects []suspect, sure bool) (remedy []string) {
	if sure {
		s := suspects[0]
		remedy = append(remedy, "# read the rule:", f.run(listChain(s.chain)))
		if tool := iptables(s.chain); tool != "" {
			return append(remedy, "# if this traffic is wanted, narrow it, or delete it:",
				f.run(fmt.Sprintf("%s -t %s -D %s %d", tool, quote(s.chain.Table), quote(s.chain.Name), s.rule.Number)))
		}
		return append(remedy, fmt.Sprintf("# if this traffic is wanted, narrow it, or delete it by the handle that the list shows: nft delete rule %s %s %s handle N", s.chain.Family, s.chain.Table, s.chain.Name))
	}
	listed := map[string]bool{}
	for _, s := range suspects {
		if line := f.run(listChain(s.chain)); !listed[line] {
			if len(listed) == 0 {
				remedy = append(remedy, "# the rules that may be it:")
			}
			listed[line] = true
			remedy = append(remedy, line)
		}
	}
	packets := samples(victims.rows)
	if len(packets) == 0 {
		return append(remedy, "# all rules, then narrow the one that means this traffic:", f.run("nft -a list ruleset"))
	}
	t, family := packets[0], "ip"
	if t.dest.Addr().Is6() {
		family = "ip6"
	}
	const table = "inet natkit-trace"
	return append(remedy, "# see which rule it is: follow one pair's packets through all rules of nftables and iptables-nft, for 10 s:",
		f.run("nft add table "+table),
		f.run("nft "+quote("add chain "+table+" prerouting { type filter hook prerouting priority -350; }")),
		f.run("nft "+quote(fmt.Sprintf("add rule %s prerouting %s saddr %s %s daddr %s meta nftrace set 1", table, family, t.source.Addr(), family, t.dest.Addr()))),
		f.run("timeout 10 nft monitor trace"),
		f.run("nft delete table "+table),
		"# then narrow that rule, or delete it by its handle")
}
