// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/shell"
)

const (
	backendFew   = 10   // connections that failed
	backendShare = 0.20 // of those to that backend: a warning
	backendMost  = 0.90 // critical
)

var backendSilent = Cause{
	Code:     "backend-silent",
	Title:    "The backend of a published service refuses connections or does not reply",
	Headline: "Connection refused on a published port: the DNAT backend does not reply",
	Search: []string{
		"Connection refused",
		"Connection timed out",
		"conntrack: SYN_SENT [UNREPLIED]",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{many(backendFew, "connections that failed"), portion(backendShare, "of those to that backend")},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanRefused, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanDrops, snapshot.CanFrames},
	Symptom:       `One published port is dead: clients report "Connection refused", or wait. Everything else works, and rules and routes are right.`,
	Proof:         fmt.Sprintf("Of the TCP connections to a translated destination during the window, and of the UDP flows to the ports of DNS, NTP and QUIC, at least %d and %s were answered only by a reset (conntrack events), or sent in the last %d s without a reply (SYN_SENT): a warning, from %s critical. Each backend is judged by itself.", backendFew, percent.Whole(backendShare), snapshot.RecentSeconds, percent.Whole(backendMost)),
	FalsePositive: "A backend whose packets are lost here, by a rule, a route or an unknown neighbour, or whose clients are on its own network: these have their own causes. Single failures, connections being opened, and UDP to other ports, much of which expects no reply.",
	Cure:          "On the backend: check that the program runs, on the port that the rule names, with room in its accept queue, and not behind a packet filter. If it replies and the replies take another path, fix its route back to the clients. Or change the rule to a backend that works.",
	judge:         judgeBackend,
}

// backend is where a published service leads to, and how connections there ended.
type backend struct {
	protocol                     string
	dest, target                 netip.AddrPort
	refused, unanswered, answers uint64
}

func (b *backend) failed() uint64 { return saturate(b.refused, b.unanswered) }

func (b *backend) share() float64 { return share(b.failed(), saturate(b.failed(), b.answers)) }

// silent says that packets leave and nothing comes back, rather than that it refuses.
func (b backend) silent() bool { return b.unanswered > b.refused }

// failingBackends are those with enough failures, most first.
func (f facts) failingBackends() []backend {
	bad := slices.DeleteFunc(f.backends(), func(b backend) bool { return b.failed() < f.few(backendFew) || b.share() < f.part(backendShare) })
	slices.SortStableFunc(bad, func(a, b backend) int { return cmp.Compare(b.failed(), a.failed()) })
	return bad
}

func judgeBackend(f facts) *verdict {
	bad := f.failingBackends()
	if len(bad) == 0 {
		return nil
	}
	worst := bad[0]
	v := &verdict{impact: float64(worst.failed())}
	v.Severity = Warning
	if slices.ContainsFunc(bad, func(b backend) bool { return b.share() >= backendMost }) {
		v.Severity = Critical
	}
	for _, b := range bad[:min(len(bad), 3)] {
		to := fmt.Sprintf("to %s by way of %s", b.dest, b.target)
		if b.refused > 0 {
			v.Evidence = append(v.Evidence, Evidence{"connections refused " + to, strconv.FormatUint(b.refused, 10), fromEvents})
		}
		v.Evidence = append(v.Evidence, Evidence{"connections without and with a reply " + to, fmt.Sprintf("%d, %d", b.unanswered, b.answers), fmt.Sprintf("%s: flows with a packet in the last %d s", fromDump, f.recent())})
	}
	f.describeBackend(v, worst)
	own, _ := f.engineRules(func(r snapshot.EngineRule) bool { return slices.Contains(r.To, snapshot.EndpointOf(worst.target)) })
	v.Evidence = append(v.Evidence, own...)
	v.Remedy = append(v.Remedy, "# the rule that translates to it:")
	if len(own) > 0 {
		v.Remedy = append(v.Remedy, f.natkit("rules"))
	} else {
		v.Remedy = append(v.Remedy, f.listRulesTo(worst.target.Addr())...)
	}
	v.Verify = f.look(f.natkit("conntrack list --proto " + worst.protocol + " --dst " + worst.dest.Addr().String()))
	return v
}

