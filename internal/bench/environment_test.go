// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"os"
	"strings"
	"testing"
)

func TestReadEnvironment(t *testing.T) {
	e := ReadEnvironment("1.2")
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if e.Natkit != "1.2" || e.Kernel != strings.TrimSpace(string(release)) || e.CPUs < 1 || e.MemoryBytes < 64<<20 {
		t.Errorf("%+v", e)
	}
}
