// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Every network has addresses that nobody has any more and somebody still asks
	// for. It is a fault where a router or the target of a translation is silent.
	silentFew  = 3
	silentMost = 0.10 // of what is forwarded: critical
	// of an end host: what is most of the traffic is a warning.
	silentHost = 0.50
)

var nextHopSilent = Cause{
	Code:     "next-hop-silent",
	Title:    "The next hop does not reply to ARP or neighbour discovery",
	Headline: "No route to host: the gateway does not reply to ARP",
	Search: []string{
		"No route to host",
		"Destination Host Unreachable",
		"ip neigh: FAILED",
		"ip neigh: INCOMPLETE",
		"reason: NEIGH_FAILED",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(silentFew, "packets whose next hop did not reply")},
	Needs:         []string{snapshot.CanDrops, snapshot.CanRoutes, snapshot.CanCounters, snapshot.CanInterfaces},
	Symptom:       `All traffic by one egress interface is lost, or one published service is dead, while links are up and rules are right. Clients report "No route to host" after some seconds.`,
	Proof:         fmt.Sprintf("At least %d packets were dropped because the hardware address of their next hop could not be resolved (NEIGH_FAILED). If it is a router, or a rule translated the destination to it, this is a warning; from %s of the forwarded packets it is critical. A silent end host is advice. It is a warning if all lost packets were for it and they are %s of the forwarded packets.", silentFew, percent.Whole(silentMost), percent.Whole(silentHost)),
	FalsePositive: "Scans of a local network, whose unused addresses do not reply; a printer that is switched off.",
	Cure:          "Check that the router or host is up, on this link and VLAN, with this address, and that it does not filter ARP. Or change the route or rule to a next hop that is up.",
	judge:         judgeNextHop,
}

// hop is a next hop that did not reply, with the packets that were to go there.
type hop struct {
	addr       netip.Addr
	out        string
	router     bool
	translated netip.AddrPort // what clients asked for, where a rule led here
	lost       uint64
	rows       []snapshot.Drop
}

// grave says whether more than one host's own traffic goes there.
func (h *hop) grave() bool { return h.router || h.translated.IsValid() }

func (h *hop) name() string {
	switch {
	case h.router:
		return "router " + h.addr.String()
	case h.translated.IsValid():
		return "backend " + h.addr.String()
	}
	return "host " + h.addr.String()
}

// hopOf is where a dropped packet was to go.
func (f facts) hopOf(row snapshot.Drop, sample string) (*hop, bool) {
	t, ok := parseSample(sample)
	if !ok || f.own(t.dest.Addr()) || t.dest.Addr().IsMulticast() {
		return nil, false
	}
	h := &hop{addr: t.dest.Addr(), out: row.Interface}
	for _, r := range f.Routes {
		if r.Dest == t.dest.Addr() && r.Answer == snapshot.RouteFound && r.Via.IsValid() {
			h.addr, h.router = r.Via, true
		}
		if r.Dest == t.dest.Addr() && r.Out != "" {
			h.out = r.Out
		}
	}
	if flow, ok := parseFlow(sample); ok && flow.dest.Addr() != t.dest.Addr() && flow.source.Addr() != t.dest.Addr() {
		h.translated = flow.dest
	}
	return h, true
}

// silentHops are all of them, and the gravest, nil if there is none.
func (f facts) silentHops(rows []snapshot.Drop) (hops map[netip.Addr]*hop, worst *hop) {
	hops = map[netip.Addr]*hop{}
	for _, row := range rows {
		counted := false
		for _, text := range row.Samples {
			h, ok := f.hopOf(row, text)
			if !ok {
				continue
			}
			if hops[h.addr] == nil {
				hops[h.addr] = h
			}
			if !counted { // a row's packets are its first sample's: which of several is not known
				hops[h.addr].lost = saturate(hops[h.addr].lost, row.Count)
				hops[h.addr].rows = append(hops[h.addr].rows, row)
				counted = true
			}
		}
	}
	for _, h := range hops {
		if worst == nil || h.grave() != worst.grave() && h.grave() || h.grave() == worst.grave() && (h.lost > worst.lost || h.lost == worst.lost && h.addr.Less(worst.addr)) {
			worst = h
		}
	}
	return hops, worst
}

