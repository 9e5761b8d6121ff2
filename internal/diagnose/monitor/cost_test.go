// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"context"
	"os"
	"testing"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/testutil/beside"
	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	if beside.Main(besideBenchmark) {
		return
	}
	os.Exit(ktest.OwnMachine(m))
}

// BenchmarkForwarding is what a monitor costs packets that are forwarded: between two examinations, and while all namespaces
// on their path are examined, which the host's is for one interval of six, others for one of thirty.
func BenchmarkForwarding(b *testing.B) {
	for _, how := range []string{sampled, examined} {
		b.Run(how, func(b *testing.B) { beside.Benchmark(b, how) })
	}
}

// besideBenchmark is what runs beside it: rounds as a monitor makes them.
var besideBenchmark = map[string]func(begun func(), done <-chan struct{}) error{
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
	o := probe.RoundOptions{Window: 100 * time.Millisecond} // the first lists the namespaces
	for ctx.Err() == nil {
		if _, err := s.Round(ctx, o); err != nil {
			return err
		}
		o = probe.RoundOptions{Window: 10 * time.Second}
		for _, ns := range s.Namespaces() {
			if examine {
				o.Looks = append(o.Looks, probe.Want{Inode: ns.Inode})
			}
		}
		begun()
	}
	return nil
}
