// SPDX-License-Identifier: Apache-2.0

package schema

import (
	"encoding/json"
	"testing"
)

func TestPut(t *testing.T) {
	name := Name("doctor", 1)
	for _, c := range []struct {
		object any
		indent string
		want   string
	}{
		{struct{}{}, "", `{"schema":"natkit/doctor/1"}`},
		{map[string]int{"a": 1}, "", `{"schema":"natkit/doctor/1","a":1}`},
		{map[string]int{"a": 1}, "  ", "{\n  \"schema\": \"natkit/doctor/1\",\n  \"a\": 1\n}"},
	} {
		object, err := json.MarshalIndent(c.object, "", c.indent)
		if c.indent == "" {
			object, err = json.Marshal(c.object)
		}
		if err != nil {
			t.Fatal(err)
		}
		got := Put(name, object)
		if string(got) != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
		if is, err := Of(got); err != nil || is != name {
			t.Errorf("%s: %q, %v", got, is, err)
		}
	}
}

func TestOf(t *testing.T) {
	for object, want := range map[string]string{
		`{"a": {"schema": "no"}, "schema": "yes"}`: "yes",
		`{"schema": "yes", "a": [`:                 "yes", // the rest is for who reads it
		`{"a": 1}`:                                 "",
		`{}`:                                       "",
	} {
		if is, err := Of([]byte(object)); err != nil || is != want {
			t.Errorf("%s: %q, %v", object, is, err)
		}
	}
	for _, object := range []string{``, `[]`, `7`, `{`, `{"schema"`, `{"schema": "yes`, `{"schema": 7}`, `{"a": [`} {
		if is, err := Of([]byte(object)); err == nil {
			t.Errorf("%s is %q", object, is)
		}
	}
}

func TestParse(t *testing.T) {
	if kind, version, ok := Parse(Name("bench-http", 12)); kind != "bench-http" || version != 12 || !ok {
		t.Errorf("%q, %d, %v", kind, version, ok)
	}
	for _, name := range []string{"", "natkit", "natkit/doctor", "natkit/doctor/0", "natkit/doctor/x", "natkit//1", "other/doctor/1", "natkit/doctor/1/1"} {
		if _, _, ok := Parse(name); ok {
			t.Errorf("%q is taken for a name", name)
		}
	}
}
