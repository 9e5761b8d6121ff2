// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// pressedShare is how full the table is when a limit that was meant to be larger
// begins to matter.
const pressedShare = 0.75

var conntrackLimitInContainer = Cause{
	Code:     "conntrack-limit-in-container",
	Title:    "The table's limit is set in a container, where it has no effect",
	Headline: "nf_conntrack_max in a container has no effect: Read-only file system, permission denied",
	Search: []string{
		`sysctl: setting key "net.netfilter.nf_conntrack_max": Read-only file system`,
		`sysctl: permission denied on key "net.netfilter.nf_conntrack_max"`,
		"net.netfilter.nf_conntrack_max in docker",
	},
	Severities:    []Severity{Advice, Warning},
	Needs:         []string{snapshot.CanConntrack, snapshot.CanOwners},
	Symptom:       "The limit was raised in the container's or pod's settings, and the table is still full at the old limit.",
	Proof:         fmt.Sprintf("This is not the initial network namespace, and a file here sets nf_conntrack_max or nf_conntrack_buckets above the value in force. It is a warning if the table is at %s of the limit, else advice. In all other namespaces these files are read-only, even for root (on Linux 6.18). The host has one limit, though each namespace counts for itself.", percent.Whole(pressedShare)),
	FalsePositive: "The same in the initial namespace: there the setting is only not applied yet. Timeouts, which a container may set for itself.",
	Cure:          "Set it on the host.",
	NoLab:         "a lab's namespaces have the host's files; a container with its own files is needed",
	judge:         judgeLimitInContainer,
}

func judgeLimitInContainer(f facts) *verdict {
	if f.Netns.Init || f.Netns.Name != "" || f.Conntrack == nil {
		return nil
	}
	ct := f.Conntrack
	v := &verdict{}
	for _, o := range f.Owners {
		now := map[string]uint64{"net.netfilter.nf_conntrack_max": ct.Max, "net.netfilter.nf_conntrack_buckets": ct.Buckets}[o.Setting]
		want, err := strconv.ParseUint(o.Value, 10, 32)
		if now == 0 || err != nil || want <= now || o.Who != "sysctl.d" {
			continue
		}
		if v.Title == "" {
			v.Title = fmt.Sprintf("%s=%d in %s has no effect; %d applies", strings.TrimPrefix(o.Setting, "net.netfilter."), want, o.Where, now)
			v.Remedy = append(v.Remedy, "# on the host, not in this container:")
		}
		v.Evidence = append(v.Evidence,
			Evidence{"wanted by " + o.Where, fmt.Sprintf("%s = %d", o.Setting, want), o.Who},
			Evidence{"in force", strconv.FormatUint(now, 10), fromSettings + ": " + o.Setting})
		s := snapshot.Setting{Name: o.Setting, Value: strconv.FormatUint(want, 10)}
		v.Remedy = append(v.Remedy, f.set(s))
		v.Settings = append(v.Settings, provided(s, "the host should use this container's value for all its namespaces"))
	}
	if v.Title == "" {
		return nil
	}
	v.Severity = Advice
	if share(max(ct.Count, ct.CountStart), ct.Max) >= pressedShare {
		v.Severity = Warning
	}
	v.impact = share(ct.Count, ct.Max)
	v.Evidence = append(v.Evidence, f.fillEvidence()...)
	v.Why = "The limit and the hash belong to the host. Every namespace counts its own entries against the one limit, and only the initial one can change it; a container that tries gets an error, or a line in its log."
	v.Verify = []string{f.run("sysctl net.netfilter.nf_conntrack_max net.netfilter.nf_conntrack_buckets")}
	return v
}
