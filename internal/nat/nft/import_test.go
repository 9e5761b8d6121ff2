// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/nft"
	"natkit/internal/testutil/golden"
	"natkit/internal/testutil/ktest"
)

var importOptions = nft.ImportOptions{
	Outside: []string{"eth0"}, Inside: []string{"eth1"}, Local: []netip.Addr{addr("203.0.113.5")},
}

func importText(name string, data []byte) string {
	o := importOptions
	o.Name = filepath.Base(name)
	if strings.HasPrefix(o.Name, "openwrt") {
		o.Outside = []string{"wan", "wan6"}
	}
	got, err := nft.Import(bytes.NewReader(data), o)
	if err != nil {
		return fmt.Sprintf("error: %v\n", err)
	}
	var b strings.Builder
	if err := got.File.Validate(); err != nil {
		fmt.Fprintf(&b, "refused: %v\n", err)
	}
	for i := range got.File.Rules {
		fmt.Fprintf(&b, "%s\n", &got.File.Rules[i])
	}
	for _, p := range got.File.Pools {
		fmt.Fprintf(&b, "pool %s %v ports %s\n", p.Name, p.Addresses, p.Ports)
	}
	fmt.Fprintf(&b, "inside %v outside %v\n", got.File.Inside, got.File.Outside)
	for _, n := range got.Notes {
		fmt.Fprintf(&b, "%d lost=%v %s: %s\n", n.Line, n.Lost, n.Rule, n.Why)
	}
	return b.String()
}

// What other programs' rules become: testdata/import has their rules, and behind the
// name .want what is made of them. Sets of nftables are read as the native tool prints
// those of the file.
func TestImport(t *testing.T) {
	names, err := filepath.Glob("testdata/import/*.*tables")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(name, ".nftables") {
				data = asJSON(t, data)
			}
			golden.Check(t, name+".want", []byte(importText(name, data)))
		})
	}
}

