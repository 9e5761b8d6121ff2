// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A FORWARD chain that drops by default is how Docker and every firewall do it.
	// It is at fault when it drops a good part of what it is asked to forward: a
	// firewall that does its work drops little beside the traffic that it lets by.
	forwardFew     = 3
	forwardShare   = 0.05 // of the packets to be forwarded, or of what one interface received
	forwardMost    = 0.50 // as good as everything
	forwardNothing = 5    // packets from which losing most of them is critical
)

var forwardPolicyDrop = Cause{
	Code:     "forward-policy-drop",
	Title:    "The FORWARD chain drops what no rule accepts",
	Headline: "VMs, containers or VPN clients have no Internet: the FORWARD policy is DROP",
	Search: []string{
		"Chain FORWARD (policy DROP)",
		"-P FORWARD DROP",
		"reason: NETFILTER_DROP",
		"docker iptables FORWARD policy DROP",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Explains:      []string{"clients-unreached", "br-netfilter-overhead"},
	Needs:         []string{snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanDrops, snapshot.CanCounters, snapshot.CanInterfaces},
	Symptom:       "Virtual machines, a second network or a VPN behind this machine lose Internet access, often since Docker was installed. The machine itself works.",
	Proof:         fmt.Sprintf("A base chain on the forward hook drops by policy, or by a last rule without a condition, and packets reached it during the window. The chain's own counter proves it, or dropped packets that natkit followed through the rules to the end of the chain. At least %s of the packets to forward, in total or of one interface, are a warning; %s is critical. With neither counter nor tracer, packets that were to be forwarded and never left are a warning. If natkit cannot read the rules either, they must be most of the packets.", percent.Whole(forwardShare), percent.Whole(forwardMost)),
	FalsePositive: "A drop policy is normal, and so are single packets that meet it. Strangers that probe addresses behind this machine are advice, however many; so are hosts of the external network. A rule with a condition drops what it is meant to drop, with or without a counter: this is not the policy.",
	Cure:          "Add a rule that accepts the traffic of these networks, before the policy and after the rules that drop. With Docker, put it into DOCKER-USER, which Docker leaves alone.",
	judge:         judgeForwardPolicy,
}

// refusedForwards are forwarded packets that no rule accepted.
type refusedForwards struct {
	chains    []snapshot.Chain // whose policy or last rule drops
	rows      []snapshot.Drop
	counted   uint64 // by the chains; counts: they do count
	counts    bool
	traced    uint64
	tracing   bool
	forwarded uint64
	vanished  uint64 // packets to be forwarded that never left
	lost      uint64
	source    string // how sure that is, for the title
}

// refusedForwards adds them up; ok is false if nothing shows any.
func (f facts) refusedForwards() (r refusedForwards, ok bool) {
	r.chains = f.droppingForwardChains()
	if f.Chains != nil && len(r.chains) == 0 {
		return r, false
	}
	r.counted, r.counts = metPolicies(r.chains)
	if r.counts && r.counted == 0 {
		return r, false
	}
	r.rows, r.traced, r.tracing = f.policyDrops()
	r.forwarded, _ = f.counter("Ip.ForwDatagrams") // counted before the hook
	r.vanished = f.vanished(r.forwarded)
	switch r.lost = r.counted; {
	case r.counts:
	case r.tracing:
		r.lost = r.traced
	case f.Chains == nil && share(r.vanished, r.forwarded) < forwardMost:
		return r, false // not even known whether there is such a chain
	default:
		r.lost, r.source = r.vanished, "likely "
	}
	return r, r.lost > 0
}

// forwardPart is how much of what was to be forwarded was lost.
func (f facts) forwardPart(r refusedForwards) float64 {
	if onlySix(r.rows) {
		if part, known := f.receivedShare(r.lost, r.rows, devices(r.rows)); known {
			return part
		}
	}
	part := share(r.lost, r.forwarded)
	if _, known := f.counter("Ip.ForwDatagrams"); !known || r.lost > r.forwarded {
		part = 1 // bridged frames are not counted there
	}
	if p, known := f.receivedShare(r.lost, r.rows, devices(r.rows)); known && len(r.rows) > 0 {
		part = max(part, p)
	}
	return part
}

func judgeForwardPolicy(f facts) *verdict {
	r, ok := f.refusedForwards()
	if !ok {
		return nil
	}
	part := f.forwardPart(r)
	v := &verdict{impact: float64(r.lost)}
	over, limited := f.overPolicy()
	switch {
	case limited && beginnings(r.rows) >= ruleFew && part < forwardMost:
		v.Severity = Warning // clients cannot open connections
	case r.lost >= forwardFew && part < forwardShare:
		v.Severity = Advice
	case r.lost < forwardFew && part < forwardMost:
		return nil
	case part >= forwardMost && r.lost >= forwardNothing && r.source == "" && len(r.chains) > 0:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	// A policy is meant for what nobody thought of.
	v.Severity = max(v.Severity, f.publishedLost(r.rows, func(a netip.Addr) bool {
		_, near := f.linkTo(a)
		return near || onlyInside(a)
	}))
	if v.Severity > Advice && len(samples(r.rows)) > 0 && !slices.ContainsFunc(r.rows, f.wanted) {
		v.Severity = Advice
	}
	what := "the FORWARD chain"
	r.chains = f.busiestPolicy(r.chains)
	if len(r.chains) > 0 {
		what = fmt.Sprintf("chain %s (%s %s)", r.chains[0].Name, r.chains[0].Family, r.chains[0].Table)
	}
	v.Title = fmt.Sprintf("%s %sdropped %s %s that no rule accepted", what, r.source, number(r.lost, "forwarded packet"), f.window())
	v.Evidence = f.policyEvidence(r)
	v.Why = "The chain drops what no rule accepts. Docker sets this policy so that only published ports of containers can be reached; it also blocks every other network for which this machine forwards."
	v.Remedy = f.acceptForwarded(r.chains, r.rows)
	if bridge := f.bridged(r.rows); bridge != "" {
		v.Why += fmt.Sprintf(" These packets are not routed: they cross the bridge %s, and br_netfilter passes them through the IP rules.", bridge)
		v.Remedy = append(v.Remedy, "# or keep bridged traffic out of the IP packet filter; not with Kubernetes, whose rules must see it:",
			f.set(f.local("net.bridge.bridge-nf-call-iptables", 0)))
	}
	if limited {
		v.Title = strings.TrimSuffix(v.Title, " that no rule accepted")
		v.Title = titled(v.Title, over.overTitle(v.Title))
		v.Evidence = append(v.Evidence, f.overBy(r.rows)...)
		v.Why = "A rule accepts this traffic up to a limit, and the chain drops the rest. The sender of a dropped packet gets no error; it retransmits and waits."
		v.Remedy = f.raise(over)
	}
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
}

// overPolicy is the limit of a rule that would have accepted what the ends of forward chains dropped.
func (f facts) overPolicy() (exceeded, bool) {
	for _, b := range f.blamed() {
		if d, sure := b.sure(); sure && isPolicy(d) && d.Chain.Hook == "forward" && len(b.row.Packets) > 0 {
			if over, ok := f.exceeded(culprit{Dropper: d, row: b.row, sample: b.row.Packets[0]}); ok && over.by != nil {
				return over, true
			}
		}
	}
	return exceeded{}, false
}

func (f facts) policyEvidence(r refusedForwards) (out []Evidence) {
	for _, c := range r.chains {
		value := "policy drop"
		if c.Policy != "drop" {
			value = "last rule drops everything"
		}
		if n, ok := metPolicy(c); ok {
			value += fmt.Sprintf(", met by %s", number(n, "packet"))
		}
		out = append(out, Evidence{fmt.Sprintf("chain %s of table %s %s", c.Name, c.Family, c.Table), value, fromRules + " (" + c.Backend + ")"})
	}
	if r.traced > 0 {
		out = append(out, Evidence{"packets dropped on the forward hook", strconv.FormatUint(r.traced, 10) + cameInBy(r.rows), fromTracer})
	}
	out = append(out, sampleEvidence(r.rows)...)
	out = append(out, f.nearPolicy()...)
	if r.forwarded > 0 {
		out = append(out, f.forwardedEvidence("packets to be forwarded, including these")...)
	}
	if r.vanished > 0 && !r.tracing && !r.counts {
		out = append(out, Evidence{"packets to be forwarded that never left", strconv.FormatUint(r.vanished, 10),
			fromSnmp + ", netstat: Ip ForwDatagrams + OutRequests - OutTransmits"})
	}
	return out
}

// metPolicies is what met the policies by the chains' own counters, where all of them count.
func metPolicies(chains []snapshot.Chain) (counted uint64, counts bool) {
	counts = len(chains) > 0
	for _, c := range chains {
		n, ok := metPolicy(c)
		counted, counts = saturate(counted, n), counts && ok
	}
	return counted, counts
}

// policyDrops are packets that the end of a forward chain dropped. Of those that could not be
// followed through the rules, it is what rules with a condition did not count; where such
// rules have no counters nothing is known of them.
func (f facts) policyDrops() (rows []snapshot.Drop, n uint64, tracing bool) {
	var unknown uint64
	var unread []snapshot.Drop
	for _, b := range f.blamed() {
		d, sure := b.sure()
		switch {
		case sure && isPolicy(d) && d.Chain.Hook == "forward":
			rows = append(rows, b.row)
			n = saturate(n, b.row.Count)
		case !b.known && f.hookOf(b.row) == "forward":
			unread = append(unread, b.row)
			unknown = saturate(unknown, b.row.Count)
		}
	}
	unknown -= min(unknown, f.ruleDrops())
	if unknown > 0 && (len(rows) == 0 || !f.silentRules("forward")) {
		rows = append(rows, unread...)
	}
	if !f.silentRules("forward") {
		n = saturate(n, unknown)
	}
	return rows, n, f.Drops != nil
}

// nearPolicy is what would have accepted the packets that the ends of forward chains dropped,
// but for one condition.
func (f facts) nearPolicy() []Evidence {
	for _, b := range f.blamed() {
		if d, sure := b.sure(); sure && isPolicy(d) && d.Chain.Hook == "forward" && len(b.row.Packets) > 0 {
			if out := f.near(culprit{Dropper: d, row: b.row, sample: b.row.Packets[0]}); len(out) > 0 {
				return out
			}
		}
	}
	return nil
}

// silentRules says whether rules that a packet may meet on a hook drop on a condition and do
// not count.
func (f facts) silentRules(hook string) bool {
	return slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool {
		return (c.Hook == hook || c.Hook == "") && c.Type != "nat" && slices.ContainsFunc(c.DropRules, func(r snapshot.DropRule) bool {
			return r.Packets == nil && (!r.All || c.Hook == "")
		})
	})
}

// busiestPolicy puts first the chain whose end dropped most.
func (f facts) busiestPolicy(chains []snapshot.Chain) []snapshot.Chain {
	met := map[string]uint64{}
	for _, b := range f.blamed() {
		if d, ok := b.sure(); ok && isPolicy(d) {
			met[d.Chain.Family+d.Chain.Table+d.Chain.Name] += b.row.Count
		}
	}
	slices.SortStableFunc(chains, func(a, b snapshot.Chain) int {
		return cmp.Compare(met[b.Family+b.Table+b.Name], met[a.Family+a.Table+a.Name])
	})
	return chains
}

// wanted says whether packets of a row are more than what strangers try: of clients of
// this machine's networks or other private ones, answers, or for a published service.
func (f facts) wanted(row snapshot.Drop) bool {
	in, _ := f.link(row.Interface)
	if _, ok := f.sentByClients(row, in); ok || slices.ContainsFunc(row.Samples, isAnswer) {
		return true
	}
	return slices.ContainsFunc(samples([]snapshot.Drop{row}), func(t tuple) bool {
		return onlyInside(t.source.Addr()) && !f.fromOutside(t)
	})
}

// fromOutside says whether a packet comes from a host of the network outside and wants to go
// into one here, unasked: what a firewall is there to refuse.
func (f facts) fromOutside(t tuple) bool {
	from, near := f.linkTo(t.source.Addr())
	to, known := f.linkTo(t.dest.Addr())
	return near && f.outside(from) && (!known || to.Name != from.Name && !f.outside(to))
}

// outside says whether an interface leads to what this machine hides its networks from: a
// default route leads there, or sources are translated to its address.
func (f facts) outside(l snapshot.Interface) bool {
	if l.Default {
		return true
	}
	given := func(a netip.Addr) bool {
		return slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Addr() == a })
	}
	if f.Conntrack != nil && f.Conntrack.Table != nil && slices.ContainsFunc(f.Conntrack.Table.Outsides, func(o snapshot.OutsideUse) bool { return given(o.Addr) }) {
		return true
	}
	return slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool {
		return slices.ContainsFunc(c.SNATTo, func(r snapshot.AddrRange) bool { return given(r.First) })
	})
}