func judgeNextHop(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseNeighbour)
	hops, worst := f.silentHops(rows)
	if worst == nil || worst.lost < f.few(silentFew) {
		return nil
	}
	forwarded, known := f.counter("Ip.ForwDatagrams")
	part := share(worst.lost, max(worst.lost, forwarded))
	if !known || worst.addr.Is6() {
		part = 0
	}
	v := &verdict{impact: float64(worst.lost)}
	switch {
	case worst.grave() && part >= silentMost:
		v.Severity = Critical
	case worst.grave(), len(hops) == 1 && part >= silentHost && worst.lost >= ruleFew:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Evidence = f.hopEvidence(worst, total(rows))
	v.Verify = f.look(f.run("ping -c 3 " + scoped(worst.addr, worst.out)))
	if replies, reply := f.arpReplies(worst.addr); replies > 0 {
		v.Title = fmt.Sprintf("%s on %s replies to ARP but is ignored: %s lost %s", worst.name(), worst.out, number(worst.lost, "packet"), f.window())
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("ARP replies of %s (%s)", worst.addr, reply.MAC), fmt.Sprintf("%d, received on %s", replies, reply.Interface), fromFrames})
		v.Why = "To send a packet on a network the kernel asks for the hardware address of the next hop. The reply arrives and is dropped before it reaches the neighbour table: by a rule of nftables' family arp, of arptables or of a bridge, or because it arrived on another interface than the request left by."
		v.Remedy = []string{"# rules that see ARP:", f.run("nft list ruleset arp"), f.run("nft list ruleset bridge"), f.run(fmt.Sprintf("ip neigh show to %s", worst.addr))}
		return v
	}
	question := "ARP"
	if worst.addr.Is6() {
		question = "neighbour discovery"
	}
	v.Title = fmt.Sprintf("%s on %s does not reply to %s: %s lost %s", worst.name(), worst.out, question, number(worst.lost, "packet"), f.window())
	v.Why = "To send a packet on a network the kernel asks for the hardware address of the next hop, three times, a second apart. If nobody replies, the waiting packets are dropped. They had already passed rules and NAT, which are not the cause."
	ports, raise := f.deadPorts(worst.out)
	v.Evidence = append(v.Evidence, ports...)
	v.Remedy = append([]string{"# its neighbour entry (FAILED: it was asked and did not reply), and whether anything arrives there:",
		f.run(fmt.Sprintf("ip%s neigh show to %s dev %s", sixFlag(worst.addr), worst.addr, quote(worst.out))),
		f.run("ip -s link show dev " + quote(worst.out))}, raise...)
	v.Remedy = append(v.Remedy, f.reviveHop(worst)...)
	return v
}

// hopEvidence is what was lost of all hops, and what is known of this one.
func (f facts) hopEvidence(h *hop, lost uint64) []Evidence {
	out := []Evidence{{"packets whose next hop did not reply", strconv.FormatUint(lost, 10), fromTracer}}
	out = append(out, sampleEvidence(h.rows)...)
	out = append(out, f.forwardedEvidence("packets to be forwarded in that time")...)
	if l, ok := f.link(h.out); ok {
		out = append(out, Evidence{"packets received on " + l.Name, strconv.FormatUint(l.RxPackets, 10), fromLinks})
	}
	for _, r := range f.Routes {
		if r.Via == h.addr {
			out = append(out, Evidence{fmt.Sprintf("route to %s", r.Dest), routeAnswer(r), fromRoutes})
		}
	}
	return out
}

// deadPorts are the ports of a bridge that carry nothing, and how to bring them up.
func (f facts) deadPorts(bridge string) (seen []Evidence, remedy []string) {
	for _, port := range f.Interfaces {
		switch {
		case port.Master != bridge || bridge == "":
		case !port.Up:
			seen = append(seen, Evidence{fmt.Sprintf("state of %s, a port of %s", port.Name, bridge), "down", fromLinks})
			remedy = append(remedy, fmt.Sprintf("# a port of %s is down; if the host is behind it:", bridge), f.run("ip link set dev "+quote(port.Name)+" up"))
		case port.NoCarrier:
			seen = append(seen, Evidence{fmt.Sprintf("state of %s, a port of %s", port.Name, bridge), "no carrier: its other end is down or gone", fromLinks})
		}
	}
	return seen, remedy
}

// reviveHop is how to get a next hop back, or to do without it.
func (f facts) reviveHop(h *hop) []string {
	switch {
	case h.router:
		return []string{"# if it is up, check the cable, VLAN and network of " + h.out + ", and whether its address is still " + h.addr.String() + ". If another router serves that network, change the routes through this one:",
			f.run(fmt.Sprintf("ip%s route show via %s", sixFlag(h.addr), h.addr))}
	case h.translated.IsValid():
		remark := fmt.Sprintf("# start the machine with the address %s, or correct the rule that names %s:", h.translated, h.addr)
		if chains := f.leadingTo(h.addr); len(chains) > 0 {
			return append([]string{remark}, chains...)
		}
		return []string{remark, f.run("nft list ruleset"), f.run("iptables-legacy-save -t nat")}
	}
	return []string{"# if it is up, check the cable, VLAN, address and firewall of that host. If it is gone, find out who still sends to it:", f.natkit("drops --for 10s")}
}

// arpReplies is how many ARP replies for an address came in.
func (f facts) arpReplies(addr netip.Addr) (n uint64, example snapshot.AddressClaim) {
	if f.Frames == nil {
		return 0, example
	}
	for _, c := range f.Frames.Claims {
		if c.Addr == addr && c.Replies > 0 && c.Replies < implausible {
			n, example = saturate(n, c.Replies), c
		}
	}
	return n, example
}

// leadingTo are commands that list the chains whose rules translate destinations to addr.
func (f facts) leadingTo(addr netip.Addr) (out []string) {
	for _, c := range f.Chains {
		if slices.ContainsFunc(c.DNATTo, func(t snapshot.Target) bool {
			return t.First.Compare(addr) <= 0 && addr.Compare(t.Last) <= 0
		}) && len(out) < 3 {
			out = append(out, f.run(listChain(c)))
		}
	}
	return out
}
