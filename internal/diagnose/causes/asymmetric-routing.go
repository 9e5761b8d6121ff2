// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// Connections of which only one direction is seen: so many, and this share of
	// the TCP entries. Single ones are picked up in the middle after a restart.
	oneWayFew   = 10
	oneWayShare = 0.05

	// Unanswered SYNs have other reasons as well: they must be more.
	silentShare = 0.20
)

// synSentSeconds is the kernel's time-out of an unanswered SYN.
const synSentSeconds = 120

var asymmetricRouting = Cause{
	Code:     "asymmetric-routing",
	Title:    "Connection tracking sees only one direction of connections",
	Headline: "Connections open and then hang: asymmetric routing, conntrack sees one direction",
	Search: []string{
		"asymmetric routing conntrack",
		"conntrack: ESTABLISHED [UNREPLIED]",
		"ctstate INVALID drop",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Explains:      []string{"rule-drop"},
	Needs:         []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanConntrackStats, snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "Connections open and then hang, or work only while no firewall rule checks their state.",
	Proof:         fmt.Sprintf("Connections picked up in the middle that never saw a reply (ESTABLISHED and UNREPLIED), or SYNs without a reply (SYN_SENT) together with invalid packets: at least %d, and %s of the TCP entries, of SYNs %s. Critical if rules dropped packets in the middle of a connection during the window; advice if no rule here translates or drops.", oneWayFew, percent.Whole(oneWayShare), percent.Whole(silentShare)),
	FalsePositive: "A scan leaves SYNs without replies, but sends nothing later that could be invalid. Connections older than connection tracking are picked up in the middle, and soon see a reply.",
	Cure:          "Route both directions through this machine. If that is not wanted, do not track these networks; NAT needs both directions.",
	judge:         judgeAsymmetric,
}

func judgeAsymmetric(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	tcp, silent := t.ByProtocol["tcp"], t.ByState["SYN_SENT"]
	invalid, _ := f.stat("invalid")
	n := f.oneWay()
	if n == 0 || n > t.Entries {
		return nil
	}
	if reset := judgeInvalidReset(f); reset != nil && reset.Severity > Advice {
		return nil
	}
	if back, _ := f.unmatched(); back > 0 {
		return nil // the answers do come here
	}
	lost, rows := f.midStreamDrops()
	v := &verdict{impact: float64(lost)}
	switch {
	case lost >= oneWayFew:
		v.Severity = Critical
	case f.Chains != nil && !f.translatesSources() && !f.translatesDestinations() && !f.refuses():
		v.Severity = Advice
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s of %d TCP connections are seen in one direction only", strconv.FormatUint(n, 10), tcp)
	v.Evidence = []Evidence{
		{"connections picked up mid-stream, without a reply", strconv.FormatUint(t.OneWay, 10), fromDump + ": ESTABLISHED, UNREPLIED"},
		{"SYNs without a reply", strconv.FormatUint(silent, 10), fromDump + ": SYN_SENT"},
		{"invalid packets " + f.window(), strconv.FormatUint(invalid, 10), fromStats + ": invalid"},
	}
	if lost > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets of open connections, dropped by rules", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	source, dest, found := f.oneWayPair(rows)
	if found {
		v.Evidence = append(v.Evidence, Evidence{"one pair of them", source + " to " + dest, fromDump})
	}
	v.Why = "These sources send more than a SYN and conntrack sees no reply to it, so the replies most likely take a path that does not pass this machine. (Connections that were open before conntrack ran look the same until their next reply.) Conntrack then marks what follows the SYN as invalid: it is not translated, and a rule that accepts only known connections drops it."
	if astray, seen := f.repliesAstray(netip.MustParseAddr(cmp.Or(dest, "0.0.0.0"))); seen {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("frames of %s to %s, which is none of this machine's hardware addresses", dest, astray.To), strconv.FormatUint(astray.Count, 10), fromFrames})
	}
	v.Remedy = f.returnHere(source, dest, found, len(rows) == 0 || !f.translatesSources())
	v.Verify = f.look(f.run("conntrack -S"), f.natkit("conntrack stats"))
	return v
}

// oneWay is how many TCP connections are seen in one direction only.
func (f facts) oneWay() (n uint64) {
	t := f.Conntrack.Table
	tcp := t.ByProtocol["tcp"]
	if t.OneWay >= oneWayFew && share(t.OneWay, tcp) >= oneWayShare {
		n = t.OneWay
	}
	// The ACK that follows an answer which was not seen is invalid; the SYN's entry
	// stays for two minutes.
	invalid, _ := f.stat("invalid")
	followed := min(uint64(f.perSecond(invalid)*synSentSeconds), implausible)
	if unanswered := min(t.ByState["SYN_SENT"], followed); invalid >= oneWayFew && unanswered >= oneWayFew && share(unanswered, tcp) >= silentShare {
		n = saturate(n, unanswered)
	}
	return n
}

// midStreamDrops are packets in the middle of a connection that rules dropped.
func (f facts) midStreamDrops() (lost uint64, rows []snapshot.Drop) {
	for _, b := range f.blamed() {
		if row, some := only(b.row, midStream); some {
			lost = saturate(lost, row.Count)
			rows = append(rows, row)
		}
	}
	return lost, rows
}

// returnHere is how to have replies return by this machine or, where that is asked for, not track
// what goes one way.
func (f facts) returnHere(source, dest string, found, notrack bool) (remedy []string) {
	if !found {
		return []string{"# see which pairs of addresses they are:", f.run("conntrack -L -p tcp --state SYN_SENT"),
			"# make the replies return here: check the route of DESTINATION to SOURCE, on that host and its routers"}
	}
	remedy = []string{"# make the replies return here: check the route of " + dest + " to " + source + ", on that host and its routers",
		"# the route from here:", f.run("ip route get " + source)}
	if notrack {
		remedy = append(remedy, "# or, if another return path is intended and none of this traffic is translated, exclude it from tracking; rules must then accept untracked packets:",
			f.run("nft add table ip natkit-notrack"),
			f.run("nft "+quote("add chain ip natkit-notrack prerouting { type filter hook prerouting priority raw; }")),
			f.run("nft "+quote("add rule ip natkit-notrack prerouting ip saddr "+source+" ip daddr "+dest+" notrack")),
			f.run("nft "+quote("add rule ip natkit-notrack prerouting ip saddr "+dest+" ip daddr "+source+" notrack")))
	}
	return remedy
}

// oneWayPair is a source and a destination whose connections see no answer.
func (f facts) oneWayPair(rows []snapshot.Drop) (source, dest string, found bool) {
	for _, t := range samples(rows) {
		if t.source.Addr().Is4() && t.dest.Addr().Is4() {
			return t.source.Addr().String(), t.dest.Addr().String(), true
		}
	}
	for _, u := range f.Conntrack.Table.Unanswered {
		if u.Protocol == "tcp" && u.Source.Is4() && u.Dest.Addr().Is4() {
			return u.Source.String(), u.Dest.Addr().String(), true
		}
	}
	return "", "", false
}

// refuses says whether a rule or a policy here drops anything of what is forwarded.
func (f facts) refuses() bool {
	for _, c := range f.Chains {
		if (c.Hook == "forward" || c.Hook == "") && (c.Policy == "drop" || len(c.DropRules) > 0) {
			return true
		}
	}
	return false
}
