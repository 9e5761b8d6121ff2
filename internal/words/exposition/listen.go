// SPDX-License-Identifier: Apache-2.0

package exposition

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// What a scrape needs of HTTP is one request and one answer. net/http, which knows all of it and
// TLS, would be more than a megabyte of the program.

const (
	// mostScrapes are how many answers are made at once.
	mostScrapes = 4
	// mostConnections are how many there are at once. Each takes a file of the process, and holds its answer until that is
	// read: whoever reaches the address must not be able to use up files or memory. More than that are closed at once.
	mostConnections = 64
	// mostRequest is how many bytes a request may have, and requestTime how long it may take to come.
	mostRequest = 16 << 10
	requestTime = 5 * time.Second
	answerTime  = 10 * time.Second // the default of Prometheus for all of a scrape

	// acceptPause is after an error of accept, such as too many open files.
	acceptPause = 100 * time.Millisecond
)

// Page is JSON that is served besides: its path, and what it holds now or why there is nothing yet.
type Page struct {
	Path string
	Of   func() ([]byte, error)
}

// Listen answers Prometheus at /metrics, and who asks whether all is well at /healthz, until it is stopped.
func Listen(l net.Listener, collect func() *Exposition, health func() error, pages ...Page) (stop func()) {
	s := &server{collect: collect, health: health, pages: pages, slots: make(chan struct{}, mostScrapes), connections: make(chan struct{}, mostConnections)}
	go func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(acceptPause)
				continue
			}
			select {
			case s.connections <- struct{}{}:
				s.running.Go(func() {
					defer func() { <-s.connections }()
					s.serve(conn)
				})
			default:
				conn.Close()
			}
		}
	}()
	return func() {
		l.Close()
		done := make(chan struct{})
		go func() { s.running.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(time.Second):
		}
	}
}

type server struct {
	collect func() *Exposition
	health  func() error
	pages   []Page
	slots   chan struct{}
	running sync.WaitGroup

	connections chan struct{}
}

// answer is what a request gets.
type answer struct {
	status      string // "200 OK"
	contentType string // "" for plain text
	allow       string
	body        []byte
}

func failed(status, why string) answer { return answer{status: status, body: []byte(why + "\n")} }

// serve answers the one request of a connection.
func (s *server) serve(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(requestTime))
	in := &io.LimitedReader{R: conn, N: mostRequest}
	method, path, err := readRequest(bufio.NewReader(in))
	var a answer
	switch {
	case err != nil && in.N <= 0:
		a = failed("431 Request Header Fields Too Large", "the request is too long")
	case errors.Is(err, errRequest):
		a = failed("400 Bad Request", err.Error())
	case err != nil: // nobody waits for an answer
		return
	default:
		a = s.answer(method, path)
	}
	conn.SetDeadline(time.Now().Add(answerTime))
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %s\r\nDate: %s\r\nConnection: close\r\nContent-Length: %d\r\n", a.status, time.Now().UTC().Format("Mon, 02 Jan 2006 15:04:05 GMT"), len(a.body))
	if a.contentType == "" {
		a.contentType = "text/plain; charset=utf-8"
	}
	fmt.Fprintf(&b, "Content-Type: %s\r\n", a.contentType)
	if a.allow != "" {
		fmt.Fprintf(&b, "Allow: %s\r\n", a.allow)
	}
	b.WriteString("\r\n")
	if method != "HEAD" {
		b.Write(a.body)
	}
	if _, err := b.WriteTo(conn); err != nil {
		return
	}
	// To close with bytes unread would reset the connection, and the answer might be lost.
	if c, ok := conn.(interface{ CloseWrite() error }); ok && c.CloseWrite() == nil {
		conn.SetDeadline(time.Now().Add(time.Second))
		io.Copy(io.Discard, io.LimitReader(conn, mostRequest))
	}
}

var errRequest = errors.New("this is no request of HTTP/1")

// readRequest reads a request's first line and passes over its headers.
func readRequest(in *bufio.Reader) (method, path string, err error) {
	first, err := in.ReadString('\n')
	if err != nil {
		return "", "", err
	}
	words := strings.Split(strings.TrimRight(first, "\r\n"), " ")
	if len(words) != 3 || !strings.HasPrefix(words[2], "HTTP/1.") || !strings.HasPrefix(words[1], "/") {
		return "", "", errRequest
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return "", "", err
		}
		if strings.TrimRight(line, "\r\n") == "" {
			path, _, _ = strings.Cut(words[1], "?")
			return words[0], path, nil
		}
	}
}

func (s *server) answer(method, path string) answer {
	page := slices.IndexFunc(s.pages, func(p Page) bool { return p.Path == path })
	if path != "/metrics" && path != "/healthz" && page < 0 {
		return failed("404 Not Found", "there are /metrics"+s.morePages()+" and /healthz")
	}
	if method != "GET" && method != "HEAD" {
		a := failed("405 Method Not Allowed", "want GET")
		a.allow = "GET, HEAD"
		return a
	}
	if path == "/healthz" {
		if err := s.health(); err != nil {
			return failed("503 Service Unavailable", err.Error())
		}
		return answer{status: "200 OK", body: []byte("ok\n")}
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	default:
		return failed("503 Service Unavailable", fmt.Sprintf("%d scrapes are being answered: ask again later", mostScrapes))
	}
	if page >= 0 {
		b, err := s.pages[page].Of()
		if err != nil {
			return failed("503 Service Unavailable", err.Error())
		}
		return answer{status: "200 OK", contentType: "application/json", body: append(b, '\n')}
	}
	e := s.collect()
	if e.err != nil {
		return failed("500 Internal Server Error", "read metrics: "+e.err.Error())
	}
	var b bytes.Buffer
	e.Write(&b)
	return answer{status: "200 OK", contentType: "text/plain; version=0.0.4; charset=utf-8", body: b.Bytes()}
}

// morePages are the paths of the pages, for a sentence.
func (s *server) morePages() (out string) {
	for _, p := range s.pages {
		out += ", " + p.Path
	}
	return out
}
