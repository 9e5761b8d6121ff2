// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"encoding/json"
	"testing"
)

func TestRuleIDs(t *testing.T) {
	f := must(Parse("f", []byte(rulesFile("- masquerade: 10.0.0.0/8\n- exclude: 10.0.0.0/8 -> any\n- map: 10.1.0.0/24 <-> 100.0.0.0/24\n"))))
	ids := f.RuleIDs()
	var again []RuleID
	if err := json.Unmarshal(must(json.Marshal(ids)), &again); err != nil || len(again) != 3 || again[0] != ids[0] || again[2] != ids[2] {
		t.Errorf("%v became %v: %v", ids, again, err)
	}
	// A rule keeps its id when others come and go, and two rules never share one.
	f.Rules = f.Rules[1:]
	if got := f.RuleIDs(); got[0] != ids[1] || got[1] != ids[2] {
		t.Errorf("%v were %v", got, ids[1:])
	}
	f.Rules[1] = f.Rules[0]
	if got := f.RuleIDs(); got[0] != ids[1] || got[1] == got[0] {
		t.Errorf("the same text twice: %v", got)
	}
}
