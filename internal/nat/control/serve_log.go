// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"reflect"
	"time"

	"natkit/internal/nat/rulefile"
)

// recorder has the log kept that the rules in use want, beside the server. What it can't do is no
// reason to stop: packets are translated all the same.
type recorder struct {
	failed chan error // why it is not kept

	log    rulefile.Log // that is kept; the zero value: none
	cancel context.CancelFunc
	done   chan struct{} // closed when it is kept no more
	began  time.Time
}

func newRecorder() recorder { return recorder{failed: make(chan error, 1)} }

// recordAgain is how long after it has failed keeping a log is tried again.
const recordAgain = 10 * time.Second

// follow keeps that log. It is called again while nothing changes, too.
func (r *recorder) follow(record func(context.Context, rulefile.Log) error, log rulefile.Log) {
	// What is recorded the engine knows: only what concerns who keeps it is a reason to begin again.
	if record == nil || !log.On || r.cancel != nil && !reflect.DeepEqual(log, r.log) {
		r.stop()
	}
	if r.cancel != nil {
		select {
		case <-r.done:
			if time.Since(r.began) < recordAgain {
				return
			}
			r.stop()
		default:
			return
		}
	}
	if record == nil || !log.On {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	r.log, r.cancel, r.done, r.began = log, cancel, done, time.Now()
	go func() {
		defer close(done)
		if err := record(ctx, log); err != nil {
			select {
			case r.failed <- err:
			default: // an earlier one is not reported yet
			}
		}
	}()
}

// stop ends it, with everything written.
func (r *recorder) stop() {
	if r.cancel == nil {
		return
	}
	r.cancel()
	<-r.done
	r.cancel = nil
}
