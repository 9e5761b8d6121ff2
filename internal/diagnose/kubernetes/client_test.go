// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// credentials is a folder as a pod has it, for a server.
func credentials(t *testing.T, server *httptest.Server, token string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), ca, 0o600), os.WriteFile(filepath.Join(dir, "token"), []byte(token+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestClient(t *testing.T) {
	token := "first"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("Authorization") != "Bearer "+token || r.Header.Get("Content-Type") != "application/x" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		switch r.URL.Path {
		case "/chunks":
			for range 3 {
				fmt.Fprintf(w, "%s;", strings.Repeat("x", 3000))
				w.(http.Flusher).Flush()
			}
		case "/later":
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(http.StatusTooManyRequests)
		case "/early":
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusCreated)
		default:
			fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.Path, body)
		}
	}))
	defer server.Close()
	dir := credentials(t, server, token)
	a, err := NewAPI(server.URL, dir)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(path string) *response {
		t.Helper()
		answer, err := a.do(t.Context(), request{"PATCH", path, "application/x", []byte("{}")})
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	if r := ask("/a"); r.status != 200 || string(r.body) != "PATCH /a {}" {
		t.Errorf("%d %q", r.status, r.body)
	}
	if r := ask("/chunks"); r.status != 200 || len(r.body) != 9003 {
		t.Errorf("%d, %d bytes", r.status, len(r.body))
	}
	if r := ask("/later"); r.status != 429 || r.retryAfter != 7*time.Second {
		t.Errorf("%d, %v", r.status, r.retryAfter)
	}
	if r := ask("/early"); r.status != 201 {
		t.Errorf("%d", r.status)
	}
	// The kubelet replaces the token once an hour.
	token = "second"
	if r := ask("/a"); r.status != 401 {
		t.Errorf("the token of before: %d", r.status)
	}
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := ask("/a"); r.status != 200 {
		t.Errorf("the new token: %d", r.status)
	}
	// Another server's certificate is not trusted, and the token stays with natkit.
	other := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a request reached a server that is not trusted") }))
	defer other.Close()
	strange := *a
	strange.name = "another.example"
	if _, err := strange.do(t.Context(), request{method: "GET", path: "/"}); err == nil {
		t.Error("a certificate of another name is trusted")
	}
	os.WriteFile(filepath.Join(dir, "ca.crt"), []byte("nothing"), 0o600)
	if _, err := a.do(t.Context(), request{method: "GET", path: "/"}); err == nil {
		t.Error("without a certificate")
	}
}

// An API that accepts the connection and then does nothing.
func TestClientHangs(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer server.Close()
	defer close(release)
	a, err := NewAPI(server.URL, credentials(t, server, "x"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := a.do(ctx, request{method: "GET", path: "/"}); err == nil {
		t.Error("an answer from nowhere")
	}
}

func TestReadResponse(t *testing.T) {
	for _, text := range []string{
		"", "HTTP/1.1", "SSH-2.0-x\r\n\r\n", "HTTP/1.1 abc OK\r\n\r\n", "HTTP/1.1 99 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffff\r\nab", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*mostHeader) + "\r\n\r\n",
		strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 10000),
	} {
		if r, err := readResponse(strings.NewReader(text)); err == nil {
			t.Errorf("%.60q: %+v", text, r)
		}
	}
	r, err := readResponse(strings.NewReader("HTTP/1.1 200 OK\r\n\r\nuntil the end"))
	if err != nil || string(r.body) != "until the end" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestNewAPI(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, c := range []struct{ server, says string }{
		{"", "this is no pod"}, {"http://10.0.0.1:80", "want https://HOST:PORT"}, {"10.0.0.1:443", "want https://HOST:PORT"}, {"https://", "want https://HOST:PORT"},
		{"https://10.0.0.1/path", "want https://HOST:PORT"}, {"https://10.0.0.1", "ca.crt"},
	} {
		if _, err := NewAPI(c.server, t.TempDir()); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v, want %q", c.server, err, c.says)
		}
	}
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	t.Setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "6443")
	a, err := NewAPI("", credentials(t, server, "x"))
	if err != nil || a.address != "[fd00::1]:6443" {
		t.Errorf("%+v, %v", a, err)
	}
}
