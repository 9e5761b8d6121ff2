// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
)

// Reasons of acceleration have the numbers that the programs count them by.
func TestAccelReasonsAreThoseOfTheContract(t *testing.T) {
	names := enumIn(t, "../../../bpf/accel/entry.h", "nat_accel_reason")
	if len(names) != len(rulefile.AccelReasons) || len(names) != int(abiNatAccelReasonNAT_ACCEL_REASONS) {
		t.Fatalf("%d reasons in bpf/accel/entry.h, %d in package rulefile, %d generated", len(names), len(rulefile.AccelReasons), abiNatAccelReasonNAT_ACCEL_REASONS)
	}
	for i, name := range names {
		word := strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, "NAT_ACCEL_")), "_", "-")
		if got := rulefile.AccelReasons[i]; got.Name != word || got.Means == "" {
			t.Errorf("%s is number %d: %+v", name, i, got)
		}
	}
}
