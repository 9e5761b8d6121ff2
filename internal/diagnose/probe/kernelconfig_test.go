// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOpenKernelConfig(t *testing.T) {
	root := t.TempDir()
	put := func(path string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("6.1.0-9\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("proc/sys/kernel/osrelease")
	if _, _, err := openKernelConfig(root); err == nil || !strings.Contains(err.Error(), "--from") {
		t.Errorf("without one: %v", err)
	}
	for _, path := range []string{"/lib/modules/6.1.0-9/config", "/boot/config-6.1.0-9", "/proc/config.gz"} { // the later wins
		put(path)
		f, from, err := openKernelConfig(root)
		if err != nil || from != path {
			t.Fatalf("%q, %v, want %q", from, err, path)
		}
		f.Close()
	}
}
