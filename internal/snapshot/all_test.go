// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// eachOf loads a file and returns what is in it.
func eachOf(t *testing.T, text string) (all []*Snapshot, left LeftOut, several bool, err error) {
	t.Helper()
	left, several, err = LoadEach(strings.NewReader(text), func(s *Snapshot) error {
		all = append(all, s)
		return nil
	})
	return all, left, several, err
}

func TestWriterLoadEach(t *testing.T) {
	one, two := full(), full()
	two.Netns.Name = "green"
	for _, want := range [][]*Snapshot{nil, {one}, {one, two}} {
		var b bytes.Buffer
		w := NewWriter(&b)
		for _, s := range want {
			if err := w.Add(s); err != nil {
				t.Fatal(err)
			}
		}
		leftOut := LeftOut{Idle: 3, Skipped: []string{"blue: gone"}}
		if err := w.End(leftOut); err != nil {
			t.Fatal(err)
		}
		got, left, several, err := eachOf(t, b.String())
		if err != nil || !several || !reflect.DeepEqual(got, want) || !reflect.DeepEqual(left, leftOut) {
			t.Errorf("%d written: %d read, several %v, left out %+v, %v", len(want), len(got), several, left, err)
		}
		if _, err := Load(&b); err == nil || !strings.Contains(err.Error(), "of all namespaces") {
			t.Errorf("taken for one: %v", err)
		}
	}
	var b bytes.Buffer
	if err := Save(&b, one); err != nil {
		t.Fatal(err)
	}
	got, _, several, err := eachOf(t, b.String())
	if err != nil || several || !reflect.DeepEqual(got, []*Snapshot{one}) {
		t.Errorf("a file of one: %d read, several %v, %v", len(got), several, err)
	}
	stop := errors.New("stop")
	if _, _, err := LoadEach(strings.NewReader(b.String()), func(*Snapshot) error { return stop }); err != stop {
		t.Errorf("error %v", err)
	}
}

func TestLoadEachRefuses(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"nothing", "", "it is empty"},
		{"cut within one", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1", "ho`, "load snapshots, after 0: unexpected EOF"},
		{"cut between two", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}`, "unexpected EOF"},
		{"cut at the end", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}]`, "unexpected EOF"},
		{"not a list", `{"schema": "natkit/snapshots/1", "namespaces": 5}`, "its part 5 is 5, want ["},
		{"of an earlier natkit", `{"namespaces": [{"version": 1}]}`, "an earlier natkit saved it"},
		{"another order", `{"schema": "natkit/snapshots/1", "left_out": {}}`, `its part 4 is left_out, want namespaces`},
		{"later, all", `{"schema": "natkit/snapshots/9", "namespaces": 1}`, "use a newer natkit"},
		{"a list of others", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}, 5]}`, "namespace 2"},
		{"later", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/9"}]}`, "use a newer natkit"},
		{"too long", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1", "later": "` + strings.Repeat("x", maxBytes+8192) + `"}]}`, "longer than 64 MiB"},
		{"no comma", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"} {"schema": "natkit/snapshot/1"}]}`, "namespace 1"},
		{"a comma before", `{"schema": "natkit/snapshots/1", "namespaces": [,{"schema": "natkit/snapshot/1"}]}`, "namespace 1"},
		{"a comma behind", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"},]}`, "namespace 2"},
		{"a brace too many", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}}]}`, "load snapshots, after 0"},
		{"a bracket for a brace", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"]]}`, "namespace 1"},
		{"a brace for a bracket", `{"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}}, "left_out": {}}`, "load snapshots, after 0"},
		{"left out of another type", `{"schema": "natkit/snapshots/1", "namespaces": [], "left_out": 7}`, "load snapshots, after 0"},
	} {
		if all, _, _, err := eachOf(t, c.in); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %d read, error %v, want %q", c.name, len(all), err, c.want)
		}
	}
	if all, left, _, err := eachOf(t, ` {"schema": "natkit/snapshots/1", "namespaces": [{"schema": "natkit/snapshot/1"}], "later": {"a": 1}, "left_out": {"skipped": ["\u001b[2J"]}}`); err != nil || len(all) != 1 || left.Skipped[0] != "?[2J" {
		t.Errorf("of a later version: %d read, %+v, %v", len(all), left, err)
	}
}

// What looks like the end of a namespace in a text is none, wherever a reader's buffers end.
func TestLoadEachText(t *testing.T) {
	for pad := range 70 {
		one := full()
		one.Host.Hostname = strings.Repeat("x", 1000*pad) + `"}],{[\`
		one.KernelLog.Lines = []string{`\"`, `\\`, "]}", `"`}
		var b bytes.Buffer
		w := NewWriter(&b)
		if err := errors.Join(w.Add(one), w.Add(one), w.End(LeftOut{Idle: 2})); err != nil {
			t.Fatal(err)
		}
		if got, left, _, err := eachOf(t, b.String()); err != nil || len(got) != 2 || !reflect.DeepEqual(got[0], one) || !reflect.DeepEqual(got[1], one) || left.Idle != 2 {
			t.Fatalf("%d KB: %d read, %+v, %v", pad, len(got), left, err)
		}
	}
}

// The same is replaced by the same in all namespaces, also where one of them
// speaks of another before that was met.
func TestRedactorOfSeveral(t *testing.T) {
	one, two := full(), full()
	one.Netns.Name, two.Netns.Name, two.Netns.Container = "blue-a", "green-b", "docker shop"
	one.Drops.Rows[0].Namespace = "green-b"
	one.KernelLog.Lines = []string{"from 192.0.2.1 in green-b, shop"}
	r := NewRedactor()
	r.Know([]Netns{one.Netns, two.Netns}, nil)
	r.Redact(one)
	r.Redact(two)
	if one.Drops.Rows[0].Namespace != two.Netns.Name || two.Netns.Name == "green-b" || one.Netns.Name == "blue-a" {
		t.Errorf("names %q, %q and %q", one.Netns.Name, one.Drops.Rows[0].Namespace, two.Netns.Name)
	}
	if a, b := one.Interfaces[0].Addresses[0], two.Interfaces[0].Addresses[0]; a != b || a == full().Interfaces[0].Addresses[0] {
		t.Errorf("addresses %v and %v", a, b)
	}
	want := "from " + two.Interfaces[0].Addresses[0].Addr().String() + " in " + two.Netns.Name + ", " + strings.TrimPrefix(two.Netns.Container, "docker ")
	if got := one.KernelLog.Lines[0]; got != want || strings.Contains(got, "shop") {
		t.Errorf("a line %q, want %q", got, want)
	}
	if got := r.Text("green-b: gone"); got != two.Netns.Name+": gone" {
		t.Errorf("text %q", got)
	}
}
