// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// OpenKernelConfig opens the running kernel's configuration, and says where it was:
// the kernel itself tells where it was built so (CONFIG_IKCONFIG_PROC),
// distributions put a copy beside it.
func OpenKernelConfig() (f *os.File, path string, err error) { return openKernelConfig("/") }

func openKernelConfig(root string) (*os.File, string, error) {
	release, err := os.ReadFile(filepath.Join(root, "proc/sys/kernel/osrelease"))
	if err != nil {
		return nil, "", fmt.Errorf("find kernel configuration: %w", err)
	}
	version := strings.TrimSpace(string(release))
	tried := []string{"/proc/config.gz", "/boot/config-" + version, "/lib/modules/" + version + "/config", "/lib/modules/" + version + "/build/.config", "/usr/lib/ostree-boot/config-" + version}
	for _, path := range tried {
		f, err := os.Open(filepath.Join(root, path))
		if err == nil {
			return f, path, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, "", fmt.Errorf("read kernel configuration: %w", err)
		}
	}
	return nil, "", fmt.Errorf("find kernel configuration of %s: none of %s is there: give a copy by --from", version, strings.Join(tried, ", "))
}
