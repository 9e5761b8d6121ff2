// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// testServer accepts connections and gives each to behave, with its number from
// 1 and after having read the first request on it.
type testServer struct {
	listener net.Listener
	closing  chan struct{}
	working  sync.WaitGroup
}

type testConn struct {
	*net.TCPConn
	t       *testing.T
	in      *bufio.Reader
	n       int
	closing <-chan struct{}
}

func serve(t *testing.T, behave func(c *testConn)) *testServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, l, behave)
}

func serveOn(t *testing.T, l net.Listener, behave func(c *testConn)) *testServer {
	s := &testServer{listener: l, closing: make(chan struct{})}
	s.working.Go(func() {
		for n := 1; ; n++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s.working.Go(func() {
				defer conn.Close()
				c := &testConn{conn.(*net.TCPConn), t, bufio.NewReader(conn), n, s.closing}
				if c.request() != nil {
					behave(c)
				}
			})
		}
	})
	t.Cleanup(func() {
		close(s.closing)
		l.Close()
		s.working.Wait()
	})
	return s
}

func (s *testServer) url() string { return "http://" + s.listener.Addr().String() + "/" }

// request reads a request; nil at the end of the connection.
func (c *testConn) request() *http.Request {
	r, err := http.ReadRequest(c.in)
	if err != nil {
		return nil
	}
	return r
}

func (c *testConn) say(pieces ...string) {
	for _, p := range pieces {
		if _, err := io.WriteString(c, p); err != nil {
			return // the client may hang up first
		}
	}
}

// reset closes the connection with RST.
func (c *testConn) reset() {
	c.SetLinger(0)
	c.Close()
}

// hold keeps the connection open until the client or the test ends.
func (c *testConn) hold() {
	gone := make(chan struct{})
	go func() { io.Copy(io.Discard, c.in); close(gone) }()
	select {
	case <-gone:
	case <-c.closing:
		c.Close()
		<-gone
	}
}

const good = "HTTP/1.1 200 OK\r\nServer: test\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"

