// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/natlog/wire"
)

// How long after it was sent something counts as received: over UDP a refusal has arrived by
// then; over TCP the other end's system has had it for so long that its program has read it.
var (
	udpConfirm = time.Second
	tcpConfirm = 3 * time.Second
)

const (
	dialWithin  = 10 * time.Second
	writeWithin = 30 * time.Second
	// datagramsAtOnce: then a pause, so that Sink.Rate is kept.
	datagramsAtOnce = 32
)

// dial connects to a sink.
func dial(s natlog.Sink, node string) (output, error) {
	switch s.Transport {
	case natlog.File:
		return openFile(s, node)
	case natlog.Broker:
		return dialKafka(s, node)
	case natlog.UDP:
		conn, err := net.DialTimeout("udp", s.Addresses[0], dialWithin)
		if err != nil {
			return nil, plainly(err)
		}
		return &datagrams{conn: conn, encode: newEncoder(s, node, false), rate: s.Rate}, nil
	}
	conn, below, err := dialStream(s)
	if err != nil {
		return nil, plainly(err)
	}
	out := &stream{conn: conn, below: below, encode: newEncoder(s, node, true)}
	go out.listen()
	return out, nil
}

// counted is a TCP connection that counts what was written to it.
type counted struct {
	*net.TCPConn
	written atomic.Int64
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.TCPConn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// acknowledged is how much of that the other end's system has.
func (c *counted) acknowledged() (int64, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	waiting := 0
	if err := raw.Control(func(fd uintptr) { waiting, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); err != nil {
		return 0, err
	}
	return c.written.Load() - int64(waiting), err
}

// dialStream connects; below is the TCP connection, also of TLS.
func dialStream(s natlog.Sink) (conn net.Conn, below *counted, err error) {
	dialer := &net.Dialer{Timeout: dialWithin, Control: func(_, _ string, c syscall.RawConn) (err error) {
		if err2 := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(writeWithin.Milliseconds()))
		}); err2 != nil {
			return err2
		}
		return err
	}}
	var config *tls.Config
	if s.Secure {
		if config, err = tlsConfig(s); err != nil {
			return nil, nil, err
		}
	}
	tcp, err := dialer.Dial("tcp", s.Addresses[0])
	if err != nil {
		return nil, nil, err
	}
	below = &counted{TCPConn: tcp.(*net.TCPConn)} // what "tcp" gives
	if !s.Secure {
		return below, below, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialWithin)
	defer cancel()
	secure := tls.Client(below, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		below.Close()
		return nil, nil, err
	}
	return secure, below, nil
}

// check reads the files that a sink names, so that a mistake shows at the start.
func check(s natlog.Sink) error {
	if s.Secure {
		if _, err := tlsConfig(s); err != nil {
			return err
		}
	}
	if s.PasswordFile != "" {
		if _, err := os.ReadFile(s.PasswordFile); err != nil {
			return fmt.Errorf("read the password: %w", err)
		}
	}
	return nil
}

