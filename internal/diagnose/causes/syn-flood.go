// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

var synFlood = Cause{
	Code:     "syn-flood",
	Title:    "A flood of connections that are never completed",
	Headline: "Possible SYN flooding on port 80: half-open connections fill the table",
	Search: []string{
		"Possible SYN flooding on port",
		"request_sock_TCP: Possible SYN flooding on port 80. Sending cookies.",
		"nstat TcpExtTCPReqQFullDoCookies",
		"conntrack: SYN_RECV",
	},
	Severities: []Severity{Warning, Critical},
	Explains:   []string{"unreplied-flood", "conntrack-table-full", "conntrack-table-nearly-full"},
	Needs:      []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanConntrackStats, snapshot.CanCounters},
	Symptom:    "A published service is slow or dead. The table fills with half-open connections from many addresses.",
	Proof: fmt.Sprintf("Most TCP entries are half open, at least %d and %s of nf_conntrack_max (in a small table %d and %s), and they are not mostly those of a few hosts. Either the service replied and its clients did not (SYN_RECV), and the replies leave by the interface that the clients are on; or they go to one destination, which does reply to others. Critical if the kernel evicted half-open connections or a server's SYN queue was full.",
		floodEntries, percent.Whole(floodRoom), floodSmall, percent.Whole(floodSmallRoom)),
	FalsePositive: "A few clients whose replies get lost are clients-unreached. Many clients whose replies all get lost behind this machine leave the same entries as a flood: check whether some of the sources can be reached. A client that scans, and clients of a server that replies to nobody, are unreplied-flood. Many connections being opened beside many more open ones are a busy service.",
	Cure:          "Use SYNPROXY: the kernel replies with cookies and creates an entry only for a client that completes the handshake. Shorter timeouts of half-open connections help at once.",
	judge:         judgeSYNFlood,
}

// halfOpen are connections that are not complete.
type halfOpen struct {
	answered, silent uint64 // SYN_RECV, SYN_SENT
	dest             snapshot.Talker
	hasDest          bool // most of all entries are to dest
}

func (h halfOpen) all() uint64 { return saturate(h.answered, h.silent) }

// halfOpen adds them up; ok is false if they are no flood. Clients whose replies get lost, or whose server is gone,
// leave such entries too, and many of them. Three facts tell these apart: a few hosts opened most of them; the
// destination replies to nobody; or the replies of such a connection leave by an interface that its client is not on.
func (f facts) halfOpen(limit uint64) (h halfOpen, ok bool) {
	t := f.Conntrack.Table
	h.answered, h.silent = t.ByState["SYN_RECV"], t.ByState["SYN_SENT"]
	half := h.all()
	many := half >= f.few(floodEntries) && share(half, limit) >= f.part(floodRoom) || half >= f.few(floodSmall) && share(half, limit) >= f.part(floodSmallRoom)
	if !many || half > t.Entries || share(half, t.ByProtocol["tcp"]) < f.part(floodMajority) || share(f.openedByFew(h), half) >= oneSource {
		return h, false
	}
	if len(t.Destinations) > 0 && t.Destinations[0].Addr.IsValid() && share(t.Destinations[0].Entries, t.Entries) >= oneSource {
		h.dest, h.hasDest = t.Destinations[0], true
	}
	if share(h.answered, half) >= floodMajority {
		return h, !f.ledAstray()
	}
	return h, h.hasDest && h.dest.Unreplied < h.dest.Entries
}

// openedByFew is how many of the half-open connections the sources with most entries have opened, for certain. Of a
// flood from forged addresses it is a small part.
func (f facts) openedByFew(h halfOpen) (n uint64) {
	t, unreplied := f.Conntrack.Table, uint64(0)
	for _, s := range t.Sources {
		n, unreplied = saturate(n, s.HalfOpen), saturate(unreplied, s.Unreplied)
	}
	if n > 0 {
		return n
	}
	// Files of older versions do not have these numbers of each source.
	n = min(unreplied, h.silent)
	for _, u := range t.Halfway {
		n = saturate(n, u.Entries)
	}
	return n
}

// ledAstray says whether replies to half-open connections leave by another interface than their client is on.
func (f facts) ledAstray() bool {
	return slices.ContainsFunc(f.Conntrack.Table.Halfway, func(u snapshot.UnansweredUse) bool {
		r, asked := f.wayBack(u)
		_, off := f.offNetwork(r)
		return asked && off
	})
}

func judgeSYNFlood(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || f.Conntrack.Table == nil {
		return nil
	}
	h, ok := f.halfOpen(limit)
	if !ok {
		return nil
	}
	evicted, _ := f.stat("early_drop")
	queueFull, _ := f.counter("TcpExt.TCPReqQFullDrop")
	v := &verdict{impact: share(h.all(), limit)}
	v.Severity = Warning
	if evicted > 0 || queueFull > 0 {
		v.Severity = Critical
		v.impact = float64(saturate(evicted, queueFull))
	}
	v.Title = fmt.Sprintf("%d of %d TCP connections are half open", h.all(), f.Conntrack.Table.ByProtocol["tcp"])
	if h.hasDest {
		v.Title += fmt.Sprintf(", most to %s", h.dest.Addr)
	}
	v.Evidence = f.floodEvidence(h, evicted)
	v.Why = "The first packet of each connection costs an entry, for 120 s without a reply and 60 s after the service's reply. The sender can use forged addresses. Many real clients whose replies get lost behind this machine leave the same entries: check whether some of the sources can be reached."
	f.endFlood(v, h)
	v.Verify = f.look(f.natkit("conntrack stats"))
	return v
}

