// SPDX-License-Identifier: Apache-2.0

// Package size writes amounts of memory: 1.5 MiB.
package size

import "fmt"

// Of is an amount of bytes in the unit that leaves few digits.
func Of(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
