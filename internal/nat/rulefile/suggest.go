// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"strings"
)

// didYouMean names, as the end of a message, the one of the known words that s is most
// likely meant to be; "" if none is near.
func didYouMean(s string, known []string) string {
	if best := nearest(s, known); best != "" {
		return fmt.Sprintf("; did you mean %s?", best)
	}
	return ""
}

// nearest is that word, "" if none is near, or several are.
func nearest(s string, known []string) string {
	best, least := "", 3
	for _, word := range known {
		// In a short word two mistakes leave nothing of it.
		switch d := distance(strings.ToLower(s), strings.ToLower(word)); {
		case d > max(1, min(len(s), len(word))/3) || d > 2:
		case d < least:
			best, least = word, d
		case d == least:
			best = ""
		}
	}
	return best
}

// distance is how many letters must be inserted, left out, replaced or swapped with their
// neighbour to make b of a (optimal string alignment). Words of other lengths are far.
func distance(a, b string) int {
	if d := len(a) - len(b); d > 2 || d < -2 {
		return 3
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			change := 1
			if a[i] == b[j] {
				change = 0
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, last[j]+change)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