// describeBackend says what is known of why it does not reply, and what to ask for otherwise.
func (f facts) describeBackend(v *verdict, b backend) {
	address := b.target.Addr()
	sent, reply, thing := "SYNs leave", "SYN-ACK", "connection"
	if b.protocol == "udp" {
		sent, reply, thing = "datagrams leave", "reply", "UDP flow"
	}
	v.Title = fmt.Sprintf("%s for %s but no %s arrives here: %s to %s", sent, b.target, reply, number(b.unanswered, thing), b.dest)
	v.Why = fmt.Sprintf("Packets to %s leave and nothing comes back. Either no program there replies (it does not listen, its queue is full, a packet filter drops them), or it replies and the replies take a path around this machine: the client, which asked %s, accepts none from %s.", address, b.dest.Addr(), address)
	if n := f.repliesOfNoEntry(b); n > 0 && b.silent() {
		v.Title = fmt.Sprintf("%s for %s but conntrack matches no %s to them: %s to %s", sent, b.target, reply, number(b.unanswered, thing), b.dest)
		v.Why = fmt.Sprintf("Packets to %s leave, and conntrack knows no reply. Packets arrive here that match no entry (%d invalid or unmatched %s); replies may be among them: in another conntrack zone, untracked, or marked invalid. They are not translated back.", address, n, f.window())
	}
	if !b.silent() {
		v.Title = fmt.Sprintf("%s, the backend of %s, refused %s %s", b.target, b.dest, number(b.refused, "connection"), f.window())
		v.Why = fmt.Sprintf("%s is up and replies with a reset: no program listens on port %d, or a packet filter on the path rejects it. NAT works; the rule may name a port that the program no longer uses.", address, b.target.Port())
	}
	elsewhere, astray := f.repliesAstray(address)
	if down := f.downLinkTo(address); down != "" {
		v.Title = fmt.Sprintf("%s, the backend of %s, does not reply: %s is down", b.target, b.dest, down)
		v.Evidence = append(v.Evidence, Evidence{"state of " + down, "down", fromLinks})
		v.Why = fmt.Sprintf("While %s is down its network has no route, and packets to %s take another route, or none. NAT works.", down, address)
		v.Remedy = []string{"# bring the interface up; the route of its own network returns with it, others must be added again:", f.run("ip link set dev " + quote(down) + " up")}
	} else if row, ok := f.lostElsewhere(b); ok {
		where := cmp.Or(row.Container, row.Namespace, "this machine's own namespace")
		v.Title = fmt.Sprintf("packets for %s, the backend of %s, are dropped in %s", b.target, b.dest, where)
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("packets for it dropped in %s at %s (%s)", where, row.Location, row.Reason), strconv.FormatUint(row.Count, 10), fromTracer})
		v.Evidence = append(v.Evidence, sampleEvidence([]snapshot.Drop{row})...)
		v.Why = fmt.Sprintf("Packets to %s arrive and are dropped there, in a namespace of this machine. NAT works.", address)
		v.Remedy = []string{"# find out why; if a rule of the backend's own packet filter drops them, have it accept this port:", shell.In(row.Namespace, "nft -a list ruleset"),
			shell.In(row.Namespace, "iptables-legacy-save"), natkitIn(row.Namespace, "doctor --for 10s"), natkitIn(row.Namespace, "drops --for 10s")}
	} else if astray && b.silent() {
		v.Title = fmt.Sprintf("replies of %s, the backend of %s, go to another machine", b.target, b.dest)
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("frames of %s to %s, which is none of this machine's hardware addresses", address, elsewhere.To), fmt.Sprintf("%d, such as %s -> %s", elsewhere.Count, elsewhere.Source, elsewhere.Dest), fromFrames})
		v.Remedy = f.returnPath(address, elsewhere.Dest)
	} else if f.own(address) {
		v.Remedy = []string{"# which program listens there:", f.run(fmt.Sprintf("ss -Hl%snp 'sport = :%d'", b.protocol[:1], b.target.Port()))}
	} else {
		f.askThere(v, b)
	}
}