// droppingForwardChains are the base chains on the forward hook that end in a drop.
func (f facts) droppingForwardChains() []snapshot.Chain {
	var out []snapshot.Chain
	for _, c := range f.Chains {
		if c.Hook != "forward" || c.Family == "arp" || c.Family == "netdev" {
			continue
		}
		if _, last := dropsAll(c); last || c.Policy == "drop" {
			out = append(out, c)
		}
	}
	return out
}

// dropsAll is a chain's rule that drops every packet that reaches it.
func dropsAll(c snapshot.Chain) (snapshot.DropRule, bool) {
	for _, r := range c.DropRules {
		if r.All {
			return r, true
		}
	}
	return snapshot.DropRule{}, false
}

// metPolicy is how many packets the end of a chain dropped, if it counts them.
func metPolicy(c snapshot.Chain) (uint64, bool) {
	n := c.PolicyPackets
	if r, ok := dropsAll(c); ok {
		n = r.Packets
	}
	if n == nil || *n >= implausible {
		return 0, false
	}
	return *n, true
}

// ruleDrops is what rules with a condition dropped on the forward hook, as far
// as they count.
func (f facts) ruleDrops() (n uint64) {
	for _, c := range f.Chains {
		if c.Hook != "forward" {
			continue
		}
		for _, r := range c.DropRules {
			if !r.All && r.Packets != nil && *r.Packets < implausible {
				n = saturate(n, *r.Packets)
			}
		}
	}
	return n
}

