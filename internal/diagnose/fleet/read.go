// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"natkit/internal/snapshot"
	"natkit/internal/words/schema"
)

// Path is where natkit monitor serves its Node.
const Path = "/findings"

// Input is what was read of one file or URL: a node, or why there is none.
type Input struct {
	Name string
	Node *Node
	Err  error
}

const (
	// mostFetches is how many URLs are asked at once.
	mostFetches = 64
	// mostHead is how long the head of an HTTP reply may be.
	mostHead = 64 << 10
	// mostShort is how long a reply may be that is read beside any number of others: that of natkit monitor
	// is shorter. Of longer ones mostLong are read at once.
	mostShort = 256 << 10
	mostLong  = 4
)

// Read reads files and URLs, several at once, each until timeout; each is called with one after
// the other, in whatever order they come. What can't be read is an Input with an error.
func Read(ctx context.Context, names []string, timeout time.Duration, each func(Input)) {
	queue, results := make(chan string), make(chan Input)
	// Judging takes processor time and room, waiting for a reply does not.
	turns := turns{judging: make(chan struct{}, runtime.GOMAXPROCS(0)), long: make(chan struct{}, mostLong)}
	var workers sync.WaitGroup
	for range min(mostFetches, len(names)) {
		workers.Go(func() {
			for name := range queue {
				node, err := readOne(ctx, name, timeout, turns)
				results <- Input{name, node, err}
			}
		})
	}
	go func() {
		for _, name := range names {
			queue <- name
		}
		close(queue)
		workers.Wait()
		close(results)
	}()
	for in := range results {
		each(in)
	}
}

// turns bound what goes on at once: what is sent to them is taken back at the end.
type turns struct{ judging, long chan struct{} }

func readOne(ctx context.Context, name string, timeout time.Duration, turns turns) (*Node, error) {
	if err := ctx.Err(); err != nil {
		return nil, errors.New("interrupted before it was read")
	}
	if strings.Contains(name, "://") {
		// The whole of it before the turn to judge: a slow node must not hold up the others.
		b, done, err := fetch(ctx, name, timeout, turns.long)
		defer done()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		if err != nil {
			return nil, inWords(err, timeout)
		}
		if len(b) > maxReply {
			return nil, fmt.Errorf("the reply is longer than %d MiB", maxReply>>20)
		}
		turns.judging <- struct{}{}
		defer func() { <-turns.judging }()
		return parse(bytes.NewReader(b))
	}
	turns.judging <- struct{}{}
	defer func() { <-turns.judging }()
	f, err := os.Open(name)
	if err != nil {
		return nil, fileInWords(err)
	}
	defer f.Close()
	node, err := parse(f)
	return node, fileInWords(err)
}

// maxReply is how long a node's reply may be: a file of facts behind a URL, or natkit monitor's own.
const maxReply = maxNodeBytes

// parse reads a file of facts or a Node.
func parse(r io.Reader) (*Node, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	head, _ := in.Peek(256)
	if kindOf(head) == Kind {
		return load(in)
	}
	var j Judging
	_, _, err := snapshot.LoadEach(in, func(s *snapshot.Snapshot) error {
		j.Add(s)
		return nil
	})
	if err == nil && j.node.Namespaces == 0 {
		err = errors.New("it holds the facts of no namespace")
	}
	if err != nil {
		return nil, err
	}
	return j.Node(), nil
}

// kindOf is what JSON that begins so says of itself, "" for nothing.
func kindOf(head []byte) string {
	dec := json.NewDecoder(bytes.NewReader(head))
	var tokens [3]json.Token
	for i := range tokens {
		tokens[i], _ = dec.Token()
	}
	name, _ := tokens[2].(string)
	kind, _, _ := schema.Parse(name)
	return kind
}

