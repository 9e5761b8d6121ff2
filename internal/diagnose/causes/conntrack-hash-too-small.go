// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

const (
	// longChain is the mean number of entries in a bucket that makes the hash the
	// cost of a look-up. A full table has 2 with the kernel's own default of one
	// bucket for each entry of the limit (an entry stands in two buckets), and had
	// 8 with the default of kernels before 5.15; this is half as much again.
	longChain = 12.0

	// longChainAtLimit is the same for the table at its limit: twice the longest
	// that the kernel chooses itself (a limit of 8 times the hash, when a hash size
	// is given as module parameter). It is a plan that can't work: the kernel
	// refuses entries in chains of 50 to 80.
	longChainAtLimit = 32.0
)

var conntrackHashTooSmall = Cause{
	Code:     "conntrack-hash-too-small",
	Title:    "The conntrack hash has too few buckets",
	Headline: "conntrack lookups are slow, chaintoolong rises: nf_conntrack_buckets is too small",
	Search: []string{
		"conntrack -S: chaintoolong",
		"net.netfilter.nf_conntrack_buckets",
		"nf_conntrack hashsize",
		"perf: __nf_conntrack_find_get",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Needs:         []string{snapshot.CanConntrack, snapshot.CanConntrackStats},
	Symptom:       "Each packet costs more as connections increase. CPUs are busy in __nf_conntrack_find_get. At worst, new flows are dropped in a table with room.",
	Proof:         fmt.Sprintf("The mean chain is twice the entries of all namespaces divided by the number of buckets. From %.0f it is a warning. Refused entries (chaintoolong) are critical if chance alone makes chains that long. A limit that allows a mean chain above %.0f is advice.", longChain, longChainAtLimit),
	FalsePositive: "A full table with as many buckets as entries has chains of 2, one with a quarter as many buckets chains of 8: kernels choose both sizes themselves. Without slab information natkit counts only the entries of this namespace.",
	Cure:          "Use more buckets, at 8 bytes each. The kernel moves the entries to the new hash while it runs.",
	Host:          true,
	judge:         judgeHash,
}

func judgeHash(f facts) *verdict {
	ct := f.Conntrack
	if ct == nil || ct.Buckets == 0 || ct.Buckets >= implausible {
		return nil
	}
	entries, source := ct.Count, fromSettings+": nf_conntrack_count"
	if ct.HostObjects > entries {
		entries, source = ct.HostObjects, fromSlab+": nf_conntrack, all namespaces"
	}
	if entries >= implausible {
		return nil
	}
	chain := 2 * float64(entries) / float64(ct.Buckets)
	limit, limited := f.limit()
	atLimit := 2 * float64(limit) / float64(ct.Buckets)
	tooLong, _ := f.stat("chaintoolong")

	v := &verdict{}
	switch {
	case tooLong > 0 && chain >= evenChain:
		v.Severity = Critical
		v.impact = float64(tooLong)
		v.Title = fmt.Sprintf("%s refused %s because their hash chain is too long", number(tooLong, "entry"), f.window())
	case chain >= longChain:
		v.Severity = Warning
		v.impact = min(1, chain/(2*longChainAtLimit))
		v.Title = fmt.Sprintf("the conntrack hash has %s for %s: %.0f per bucket", plural.Count(ct.Buckets, "bucket"), plural.Count(entries, "entry"), chain)
	case limited && atLimit > longChainAtLimit:
		v.Severity = Advice
		v.Title = fmt.Sprintf("the conntrack hash has %s for a limit of %d entries", plural.Count(ct.Buckets, "bucket"), limit)
	default:
		return nil
	}
	v.Evidence = []Evidence{
		{"buckets", strconv.FormatUint(ct.Buckets, 10), fromSettings + ": nf_conntrack_buckets"},
		{"entries", strconv.FormatUint(entries, 10), source},
		{"mean chain (each entry is in two buckets)", fmt.Sprintf("%.1f", chain), "2 x entries / buckets"},
	}
	if limited {
		v.Evidence = append(v.Evidence, Evidence{"mean chain when the table is full", fmt.Sprintf("%.1f", atLimit), "2 x nf_conntrack_max / buckets"})
	}
	if tooLong > 0 {
		v.Evidence = append(v.Evidence, Evidence{"entries refused", strconv.FormatUint(tooLong, 10), fromStats + ": chaintoolong"})
	}
	if n, _ := f.stat("search_restart"); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"lookups that had to restart", strconv.FormatUint(n, 10), fromStats + ": search_restart"})
	}
	v.Why = "Every packet looks up its connection in the hash and walks the chain of its bucket entry by entry; the first packet of a connection walks two chains to the end. " +
		"Chains of 50 and more are refused: new connections are then dropped although the table has room."

	f.moreBuckets(v, max(entries, limit))
	v.Verify = f.look(f.natkit("conntrack memory"))
	return v
}

// moreBuckets sizes the hash for so many entries, as far as memory allows.
func (f facts) moreBuckets(v *verdict, entries uint64) {
	ct := f.Conntrack
	bucket := ct.BucketBytes
	if bucket < 8 || bucket > 64 {
		bucket = assumedBucketBytes
	}
	want := powerOfTwo(float64(entries))
	for want > ct.Buckets && float64(want*bucket) > float64(f.Host.MemoryBytes)*tableMemoryShare {
		want /= 2
	}
	switch {
	case want > ct.Buckets:
		s := snapshot.Setting{Name: "net.netfilter.nf_conntrack_buckets", Value: strconv.FormatUint(want, 10)}
		v.Settings = []snapshot.Setting{s}
		remark := fmt.Sprintf("# one hash for all namespaces, %s for %s:", amount(want*bucket), plural.Count(want, "bucket"))
		if !f.Netns.Init && f.Netns.Name == "" {
			remark = fmt.Sprintf("# one hash for all namespaces, %s for %s; on the host, not in this container:", amount(want*bucket), plural.Count(want, "bucket"))
		}
		v.Remedy = []string{remark, f.set(s), "# the same, with memory cost, journal and rollback:", f.natkit("tune plan"), f.natkit("tune apply")}
	case f.Host.MemoryBytes == 0:
		v.Remedy = []string{fmt.Sprintf("# more buckets, of %d bytes each; natkit does not know how much memory this machine has:", bucket), f.natkit("conntrack memory")}
	default:
		v.Remedy = []string{"# more buckets do not fit in memory, or do not help if single chains are long: see who opens so many similar flows", f.natkit("conntrack top --by source")}
	}
}
