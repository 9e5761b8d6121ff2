// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"fmt"
	"os"
	"testing"

	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	if os.Getenv(besideTests) != "" {
		if err := traceBeside(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(ktest.OwnMachine(m))
}