// asJSON loads rules in a namespace of their own and lists them.
func asJSON(t *testing.T, rules []byte) []byte {
	t.Helper()
	h := namespace(t)
	var list []byte
	if err := h.Do(func() error {
		cmd := exec.Command(ktest.Tool(t, "nft"), "-f", "-")
		cmd.Stdin = bytes.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft -f: %w: %s", err, out)
		}
		var err error
		list, err = ktest.WithoutTraces(t, func() ([]byte, error) { return exec.Command(ktest.Tool(t, "nft"), "-j", "list", "ruleset").Output() })
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

func TestImportRefuses(t *testing.T) {
	for _, test := range []struct{ in, want string }{
		{"", "empty"},
		{"hello", "x:1: \"hello\" is in no table"},
		{"*nat\n-A", "x:2: \"-A\" is no rule"},
		{"*nat\n\n-A PREROUTING -s 1.2.3 -j ACCEPT", "x:3: \"1.2.3\" is no IPv4 address"},
		{"*nat\n-A PREROUTING -p tcp --dport 70000 -j ACCEPT", "x:2: \"70000\" are no ports"},
		{"*nat\n-A PREROUTING -j DNAT", "x:2: DNAT has no --to-destination"},
		{"*nat\n-A POSTROUTING -s", "x:2: -s wants 1 words"},
		{"*nat\n-A POSTROUTING -m comment --comment \"x -j ACCEPT", "x:2: a quotation mark is not closed"},
		{"table ip nat {\n}", "nft -j list ruleset"},
		{"{\"nftables\": [\n{\"rule\":\n{\"expr\": 7}}]}", "x:"},
		{"{\"nftables\": [\n{}, nonsense]}", "x:2: invalid character"},
		{"{\"other\": []}", "x:1:"},
		{"{\"nftables\": [\n{}", "x:2:"},
		{`{"nftables":[{"chain":{"family":"ip","table":"t","name":"c","type":"nat","hook":"prerouting","prio":0}},
{"rule":{"family":"ip","table":"t","chain":"c","handle":4,"expr":[{"jump":{"target":"x"}}]}}]}`, "x:2: rule 4 of chain ip t c: leads to chain \"x\""},
	} {
		_, err := nft.Import(strings.NewReader(test.in), nft.ImportOptions{Name: "x"})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %q", test.in, err, test.want)
		}
	}
}

// Rules that do not fit together in a rule file: an address in two pools, in a pool and
// given on its own or masqueraded behind, other ports of one address, an interface that is
// not named. Engines take what is written, and the rest is said.
func TestImportFits(t *testing.T) {
	const in = `*nat
-A PREROUTING -i eth0 -p tcp -m tcp --dport 100:200 -j DNAT --to-destination 10.0.0.3
-A PREROUTING -i eth0 -p tcp -m tcp --dport 150:250 -j DNAT --to-destination 10.0.0.4
-A PREROUTING -i eth7 -p tcp -m tcp --dport 1500 -j DNAT --to-destination 10.0.0.4
-A POSTROUTING -s 10.0.1.0/24 -o eth0 -j SNAT --to-source 203.0.113.5-203.0.113.8
-A POSTROUTING -s 10.0.2.0/24 -o eth0 -j SNAT --to-source 203.0.113.8
-A POSTROUTING -s 10.0.3.0/24 -o eth0 -j SNAT --to-source 203.0.113.7-203.0.113.20
-A POSTROUTING -s 10.0.4.0/24 -o eth0 -j SNAT --to-source 203.0.113.50:2000-3000
-A POSTROUTING -s 10.0.5.0/24 -o eth0 -j SNAT --to-source 203.0.113.50:4000-5000
-A POSTROUTING -s 10.0.6.0/24 -d 10.0.0.0/8 -p tcp -m tcp --dport 1:2000 -j ACCEPT
-A POSTROUTING -s 10.0.7.0/24 -o eth0 -j MASQUERADE
-A POSTROUTING -s 10.0.8.0/24 -o eth0 -j SNAT --to-source 203.0.113.5:4000-5000
COMMIT
`
	const want = `dnat: tcp 203.0.113.5:100-200, to: 10.0.0.3, in: eth0
dnat: tcp 203.0.113.5:201-250, to: 10.0.0.4, in: eth0
snat: 10.0.1.0/24, to: pool1, out: eth0
snat: 10.0.2.0/24, to: 203.0.113.8, out: eth0
snat: 10.0.4.0/24, to: 203.0.113.50, ports: 2000-3000, out: eth0
masquerade: 10.0.7.0/24, out: eth0
pool pool1 [203.0.113.6/31] ports 
`
	got := importText("fits", []byte(in))
	if !strings.HasPrefix(got, want) {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	for _, line := range []int{4, 7, 9, 12} {
		if !strings.Contains(got, fmt.Sprintf("\n%d lost=true", line)) || !strings.Contains(got, ": left out: ") {
			t.Errorf("nothing is said of line %d:\n%s", line, got)
		}
	}
	if !strings.Contains(got, "5 lost=false") {
		t.Errorf("nothing is said of the pool that became smaller:\n%s", got)
	}
}

// A map is two-way: of an input with one direction only, what the other lets in or
// translates is said.
func TestImportHalfMap(t *testing.T) {
	const source = "-A POSTROUTING -s 10.1.0.0/24 -o eth0 -j NETMAP --to 100.64.1.0/24\n"
	const destination = "-A PREROUTING -d 100.64.1.0/24 -i eth0 -j NETMAP --to 10.1.0.0/24\n"
	for in, want := range map[string]string{
		source:               "it also lets in",
		destination:          "it also translates",
		source + destination: "",
	} {
		got := importText("half", []byte("*nat\n"+in+"COMMIT\n"))
		if !strings.Contains(got, "map: 10.1.0.0/24 <-> 100.64.1.0/24, out: eth0") || want != "" && !strings.Contains(got, want) || want == "" && strings.Contains(got, "both ways") {
			t.Errorf("%s%s, want %q", in, got, want)
		}
	}
}

// The rules of a dormant table do nothing, and where nft prints its flag wrongly, which old
// versions do, the import asks.
func TestImportDormant(t *testing.T) {
	const list = `{"nftables":[{"table":{"family":"ip","name":"t","handle":1%s}},
{"chain":{"family":"ip","table":"t","name":"c","type":"nat","hook":"prerouting","prio":-100}},
{"rule":{"family":"ip","table":"t","chain":"c","handle":4,"expr":[
 {"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":"203.0.113.1"}},{"dnat":{"addr":"10.0.0.1"}}]}},
{"chain":{"family":"ip","table":"t","name":"raw","type":"filter","hook":"prerouting","prio":-300}},
{"rule":{"family":"ip","table":"t","chain":"raw","handle":5,"expr":[{"notrack":null}]}}]}`
	const rule, notrack = "dnat: 203.0.113.1, to: 10.0.0.1", "is not tracked"
	for flags, want := range map[string][]string{
		"":                                    {rule, notrack},
		`,"flags":["owner","persist"]`:        {rule, notrack},
		`,"flags":"dormant"`:                  {"lost=false table ip t: is dormant", "no rule of the input could be taken over"},
		`,"flags":["dormant","owner"]`:        {"lost=false table ip t: is dormant", "no rule of the input could be taken over"},
		`,"flags":"chars that nft has freed"`: {rule, notrack, "1 lost=true table ip t: has a flag", "nft list table ip t"},
	} {
		got := importText("dormant", fmt.Appendf(nil, list, flags))
		for _, part := range want {
			if !strings.Contains(got, part) {
				t.Errorf("flags %q: no %q in\n%s", flags, part, got)
			}
		}
		if dormant := strings.Contains(flags, "dormant"); dormant && (strings.Contains(got, rule) || strings.Contains(got, notrack)) || !dormant && strings.Contains(got, "is dormant") {
			t.Errorf("flags %q:\n%s", flags, got)
		}
	}
}

// Chains that lead into each other along more ways than can be followed are refused.
func TestImportEnds(t *testing.T) {
	var b strings.Builder
	b.WriteString("*nat\n:PREROUTING ACCEPT\n:C0 -\n-A PREROUTING -j C0\n")
	for i := range 40 {
		fmt.Fprintf(&b, ":C%d -\n-A C%d -s 10.0.0.0/8 -j C%d\n-A C%d -d 10.0.0.0/8 -j C%d\n", i+1, i, i+1, i, i+1)
	}
	if _, err := nft.Import(strings.NewReader(b.String()), importOptions); err == nil || !strings.Contains(err.Error(), "too often") {
		t.Errorf("%v", err)
	}
}

// Rules that nft writes count, also in a table with the names that iptables uses; those of iptables don't.
func TestCountNAT(t *testing.T) {
	const table = `{"nftables":[{"table":{"family":"ip","name":"nat"}},{"chain":{"family":"ip","table":"nat","name":"POSTROUTING","type":"nat","hook":"postrouting","prio":100}},
{"rule":{"family":"ip","table":"nat","chain":"POSTROUTING","handle":1,"expr":[%s]}},{"rule":{"family":"ip","table":"nat","chain":"POSTROUTING","handle":2,"expr":[%s]}}]}`
	const native, iptables = `{"masquerade":null}`, `{"xt":{"type":"target","name":"MASQUERADE"}}`
	for _, c := range []struct {
		first, second string
		want          int
	}{{native, native, 2}, {iptables, iptables, 0}, {native, iptables, 0}} {
		if got := nft.CountNAT(fmt.Appendf(nil, table, c.first, c.second)); got != c.want {
			t.Errorf("%s and %s: %d, want %d", c.first, c.second, got, c.want)
		}
	}
}

func FuzzImport(f *testing.F) {
	names, _ := filepath.Glob("testdata/import/*.iptables")
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"nftables":[{"metainfo":{}},{"map":{"family":"ip","table":"t","name":"m","elem":[[{"concat":["10.0.0.1","tcp",80]},{"goto":{"target":"d"}}]]}},
{"chain":{"family":"ip","table":"t","name":"d"}},{"chain":{"family":"ip","table":"t","name":"c","type":"nat","hook":"prerouting","prio":-100}},
{"rule":{"family":"ip","table":"t","chain":"c","handle":4,"expr":[{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.0.0.0","len":8}}}},{"vmap":{"key":{"concat":[{"payload":{"protocol":"ip","field":"daddr"}},{"meta":{"key":"l4proto"}},{"payload":{"protocol":"th","field":"dport"}}]},"data":"@m"}}]}},
{"rule":{"family":"ip","table":"t","chain":"d","handle":5,"expr":[{"dnat":{"addr":{"map":{"key":{"numgen":{"mod":2}},"data":{"set":[[0,"10.0.0.1"],[1,{"concat":["10.0.0.2",80]}]]}}}}},{"masquerade":{"port":{"range":[1,2]}}},{"snat":{"addr":{"range":["10.0.0.1","10.0.0.9"]}}}]}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := nft.Import(bytes.NewReader(data), importOptions)
		if err == nil && len(got.Notes) < 100 {
			if err := got.File.Validate(); err != nil {
				t.Errorf("what was written is refused: %v\n%s", err, got.File.Text())
			}
		}
		var syntax *ruleset.SyntaxError
		if errors.As(err, &syntax) && (syntax.Line < 1 || syntax.Line > bytes.Count(data, []byte("\n"))+1) {
			t.Errorf("line %d: %v", syntax.Line, err)
		}
	})
}

// One table may have chains of type nat and others: what these set of marks, NAT rules see.
func TestImportMarksOfOneTable(t *testing.T) {
	rules := func(mark string) []byte {
		return asJSON(t, []byte(`table inet fw {
	chain marks {
		`+mark+`
	}
	chain mangle {
		type filter hook forward priority mangle; policy accept;
		ip saddr 10.0.9.0/24 jump marks
	}
	chain srcnat {
		type nat hook postrouting priority srcnat; policy accept;
		meta mark != 0x1 oifname "eth0" ip saddr 10.0.0.0/16 masquerade
	}
}
`))
	}
	const differs = "depends on a mark that other tables set"
	for mark, want := range map[string]bool{"meta mark set 0x1": true, "counter": false} {
		if got := importText("x", rules(mark)); strings.Contains(got, differs) != want {
			t.Errorf("%s: %s", mark, got)
		}
	}
}

// A rule for interfaces by a pattern is for those that are named and fit it. Where none does, that is said.
func TestImportPatterns(t *testing.T) {
	const rules = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:VPN - [0:0]
-A POSTROUTING -s 10.0.0.0/24 -o eth+ -j MASQUERADE
-A POSTROUTING -s 10.0.1.0/24 -o ppp+ -j MASQUERADE
-A POSTROUTING -s 10.0.2.0/24 ! -o tun+ -j MASQUERADE
-A POSTROUTING -o wg+ -j VPN
-A POSTROUTING -o lxc+ -j ACCEPT
-A VPN -s 10.0.3.0/24 -j MASQUERADE
COMMIT
`
	got := importText("x", []byte(rules))
	for part, want := range map[string]bool{
		"masquerade: 10.0.0.0/24, out: eth0": true, "masquerade: 10.0.2.0/24": true,
		"lost=true -A POSTROUTING -s 10.0.1.0/24 -o ppp+ -j MASQUERADE: is for interfaces ppp*": true,
		"lost=true -A POSTROUTING -o wg+ -j VPN: is for interfaces wg*":                         true,
		"tun*": false, "lxc": false, "eth*": false,
	} {
		if strings.Contains(got, part) != want {
			t.Errorf("%q is there: %v, want %v", part, !want, want)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

// Conditions on different bits of a mark that other tables set do not exclude each other.
func TestImportMasks(t *testing.T) {
	const rules = `*mangle
:PREROUTING ACCEPT [0:0]
-A PREROUTING -i eth1 -j MARK --set-xmark 0x3/0xffffffff
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -m mark --mark 0x1/0xff -j ACCEPT
-A POSTROUTING -s 10.0.0.0/24 -o eth0 -m mark --mark 0x1/0x1 -j MASQUERADE
COMMIT
`
	got := importText("x", []byte(rules))
	if want := "-m mark --mark 0x1/0x1 -j MASQUERADE: depends on a mark"; !strings.Contains(got, want) {
		t.Errorf("%s\nwant %q", got, want)
	}
}

// imported checks what becomes of rules: the parts that are in importText, and those that are not.
func imported(t *testing.T, name string, rules []byte, has, lacks []string) {
	t.Helper()
	got := importText("x", rules)
	for _, part := range has {
		if !strings.Contains(got, part) {
			t.Errorf("%s: no %q in\n%s", name, part, got)
		}
	}
	for _, part := range lacks {
		if strings.Contains(got, part) {
			t.Errorf("%s: %q in\n%s", name, part, got)
		}
	}
}

// What rules do by a mark is followed, however they look it up, and what they look up in vain is named.
func TestImportMarksLookedUp(t *testing.T) {
	const pre = "type nat hook prerouting priority dstnat; "
	for name, c := range map[string]struct {
		rules      string
		has, lacks []string
	}{
		"verdict map": {`chain a { tcp dport 80 dnat to 10.0.0.1; }
			chain b { tcp dport 80 dnat to 10.0.0.2; }
			chain pre { ` + pre + `ip daddr 203.0.113.5 meta mark set 1; ip daddr 203.0.113.6 meta mark set 2; meta mark vmap { 1 : jump a, 2 : jump b }; }`,
			[]string{"dnat: tcp 203.0.113.5:80, to: 10.0.0.1\n", "dnat: tcp 203.0.113.6:80, to: 10.0.0.2\n"}, []string{"lost=true"}},
		"verdict map in vain": {`chain a { ip daddr 203.0.113.5 tcp dport 80 dnat to 10.0.0.1; }
			chain pre { ` + pre + `meta mark vmap { 1 : jump a }; }`,
			[]string{"lost=true ip t pre handle", "vmap { 1 : jump a }: asks for a mark that no rule of the input sets"}, []string{"dnat: "}},
		"concatenation": {`chain pre { ` + pre + `ip daddr 203.0.113.5 meta mark set 1; meta mark . tcp dport { 1 . 80 } dnat to 10.0.0.1; }`,
			[]string{"dnat: tcp 203.0.113.5:80, to: 10.0.0.1\n"}, []string{"lost=true"}},
		"map": {`chain pre { ` + pre + `ip daddr 203.0.113.5 meta mark set 1; tcp dport 80 dnat to meta mark map { 1 : 10.0.0.1 }; }`,
			[]string{"dnat: tcp 203.0.113.5:80, to: 10.0.0.1\n"}, []string{"lost=true"}},
		"set and returned": {`chain a { meta mark set 1 ip daddr vmap { 203.0.113.5 : return }; ip daddr { 203.0.113.5, 203.0.113.6 } meta mark 1 tcp dport 80 dnat to 10.0.0.1; }
			chain pre { ` + pre + `jump a; }`,
			[]string{"dnat: tcp 203.0.113.6:80, to: 10.0.0.1\n"}, []string{"dnat: tcp 203.0.113.5", "lost=true"}},
		"set and not in the map": {`chain pre { ` + pre + `meta mark set 1 dnat to ip daddr map { 203.0.113.6 : 10.0.0.9 }; ip daddr 203.0.113.5 meta mark 1 tcp dport 80 dnat to 10.0.0.1; }`,
			[]string{"dnat: 203.0.113.6, to: 10.0.0.9\n", "dnat: tcp 203.0.113.5:80, to: 10.0.0.1\n"}, []string{"lost=true"}},
	} {
		imported(t, name, asJSON(t, []byte("table ip t {\n"+c.rules+"\n}\n")), c.has, c.lacks)
	}
}

// What nft writes in a form of its own is read as it means it, or named.
func TestImportReadsNFT(t *testing.T) {
	const pre = "type nat hook prerouting priority dstnat; "
	for name, c := range map[string]struct {
		rules      string
		has, lacks []string
	}{
		"all other interfaces": {`chain a { ip daddr 203.0.113.5 tcp dport 80 dnat to 10.0.0.1; }
			chain pre { ` + pre + `iifname vmap { "eth0" : return, * : jump a }; }`,
			[]string{"lost=true ip t pre handle"}, []string{"dnat: "}},
		"hashes by seeds of their own": {`chain pre { ` + pre + `ip daddr 203.0.113.5 tcp dport 80 jhash ip saddr mod 2 0 dnat to 10.0.0.1; ip daddr 203.0.113.5 tcp dport 80 jhash ip saddr mod 2 1 dnat to 10.0.0.2; }`,
			[]string{"is for 75 % of new connections only"}, []string{"dnat: "}},
		"hashes by one seed": {`chain pre { ` + pre + `ip daddr 203.0.113.5 tcp dport 80 jhash ip saddr mod 2 seed 1 0 dnat to 10.0.0.1; ip daddr 203.0.113.5 tcp dport 80 jhash ip saddr mod 2 seed 1 1 dnat to 10.0.0.2; }`,
			[]string{"dnat: tcp 203.0.113.5:80, to: [10.0.0.1, 10.0.0.2]\n"}, []string{"lost=true"}},
		"protocols by their names": {`chain pre { ` + pre + `ip daddr 203.0.113.5 meta l4proto 4 dnat to 10.0.0.1; ip daddr 203.0.113.5 meta l4proto 94 dnat to 10.0.0.2; }`,
			[]string{"dnat: 4 203.0.113.5, to: 10.0.0.1\n", "dnat: 94 203.0.113.5, to: 10.0.0.2\n"}, []string{"lost=true"}},
	} {
		imported(t, name, asJSON(t, []byte("table ip t {\n"+c.rules+"\n}\n")), c.has, c.lacks)
	}
}

// iptables-restore takes conditions behind the target too, where people write them.
func TestImportConditionsBehindTheTarget(t *testing.T) {
	for rule, want := range map[string]string{
		"-j DNAT --to-destination 10.0.0.1 --random -d 203.0.113.5/32 -p tcp -m tcp --dport 80":       "dnat: tcp 203.0.113.5:80, to: 10.0.0.1\n",
		"-j DNAT -d 203.0.113.5/32 ! -i eth1 -p tcp --to-destination 10.0.0.1:8080 -m tcp --dport 80": "dnat: tcp 203.0.113.5:80, to: 10.0.0.1:8080\n",
		"-j DNAT --to-destination 10.0.0.1 -d 203.0.113.5/32 -p tcp --syn":                            "depends on --syn",
		"-j DNAT --to-destination 10.0.0.1 -d 203.0.113.5/32 -m set --match-set blue src":             "depends on set --match-set blue src",
		"-j DNAT --to-destination 10.0.0.1 -d 203.0.113.5/32 -f":                                      "depends on -f",
		"-j LOG --log-prefix x --log-level 4 -d 203.0.113.5/32":                                       "no rule of the input could be taken over",
	} {
		imported(t, rule, []byte("*nat\n:PREROUTING ACCEPT\n-A PREROUTING "+rule+"\nCOMMIT\n"), []string{want}, nil)
	}
}

// A rule that the rule file does not have is named, whatever the reason.
func TestImportNamesWhatIsLeftOut(t *testing.T) {
	const pre = "type nat hook prerouting priority dstnat; "
	for name, c := range map[string]struct {
		rules      string
		has, lacks []string
	}{
		"sets without elements": {`set vip { type ipv4_addr; }
			map hosts { type ipv4_addr : ipv4_addr; }
			map leads { type ipv4_addr : verdict; flags dynamic,timeout; }
			set spared { type ipv4_addr; }
			chain pre { ` + pre + `ip daddr @vip dnat to 10.0.0.1; dnat to ip daddr map @hosts; ip daddr vmap @leads; }
			chain post { type nat hook postrouting priority srcnat; ip daddr @spared accept; ip saddr 10.0.0.0/8 oifname "eth0" masquerade; }`,
			[]string{"set vip has no elements here", "set hosts has no elements here", "set leads has no elements here", "set spared has no elements here", "masquerade: 10.0.0.0/8, out: eth0\n"}, []string{"lost=false ip"}},
		"no packet meets them": {`chain pre { ` + pre + `ct state established ip daddr 203.0.113.5 dnat to 10.0.0.1; ip daddr 203.0.113.5 accept; ip daddr 203.0.113.5 tcp dport 80 dnat to 10.0.0.2; }`,
			[]string{"dnat to 10.0.0.1: is left out: no packet meets it", "dnat to 10.0.0.2: is left out: no packet meets it"}, []string{"dnat: "}},
		"a port at random": {`chain pre { ` + pre + `ip daddr 203.0.113.5 tcp dport 80 dnat to 10.0.0.1:8001-8004 random; ip daddr 203.0.113.5 tcp dport 81 dnat to 10.0.0.1:81 random; ip daddr 203.0.113.5 tcp dport 82 dnat to 10.0.0.1:8001-8004; }`,
			[]string{"dnat to 10.0.0.1:8001-8004 random: sends each connection to a port of 8001-8004 at random", "dnat: tcp 203.0.113.5:81, to: 10.0.0.1\n", "dnat: tcp 203.0.113.5:82, to: 10.0.0.1:8001\n"}, []string{"203.0.113.5:80"}},
	} {
		imported(t, name, asJSON(t, []byte("table ip t {\n"+c.rules+"\n}\n")), c.has, c.lacks)
	}
}
