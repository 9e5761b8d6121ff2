// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"testing"
	"time"
)

// BenchmarkSampler is a round without examinations, of all namespaces that there are.
func BenchmarkSampler(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	p, err := OpenSampler(Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	for b.Loop() {
		if _, err := p.Round(b.Context(), RoundOptions{Window: time.Millisecond}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(p.places)), "namespaces")
}
