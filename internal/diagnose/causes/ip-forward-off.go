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

// strayShare is the share of all received packets that packets for other hosts
// must be, on a machine without source translation, before it counts as a router
// that does not route: a host now and then gets packets for an address that
// moved away, among many of its own.
const strayShare = 0.10

var ipForwardOff = Cause{
	Code:     "ip-forward-off",
	Title:    "Forwarding is off",
	Headline: "Nothing passes the router: net.ipv4.ip_forward is 0",
	Search: []string{
		"net.ipv4.ip_forward = 0",
		"nstat IpInAddrErrors",
		"reason: IP_INADDRERRORS",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanSysctls, snapshot.CanCounters, snapshot.CanDrops, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "Nothing passes the router, or nothing that arrives on one of its interfaces. The rules are right.",
	Proof:         fmt.Sprintf("Packets for other hosts were dropped during the window (IP_INADDRERRORS at ip_error, Ip.InAddrErrors), forwarding is off for their ingress interface, and the machine is meant to forward: it translates source addresses, or a packet was for a network of another interface. Where other interfaces do forward, packets for the network that they came from do not count. If it has several networks and these packets are %s of all, it is likely meant to forward: a warning. Source NAT with forwarding off and no such packet yet is advice. IPv6 has one setting for all interfaces. It is judged only by its dropped packets (IP_INADDRERRORS at ip6_forward), one of which must be for a network of another interface.", percent.Whole(strayShare)),
	FalsePositive: "A host that does not forward has it off, and sometimes receives a packet for an address that moved. Redirecting a host's own traffic needs no forwarding.",
	Cure:          "Set net.ipv4.ip_forward=1, or the interface's own forwarding setting, which overrides it. For IPv6 set net.ipv6.conf.all.forwarding=1; accept_ra=2 keeps what router advertisements configure.",
	judge:         judgeIPForward,
}

// judgeIPForward judges each family by its own settings and packets. Where both
// are wrong the graver one has the title.
func judgeIPForward(f facts) *verdict {
	_, rows, _ := f.dropped(snapshot.CauseIPForwardOff)
	var rows4, rows6 []snapshot.Drop
	for _, row := range rows {
		if strings.HasPrefix(row.Location, "ip6_") {
			rows6 = append(rows6, row)
		} else {
			rows4 = append(rows4, row)
		}
	}
	v, other := judgeForward4(f, rows4), judgeForward6(f, rows6)
	if v == nil || other != nil && other.Severity > v.Severity {
		v, other = other, v
	}
	if other != nil {
		v.impact += other.impact
		v.Evidence = append(v.Evidence, other.Evidence...)
		v.Remedy = append(v.Remedy, other.Remedy...)
		v.Settings = append(v.Settings, other.Settings...)
		v.Verify = append(v.Verify, other.Verify[1:]...) // the doctor is asked once
	}
	return v
}

// forwardingOff is which interfaces forward IPv4, and what was lost because others do not.
type forwardingOff struct {
	off, on         []string // interfaces by their own setting, which is the one that counts
	global          int64
	globalKnown     bool
	rows            []snapshot.Drop
	traced, counted uint64
	networks        int // interfaces with addresses
}

func (w forwardingOff) known() bool { return len(w.off)+len(w.on) > 0 || w.globalKnown }

func (w forwardingOff) lost() uint64 { return max(w.traced, w.counted) }

func (f facts) forwardingOff(rows []snapshot.Drop) (w forwardingOff) {
	for _, l := range f.links() {
		switch value, known := f.conf(l.Name, "forwarding"); {
		case known && value == 0:
			w.off = append(w.off, l.Name)
		case known:
			w.on = append(w.on, l.Name)
		}
		if len(l.Addresses) > 0 {
			w.networks++
		}
	}
	w.global, w.globalKnown = f.sysctl("net.ipv4.ip_forward")
	w.rows = slices.DeleteFunc(rows, func(row snapshot.Drop) bool { return slices.Contains(w.on, row.Interface) })
	w.traced = total(w.rows)
	w.counted, _ = f.counter("Ip.InAddrErrors")
	return w
}

func judgeForward4(f facts, rows []snapshot.Drop) *verdict {
	w := f.forwardingOff(rows)
	if w.known() && len(w.off) == 0 && (len(w.on) > 0 || w.global != 0) {
		return nil
	}
	lost := w.lost()
	received, receivedKnown := f.counter("Ip.InReceives")
	v := &verdict{impact: float64(lost)}
	switch {
	case lost > 0 && (f.translatesSources() && w.networks >= 2 && !f.keptOut(w) || f.meantForOtherLink(w.rows)):
		v.Severity = Critical
		v.Title = fmt.Sprintf("forwarding is off: %s for other hosts dropped %s", number(lost, "packet"), f.window())
	case w.known() && lost >= 3 && w.networks >= 2 && receivedKnown && share(lost, received) >= strayShare:
		v.Severity = Warning
		v.Title = fmt.Sprintf("forwarding is off, and likely should not be: %s for other hosts dropped %s", number(lost, "packet"), f.window())
	case w.known() && len(w.on) == 0 && f.translatesSources() && w.networks >= 2:
		v.Severity = Advice
		v.Title = "forwarding is off on a machine whose rules translate source addresses"
	default:
		return nil
	}
	v.Evidence = w.evidence()
	v.Why = "A packet for another host is forwarded only if forwarding is on for its ingress interface; otherwise it is dropped before any rule sees it. " +
		"Writing net.ipv4.ip_forward sets all interfaces at once."
	v.Settings = f.forwardHere(w)
	for _, s := range v.Settings {
		v.Remedy = append(v.Remedy, f.set(s))
	}
	if v.Severity < Warning { // nothing begins to forward unasked
		for i := range v.Settings {
			v.Settings[i].If = "this machine is meant to forward packets"
		}
	} else {
		v.Remedy = append(v.Remedy, f.applied()...)
	}
	v.Verify = f.look(f.run("sysctl net.ipv4.ip_forward"), f.natkit("drops --for 10s"))
	return v
}

// keptOut says whether somebody keeps interfaces from forwarding beside others that do, and what was lost there are strays:
// packets for an address of the network that they came from or, where none was seen, few.
func (f facts) keptOut(w forwardingOff) bool {
	if len(w.on) == 0 {
		return false
	}
	seen := false
	for _, row := range w.rows {
		for _, t := range samples([]snapshot.Drop{row}) {
			seen = true
			if to, ok := f.linkTo(t.dest.Addr()); !ok || to.Name != row.Interface {
				return false
			}
		}
	}
	part, known := f.receivedShare(w.lost(), w.rows, w.off)
	return seen || known && part < strayShare
}

func (w forwardingOff) evidence() (out []Evidence) {
	if w.globalKnown {
		out = append(out, Evidence{"net.ipv4.ip_forward", strconv.FormatInt(w.global, 10), fromSettings})
	}
	if len(w.off) > 0 {
		out = append(out, Evidence{"interfaces with forwarding off", strings.Join(w.off, ", "), fromSettings + ": net.ipv4.conf.*.forwarding"})
	}
	if w.counted > 0 {
		out = append(out, Evidence{"packets for other hosts, dropped", strconv.FormatUint(w.counted, 10), fromSnmp + ": Ip InAddrErrors"})
	}
	if w.traced > 0 {
		out = append(out, Evidence{"packets dropped at ip_error", strconv.FormatUint(w.traced, 10) + cameInBy(w.rows), fromTracer})
	}
	return append(out, sampleEvidence(w.rows)...)
}

// forwardHere are the settings that have it forward. Writing the global value sets every
// interface. Where some are on and some are off, somebody chose: touch only those that lost packets.
func (f facts) forwardHere(w forwardingOff) (settings []snapshot.Setting) {
	if (!w.globalKnown || w.global == 0) && len(w.on) == 0 {
		return []snapshot.Setting{f.local("net.ipv4.ip_forward", 1)}
	}
	wrong := devices(w.rows)
	if len(wrong) == 0 {
		wrong = w.off
	}
	for _, name := range wrong {
		settings = append(settings, f.local(snapshot.SysctlName("net", "ipv4", "conf", name, "forwarding"), 1))
	}
	return settings
}

// judgeForward6 knows of IPv6 what the tracer saw. The setting of all interfaces
// decides; an interface's own makes it a router's only in what it advertises and
// accepts. Nothing is planned for it unasked: a machine that gets its default route
// from router advertisements would lose it with forwarding on, and that is for its
// owner to see.
func judgeForward6(f facts, rows []snapshot.Drop) *verdict {
	const setting = "net.ipv6.conf.all.forwarding"
	if value, known := f.sysctl(setting); !known || value != 0 || !f.meantForOtherLink(rows) {
		return nil
	}
	var lost uint64
	for _, row := range rows {
		lost = saturate(lost, row.Count)
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Critical
	v.Title = fmt.Sprintf("IPv6 forwarding is off: %s for other hosts dropped %s", number(lost, "packet"), f.window())
	v.Evidence = append([]Evidence{
		{setting, "0", fromSettings},
		{"packets dropped at ip6_forward", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer},
	}, sampleEvidence(rows)...)
	v.Why = "A packet for another host is forwarded only if forwarding is on. IPv6 has its own setting, which net.ipv4.ip_forward does not change."
	v.Remedy = []string{
		"# with forwarding on, only interfaces with accept_ra=2 accept addresses and routes from router advertisements: set that first where this machine needs them",
		f.set(f.local(setting, 1)),
	}
	v.Settings = []snapshot.Setting{provided(f.local(setting, 1), "this machine takes no route from router advertisements, or only on an interface with accept_ra=2")}
	v.Verify = f.look(f.run("sysctl "+setting), f.natkit("drops --for 10s"))
	return v
}

// meantForOtherLink says whether a dropped packet was for a network of another
// interface than the one it came in by.
func (f facts) meantForOtherLink(rows []snapshot.Drop) bool {
	for _, row := range rows {
		if row.Interface == "" {
			continue
		}
		for _, t := range samples([]snapshot.Drop{row}) {
			if to, ok := f.linkTo(t.dest.Addr()); ok && to.Name != row.Interface && !f.own(t.dest.Addr()) {
				return true
			}
		}
	}
	return false
}

// cameInBy names the interfaces of rows, for the end of a value.
func cameInBy(rows []snapshot.Drop) string {
	names := devices(rows)
	if len(names) == 0 {
		return ""
	}
	return ", arriving on " + strings.Join(names[:min(len(names), 5)], ", ")
}

// sampleEvidence is one packet of those dropped.
func sampleEvidence(rows []snapshot.Drop) []Evidence {
	for _, row := range rows {
		if len(row.Samples) > 0 {
			return []Evidence{{"one of them", row.Samples[0], fromTracer}}
		}
	}
	return nil
}
