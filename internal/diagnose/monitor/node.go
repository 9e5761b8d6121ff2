// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"errors"
	"maps"

	"natkit/internal/diagnose/fleet"
)

// node is what is on now, as natkit fleet report reads it.
func (m *monitor) node() ([]byte, error) {
	m.mu.Lock()
	st := &m.state
	n := &fleet.Node{Name: st.hostname, At: st.at, Namespaces: len(st.titles), Findings: []fleet.Finding{}, Configuration: maps.Clone(st.configuration)}
	for _, a := range st.active {
		n.Findings = append(n.Findings, fleet.Finding{Code: a.Finding.Code, Severity: a.Finding.Severity, Title: a.Finding.Title, Namespace: Title(a.Netns), Since: a.Since})
	}
	m.mu.Unlock()
	if n.Configuration == nil {
		return nil, errors.New("the host was not examined yet: ask again in a minute")
	}
	return fleet.Marshal(n)
}
