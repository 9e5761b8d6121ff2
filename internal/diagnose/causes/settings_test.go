// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"slices"
	"testing"

	"natkit/internal/snapshot"
)

func TestSettings(t *testing.T) {
	got := Settings([]Finding{
		{Code: "a", Title: "A", Settings: []snapshot.Setting{{Name: "x", Value: "1"}},
			Consequences: []Finding{{Code: "b", Title: "B", Settings: []snapshot.Setting{{Name: "y", Value: "2"}}}}},
		{Code: "c", Title: "C"},
		{Code: "d", Title: "D", Settings: []snapshot.Setting{{Name: "x", Value: "3"}}},
	})
	want := []snapshot.Setting{
		{Name: "x", Value: "1", Code: "a", Reason: "A"},
		{Name: "y", Value: "2", Code: "b", Reason: "B"},
		{Name: "x", Value: "3", Code: "d", Reason: "D"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("settings %+v\nwant %+v", got, want)
	}
}
