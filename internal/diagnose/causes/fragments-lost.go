// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	fragmentsFew   = 5
	fragmentsShare = 0.01 // of all packets that were to be put together: a warning
	fragmentsMost  = 0.10 // critical
	// fragmentsRoom is the kernel's own limit of memory for fragments (Linux 6.18).
	fragmentsRoom = 4 << 20
)

var fragmentsLost = Cause{
	Code:     "fragments-lost",
	Title:    "Fragmented packets are not reassembled",
	Headline: "Large UDP packets are lost: fragment reassembly failed",
	Search: []string{
		"nstat IpReasmFails",
		"nstat IpReasmTimeout",
		"packet reassembles failed",
		"Frag reassembly time exceeded",
		"reason: FRAG_REASM_TIMEOUT",
		"reason: FRAG_TOO_FAR",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(fragmentsFew, "packets not reassembled"), portion(fragmentsShare, "of those to be reassembled")},
	Needs:         []string{snapshot.CanCounters, snapshot.CanDrops, snapshot.CanSysctls},
	Symptom:       "Large UDP packets vanish (DNS with DNSSEC, IKE, RADIUS, tunnels, video). Small ones and TCP work.",
	Proof:         fmt.Sprintf("Connection tracking and local sockets reassemble fragments first. This failed (Ip.ReasmFails) for at least %s of the packets concerned: a warning, from %s critical. Failures that are not timeouts (Ip.ReasmTimeout) are fragments that found no memory: net.ipv4.ipfrag_high_thresh, a limit of each namespace (checked on Linux 6.18), is too small, unless the tracer saw them dropped as FRAG_TOO_FAR: then more than net.ipv4.ipfrag_max_dist fragments of the same sender came between. Timeouts are packets whose other fragments never arrived.", percent.Whole(fragmentsShare), percent.Whole(fragmentsMost)),
	FalsePositive: "Single fragments whose other parts were lost on the path, and scans made of first fragments alone, beside packets that are reassembled.",
	Cure:          "If fragments find no memory, raise the limit. If the others never arrive, send smaller packets (EDNS 1232 bytes, IKE fragmentation, a smaller tunnel MTU): many networks drop fragments.",
	judge:         judgeFragments,
}

func judgeFragments(f facts) *verdict {
	fails, _ := f.counter("Ip.ReasmFails")
	timeouts, timeoutsKnown := f.counter("Ip.ReasmTimeout")
	done, doneKnown := f.counter("Ip.ReasmOKs")
	traced, rows, _ := f.dropped(snapshot.CauseFragment)
	if f.Counters == nil {
		fails, timeouts = traced, traced
	}
	if fails < f.few(fragmentsFew) {
		return nil
	}
	part := share(fails, saturate(fails, done))
	v := &verdict{impact: float64(fails)}
	switch {
	case !doneKnown:
		v.Severity = Warning
	case part < f.part(fragmentsShare):
		v.Severity = Advice
	case part >= fragmentsMost:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	full := fails - min(fails, timeouts) // found no room
	crowded := timeoutsKnown && full >= f.few(fragmentsFew) && full > timeouts/10
	var far uint64 // fragments of packets that were given up, however much memory there was
	for _, row := range rows {
		if row.Reason == "FRAG_TOO_FAR" {
			far = saturate(far, row.Count)
		}
	}
	overtaken := crowded && far > full/2
	v.Title = fmt.Sprintf("%s not reassembled in time %s, %s of the fragmented ones", number(timeouts, "packet"), f.window(), percent.Whole(part))
	switch {
	case overtaken:
		v.Title = fmt.Sprintf("%s given up %s: too many others of the sender came between", number(full, "fragmented packet"), f.window())
	case crowded:
		v.Title = fmt.Sprintf("%s found no memory for reassembly %s", number(full, "fragment"), f.window())
	}
	v.Evidence = f.fragmentEvidence(rows)
	v.Why = "A fragment that waits for the others uses memory until they arrive or half a minute has passed. While that memory is used up, no other fragmented packet gets through. A packet is lost if one of its fragments is lost."
	switch {
	case overtaken:
		v.Remedy = []string{"# a packet is given up when more than ipfrag_max_dist (64) other fragments of its sender arrive before its own; with many flows from one address (a tunnel, a NAT) do not limit that:",
			f.set(f.local("net.ipv4.ipfrag_max_dist", 0))}
	case crowded:
		if room := f.fragmentRoom(); f.enough(room) {
			v.Remedy = []string{"# waiting fragments may use much memory already: find the source of those that are never completed:"}
		} else {
			v.Settings = []snapshot.Setting{room}
			v.Remedy = []string{"# room for more waiting fragments; if an attacker fills it with first fragments, find the source instead:", f.set(room)}
		}
	default:
		v.Remedy = []string{"# fragments are lost before they arrive here. See whose they are, and let that program or tunnel send smaller packets:"}
	}
	v.Remedy = append(v.Remedy, f.natkit("drops --for 40s"))
	v.Verify = f.look(f.run("nstat -az IpReasmFails IpReasmTimeout IpReasmOKs"), f.run("grep FRAG /proc/net/sockstat"))
	return v
}

// fragmentEvidence is what shows that fragments were lost, and where they were dropped.
func (f facts) fragmentEvidence(rows []snapshot.Drop) (out []Evidence) {
	fails, _ := f.counter("Ip.ReasmFails")
	timeouts, timeoutsKnown := f.counter("Ip.ReasmTimeout")
	done, doneKnown := f.counter("Ip.ReasmOKs")
	traced, _, _ := f.dropped(snapshot.CauseFragment)
	if f.Counters != nil {
		out = append(out, Evidence{"failed reassemblies", strconv.FormatUint(fails, 10), fromSnmp + ": Ip ReasmFails"})
	}
	if timeoutsKnown {
		out = append(out, Evidence{"of them because fragments were missing at the timeout", strconv.FormatUint(timeouts, 10), fromSnmp + ": Ip ReasmTimeout"})
	}
	if doneKnown {
		out = append(out, Evidence{"packets reassembled", strconv.FormatUint(done, 10), fromSnmp + ": Ip ReasmOKs"})
	}
	if traced > 0 {
		out = append(out, Evidence{"fragments dropped", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	out = append(out, sampleEvidence(rows)...)
	if room, known := f.sysctl("net.ipv4.ipfrag_high_thresh"); known {
		out = append(out, Evidence{"net.ipv4.ipfrag_high_thresh", strconv.FormatInt(room, 10), fromSettings})
	}
	return out
}

// fragmentRoom is more memory for fragments that wait, as far as a twentieth of the machine's.
func (f facts) fragmentRoom() snapshot.Setting {
	want := uint64(fragmentsRoom)
	if room, known := f.sysctl("net.ipv4.ipfrag_high_thresh"); known && room > 0 && room < implausible {
		want = max(want, min(4*uint64(room), f.Host.MemoryBytes/20))
	}
	return f.local("net.ipv4.ipfrag_high_thresh", want)
}
