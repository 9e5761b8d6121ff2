// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// portsFullShare: the kernel tries 240 ports of a large range at random (128,
	// then 64, 32 and 16: nf_nat_l4proto_unique_tuple) before it gives up, so that
	// flows fail from about 97 % of the range on; flows that ended since the dump
	// are the rest.
	portsFullShare = 0.90

	// fewPorts is a range so small that it may be meant: one service translated to
	// one port is full from its first flow on, and well. It counts only when this
	// many flows fail, since one or two may be a race elsewhere (manyFailures).
	fewPorts    = 16
	fewFailures = 3

	// manyFailures is how many flows must have failed before ports are suspected
	// without seeing how many are in use: now and then two processors choose the
	// same port for two new flows, and one of them fails.
	manyFailures = 10

	allPorts = 65536 - 1024 // what the kernel chooses from without a range
)

var snatPortsExhausted = Cause{
	Code:     "snat-ports-exhausted",
	Title:    "Source NAT has no free port left towards a destination",
	Headline: "New connections to one destination fail: SNAT has no free source port",
	Search: []string{
		"conntrack -S: insert_failed",
		"Connection timed out",
		"nf_conntrack: insert_failed increasing",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrack, snapshot.CanConntrackStats, snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanDrops, snapshot.CanEngine},
	Symptom:       "New connections to one address and port fail. Connections to other destinations work, and the table has room.",
	Proof:         fmt.Sprintf("One external address uses at least %s of its ports towards one destination, and flows could not be inserted during the window (insert_failed, or packets dropped with an unconfirmed entry). Ports in use without failures are a warning. So are %d or more failures if the table could not be dumped or the rules could not be read. With the eBPF engine: packets that it dropped because no port was free, or an address with few ports left.", percent.Whole(portsFullShare), manyFailures),
	FalsePositive: "Single failures while ports are free: two CPUs chose the same port at the same time. Entries refused by a full table are conntrack-table-full; by a long hash chain, conntrack-hash-too-small.",
	Cure:          "Use the whole port range, add external addresses, shorten the timeouts of closed connections, or reuse connections.",
	judge:         judgeSNATPorts,
}

func judgeSNATPorts(f facts) *verdict {
	if v := judgeEnginePorts(f); v != nil {
		return v
	}
	failed, _ := f.stat("insert_failed")
	tooLong, _ := f.stat("chaintoolong")
	failed -= min(failed, tooLong)
	traced, rows, _ := f.dropped(snapshot.CauseConfirm)
	if tooLong > 0 {
		traced = 0 // they can't be told apart there
	}
	lost := max(failed, traced)

	v := &verdict{impact: float64(lost)}
	p, found := f.fullestPorts(lost, rows)
	switch {
	case found && (lost >= fewFailures || lost > 0 && p.size >= fewPorts):
		v.Severity = Critical
		v.Title = fmt.Sprintf("no free port on %s towards %s %s: %s failed %s", p.use.Outside, p.use.Protocol, p.use.Dest, number(lost, "new flow"), f.window())
		if p.mixed && !p.seen {
			v.Severity = Warning
			v.Title = fmt.Sprintf("likely no free port on %s towards %s %s: %s failed %s", p.use.Outside, p.use.Protocol, p.use.Dest, number(lost, "new flow"), f.window())
		}
	case found && p.size >= fewPorts:
		v.Severity = Warning
		v.impact = share(p.use.Used, p.size)
		v.Title = fmt.Sprintf("%s of the ports of %s towards %s %s are in use", percent.Whole(share(p.use.Used, p.size)), p.use.Outside, p.use.Protocol, p.use.Dest)
	case !found && lost >= manyFailures && f.suspectPorts() && !mostlyDNS(rows):
		v.Severity = Warning
		v.Title = fmt.Sprintf("source NAT likely has no free port left: %s failed %s", number(lost, "new flow"), f.window())
	default:
		return nil
	}
	if !found {
		p.chain, p.allowed, p.narrow = f.narrowest(func(snapshot.PortRange) bool { return true })
	}
	v.Evidence = append(f.portsEvidence(p, found, failed, traced), sampleEvidence(rows)...)
	v.Why = "Behind one address, flows to the same address and port differ only in their external port. When all are in use, the first packet of the next flow is dropped; " +
		"flows to other destinations are not affected, so it looks like a fault of the destination."
	v.Remedy, v.Settings = f.morePorts(p, found)
	v.Verify = f.look(f.natkit("conntrack top --by nat"))
	return v
}

