// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"reflect"
	"testing"

	"natkit/internal/snapshot"
)

func TestTranslators(t *testing.T) {
	nat := func(kind string, n int) map[string]int { return map[string]int{kind: n} }
	got := Translators([]snapshot.Chain{
		{Backend: "nft", Family: "ip", Table: "filter", Name: "DOCKER", Rules: 9},
		{Backend: "nft", Family: "ip", Table: "own", Name: "post", Rules: 1, NATRules: nat("masquerade", 1)},
		{Backend: "nft", Family: "ip", Table: "nat", Name: "POSTROUTING", Rules: 2, NATRules: nat("masquerade", 2)},
		{Backend: "nft", Family: "ip", Table: "nat", Name: "DOCKER", Rules: 2, NATRules: nat("dnat", 1)},
		{Backend: "nft", Family: "ip", Table: "nat", Name: "LIBVIRT_PRT", Rules: 0},
	})
	want := []Translator{
		{Backend: "nft", Family: "ip", Table: "nat", Rules: 3, Programs: []string{"Docker", "libvirt"}},
		{Backend: "nft", Family: "ip", Table: "own", Rules: 1},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
