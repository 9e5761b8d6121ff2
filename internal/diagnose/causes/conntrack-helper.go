// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
)

// helperDropsMany is how many lines about dropped packets are more than a scanner's
// broken requests.
const helperDropsMany = 10

var conntrackHelper = Cause{
	Code:     "conntrack-helper",
	Title:    "Conntrack helpers read and rewrite the content of connections",
	Headline: "nf_ct_sip: dropping packet: conntrack helpers break SIP or FTP",
	Search: []string{
		"nf_ct_sip: dropping packet",
		"nf_ct_ftp: dropping packet",
		"SIP ALG",
		"nf_conntrack_sip",
		"net.netfilter.nf_conntrack_helper",
	},
	Severities:    []Severity{Advice, Warning},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanSysctls, snapshot.CanConntrackStats, snapshot.CanKernelLog},
	Symptom:       "SIP calls without sound, FTP that breaks on its data connection, ports opened that nobody asked for. CPUs are busy in nf_nat_sip or nf_nat_ftp.",
	Proof:         fmt.Sprintf("The kernel logged during the window that a helper dropped packets (nf_ct_sip: dropping packet): from %d lines a warning, fewer are advice. Connections with a helper are advice. So is nf_conntrack_helper=1, which gives every connection to a helper's port that helper; newer kernels have no such setting (6.18 does not) and assign helpers only by rules.", helperDropsMany),
	FalsePositive: "Active FTP, PPTP or TFTP through NAT needs its helper. Helpers that are loaded but not assigned cost nothing.",
	Cure:          "Assign helpers only by a rule for the servers that need one. SIP rarely needs one: its endpoints have their own methods.",
	judge:         judgeHelper,
}

func judgeHelper(f facts) *verdict {
	automatic := f.local("net.netfilter.nf_conntrack_helper", 0)
	on, _ := f.sysctl(automatic.Name)
	helped, names := f.helped()
	var drops uint64
	if f.KernelLog != nil && f.KernelLog.HelperDrops < implausible {
		drops = f.KernelLog.HelperDrops
	}
	if on != 1 && helped == 0 && drops == 0 {
		return nil
	}
	v := &verdict{impact: float64(saturate(drops, helped))}
	v.Severity = Advice
	if drops >= helperDropsMany {
		v.Severity = Warning
	}
	switch {
	case drops > 0:
		v.Title = fmt.Sprintf("a conntrack helper dropped packets %s", f.window())
		v.Evidence = append(v.Evidence, Evidence{`"nf_ct_...: dropping packet"`, number(drops, "time"), fromLog})
		for _, line := range f.KernelLog.Lines {
			if strings.Contains(line, "nf_ct_") {
				v.Evidence = append(v.Evidence, Evidence{"one of them", line, fromLog})
				break
			}
		}
	case helped > 0:
		v.Title = fmt.Sprintf("%s read by conntrack helpers", number(helped, "connection"))
	default:
		v.Title = "connections get a conntrack helper by their port alone"
	}
	if helped > 0 {
		v.Evidence = append(v.Evidence, Evidence{"connections with a helper", strings.Join(names, ", "), fromDump})
	}
	if on == 1 {
		v.Evidence = append(v.Evidence, Evidence{automatic.Name, "1", fromSettings})
	}
	for _, column := range []string{"expect_new", "expect_create"} {
		if n, _ := f.stat(column); n > 0 {
			v.Evidence = append(v.Evidence, Evidence{"new connections that helpers expect", strconv.FormatUint(n, 10), fromStats + ": " + column})
			break
		}
	}
	v.Why = "A helper searches each packet of its connections for addresses, rewrites them, and admits the connection that they announce. Anyone who can send to such a port can open others, " +
		"and the helper may drop what it does not understand."
	if on == 1 {
		v.Remedy = append(v.Remedy, "# assign helpers by rules only; add rules for the servers that need one first:", f.set(automatic))
		v.Settings = []snapshot.Setting{provided(automatic, "no server here needs a helper, or a rule assigns it to those that do")}
	}
	v.Remedy = append(v.Remedy, "# see which rules assign helpers, and delete those that no server needs; existing flows keep theirs until they end:",
		f.run("nft -a list ruleset"), f.run("iptables-save -t raw"))
	v.Verify = []string{f.run("conntrack -L -o extended"), f.run("conntrack -L expect")}
	return v
}

// helped is how many connections have a helper, and how many each.
func (f facts) helped() (helped uint64, names []string) {
	if f.Conntrack != nil && f.Conntrack.Table != nil {
		by := f.Conntrack.Table.ByHelper
		for _, name := range slices.Sorted(maps.Keys(by)) {
			if n := by[name]; n > 0 && n < implausible {
				helped = saturate(helped, n)
				names = append(names, fmt.Sprintf("%s: %d", orUnknown(name), n))
			}
		}
	}
	return helped, names
}
