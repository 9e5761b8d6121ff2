// SPDX-License-Identifier: Apache-2.0

// Package bench puts load on a NAT and measures what comes through: requests
// over TCP connections of their own (http). What it returns is figures; how
// they are shown is the business of package report.
package bench

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/words/plural"
)

// HTTPOptions says which load HTTP makes. Only URL is needed.
type HTTPOptions struct {
	URL         string // http only; the scheme may be left out
	Concurrency int    // connections at a time; 0 means 1
	Requests    int    // how many to make; 0 means 1, or 50000 when there is a TimeLimit
	// TimeLimit ends the run however many requests are left; 0 means none.
	TimeLimit time.Duration
	// SocketTimeout is how long a connection may take to be made, then the header
	// of the answer to come, then each further piece of the answer; 0 means 30 s.
	SocketTimeout time.Duration
	// TolerateErrors goes on after a socket error or time-out. Without it the
	// first one ends the run.
	TolerateErrors bool
	KeepAlive      bool     // several requests on a connection; without it one
	Headers        []string // "Name: value"; replaces natkit's own header of that name
	// Rate makes the load an open one: that many requests begin each second,
	// whether or not earlier ones are done, as long as Concurrency allows. A
	// request's time then counts from when it should have begun.
	Rate    float64
	Workers int // threads; 0 means one for each processor this process may use

	Netns *netns.Handle // where the sockets are made; nil means the process's own
	// ServerNetns is where overflows of the server's accept queue are read; nil
	// means in Netns, which sees them only if the server is there too.
	ServerNetns *netns.Handle

	// Progress is called once a second from the goroutine that called HTTP.
	Progress func(HTTPProgress)
}

// What stands for an option that is not given.
const (
	defaultRequestsInTime = 50000 // as ab(1) has it
	defaultSocketTimeout  = 30 * time.Second
)

// HTTPProgress is how far a run is.
type HTTPProgress struct {
	Elapsed           time.Duration
	Completed, Failed int64
	RequestsPerSecond float64 // over the last second
}

// HTTP makes requests and measures them. When the run ends before its time,
// because ctx ended or because of the first socket error without
// TolerateErrors, it returns the error together with what was measured so far.
// Otherwise requests that fail are no error: the result counts them.
func HTTP(ctx context.Context, o HTTPOptions) (*HTTPResult, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	target, err := parseTarget(o.URL, o.KeepAlive, o.Headers)
	if err != nil {
		return nil, err
	}
	if err := allowConnections(o.Concurrency); err != nil {
		return nil, err
	}
	addr, err := resolve(ctx, o.Netns, target.host)
	if err != nil {
		return nil, err
	}
	target.addr = netip.AddrPortFrom(addr, target.port)
	before, err := readTCPCounters(o.Netns, o.ServerNetns)
	if err != nil {
		return nil, err
	}

	run, err := newHTTPRun(o, target)
	if err != nil {
		return nil, err
	}
	defer run.close()
	busy, err := readMachineTime()
	if err != nil {
		return nil, err
	}
	run.work(ctx)
	busyAfter, err := readMachineTime()
	if err != nil {
		return nil, err
	}

	after, err := readTCPCounters(o.Netns, o.ServerNetns)
	if err != nil {
		return nil, err
	}
	res := run.result()
	res.TCP = after.since(before)
	res.MachineCPUSeconds = busyAfter.since(busy).busy.Seconds()
	if res.Ports, err = readPorts(o.Netns, target.addr); err != nil {
		return res, err
	}
	if run.halted != nil {
		res.Stopped = run.halted.Error()
	}
	return res, run.halted
}