// repliesOfNoEntry is how many packets came in that match no entry, so many that replies of a backend may be among them.
func (f facts) repliesOfNoEntry(b backend) uint64 {
	invalid, _ := f.stat("invalid")
	unmatched, _ := f.unmatched()
	if n := max(invalid, unmatched); n >= backendFew && n >= b.unanswered/2 {
		return n
	}
	return 0
}

// askThere says what to find out on the backend itself, of which nothing is known here.
func (f facts) askThere(v *verdict, b backend) {
	address := b.target.Addr()
	v.Remedy = f.askBackend(b)
	if client, direct := f.clientOf(b); direct && b.silent() {
		v.Evidence = append(v.Evidence, Evidence{"source that the backend sees", client.String() + ", not translated: it needs a route back through this machine", fromDump})
		v.Remedy = append(v.Remedy, "# if it replies locally, check the return path:")
		v.Remedy = append(v.Remedy, f.returnPath(address, client)...)
	}
	option, peers := "-ltnp", "for connections from elsewhere (not 127.0.0.1 alone), and is its Recv-Q below its Send-Q?"
	if b.protocol == "udp" {
		option, peers = "-lunp", "for packets from elsewhere (not 127.0.0.1 alone), and is its Recv-Q empty?"
	}
	v.Remedy = append(v.Remedy, fmt.Sprintf("# if it does not, on %s: is a program listening on that port, %s", address, peers), fmt.Sprintf("#   ss %s 'sport = :%d'", option, b.target.Port()))
	if l, ok := f.linkTo(address); ok && (l.Kind == "bridge" || l.Kind == "veth") {
		v.Remedy = append(v.Remedy, "# if it is a container of this machine: does its namespace drop them?", "natkit doctor --all-netns --for 10s")
	}
}

// listRulesTo lists the chains whose rules lead to an address.
func (f facts) listRulesTo(address netip.Addr) (lines []string) {
	for _, c := range f.Chains {
		if c.NATRules["redirect"] > 0 && f.own(address) || slices.ContainsFunc(c.DNATTo, func(t snapshot.Target) bool {
			return t.First.Compare(address) <= 0 && address.Compare(t.Last) <= 0
		}) {
			lines = append(lines, f.run(listChain(c)))
		}
	}
	if len(lines) == 0 {
		lines = []string{f.run("nft -a list ruleset | grep -n dnat"), f.run("iptables-legacy-save -t nat")}
	}
	return lines
}

// askBackend is how to find whether a backend answers at all: this machine's own packets have a
// source that it has a way back to.
func (f facts) askBackend(b backend) []string {
	address := b.target.Addr()
	if b.protocol == "udp" {
		return []string{"# does it reply to this machine? (The source is this machine's own address, to which the backend has a route.)", f.run(fmt.Sprintf("ping -c 3 %s", address))}
	}
	return []string{"# does it reply to this machine? (The source is this machine's own address, to which the backend has a route.)",
		f.run(fmt.Sprintf("timeout 3 bash -c '</dev/tcp/%s/%d' && echo it replies || echo it does not reply", address, b.target.Port()))}
}

// clientOf is a client of a backend; direct says that the backend sees its own address.
func (f facts) clientOf(b backend) (client netip.Addr, direct bool) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return client, false
	}
	for _, u := range f.Conntrack.Table.Unanswered {
		if u.Protocol == b.protocol && u.Target.AddrPort == b.target && !u.SNAT && u.Source.IsValid() && !f.own(u.Source) {
			return u.Source, true
		}
	}
	return client, false
}

// returnPath is how to find, on a backend, where its replies to a client go.
func (f facts) returnPath(backend, client netip.Addr) []string {
	here := "this machine"
	if l, ok := f.linkTo(backend); ok {
		if a := f.addressNear(backend, l.Name); a.IsValid() {
			here = a.String()
		}
	}
	lines := []string{fmt.Sprintf("# on %s the route must lead to %s; correct it there if it does not:", backend, here),
		fmt.Sprintf("#   ip%s route get %s", sixFlag(client), client)}
	if l, ok := f.linkTo(backend); ok {
		family := "ip"
		if backend.Is6() {
			family = "ip6"
		}
		lines = append(lines, "# or make its replies return here whatever its routes are; it then sees this machine's address instead of the client's:",
			"#   "+f.run("nft "+quote(fmt.Sprintf("add rule %s TABLE POSTROUTING%s %s daddr %s masquerade", family, nftIface(" oifname ", l.Name), family, backend))))
	}
	return lines
}

