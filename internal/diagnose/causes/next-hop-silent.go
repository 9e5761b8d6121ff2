// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
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
	Proof:         fmt.Sprintf("At least %d packets were dropped because the hardware address of their next hop could not be resolved (NEIGH_FAILED). If it is a router, or a rule translated the destination to it, this is a warning; from %s of the forwarded packets it is critical. A silent end host is advice. It is a warning if all lost packets were for it and they are %s of the forwarded packets.", silentFew, percent(silentMost), percent(silentHost)),
	FalsePositive: "Scans of a local network, whose unused addresses do not reply; a printer that is switched off.",
	Cure:          "Check the router or host: is it up, on this wire or VLAN, with this address, and does it not filter ARP? Or change the route or rule to a next hop that is up.",
	judge:         judgeNextHop,
}

func judgeNextHop(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseNeighbour)
	type hop struct {
		addr       netip.Addr
		out        string
		router     bool
		translated netip.AddrPort // what clients asked for, where a rule led here
		lost       uint64
		rows       []snapshot.Drop
	}
	hops := map[netip.Addr]*hop{}
	var lost uint64
	for _, row := range rows {
		lost = saturate(lost, row.Count)
		counted := false
		for _, text := range row.Samples {
			t, ok := parseSample(text)
			if !ok || f.own(t.dest.Addr()) || t.dest.Addr().IsMulticast() {
				continue
			}
			h := hop{addr: t.dest.Addr(), out: row.Interface}
			for _, r := range f.Routes {
				if r.Dest == t.dest.Addr() && r.Answer == snapshot.RouteFound && r.Via.IsValid() {
					h.addr, h.router = r.Via, true
				}
				if r.Dest == t.dest.Addr() && r.Out != "" {
					h.out = r.Out
				}
			}
			if flow, ok := parseFlow(text); ok && flow.dest.Addr() != t.dest.Addr() && flow.source.Addr() != t.dest.Addr() {
				h.translated = flow.dest
			}
			if hops[h.addr] == nil {
				hops[h.addr] = &h
			}
			if !counted { // a row's packets are its first sample's: which of several is not known
				hops[h.addr].lost = saturate(hops[h.addr].lost, row.Count)
				hops[h.addr].rows = append(hops[h.addr].rows, row)
				counted = true
			}
		}
	}
	var worst *hop
	for _, h := range hops {
		grave := func(h *hop) bool { return h.router || h.translated.IsValid() }
		if worst == nil || grave(h) != grave(worst) && grave(h) || grave(h) == grave(worst) && (h.lost > worst.lost || h.lost == worst.lost && h.addr.Less(worst.addr)) {
			worst = h
		}
	}
	if worst == nil || worst.lost < f.few(silentFew) {
		return nil
	}
	forwarded, known := f.counter("Ip.ForwDatagrams")
	part := share(worst.lost, max(worst.lost, forwarded))
	if !known || worst.addr.Is6() {
		part = 0
	}
	v := &verdict{impact: float64(worst.lost)}
	switch grave := worst.router || worst.translated.IsValid(); {
	case grave && part >= silentMost:
		v.Severity = Critical
	case grave, len(hops) == 1 && part >= silentHost && worst.lost >= ruleFew:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	who := "host " + worst.addr.String()
	switch {
	case worst.router:
		who = "router " + worst.addr.String()
	case worst.translated.IsValid():
		who = "backend " + worst.addr.String()
	}
	question := "ARP"
	if worst.addr.Is6() {
		question = "neighbour discovery"
	}
	v.Title = fmt.Sprintf("%s on %s does not reply to %s: %s lost %s", who, worst.out, question, number(worst.lost, "packet"), f.window())
	replies, reply := f.arpReplies(worst.addr)
	if replies > 0 {
		v.Title = fmt.Sprintf("%s on %s replies to ARP but is ignored: %s lost %s", who, worst.out, number(worst.lost, "packet"), f.window())
	}
	v.Evidence = []Evidence{{"packets whose next hop did not reply", strconv.FormatUint(lost, 10), fromTracer}}
	v.Evidence = append(v.Evidence, sampleEvidence(worst.rows)...)
	if known {
		v.Evidence = append(v.Evidence, Evidence{"packets to be forwarded in that time", strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"})
	}
	if l, ok := f.link(worst.out); ok {
		v.Evidence = append(v.Evidence, Evidence{"packets received on " + l.Name, strconv.FormatUint(l.RxPackets, 10), fromLinks})
	}
	for _, r := range f.Routes {
		if r.Via == worst.addr {
			v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("route to %s", r.Dest), routeAnswer(r), fromRoutes})
		}
	}
	v.Why = "To send a packet on a network the kernel asks for the hardware address of the next hop, three times, a second apart. The packets that wait are dropped if nobody replies. Rules and NAT were passed before that and are not the cause."
	if replies > 0 {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("ARP replies of %s (%s)", worst.addr, reply.MAC), fmt.Sprintf("%d, received on %s", replies, reply.Interface), fromFrames})
		v.Why = "To send a packet on a network the kernel asks for the hardware address of the next hop. The reply arrives and is dropped before it reaches the neighbour table: by a rule of nftables' family arp, of arptables or of a bridge, or because it arrived on another interface than the request left by."
		v.Remedy = []string{"# rules that see ARP:", f.run("nft list ruleset arp"), f.run("nft list ruleset bridge"), f.run(fmt.Sprintf("ip neigh show to %s", worst.addr))}
		v.Verify = f.look(f.run(fmt.Sprintf("ping -c 3 %s", worst.addr)))
		return v
	}
	v.Remedy = []string{"# its neighbour entry (FAILED: it was asked and did not reply), and whether anything arrives there:",
		f.run(fmt.Sprintf("ip%s neigh show to %s dev %s", sixFlag(worst.addr), worst.addr, quote(worst.out))),
		f.run("ip -s link show dev " + quote(worst.out))}
	for _, port := range f.Interfaces {
		switch {
		case port.Master != worst.out || worst.out == "":
		case !port.Up:
			v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("state of %s, a port of %s", port.Name, worst.out), "down", fromLinks})
			v.Remedy = append(v.Remedy, fmt.Sprintf("# a port of %s is down; if the host is behind it:", worst.out), f.run("ip link set dev "+quote(port.Name)+" up"))
		case port.NoCarrier:
			v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("state of %s, a port of %s", port.Name, worst.out), "no carrier: its other end is down or gone", fromLinks})
		}
	}
	switch {
	case worst.router:
		v.Remedy = append(v.Remedy, "# if it is up, check the cable, VLAN and network of "+worst.out+", and whether its address is still "+worst.addr.String()+". If another router leads there, change the routes through this one:",
			f.run(fmt.Sprintf("ip%s route show via %s", sixFlag(worst.addr), worst.addr)))
	case worst.translated.IsValid():
		v.Remedy = append(v.Remedy, fmt.Sprintf("# start the machine with the address %s, or correct the rule that names %s:", worst.translated, worst.addr))
		if chains := f.leadingTo(worst.addr); len(chains) > 0 {
			v.Remedy = append(v.Remedy, chains...)
		} else {
			v.Remedy = append(v.Remedy, f.run("nft list ruleset"), f.run("iptables-legacy-save -t nat"))
		}
	default:
		v.Remedy = append(v.Remedy, "# if it is up, check the cable, VLAN, address and firewall of that host. If it is gone, find out who still sends to it:", f.natkit("drops --for 10s"))
	}
	v.Verify = f.look(f.run(fmt.Sprintf("ping -c 3 %s", worst.addr)))
	return v
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
