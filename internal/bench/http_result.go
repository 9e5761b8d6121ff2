// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// HTTPResult is what HTTP measured. Its JSON form is stable: keys are added,
// never changed. Times are in milliseconds, and those of single requests are of
// the completed ones.
//
// Requests = Completed + Failed.Connect + Failed.Receive + Failed.Exceptions +
// Failed.Timeout + Unfinished + those never begun. Failed.Length is among the
// completed, as in ab(1).
type HTTPResult struct {
	URL string `json:"url"`
	// Endpoint is what the host of the URL resolved to.
	Endpoint    snapshot.Endpoint `json:"endpoint,omitzero"`
	Host        string            `json:"hostname"`
	Port        int               `json:"port"`
	Path        string            `json:"path"`
	Server      string            `json:"server_software"` // its Server header
	Concurrency int               `json:"concurrency"`
	Workers     int               `json:"workers"`
	KeepAlive   bool              `json:"keep_alive"`

	Requests  int64      `json:"requests"` // asked for
	Begun     int64      `json:"started"`
	Completed int64      `json:"completed"` // whose response came to its end
	Failed    HTTPFailed `json:"failed"`
	// Failures says more precisely what Failed counts: code -> count, those that
	// happened only. See FailureList.
	Failures   map[string]int64 `json:"failures"`
	Unfinished int64            `json:"unfinished"` // under way when the run was stopped or its time was over
	Non2xx     int64            `json:"non_2xx"`    // completed with a status other than 200 to 299
	// KeepAliveRequests is responses after which the connection was kept.
	KeepAliveRequests int64 `json:"keep_alive_requests"`
	// LeftOpen is responses after which the server did not close the connection
	// though asked to, so that the client had to.
	LeftOpen int64 `json:"left_open"`

	Seconds           float64 `json:"duration_s"`
	RequestsPerSecond float64 `json:"requests_per_second"` // completed
	TimePerRequestMS  float64 `json:"time_per_request_ms"` // mean: Concurrency * Seconds / Completed
	TimePerRequestAll float64 `json:"time_per_request_across_ms"`

	DocumentBytes    int64   `json:"document_bytes"`    // body of the first response
	TransferredBytes int64   `json:"transferred_bytes"` // all that was received
	HTMLBytes        int64   `json:"html_bytes"`        // of that, bodies of completed responses
	TransferRate     float64 `json:"transfer_kbytes_per_second"`

	Connect    Times `json:"connect_ms"`    // from dialling until the connection was made; 0 on a kept one
	Processing Times `json:"processing_ms"` // from there until the response's end
	Waiting    Times `json:"waiting_ms"`    // from when the request was sent until the first byte of the response
	Total      Times `json:"total_ms"`      // from when the request began, or with a rate should have begun, until the response's end
	// Percentiles of Total, under "50" to "100".
	Percentiles map[string]float64 `json:"percentiles_ms"`

	Rate *HTTPRate   `json:"rate,omitempty"` // of an open load
	TCP  TCPCounters `json:"tcp_counters"`
	// ClientCPUShare is the processor time of the workers' threads over the time
	// they ran: near 1 means that the client is the limit.
	ClientCPUShare float64 `json:"client_cpu_share"`
	// MachineCPUSeconds is for how long the processors of this machine were busy
	// in that time, all together and with whatever: the client and, where they are here,
	// the server and what is between.
	MachineCPUSeconds float64 `json:"machine_cpu_s"`
	Ports
	Stopped string `json:"stopped,omitempty"` // why the run ended before its time
}

// HTTPFailed counts failed requests under ab(1)'s names.
type HTTPFailed struct {
	Connect    int64 `json:"connect"`    // no connection
	Receive    int64 `json:"receive"`    // the connection broke or ended before the response did
	Length     int64 `json:"length"`     // the response's body had not the length announced, or that of the first
	Exceptions int64 `json:"exceptions"` // the response was not HTTP
	Timeout    int64 `json:"timeout"`
}

// Sum is all failed requests.
func (f HTTPFailed) Sum() int64 {
	return f.Connect + f.Receive + f.Length + f.Exceptions + f.Timeout
}

// HTTPRate is how well an open load was kept up.
type HTTPRate struct {
	Requested  float64 `json:"requested"`   // beginnings a second
	Achieved   float64 `json:"achieved"`    // the same, from the start of the run to the last of them
	LateStarts int64   `json:"late_starts"` // requests that began more than 1 ms late
}

