// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"

	"natkit/internal/snapshot"
)

// Cause is one entry of the catalogue: a reason for NAT to be slow or lossy
// that natkit can tell from a Snapshot.
type Cause struct {
	Code  string // stable; its file is Code.go, its page docs/causes/Code.md
	Title string // what is wrong, without numbers
	// Headline is the symptom in the words that people type into a search box, the title of
	// the page; Search the exact strings that they paste there: lines of the kernel log and
	// of programs, counters, drop reasons.
	Headline   string
	Search     []string
	Severities []Severity
	// Thresholds are the pairs of numbers that decide, for those who watch window after window.
	Thresholds []Threshold
	// Explains are the codes that this cause brings about or takes along: their
	// findings are folded under one of this cause that is at least as severe.
	Explains []string
	// Needs are the names of the capabilities that give the evidence. With some of
	// them missing the cause is judged from the others.
	Needs []string

	// The rest of the page: what a user notices, how natkit decides, which healthy
	// machines look alike and why they are not reported, and what the cure does.
	Symptom       string
	Proof         string
	FalsePositive string
	Cure          string
	// NoLab is why `natkit lab run` cannot reproduce it, a clause; "" where it does.
	NoLab string
	// Host says that the cause lies in what all namespaces of a machine share: it is
	// reported once, however many were looked at.
	Host bool

	judge func(facts) *verdict
}

// verdict is a finding with what Judge orders findings of one severity by.
type verdict struct {
	Finding
	explains []string // besides what its cause explains always
	wastes   bool     // its cause never loses anything: after those that may
	impact   float64  // packets or connections lost in the window, or how near the limit (0 to 1)
}

// catalogue in the order in which equal findings are shown.
var catalogue = []Cause{
	conntrackTableFull,
	snatPortsExhausted,
	ipForwardOff,
	forwardPolicyDrop,
	rpFilterDrop,
	noRoute,
	nextHopSilent,
	linkDown,
	duplicateAddress,
	wrongDestinationMAC,
	vlanMismatch,
	arpRefused,
	ruleDrop,
	answersLost,
	clientsUnreached,
	neighbourTableFull,
	routingLoop,
	ttlExceeded,
	martianDrop,
	mtuDrop,
	fragmentsLost,
	checksumErrors,
	qdiscDrop,
	softirqOneCPU,
	softirqAllCPUs,
	nicRingFull,
	cpuBacklogFull,
	napiBudget,
	softirqDelayed,
	listenOverflow,
	receiveBufferFull,
	localPortsExhausted,
	unrepliedFlood,
	engineDrift,
	portBlocksExhausted,
	portBlockTooSmall,
	engineSourceLimit,
	accelSlowPath,
	logGap,
	sinkBehind,
	conntrackTableNearlyFull,
	timeWaitHeavy,
	conntrackHashTooSmall,
	conntrackNoMemory,
	snatPortRace,
	dnsRace,
	conntrackInvalidReset,
	staleSNAT,
	staleUDPDNAT,
	answeredFromElsewhere,
	backendSilent,
	hairpinMissing,
	bridgeNFMissing,
	asymmetricRouting,
	establishedTimeoutShort,
	helperMissing,
	synFlood,
	conntrackEarlyDrop,
	conntrackChainTooLong,
	establishedTimeoutLong,
	closeWaitHeavy,
	eventListenerLag,
	conntrackLimitInContainer,
	iptablesTwoBackends,
	ruleChainLong,
	conntrackHelper,
	conntrackAccounting,
	brNetfilterOverhead,
	needlessHooks,
	ipsecPoliciesMany,
	otherDrops,
}

// Catalogue is every cause that Judge knows.
func Catalogue() []Cause { return slices.Clone(catalogue) }

// Judge returns what is wrong according to the facts in s: most severe first,
// what is explained by another finding folded under it, then what may lose before what
// only wastes, then most impact first. A fact that is missing costs the causes that need it
// and nothing else.
//
// One window is all that it knows. What is less than a threshold by no more than chance is advice, so
// that the same load is not a warning in one window and nothing in the next.
func Judge(s *snapshot.Snapshot) []Finding { return JudgeAgain(s, nil) }

