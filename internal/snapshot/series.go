// SPDX-License-Identifier: Apache-2.0

package snapshot

// Series is how some facts went during the window: what a reader wants to see as a
// curve. Nothing is judged from it.
type Series struct {
	Times []float64 `json:"times"` // seconds since the window began, rising
	// Lines are as long as Times; keys say what they are:
	//
	//	conntrack.count         entries at that time
	//	conntrack.drop, ...     increase of a counter of the table since the time before
	//	cpu0.softirq            share of that time, 0 to 1
	//	TcpExt.ListenOverflows  increase of a counter of the stack
	//
	// A counter that did not move is left out.
	Lines map[string][]float64 `json:"curves"`
}

// MaxSeries is how many times a Series holds at most.
const MaxSeries = 120
