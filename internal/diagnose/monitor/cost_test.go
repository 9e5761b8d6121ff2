// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"context"
	"testing"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/testutil/beside"
)

// BenchmarkForwarding is what a monitor costs packets that are forwarded: between two examinations, and while all namespaces
// on their path are examined, which the host's is for one interval of six, others for one of thirty.
func BenchmarkForwarding(b *testing.B) {
	for _, how := range []string{sampled, examined} {
		b.Run(how, func(b *testing.B) { beside.Benchmark(b, how) })
	}
}

// besideBenchmark is what runs beside it: rounds as a monitor makes them.
var besideBenchmark = beside.Programs{
	sampled:  func(begun func(), done <-chan struct{}) error { return rounds(false, begun, done) },
	examined: func(begun func(), done <-chan struct{}) error { return rounds(true, begun, done) },
}

const (
	sampled  = "sampled"
	examined = "examined"
)

func rounds(examine bool, begun func(), done <-chan struct{}) error {
	s, err := probe.OpenSampler(probe.Options{Quiet: true})
	if err != nil {
		return err
	}
	defer s.Close()
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		<-done
		stop()
	}()
	if _, err := s.Round(ctx, probe.RoundOptions{Window: 100 * time.Millisecond}); err != nil { // it lists the namespaces
		return err
	}
	begun()
	for ctx.Err() == nil {
		o := probe.RoundOptions{Window: 10 * time.Second}
		for _, ns := range s.Namespaces() {
			if examine {
				o.Looks = append(o.Looks, probe.Want{Inode: ns.Inode})
			}
		}
		if _, err := s.Round(ctx, o); err != nil {
			return err
		}
	}
	return nil
}
