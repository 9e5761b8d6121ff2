// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"testing"
	"time"
)

// BenchmarkPatrol is a round without examinations, of all namespaces that there are.
func BenchmarkPatrol(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	p, err := OpenPatrol(Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	for b.Loop() {
		if _, err := p.Round(b.Context(), Tour{Window: time.Millisecond}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(p.places)), "namespaces")
}
