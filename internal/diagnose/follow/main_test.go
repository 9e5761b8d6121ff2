// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"os"
	"testing"

	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) { os.Exit(ktest.OwnMachine(m)) }
