// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"strconv"
	"strings"
)

// apart is what is said of two numbers that seem to contradict each other.
const apart = ", counted elsewhere, or over a slightly different time"

// isWhole and isPart tell numbers of one finding of which one holds the other.
func isWhole(what string) bool {
	return strings.HasPrefix(what, "packets received") || strings.Contains(what, "these included") || strings.HasPrefix(what, "packets received")
}

func isPart(what string) bool {
	return strings.HasPrefix(what, "packets dropped") || strings.HasPrefix(what, "packets with DF") || strings.HasPrefix(what, "packets lost")
}

// reconcile says why a part is more than its whole: what is dropped is counted elsewhere, and
// not at the very moment, at which what comes in is.
func reconcile(f *Finding) {
	for i := range f.Evidence {
		whole, ok := leading(f.Evidence[i].Value)
		if !ok || !isWhole(f.Evidence[i].What) || strings.HasSuffix(f.Evidence[i].Value, apart) {
			continue
		}
		for _, e := range f.Evidence {
			if part, ok := leading(e.Value); ok && isPart(e.What) && part > whole {
				f.Evidence[i].Value += apart
				break
			}
		}
	}
}

// leading is the number that a value begins with.
func leading(value string) (uint64, bool) {
	end := strings.IndexFunc(value, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(value)
	}
	n, err := strconv.ParseUint(value[:end], 10, 64)
	return n, err == nil
}
