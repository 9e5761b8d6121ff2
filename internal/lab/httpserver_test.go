// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

const testBody = "the body\n"

// web starts a server in a lab and returns a way to connect to it through the NAT.
func web(t testing.TB, o lab.HTTPServerOptions) (*lab.HTTPServer, func() *net.TCPConn) {
	t.Helper()
	l := up(t, "published", lab.Options{})
	if o.Body == nil {
		o.Body = []byte(testBody)
	}
	s, err := l.ServerNode().ServeHTTP(t.Context(), ":80", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	client := l.Node(lab.RoleClient)
	return s, func() *net.TCPConn {
		var c *net.TCPConn
		if err := client.Do(func() (err error) {
			c, err = net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(netip.MustParseAddrPort("192.168.0.96:8080")))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		return c
	}
}

// answer reads until the server closes.
func answer(t *testing.T, c *net.TCPConn) string {
	t.Helper()
	all, err := io.ReadAll(c)
	if err != nil {
		t.Errorf("after %q: %v", all, err)
	}
	return string(all)
}

// What a client may send, in the pieces in which it arrives, and what it gets.
func TestHTTPRequests(t *testing.T) {
	s, connect := web(t, lab.HTTPServerOptions{})
	long := "X-Long: " + strings.Repeat("x", 4000) + "\r\n"
	for _, c := range []struct {
		name   string
		pieces []string
		status string
		body   string
	}{
		{"get", []string{"GET / HTTP/1.0\r\n\r\n"}, "200 OK", testBody},
		{"keep-alive is not wanted", []string{"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"}, "200 OK", testBody},
		{"head", []string{"HEAD / HTTP/1.0\r\n\r\n"}, "200 OK", ""},
		{"in pieces", []string{"G", "E", "T / HTTP/1.0\r", "\nHost: x\r\n", "\r", "\n"}, "200 OK", testBody},
		{"bare line feeds", []string{"GET / HTTP/1.0\nHost: x\n", "\n"}, "200 OK", testBody},
		{"two at once", []string{"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"}, "200 OK", testBody},
		{"body in the head's packet", []string{"GET / HTTP/1.0\r\n\r\nsomething"}, "200 OK", testBody},
		{"long head", []string{"GET / HTTP/1.0\r\n", long, long, long, "\r\n"}, "200 OK", testBody},
		{"post", []string{"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc"}, "400 Bad Request", ""},
		{"method like get", []string{"GETS / HTTP/1.0\r\n\r\n"}, "400 Bad Request", ""},
		{"rubbish", []string{"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"}, "400 Bad Request", ""},
		{"rubbish that goes on", []string{"\x00", long, long, long, long, long}, "400 Bad Request", ""},
		{"endless head", []string{"GET / HTTP/1.0\r\n", long, long, long, long, long}, "431 Request Header Fields Too Large", ""},
		{"nothing", nil, "", ""},
		{"half a head", []string{"GET / HTTP/1.0\r\nHost"}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect()
			conn.SetNoDelay(true)
			for _, p := range c.pieces {
				if _, err := io.WriteString(conn, p); err != nil {
					t.Fatal(err)
				}
			}
			if c.status == "" {
				conn.CloseWrite()
				if got := answer(t, conn); got != "" {
					t.Errorf("answer %q, want none", got)
				}
				return
			}
			got := answer(t, conn)
			status, rest, _ := strings.Cut(got, "\r\n")
			head, body, _ := strings.Cut(rest, "\r\n\r\n")
			length := len(c.body)
			if c.name == "head" {
				length = len(testBody)
			}
			if status != "HTTP/1.0 "+c.status || body != c.body || !strings.Contains(head+"\r\n", fmt.Sprintf("Content-Length: %d\r\n", length)) {
				t.Errorf("answer %q, want %s with body %q", got, c.status, c.body)
			}
		})
	}
	if st := s.Stats(); st.Answered != 8 || st.Refused != 5 || st.Idle != 0 {
		t.Errorf("stats %+v, want 8 answered, 5 refused", st)
	}
	// Go's own client takes an answer for HTTP.
	conn := connect()
	fmt.Fprint(conn, "GET / HTTP/1.0\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || res.StatusCode != 200 || res.ContentLength != int64(len(testBody)) || !res.Close {
		t.Errorf("as net/http sees it: %+v, %v", res, err)
	}
}

// Several requests on one connection, as HTTP/1.1 has it, or HTTP/1.0 where it asks for it; the head in
// one piece or in several. With close it ends.
func TestHTTPKeepAlive(t *testing.T) {
	s, connect := web(t, lab.HTTPServerOptions{})
	requests := uint64(0)
	for name, heads := range map[string][]string{
		"1.1":                   {"GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
		"1.1, asked for":        {"GET / HTTP/1.1\r\nHost: x\r\nConnection: Keep-Alive\r\n\r\n"},
		"1.0, asked for":        {"GET / HTTP/1.0\r\nconnection:keep-alive\r\n\r\n"},
		"in pieces":             {"GET / HT", "TP/1.1\r\nHost: x\r\nConn", "ection: keep-alive\r\n\r", "\n"},
		"other words":           {"GET / HTTP/1.1\r\nX-Connection: close\r\nConnection-Id: close\r\n\r\n"},
		"a query like a header": {"GET /?connection:close HTTP/1.1\r\n\r\n"},
	} {
		conn := connect()
		conn.SetNoDelay(true)
		r := bufio.NewReader(conn)
		for range 5 {
			for _, piece := range heads {
				io.WriteString(conn, piece)
			}
			res, err := http.ReadResponse(r, nil)
			if err != nil || res.Close || res.Proto != "HTTP/1.1" {
				t.Fatalf("%s: %+v, %v", name, res, err)
			}
			if body, err := io.ReadAll(res.Body); err != nil || string(body) != testBody {
				t.Fatalf("%s: %q, %v", name, body, err)
			}
			requests++
		}
		io.WriteString(conn, "GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
		if rest, err := io.ReadAll(r); err != nil || !strings.HasPrefix(string(rest), "HTTP/1.0 200 OK") {
			t.Errorf("%s: after close: %q, %v", name, rest, err)
		}
		requests++
	}
	if st := s.Stats(); st.Answered != requests || st.Refused != 0 {
		t.Errorf("stats %+v, want %d answered", st, requests)
	}
}

// An answer larger than any socket buffer, to a client that is slow to read it.
func TestHTTPLargeBody(t *testing.T) {
	body := []byte(strings.Repeat("0123456789abcdef", 1<<20))
	_, connect := web(t, lab.HTTPServerOptions{Body: body})
	slow, quick := connect(), connect()
	fmt.Fprint(slow, "GET / HTTP/1.0\r\n\r\n")
	fmt.Fprint(quick, "GET / HTTP/1.0\r\n\r\n")
	if got := answer(t, quick); !strings.HasSuffix(got, string(body)) {
		t.Errorf("quick client got %d bytes", len(got))
	}
	if got := answer(t, slow); !strings.HasSuffix(got, string(body)) {
		t.Errorf("slow client got %d bytes", len(got))
	}
}

// Thousands of connections that say nothing, or half of something, or are gone
// without a word, hinder nobody, and end when their time is over.
func TestHTTPManyConnections(t *testing.T) {
	const many = 1500
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur < 2*many+500 { // client and server are one process here
		ktest.Missing(t, "needs %d open files, the limit is %d", 2*many+500, limit.Cur)
	}
	s, connect := web(t, lab.HTTPServerOptions{Idle: 2 * time.Second})
	conns := make([]*net.TCPConn, many)
	for i := range conns {
		conns[i] = connect()
		if i%3 == 1 {
			io.WriteString(conns[i], "GET / HTT")
		}
	}
	for range 50 {
		c := connect()
		io.WriteString(c, "GET / HTTP/1.0\r\n\r\n")
		if got := answer(t, c); !strings.HasSuffix(got, testBody) {
			t.Fatalf("answer %q", got)
		}
		c = connect()
		c.SetLinger(0)
		io.WriteString(c, "GET /")
		c.Close() // by a reset
	}
	ktest.Wait(t, 20*time.Second, "idle connections are closed", func() bool { return s.Stats().Idle >= many })
	for i, c := range conns {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Fatalf("connection %d: %v", i, err)
		}
		c.Close()
	}
}

// Without descriptors left connections wait, and are served when there are some.
func TestHTTPNoDescriptors(t *testing.T) {
	l := up(t, "routed", lab.Options{Server: lab.ServerBuiltin})
	pid, err := strconv.Atoi(strings.Fields(processesOf(t, l.Name())[0])[0])
	if err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 16, Max: 16}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	conns := make([]*net.TCPConn, 2*few.Cur)
	if err := l.Node(lab.RoleClient).Do(func() error {
		for i := range conns {
			if conns[i], err = net.DialTCP("tcp4", nil, &net.TCPAddr{IP: l.ServerNode().Addr.AsSlice(), Port: 80}); err != nil {
				return err
			}
			conns[i].SetDeadline(time.Now().Add(20 * time.Second))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	last := conns[len(conns)-1]
	defer last.Close()
	io.WriteString(last, "GET / HTTP/1.0\r\n\r\n")
	last.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := last.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the last of %d connections got %d bytes, %v: want none while the others are there", len(conns), n, err)
	}
	for _, c := range conns[:len(conns)-1] {
		c.Close()
	}
	last.SetReadDeadline(time.Now().Add(20 * time.Second))
	if got := answer(t, last); !strings.Contains(got, " 200 OK\r\n") {
		t.Errorf("answer %q", got)
	}
}

// A busy address and an impossible one are errors; Close frees the address.
func TestHTTPListen(t *testing.T) {
	l := up(t, "routed", lab.Options{})
	n := l.ServerNode()
	s, err := n.ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{":80", "203.0.113.99:81", "[::1]:81", "here:81", ""} {
		if other, err := n.ServeHTTP(t.Context(), addr, lab.HTTPServerOptions{}); err == nil {
			other.Close()
			t.Errorf("listening on %q succeeded", addr)
		}
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	again, err := n.ServeHTTP(t.Context(), ":80", lab.HTTPServerOptions{Backlog: 100000})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := n.SysctlValue("net.core.somaxconn"); err != nil || got != "100000" {
		t.Errorf("somaxconn %s, %v, want it raised to the backlog", got, err)
	}
	if err := l.Down(); err != nil {
		t.Error(err)
	}
	if err := again.Close(); err != nil { // it ended with its lab
		t.Error(err)
	}
}

// A load of ab with 5000 connections at a time loses none: no overflow of the
// listen queue, no failed request.
func TestHTTPUnderLoad(t *testing.T) {
	ktest.Tool(t, "ab")
	l := up(t, "published", lab.Options{Server: lab.ServerBuiltin})
	out, err := l.Node(lab.RoleClient).Command(t.Context(), "sh", "-c", "ulimit -n 5500 && exec ab -q -c 5000 -n 6000 -s 30 $0", l.DirectURL()).CombinedOutput()
	if err != nil {
		t.Fatalf("ab: %v\n%s", err, out)
	}
	if !regexp.MustCompile(`Complete requests: +6000\n`).Match(out) || !noneFailed.Match(out) {
		t.Errorf("ab:\n%s", out)
	}
	var stat []byte
	if err := l.NATNode().Do(func() (err error) { stat, err = os.ReadFile("/proc/thread-self/net/netstat"); return err }); err != nil {
		t.Fatal(err)
	}
	if got := counter(t, string(stat), "ListenOverflows"); got != 0 {
		t.Errorf("%d listen overflows", got)
	}
}

// counter finds a TcpExt counter in the text of /proc/net/netstat.
func counter(t testing.TB, netstat, name string) int {
	t.Helper()
	lines := strings.Split(netstat, "\n")
	for i, field := range strings.Fields(lines[0]) {
		if field == name {
			n, err := strconv.Atoi(strings.Fields(lines[1])[i])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no counter %s", name)
	return 0
}

var (
	requestsPerSecond = regexp.MustCompile(`Requests per second: +([0-9.]+)`)
	noneFailed        = regexp.MustCompile(`Failed requests: +0\n`)
)

// BenchmarkHTTPServer compares with nginx, both as background servers, by ab over
// the lab's path without NAT, taking turns.
func BenchmarkHTTPServer(b *testing.B) {
	ktest.Tool(b, "ab")
	ktest.Tool(b, "nginx")
	labs := map[string]*lab.Lab{
		"natkit": up(b, "published", lab.Options{Server: lab.ServerBuiltin}),
		"nginx":  up(b, "published", lab.Options{Server: lab.ServerNginx}),
	}
	for _, l := range labs {
		// ab leaves thousands of ports in TIME_WAIT when it ends; with few left, the
		// search for a free one would be what is measured.
		if err := l.Node(lab.RoleClient).Sysctl("net.ipv4.ip_local_port_range", "1024 65535"); err != nil {
			b.Fatal(err)
		}
	}
	for _, concurrency := range []string{"100", "5000"} {
		b.Run("c="+concurrency, func(b *testing.B) {
			rates := map[string][]float64{}
			for b.Loop() {
				for _, name := range []string{"natkit", "nginx"} {
					l := labs[name]
					out, err := l.Node(lab.RoleClient).Command(b.Context(), "sh", "-c", "ulimit -n 5500 && exec ab -q -r -s 30 -n 20000 -c $0 $1", concurrency, l.DirectURL()).Output()
					var exit *exec.ExitError
					if err != nil && !errors.As(err, &exit) {
						b.Fatal(err)
					}
					m := requestsPerSecond.FindSubmatch(out)
					if m == nil || !noneFailed.Match(out) {
						b.Fatalf("ab: %v\n%s", err, out)
					}
					rate, err := strconv.ParseFloat(string(m[1]), 64)
					if err != nil {
						b.Fatal(err)
					}
					rates[name] = append(rates[name], rate)
				}
			}
			var ratios []float64
			for i := range rates["natkit"] {
				ratios = append(ratios, rates["natkit"][i]/rates["nginx"][i])
			}
			for unit, values := range map[string][]float64{"natkit-req/s": rates["natkit"], "nginx-req/s": rates["nginx"], "natkit/nginx": ratios} {
				slices.Sort(values)
				b.ReportMetric(values[len(values)/2], unit) // the median
				b.Logf("%s: %.4g (%.4g - %.4g, n = %d)", unit, values[len(values)/2], values[0], values[len(values)-1], len(values))
			}
		})
	}
}
