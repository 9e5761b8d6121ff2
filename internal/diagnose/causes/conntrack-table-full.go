// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"math/bits"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// fullShare is how full the table is, at either end of the window, when packets
// that it refused in between are its own doing: entries expire all the time, so
// a table that was full a moment ago may have a little room.
const fullShare = 0.98

var conntrackTableFull = Cause{
	Code:     "conntrack-table-full",
	Title:    "The connection tracking table is full",
	Headline: "New connections time out: nf_conntrack: table full, dropping packet",
	Search: []string{
		"nf_conntrack: table full, dropping packet",
		"nf_conntrack: nf_conntrack: table full, dropping packet",
		"conntrack -S: drop",
		"Connection timed out",
	},
	Severities: []Severity{Warning, Critical},
	Explains:   []string{"unreplied-flood", "time-wait-heavy", "close-wait-heavy", "established-timeout-long", "conntrack-early-drop"},
	Needs: []string{snapshot.CanConntrack, snapshot.CanConntrackStats, snapshot.CanDrops, snapshot.CanKernelLog,
		snapshot.CanConntrackDump},
	Symptom:       `New connections time out or take seconds. Existing connections continue. The kernel logs "nf_conntrack: table full, dropping packet".`,
	Proof:         fmt.Sprintf("The number of entries is within %s of nf_conntrack_max and new flows were refused during the window. One of three facts is enough: the column drop of /proc/net/stat/nf_conntrack rose without insert_failed, packets without an entry were dropped at nf_hook_slow, or the kernel logged it. A full table without a refusal is a warning. If natkit cannot read the table, two of these facts are critical and one is a warning.", percent.Whole(1-fullShare)),
	FalsePositive: "Old lines in the kernel log, lines about other namespaces, and refused packets in a table with room: the kernel also counts out-of-memory and invalid packets in that column. A limit of 0 means no limit.",
	Cure: fmt.Sprintf("Raise nf_conntrack_max to cover current and refused entries, and scale the hash with it. natkit uses the kernel's true entry size and at most %s of memory. If closed connections hold most of the table, it shortens their timeout. It names the host that fills the table.",
		percent.Whole(tableMemoryShare)),
	judge: judgeTableFull,
}

func judgeTableFull(f facts) *verdict {
	if v := judgeEngineTable(f); v != nil {
		return v
	}
	traced, _, _ := f.dropped(snapshot.CauseTableFull)
	refused, _ := f.refused()
	var logged uint64
	if f.KernelLog != nil && f.KernelLog.TableFull < implausible {
		logged = f.KernelLog.TableFull
	}
	lost := max(traced, refused, logged)
	signs := 0 // independent ones
	for _, n := range []uint64{traced, refused, logged} {
		if n > 0 {
			signs++
		}
	}

	v := &verdict{impact: float64(lost)}
	if f.Conntrack == nil {
		switch {
		case signs == 0:
			return nil
		case signs == 1:
			v.Severity = Warning
			v.Title = fmt.Sprintf("the connection tracking table is likely full: %s dropped %s", number(lost, "packet"), f.window())
		default:
			v.Severity = Critical
			v.Title = fmt.Sprintf("the connection tracking table is full: %s dropped %s", number(lost, "packet"), f.window())
		}
	} else {
		limit, ok := f.limit()
		if !ok {
			return nil
		}
		near := float64(max(f.Conntrack.Count, f.Conntrack.CountStart)) >= fullShare*float64(limit)
		switch {
		case near && lost > 0 || signs >= 2 && traced > 0:
			v.Severity = Critical
			v.Title = fmt.Sprintf("the connection tracking table is full (%d of %d): %s dropped %s",
				f.Conntrack.Count, limit, number(lost, "packet"), f.window())
		case f.Conntrack.Count >= limit:
			v.Severity = Warning
			v.impact = 1
			v.Title = fmt.Sprintf("the connection tracking table is full (%d of %d); nothing was refused %s", f.Conntrack.Count, limit, f.window())
		default:
			return nil
		}
	}

	v.Evidence = f.tableEvidence()
	v.Evidence = append(v.Evidence, f.refusalEvidence(traced, refused, logged)...)
	v.Why = "Every connection through NAT needs an entry. While the table is full the first packet of each new connection is dropped: " +
		"clients retransmit it after 1, 3 and 7 seconds and then give up. Connections that have an entry continue normally."
	growth := f.growTable(lost)
	v.Settings = growth.settings
	v.Remedy = growth.remedy
	v.Verify = f.look(f.run("sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max"), f.natkit("drops --for 10s"))
	return v
}

