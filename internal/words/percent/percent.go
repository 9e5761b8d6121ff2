// SPDX-License-Identifier: Apache-2.0

// Package percent writes shares: 66.7 %.
package percent

import (
	"math"
	"strconv"
)

// Of is a share of 1 in percent with so many decimals. Little is never written as none, nor nearly
// all as all: those are <0.1 % and >99.9 %.
func Of(share float64, decimals int) string {
	value, step := 100*share, math.Pow10(-decimals)
	text := write(value, decimals)
	switch {
	case value > 0 && text == write(0, decimals):
		text = "<" + write(step, decimals)
	case value < 100 && text == write(100, decimals):
		text = ">" + write(100-step, decimals)
	}
	return text + " %"
}

// Whole is a share in whole percents; what is below 0 by an error of subtraction is none.
//
// Not inlined: of its 87 calls each would be several times as long.
//
//go:noinline
func Whole(share float64) string { return Of(max(0, share), 0) }

func write(value float64, decimals int) string {
	return strconv.FormatFloat(value, 'f', decimals, 64)
}