// complete checks the options and fills in what was left out.
func (o *HTTPOptions) complete() error {
	switch {
	case o.Concurrency < 0:
		return refuse("Concurrency", "%d: want at least 1", o.Concurrency)
	case o.Requests < 0:
		return refuse("Requests", "%d: want at least 1", o.Requests)
	case o.TimeLimit < 0:
		return refuse("TimeLimit", "%v: want a positive time", o.TimeLimit)
	case o.SocketTimeout < 0:
		return refuse("SocketTimeout", "%v: want a positive time", o.SocketTimeout)
	case o.Rate < 0 || math.IsNaN(o.Rate) || math.IsInf(o.Rate, 0):
		return refuse("Rate", "%v: want a positive number of requests a second", o.Rate)
	case o.Workers < 0:
		return refuse("Workers", "%d: want at least 1", o.Workers)
	}
	if o.Concurrency == 0 {
		o.Concurrency = 1
	}
	if o.Requests == 0 {
		o.Requests = 1
		if o.TimeLimit > 0 {
			o.Requests = max(defaultRequestsInTime, o.Concurrency)
		}
	}
	if o.Concurrency > o.Requests {
		return refuse("Concurrency", "%s at a time are more than %d requests: raise {Requests}", plural.Count(o.Concurrency, "connection"), o.Requests)
	}
	if o.SocketTimeout == 0 {
		o.SocketTimeout = defaultSocketTimeout
	}
	if o.Workers == 0 {
		o.Workers = runtime.NumCPU()
	}
	o.Workers = min(o.Workers, o.Concurrency)
	return nil
}

// httpRun is one run: what its workers share.
type httpRun struct {
	HTTPOptions
	target  *httpTarget
	workers []*httpWorker
	base    time.Time // the run's times are nanoseconds since then
	limit   int64     // when the time limit ends the run; never without one
	wake    int       // eventfd in every worker's epoll set: readable once the run is to stop

	toStart  atomic.Int64 // requests still to be begun; not used by an open load
	docBytes atomic.Int64 // body of the first response, -1 before it

	stop   atomic.Bool
	once   sync.Once
	halted error // why the run stopped before its time; read when the workers are done
	lasted time.Duration
}

// never is a time after every run.
const never = math.MaxInt64

func newHTTPRun(o HTTPOptions, target *httpTarget) (*httpRun, error) {
	r := &httpRun{HTTPOptions: o, target: target, limit: never}
	var err error
	if r.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	if o.TimeLimit > 0 {
		r.limit = int64(o.TimeLimit)
	}
	r.toStart.Store(int64(o.Requests))
	r.docBytes.Store(-1)
	for i := range o.Workers {
		connections := o.Concurrency / o.Workers
		if i < o.Concurrency%o.Workers {
			connections++
		}
		r.workers = append(r.workers, newHTTPWorker(r, i, connections))
	}
	return r, nil
}

func (r *httpRun) close() { unix.Close(r.wake) }

// halt ends the run before its time. The first reason counts.
func (r *httpRun) halt(reason error) {
	r.once.Do(func() {
		r.halted = reason
		r.stop.Store(true)
		unix.Write(r.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
}

// work runs the workers, each on a thread of its own in the clients' namespace,
// until they are done.
func (r *httpRun) work(ctx context.Context) {
	release := context.AfterFunc(ctx, func() {
		r.halt(fmt.Errorf("stopped: %w", context.Cause(ctx)))
	})

	r.base = time.Now()
	var working sync.WaitGroup
	for _, w := range r.workers {
		working.Go(func() {
			if err := r.Netns.Do(w.work); err != nil {
				r.halt(err)
			}
		})
	}
	done := make(chan struct{})
	go func() { working.Wait(); close(done) }()
	r.showProgress(done)
	r.lasted = time.Since(r.base)
	if !release() {
		r.halt(context.Cause(ctx)) // waits for the function above, which has begun
	}
}

func (r *httpRun) showProgress(done <-chan struct{}) {
	if r.Progress == nil {
		<-done
		return
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last HTTPProgress
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			now := HTTPProgress{Elapsed: time.Since(r.base)}
			for _, w := range r.workers {
				now.Completed += w.completedSoFar.Load()
				now.Failed += w.failedSoFar.Load()
			}
			now.RequestsPerSecond = float64(now.Completed-last.Completed) / (now.Elapsed - last.Elapsed).Seconds()
			r.Progress(now)
			last = now
		}
	}
}