// refusalEvidence is what shows that new flows were turned away.
func (f facts) refusalEvidence(traced, refused, logged uint64) []Evidence {
	var out []Evidence
	if refused > 0 {
		out = append(out, Evidence{"packets refused because the table was full", strconv.FormatUint(refused, 10), fromStats + ": drop without insert_failed"})
	}
	if traced > 0 {
		out = append(out, Evidence{"packets without an entry dropped at nf_hook_slow", strconv.FormatUint(traced, 10), fromTracer})
	}
	if logged > 0 {
		value := number(logged, "time")
		if s := f.KernelLog.Suppressed; s > 0 && s < implausible {
			value += fmt.Sprintf(", %d more suppressed", s)
		}
		out = append(out, Evidence{`"table full, dropping packet"`, value, fromLog})
	}
	if n, _ := f.stat("early_drop"); n > 0 {
		out = append(out, Evidence{"half-open entries evicted to make room", strconv.FormatUint(n, 10), fromStats + ": early_drop"})
	}
	if n, _ := f.counter("TcpExt.TCPSynRetrans"); n > 0 {
		out = append(out, Evidence{"SYNs that programs here had to retransmit (a consequence)", strconv.FormatUint(n, 10), fromNetstat + ": TCPSynRetrans"})
	}
	return out
}

// tableEvidence is how full the table is and with what.
func (f facts) tableEvidence() []Evidence {
	out := f.fillEvidence()
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return out
	}
	t := f.Conntrack.Table
	if state, n := most(t.ByState); n > 0 {
		out = append(out, Evidence{"most common TCP state", fmt.Sprintf("%s: %s (%s)", state, plural.Count(n, "entry"), percent.Whole(share(n, t.Entries))), fromDump})
	}
	for _, top := range []struct {
		what    string
		talkers []snapshot.Talker
	}{{"source with most entries", t.Sources}, {"destination with most entries", t.Destinations}} {
		if len(top.talkers) == 0 || share(top.talkers[0].Entries, t.Entries) < worthNaming {
			continue
		}
		who := top.talkers[0]
		out = append(out, Evidence{top.what, fmt.Sprintf("%s: %s (%s)", who.Addr, plural.Count(who.Entries, "entry"), percent.Whole(share(who.Entries, t.Entries))), fromDump})
	}
	return out
}

// worthNaming is the share of the table from which an address is named.
const worthNaming = 0.10

// fillEvidence is how full the table is.
func (f facts) fillEvidence() []Evidence {
	ct := f.Conntrack
	if ct == nil {
		return nil
	}
	return []Evidence{{"entries", fmt.Sprintf("%d of %d (%s)", ct.Count, ct.Max, percent.Whole(share(ct.Count, ct.Max))),
		fromSettings + ": nf_conntrack_count, nf_conntrack_max"}}
}

// most is the key with the largest value; of equal ones the first by name.
func most(m map[string]uint64) (key string, n uint64) {
	for k, v := range m {
		if v > n || v == n && k < key {
			key, n = k, v
		}
	}
	return key, n
}

const (
	// tableMemoryShare is how much of the machine's memory a full table may take:
	// what tune allows unless it is told otherwise.
	tableMemoryShare = 0.10

	// headRoom is how much more than the demand the new limit holds, before it is
	// rounded up to a power of two.
	headRoom = 1.25

	// growAtMost bounds one step against the larger of limit and hash: refused
	// packets are counted, not connections, and a client sends its SYN several
	// times. If it was too little, the doctor says so again.
	growAtMost = 4

	// Where the kernel's sizes can't be read (slab information is root's): an entry
	// with the extension of a translated flow on older kernels, one pointer.
	assumedEntryBytes  = 512
	assumedBucketBytes = 8

	// entrySeconds is how long a short connection keeps its entry: the kernel's
	// default time-out of TIME_WAIT.
	entrySeconds = 120

	// shortTimeWait is what TIME_WAIT may be cut to: the state only catches
	// packets that come late, and those are not half a minute late.
	shortTimeWait = 30
)

// tableGrowth is a larger table as commands and as settings.
type tableGrowth struct {
	settings []snapshot.Setting
	remedy   []string
}

// growTable works out the limit that this machine needs when it refused that many packets
// in the window, and what else makes room.
func (f facts) growTable(refused uint64) tableGrowth {
	var g tableGrowth
	if limit, ok := f.limit(); ok {
		g.size(f, limit, refused)
	} else {
		g.remedy = append(g.remedy, "# the size of the table could not be read; as root:", f.natkit("conntrack memory"), f.natkit("tune plan"))
	}
	if s, ok := f.shortenTimeWait(); ok {
		g.settings = append(g.settings, s)
		g.remedy = append(g.remedy, "# most entries are closed connections; shorten their timeout:", f.set(s))
	}
	if s, ok := f.shortenEstablished(); ok {
		g.remedy = append(g.remedy, "# most entries are open connections. Those whose endpoints have vanished stay for days; one day is more than keepalive needs:", f.set(s))
	}
	g.whoFills(f)
	if len(g.settings) > 0 {
		g.remedy = append(g.remedy, "# all settings above at once, with memory cost, journal and rollback:",
			f.natkit("tune plan"), f.natkit("tune apply"))
	}
	return g
}

