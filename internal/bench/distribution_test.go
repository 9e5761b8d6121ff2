// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestBuckets(t *testing.T) {
	last := -1
	for v := time.Duration(0); v <= longest; v += 1 + v/5000 {
		b := bucketOf(v)
		if b < last || b >= distributionBuckets {
			t.Fatalf("%d ns: bucket %d after %d of %d", v, b, last, distributionBuckets)
		}
		if off := math.Abs(float64(middleOf(b) - v)); off > float64(v)/2048+0.5 {
			t.Fatalf("%d ns: bucket %d has its middle at %d", v, b, middleOf(b))
		}
		last = b
	}
	if b := bucketOf(math.MaxInt64); b != distributionBuckets-1 {
		t.Errorf("the longest duration is in bucket %d of %d", b, distributionBuckets)
	}
	if b := bucketOf(-1); b != 0 {
		t.Errorf("a negative duration is in bucket %d", b)
	}
}

// The figures are those of the same values sorted, whether they were counted by
// one distribution or by three and merged.
func TestDistribution(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{0, 1, 2, 3, 100, 5000} {
		var parts [3]distribution
		var values []time.Duration
		for i := range n {
			v := time.Duration(math.Exp(random.Float64() * 25)) // 1 ns to 72 s
			values = append(values, v)
			parts[i%3].add(v)
		}
		slices.Sort(values)
		var d distribution
		for i := range parts {
			d.merge(&parts[i])
		}

		within := func(what string, got time.Duration, want, share float64) {
			t.Helper()
			if math.Abs(float64(got)-want) > share*want+1 {
				t.Errorf("%d values: %s %d, want %.0f", n, what, got, want)
			}
		}
		var sum, squares float64
		for _, v := range values {
			sum += float64(v)
		}
		mean := sum / float64(max(n, 1))
		for _, v := range values {
			squares += (float64(v) - mean) * (float64(v) - mean)
		}
		within("mean", d.mean(), mean, 1e-9)
		within("deviation", d.deviation(), math.Sqrt(squares/float64(max(n-1, 1))), 1e-6)
		if n == 0 {
			within("median", d.quantile(0.5), 0, 0)
			within("maximum", d.quantile(1), 0, 0)
			continue
		}
		within("minimum", d.min, float64(values[0]), 0)
		for _, q := range []float64{0, 0.5, 0.66, 0.9, 0.99} {
			within("quantile", d.quantile(q), float64(values[int(float64(n)*q)]), 1.0/2048)
		}
		within("maximum", d.quantile(1), float64(values[n-1]), 0)
	}
}
