// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// What natkit needs of HTTP is one request on one connection, a few times an hour. A
// program with nothing but client-go and these calls has 26 MB; added to natkit, net/http with TLS
// has 2.8 MB, and TLS alone 1.8 MB.

// DefaultCredentials is where a pod finds its service account.
const DefaultCredentials = "/var/run/secrets/kubernetes.io/serviceaccount"

const (
	requestTime = 15 * time.Second
	mostHeader  = 64 << 10
	mostBody    = 4 << 20 // a node with all its images has some hundred kilobytes
)

// API is where a Kubernetes API is, and the folder with ca.crt and token that lead into it. Both
// files are read again for each request, because they are replaced while the monitor runs.
type API struct {
	address     string // host:port
	name        string // that the certificate is for
	credentials string
}

// ErrAddress is that an address of an API was given that is none.
var ErrAddress = errors.New("want https://HOST:PORT")

// NewAPI is the API at an address such as https://10.96.0.1:443; "" is the one whose pod this is.
func NewAPI(server, credentials string) (*API, error) {
	if server == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, errors.New("this is no pod: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; name the API with --kubernetes-api https://HOST:PORT")
		}
		server = "https://" + net.JoinHostPort(host, port)
	}
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" {
		return nil, fmt.Errorf("%q is no address of a Kubernetes API: %w", server, ErrAddress)
	}
	a := &API{net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")), u.Hostname(), cmp.Or(credentials, DefaultCredentials)}
	if _, _, err := a.secrets(); err != nil {
		return nil, fmt.Errorf("credentials for the Kubernetes API: %w", err)
	}
	return a, nil
}

// secrets reads what the API is recognized by, and what it recognizes natkit by.
func (a *API) secrets() (roots *x509.CertPool, token string, err error) {
	ca, err := os.ReadFile(filepath.Join(a.credentials, "ca.crt"))
	if err != nil {
		return nil, "", err
	}
	roots = x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, "", fmt.Errorf("%s has no certificate", filepath.Join(a.credentials, "ca.crt"))
	}
	text, err := os.ReadFile(filepath.Join(a.credentials, "token"))
	if token = strings.TrimSpace(string(text)); err == nil && (token == "" || strings.ContainsAny(token, "\r\n ")) {
		err = fmt.Errorf("%s has no token", filepath.Join(a.credentials, "token"))
	}
	return roots, token, err
}

// request is one call of the API.
type request struct {
	method, path, contentType string
	body                      []byte
}

// response is its answer.
type response struct {
	status     int
	body       []byte
	retryAfter time.Duration
}

// Do sends a request and waits for the answer.
func (a *API) do(ctx context.Context, r request) (*response, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	roots, token, err := a.secrets()
	if err != nil {
		return nil, err
	}
	dialer := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: a.name, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}}
	conn, err := dialer.DialContext(ctx, "tcp", a.address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nUser-Agent: natkit\r\nAccept: application/json\r\nConnection: close\r\n", r.method, r.path, a.address, token)
	fmt.Fprintf(&b, "Content-Type: %s\r\nContent-Length: %d\r\n\r\n", r.contentType, len(r.body))
	b.Write(r.body)
	if _, err := conn.Write(b.Bytes()); err != nil {
		return nil, err
	}
	return readResponse(conn)
}

var errResponse = errors.New("not a response of HTTP/1.1")

// readResponse reads a response on a connection that ends with it (RFC 9112).
func readResponse(from io.Reader) (*response, error) {
	head := &io.LimitedReader{R: from, N: mostHeader}
	in := bufio.NewReader(head)
	line := func() (string, error) {
		text, err := in.ReadString('\n')
		if err != nil {
			return "", fmt.Errorf("%w: %w", errResponse, err)
		}
		return strings.TrimRight(text, "\r\n"), nil
	}
	out := &response{}
	length, chunked := int64(-1), false
	for out.status/100 <= 1 { // 100 Continue and its like come before the response
		first, err := line()
		if err != nil {
			return nil, err
		}
		_, rest, _ := strings.Cut(first, " ")
		code, _, _ := strings.Cut(rest, " ")
		if out.status, err = strconv.Atoi(code); err != nil || !strings.HasPrefix(first, "HTTP/1.") || out.status < 100 || out.status > 599 {
			return nil, errResponse
		}
		for {
			field, err := line()
			if err != nil {
				return nil, err
			}
			if field == "" {
				break
			}
			name, value, _ := strings.Cut(field, ":")
			value = strings.TrimSpace(value)
			switch strings.ToLower(name) {
			case "content-length":
				if length, err = strconv.ParseInt(value, 10, 64); err != nil || length < 0 || length > mostBody {
					return nil, fmt.Errorf("%w: content-length %q", errResponse, value)
				}
			case "transfer-encoding":
				chunked = strings.EqualFold(value, "chunked")
			case "retry-after":
				if s, err := strconv.Atoi(value); err == nil && s >= 0 {
					out.retryAfter = time.Duration(min(s, 3600)) * time.Second
				}
			}
		}
	}
	head.N = 2 * mostBody // with what chunks need
	var err error
	switch {
	case chunked:
		out.body, err = readChunks(in)
	case length >= 0:
		out.body = make([]byte, length)
		_, err = io.ReadFull(in, out.body)
	default:
		out.body, err = io.ReadAll(io.LimitReader(in, mostBody))
	}
	if err != nil {
		return nil, fmt.Errorf("read the Kubernetes API's response: %w", err)
	}
	return out, nil
}

func readChunks(in *bufio.Reader) (body []byte, err error) {
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil, err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, err := strconv.ParseInt(strings.TrimSpace(size), 16, 32)
		if err != nil || n < 0 || len(body)+int(n) > mostBody {
			return nil, errResponse
		}
		if n == 0 {
			return body, nil // the connection ends after it: trailers are nothing to natkit
		}
		chunk := make([]byte, n)
		if _, err := io.ReadFull(in, chunk); err != nil {
			return nil, err
		}
		body = append(body, chunk...)
		if _, err := in.ReadString('\n'); err != nil {
			return nil, err
		}
	}
}
