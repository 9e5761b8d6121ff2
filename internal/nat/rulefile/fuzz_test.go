// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// foreignWords are of YAML parsers and of Go: in no message.
var foreignWords = []string{
	"yaml:", "YAMLError", "strconv", "netip", "ParseAddr", "ParsePrefix", "ParseUint", "invalid syntax", "parsing", "scanning", "node", "scalar", "token",
	"mapping values", "octet", "%!", "(value:", "panic", "runtime error", "cannot unmarshal",
}

// Whatever a file says, Parse answers: with problems that name a line of it, or with a
// file that is written and read back as the same.
func FuzzParse(f *testing.F) {
	f.Add([]byte(whole))
	for _, name := range must(filepath.Glob("testdata/*.yaml")) {
		f.Add(must(os.ReadFile(name)))
	}
	for _, c := range hostile {
		f.Add([]byte(c.text))
	}
	for _, text := range []string{"", "a: &x [*x]", "? [a]\n: b", "{a: b", "---\n---\n", "!!binary x: y", "<<: {inside: a}", "inside: eth1\noutside: eth0\nrules: []\n"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("f", data)
		if err != nil {
			problems, ok := err.(Problems)
			if !ok || len(problems) == 0 {
				t.Fatalf("%T %v", err, err)
			}
			for _, p := range problems {
				for _, word := range foreignWords {
					if strings.Contains(p.Message, word) && !strings.Contains(string(data), word) {
						t.Errorf("the word %q of a library or another program: %s", word, p)
					}
				}
				if lines := strings.Count(string(data), "\n") + 2; p.Line > lines+strings.Count(string(data), "\r") {
					t.Errorf("line %d of %d: %s", p.Line, lines, p)
				}
			}
			return
		}
		file.Warnings()
		text := file.Text()
		file.Settings()
		again, err := Parse("f", []byte(text))
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if file, again = withoutPositions(file), withoutPositions(again); len(file.Rules) == 0 {
			again.Rules = file.Rules
		}
		if !reflect.DeepEqual(file, again) {
			t.Fatalf("%+v\n%+v\n%s", file, again, text)
		}
	})
}

func FuzzParsePacket(f *testing.F) {
	f.Add("tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1")
	f.Add("192.168.0.5 -> 192.0.2.1 in eth1")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePacket(text)
		if err != nil {
			return
		}
		if again, err := ParsePacket(p.String()); err != nil || again != p {
			t.Errorf("%q: %v, %q: %v, %v", text, p, p.String(), again, err)
		}
		Explain(must(Parse("f", []byte(explained))), p, network{})
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
