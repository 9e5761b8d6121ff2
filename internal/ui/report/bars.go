// SPDX-License-Identifier: Apache-2.0

package report

import "strings"

// Bars are what stands behind a row of a table of text to show its share.
type Bars int

const (
	NoBars    Bars = iota // for programs that read
	PlainBars             // ASCII
	BlockBars             // Unicode, an eighth of a cell fine
)

// draw is a bar of at most so many cells for a part of a whole; what is more than
// nothing is seen.
func (b Bars) draw(part, whole uint64, cells int) string {
	if b == NoBars || part == 0 || whole == 0 {
		return ""
	}
	eighths := max(1, int(float64(min(part, whole))/float64(whole)*float64(8*cells)+0.5))
	if b == PlainBars {
		return strings.Repeat("#", max(1, (eighths+4)/8))
	}
	bar := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return bar
}