func (f facts) floodEvidence(h halfOpen, evicted uint64) []Evidence {
	out := append(f.fillEvidence(),
		Evidence{"replied to and not completed (SYN_RECV)", strconv.FormatUint(h.answered, 10), fromDump},
		Evidence{"without a reply (SYN_SENT)", strconv.FormatUint(h.silent, 10), fromDump})
	if h.hasDest {
		out = append(out, Evidence{"destination with most entries", fmt.Sprintf("%s: %s (%s)", h.dest.Addr, plural.Count(h.dest.Entries, "entry"), percent.Whole(share(h.dest.Entries, f.Conntrack.Table.Entries))), fromDump})
	}
	if evicted > 0 {
		out = append(out, Evidence{"half-open entries evicted to make room", strconv.FormatUint(evicted, 10), fromStats + ": early_drop"})
	}
	for _, name := range []string{"TCPReqQFullDrop", "TCPReqQFullDoCookies", "SyncookiesSent"} {
		if n, _ := f.counter("TcpExt." + name); n > 0 {
			return append(out, Evidence{"SYNs that arrived at a full queue here", strconv.FormatUint(n, 10), fromNetstat + ": TcpExt " + name})
		}
	}
	return out
}

// endFlood is shorter time-outs, and a proxy before the service that is meant.
func (f facts) endFlood(v *verdict, h halfOpen) {
	for _, s := range []snapshot.Setting{
		f.local("net.netfilter.nf_conntrack_tcp_timeout_syn_recv", 10),
		f.local("net.netfilter.nf_conntrack_tcp_timeout_syn_sent", 20),
	} {
		if now, known := f.sysctl(s.Name); known && strconv.FormatInt(now, 10) != s.Value && now > 20 {
			v.Settings = append(v.Settings, s)
			v.Remedy = append(v.Remedy, f.set(s))
		}
	}
	if len(v.Settings) > 0 {
		v.Remedy = append([]string{"# expire half-open connections sooner:"}, v.Remedy...)
	}
	over := "" // what takes the proxy away again
	if h.hasDest {
		var proxy []string
		var settings []snapshot.Setting
		proxy, over, settings = f.synproxy(h.dest.Addr)
		v.Remedy, v.Settings = append(v.Remedy, proxy...), append(v.Settings, settings...)
	} else {
		v.Remedy = append(v.Remedy, "# no single destination: see which service is meant, then put SYNPROXY before it:", f.natkit("conntrack top --by destination"))
	}
	state := "SYN_SENT"
	if share(h.answered, h.all()) >= floodMajority {
		state = "SYN_RECV"
	}
	v.Remedy = append(v.Remedy, "# remove the current half-open entries:", f.run("conntrack -D -p tcp --state "+state))
	if over != "" {
		v.Remedy = append(v.Remedy, over)
	}
}

// synproxy is the kernel's SYNPROXY before the TCP services of an address. A
// service that is published by a destination translation can't have it here: the
// proxy would answer before the translation.
func (f facts) synproxy(service netip.Addr) (remedy []string, over string, settings []snapshot.Setting) {
	family, hook := "ip", "forward"
	if service.Is6() {
		family = "ip6"
	}
	if f.own(service) {
		if f.translatesDestinations() {
			return []string{fmt.Sprintf("# %s is an address of this machine that DNAT translates: put SYNPROXY on the machine that serves it, or limit what arrives:", service),
				f.run("nft add table " + family + " natkit-guard"),
				f.run("nft " + quote("add chain "+family+" natkit-guard prerouting { type filter hook prerouting priority raw; }")),
				f.run("nft " + quote(fmt.Sprintf("add rule %s natkit-guard prerouting %s daddr %s tcp flags & (fin|syn|rst|ack) == syn limit rate over 1000/second drop", family, family, service))),
			}, "# when it is over: " + f.run("nft delete table "+family+" natkit-guard"), nil
		}
		hook = "input"
	}
	loose := f.local("net.netfilter.nf_conntrack_tcp_loose", 0)
	rule := func(chain, text string) string {
		return f.run("nft " + quote("add rule "+family+" natkit-synproxy "+chain+" "+family+" daddr "+service.String()+" "+text))
	}
	return []string{
		"# reply to SYNs with cookies instead of entries, and create an entry when the client completes the handshake (Linux 5.3 or later with nft_synproxy):",
		f.set(loose), // the client's last packet must not be taken for a connection in progress
		f.run("nft add table " + family + " natkit-synproxy"),
		f.run("nft " + quote("add chain "+family+" natkit-synproxy raw { type filter hook prerouting priority raw; }")),
		f.run("nft " + quote("add chain "+family+" natkit-synproxy "+hook+" { type filter hook "+hook+" priority filter; }")),
		rule("raw", "tcp flags & (fin|syn|rst|ack) == syn notrack"),
		rule(hook, "meta l4proto tcp ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm"),
		rule(hook, "ct state invalid drop"),
	}, "# when it is over: " + f.run("nft delete table "+family+" natkit-synproxy"), []snapshot.Setting{provided(loose, "the SYNPROXY rules of this finding's cure are also in place")}
}

// translatesDestinations says whether a rule here leads packets to another address.
func (f facts) translatesDestinations() bool {
	for _, c := range f.Chains {
		if c.NATRules["dnat"] > 0 || c.NATRules["netmap"] > 0 {
			return true
		}
	}
	return false
}
