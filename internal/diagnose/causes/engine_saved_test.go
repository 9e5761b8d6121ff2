// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// filled sets every field of v, and of what it holds, to something.
func filled(v reflect.Value) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(addr("192.0.2.77")))
		return
	case netip.AddrPort:
		v.Set(reflect.ValueOf(netip.MustParseAddrPort("192.0.2.77:80")))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				filled(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		filled(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		filled(key)
		filled(value)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("at 192.0.2.77 of /home/alice/nat.yaml")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint16, reflect.Uint64:
		v.SetUint(7)
	case reflect.Float64:
		v.SetFloat(0.5)
	case reflect.Int:
		v.SetInt(7)
	default:
		panic("a field of another kind: " + v.Kind().String())
	}
}

// An engine whose every field is filled comes back from a file as it was, and of a redacted
// one no address and no name is left.
func TestEngineSaved(t *testing.T) {
	s := gateway()
	s.Engine = &snapshot.Engine{}
	filled(reflect.ValueOf(s.Engine).Elem())
	again := saveLoad(t, s)
	if !reflect.DeepEqual(again.Engine, s.Engine) {
		t.Errorf("loaded %+v\nsaved  %+v", again.Engine, s.Engine)
	}
	snapshot.Redact(again)
	text, err := json.Marshal(again.Engine)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"192.0.2.77", "alice"} {
		if strings.Contains(string(text), secret) {
			t.Errorf("%s is left: %s", secret, text)
		}
	}
}

// What is judged of an engine here is judged of its saved and its redacted facts.
func TestEngineJudgedAlike(t *testing.T) {
	for code, change := range engineExamples() {
		s := gateway()
		change(s)
		want := verdicts(Judge(s))
		loaded := saveLoad(t, s)
		if got := verdicts(Judge(loaded)); got != want {
			t.Errorf("%s: loaded: %s, want %s", code, got, want)
		}
		snapshot.Redact(loaded)
		if got := verdicts(Judge(saveLoad(t, loaded))); got != want {
			t.Errorf("%s: redacted: %s, want %s", code, got, want)
		}
	}
}

// engineExamples are the examples of causes with an engine in them.
func engineExamples() map[string]func(*snapshot.Snapshot) {
	out := map[string]func(*snapshot.Snapshot){}
	for _, all := range []map[string]func(*snapshot.Snapshot){examples, moreExamples} {
		for name, change := range all {
			s := gateway()
			if change(s); s.Engine != nil {
				out[name] = change
			}
		}
	}
	return out
}

func saveLoad(t *testing.T, s *snapshot.Snapshot) *snapshot.Snapshot {
	t.Helper()
	var b bytes.Buffer
	if err := snapshot.Save(&b, s); err != nil {
		t.Fatal(err)
	}
	out, err := snapshot.Load(&b)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// verdicts are codes, severities and how much evidence and cure each has.
func verdicts(found []Finding) string {
	var b strings.Builder
	for _, f := range found {
		b.WriteString(f.Severity.String() + " " + f.Code + strings.Repeat(" e", len(f.Evidence)) + strings.Repeat(" r", len(f.Remedy)) + "\n")
	}
	return b.String()
}