// vanished is how many of the packets that were to be forwarded never left, when
// nothing else accounts for them. (Linux 6.18 counts ForwDatagrams before the forward
// hook and OutTransmits when a packet goes to its device.)
func (f facts) vanished(forwarded uint64) uint64 {
	sent, ok1 := f.counter("Ip.OutTransmits")
	own, ok2 := f.counter("Ip.OutRequests")
	if !ok1 || !ok2 {
		return 0
	}
	for _, name := range []string{"Ip.FragFails", "Ip.FragCreates", "Ip.OutNoRoutes", "Ip.OutDiscards"} {
		if n, _ := f.counter(name); n > 0 {
			return 0
		}
	}
	if n, _ := f.stat("drop"); n > 0 {
		return 0
	}
	for _, c := range f.Chains {
		if (c.Hook == "output" || c.Hook == "postrouting") && (c.Policy == "drop" || len(c.DropRules) > 0) {
			return 0 // what the machine itself sends may be dropped there
		}
	}
	return min(forwarded, forwarded+own-min(forwarded+own, sent))
}

// acceptForwarded is rules that let the packets pass that were dropped, as far as
// it was seen where they came from and where they wanted to go.
func (f facts) acceptForwarded(chains []snapshot.Chain, rows []snapshot.Drop) []string {
	in, out := f.direction(rows)
	led := onlyLed(rows)
	docker := false
	for _, c := range f.Chains {
		docker = docker || c.Name == "DOCKER-USER"
	}
	remedy := []string{"# if this traffic is wanted, accept it and its replies; put the rules where your firewall keeps its own:"}
	if len(chains) == 0 {
		return append(remedy, f.run("nft list ruleset"), f.run("iptables -nvL FORWARD"))
	}
	if in == "" && !led {
		remedy = append(remedy, "# natkit cannot tell which interfaces the traffic uses; see the packets, then the chain:", f.natkit("drops --for 10s"))
	}
	if led {
		remedy[0] = "# accept traffic that a rule here translates to a published service, and its replies (a rule that accepts it by port must name the translated port); put the rules where your firewall keeps its own:"
	}
	for _, c := range chains {
		if in == "" && !led {
			remedy = append(remedy, f.run(listChain(c)))
			continue
		}
		tool := iptables(c)
		if docker && tool != "" {
			if i := slices.IndexFunc(f.Chains, func(u snapshot.Chain) bool {
				return u.Name == "DOCKER-USER" && u.Backend == c.Backend && u.Family == c.Family
			}); i >= 0 {
				c = f.Chains[i]
			} else {
				c.Name, c.Walk, c.DropRules = "DOCKER-USER", nil, nil
			}
		}
		ports := []string{""}
		if opensPorts(c) {
			ports = portsOf(tool, rows)
		}
		for _, rule := range acceptRules(tool, in, out, led, ports) {
			remedy = append(remedy, f.run(putRule(tool, c, rule)))
		}
	}
	return remedy
}

