// SPDX-License-Identifier: Apache-2.0

package report_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
)

// A comment stays one, and no terminal obeys what was in a file.
func TestImportedCommentsAreHarmless(t *testing.T) {
	rules := "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -i eth0 -p tcp --dport 80 -m comment --comment \"a\u009b2J\u202eb\" -m time --timestart 10:00 -j DNAT --to-destination 10.0.0.2\nCOMMIT\n"
	imported, err := nft.Import(strings.NewReader(rules), nft.ImportOptions{Name: "a\u009bb\u2028c", Inside: []string{"eth1"}, Outside: []string{"eth0"}})
	if err != nil {
		t.Fatal(err)
	}
	var text, object bytes.Buffer
	if err := errors.Join(report.ImportYAML(&text, imported), report.JSON(&object, report.Import(imported))); err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{text.String(), object.String()} {
		if strings.ContainsAny(got, "\u009b\u202e\u2028") {
			t.Errorf("%q", got)
		}
	}
	var back struct {
		Differences []struct{ Rule string }
	}
	if err := json.Unmarshal(object.Bytes(), &back); err != nil || len(back.Differences) != 2 || !strings.Contains(back.Differences[1].Rule, "a\u009b2J\u202eb") {
		t.Errorf("the JSON has lost the text: %v, %s", err, &object)
	}
}

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
