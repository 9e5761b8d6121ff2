// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"strings"
	"testing"
)

// head begins a file whose rules begin in line 4.
const head = "inside: [eth1]\noutside: [eth0]\nrules:\n"

// hostile is texts that are no rule files, each with the one problem that is reported of it, or
// the first of several.
var hostile = []struct{ text, want string }{
	// addresses and prefixes
	{head + "- masquerade: 10.0.0.0/33", `4:15: want an IPv4 address, a prefix such as 10.0.0.0/8, or any, and not "10.0.0.0/33": a prefix has 32 bits at most, and 33 are named`},
	{head + "- masquerade: 10.0.0.0/99999999999999999999", `a prefix has 32 bits at most, and 99999999999999999999 are named`},
	{head + "- masquerade: 10.0.0.0/-1", `the length of a prefix is a number from 0 to 32, and not "-1"`},
	{head + "- masquerade: 10.0.0.0/", `the length behind / is missing, from 0 to 32`},
	{head + "- masquerade: 10.0.0.0/08", `08 begins with a zero; write /8`},
	{head + "- masquerade: 10.0.0.0/8/8", `the length of a prefix is a number from 0 to 32, and not "8/8"`},
	{head + "- masquerade: 10.0.0.0/255.0.0.0", `write the mask as its length, 10.0.0.0/8`},
	{head + "- masquerade: 10.0.0.0/255.0.255.0", `from 0 to 32, and not a mask`},
	{head + "- masquerade: 010.0.0.0/8", `4:15: want an IPv4 address, a prefix such as 10.0.0.0/8, or any, and not "010.0.0.0/8": 010 begins with a zero, which some programs read as octal; write 10`},
	{head + "- {snat: 10.0.0.0/8, to: 192.0.2.007}", `4:26: want an IPv4 address and not "192.0.2.007": 007 begins with a zero, which some programs read as octal; write 7`},
	{head + "- {dnat: tcp 192.0.02.1:80, to: 10.0.0.1}", `4:10: want an IPv4 address and not "192.0.02.1": 02 begins`},
	{head + "- {dnat: tcp 192.0.2.1:80, to: [10.0.0.1, 10.0.0.00]}", `4:43: want an IPv4 address and not "10.0.0.00": 00 begins with a zero, which some programs read as octal; write 0`},
	{head + "- map: 10.0.0.0/24 <-> 100.64.0.0/033", `4:8: want`},
	{head + "- exclude: 10.0.0.0/8 -> 010.0.0.0/8", `4:12: want`},
	{"inside: eth1\noutside: eth0\npools: {a: {addresses: [100.64.0.01]}}", `3:25: want an IPv4 address and not "100.64.0.01": 01 begins`},
	{"inside: eth1\noutside: eth0\npools: {a: {addresses: 100.64.0.1-100.64.0.010}}", `3:24: want an IPv4 address and not "100.64.0.010": 010 begins`},
	{head + "- masquerade: 10.0.0/8", `it has four numbers, and here are 3`},
	{head + "- masquerade: 10..0.1", `a number is missing between the dots`},
	{head + "- masquerade: 10.0.0.256", `256 is more than 255`},
	{head + "- masquerade: 0x0a.0.0.1", `it has numbers and dots only, and names of hosts are not looked up`},
	{head + "- masquerade: gateway.example", `names of hosts are not looked up`},
	{head + "- masquerade: 10.0.0.0 /8", `there is a space in it`},
	{head + `- masquerade: "10.0.0.1\0"`, `there is a control character in it, U+0000`},
	{head + "- masquerade: fe80::/10", `fe80::/10 is IPv6: only IPv4 is translated`},
	{head + "- masquerade: ::ffff:10.0.0.1", `only IPv4 is translated`},
	// ports and numbers
	{head + "- {dnat: tcp 192.0.2.1:0080, to: 10.0.0.1}", `0080 begins with a zero; write 80`},
	{head + "- {dnat: tcp 192.0.2.1:65536, to: 10.0.0.1}", `65536 is more than 65535`},
	{head + "- {dnat: tcp 192.0.2.1:80-, to: 10.0.0.1}", `a port is missing`},
	{head + "- {dnat: tcp 192.0.2.1:http, to: 10.0.0.1}", `"http" is not a number`},
	{"inside: eth1\noutside: eth0\nlimits: {sessions: 99999999999999999999}", `3:20: sessions is a number from 1 to 16777215, and not "99999999999999999999"`},
	{"inside: eth1\noutside: eth0\nlimits: {sessions: -1}", `3:20: sessions is a number from 1`},
	{"inside: eth1\noutside: eth0\nlimits: {sessions: [1]}", `3:20: sessions must be one value`},
	{"inside: eth1\noutside: eth0\ndefaults: {timeouts: {udp: 99999999999999h}}", `3:28: udp is a time such as 300s, 5m or 2h4m, and not "99999999999999h"`},
	// characters
	{head + "- masquerade: 10.0.0.0\x00/8", `4:23: a NUL byte: the file is not text, or is damaged`},
	{head + "- masquerade: 10.0.0.0/8 # caf\xe9", `4:31: byte 0xE9 is not UTF-8: save the file as UTF-8`},
	{"# é\r\ninside: e\xc3", `2:10: byte 0xC3 is not UTF-8`},
	{"inside: \xed\xa0\x80", `1:9: byte 0xED is not UTF-8`},
	{"inside: eth1\x1b[31m", `1:13: control character U+001B: delete it`},
	{"inside: eth\u202e1", `1:12: invisible character U+202E`},
	{"inside:\u00a0eth1", `1:8: invisible character U+00A0: replace it by a space, or delete it`},
	{"inside: eth1\n\ufeffoutside: eth0", `2:1: invisible character U+FEFF`},
	{"inside: eth1\u2028outside: eth0", `1:13: character U+2028, which some programs take for the end of a line`},
	{"\xff\xfei\x00n\x00", `1:1: the file is in UTF-16 or UTF-32: save it as UTF-8`},
	{"\xfe\xff\x00i", `1:1: the file is in UTF-16 or UTF-32`},
	{"\x7fELF\x02\x01", `1:1: control character U+007F`},
	// YAML
	{"inside: eth1\n\toutside: eth0", `2:1: a tab: YAML indents by spaces only`},
	{head + "-\tmasquerade: any", `4:2: a tab`},
	{"inside: [eth1\noutside: eth0", `2:8: the list is not closed, or a comma is missing: write [a, b] (it begins in line 1)`},
	{"pools: {a: {addresses: 10.0.0.1}\nrules: []", `the braces are not closed`},
	{"inside: 'eth1\n", `1:9: the quote is not closed`},
	{`inside: "eth\q"`, `an escape that does not exist`},
	{"inside: eth1: eth2", `1:13: a second colon in a line`},
	{"inside: @eth", `1:9: a value can't begin with '@': put it in quotes`},
	{"inside: [eth1]]", `1:`},
	{"inside: eth1\noutside", `a colon is missing behind the key`},
	{"- a\nb: c", `2:1: the line is not indented like the list's other dashes`},
	{"inside: &a [x, x]\noutside: *a", `1:9: an anchor`},
	{"inside: *x", `an alias: a rule file has none`},
	{"%YAML 9.9\n---\ninside: a", `1:1: a directive`},
	{"inside: !x!y eth1", `a tag: a rule file has none`},
	{strings.Repeat("{a: ", 1000), `1:65: lists and keys nested more than 16 deep`},
	{strings.Repeat("- ", 1000), `lists and keys nested more than 16 deep`},
	{"inside: |x\n x", `a rule file has no values of several lines`},
	// keys and values
	{"insid: eth1\noutside: eth0", `1:1: unknown key "insid" in a rule file; known keys: inside, outside, pools, defaults, limits, subscribers, pcp, log, rules; did you mean inside?`},
	{"inside: eth1\noutside: eth0\nRules: []", `did you mean rules?`},
	{"inside: eth1\noutside: eth0\npools: {a: {adresses: 10.0.0.1}}", `did you mean addresses?`},
	{"inside: eth1\noutside: eth0\ndefaults: {timeouts: {tcp-established: 3h}}", `did you mean tcp_established?`},
	{"inside: eth1\noutside: eth0\ndefaults: {mapping: endpoint-indepedent}", `did you mean endpoint-independent?`},
	{"inside: eth1\noutside: eth0\nlimits: {session: 5}", `did you mean sessions?`},
	{head + "- masqerade: any", `did you mean masquerade?`},
	{head + "- {masquerade: any, filterng: endpoint-independent}", `did you mean filtering?`},
	{head + "- {masquerade: any, in: ethh1}", `4:4: in: "ethh1" is not among the file's inside and outside interfaces; did you mean eth1?`},
	{"inside: eth0\noutside: eth0\nrules:\n- masquerade: any", `4:3: interface "eth0" is inside and outside, so the sources of rules say who is inside: name the prefix of the internal hosts, and not any`},
	{head + "- {dnat: tpc 192.0.2.1:80, to: 10.0.0.1}", `did you mean tcp?`},
	{"inside: eth1\noutside: eth0\npools: {office: {addresses: 100.64.0.0}}\nrules:\n- {snat: any, to: ofice}", `5:19: unknown pool "ofice"; did you mean office?`},
	{head + "- {masquerade: any, in: eth1, in: eth1}", `4:31: key "in" is in line 4 already`},
	{head + "- 5", `4:3: a rule must be keys with values`},
	{head + "- masquerade: {a: b}", `4:15: masquerade must be one value`},
	{"inside: eth1\noutside: eth0\nrules: 7", `3:8: rules must be a list, each rule behind a dash`},
	{"just text", `1:1: a rule file must be keys with values`},
	{"5", `1:1: a rule file must be keys with values`},
}

