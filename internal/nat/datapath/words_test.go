// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
)

// enumOf gives the names of an enum of bpf/nat/abi.h, in order, without the last, which
// counts them.
func enumOf(t *testing.T, name string) []string {
	t.Helper()
	return enumIn(t, "../../../bpf/nat/abi.h", name)
}

func enumIn(t *testing.T, path, name string) []string {
	t.Helper()
	header, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(header), "")
	_, text, found := strings.Cut(text, "enum "+name+" {")
	body, _, closed := strings.Cut(text, "}")
	if !found || !closed || strings.Contains(body, "=") {
		t.Fatalf("enum %s is not as this test reads it: %q", name, body)
	}
	names := strings.FieldsFunc(body, func(c rune) bool { return c == ',' || c == ' ' || c == '\t' || c == '\n' })
	return names[:len(names)-1]
}

// Reasons have the numbers that the programs count them by, and their names and kinds.
func TestReasonsAreThoseOfTheContract(t *testing.T) {
	names := enumOf(t, "nat_reason")
	if len(names) != len(rulefile.Reasons) || len(names) != int(abiNatReasonNAT_REASONS) {
		t.Fatalf("%d reasons in bpf/nat/abi.h, %d in package rulefile, %d generated", len(names), len(rulefile.Reasons), abiNatReasonNAT_REASONS)
	}
	seen := map[string]bool{}
	for i, name := range names {
		got := rulefile.Reasons[i]
		kind, rest := "counted", strings.TrimPrefix(name, "NAT_")
		for prefix, of := range map[string]string{"PASS_": "passed", "DROP_": "dropped", "TRANSLATED_": "translated"} {
			if after, ok := strings.CutPrefix(rest, prefix); ok {
				kind = of
				if of != "translated" {
					rest = after
				}
			}
		}
		if name == "NAT_PASS_TO_TC" { // the packet's end is counted by tc
			kind = "counted"
		}
		word := strings.ReplaceAll(strings.ToLower(rest), "_", "-")
		// What the stack answers inside and the engine outside has the side in its name.
		if got.Name != word && got.Name != "outbound-"+word && got.Name != "inbound-"+word || got.Kind != kind || got.Means == "" {
			t.Errorf("%s is number %d: %+v", name, i, got)
		}
		if seen[got.Name] {
			t.Errorf("%q is the name of two reasons", got.Name)
		}
		seen[got.Name] = true
	}
}

func TestTimeoutsAreThoseOfTheContract(t *testing.T) {
	names := enumOf(t, "nat_timeout")
	if known := len(rulefile.Timeouts{}); len(names) != known || known != int(abiNatTimeoutNAT_TIMEOUTS) {
		t.Fatalf("%d time-outs in bpf/nat/abi.h, %d in package rulefile, %d generated", len(names), known, abiNatTimeoutNAT_TIMEOUTS)
	}
	for i, name := range names {
		if got := "NAT_TIMEOUT_" + strings.ToUpper(rulefile.Timeout(i).String()); got != name {
			t.Errorf("time-out %d is %s in package rulefile and %s in bpf/nat/abi.h", i, got, name)
		}
	}
}

// What a rule file may ask for is what the maps can hold.
func TestBoundsAreThoseOfTheContract(t *testing.T) {
	for _, bound := range []struct {
		what       string
		file, maps int
	}{
		{"interfaces", rulefile.MaxLinks, int(abiNatLimitNAT_MAX_LINKS)},
		{"pools", rulefile.MaxPools, int(abiNatLimitNAT_MAX_POOLS)},
		{"addresses", rulefile.MaxAddresses, int(abiNatLimitNAT_MAX_ADDRESSES)},
		{"sessions", rulefile.MaxSessions, int(abiNatRefsNAT_REFS_COUNT)},
		{"classes with ports", rulefile.PortClasses, int(abiNatClassNAT_PORT_CLASSES)},
		{"class of the others", int(rulefile.ClassOther), int(abiNatClassNAT_OTHER)},
		{"class icmp", int(rulefile.ClassICMP), int(abiNatClassNAT_ICMP)},
	} {
		if bound.file != bound.maps {
			t.Errorf("%s: %d in package rulefile, %d in bpf/nat/abi.h", bound.what, bound.file, bound.maps)
		}
	}
}