// Times is the distribution of one of a request's times, in milliseconds.
type Times struct {
	Min    float64 `json:"min"`
	Mean   float64 `json:"mean"`
	SD     float64 `json:"sd"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

// Percentages are the shares for which HTTPResult has percentiles, ab(1)'s.
var Percentages = [...]int{50, 66, 75, 80, 90, 95, 98, 99, 100}

// failure is a way in which a request fails.
type failure uint8

const (
	failRefused failure = iota
	failUnreachable
	failNoPort
	failConnect
	failReset
	failClosedEarly
	failReceive
	failShortBody
	failLongBody
	failLengthDiffers
	failNotHTTP
	failHeadTooLarge
	failBadChunk
	failConnectTimeout
	failAnswerTimeout
	failureCount
)

// failures gives each failure its code in JSON, the name it is counted under,
// and a line for people.
var failures = [failureCount]struct {
	code    string
	counter func(*HTTPFailed) *int64
	text    string
}{
	failRefused:        {"refused", countConnect, "connection refused"},
	failUnreachable:    {"unreachable", countConnect, "no route, or a router said so"},
	failNoPort:         {"no_local_port", countConnect, "no local port left: widen net.ipv4.ip_local_port_range, or wait a minute"},
	failConnect:        {"connect_other", countConnect, "connecting failed otherwise"},
	failReset:          {"reset", countReceive, "connection reset by the server, or on the way"},
	failClosedEarly:    {"closed_early", countReceive, "closed before the response's header was complete"},
	failReceive:        {"receive_other", countReceive, "sending or receiving failed otherwise"},
	failShortBody:      {"body_short", countLength, "closed before the response's body was complete"},
	failLongBody:       {"body_long", countLength, "more came than the response's length"},
	failLengthDiffers:  {"length_differs", countLength, "body not as long as the first response's"},
	failNotHTTP:        {"not_http", countException, "the response was not HTTP"},
	failHeadTooLarge:   {"header_too_large", countException, "the response's header was larger than 64 KiB"},
	failBadChunk:       {"bad_chunk", countException, "the response's chunks were malformed"},
	failConnectTimeout: {"connect_timeout", countTimeout, "no connection within the socket time-out"},
	failAnswerTimeout:  {"response_timeout", countTimeout, "connected, but no response within the socket time-out"},
}

func countConnect(f *HTTPFailed) *int64   { return &f.Connect }
func countReceive(f *HTTPFailed) *int64   { return &f.Receive }
func countLength(f *HTTPFailed) *int64    { return &f.Length }
func countException(f *HTTPFailed) *int64 { return &f.Exceptions }
func countTimeout(f *HTTPFailed) *int64   { return &f.Timeout }

// HTTPFailure is a row of HTTPResult.Failures.
type HTTPFailure struct {
	Code, Text string
	Count      int64
}

// FailureList is Failures in a fixed order, with a line for people.
func (r *HTTPResult) FailureList() []HTTPFailure {
	var out []HTTPFailure
	for _, f := range failures {
		if n := r.Failures[f.code]; n > 0 {
			out = append(out, HTTPFailure{f.code, f.text, n})
		}
	}
	return out
}

// ofSocket tells whether a failure ends a run that does not tolerate errors.
func (f failure) ofSocket() bool {
	switch f {
	case failShortBody, failLongBody, failLengthDiffers, failNotHTTP, failHeadTooLarge, failBadChunk, failClosedEarly:
		return false
	}
	return true
}

// verb is what was being done when a socket failed.
func (f failure) verb() string {
	switch f {
	case failRefused, failUnreachable, failNoPort, failConnect, failConnectTimeout:
		return "connect to"
	}
	return "receive from"
}

func connectFailure(err error) failure {
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return failRefused
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return failUnreachable
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return failNoPort
	case errors.Is(err, unix.ETIMEDOUT): // the kernel gave up before natkit did
		return failConnectTimeout
	}
	return failConnect
}

func receiveFailure(err error) failure {
	switch {
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return failReset
	case errors.Is(err, unix.ETIMEDOUT):
		return failAnswerTimeout
	}
	return failReceive
}

func responseFailure(err error) failure {
	switch {
	case errors.Is(err, errHeadTooLarge):
		return failHeadTooLarge
	case errors.Is(err, errBadChunk):
		return failBadChunk
	}
	return failNotHTTP
}

// httpTally is what one worker counts.
type httpTally struct {
	completed, failed, unfinished, non2xx, kept, leftOpen, late int64

	failures    [failureCount]int64
	bytes, body int64
	server      string
	begun       int
	lastBegin   int64
	lastEnd     int64 // when its last request ended, well or not

	connect, processing, waiting, total distribution

	wall, processor time.Duration // of the worker's thread
}

func (t *httpTally) count(f failure) {
	t.failures[f]++
	t.failed++
}

// result puts the workers' tallies together.
func (r *httpRun) result() *HTTPResult {
	res := &HTTPResult{
		URL: r.URL, Endpoint: snapshot.EndpointOf(r.target.addr), Host: r.target.host, Port: int(r.target.port), Path: r.target.path,
		Concurrency: r.Concurrency, Workers: len(r.workers), KeepAlive: r.KeepAlive,
		Requests: int64(r.Requests), DocumentBytes: max(r.docBytes.Load(), 0),
		Failures: map[string]int64{}, Percentiles: map[string]float64{},
	}
	var all httpTally
	for _, w := range r.workers {
		res.add(&w.tally)
		all.merge(&w.tally)
	}

	// A run that was cut short lasted until then; one that made all its requests
	// until the last of them ended, not until the server closed the connection.
	seconds := time.Duration(all.lastEnd).Seconds()
	if r.halted != nil || res.Unfinished > 0 {
		seconds = r.lasted.Seconds()
	}
	res.Seconds = round(seconds, 6)
	res.RequestsPerSecond = round(ratio(float64(res.Completed), seconds), 2)
	res.TimePerRequestAll = round(ratio(seconds*1000, float64(res.Completed)), 6)
	res.TimePerRequestMS = round(ratio(seconds*1000*float64(r.Concurrency), float64(res.Completed)), 3)
	res.TransferRate = round(ratio(float64(res.TransferredBytes)/1024, seconds), 2)
	res.ClientCPUShare = round(ratio(all.processor.Seconds(), all.wall.Seconds()), 3)
	res.Connect, res.Processing, res.Waiting, res.Total = all.connect.times(), all.processing.times(), all.waiting.times(), all.total.times()
	for _, p := range Percentages {
		res.Percentiles[fmt.Sprint(p)] = milliseconds(all.total.quantile(float64(p) / 100))
	}
	if r.Rate > 0 {
		res.Rate = &HTTPRate{
			Requested:  r.Rate,
			Achieved:   round(ratio(float64(res.Begun-1), time.Duration(all.lastBegin).Seconds()), 2),
			LateStarts: all.late,
		}
	}
	return res
}

// add counts a worker's requests.
func (res *HTTPResult) add(t *httpTally) {
	res.Begun += int64(t.begun)
	res.Completed += t.completed
	res.Unfinished += t.unfinished
	res.Non2xx += t.non2xx
	res.KeepAliveRequests += t.kept
	res.LeftOpen += t.leftOpen
	res.TransferredBytes += t.bytes
	res.HTMLBytes += t.body
	for f, n := range t.failures {
		if n > 0 {
			res.Failures[failures[f].code] += n
			*failures[f].counter(&res.Failed) += n
		}
	}
	if res.Server == "" {
		res.Server = t.server
	}
}

// merge adds a worker's times.
func (t *httpTally) merge(o *httpTally) {
	t.connect.merge(&o.connect)
	t.processing.merge(&o.processing)
	t.waiting.merge(&o.waiting)
	t.total.merge(&o.total)
	t.wall += o.wall
	t.processor += o.processor
	t.late += o.late
	t.lastEnd = max(t.lastEnd, o.lastEnd)
	t.lastBegin = max(t.lastBegin, o.lastBegin)
}

func (d *distribution) times() Times {
	return Times{
		Min: milliseconds(d.min), Mean: milliseconds(d.mean()), SD: milliseconds(d.deviation()),
		Median: milliseconds(d.quantile(0.5)), Max: milliseconds(d.max),
	}
}

// milliseconds has three decimals: what is below a microsecond is the clock.
func milliseconds(d time.Duration) float64 { return round(float64(d)/float64(time.Millisecond), 3) }

// ratio is 0 where there is nothing to divide by: a result has no NaN.
func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

func round(v float64, decimals int) float64 {
	scale := math.Pow10(decimals)
	return math.Round(v*scale) / scale
}
