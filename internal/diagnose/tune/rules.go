// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math/bits"
	"strconv"

	"natkit/internal/snapshot"
)

const (
	// nearlyFull is how full the table is when it is due to grow, whether or not a
	// finding asks for it.
	nearlyFull = 0.90
	// pressed is how full it is when time-outs begin to matter: in a table with
	// room, dead entries do no damage.
	pressed = 0.50
	// dominant is the share of the entries that one TCP state must have before its
	// time-out is shortened.
	dominant = 0.30
)

// limitRule is for a table that is nearly full while no finding says how large
// it should be: the doctor asks for nothing that would take more memory than it
// thinks right, but the user may (PlanOptions.MemoryShare), and otherwise is
// told what it would need.
func limitRule(ct *snapshot.Conntrack) (snapshot.Setting, bool) {
	count := max(ct.Count, ct.CountStart)
	if ct.Max == 0 || float64(count) < nearlyFull*float64(ct.Max) {
		return snapshot.Setting{}, false
	}
	return wanted(settingMax, powerOfTwo(mul(2, ct.Max)), fmt.Sprintf("%d of %d entries are in use: room for twice as many", count, ct.Max)), true
}

// bucketsRule lets the hash grow with the limit, to as many buckets as entries:
// the kernel's own proportion. Each flow stands in two buckets, so that a full
// table then has two entries a bucket.
func bucketsRule(ct *snapshot.Conntrack, limit uint64) (snapshot.Setting, bool) {
	if ct.Buckets == 0 || limit <= ct.Buckets || limit <= ct.Max {
		return snapshot.Setting{}, false
	}
	return wanted(settingBuckets, powerOfTwo(limit), fmt.Sprintf("the hash grows with the limit: %d entries in %d buckets would be %.1f in each",
		limit, ct.Buckets, 2*float64(limit)/float64(ct.Buckets))), true
}

// timeoutRules says which TCP time-outs are too long for a table under pressure
// and by how much. They need a dump of the table.
func timeoutRules(s *snapshot.Snapshot) []snapshot.Setting {
	ct := s.Conntrack
	if ct == nil || ct.Table == nil || ct.Table.Entries == 0 || ct.Max == 0 || float64(ct.Count) < pressed*float64(ct.Max) {
		return nil
	}
	var out []snapshot.Setting
	for _, r := range []struct {
		state, timeout string
		seconds        uint64
		why            string
	}{
		{"TIME_WAIT", "tcp_timeout_time_wait", 30, "closed connections, kept only for late packets"},
		{"CLOSE_WAIT", "tcp_timeout_close_wait", 60, "closed by one side"},
		{"SYN_SENT", "tcp_timeout_syn_sent", 60, "connections that never got a reply"},
		{"ESTABLISHED", "tcp_timeout_established", establishedSeconds(s), "a connection whose endpoints have vanished stays this long"},
	} {
		entries := ct.Table.ByState[r.state]
		if float64(entries) < dominant*float64(ct.Table.Entries) {
			continue
		}
		name := "net.netfilter.nf_conntrack_" + r.timeout
		// Only downwards: a shorter time-out is somebody's decision.
		if now, err := strconv.ParseUint(s.Sysctls[name], 10, 64); err != nil || now <= r.seconds {
			continue
		}
		out = append(out, wanted(name, r.seconds, fmt.Sprintf("%d of %d entries (%.0f %%) are in %s: %s",
			entries, ct.Table.Entries, 100*float64(entries)/float64(ct.Table.Entries), r.state, r.why)))
	}
	return out
}

// establishedSeconds is a day, or longer where keepalive needs longer to show
// that an idle connection is alive: time, then its probes. It must never be
// shorter than that, or idle connections break.
func establishedSeconds(s *snapshot.Snapshot) uint64 {
	const day = 86400
	number := func(name string, otherwise uint64) uint64 {
		n, err := strconv.ParseUint(s.Sysctls[name], 10, 31)
		if err != nil {
			return otherwise
		}
		return n
	}
	alive := number("net.ipv4.tcp_keepalive_time", 7200) +
		number("net.ipv4.tcp_keepalive_probes", 9)*number("net.ipv4.tcp_keepalive_intvl", 75)
	return min(max(day, alive+60), maxSeconds)
}

func wanted(name string, value uint64, reason string) snapshot.Setting {
	return snapshot.Setting{Name: name, Value: strconv.FormatUint(value, 10), Reason: reason}
}

// powerOfTwo rounds up, within what the kernel takes.
func powerOfTwo(n uint64) uint64 {
	if n > 1<<30 {
		return 1 << 30
	}
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len64(n-1)
}
