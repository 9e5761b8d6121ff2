// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"os"
	"testing"

	"natkit/internal/testutil/beside"
	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	if beside.Main(besideBenchmark) {
		return
	}
	os.Exit(ktest.OwnMachine(m))
}
