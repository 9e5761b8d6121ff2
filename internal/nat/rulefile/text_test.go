// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"slices"
	"testing"
)

func TestSettings(t *testing.T) {
	f, err := Parse("f", []byte(`inside: [in]
outside: [out]
pools:
  one: {addresses: [203.0.113.1]}
  two: {addresses: [203.0.113.8/30], blocks: {size: 128}}
defaults: {mss: clamp}
limits: {sessions: 5000}
subscribers: {by: address, classes: {default: {ports: 9}, shops: {of: [10.0.0.0/24], sessions: 7}}}
log: {record: blocks}
rules:
- {snat: 10.0.0.0/8, to: two}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"inside: [in]", "outside: [out]",
		"pools.one: {addresses: [203.0.113.1]}", "pools.two: {addresses: [203.0.113.8/30], blocks: {size: 128, extra: 128, at_most: 7}}",
		"defaults.mss: clamp", "limits.sessions: 5000",
		"subscribers.by: address", "subscribers.classes.default: {ports: 9}", "subscribers.classes.shops: {of: [10.0.0.0/24], sessions: 7}",
		"log.record: blocks",
	}
	if got := f.Settings(); !slices.Equal(got, want) {
		t.Errorf("got\n%q, want\n%q", got, want)
	}
	f.Rules = nil
	if got := f.Settings(); !slices.Equal(got, want) {
		t.Errorf("without rules %q", got)
	}
}