func run(t *testing.T, o HTTPOptions) (*HTTPResult, error) {
	t.Helper()
	if o.Workers == 0 {
		o.Workers = 2
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	res, err := HTTP(ctx, o)
	if ctx.Err() != nil {
		t.Fatalf("not done within 20 s: %v, %+v", err, res)
	}
	if res != nil {
		checkSums(t, res)
	}
	return res, err
}

// checkSums checks that every request is counted once.
func checkSums(t *testing.T, r *HTTPResult) {
	t.Helper()
	f := r.Failed
	if got := r.Completed + f.Connect + f.Receive + f.Exceptions + f.Timeout + r.Unfinished; got != r.Begun {
		t.Errorf("completed, failed and unfinished requests are %d, begun %d: %+v", got, r.Begun, r)
	}
	sum := int64(0)
	for _, n := range r.Failures {
		sum += n
	}
	if sum != f.Sum() {
		t.Errorf("failures %v are not failed %+v", r.Failures, f)
	}
}

// Each misbehaviour of a server is counted under its name, and none keeps the
// run from ending. The first connection of each server is answered well where
// firstGood is set, so that there is a length to differ from.
func TestMisbehavingServers(t *testing.T) {
	const n = 20
	header := "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"
	tests := []struct {
		name      string
		behave    func(c *testConn)
		firstGood bool
		options   HTTPOptions
		completed int64
		failed    HTTPFailed
		failures  map[string]int64
		check     func(t *testing.T, r *HTTPResult)
	}{
		{
			name:   "closes before the response",
			behave: func(*testConn) {}, firstGood: true,
			completed: 1, failed: HTTPFailed{Receive: n - 1}, failures: map[string]int64{"closed_early": n - 1},
		},
		{
			name:   "always closes before the response",
			behave: func(*testConn) {},
			failed: HTTPFailed{Receive: n}, failures: map[string]int64{"closed_early": n},
		},
		{
			name:   "closes within the header",
			behave: func(c *testConn) { c.say(header) },
			failed: HTTPFailed{Receive: n}, failures: map[string]int64{"closed_early": n},
		},
		{
			name:   "closes within the body",
			behave: func(c *testConn) { c.say(header, "\r\nhel") }, firstGood: true,
			completed: n, failed: HTTPFailed{Length: n - 1}, failures: map[string]int64{"body_short": n - 1},
			check: func(t *testing.T, r *HTTPResult) {
				if r.HTMLBytes != 5+3*(n-1) {
					t.Errorf("html bytes %d", r.HTMLBytes)
				}
			},
		},
		{
			name:   "closes within a chunk",
			behave: func(c *testConn) { c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel") },
			// The first of them decides the length, but each ends short of its own.
			completed: n, failed: HTTPFailed{Length: n}, failures: map[string]int64{"body_short": n},
		},
		{
			name:   "resets",
			behave: (*testConn).reset, firstGood: true,
			completed: 1, failed: HTTPFailed{Receive: n - 1}, failures: map[string]int64{"reset": n - 1},
		},
		{
			name:   "resets within the body",
			behave: func(c *testConn) { c.say(header, "\r\nhel"); c.reset() },
			failed: HTTPFailed{Receive: n}, failures: map[string]int64{"reset": n},
		},
		{
			name:   "never answers",
			behave: (*testConn).hold, options: HTTPOptions{SocketTimeout: 50 * time.Millisecond},
			failed: HTTPFailed{Timeout: n}, failures: map[string]int64{"response_timeout": n},
		},
		{
			name:   "stops within the body",
			behave: func(c *testConn) { c.say(header, "\r\nhel"); c.hold() }, options: HTTPOptions{SocketTimeout: 50 * time.Millisecond},
			failed: HTTPFailed{Timeout: n}, failures: map[string]int64{"response_timeout": n},
		},
		{
			name: "header drop by drop, without end",
			behave: func(c *testConn) {
				c.say("HTTP/1.1 200 OK\r\nX: ")
				for tick := time.NewTicker(10 * time.Millisecond); ; {
					select {
					case <-c.closing:
						return
					case <-tick.C:
						if _, err := c.Write([]byte("x")); err != nil {
							return
						}
					}
				}
			},
			options: HTTPOptions{SocketTimeout: 100 * time.Millisecond},
			failed:  HTTPFailed{Timeout: n}, failures: map[string]int64{"response_timeout": n},
		},
		{
			name:   "speaks another protocol and waits",
			behave: func(c *testConn) { c.say("220 mail.example ESMTP\r\n"); c.hold() },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"not_http": n},
		},
		{
			name:   "rubbish without end",
			behave: func(c *testConn) { rubbish(c, "\x00\xff\x13") },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"not_http": n},
		},
		{
			name:   "status line without end",
			behave: func(c *testConn) { rubbish(c, "HTTP/1.1 200 ") },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"header_too_large": n},
		},
		{
			name:   "header without end",
			behave: func(c *testConn) { c.say("HTTP/1.1 200 OK\r\n"); rubbish(c, "X-Header: value\r\n") },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"header_too_large": n},
		},
		{
			name:   "interim responses without end",
			behave: func(c *testConn) { rubbish(c, "HTTP/1.1 100 Continue\r\n\r\n") },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"header_too_large": n},
		},
		{
			name:   "malformed chunks",
			behave: func(c *testConn) { c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfive\r\nhello") },
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"bad_chunk": n},
		},
		{
			name: "two lengths",
			behave: func(c *testConn) {
				c.say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello")
			},
			failed: HTTPFailed{Exceptions: n}, failures: map[string]int64{"not_http": n},
		},
		{
			name:      "more than announced",
			behave:    func(c *testConn) { c.say(header, "\r\nhello and more") },
			completed: n, failed: HTTPFailed{Length: n}, failures: map[string]int64{"body_long": n},
		},
		{
			name:   "other lengths",
			behave: func(c *testConn) { c.say("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", "hello!") }, firstGood: true,
			completed: n, failed: HTTPFailed{Length: n - 1}, failures: map[string]int64{"length_differs": n - 1},
		},
		{
			name:   "errors",
			behave: func(c *testConn) { c.say("HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nhello") }, firstGood: true,
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.Non2xx != n-1 {
					t.Errorf("non-2xx %d, want %d", r.Non2xx, n-1)
				}
			},
		},
		{
			name:      "no length, ended by the close",
			behave:    func(c *testConn) { c.say("HTTP/1.0 200 OK\r\n\r\n", "hel", "lo") },
			completed: n, failures: map[string]int64{},
		},
		{
			name:   "no body",
			behave: func(c *testConn) { c.say("HTTP/1.1 204 No Content\r\n\r\n") }, completed: n, failures: map[string]int64{},
		},
		{
			name: "byte by byte",
			behave: func(c *testConn) {
				c.SetNoDelay(true)
				c.say(strings.Split("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n", "")...)
			},
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.DocumentBytes != 5 || r.HTMLBytes != 5*n {
					t.Errorf("document %d, html %d bytes", r.DocumentBytes, r.HTMLBytes)
				}
			},
		},
		{
			name: "a long header line, bare line feeds",
			behave: func(c *testConn) {
				c.say("HTTP/1.1 200\nCookie: ", strings.Repeat("x", 8000), "\nContent-Length:5\n\nhello")
			},
			completed: n, failures: map[string]int64{},
		},
		{
			name: "a large body",
			behave: func(c *testConn) {
				c.say("HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n", strings.Repeat("x", 3000000))
			},
			completed: n, failures: map[string]int64{},
		},
		{
			name:      "does not close",
			behave:    func(c *testConn) { c.say(good); c.hold() },
			options:   HTTPOptions{Concurrency: n},
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.LeftOpen != n {
					t.Errorf("left open %d, want %d", r.LeftOpen, n)
				}
			},
		},
		{
			name:      "answers keep-alive to a close",
			behave:    func(c *testConn) { c.say(header, "Connection: keep-alive\r\n\r\nhello"); c.hold() },
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.LeftOpen != n {
					t.Errorf("left open %d, want %d; %v s", r.LeftOpen, n, r.Seconds)
				}
			},
		},
		{
			name: "-k: resets a kept connection", // every request but the first meets one
			behave: func(c *testConn) {
				c.say(header, "Connection: keep-alive\r\n\r\nhello")
				c.request()
				c.reset()
			},
			options:   HTTPOptions{KeepAlive: true},
			completed: n, failures: map[string]int64{},
		},
		{
			name: "-k: closes a kept connection",
			behave: func(c *testConn) {
				c.say(header, "Connection: keep-alive\r\n\r\nhello")
				c.request()
			},
			options:   HTTPOptions{KeepAlive: true},
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.KeepAliveRequests != n {
					t.Errorf("keep-alive %d, want %d", r.KeepAliveRequests, n)
				}
			},
		},
		{
			name: "-k: closes a kept connection within the response",
			behave: func(c *testConn) {
				c.say(header, "Connection: keep-alive\r\n\r\nhello")
				if c.request() != nil {
					c.say("HTTP/1.1")
				}
			},
			options:   HTTPOptions{KeepAlive: true, Concurrency: 1},
			completed: n / 2, failed: HTTPFailed{Receive: n / 2}, failures: map[string]int64{"closed_early": n / 2},
		},
		{
			name: "-k: talks unasked on a kept connection",
			behave: func(c *testConn) {
				c.say(header, "Connection: keep-alive\r\n\r\nhelloHTTP/1.1 200 OK\r\n")
				c.hold()
			},
			options:   HTTPOptions{KeepAlive: true},
			completed: n, failed: HTTPFailed{Length: n}, failures: map[string]int64{"body_long": n},
		},
		{
			name: "-k: answers close",
			behave: func(c *testConn) {
				c.say(good)
			},
			options:   HTTPOptions{KeepAlive: true},
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.KeepAliveRequests != 0 {
					t.Errorf("keep-alive %d, want 0", r.KeepAliveRequests)
				}
			},
		},
		{
			name: "-k: answers chunks on kept connections",
			behave: func(c *testConn) {
				for ok := true; ok; ok = c.request() != nil {
					c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "2\r\nhe\r\n", "3\r\nllo\r\n0\r\n", "\r\n")
				}
			},
			options:   HTTPOptions{KeepAlive: true},
			completed: n, failures: map[string]int64{},
			check: func(t *testing.T, r *HTTPResult) {
				if r.KeepAliveRequests != n {
					t.Errorf("keep-alive %d, want %d", r.KeepAliveRequests, n)
				}
			},
		},
	}
	// The runtime's own descriptors come with the first listener, and stay.
	serve(t, func(c *testConn) { c.Close() })
	open, err := openFiles()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			behave := tt.behave
			answered := make(chan struct{}) // the first connection, so that its length is the first
			if tt.firstGood {
				behave = func(c *testConn) {
					if c.n == 1 {
						c.say(good)
						c.Close()
						close(answered)
						return
					}
					<-answered
					tt.behave(c)
				}
			}
			o := tt.options
			o.URL, o.Requests, o.TolerateErrors = serve(t, behave).url(), n, true
			if o.Concurrency == 0 {
				o.Concurrency = 4
			}
			if tt.firstGood {
				o.Concurrency = 1 // the client has to read the good response first, too
			}
			r, err := run(t, o)
			if err != nil {
				t.Fatal(err)
			}
			if r.Completed != tt.completed || r.Failed != tt.failed || r.Begun != n {
				t.Errorf("completed %d of %d, failed %+v, want %d, %+v", r.Completed, r.Begun, r.Failed, tt.completed, tt.failed)
			}
			if fmt.Sprint(r.Failures) != fmt.Sprint(tt.failures) {
				t.Errorf("failures %v, want %v", r.Failures, tt.failures)
			}
			if tt.check != nil {
				tt.check(t, r)
			}
		})
	}
	ktest.Wait(t, 5*time.Second, "the descriptors of the runs are closed", func() bool {
		now, err := openFiles()
		return err == nil && now <= open
	})
}

