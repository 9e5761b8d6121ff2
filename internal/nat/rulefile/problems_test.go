// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Files of testdata are refused with what stands behind signs # at their end, line by
// line: all problems, each at its place.
func TestProblems(t *testing.T) {
	files := must(filepath.Glob("testdata/*.yaml"))
	for _, name := range files {
		data := must(os.ReadFile(name))
		var want []string
		for line := range strings.Lines(string(data)) {
			if text, ok := strings.CutPrefix(line, "#"); ok {
				want = append(want, strings.TrimSpace(text))
			}
		}
		_, err := Parse("f", data)
		if err == nil {
			t.Fatalf("%s is accepted", name)
		}
		if got := strings.Split(err.Error(), "\n"); !slices.Equal(got, want) {
			t.Errorf("%s: got\n# %s\nwant\n# %s", name, strings.Join(got, "\n# "), strings.Join(want, "\n# "))
		}
	}
}

// rulesFile is a file with these rules, which begin in line 8.
func rulesFile(rules string) string {
	return `inside: [eth1, eth2]
outside: [eth0, wan]
pools:
  office: {addresses: 100.64.0.0/28}
  whole: {addresses: [100.65.0.0/30], ports: none}
limits: {sessions: 1000}
rules:
` + rules
}

// What does not fit together is reported at the later rule; what looks alike and fits is not.
func TestTies(t *testing.T) {
	for _, c := range []struct{ rules, want string }{
		{"- masquerade: 10.0.0.0/8\n- snat: 10.0.0.0/8\n  to: office", `9:3: rule "snat 10.0.0.0/8" ties with "masquerade 10.0.0.0/8" in line 8`},
		{"- masquerade: 10.0.0.0/8\n- snat: 10.0.0.0/9\n  to: office", ""},
		{"- masquerade: 10.0.0.0/8\n- snat: 10.0.0.0/8\n  to: office\n  in: eth1", ""},
		{"- map: 10.0.0.0/24 <-> 100.0.0.0/24\n- snat: 10.0.0.0/24\n  to: office", `9:3: rule "snat 10.0.0.0/24" ties`},
		{"- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.2", `10:3: rule "dnat tcp 1.2.3.4:80" ties`},
		{"- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.1\n- dnat: udp 1.2.3.4:80\n  to: 10.0.0.2\n- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.2\n  in: eth0", ""},
		{"- dnat: tcp 1.2.3.4:80-90\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.2\n- dnat: tcp 1.2.3.4\n  to: 10.0.0.2", ""},
		{"- dnat: tcp 1.2.3.4:80-90\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:85-86\n  to: 10.0.0.2", `10:3: rule "dnat tcp 1.2.3.4:85-86" ties`},
		{"- dnat: tcp 1.2.3.4:85-86\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:95-96\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:95-99\n  to: 10.0.0.2", `12:3: rule "dnat tcp 1.2.3.4:95-99" ties with "dnat tcp 1.2.3.4:95-96" in line 10`},
		{"- dnat: tcp 1.2.3.4:80-99\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:70-80\n  to: 10.0.0.1\n- dnat: tcp 1.2.3.4:60-69\n  to: 10.0.0.2", `10:3: rule "dnat tcp 1.2.3.4:70-80" ties with "dnat tcp 1.2.3.4:80-99" in line 8`},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n- map: 10.0.0.2 <-> 100.0.0.1", `9:3: rule "map 10.0.0.2 <-> 100.0.0.1" ties`},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n- dnat: 100.0.0.1\n  to: 10.0.0.2", `9:3: rule "dnat 100.0.0.1" ties`},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n- dnat: tcp 100.0.0.1\n  to: 10.0.0.2", ""},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n  out: eth0\n- map: 10.0.0.2 <-> 100.0.0.1\n  out: wan", `10:3: rule "map 10.0.0.2 <-> 100.0.0.1" ties`}, // from inside
		{"- map: 10.0.0.1 <-> 100.0.0.1\n  out: eth0\n- map: 10.0.0.2 <-> 100.0.0.1", ""},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n  in: eth1\n  out: eth0\n- map: 10.0.0.2 <-> 100.0.0.1\n  in: eth2\n  out: wan", ""},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n  in: eth1\n  out: eth0\n- dnat: 100.0.0.1\n  to: 10.0.0.2\n  in: eth0", `11:3: rule "dnat 100.0.0.1" ties`},
		{"- map: 10.0.0.1 <-> 100.0.0.1\n  in: eth1\n  out: eth0\n- dnat: 100.0.0.1\n  to: 10.0.0.2\n  in: wan", ""},
		{"- dnat: 100.0.0.1\n  to: 10.0.0.2\n  in: wan\n- map: 10.0.0.1 <-> 100.0.0.1\n  in: eth1", `11:3: rule "map 10.0.0.1 <-> 100.0.0.1" ties`},
		{"- exclude: 10.0.0.0/8 -> any\n- exclude: 10.0.0.0/8 -> any", `9:3: rule "exclude 10.0.0.0/8 -> any" ties`},
		{"- masquerade: 10.0.0.0/8\n  ports: 2000-3000\n- masquerade: 10.0.0.0/9\n  out: eth0", `10:3: the rule "masquerade 10.0.0.0/8" in line 8 gives ports 2000-3000 of the same address, this one all ports`},
		{"- masquerade: 10.0.0.0/8\n  ports: 2000-3000\n  out: wan\n- masquerade: 10.0.0.0/9\n  out: eth0", ""},
		{"- snat: 10.0.0.0/8\n  to: 1.2.3.4\n- snat: 10.0.0.0/9\n  to: 1.2.3.4\n  ports: 2000-3000", `10:3: the rule "snat 10.0.0.0/8" in line 8 gives all ports of the same address, this one ports 2000-3000`},
		{"- snat: 10.0.0.0/8\n  to: 100.64.0.3", "8:3: 100.64.0.3 of rule snat to 100.64.0.3 overlaps 100.64.0.0/28 of pool office in line 4"},
		{"- map: 10.0.0.0/24 <-> 100.65.0.0/24", "8:3: 100.65.0.0/24 is mapped, and 100.65.0.0/30 of pool whole in line 5 is given to other hosts"},
		{"- masquerade: 10.0.0.0/8\n  in: eth0", "8:3: in: \"eth0\" is an outside interface"},
		{"- masquerade: 10.0.0.0/8\n  in: eth0\n  out: eth1", ""},
		{"- map: 10.0.0.0/24 <-> 100.0.0.0/24\n  in: eth0", "8:3: a map is bound as internal hosts see it"},
		{"- dnat: tcp 1.2.3.4:80\n  to: 10.0.0.1\n  in: eth7", `8:3: in: "eth7" is not among`},
	} {
		_, err := Parse("f", []byte(rulesFile(c.rules)))
		switch {
		case err == nil && c.want != "":
			t.Errorf("accepted:\n%s\nwant %s", c.rules, c.want)
		case err != nil && c.want == "":
			t.Errorf("%v\n%s", err, c.rules)
		case err != nil && (!strings.HasPrefix(err.Error(), "f:"+c.want) || strings.Contains(err.Error(), "\n")):
			t.Errorf("got  %v\nwant f:%s\n%s", err, c.want, c.rules)
		}
	}
}

