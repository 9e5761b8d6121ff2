// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"maps"

	"natkit/internal/snapshot"
)

// Machine judges the namespaces of one machine, one after the other: what they
// share and one of them shows is left out of those after it.
type Machine struct{ told map[string]bool }

// Judge is the function of this name for the next namespace.
func (m *Machine) Judge(s *snapshot.Snapshot) []Finding { return m.Once(Judge(s)) }

// Once leaves out of the findings of the next namespace those of the whole machine that another one has shown.
func (m *Machine) Once(findings []Finding) []Finding {
	shared := map[string]bool{}
	for _, c := range catalogue {
		shared[c.Code] = c.Host
	}
	here := map[string]bool{}
	var untold func(findings []Finding) []Finding
	untold = func(findings []Finding) (out []Finding) {
		for _, f := range findings {
			f.Consequences = untold(f.Consequences)
			if shared[f.Code] && m.told[f.Code] {
				out = append(out, f.Consequences...) // not the machine's, or it would be untold as well
				continue
			}
			here[f.Code] = true
			out = append(out, f)
		}
		return out
	}
	out := untold(findings)
	if m.told == nil {
		m.told = map[string]bool{}
	}
	maps.Copy(m.told, here)
	return out
}
