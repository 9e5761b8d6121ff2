// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Single hosts do not answer anywhere. What is told here is that so many flows
	// fail for the source that they leave with.
	lostFew  = 3
	lostMost = 0.90 // of the flows of that kind
)

var answersLost = Cause{
	Code:     "answers-lost",
	Title:    "Replies cannot return: packets leave with an untranslated source, or with one that is not this machine's",
	Headline: "Clients behind NAT get no replies: MASQUERADE or SNAT is missing or does not match",
	Search: []string{
		"Connection timed out",
		"conntrack: [UNREPLIED]",
		"conntrack: SYN_SENT",
		"iptables -t nat -A POSTROUTING -j MASQUERADE not working",
	},
	Severities: []Severity{Advice, Warning, Critical},
	Needs:      []string{snapshot.CanConntrackDump, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanRoutes, snapshot.CanLeaving},
	Symptom:    "A network behind this machine, often a new one, gets no reply from anywhere; this machine itself does. A capture on the egress interface shows private addresses, or an address that nobody has.",
	Proof: fmt.Sprintf("One of these holds. (1) At least %d flows have no reply, and they are %s of the flows like them: private sources to public addresses that no rule translated (if no rule translates at all, nearly all flows); any sources, if rules translate and no flow in the table is translated; or a source address given by a rule that is on a network here but on no interface. (2) Rules translate, packets are forwarded and connection tracking has no entry: untracked packets (notrack) are not translated. (3) Packets leave for the Internet with private sources whose return path is another interface, and almost nothing comes back to such addresses. They are at least %s of the packets that leave for the Internet by that interface: a warning, from %s critical. Rules must translate now, or have translated when entries in the table were created. (4) The same share leaves for the IPv6 Internet with a unique local source (fc00::/7), with any rules. (5) Flows have no reply (SYN_SENT, UNREPLIED) while replies arrive for this machine's own address and find no entry: a conntrack zone is set in one direction only, or replies are not tracked. (6) Of at least %d flows that left in the last %d s, to at least %d destinations, %s have no reply and nothing here drops the replies. With fewer destinations it is a warning if none has a reply.", lostFew, percent.Whole(lostMost), percent.Whole(leavingSome), percent.Whole(leavingMost),
		nothingFew, snapshot.RecentSeconds, nothingDestinations, percent.Whole(nothingMost)),
	FalsePositive: "A host that is down, a scan, a router without NAT whose networks have a return path: there, sources are public or flows have replies. Pools of addresses that are routed here.",
	Cure:          "Add a rule that translates the sources of this network on the egress interface, or add the missing address to the interface. Do not use notrack or zones for flows to translate.",
	judge:         judgeAnswersLost,
}

func judgeAnswersLost(f facts) *verdict {
	if f.Conntrack == nil || f.Interfaces == nil || !f.rulesKnown() {
		return nil
	}
	for _, judge := range []func(facts) *verdict{judgeUntracked, judgeUnmatched, judgeForeignSource, judgeUntranslated, judgeLeaving, judgeLeavingSix, judgeNothingBack} {
		if v := judge(f); v != nil {
			v.Verify = f.look(f.natkit("conntrack list --state SYN_SENT"))
			return v
		}
	}
	return nil
}

// onlyInside says whether an address means something within a site only.
func onlyInside(a netip.Addr) bool { return snapshot.OnlyInside(a) }