func tlsConfig(s natlog.Sink) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: s.ServerName}
	if config.ServerName == "" && s.Form != natlog.Kafka {
		config.ServerName, _, _ = net.SplitHostPort(s.Addresses[0])
	}
	if s.CA != "" {
		pem, err := os.ReadFile(s.CA)
		if err != nil {
			return nil, fmt.Errorf("read the certificates of option ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate in PEM", s.CA)
		}
	}
	if s.Cert != "" {
		pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
		if err != nil {
			return nil, fmt.Errorf("read the certificate of option cert: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// plainly is an error of a connection without the words of Go's library.
func plainly(err error) error {
	var op *net.OpError
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &dns):
		return fmt.Errorf("look up %s: %s", dns.Name, dns.Err)
	case errors.As(err, &cert):
		return fmt.Errorf("its certificate: %w", cert.Err)
	case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
		return errors.New("no reply in time")
	case errors.As(err, &op):
		var errno syscall.Errno
		if errors.As(err, &errno) {
			return errno
		}
		return op.Err
	case errors.Is(err, io.EOF):
		return errClosed
	}
	return err
}

// encoder makes messages of records, and gives how many records were in those that emit took.
type encoder func(records []natlog.Record, emit func([]byte) error) (int, error)

func newEncoder(s natlog.Sink, node string, stream bool) encoder {
	switch s.Form {
	case natlog.IPFIX, natlog.NetFlow9:
		flow := wire.NewFlow(s)
		return func(records []natlog.Record, emit func([]byte) error) (int, error) {
			sent, _, err := flow.Encode(records, time.Now(), emit)
			return sent, err
		}
	case natlog.Syslog:
		return eachRecord(func(b []byte, r *natlog.Record) ([]byte, error) {
			if !stream {
				return wire.AppendSyslog(b, r, node, s.Facility), nil
			}
			message := wire.AppendSyslog(nil, r, node, s.Facility) // its octets are counted: RFC 6587, 5425
			return append(append(strconv.AppendInt(b, int64(len(message)), 10), ' '), message...), nil
		})
	}
	return eachRecord(func(b []byte, r *natlog.Record) ([]byte, error) {
		line, err := wire.JSON(r, node)
		return append(append(b, line...), '\n'), err
	})
}

func eachRecord(appendTo func([]byte, *natlog.Record) ([]byte, error)) encoder {
	var b []byte
	return func(records []natlog.Record, emit func([]byte) error) (n int, err error) {
		for i := range records {
			if b, err = appendTo(b[:0], &records[i]); err == nil {
				err = emit(b)
			}
			if err != nil {
				return n, err
			}
			n++
		}
		return n, nil
	}
}

// datagrams is a sink over UDP.
type datagrams struct {
	conn   net.Conn
	encode encoder
	rate   int
	burst  int
	paused time.Time
}

func (d *datagrams) send(ctx context.Context, records []natlog.Record) (int, error) {
	return d.encode(records, func(b []byte) error {
		if d.burst++; d.burst >= datagramsAtOnce {
			d.burst = 0
			every := time.Second * datagramsAtOnce / time.Duration(d.rate)
			if rest := every - time.Since(d.paused); rest > 0 {
				select {
				case <-time.After(rest):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			d.paused = time.Now()
		}
		_, err := d.conn.Write(b)
		return plainly(err)
	})
}

// confirmed asks whether an earlier datagram was refused.
func (d *datagrams) confirmed() (time.Duration, int, error) {
	raw, err := d.conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, 0, plainly(err)
	}
	pending := 0
	var asked error
	if err := raw.Control(func(fd uintptr) { pending, asked = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) }); err != nil {
		return 0, 0, plainly(err)
	}
	if asked == nil && pending != 0 {
		asked = syscall.Errno(pending)
	}
	return udpConfirm, allSends, asked
}

func (d *datagrams) close() { d.conn.Close() }

// stream is a sink over TCP or TLS.
type stream struct {
	conn   net.Conn
	below  *counted
	encode encoder
	buf    bytes.Buffer
	ends   []int64 // what was written up to the end of each send that is not acknowledged yet
	whole  int     // sends that are

	mu     sync.Mutex
	broken error
}

// listen waits for the end of the connection: nothing else comes.
func (s *stream) listen() {
	_, err := io.Copy(io.Discard, s.conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken = plainly(err); s.broken == nil {
		s.broken = errClosed
	}
}

func (s *stream) send(_ context.Context, records []natlog.Record) (int, error) {
	const much = 64 << 10
	flush := func() error {
		if s.buf.Len() == 0 {
			return nil
		}
		if err := s.conn.SetWriteDeadline(time.Now().Add(writeWithin)); err != nil {
			return plainly(err)
		}
		_, err := s.conn.Write(s.buf.Bytes())
		s.buf.Reset()
		return plainly(err)
	}
	n, err := s.encode(records, func(b []byte) error {
		s.buf.Write(b)
		if s.buf.Len() >= much {
			return flush()
		}
		return nil
	})
	if err == nil {
		err = flush()
	}
	s.ends = append(s.ends, s.below.written.Load())
	return n, err
}

func (s *stream) confirmed() (time.Duration, int, error) {
	s.mu.Lock()
	broken := s.broken
	s.mu.Unlock()
	if broken != nil {
		return 0, 0, broken
	}
	acknowledged, err := s.below.acknowledged()
	if err != nil {
		return 0, 0, plainly(err)
	}
	for len(s.ends) > 0 && s.ends[0] <= acknowledged {
		s.ends = s.ends[1:]
		s.whole++
	}
	return tcpConfirm, s.whole, nil
}

func (s *stream) close() { s.conn.Close() }

// lines is a file of JSON lines. It is opened again when it was renamed or removed.
type lines struct {
	path   string
	file   *os.File
	encode encoder
	buf    bytes.Buffer
	sends  int
	whole  int // sends that are on the disk
	synced time.Time
}

func openFile(s natlog.Sink, node string) (*lines, error) {
	l := &lines{path: s.Path, encode: newEncoder(s, node, true)}
	return l, l.open()
}

func (l *lines) open() error {
	// Of a pipe that nobody reads the opening would not end otherwise.
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY|unix.O_NONBLOCK, 0o640)
	if err != nil {
		return fmt.Errorf("open it: %w", err)
	}
	if l.file != nil {
		if err := l.sync(); err != nil {
			return errors.Join(err, file.Close())
		}
		l.file.Close()
	}
	l.file = file
	return nil
}

// renamed tells whether the path leads to another file, or none.
func (l *lines) renamed() bool {
	own, err1 := l.file.Stat()
	there, err2 := os.Stat(l.path)
	return err1 != nil || err2 != nil || !os.SameFile(own, there)
}

func (l *lines) send(_ context.Context, records []natlog.Record) (int, error) {
	if l.renamed() {
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	l.buf.Reset()
	n, err := l.encode(records, func(b []byte) error { l.buf.Write(b); return nil })
	if err != nil {
		return 0, err
	}
	info, err := l.file.Stat()
	if err != nil {
		return 0, err
	}
	if _, err := l.file.Write(l.buf.Bytes()); err != nil {
		_ = l.file.Truncate(info.Size()) // half a line is none
		return 0, fmt.Errorf("write it: %w", err)
	}
	l.sends++
	return n, nil
}

// confirmed has what was written on the disk, once a second.
func (l *lines) confirmed() (time.Duration, int, error) {
	if l.whole < l.sends && time.Since(l.synced) >= time.Second {
		if err := l.sync(); err != nil {
			return 0, 0, err
		}
	}
	return 0, l.whole, nil
}

func (l *lines) sync() error {
	if err := l.file.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("write it: %w", err)
	}
	l.whole, l.synced = l.sends, time.Now()
	return nil
}

func (l *lines) close() { l.file.Close() }

// password reads the first line of a file.
func password(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the password: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimRight(line, "\r"), nil
}
