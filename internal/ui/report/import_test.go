// SPDX-License-Identifier: Apache-2.0

package report_test

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
)

// What is imported is a rule file with the same rules.
func TestImportIsARuleFile(t *testing.T) {
	names, err := filepath.Glob("../../nat/nft/testdata/import/*.iptables")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		imported, err := nft.Import(bytes.NewReader(data), nft.ImportOptions{
			Name: "a\nb", Inside: []string{"eth1", "0x10"}, Outside: []string{"eth0"}, Local: []netip.Addr{netip.MustParseAddr("203.0.113.5")},
		})
		if err != nil {
			t.Fatal(err)
		}
		var text bytes.Buffer
		if err := report.ImportYAML(&text, imported); err != nil {
			t.Fatal(err)
		}
		f, err := rulefile.Parse(name, text.Bytes())
		if err != nil {
			t.Errorf("%v\n%s", err, &text)
			continue
		}
		view := report.Import(imported)
		if len(f.Rules) != len(view.Rules) || len(f.Rules) == 0 || strings.Join(f.Inside, " ") != "0x10 eth1" {
			t.Errorf("%s: %d rules, %v", name, len(f.Rules), f.Inside)
			continue
		}
		for i := range f.Rules {
			if got := f.Rules[i].String(); got != view.Rules[i] {
				t.Errorf("%q is read as %q", view.Rules[i], got)
			}
		}
	}
}