// An interface of both sides is one of each: who comes in there comes from inside and from outside.
func TestTiesOneArmed(t *testing.T) {
	for _, c := range []struct{ rules, want string }{
		{"- {dnat: 192.0.2.1, to: 10.0.0.1, in: arm}\n- {map: 10.0.0.2 <-> 192.0.2.1, in: eth1}", `5:4: rule "map 10.0.0.2 <-> 192.0.2.1" ties`},
		{"- {map: 10.0.0.2 <-> 192.0.2.1, in: eth1, out: arm}\n- {map: 10.0.0.3 <-> 192.0.2.1, in: arm, out: eth0}", `5:4: rule "map 10.0.0.3 <-> 192.0.2.1" ties`},
		{"- {map: 10.0.0.2 <-> 192.0.2.1, in: eth1, out: eth0}\n- {map: 10.0.0.3 <-> 192.0.2.1, in: arm, out: arm}", ""},
		{"- {map: 10.0.0.2 <-> 192.0.2.1, out: arm}", ""},
		{"- {masquerade: 10.0.0.0/24, in: arm}\n- {snat: 10.0.0.0/24, to: 192.0.2.7, in: arm, out: arm}", ""},
	} {
		_, err := Parse("f", []byte("inside: [eth1, arm]\noutside: [eth0, arm]\nrules:\n"+c.rules))
		if err == nil && c.want != "" || err != nil && (c.want == "" || !strings.HasPrefix(err.Error(), "f:"+c.want)) {
			t.Errorf("%v, want %q\n%s", err, c.want, c.rules)
		}
	}
}