// portsEvidence is how many ports are in use and allowed, and what failed for want of one.
func (f facts) portsEvidence(p ports, found bool, failed, traced uint64) (out []Evidence) {
	if found {
		value := fmt.Sprintf("%d of %d (%d-%d seen)", p.use.Used, p.size, p.use.MinPort, p.use.MaxPort)
		if p.mixed {
			value = fmt.Sprintf("%d, some of them by a rule that allows only %d (%d-%d seen)", p.use.Used, p.size, p.use.MinPort, p.use.MaxPort)
		}
		out = append(out, Evidence{fmt.Sprintf("ports of %s in use towards %s %s", p.use.Outside, p.use.Protocol, p.use.Dest), value, fromDump})
	}
	if p.narrow {
		out = append(out, Evidence{"ports that the rule allows", fmt.Sprintf("%d-%d (%d)", p.allowed.Min, p.allowed.Max, rangeSize(p.allowed)),
			fmt.Sprintf("%s: table %s %s, chain %s", fromRules, p.chain.Family, p.chain.Table, p.chain.Name)})
		rules, _ := f.narrowRules(p)
		out = append(out, rules...)
	}
	if failed > 0 {
		out = append(out, Evidence{"flows that could not be inserted", strconv.FormatUint(failed, 10), fromStats + ": insert_failed"})
	}
	if traced > 0 {
		out = append(out, Evidence{"packets dropped at confirmation of their entry", strconv.FormatUint(traced, 10), fromTracer})
	}
	if f.Conntrack != nil && f.Conntrack.Max > 0 {
		out = append(out, Evidence{"entries", fmt.Sprintf("%d of %d (%s): the table is not the limit", f.Conntrack.Count, f.Conntrack.Max,
			percent.Whole(share(f.Conntrack.Count, f.Conntrack.Max))), fromSettings + ": nf_conntrack_count, nf_conntrack_max"})
	}
	return out
}

// ports is a destination that the translation runs out of ports for.
type ports struct {
	use  snapshot.SNATUse
	size uint64 // ports that there are

	// The rule that allows few, where narrow says that there is one.
	chain   snapshot.Chain
	allowed snapshot.PortRange
	narrow  bool

	mixed bool // not all of the ports in use are of that rule
	seen  bool // a packet that was dropped had a port of that rule
}

// fullestPorts is the destination towards which most of the ports are in use;
// found is false when none is near its end.
func (f facts) fullestPorts(lost uint64, rows []snapshot.Drop) (best ports, found bool) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return best, false
	}
	var mixed ports
	for _, u := range f.Conntrack.Table.SNATPorts {
		if u.Used == 0 || u.Used >= implausible || !u.Outside.IsValid() || !u.Dest.IsValid() {
			continue
		}
		p := ports{use: u, size: allPorts}
		p.chain, p.allowed, p.narrow = f.narrowest(func(r snapshot.PortRange) bool { return r.Min <= u.MinPort && u.MaxPort <= r.Max })
		if p.narrow {
			p.size = rangeSize(p.allowed)
		}
		if used := share(u.Used, p.size); used >= portsFullShare && (!found || used > share(best.use.Used, best.size)) {
			best, found = p, true
		}
		// Flows of other rules, or from before the rule was changed, go to the same
		// destination: then it is as likely as the failures are many.
		p.chain, p.allowed, p.narrow = f.narrowest(func(r snapshot.PortRange) bool {
			return u.MinPort <= r.Max && r.Min <= u.MaxPort && u.Used >= rangeSize(r)
		})
		if p.narrow && lost >= manyFailures && !mixed.seen {
			p.size, p.mixed, p.seen = rangeSize(p.allowed), true, refusedFrom(rows, u, p.allowed)
			if p.seen || !mixed.mixed {
				mixed = p
			}
		}
	}
	if !found && mixed.mixed {
		return mixed, true
	}
	return best, found
}

// refusedFrom says whether a packet dropped at confirmation went to use's
// destination with a source port from r: it has been translated by then.
func refusedFrom(rows []snapshot.Drop, use snapshot.SNATUse, r snapshot.PortRange) bool {
	for _, t := range samples(rows) {
		if t.dest == use.Dest.AddrPort && t.source.Addr() == use.Outside && r.Min <= t.source.Port() && t.source.Port() <= r.Max {
			return true
		}
	}
	return false
}

// narrowest is the smallest port range of the rules here that allows fewer ports
// than there are and that is suitable.
func (f facts) narrowest(suitable func(snapshot.PortRange) bool) (chain snapshot.Chain, r snapshot.PortRange, ok bool) {
	for _, c := range f.Chains {
		for _, candidate := range c.SNATRanges {
			n := rangeSize(candidate)
			if n > 0 && n < allPorts && (!ok || n < rangeSize(r)) && suitable(candidate) {
				chain, r, ok = c, candidate, true
			}
		}
	}
	return chain, r, ok
}

func rangeSize(r snapshot.PortRange) uint64 {
	if r.Max < r.Min || r.Max == 0 {
		return 0
	}
	return uint64(r.Max) - uint64(r.Min) + 1
}

// suspectPorts says whether failures without a destination near its end can
// still be ports: when the rules are not known, when the table was not dumped, or
// when its list of destinations is cut off and a rule allows few ports.
func (f facts) suspectPorts() bool {
	if f.Chains == nil {
		return true
	}
	if !f.translatesSources() {
		return false
	}
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return true
	}
	_, r, narrow := f.narrowest(func(snapshot.PortRange) bool { return true })
	return narrow && rangeSize(r) < allPorts/8 && len(f.Conntrack.Table.SNATPorts) >= snapshot.TopN
}

