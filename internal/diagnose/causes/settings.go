// SPDX-License-Identifier: Apache-2.0

package causes

import "natkit/internal/snapshot"

// Settings is what the findings would have package tune change, most important
// first, each with its finding's code and title as reason. What a finding
// explains is included: until the cause is gone, a change there helps as well.
func Settings(findings []Finding) []snapshot.Setting {
	var out []snapshot.Setting
	for _, f := range findings {
		for _, s := range f.Settings {
			s.Code, s.Reason = f.Code, f.Title
			out = append(out, s)
		}
		out = append(out, Settings(f.Consequences)...)
	}
	return out
}