// fetch asks for a URL, until timeout or the end of ctx. A long reply takes one of long, and then has
// the timeout once more; done gives it back. A reply of one request over plain HTTP is all that natkit
// monitor has.
func fetch(ctx context.Context, address string, timeout time.Duration, long chan struct{}) (reply []byte, done func(), err error) {
	done = func() {}
	u, err := urlOf(address)
	if err != nil {
		return nil, done, err
	}
	port := cmp.Or(u.Port(), "80")
	deadline := time.Now().Add(timeout)
	conn, err := (&net.Dialer{Deadline: deadline}).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return nil, done, err
	}
	defer conn.Close()
	conn.SetDeadline(deadline)
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	// HTTP/1.0: the reply ends with the connection, and is not sent in chunks.
	if _, err = fmt.Fprintf(conn, "GET %s HTTP/1.0\r\nHost: %s\r\nUser-Agent: natkit\r\nAccept: application/json\r\n\r\n", u.RequestURI(), u.Host); err != nil {
		return nil, done, err
	}
	in, err := replyOf(conn)
	if err != nil {
		return nil, done, err
	}
	begin, err := io.ReadAll(io.LimitReader(in, mostShort))
	if err != nil || len(begin) < mostShort {
		return begin, done, err
	}
	select {
	case long <- struct{}{}:
	case <-ctx.Done():
		return nil, done, ctx.Err()
	}
	conn.SetDeadline(time.Now().Add(timeout))
	reply, err = io.ReadAll(io.LimitReader(io.MultiReader(bytes.NewReader(begin), in), maxReply+1))
	return reply, func() { <-long }, err
}

// urlOf is where to ask: at natkit monitor's path, unless another is named.
func urlOf(address string) (*url.URL, error) {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Host == "":
		return nil, errors.New("this is no URL: want http://HOST:PORT")
	case u.Scheme == "https":
		return nil, errors.New("natkit reads http only: save it with curl -o FILE and name the file")
	case u.Scheme != "http":
		return nil, fmt.Errorf("scheme %q: want http://HOST:PORT or a file", u.Scheme)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = Path
	}
	return u, nil
}

// replyOf reads the head of a reply, and is an error for any but 200.
func replyOf(conn io.Reader) (*bufio.Reader, error) {
	limited := &io.LimitedReader{R: conn, N: mostHead}
	in := bufio.NewReader(limited)
	var status string
	for first := true; ; first = false {
		line, err := in.ReadString('\n')
		if err != nil && limited.N <= 0 {
			return nil, errNoHTTP
		}
		if err != nil {
			return nil, err
		}
		line = strings.TrimRight(line, "\r\n")
		if first {
			protocol, rest, _ := strings.Cut(line, " ")
			if status = rest; !strings.HasPrefix(protocol, "HTTP/1.") {
				return nil, errNoHTTP
			}
		}
		if line == "" {
			break
		}
	}
	limited.N = maxReply + 1
	code, _, _ := strings.Cut(status, " ")
	if n, _ := strconv.Atoi(code); n != 200 {
		why, _ := io.ReadAll(io.LimitReader(in, 200))
		text := "HTTP status " + snapshot.CleanText(status)
		if line, _, _ := strings.Cut(strings.TrimSpace(string(why)), "\n"); line != "" && !strings.HasPrefix(line, "<") {
			text += ": " + snapshot.CleanText(strings.TrimSpace(line))
		}
		if n == 404 {
			text += " (does an older natkit monitor run there?)"
		}
		return nil, errors.New(text)
	}
	return in, nil
}

var errNoHTTP = errors.New("the reply is no HTTP")

// inWords is why a node was not reached.
func inWords(err error, timeout time.Duration) error {
	var dns *net.DNSError
	var timed net.Error
	switch {
	case errors.As(err, &dns):
		return fmt.Errorf("the name %s was not resolved", dns.Name)
	case errors.As(err, &timed) && timed.Timeout(), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no reply within %v", timeout)
	case errors.Is(err, context.Canceled):
		return errors.New("interrupted before it replied")
	case errors.Is(err, syscall.ECONNREFUSED):
		return errors.New("connection refused: does natkit monitor run there, and with --metrics at this address?")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return errors.New("the connection ended before the reply was whole")
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return errors.New("no route to it")
	}
	return err
}

// fileInWords is why a file was not read, without its name.
func fileInWords(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("no such file")
	case errors.Is(err, fs.ErrPermission):
		return errors.New("permission denied")
	case errors.Is(err, syscall.EISDIR):
		return errors.New("it is a directory: name the files in it")
	}
	return err
}
