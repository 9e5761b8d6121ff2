// SPDX-License-Identifier: Apache-2.0

package control

import (
	"testing"

	"natkit/internal/nat/rulefile"
)

// Who cannot keep the log ends what it has had recorded; not what one that was killed has left, whose
// records the next one reads.
func TestLogAbandoned(t *testing.T) {
	b := newTestbed(t)
	b.up("inside: [in]\noutside: [out]\nrules:\n  - masquerade: 10.0.0.0/24\n", b.options())
	open := func() *Log {
		t.Helper()
		l, err := OpenLog(b.gateway, rulefile.LogMappings, false)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	recorded := func(want bool, end func() error) {
		t.Helper()
		if err := end(); err != nil {
			t.Fatal(err)
		}
		e, err := Open(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		l, err := e.OpenLog()
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if l.Asked() != want {
			t.Errorf("recorded: %v, want %v", l.Asked(), want)
		}
	}
	recorded(false, open().Abandon)
	recorded(true, open().Close) // as a kill does
	recorded(true, open().Abandon)
	recorded(false, open().CloseAsked)
}