// JudgeAgain is Judge for who watches window after window: the causes whose codes are in before were named in
// the last one, and are until they are below the lower of their thresholds.
func JudgeAgain(s *snapshot.Snapshot, before map[string]bool) []Finding {
	if s == nil {
		return nil
	}
	f := newFacts(s)
	var found []*verdict
	for _, c := range catalogue {
		if v := c.judgeNear(f, before[c.Code]); v != nil {
			v.Code, v.explains = c.Code, append(v.explains, c.Explains...)
			v.Impact = v.impact
			reconcile(&v.Finding)
			v.Title = fit(v.Title)
			v.wastes = slices.Max(c.Severities) == Advice
			found = append(found, v)
		}
	}
	slices.SortStableFunc(found, func(a, b *verdict) int {
		if a.Severity != b.Severity {
			return int(b.Severity - a.Severity)
		}
		if a.wastes != b.wastes {
			if a.wastes {
				return 1
			}
			return -1
		}
		return cmp.Compare(b.impact, a.impact)
	})
	return fold(found)
}

// titleMost is how many characters a finding's title has at most: what a line of a terminal shows.
const titleMost = 90

// titled is a title with as much more as there is room for, the most telling first.
func titled(title string, more ...string) string {
	for _, m := range more {
		if utf8.RuneCountInString(title+m) <= titleMost {
			title += m
		}
	}
	return title
}

// fit shortens a title that long names (of rules, containers, IPv6 addresses) have made too long.
func fit(title string) string {
	runes := []rune(title)
	if len(runes) <= titleMost {
		return title
	}
	short := string(runes[:titleMost-3])
	if end := strings.LastIndexByte(short, ' '); end > titleMost/2 {
		short = short[:end]
	}
	return strings.TrimRight(short, " ,;:(") + "..."
}

// judgeNear judges from the lower thresholds on where the cause was named before, and from there on as advice where it was not.
func (c Cause) judgeNear(f facts, again bool) *verdict {
	ask := func(how strictness) *verdict {
		g := f
		g.ask = how
		return c.judge(g)
	}
	if again {
		return ask(held)
	}
	v := ask(enter)
	if v != nil || len(c.Thresholds) == 0 {
		return v
	}
	if v = ask(near); v == nil || v.Severity == Advice {
		return nil
	}
	v.Severity = Advice
	v.Title = "near the threshold: " + v.Title
	for _, t := range c.Thresholds {
		v.Evidence = append(v.Evidence, Evidence{"threshold of " + t.What, t.String(), "natkit"})
	}
	for i := range v.Settings {
		v.Settings[i].If = cmp.Or(v.Settings[i].If, "a longer window (--for 1m) shows the same")
	}
	v.Remedy = append([]string{"# a longer window is more certain:", f.natkit("doctor --for 1m")}, v.Remedy...)
	return v
}

// hides says whether a finding may stand below v.
func (v *verdict) hides(other *verdict) bool {
	return v != other && v.Severity >= other.Severity && slices.Contains(v.explains, other.Code)
}

// leadsTo says whether v explains other, or what explains it.
func (v *verdict) leadsTo(other *verdict, all []*verdict, seen map[*verdict]bool) bool {
	if v.hides(other) {
		return true
	}
	seen[v] = true
	return slices.ContainsFunc(all, func(next *verdict) bool {
		return !seen[next] && v.hides(next) && next.leadsTo(other, all, seen)
	})
}

// fold puts each finding under the first one that explains it. A finding is
// explained only by one at least as severe, so that nothing severe is hidden
// under something mild; of those that explain each other, in however wide a circle, the
// first is the cause.
func fold(sorted []*verdict) []Finding {
	children := map[*verdict][]*verdict{}
	var causes []*verdict
	for i, v := range sorted {
		u := slices.IndexFunc(sorted, func(a *verdict) bool { return a.hides(v) })
		if u < 0 || u > i && v.leadsTo(sorted[u], sorted, map[*verdict]bool{}) {
			causes = append(causes, v)
		} else {
			children[sorted[u]] = append(children[sorted[u]], v)
		}
	}
	var whole func(v *verdict) Finding
	whole = func(v *verdict) Finding {
		for _, c := range children[v] {
			v.Consequences = append(v.Consequences, whole(c))
		}
		return v.Finding
	}
	var out []Finding
	for _, v := range causes {
		out = append(out, whole(v))
	}
	return out
}
