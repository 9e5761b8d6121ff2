// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"natkit/internal/testutil/ktest"
)

// Each engine lives its life, up, apply, status and down, on a machine with a BPF file system
// and on one without, and leaves nothing behind.
func TestLife(t *testing.T) {
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
				b := makeTestbed(t)
				before := b.state()
				o := b.options()
				o.Engine = engine
				b.up(baseRules, o)
				b.ping(b.client, "198.51.100.9")
				if s, err := ReadStatus(b.gateway); err != nil || len(s.Problems) > 0 {
					t.Errorf("status %+v, %v", s, err)
				}
				text := baseRules + "  - dnat: tcp 198.51.100.1:8081\n    to: 10.0.0.2:81\n"
				if _, err := Apply(t.Context(), b.parse(text), text, o); err != nil {
					t.Error(err)
				}
				b.ping(b.client, "198.51.100.9")
				if kept, err := Down(b.gateway); err != nil || len(kept) > 0 {
					t.Errorf("down: kept %v, %v", kept, err)
				}
				if after := b.state(); after != before {
					t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
				}
				noPins(t)
			})
		})
	}
}

// So does acceleration.
func TestAccelLife(t *testing.T) {
	ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
		b := makeTestbed(t)
		o := b.accelOptions()
		if _, err := AccelOn(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if s, err := ReadAccelStatus(b.gateway); err != nil || len(s.Problems) > 0 {
			t.Errorf("status %+v, %v", s, err)
		}
		if _, err := AccelOff(b.gateway); err != nil {
			t.Error(err)
		}
		noPins(t)
	})
}

// Many engines are brought up and taken down at the same time where the first needs a BPF file
// system mounted and the last unmounts it: none is hidden by another's mount.
func TestManyAtOnce(t *testing.T) {
	ktest.Lacking(t, func(t *testing.T) {
		testbeds := make([]*testbed, 12)
		for i := range testbeds {
			testbeds[i] = makeTestbed(t)
		}
		atOnce := func(what string, do func(*testbed) error) {
			t.Helper()
			var all sync.WaitGroup
			for _, b := range testbeds {
				all.Go(func() {
					if err := do(b); err != nil {
						t.Errorf("%s: %v", what, err)
					}
				})
			}
			all.Wait()
		}
		file := testbeds[0].parse(baseRules)
		atOnce("up", func(b *testbed) error {
			_, err := Up(context.Background(), file, baseRules, b.options())
			return err
		})
		for _, b := range testbeds {
			if s, err := ReadStatus(b.gateway); err != nil || len(s.Problems) > 0 {
				t.Errorf("status %+v, %v", s, err)
			}
			b.ping(b.client, "198.51.100.9")
		}
		atOnce("down", func(b *testbed) error { _, err := Down(b.gateway); return err })
		noPins(t)
	}, ktest.NoBPFFS)
}

// noPins checks that nothing is left of the folder of pins, which cannot be gone while something is
// mounted there.
func noPins(t *testing.T) {
	t.Helper()
	for _, path := range []string{"/sys/fs/bpf/natkit", filepath.Join(runDir(), "bpf")} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want %v", path, err, os.ErrNotExist)
		}
	}
}
