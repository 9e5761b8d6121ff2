// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What never ends is not read to its end, and who waits for what never begins can stop.
func TestReadBounds(t *testing.T) {
	zeros, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zeros.Close()
	data, err := Read(t.Context(), zeros)
	if err != nil || len(data) != maxFileBytes+1 {
		t.Fatalf("%d bytes, %v; want %d", len(data), err, maxFileBytes+1)
	}
	if _, err := Parse("zeros", data); err == nil || err.Error() != "zeros: the file is larger than 16 MiB" {
		t.Errorf("parsed: %v", err)
	}

	enough := errors.New("enough")
	for name, read := range map[string]func(context.Context) ([]byte, error){
		"a stream": func(ctx context.Context) ([]byte, error) {
			in, out := io.Pipe()
			t.Cleanup(func() { out.Close() })
			return Read(ctx, in)
		},
		"a pipe without a writer": func(ctx context.Context) ([]byte, error) {
			path := filepath.Join(t.TempDir(), "pipe")
			if err := unix.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { // lets the reader go
				if w, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0); err == nil {
					w.Close()
				}
			})
			return ReadFile(ctx, path)
		},
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(enough)
		if data, err := read(ctx); !errors.Is(err, enough) || data != nil {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

func TestProblemsAreShort(t *testing.T) {
	_, err := Parse("f", []byte("inside: [a]\noutside: [b]\nrules:\n  - masquerade: x"+strings.Repeat("é", 100000)+"z\n"))
	text := ""
	if err != nil {
		text = err.Error()
	}
	if len(text) > 400 || !strings.HasPrefix(text, `f:4:17: want an IPv4 address`) || !strings.Contains(text, "...") || !strings.Contains(text, `éz": it has numbers and dots only`) {
		t.Errorf("%d bytes: %q", len(text), text)
	}
}

func TestAtInterface(t *testing.T) {
	f, err := Parse("f", []byte("inside: [a, c]\noutside:\n  - b\nrules:\n  - masquerade: any\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"c": "f:1:13: no 7", "b": "f:3:5: no 7"} {
		if err := f.AtInterface(name, "no %d", 7); err.Error() != want {
			t.Errorf("%s: %q, want %q", name, err, want)
		}
	}
}
