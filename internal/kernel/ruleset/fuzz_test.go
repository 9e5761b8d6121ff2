// SPDX-License-Identifier: Apache-2.0

package ruleset_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/testutil/natproof"
)

const nftSeed = `{"nftables":[{"metainfo":{}},{"set":{"family":"ip","table":"t","name":"s","type":"ipv4_addr","flags":["interval"],"elem":["10.0.0.1",{"prefix":{"addr":"10.1.0.0","len":16}},{"range":["10.2.0.1","10.2.0.9"]},{"elem":{"val":"10.3.0.1","expires":7}}]}},
{"map":{"family":"ip","table":"t","name":"m","type":["ipv4_addr","inet_proto","inet_service"],"map":"verdict","elem":[[{"concat":["10.0.0.1","tcp",80]},{"goto":{"target":"d"}}]]}},
{"chain":{"family":"ip","table":"t","name":"d"}},{"chain":{"family":"ip","table":"t","name":"c","type":"nat","hook":"prerouting","prio":-100,"policy":"drop"}},
{"rule":{"family":"ip","table":"t","chain":"c","handle":4,"expr":[{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":"@s"}},{"match":{"op":"in","left":{"ct":{"key":"state"}},"right":["new","established"]}},{"match":{"op":"==","left":{"&":[{"meta":{"key":"mark"}},255]},"right":1}},{"mangle":{"key":{"meta":{"key":"mark"}},"value":{"|":[{"&":[{"meta":{"key":"mark"}},15]},16]}}},{"vmap":{"key":{"concat":[{"payload":{"protocol":"ip","field":"daddr"}},{"meta":{"key":"l4proto"}},{"payload":{"protocol":"th","field":"dport"}}]},"data":"@m"}}]}},
{"rule":{"family":"ip","table":"t","chain":"d","handle":5,"expr":[{"match":{"op":">","left":{"payload":{"protocol":"tcp","field":"dport"}},"right":1024}},{"dnat":{"addr":{"map":{"key":{"numgen":{"mode":"random","mod":2,"offset":3}},"data":{"set":[[3,"10.0.0.1"],[4,{"concat":["10.0.0.2",80]}]]}}}}},{"masquerade":{"port":{"range":[1,2]},"flags":["random"]}},{"snat":{"addr":{"prefix":{"addr":"10.0.0.0","len":24}},"flags":"netmap"}},{"limit":{"rate":1,"per":"second"}},{"xt":null}]}}]}`

const iptablesSeed = `*nat
:PREROUTING ACCEPT [0:0]
:C - [0:0]
[1:2] -A PREROUTING ! -i eth+ -s 10.0.0.0/255.0.255.0 -p tcp -m multiport ! --dports 80,443:445 -m statistic --mode nth --every 3 --packet 0 -m set --match-set x dst -j C
-A C -m mark ! --mark 0x1/0xff -m comment --comment "a \"b\"" -j DNAT --to-destination 10.0.0.1-10.0.0.2:80-90/1000 --random
-A C -m conntrack --ctstate NEW,DNAT -j MARK --set-xmark 0x4000/0x4000
-A POSTROUTING -j SNAT --to-source [fd00::1]:80
COMMIT
`

// Whatever is read has lines that are there, and can be walked and asked about a packet.
func fuzzReader(f *testing.F, read func([]byte, string) (*ruleset.Ruleset, error)) {
	f.Fuzz(func(t *testing.T, data []byte) {
		set, err := read(data, "x")
		if err != nil {
			var syntax *ruleset.SyntaxError
			if !errors.As(err, &syntax) || syntax.Line < 1 || syntax.Line > bytes.Count(data, []byte("\n"))+1 {
				t.Errorf("%v", err)
			}
			return
		}
		for r := range set.Rules {
			if r.Line < 1 || r.Line > bytes.Count(data, []byte("\n"))+1 {
				t.Errorf("line %d of %q", r.Line, r.Where())
			}
		}
		w := ruleset.Walker{Set: set, Universe: set.Links(), Kind: "nat"}
		e := natproof.Evaluator{Set: set, Kind: "nat", Draw: func(ruleset.Field) uint32 { return 0 }}
		for _, hook := range []string{"prerouting", "postrouting"} {
			if _, err := w.Walk(hook, ruleset.Region{}); err != nil && !errors.Is(err, ruleset.ErrTooLong) && !errors.Is(err, ruleset.ErrTooMany) {
				t.Error(err)
			}
			if len(data) < 4096 { // one packet may be led in circles for long
				e.Eval(hook, natproof.Packet{In: "eth0", Protocol: 6, Destination: 1, DestinationPort: 80})
			}
		}
	})
}

func FuzzIPTables(f *testing.F) {
	f.Add([]byte(iptablesSeed))
	names, _ := filepath.Glob("../../nat/nft/testdata/import/*.iptables")
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	fuzzReader(f, ruleset.ReadIPTables)
}

func FuzzNFTables(f *testing.F) {
	f.Add([]byte(nftSeed))
	fuzzReader(f, ruleset.ReadNFTables)
}
