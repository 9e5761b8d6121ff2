// SPDX-License-Identifier: Apache-2.0

package exposition_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"natkit/internal/words/exposition"
)

// served answers with one metric, and with health's word.
func served(t *testing.T, collect func() *exposition.Exposition, health error) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(exposition.Listen(l, collect, func() error { return health }))
	return l.Addr().String()
}

func things() *exposition.Exposition {
	e := exposition.New()
	e.Gauge(exposition.Metric("things", "Things there are."), 3)
	return e
}

// What Go's own client gets, which is what Prometheus uses.
func TestListen(t *testing.T) {
	address := served(t, things, nil)
	for _, test := range []struct {
		method, path string
		status       int
		body, kind   string
	}{
		{"GET", "/metrics", 200, "natkit_things 3\n", "text/plain; version=0.0.4; charset=utf-8"},
		{"GET", "/metrics?name=x", 200, "natkit_things 3\n", "text/plain; version=0.0.4; charset=utf-8"},
		{"HEAD", "/metrics", 200, "", "text/plain; version=0.0.4; charset=utf-8"},
		{"GET", "/healthz", 200, "ok\n", "text/plain; charset=utf-8"},
		{"GET", "/", 404, "there are /metrics and /healthz\n", "text/plain; charset=utf-8"},
		{"POST", "/metrics", 405, "want GET\n", "text/plain; charset=utf-8"},
	} {
		request, err := http.NewRequest(test.method, "http://"+address+test.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != test.status || !strings.HasSuffix(string(body), test.body) || answer.Header.Get("Content-Type") != test.kind {
			t.Errorf("%s %s: %v %q %v, %v", test.method, test.path, answer.Status, body, answer.Header, err)
		}
	}
	ill := served(t, func() *exposition.Exposition {
		e := things()
		e.Fail(exposition.Metric("things", ""), errors.New("no things"))
		return e
	}, errors.New("it rains"))
	for path, want := range map[string]string{"/metrics": "500 read metrics: natkit_things: no things\n", "/healthz": "503 it rains\n"} {
		answer, err := http.Get("http://" + ill + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if got := fmt.Sprintf("%d %s", answer.StatusCode, body); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

// Who sends something else gets an answer or nothing, and nobody else waits for that.
func TestListenPages(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(exposition.Listen(l, things, func() error { return nil },
		exposition.Page{Path: "/facts", Of: func() ([]byte, error) { return []byte(`{"a":1}`), nil }},
		exposition.Page{Path: "/later", Of: func() ([]byte, error) { return nil, errors.New("not yet") }}))
	for path, want := range map[string]string{
		"/facts": "200 application/json {\"a\":1}\n",
		"/later": "503 text/plain; charset=utf-8 not yet\n",
		"/":      "404 text/plain; charset=utf-8 there are /metrics, /facts, /later and /healthz\n",
	} {
		answer, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if got := fmt.Sprintf("%d %s %s", answer.StatusCode, answer.Header.Get("Content-Type"), body); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func TestListenToStrangers(t *testing.T) {
	address := served(t, things, nil)
	silent, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for request, want := range map[string]string{
		"\r\n\r\n":                                      "HTTP/1.1 400 ",
		"GET /metrics\r\n\r\n":                          "HTTP/1.1 400 ",
		"GET metrics HTTP/1.1\r\n\r\n":                  "HTTP/1.1 400 ",
		"\x16\x03\x01 \x00 \x00\n":                      "HTTP/1.1 400 ",
		"GET /metrics HTTP/1.0\n\n":                     "HTTP/1.1 200 ",
		"GET /" + strings.Repeat("a", 20<<10) + "\r\n":  "HTTP/1.1 431 ",
		"GET /healthz HTTP/1.1\r\nA: b\r\n\r\nand more": "HTTP/1.1 200 ",
	} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(conn, request)
		got, err := io.ReadAll(conn)
		if err != nil && len(got) == 0 || !strings.HasPrefix(string(got), want) {
			t.Errorf("%.30q: %.60q, %v; want %q", request, got, err, want)
		}
		conn.Close()
	}
}

// More scrapes at once than there is room for are refused, not queued.
func TestListenMany(t *testing.T) {
	inside, leave := make(chan struct{}), make(chan struct{})
	address := served(t, func() *exposition.Exposition {
		inside <- struct{}{}
		<-leave
		return things()
	}, nil)
	const room = 4
	results := make(chan int, room)
	for range room {
		go func() {
			answer, err := http.Get("http://" + address + "/metrics")
			if err != nil {
				results <- 0
				return
			}
			answer.Body.Close()
			results <- answer.StatusCode
		}()
	}
	for range room {
		<-inside
	}
	answer, err := http.Get("http://" + address + "/metrics")
	if err != nil || answer.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%v %v", answer, err)
	}
	close(leave)
	for range room {
		if status := <-results; status != 200 {
			t.Errorf("status %d", status)
		}
	}
}

// Whoever opens connections and says nothing, or does not read its answer, takes no more files and memory than those of so
// many, and not for long.
func TestListenManyConnections(t *testing.T) {
	address := served(t, things, nil)
	const most = 64
	var open []net.Conn
	for range most + 36 {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		open = append(open, conn)
	}
	closed := func(conn net.Conn, within time.Duration) bool {
		conn.SetReadDeadline(time.Now().Add(within))
		_, err := conn.Read(make([]byte, 1))
		return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
	}
	for i, conn := range open[most:] {
		if !closed(conn, 2*time.Second) {
			t.Fatalf("connection %d is open", most+i+1)
		}
	}
	if closed(open[most-1], 100*time.Millisecond) {
		t.Errorf("connection %d is closed", most)
	}
	for _, conn := range open {
		conn.Close()
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		answer, err := http.Get("http://" + address + "/metrics")
		if err == nil {
			answer.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after all were closed: %v", err)
		}
	}
}