// repliesAstray are frames of a host that were seen on their way to another machine than this one.
func (f facts) repliesAstray(host netip.Addr) (snapshot.AstrayFrames, bool) {
	if f.Frames == nil {
		return snapshot.AstrayFrames{}, false
	}
	for _, a := range f.Frames.Astray {
		if l, near := f.linkTo(a.Dest); a.Source == host && a.VLAN == 0 && a.Count < implausible && a.Dest.IsValid() && !(near && l.Name == a.Interface) {
			return a, true
		}
	}
	return snapshot.AstrayFrames{}, false
}

const fromEvents = "conntrack events"

// backends are those that no other cause tells of.
func (f facts) backends() []backend {
	if f.Conntrack == nil {
		return nil
	}
	var out []backend
	of := func(protocol string, dest, target netip.AddrPort) *backend {
		for i := range out {
			if out[i].protocol == protocol && out[i].dest == dest && out[i].target == target {
				return &out[i]
			}
		}
		out = append(out, backend{protocol: protocol, dest: dest, target: target})
		return &out[len(out)-1]
	}
	plausible := func(dest, target netip.AddrPort, n uint64) bool {
		return dest.IsValid() && target.IsValid() && dest != target && n < implausible
	}
	for _, r := range f.Conntrack.Refused {
		if plausible(r.Dest.AddrPort, r.Target.AddrPort, r.Count) {
			b := of("tcp", r.Dest.AddrPort, r.Target.AddrPort)
			b.refused = saturate(b.refused, r.Count)
		}
	}
	if t := f.Conntrack.Table; t != nil {
		for _, u := range t.Targets {
			answers := u.Protocol == "tcp" || u.Protocol == "udp" && answersExpected[u.Target.Port()]
			if answers && plausible(u.Dest.AddrPort, u.Target.AddrPort, u.Unanswered) && u.Answered < implausible {
				b := of(u.Protocol, u.Dest.AddrPort, u.Target.AddrPort)
				b.unanswered, b.answers = saturate(b.unanswered, u.Unanswered), saturate(b.answers, u.Answered)
			}
		}
		for _, u := range t.Unanswered { // of its own network, answers go past this machine
			from, ok1 := f.linkTo(u.Source)
			to, ok2 := f.linkTo(u.Target.Addr())
			if u.SNAT || !plausible(u.Dest.AddrPort, u.Target.AddrPort, u.Recent) || !ok1 || !ok2 || from.Name != to.Name {
				continue
			}
			b := of(u.Protocol, u.Dest.AddrPort, u.Target.AddrPort)
			b.unanswered -= min(b.unanswered, u.Recent)
		}
	}
	return slices.DeleteFunc(out, func(b backend) bool { return f.lostHere(b) })
}

// lostElsewhere is what another namespace of this machine dropped of packets to a backend.
func (f facts) lostElsewhere(b backend) (snapshot.Drop, bool) {
	if f.Drops == nil {
		return snapshot.Drop{}, false
	}
	for _, row := range f.Drops.Elsewhere {
		if !row.Benign && row.Count < implausible && row.Count >= b.failed()/2 &&
			slices.ContainsFunc(samples([]snapshot.Drop{row}), func(t tuple) bool { return t.protocol == b.protocol && t.dest == b.target }) {
			return row, true
		}
	}
	return snapshot.Drop{}, false
}

// lostHere says whether packets to or from a backend were seen to be dropped on this machine,
// otherwise than for want of a program that listens.
func (f facts) lostHere(b backend) bool {
	if f.Drops == nil {
		return false
	}
	for _, row := range f.Drops.Rows {
		if row.Benign || row.Reason == "NO_SOCKET" || !f.here(row.Netns) || row.Count >= implausible || row.Count < b.failed()/2 {
			continue
		}
		for _, sample := range row.Samples {
			packet, ok := parseSample(sample)
			flow, _ := parseFlow(sample)
			if ok && (packet.dest == b.target || packet.source == b.target || flow.dest == b.dest || packet.dest == b.dest) {
				return true
			}
		}
	}
	return false
}
