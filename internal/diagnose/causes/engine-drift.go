// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"

	"natkit/internal/snapshot"
)

var engineDrift = Cause{
	Code:     "engine-drift",
	Title:    "The machine no longer matches what the eBPF engine was configured for",
	Headline: "Traffic stops after an interface or address changed under natkit up",
	Search: []string{
		"NAT stops after an interface was recreated",
		"natkit up: external address changed",
	},
	Severities:    []Severity{Warning, Critical},
	Explains:      []string{"answers-lost", "clients-unreached", "backend-silent", "martian-drop"},
	Needs:         []string{snapshot.CanEngine},
	Symptom:       "After an interface was recreated or got another address, its traffic is no longer translated, or is translated to an address that nobody has.",
	Proof:         "natkit compares what the engine knows of interfaces, addresses, programs, settings and its nftables table with the machine. It is critical if an interface carries no program, the table is gone, or the masquerade address is another; otherwise a warning.",
	FalsePositive: "A change that `natkit serve` follows by itself, within seconds.",
	Cure:          "Apply the rule file again, or run `natkit serve`, which applies it after every change.",
	judge:         judgeEngineDrift,
}

func judgeEngineDrift(f facts) *verdict {
	e := f.Engine
	if e == nil {
		return nil
	}
	if e.Accelerates() {
		return f.accelDrift()
	}
	drift := e.Drift
	if e.Served { // it follows what can be followed
		drift = nil
		for _, d := range e.Drift {
			if d.Waits {
				drift = append(drift, d)
			}
		}
	}
	if len(drift) == 0 {
		return nil
	}
	v := &verdict{impact: float64(len(drift))}
	v.Severity = Warning
	first := drift[0]
	if i := slices.IndexFunc(drift, func(d snapshot.EngineDrift) bool { return d.Stops }); i >= 0 {
		v.Severity, first = Critical, drift[i]
	}
	v.Title = fmt.Sprintf("engine %s is out of date: %s", e.Kind, first.What)
	waits := true
	for _, d := range drift {
		v.Evidence = append(v.Evidence, Evidence{"changed since the rules were applied", d.What, "natkit status"})
		waits = waits && d.Waits
	}
	v.Why = "The engine learned interfaces, addresses and routes when the rules were applied. It does not know later changes: such packets leave untranslated, or are dropped."
	if waits {
		v.Remedy = append(v.Remedy, "# it must exist again first; then:")
	}
	if e.Served {
		v.Remedy = append(v.Remedy, "# natkit serve waits for it, and then applies the file")
	} else {
		v.Remedy = append(v.Remedy, f.apply(), "# natkit serve does this whenever something changes: "+f.natkit(f.onFile("serve", e.Flags...)))
	}
	v.Verify = f.look(f.natkit("status"))
	return v
}

// accelDrift is what natkit accel can't go on with. Its packets take the kernel's way, which
// is slower and loses nothing.
func (f facts) accelDrift() *verdict {
	if len(f.Engine.Problems) == 0 {
		return nil
	}
	v := &verdict{impact: float64(len(f.Engine.Problems))}
	v.Severity = Warning
	v.Title = "natkit accel no longer matches the machine"
	for _, p := range f.Engine.Problems {
		v.Evidence = append(v.Evidence, Evidence{"problem", p, "natkit accel status"})
	}
	v.Why = "Packets that accel no longer recognizes take the kernel stack: slower, but nothing is lost. The exception: if connection tracking checks TCP windows again, it breaks accelerated connections."
	v.Remedy = []string{"# the line of each problem above says what to do:", f.natkit("accel status")}
	v.Verify = f.look(f.natkit("accel status"))
	return v
}
