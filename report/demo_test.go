// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"natkit/bench"
	"natkit/story"
)

// The published figures have columns and a footnote where there are any.
func TestDemoPublished(t *testing.T) {
	for _, published := range []*story.Published{nil, {Completed: 100000, RequestsPerSecond: 6576}} {
		var b strings.Builder
		d := &story.DemoResult{Restored: true, Acts: []story.DemoAct{{Name: story.ActBaseline, HTTP: &bench.HTTPResult{Completed: 1000}, Published: published}}}
		if err := Demo(&b, d, false); err != nil {
			t.Fatal(err)
		}
		got, want := strings.Count(b.String(), "elsewhere")+strings.Count(b.String(), "other people's"), 0
		if published != nil {
			want = 2
		}
		if got != want {
			t.Errorf("published %v: %d places speak of it, want %d:\n%s", published, got, want, b.String())
		}
	}
}