func rubbish(c *testConn, unit string) {
	block := strings.Repeat(unit, 1000)
	for {
		if _, err := io.WriteString(c, block); err != nil {
			return
		}
	}
}

func TestRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String() + "/"
	l.Close()
	r, err := run(t, HTTPOptions{URL: url, Concurrency: 5, Requests: 50, TolerateErrors: true})
	if err != nil || r.Failed != (HTTPFailed{Connect: 50}) || r.Failures["refused"] != 50 {
		t.Errorf("tolerant: %v, %+v", err, r)
	}
	r, err = run(t, HTTPOptions{URL: url, Concurrency: 5, Requests: 50})
	if !errors.Is(err, unix.ECONNREFUSED) || r == nil || r.Failed.Connect == 0 || r.Completed != 0 || r.Stopped != err.Error() {
		t.Errorf("not tolerant: %v, %+v", err, r)
	}
	if out, err := json.Marshal(r); err != nil { // NaN would be an error
		t.Errorf("result without completed requests: %v %s", err, out)
	}
}

// A full accept queue drops SYNs: connections are not made in time.
func TestConnectTimeout(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	r, err := run(t, HTTPOptions{
		URL: fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port), Concurrency: 10, Requests: 20,
		SocketTimeout: 200 * time.Millisecond, TolerateErrors: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.Failed != (HTTPFailed{Timeout: 20}) || r.Failures["connect_timeout"] == 0 || r.TCP.ListenOverflows == 0 {
		t.Errorf("failed %+v, failures %v, listen overflows %d", r.Failed, r.Failures, r.TCP.ListenOverflows)
	}
}

func TestStops(t *testing.T) {
	silent := serve(t, (*testConn).hold).url()
	t.Run("at the first time-out", func(t *testing.T) {
		r, err := run(t, HTTPOptions{URL: silent, Concurrency: 3, Requests: 100, SocketTimeout: 50 * time.Millisecond})
		if !errors.Is(err, errTimeout) || r == nil || r.Failed.Timeout == 0 || r.Begun > 10 {
			t.Errorf("%v, %+v", err, r)
		}
	})
	t.Run("at the time limit", func(t *testing.T) {
		r, err := run(t, HTTPOptions{URL: silent, Concurrency: 3, TimeLimit: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if r.Requests != 50000 || r.Begun != 3 || r.Unfinished != 3 || r.Seconds < 1 || r.Stopped != "" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("when interrupted", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("interrupted")
		begun := make(chan struct{})
		s := serve(t, func(c *testConn) {
			if c.n <= 10 {
				c.say(good)
				return
			}
			if c.n == 11 {
				close(begun)
			}
			c.hold()
		})
		go func() { <-begun; cancel(cause) }()
		r, err := HTTP(ctx, HTTPOptions{URL: s.url(), Concurrency: 2, Requests: 1000, Workers: 2})
		if !errors.Is(err, cause) || r == nil {
			t.Fatalf("%v, %+v", err, r)
		}
		checkSums(t, r)
		if r.Completed < 9 || r.Unfinished == 0 || r.Stopped == "" {
			t.Errorf("%+v", r)
		}
	})
}

// An open load begins at its rate and counts from when a request was due.
func TestRate(t *testing.T) {
	const n, rate = 40, 400
	s := serve(t, func(c *testConn) { c.say(good) })
	r, err := run(t, HTTPOptions{URL: s.url(), Concurrency: n, Requests: n, Rate: rate})
	if err != nil {
		t.Fatal(err)
	}
	if r.Completed != n || r.Rate == nil || r.Rate.Requested != rate || r.Rate.Achieved > rate+1 || r.Seconds < (n-1.0)/rate {
		t.Errorf("%+v %+v", r, r.Rate)
	}

	// One connection, every response 10 ms late: the queue that builds up is in the
	// times, which a closed load would not show.
	slow := serve(t, func(c *testConn) {
		time.Sleep(10 * time.Millisecond)
		c.say(good)
	})
	r, err = run(t, HTTPOptions{URL: slow.url(), Concurrency: 1, Requests: 10, Rate: 1000})
	if err != nil {
		t.Fatal(err)
	}
	if r.Total.Max < 90 || r.Total.Min < 9 || r.Rate.LateStarts < 8 || r.Rate.Achieved > 120 {
		t.Errorf("total %+v, rate %+v", r.Total, r.Rate)
	}
	if late := r.Total.Max - r.Connect.Max - r.Processing.Max; late < 50 {
		t.Errorf("a request that began late has no time before its connection: %+v %+v %+v", r.Total, r.Connect, r.Processing)
	}
}

func TestOptions(t *testing.T) {
	refused := []struct {
		options HTTPOptions
		option  string
	}{
		{HTTPOptions{URL: ""}, "URL"},
		{HTTPOptions{URL: "https://127.0.0.1/"}, "URL"},
		{HTTPOptions{URL: "ftp://127.0.0.1/"}, "URL"},
		{HTTPOptions{URL: "http://[fe80::1%25eth0]/"}, "URL"},
		{HTTPOptions{URL: "http:///path"}, "URL"},
		{HTTPOptions{URL: "http://u:p@127.0.0.1/"}, "URL"},
		{HTTPOptions{URL: "127.0.0.1:0"}, "URL"},
		{HTTPOptions{URL: "127.0.0.1:65536"}, "URL"},
		{HTTPOptions{URL: "127.0.0.1:x"}, "URL"},
		{HTTPOptions{URL: "http://127.0.0.1/a\nb"}, "URL"},
		{HTTPOptions{URL: "127.0.0.1", Concurrency: 2}, "Concurrency"},
		{HTTPOptions{URL: "127.0.0.1", Concurrency: -1}, "Concurrency"},
		{HTTPOptions{URL: "127.0.0.1", Concurrency: 1 << 40, Requests: 1 << 40}, "Concurrency"},
		{HTTPOptions{URL: "127.0.0.1", Requests: -1}, "Requests"},
		{HTTPOptions{URL: "127.0.0.1", TimeLimit: -1}, "TimeLimit"},
		{HTTPOptions{URL: "127.0.0.1", SocketTimeout: -1}, "SocketTimeout"},
		{HTTPOptions{URL: "127.0.0.1", Rate: -1}, "Rate"},
		{HTTPOptions{URL: "127.0.0.1", Workers: -1}, "Workers"},
		{HTTPOptions{URL: "127.0.0.1", Headers: []string{"no colon"}}, "Headers"},
		{HTTPOptions{URL: "127.0.0.1", Headers: []string{": x"}}, "Headers"},
		{HTTPOptions{URL: "127.0.0.1", Headers: []string{"A: b\r\nC: d"}}, "Headers"},
	}
	for _, tt := range refused {
		_, err := HTTP(t.Context(), tt.options)
		var option *OptionError
		if !errors.As(err, &option) || option.Fields[0] != tt.option {
			t.Errorf("%+v: %v, want one about %s", tt.options, err, tt.option)
		}
	}
	if _, err := HTTP(t.Context(), HTTPOptions{URL: "no-such-host.invalid"}); err == nil || !strings.Contains(err.Error(), "no-such-host.invalid") {
		t.Errorf("unknown host: %v", err)
	}
}

func TestRequest(t *testing.T) {
	s := serve(t, func(c *testConn) { c.say(good) })
	ask := func(o HTTPOptions) *http.Request {
		t.Helper()
		target, err := parseTarget(o.URL, o.KeepAlive, o.Headers)
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(string(target.request))))
		if err != nil {
			t.Fatalf("%v in %q", err, target.request)
		}
		return r
	}
	r := ask(HTTPOptions{URL: "example.org:8080/a%20b?q=1#fragment"})
	if r.Host != "example.org:8080" || r.RequestURI != "/a%20b?q=1" || r.Proto != "HTTP/1.0" || r.Header.Get("Connection") != "close" || r.Header.Get("User-Agent") != "natkit" {
		t.Errorf("%+v", r)
	}
	r = ask(HTTPOptions{URL: "http://[::1]", KeepAlive: true, Headers: []string{"host: other", "User-Agent:  x ", "X: 1", "X: 2"}})
	if r.Host != "other" || r.RequestURI != "/" || r.Header.Get("Connection") != "Keep-Alive" || r.UserAgent() != "x" || !slices.Equal(r.Header["X"], []string{"1", "2"}) {
		t.Errorf("%+v", r)
	}

	// A name is resolved, and the result says what it is.
	res, err := run(t, HTTPOptions{URL: strings.Replace(s.url(), "127.0.0.1", "localhost", 1)})
	if err != nil {
		t.Fatal(err)
	}
	if res.Completed != 1 || res.Host != "localhost" || res.Endpoint.String() != s.listener.Addr().String() || res.Server != "test" || res.DocumentBytes != 5 {
		t.Errorf("%+v", res)
	}
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		ktest.Missing(t, "no IPv6 here: %v", err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })}
	go s.Serve(l)
	defer s.Close()
	r, err := run(t, HTTPOptions{URL: l.Addr().String(), Requests: 10, Concurrency: 2})
	if err != nil || r.Completed != 10 || r.Failed.Sum() != 0 || r.PortsLeft > r.PortsRange {
		t.Errorf("%v, %+v", err, r)
	}
}

