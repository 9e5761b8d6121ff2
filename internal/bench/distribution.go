// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"math/bits"
	"time"
)

// A distribution counts durations in buckets whose width grows with the value:
// one nanosecond up to 2 microseconds, from there 1/1024 of the value or less.
// Its size does not depend on how many it counts. Count, minimum, mean,
// standard deviation and maximum are exact; a quantile is within 0.05 %.
//
// Its zero value is empty. It belongs to one goroutine.
type distribution struct {
	counts  [distributionBuckets]uint32
	n       uint64
	sum     float64 // nanoseconds
	squares float64
	min     time.Duration
	max     time.Duration
}

const (
	// precisionBits is how many bits of a value below its highest one tell buckets
	// apart.
	precisionBits = 10
	// longest is the largest value with a bucket of its own, 73 minutes; what is
	// longer shares its bucket.
	longest             = 1<<42 - 1
	distributionBuckets = (42-precisionBits-1)<<precisionBits + 1<<(precisionBits+1)
)

// bucketOf maps 0..2047 to themselves, 2048..4095 to the next 1024 by twos,
// 4096..8191 to the next 1024 by fours, and so on.
func bucketOf(v time.Duration) int {
	u := uint64(min(max(v, 0), longest))
	shift := max(bits.Len64(u)-precisionBits-1, 0)
	return shift<<precisionBits + int(u>>shift)
}

// middleOf is the value in the middle of a bucket.
func middleOf(bucket int) time.Duration {
	shift := max(bucket>>precisionBits-1, 0)
	low := uint64(bucket-shift<<precisionBits) << shift
	return time.Duration(low + 1<<shift/2)
}

func (d *distribution) add(v time.Duration) {
	if d.n == 0 || v < d.min {
		d.min = v
	}
	d.max = max(d.max, v)
	d.n++
	f := float64(v)
	d.sum += f
	d.squares += f * f
	d.counts[bucketOf(v)]++
}

func (d *distribution) merge(o *distribution) {
	if o.n == 0 {
		return
	}
	if d.n == 0 || o.min < d.min {
		d.min = o.min
	}
	d.max = max(d.max, o.max)
	d.n += o.n
	d.sum += o.sum
	d.squares += o.squares
	for i, c := range o.counts {
		d.counts[i] += c
	}
}

// quantile returns the value at place n*q of all values in order, counted from
// 0, which is where ab(1) looks too; the last one for q = 1, and 0 when there
// is none.
func (d *distribution) quantile(q float64) time.Duration {
	if d.n == 0 || q >= 1 {
		return d.max
	}
	place, seen := uint64(float64(d.n)*q), uint64(0)
	for i, c := range d.counts {
		if seen += uint64(c); seen > place {
			return min(max(middleOf(i), d.min), d.max)
		}
	}
	return d.max
}

func (d *distribution) mean() time.Duration {
	if d.n == 0 {
		return 0
	}
	return time.Duration(d.sum / float64(d.n))
}

// deviation is the standard deviation of a sample.
func (d *distribution) deviation() time.Duration {
	if d.n < 2 {
		return 0
	}
	n := float64(d.n)
	return time.Duration(math.Sqrt(max(d.squares-d.sum*d.sum/n, 0) / (n - 1)))
}