// What is wrong with a text is reported in plain words, with its place, and nothing besides
// that only follows from it.
func TestHostileTexts(t *testing.T) {
	for _, c := range hostile {
		_, err := Parse("f", []byte(c.text))
		if err == nil {
			t.Errorf("accepted: %.80q", c.text)
			continue
		}
		first, _, _ := strings.Cut(err.Error(), "\n")
		placed := strings.HasPrefix(first, "f:") && first[2] >= '1' && first[2] <= '9'
		if !strings.Contains(err.Error(), c.want) || !placed {
			t.Errorf("%.80q: %v, want %s", c.text, err, c.want)
		}
		for _, word := range foreignWords {
			if strings.Contains(err.Error(), word) {
				t.Errorf("%.80q: %v has the word %q", c.text, err, word)
			}
		}
	}
}

// Languages that need invisible characters, and marks of editors, are no problem where
// nobody can mistake them.
func TestTextsThatAreFine(t *testing.T) {
	for _, text := range []string{
		"\ufeff" + head, strings.ReplaceAll(head, "\n", "\r\n"), strings.ReplaceAll(head, "\n", "\r"),
		"# \u200fעברית\u200e \u00a0x\n" + head, head + "- masquerade: any # \u200d👩\u200d🔧\n", "inside: br-é\noutside: [eth0]\n",
	} {
		if _, err := Parse("f", []byte(text)); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}