// newNamespace makes a namespace with a loopback device and settings of
// /proc/sys/net.
func newNamespace(t testing.TB, settings map[string]string) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	ip := ktest.Tool(t, "ip")
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ns.Close()
		netns.Delete(name)
	})
	if out, err := exec.Command(ip, "-n", name, "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err = ns.Do(func() error {
		for key, value := range settings {
			if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// The client's sockets, its counters and its ports are those of its namespace.
func TestNamespace(t *testing.T) {
	// Ten ports, of which one is reserved.
	ns := newNamespace(t, map[string]string{"ipv4/ip_local_port_range": "40000 40009", "ipv4/ip_local_reserved_ports": "40003"})
	var l net.Listener
	err := ns.Do(func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:80")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	s := serveOn(t, l, func(c *testConn) { c.say(good) })
	hold := func(n int) {
		t.Helper()
		err := ns.Do(func() error {
			for range n {
				c, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					return err
				}
				t.Cleanup(func() { c.Close() })
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	hold(3)
	o := HTTPOptions{URL: s.url(), Requests: 20, Concurrency: 2, Netns: ns, ServerNetns: ns, TolerateErrors: true}
	r, err := run(t, o)
	if err != nil || r.Completed != 20 || r.TCP.ListenOverflowsAt != "server" {
		t.Errorf("%v, %+v", err, r)
	}
	// The last connections may still wait for the server's last word.
	if r.PortsRange != 9 || r.PortsLeft > 6 || r.PortsLeft < 4 {
		t.Errorf("%d of %d ports left, want 6 of 9", r.PortsLeft, r.PortsRange)
	}

	hold(6)
	r, err = run(t, o)
	if err != nil || r.Failures["no_local_port"] != 20 || r.PortsLeft != 0 {
		t.Errorf("without ports: %v, %+v", err, r)
	}
	o.TolerateErrors = false
	if _, err = run(t, o); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("without ports: %v", err)
	}
}

// ab and natkit see the same responses of the same server.
func TestAgainstAB(t *testing.T) {
	ab := ktest.Tool(t, "ab")
	servers := map[string]func(t *testing.T) string{
		"go": func(t *testing.T) string {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/missing" {
					w.WriteHeader(http.StatusNotFound)
				}
				w.Header()["Date"] = []string{"Thu, 01 Jan 1970 00:00:00 GMT"}
				io.WriteString(w, strings.Repeat("natkit\n", 1000))
			})}
			go s.Serve(l)
			t.Cleanup(func() { s.Close() })
			return l.Addr().String()
		},
		"nginx": func(t *testing.T) string {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addr := l.Addr().String()
			l.Close()
			startNginx(t, nil, -1, addr)
			return addr
		},
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			addr := start(t)
			for _, tt := range []struct {
				path string
				keep bool
			}{{"/", false}, {"/", true}, {"/missing", false}} {
				url := "http://" + addr + tt.path
				args := []string{"-q", "-n", "300", "-c", "10", url}
				if tt.keep {
					args = append([]string{"-k"}, args...)
				}
				out, err := exec.CommandContext(t.Context(), ab, args...).Output()
				if err != nil {
					t.Fatalf("ab: %v\n%s", err, out)
				}
				figure := func(label string) int64 {
					m := regexp.MustCompile(`(?m)^` + label + `:\s+(\d+)`).FindSubmatch(out)
					if m == nil {
						return 0 // ab prints no zeros here
					}
					n, _ := strconv.ParseInt(string(m[1]), 10, 64)
					return n
				}
				r, err := run(t, HTTPOptions{URL: url, Requests: 300, Concurrency: 10, KeepAlive: tt.keep})
				if err != nil {
					t.Fatal(err)
				}
				for label, got := range map[string]int64{
					"Complete requests": r.Completed, "Failed requests": r.Failed.Sum(), "Non-2xx responses": r.Non2xx,
					"Document Length": r.DocumentBytes, "Total transferred": r.TransferredBytes, "HTML transferred": r.HTMLBytes,
					"Keep-Alive requests": r.KeepAliveRequests,
				} {
					if want := figure(label); got != want {
						t.Errorf("%s, keep-alive %v: %s %d, ab says %d", tt.path, tt.keep, label, got, want)
					}
				}
			}
		})
	}
}