// A file may be anything: it costs little, and is answered.
func TestHostileFiles(t *testing.T) {
	many := func(s string, n int) string { return strings.Repeat(s, n) }
	names := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "v%d, ", i)
		}
		return b.String()
	}
	for what, c := range map[string]struct{ text, want string }{
		"empty":            {"", "f:1:1: the file is empty"},
		"comment":          {"# nothing\n", "f:1:1: the file is empty"},
		"large":            {many("#", maxFileBytes+1), "f: the file is larger than 16 MiB"},
		"many values":      {"[" + many("a,", maxItems+1), "f: the file has 600001 lines and commas, of at most 600000"},
		"deep":             {"rules: " + many("[", 100000), "nested more than 16 deep"},
		"deep blocks":      {"rules:\n" + many("- ", 100000), "nested more than 16 deep"},
		"billion laughs":   {"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ninside: *c\n", "f:4:9: an alias"},
		"anchor":           {"inside: &x [eth1]\noutside: eth0", "f:1:9: an anchor"},
		"merge":            {"<<: {inside: eth1}\ninside: eth1\noutside: eth0", `f:1:1: unknown key "<<"`},
		"tag":              {"inside: !!str eth1\noutside: eth0", "f:1:9: a tag"},
		"binary":           {"inside: !!binary aGk=\noutside: eth0", "f:1:9: a tag"},
		"two documents":    {"inside: eth1\noutside: eth0\n---\nrules: []", "f:3:1: a second document"},
		"list":             {"- inside", "f:1:1: a rule file must be keys with values"},
		"map as key":       {"{a: b}: c\ninside: eth1\noutside: eth0", "f:1:1: a key of a rule file must be a word"},
		"not text":         {"inside: \xff\xfe", "f:1:9: byte 0xFF is not UTF-8"},
		"too many links":   {"inside: [" + names(300) + "]\noutside: eth0", "301 interfaces, of at most 255"},
		"too many pools":   {"inside: eth1\noutside: eth0\nrules:\n" + manySNAT(300), "300 pools, addresses of snat rules and interfaces masqueraded behind, of at most 254"},
		"too many of pool": {"inside: eth1\noutside: eth0\npools: {a: {addresses: 10.0.0.0/15}}", "131072 external addresses in pools and rules, of at most 65536"},
	} {
		_, err := Parse("f", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %.200v, want %s", what, err, c.want)
		}
	}

	var found Problems
	_, err := Parse("f", []byte("inside: eth1\noutside: eth0\nrules:\n"+many("- wrong: 1\n", 5000)))
	if !errors.As(err, &found) || len(found) != maxProblems+1 || found[maxProblems].Message != "and 4900 more problems" {
		t.Errorf("%d problems, the last %v", len(found), found[len(found)-1])
	}
}

func manySNAT(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "- {snat: 10.0.%d.%d, to: 20.0.%d.%d}\n", i>>8, i&255, i>>8, i&255)
	}
	return b.String()
}

func TestWarnings(t *testing.T) {
	f := must(Parse("f", []byte(`inside: eth1
outside: eth0
pools:
  unused: {addresses: 100.64.0.0/28, ports: 2000-2010}
defaults:
  timeouts: {udp: 119s, tcp_transitory: 100s, tcp_closing: 240s, port_hold_down: 2h}
limits: {sessions: 10, mappings: 20, sessions_per_source: 30}
`)))
	want := []string{
		"f: no rules: nothing is translated",
		"f:4:3: no rule uses pool unused",
		"f:4:3: pool unused gives 11 ports an address: not many hosts can share them",
		"f:6:14: time-out udp of 119s is less than RFC 4787 REQ-5 asks for, 120s",
		"f:6:25: time-out tcp_opening of 100s is less than RFC 5382 REQ-5 asks for, 240s",
		"f:6:25: time-out tcp_reset of 100s is less than RFC 7857 section 2.2 asks for, 240s",
		"f:6:66: ports are in hold-down for 7200s: no other host gets them for so long",
		"f:7:24: mappings is more than sessions: a mapping lives by its sessions, so many are never used",
		"f:7:38: sessions_per_source is more than sessions: it limits nothing",
	}
	var got []string
	for _, w := range f.Warnings() {
		got = append(got, w.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	f = must(Parse("f", []byte(`inside: eth1
outside: eth0
pools: {whole: {addresses: 100.64.0.0/28, ports: none}}
defaults: {mapping: {udp: address-and-port-dependent}, filtering: address-dependent}
rules:
  - masquerade: 10.0.0.0/8
  - {masquerade: 10.1.0.0/16, filtering: address-and-port-dependent}
  - {masquerade: 10.2.0.0/16, mapping: endpoint-independent}
  - {snat: 10.3.0.0/16, to: whole}
`)))
	if w := f.Warnings(); len(w) != 1 || w[0].String() != "f:6:5: filtering address-dependent of udp is address-and-port-dependent, as mapping is: such a port serves one remote address and port" {
		t.Errorf("modes: %v", w)
	}
}

// Rules in use outlive the natkit that wrote them down: their keys are taken by earlier names.
func TestRecordedKeepsRenamedKeys(t *testing.T) {
	text, err := os.ReadFile("testdata/renamed-key.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text = []byte(strings.Replace(string(text), "120s", "150s", 1))
	f, err := ParseRecorded("f", text)
	if err != nil || f.Defaults.Timeouts[TimeoutHoldDown] != 150*time.Second {
		t.Errorf("%v, %+v", err, f)
	}
}
