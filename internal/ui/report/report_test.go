// SPDX-License-Identifier: Apache-2.0

package report

import (
	"path/filepath"
	"testing"

	"natkit/internal/testutil/golden"
)

// printed compares output with a file of testdata.
func printed(t *testing.T, name string, got []byte) {
	t.Helper()
	golden.Check(t, filepath.Join("testdata", name), got)
}