// startNginx starts a server that people have, and waits until it listens.
func startNginx(t testing.TB, ns *netns.Handle, cpu int, addr string) {
	t.Helper()
	nginx := ktest.Tool(t, "nginx")
	dir := t.TempDir()
	conf := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log stderr;
events { worker_connections 16000; }
http {
	access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	server { listen %[2]s backlog=16384; location = / { return 200 "%[3]s"; } location / { return 404; } }
}
`, dir, addr, strings.Repeat("natkit ", 10))
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(nginx, "-c", conf, "-p", dir)
	if err := startOn(ns, cpu, cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	ktest.Wait(t, 5*time.Second, "nginx listens", func() bool {
		return ns.Do(func() error {
			c, err := net.Dial("tcp", addr)
			if err == nil {
				c.Close()
			}
			return err
		}) == nil
	})
}

// startOn starts a command in a namespace and on one processor, or on any if
// cpu is negative.
func startOn(ns *netns.Handle, cpu int, cmd *exec.Cmd) error {
	return ns.Do(func() error {
		if cpu < 0 {
			return cmd.Start()
		}
		var all, one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &all); err != nil {
			return err
		}
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer unix.SchedSetaffinity(0, &all)
		return cmd.Start()
	})
}

func TestProcAddrPort(t *testing.T) {
	for addr, want := range map[string]string{
		"127.0.0.1:80": "0100007F:0050",
		"[::1]:8080":   "00000000000000000000000001000000:1F90",
	} {
		if got := procAddrPort(netip.MustParseAddrPort(addr)); got != want {
			t.Errorf("%s: %s, want %s", addr, got, want)
		}
	}
}

// The page about measurements names keys of the JSON that there are.
func TestDocumentedKeys(t *testing.T) {
	text, err := os.ReadFile("../../docs/bench.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "#### How it measures, and what its JSON says\n")
	section, _, _ = strings.Cut(section, "\n#")
	encoded, err := json.Marshal(HTTPResult{Rate: &HTTPRate{}, Stopped: "x"})
	if err != nil {
		t.Fatal(err)
	}
	var result map[string]any
	if err := json.Unmarshal(encoded, &result); err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`([a-z][a-z_.]*)`").FindAllStringSubmatch(section, -1)
	within := result // the object of the name before, as in `failed.connect`, `receive`
	for _, m := range names {
		outer, inner, dotted := strings.Cut(m[1], ".")
		if dotted {
			within, _ = result[outer].(map[string]any)
			outer = inner
		}
		if _, ok := result[outer]; ok {
			continue
		}
		if _, ok := within[outer]; !ok {
			t.Errorf("%s is no key", m[1])
		}
	}
	if len(names) < 10 {
		t.Errorf("%d names are in the section", len(names))
	}
}
