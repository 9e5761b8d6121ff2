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
	// Packets with addresses that can't be are a trickle of spoofed and misguided
	// ones on every outside interface. Translation to 127.0.0.0/8 is never meant to
	// be in vain.
	martianFew   = 3
	martianShare = 0.001 // of what the interface received: a warning
	martianMost  = 0.05  // critical
)

var martianDrop = Cause{
	Code:     "martian-drop",
	Title:    "Packets are dropped because of an address that cannot be valid there",
	Headline: "IPv4: martian source: packets dropped because of an impossible address",
	Search: []string{
		"IPv4: martian source",
		"IPv4: martian destination",
		"route_localnet",
		"reason: IP_LOCALNET",
		"reason: IP_LOCAL_SOURCE",
		"reason: IP_INVALID_SOURCE",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanDrops, snapshot.CanSysctls, snapshot.CanInterfaces},
	Symptom:       `A port forwarded to 127.0.0.1 works from the machine itself and from nowhere else. Or a neighbour cannot be reached, and the kernel logs "martian source".`,
	Proof:         fmt.Sprintf("Packets that a rule translated to 127.0.0.0/8 arrived on an interface with route_localnet off (IP_LOCALNET): critical from %d. Or packets arrived with a source address that is this machine's own, or not a host address (IP_LOCAL_SOURCE, IP_INVALID_SOURCE): a warning from %s of what the interface received, critical from %s. Only the tracer sees them: Linux 6.18 counts martians for the host, not by namespace. Kernels before 6.14 report no reason; there natkit judges by the addresses.", martianFew, "0.1 %", percent.Whole(martianMost)),
	FalsePositive: "Spoofed packets from outside, a few beside real traffic; single packets to 127.0.0.0/8 that no rule translated.",
	Cure:          "Set route_localnet=1 on the ingress interface, with a rule that blocks packets sent to 127.0.0.0/8 directly. Better, let the server listen on another address. If the source is one of this machine's own addresses, find the other machine that has it, or the cable that loops packets back.",
	judge:         judgeMartian,
}

func judgeMartian(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseMartian)
	var local, own []snapshot.Drop
	for _, row := range rows {
		switch seen := samples([]snapshot.Drop{row}); {
		case slices.ContainsFunc(row.Samples, translatedToLoopback):
			local = append(local, row)
		case f.cameBack(row): // a routing loop
		case row.Reason == "IP_LOCAL_SOURCE" || row.Reason == "IP_INVALID_SOURCE",
			slices.ContainsFunc(seen, func(t tuple) bool { return f.own(t.source.Addr()) || t.source.Addr().IsLoopback() }):
			own = append(own, row)
		}
	}
	if v := f.judgeLocalnet(local); v != nil {
		return v
	}
	return f.judgeOwnSource(own)
}

// translatedToLoopback says whether a sampled packet has a destination in
// 127.0.0.0/8 that it was not sent to: the sample names the flow's own addresses
// where they differ.
func translatedToLoopback(sample string) bool {
	t, ok := parseSample(sample)
	return ok && t.dest.Addr().IsLoopback() && strings.Contains(sample, "(flow ")
}

func (f facts) judgeLocalnet(rows []snapshot.Drop) *verdict {
	lost := total(rows)
	if lost == 0 {
		return nil
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	if lost >= martianFew {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s translated to %s dropped %s: route_localnet is off", number(lost, "packet"), strings.TrimPrefix(destinations(rows), " to "), f.window())
	v.Evidence = append([]Evidence{{"packets dropped as martians", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer}}, sampleEvidence(rows)...)
	v.Why = "The kernel accepts no packet from the network to 127.0.0.0/8, even if a rule translated it: a program that listens on 127.0.0.1 expects to be reached only from its own machine."
	all, _ := f.conf("all", "route_localnet")
	for _, name := range devices(rows) {
		value, known := f.conf(name, "route_localnet")
		if known {
			v.Evidence = append(v.Evidence, Evidence{"route_localnet of " + name, strconv.FormatInt(max(all, value), 10), fromSettings})
		}
		// Without the rule before it, all that listens on 127.0.0.1 would be open to the
		// network, and tune makes no rules.
		s := f.local(snapshot.SysctlName("net", "ipv4", "conf", name, "route_localnet"), 1)
		v.Settings = append(v.Settings, provided(s, "an earlier rule drops what is sent to 127.0.0.0/8 directly, as in this finding's cure"))
		v.Remedy = append(v.Remedy,
			"# drop what is sent to 127.0.0.0/8 directly, before NAT:",
			f.run("nft add table ip natkit-localnet"),
			f.run("nft "+quote("add chain ip natkit-localnet prerouting { type filter hook prerouting priority raw; }")),
			f.run("nft "+quote("add rule ip natkit-localnet prerouting"+nftIface(" iifname ", name)+" ip daddr 127.0.0.0/8 drop")),
			"# then admit what a rule translated; a server that listens on an address of "+name+" needs neither:",
			f.set(s))
	}
	if len(v.Remedy) == 0 { // the interface is not known
		v.Remedy = []string{"# see on which interface they arrive, then set its route_localnet:", f.natkit("drops --for 10s"), f.run("sysctl -ar '\\.route_localnet$'")}
	}
	v.Verify = f.look(f.run("sysctl -ar '\\.route_localnet$'"))
	return v
}

func (f facts) judgeOwnSource(rows []snapshot.Drop) *verdict {
	lost := total(rows)
	part, known := f.receivedShare(lost, rows, devices(rows))
	if lost < martianFew || !known || part < martianShare {
		return nil
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	if part >= martianMost && lost >= rpFilterMany {
		v.Severity = Critical
	}
	source := ""
	for _, t := range samples(rows) {
		if source == "" && t.source.IsValid() {
			source = t.source.Addr().String()
		}
	}
	v.Title = fmt.Sprintf("%s arrived with an impossible source address %s", number(lost, "packet"), f.window())
	if source != "" {
		v.Title = fmt.Sprintf("%s from %s dropped %s: that source cannot arrive there", number(lost, "packet"), source, f.window())
	}
	v.Evidence = append([]Evidence{{"packets dropped as martians", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer}}, sampleEvidence(rows)...)
	v.Evidence = append(v.Evidence, Evidence{"share of the packets received there", percent.Whole(part), fromLinks})
	v.Why = "A packet from one of this machine's own addresses cannot come from outside: another machine has the same address, a router, bridge or cable returns this machine's packets to it, or another machine translates sources to an address that it does not have."
	for _, name := range devices(rows)[:min(1, len(devices(rows)))] {
		if source != "" {
			v.Remedy = append(v.Remedy, "# who sends them: the sender's hardware address is printed first:",
				f.run(fmt.Sprintf("tcpdump -c 5 -eni %s src %s", quote(name), source)))
		}
		self := f.local(snapshot.SysctlName("net", "ipv4", "conf", name, "accept_local"), 1)
		v.Settings = append(v.Settings, provided(self, "this machine sends packets to itself on purpose"))
		v.Remedy = append(v.Remedy, "# remove the address from the other machine, or stop what returns the packets. Accept them only if this machine sends packets to itself on purpose:",
			"# "+f.set(self))
	}
	if len(v.Remedy) == 0 {
		v.Remedy = []string{f.natkit("drops --for 10s")}
	}
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
}
