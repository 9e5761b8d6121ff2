// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

// AutomaticShare is how much of the memory a table may take that natkit enlarges by itself.
const AutomaticShare = 0.25

// automatic are the settings that natkit changes without being asked for each (natkit monitor
// --tune apply), with the largest value that it gives them; 0 is bounded by memory alone. More of
// each is more room and takes nothing from anybody but memory and processor time, at once and
// without a restart. Those of one family are changed together.
var automatic = map[string]struct {
	family string
	most   uint64
}{
	settingMax:                              {"table", 0},
	settingBuckets:                          {"table", 0},
	"net.netfilter.nf_conntrack_expect_max": {"expectations", 1 << 16},
	"net.core.netdev_max_backlog":           {"backlog", 1 << 15},
	"net.core.netdev_budget":                {"budget", 2400},
	"net.core.netdev_budget_usecs":          {"budget", 16000},
	"net.ipv4.tcp_max_syn_backlog":          {"half-open", 1 << 16},
	"net.ipv4.ipfrag_high_thresh":           {"fragments", 256 << 20},
	"net.ipv4.ipfrag_low_thresh":            {"fragments", 256 << 20},
	"net.ipv4.neigh.default.gc_thresh1":     {"neighbours", 1 << 16},
	"net.ipv4.neigh.default.gc_thresh2":     {"neighbours", 1 << 17},
	"net.ipv4.neigh.default.gc_thresh3":     {"neighbours", 1 << 18},
	"net.ipv6.neigh.default.gc_thresh1":     {"neighbours of IPv6", 1 << 16},
	"net.ipv6.neigh.default.gc_thresh2":     {"neighbours of IPv6", 1 << 17},
	"net.ipv6.neigh.default.gc_thresh3":     {"neighbours of IPv6", 1 << 18},
}

// Automatic is the list of settings that natkit changes by itself, in order.
func Automatic() (names []string) {
	for name := range automatic {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// OfMachine says whether a setting has one value for the whole machine.
func OfMachine(name string) bool {
	k, err := find(name)
	return err == nil && k.scope == ScopeHost
}

// MakeStep is the next step of what the findings want, small enough to be made by itself: settings
// of Automatic alone, each at most doubled, the table within AutomaticShare of the memory, and
// none that somebody else sets. It holds the settings of one purpose: the most important that is
// possible. What is wanted and not possible stands in Refused.
func MakeStep(s *snapshot.Snapshot, wanted []snapshot.Setting) (*Plan, error) {
	small := slices.Clone(wanted)
	for i := range small {
		small[i].Value = doubled(s, small[i])
	}
	whole, err := MakePlan(s, PlanOptions{Wanted: small, MemoryShare: AutomaticShare})
	if err != nil {
		return nil, err
	}
	step := *whole
	step.Changes, step.Refused = []Change{}, slices.DeleteFunc(slices.Clone(whole.Refused), func(r Refusal) bool {
		return automatic[r.Setting].family == "" || r.If != ""
	})
	families, impossible := map[string][]Change{}, map[string]bool{}
	for _, c := range whole.Changes {
		a, ok := automatic[c.Setting]
		if !ok {
			continue
		}
		var why string
		if c.New, why = stepOf(c, a.most); why == "" && len(c.Owners) > 0 {
			why = fmt.Sprintf("%s sets it in %s: change it there", c.Owners[0].Who, c.Owners[0].Where)
		}
		if why != "" {
			step.Refused = append(step.Refused, Refusal{Setting: c.Setting, Netns: c.Netns, Value: c.New, Code: c.Code, Why: why})
			impossible[a.family] = true // all of them or none
			continue
		}
		families[a.family] = append(families[a.family], c)
	}
	for _, w := range small { // the most important first
		if family := automatic[w.Name].family; len(families[family]) > 0 && !impossible[family] {
			step.Changes = families[family]
			break
		}
	}
	return &step, nil
}

// doubled is a wanted value, at most twice of what is there.
func doubled(s *snapshot.Snapshot, w snapshot.Setting) string {
	k, err := find(w.Name)
	if _, ok := automatic[w.Name]; err != nil || !ok {
		return w.Value
	}
	now, err := strconv.ParseUint((&planner{facts: s}).present(k), 10, 63)
	value, err2 := strconv.ParseUint(w.Value, 10, 63)
	if err != nil || err2 != nil || now == 0 {
		return w.Value
	}
	return strconv.FormatUint(min(value, mul(2, now)), 10)
}

// stepOf is the value after one step: what is wanted, at most twice of what is there and never above most.
func stepOf(c Change, most uint64) (value, why string) {
	old, err := strconv.ParseUint(c.Old, 10, 63)
	wanted, err2 := strconv.ParseUint(c.New, 10, 63)
	if err != nil || err2 != nil || old == 0 {
		return c.New, "its current value is not known, or is no limit"
	}
	next := min(wanted, mul(2, old))
	if most > 0 {
		next = min(next, most)
	}
	if next <= old {
		return c.New, fmt.Sprintf("it is at %d, the most that natkit gives it by itself", old)
	}
	return strconv.FormatUint(next, 10), ""
}