// narrowRules are the rules of natkit's rule file that allow few ports, where its engine made
// the chain.
func (f facts) narrowRules(p ports) ([]Evidence, []snapshot.EngineRule) {
	return f.engineRules(func(r snapshot.EngineRule) bool { return p.narrow && f.ofEngine(p.chain) && r.Ports == p.allowed })
}

// morePorts is how to get more flows to that destination.
func (f facts) morePorts(p ports, found bool) (remedy []string, settings []snapshot.Setting) {
	_, own := f.narrowRules(p)
	switch c, r := p.chain, p.allowed; {
	case len(own) > 0:
		remedy = append(remedy, f.editPorts(own[0])...)
	case p.narrow && f.ofEngine(c): // of a pool
		remedy = append(remedy, fmt.Sprintf("# a pool in %s gives %s only (ports: %d-%d): give it more, or more addresses, and:", f.Engine.File, number(rangeSize(r), "port"), r.Min, r.Max), f.apply())
	case p.narrow && found:
		remedy = append(remedy, fmt.Sprintf("# the rule allows %s; insert one before it that allows all:", number(rangeSize(r), "port")), f.run(widerRange(c, p.use)))
	case p.narrow:
		remedy = append(remedy, fmt.Sprintf("# a rule of table %s %s, chain %s allows only ports %d-%d; widen it:", c.Family, c.Table, c.Name, r.Min, r.Max),
			f.run(listChain(c)))
	default:
		remedy = append(remedy, "# all ports of the external address are in use: translate to several (snat to FIRST-LAST), or reuse connections (keep-alive)")
	}
	if !found || p.use.Protocol == "tcp" {
		s := f.local("net.netfilter.nf_conntrack_tcp_timeout_time_wait", shortTimeWait)
		if now, known := f.sysctl(s.Name); !known || now > shortTimeWait {
			settings = append(settings, s)
			remedy = append(remedy, "# free the ports of closed connections sooner:", f.set(s))
		}
	}
	return remedy, settings
}

// widerRange is a rule that translates flows to use's destination to any port, or to any identifier where the protocol
// has no ports.
func widerRange(c snapshot.Chain, use snapshot.SNATUse) string {
	target, dest := use.Outside.String(), use.Dest.Addr().String()
	port := ""
	if withPorts(use.Protocol) {
		port = " --dport " + strconv.Itoa(int(use.Dest.Port()))
		if use.Outside.Is6() {
			target = "[" + target + "]"
		}
		target += ":1024-65535"
	}
	if tool := iptables(c); tool != "" {
		return fmt.Sprintf("%s -t nat -I %s -p %s -d %s%s -j SNAT --to-source %s", tool, quote(c.Name), quote(use.Protocol), dest, port, quote(target))
	}
	ip, to := "ip", "snat to "
	if use.Outside.Is6() {
		ip = "ip6"
	}
	if c.Family == "inet" {
		to = "snat " + ip + " to "
	}
	what := "meta l4proto " + use.Protocol
	if port != "" {
		what = fmt.Sprintf("%s dport %d", use.Protocol, use.Dest.Port())
	}
	return "nft " + quote(fmt.Sprintf("insert rule %s %s %s %s daddr %s %s %s%s", c.Family, c.Table, c.Name, ip, dest, what, to, target))
}

// withPorts says whether packets of a protocol have ports that rules can name.
func withPorts(protocol string) bool {
	return slices.Contains([]string{"tcp", "udp", "udplite", "sctp", "dccp"}, protocol)
}

// listChain shows a chain with its rules. What iptables-nft keeps nft shows as well,
// and iptables-nft refuses to show chains that only look like its own.
func listChain(c snapshot.Chain) string {
	if tool := iptables(c); strings.HasSuffix(tool, "-legacy") {
		return tool + " -t " + quote(c.Table) + " -S " + quote(c.Name)
	}
	return "nft -a list chain " + quote(c.Family) + " " + quote(c.Table) + " " + quote(c.Name)
}

// iptables is the program that keeps a chain, "" when that is nft. The chains of
// iptables' nftables back end are known by their names; nft(8) can change them
// too, but iptables could then not read them any more.
func iptables(c snapshot.Chain) string {
	name := "iptables"
	switch c.Family {
	case "ip", "":
	case "ip6":
		name = "ip6tables"
	default:
		return ""
	}
	if c.Backend == "iptables-legacy" {
		return name + "-legacy"
	}
	builtin := map[string]string{"filter": "FORWARD", "nat": "POSTROUTING"}
	if c.Name == builtin[c.Table] || len(c.Walk) > 0 && strings.HasPrefix(c.Walk[0].Text, "-A ") {
		return name + "-nft"
	}
	return ""
}
