// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	if os.Getenv(troubleClock) != "" {
		if err := keepTroubleLog(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	ktest.MoreAtOnce(3)
	code := m.Run()
	ktest.CleanNatkit()
	os.Exit(code)
}

func TestRootHint(t *testing.T) {
	refused := fmt.Errorf("list tables: %w", unix.EPERM)
	for _, tt := range []struct {
		err  error
		uid  int
		says bool
	}{
		{refused, 1000, true},
		{refused, 0, false}, // a container's root: what it lacks is said
		{errors.New("no such thing"), 1000, false},
	} {
		if hint := hint(tt.err, tt.uid, []string{"tune", "history"}); strings.Contains(hint, "needs root: sudo natkit tune history") != tt.says {
			t.Errorf("%v as %d: %q", tt.err, tt.uid, hint)
		}
	}
}
