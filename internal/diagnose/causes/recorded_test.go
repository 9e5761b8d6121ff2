// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// Snapshots that natkit doctor --save wrote of real faults which no lab can make, each
// named after the cause: nic-ring-full of a vmxnet3 card in qemu, Linux 6.12, whose
// receive ring was cut to 32 and which was then flooded.
func TestRecorded(t *testing.T) {
	files, err := filepath.Glob("testdata/recorded/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no snapshots: %v", err)
	}
	for _, path := range files {
		code := strings.TrimSuffix(filepath.Base(path), ".json")
		t.Run(code, func(t *testing.T) {
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			s, err := snapshot.Load(f)
			if err != nil {
				t.Fatal(err)
			}
			if found := Judge(s); len(found) != 1 || found[0].Code != code || found[0].Severity != Critical {
				t.Errorf("found %+v", found)
			}
		})
	}
}
