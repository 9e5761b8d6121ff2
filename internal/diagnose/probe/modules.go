// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"path/filepath"
	"strings"
)

// loaded says whether a kernel module is there, built in or loaded. A request to
// a subsystem that is not makes the kernel load its module, and some of them
// cost every packet from then on; that is a change, and a probe makes none.
//
// Without proof that the module is absent the answer is yes.
func (v *view) loaded(module string) bool {
	exists := func(path string) bool {
		_, err := os.Stat(filepath.Join(v.root, path))
		return err == nil
	}
	if !exists("proc/modules") { // a kernel without modules loads none
		return true
	}
	if exists("sys/module/" + module) { // built-in ones stand here only if they have parameters
		return true
	}
	release, err := v.read("proc/sys/kernel/osrelease")
	if err != nil {
		return true
	}
	builtin, err := v.read("lib/modules/" + strings.TrimSpace(release) + "/modules.builtin")
	if err != nil {
		return true
	}
	return strings.Contains(builtin, "/"+module+".ko")
}