// acceptRules are the conditions and verdicts of rules that let traffic of two interfaces
// pass, or what is led to a published service.
func acceptRules(tool, in, out string, led bool, ports []string) (rules []string) {
	switch {
	case tool != "" && led:
		return []string{"-m conntrack --ctstate DNAT -j ACCEPT"}
	case led:
		return []string{"ct status dnat accept"}
	case tool != "":
		for _, port := range ports {
			rules = append(rules, iface(" -i ", in)+iface(" -o ", out)+port+" -j ACCEPT")
		}
		if in != out || ports[0] != "" { // on one bridge answers take the same rule, unless that is for a port
			rules = append(rules, iface(" -i ", out)+iface(" -o ", in)+" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
		}
	default:
		for _, port := range ports {
			rules = append(rules, nftIface(" iifname ", in)+nftIface(" oifname ", out)+port+" accept")
		}
		if in != out || ports[0] != "" {
			rules = append(rules, nftIface(" iifname ", out)+nftIface(" oifname ", in)+" ct state established,related accept")
		}
	}
	for i, r := range rules {
		rules[i] = strings.TrimSpace(r)
	}
	return rules
}

// opensPorts says whether a chain accepts by port: then it means to keep all others out.
func opensPorts(c snapshot.Chain) bool {
	return slices.ContainsFunc(c.Walk, func(r snapshot.Rule) bool {
		return r.Verdict == "accept" && slices.ContainsFunc(r.Matches, func(m snapshot.Match) bool {
			return slices.ContainsFunc(m.Keys, func(key string) bool { return strings.HasSuffix(key, " dport") })
		})
	})
}

// maxPorts is how many ports a cure opens one by one.
const maxPorts = 5

// portsOf are conditions for the ports that dropped packets were for, as far as they were seen;
// an empty one where there are no ports, or too many of them.
func portsOf(tool string, rows []snapshot.Drop) (out []string) {
	for _, row := range rows {
		for _, sample := range row.Samples {
			t, ok := parseSample(sample)
			switch {
			case isAnswer(sample):
				continue // the rule for what is established accepts it
			case !ok || t.protocol != "tcp" && t.protocol != "udp" || t.dest.Port() == 0:
				return []string{""}
			}
			port := fmt.Sprintf(" %s dport %d", t.protocol, t.dest.Port())
			if tool != "" {
				port = fmt.Sprintf(" -p %s --dport %d", t.protocol, t.dest.Port())
			}
			if !slices.Contains(out, port) {
				out = append(out, port)
			}
		}
	}
	if len(out) == 0 || len(out) > maxPorts {
		return []string{""}
	}
	slices.Sort(out)
	return out
}

// putRule is the command that puts a rule into a chain: in front where nothing before it drops,
// otherwise behind what drops on a condition, so that a list of what is blocked stays in force.
func putRule(tool string, c snapshot.Chain, rule string) string {
	drops := slices.ContainsFunc(c.DropRules, func(r snapshot.DropRule) bool { return !r.All }) ||
		slices.ContainsFunc(c.Walk, func(r snapshot.Rule) bool { return r.Chain != "" || r.Map != "" })
	end := slices.IndexFunc(c.Walk, func(r snapshot.Rule) bool { return len(r.Matches) == 0 && r.Verdict != "" && r.Verdict != "jump" })
	if tool != "" {
		put := tool + " -t " + quote(c.Table)
		if c.Table == "filter" {
			put = tool
		}
		switch {
		case !drops:
			return put + " -I " + quote(c.Name) + " " + rule
		case end >= 0:
			return fmt.Sprintf("%s -I %s %d %s", put, quote(c.Name), c.Walk[end].Number, rule)
		}
		return put + " -A " + quote(c.Name) + " " + rule
	}
	where := fmt.Sprintf("rule %s %s %s", c.Family, c.Table, c.Name)
	switch {
	case !drops:
		return "nft " + quote("insert "+where+" "+rule)
	case end >= 0:
		return "nft " + quote(fmt.Sprintf("insert %s handle %d %s", where, c.Walk[end].Handle, rule))
	}
	return "nft " + quote("add "+where+" "+rule)
}

// onlyLed says whether all packets of rows that were seen were for published services.
func onlyLed(rows []snapshot.Drop) bool {
	seen := 0
	for _, row := range rows {
		for _, sample := range row.Samples {
			if _, ok := ledBy(sample); !ok {
				return false
			}
			seen++
		}
	}
	return seen > 0
}

// direction is the way that most of the dropped packets wanted to take; parts
// that can't be told are "".
func (f facts) direction(rows []snapshot.Drop) (in, out string) {
	if bridge := f.bridged(rows); bridge != "" {
		return bridge, bridge
	}
	names := devices(rows)
	if len(names) == 0 {
		return "", ""
	}
	in = names[0]
	for _, t := range samples(rows) {
		if to, ok := f.linkTo(t.dest.Addr()); ok && to.Name != in {
			return in, to.Name
		}
	}
	// Not for a network of ours: by the other interface, if there is just one.
	var others []string
	for _, l := range f.links() {
		if l.Name != in && len(l.Addresses) > 0 {
			others = append(others, l.Name)
		}
	}
	if len(others) == 1 {
		out = others[0]
	}
	return in, out
}

func iface(option, name string) string {
	if name == "" {
		return ""
	}
	return option + quote(name)
}

func nftIface(key, name string) string {
	if name == "" {
		return ""
	}
	return key + `"` + strings.ReplaceAll(name, `"`, "") + `"`
}
