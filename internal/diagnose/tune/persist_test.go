// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"os"
	"strings"
	"testing"
)

// What natkit leaves on a machine is listed for those who look for it.
func TestPlaceIsListed(t *testing.T) {
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	paths := []string{Place{}.journal()}
	for _, f := range (Place{}).files() {
		paths = append(paths, f.path)
	}
	for _, path := range paths {
		if !strings.Contains(string(text), "`"+path+"`") {
			t.Errorf("ARCHITECTURE.md does not list %s", path)
		}
	}
}