func (g *tableGrowth) size(f facts, limit, refused uint64) {
	ct := f.Conntrack
	entry, bucket := ct.ObjectBytes+ct.ExtensionBytes, ct.BucketBytes
	if ct.ObjectBytes < 128 || ct.ObjectBytes > 1<<16 || ct.ExtensionBytes > 1<<16 {
		entry = assumedEntryBytes
	}
	if bucket < 8 || bucket > 64 {
		bucket = assumedBucketBytes
	}
	demand := headRoom * (float64(max(ct.Count, ct.CountStart)) + f.perSecond(refused)*entrySeconds)
	most := growAtMost * float64(max(limit, min(ct.Buckets, 1<<30)))
	// At least one entry for each bucket, the kernel's own default: the hash is paid for.
	want := powerOfTwo(min(max(demand, 2*float64(limit), float64(min(ct.Buckets, 1<<30))), most))
	allowed := float64(f.Host.MemoryBytes) * tableMemoryShare
	for want > limit && float64(want)*float64(entry+bucket) > allowed {
		want /= 2
	}
	if f.Host.MemoryBytes == 0 {
		if twice := powerOfTwo(2 * float64(limit)); twice > limit {
			g.remedy = append(g.remedy, fmt.Sprintf("# the memory of this machine is not known; an entry takes %d bytes, and twice the limit would be:", entry),
				"sysctl -w net.netfilter.nf_conntrack_max="+strconv.FormatUint(twice, 10))
		}
		return
	}
	if want <= limit {
		g.remedy = append(g.remedy, fmt.Sprintf("# a larger table would take more than %s of this machine's %s of memory: make room instead",
			percent.Whole(tableMemoryShare), amount(f.Host.MemoryBytes)))
		return
	}
	if ct.Buckets > 0 && want > ct.Buckets {
		g.settings = append(g.settings, snapshot.Setting{Name: "net.netfilter.nf_conntrack_buckets", Value: strconv.FormatUint(want, 10)})
	}
	g.settings = append(g.settings, snapshot.Setting{Name: "net.netfilter.nf_conntrack_max", Value: strconv.FormatUint(want, 10)})
	where := ""
	switch {
	case f.Netns.Init:
	case f.Netns.Name == "":
		where = "; one limit for all namespaces: run it on the host, not in this container"
	default:
		where = "; one limit for all namespaces, written in the initial one"
	}
	g.remedy = append(g.remedy, fmt.Sprintf("# room for %s (%s when full)%s:", plural.Count(want, "entry"), amount(want*entry+want*bucket), where))
	for _, s := range g.settings {
		g.remedy = append(g.remedy, f.set(s))
	}
}

// whoFills names the source or the destination that holds most of the table, if
// one does.
func (g *tableGrowth) whoFills(f facts) {
	if f.Conntrack == nil || f.Conntrack.Table == nil {
		return
	}
	t := f.Conntrack.Table
	for _, end := range []struct {
		talkers      []snapshot.Talker
		what, option string
	}{{t.Sources, "connections of %s are", "-s"}, {t.Destinations, "connections to %s are", "-d"}} {
		if len(end.talkers) == 0 || !end.talkers[0].Addr.IsValid() || share(end.talkers[0].Entries, t.Entries) < 0.5 {
			continue
		}
		who := end.talkers[0]
		g.remedy = append(g.remedy,
			fmt.Sprintf("# "+end.what+" %s of the entries; to make room at once, end them:", who.Addr, percent.Whole(share(who.Entries, t.Entries))),
			f.run("conntrack -D"+conntrackFamily(who.Addr)+" "+end.option+" "+who.Addr.String()))
		return
	}
}

// shortenTimeWait is a shorter time-out for TIME_WAIT, where that makes room.
func (f facts) shortenTimeWait() (snapshot.Setting, bool) {
	if f.Conntrack == nil || f.Conntrack.Table == nil ||
		share(f.Conntrack.Table.ByState["TIME_WAIT"], f.Conntrack.Table.Entries) < timeWaitDominant {
		return snapshot.Setting{}, false
	}
	s := f.local("net.netfilter.nf_conntrack_tcp_timeout_time_wait", shortTimeWait)
	now, known := f.sysctl(s.Name)
	return s, !known || now > shortTimeWait
}

// shortenEstablished is a shorter time-out for open connections where they are
// most of the table. It is a proposal, no setting of the finding: tune knows what
// this machine's keepalive needs.
func (f facts) shortenEstablished() (snapshot.Setting, bool) {
	if f.Conntrack == nil || f.Conntrack.Table == nil ||
		share(f.Conntrack.Table.ByState["ESTABLISHED"], f.Conntrack.Table.Entries) < 0.5 {
		return snapshot.Setting{}, false
	}
	s := f.local("net.netfilter.nf_conntrack_tcp_timeout_established", day)
	now, known := f.sysctl(s.Name)
	return s, known && now > day
}

// powerOfTwo rounds up, within what the kernel takes.
func powerOfTwo(x float64) uint64 {
	if !(x < 1<<30) {
		return 1 << 30
	}
	if x <= 1 {
		return 1
	}
	n := uint64(x)
	if float64(n) < x {
		n++
	}
	return 1 << bits.Len64(n-1)
}
