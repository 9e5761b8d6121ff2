// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// verdict is what a response says after some input and, if it is not done by
// then, the end of the connection.
type verdict struct {
	status     int
	body       int64
	used       int
	persistent bool
	err        error
}

// read feeds input in pieces, cut by next, and gives the verdict.
func read(input []byte, next func(left int) int) verdict {
	var r response
	r.reset()
	v := verdict{}
	for v.used < len(input) && !r.done() && v.err == nil {
		piece := input[v.used : v.used+next(len(input)-v.used)]
		n, err := r.feed(piece)
		if n > len(piece) || (err == nil && n < len(piece) && !r.done()) {
			panic(fmt.Sprintf("fed %d bytes, used %d, %v", len(piece), n, err))
		}
		v.used += n
		v.err = err
	}
	if v.err == nil {
		v.err = r.endOfInput()
	}
	if v.err != nil {
		v.used = 0 // which byte gives an error away depends on the pieces
	}
	v.status, v.body, v.persistent = r.status, r.body, r.persistent()
	return v
}

func whole(left int) int    { return left }
func bytewise(left int) int { return 1 }

func TestResponse(t *testing.T) {
	long := strings.Repeat("x", maxResponseLine)
	tests := []struct {
		name, input string
		want        verdict
	}{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", verdict{200, 5, 43, true, nil}},
		{"more than the length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello!", verdict{200, 5, 43, true, nil}},
		{"less than the length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", verdict{200, 4, 0, true, errShortBody}},
		{"no length", "HTTP/1.0 200 OK\r\n\r\nhello", verdict{200, 5, 24, false, nil}},
		{"length 0", "HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", verdict{200, 0, 37, true, nil}},
		{"bare line feeds", "HTTP/1.1 200 OK\nConnection: close\nContent-Length: 1\n\nx", verdict{200, 1, 54, false, nil}},
		{"no reason", "HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n", verdict{404, 0, 35, true, nil}},
		{"1.0 kept", "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 0\r\n\r\n", verdict{200, 0, 62, true, nil}},
		{"1.1 closed by a list", "HTTP/1.1 200 OK\r\nConnection: x , Close\r\nContent-Length: 0\r\n\r\n", verdict{200, 0, 61, false, nil}},
		{"304 has no body", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", verdict{304, 0, 48, true, nil}},
		{"interim", "HTTP/1.1 100 Continue\r\nContent-Length: 7\r\n\r\nHTTP/1.1 204 No\r\n\r\n", verdict{204, 0, 63, true, nil}},
		{"interim alone", "HTTP/1.1 103 Early Hints\r\n\r\n", verdict{103, 0, 0, false, errNoResponse}},
		{"chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\nContent-Length: 99\r\n\r\n3\r\nhel\r\n2 ;a=b\r\nlo\r\n00\r\nT: x\r\n\r\n", verdict{200, 5, 105, true, nil}},
		{"chunk too long", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n", verdict{200, 3, 0, true, errBadChunk}},
		{"chunk of no size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", verdict{200, 0, 0, true, errBadChunk}},
		{"chunk too large", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n80000000000000000\r\n", verdict{200, 0, 0, true, errBadChunk}},
		{"chunk line too long", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + long, verdict{200, 0, 0, true, errBadChunk}},
		{"folded line", "HTTP/1.1 200 OK\r\nX: a\r\n Content-Length: 9\r\nContent-Length: 0\r\n\r\n", verdict{200, 0, 64, true, nil}},
		{"the same length twice", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", verdict{200, 1, 58, true, nil}},
		{"nothing", "", verdict{0, 0, 0, false, errNoResponse}},
		{"unfinished line", "HTTP/1.1 200 OK", verdict{0, 0, 0, false, errNoResponse}},
		{"unfinished header", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n", verdict{200, 0, 0, true, errNoResponse}},
		{"another protocol", "SSH-2.0-x\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"empty first line", "\r\nHTTP/1.1 200 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"version 2", "HTTP/2 200 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"version x", "HTTP/1.x 200 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"status of two digits", "HTTP/1.1 20 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"status of four digits", "HTTP/1.1 2000 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"status 099", "HTTP/1.1 099 OK\r\n\r\n", verdict{0, 0, 0, false, errNotHTTP}},
		{"header without colon", "HTTP/1.1 200 OK\r\nwhat\r\n\r\n", verdict{200, 0, 0, true, errNotHTTP}},
		{"header without name", "HTTP/1.1 200 OK\r\n: what\r\n\r\n", verdict{200, 0, 0, true, errNotHTTP}},
		{"negative length", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", verdict{200, 0, 0, true, errNotHTTP}},
		{"length too large", "HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999\r\n\r\n", verdict{200, 0, 0, true, errNotHTTP}},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", verdict{200, 0, 0, true, errNotHTTP}},
		{"long lines", "HTTP/1.1 200 " + long + "\r\nX: " + long + "\r\n" + long + "\r\nContent-Length: 0\r\n\r\n", verdict{200, 0, 811, true, nil}},
		{"a long line that matters", "HTTP/1.1 200 OK\r\nContent-Length: " + strings.Repeat(" ", maxResponseLine) + "5\r\n\r\nhello", verdict{200, 0, 0, true, errNotHTTP}},
		{"long header", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+long+"\r\n", 300), verdict{200, 0, 0, true, errHeadTooLarge}},
		{"long trailer", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + strings.Repeat("X: "+long+"\r\n", 300), verdict{200, 0, 0, true, errHeadTooLarge}},
	}
	for _, tt := range tests {
		for how, next := range map[string]func(int) int{"whole": whole, "by bytes": bytewise} {
			if got := read([]byte(tt.input), next); got != tt.want {
				t.Errorf("%s, %s: %+v, want %+v", tt.name, how, got, tt.want)
			}
		}
	}
}

func TestResponseServer(t *testing.T) {
	var r response
	for _, want := range []string{"", "x/1 (y)"} {
		r.reset()
		r.wantServer = want != ""
		r.feed([]byte("HTTP/1.1 204 No\r\nServer:  x/1 (y)\r\n\r\n"))
		if r.server != want {
			t.Errorf("server %q, want %q", r.server, want)
		}
	}
}

// However the input is cut, the verdict is the same; and where it is good, Go's
// own reader sees the same response.
func FuzzResponse(f *testing.F) {
	for _, seed := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nhello",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nT: x\r\n\r\n",
		"HTTP/1.1 503 Busy\nServer: x\nContent-Length:3\n\nabc and more",
		"HTTP/1.1 304 Not Modified\r\n\r\n",
		"SSH-2.0-OpenSSH\r\n",
		"\x16\x03\x01\x02\x00",
	} {
		f.Add([]byte(seed), uint8(3))
	}
	f.Fuzz(func(t *testing.T, input []byte, step uint8) {
		want := read(input, whole)
		for _, next := range []func(int) int{bytewise, func(left int) int { return min(left, int(step)+1) }} {
			if got := read(input, next); got != want {
				t.Fatalf("in pieces %+v, whole %+v", got, want)
			}
		}
		// Theirs stops at interim responses, does not know chunks in HTTP/1.0, and
		// joins folded lines.
		if want.err != nil || !bytes.HasPrefix(input, []byte("HTTP/1.1 ")) || bytes.HasPrefix(input, []byte("HTTP/1.1 1")) ||
			bytes.Contains(input, []byte("\n ")) || bytes.Contains(input, []byte("\n\t")) {
			return
		}
		theirs, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(input)), nil)
		if err != nil {
			return // it is stricter about headers that do not matter here
		}
		n, err := io.Copy(io.Discard, theirs.Body)
		if errors.Is(err, io.ErrUnexpectedEOF) || err == nil && n != want.body || theirs.StatusCode != want.status {
			t.Fatalf("status %d, body %d, %v; here %+v", theirs.StatusCode, n, err, want)
		}
	})
}
