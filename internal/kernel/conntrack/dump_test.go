// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeKernel is a socket whose other end says what the test wants.
func fakeKernel(t *testing.T, datagrams ...[]byte) *socket {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &socket{fd: fds[0], file: os.NewFile(uintptr(fds[0]), "fake"), buf: make([]byte, 64<<10), seq: 1}
	t.Cleanup(func() { s.file.Close() })
	for _, d := range datagrams {
		if _, err := unix.Write(fds[1], d); err != nil {
			t.Fatal(err)
		}
	}
	unix.Close(fds[1])
	return s
}

// TestReadDump: what may come back from a dump besides entries.
func TestReadDump(t *testing.T) {
	o := FillOptions{Count: 1}
	if _, err := o.complete(); err != nil {
		t.Fatal(err)
	}
	entry := func(seq uint32, flags uint16) []byte {
		var m message
		o.entry(&m, seq, 0)
		binary.NativeEndian.PutUint16(m.b[6:], flags|unix.NLM_F_MULTI)
		return m.b
	}
	control := func(typ uint16, seq uint32, errno int32) []byte {
		var m message
		m.begin(typ, 0, seq, 0)
		binary.NativeEndian.PutUint32(m.b[nlHeaderLen:], uint32(-errno)) // in place of struct nfgenmsg
		m.end()
		return m.b
	}
	join := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	noReply := entry(1, 0)
	noReply = noReply[:nlHeaderLen+nfHeaderLen]
	binary.NativeEndian.PutUint32(noReply, uint32(len(noReply)))
	done := control(unix.NLMSG_DONE, 1, 0)

	for _, tt := range []struct {
		name      string
		datagrams [][]byte
		want      DumpResult
		err       string
	}{
		{"entries in two datagrams", [][]byte{join(entry(1, 0), entry(1, 0)), join(entry(1, 0), done)}, DumpResult{Entries: 3}, ""},
		{"interrupted", [][]byte{entry(1, unix.NLM_F_DUMP_INTR), join(entry(1, 0), done)}, DumpResult{Entries: 2, Interrupted: true}, ""},
		{"an answer to somebody else", [][]byte{join(entry(7, 0), control(unix.NLMSG_DONE, 7, 0)), done}, DumpResult{}, ""},
		{"an entry without addresses", [][]byte{join(noReply, entry(1, 0), done)}, DumpResult{Entries: 1, Malformed: 1}, ""},
		{"refused", [][]byte{control(unix.NLMSG_ERROR, 1, int32(unix.EPERM))}, DumpResult{}, "CAP_NET_ADMIN"},
		{"no ctnetlink", [][]byte{control(unix.NLMSG_ERROR, 1, int32(unix.EINVAL))}, DumpResult{}, "nf_conntrack_netlink"},
		{"failed at the end", [][]byte{join(entry(1, 0), control(unix.NLMSG_DONE, 1, int32(unix.ENOMEM)))}, DumpResult{Entries: 1}, "cannot allocate memory"},
		{"half a message", [][]byte{entry(1, 0)[:50]}, DumpResult{}, "says"},
		{"half a header", [][]byte{entry(1, 0)[:10]}, DumpResult{}, "10 bytes left"},
		{"no end", [][]byte{entry(1, 0)}, DumpResult{Entries: 1}, "EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got DumpResult
			err := fakeKernel(t, tt.datagrams...).readDump(context.Background(), Filter{}, &got, func(*Flow) error { return nil })
			if got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
}

func TestLoaded(t *testing.T) {
	root := t.TempDir()
	if loaded(root) {
		t.Error("loaded in an empty directory")
	}
	if err := os.MkdirAll(root+"/sys/module/nf_conntrack", 0o755); err != nil {
		t.Fatal(err)
	}
	if !loaded(root) {
		t.Error("the module is there, and not seen")
	}
}

// TestAnswers: the errors of a batch, and an acknowledgement that never comes.
func TestAnswers(t *testing.T) {
	answer := func(seq uint32, errno unix.Errno) []byte {
		var m message
		m.begin(unix.NLMSG_ERROR, 0, seq, 0)
		binary.NativeEndian.PutUint32(m.b[nlHeaderLen:], uint32(-int32(errno)))
		m.end()
		return m.b
	}
	var seen []unix.Errno
	refused, err := fakeKernel(t, answer(1, unix.EEXIST), answer(2, unix.ENOMEM), answer(3, 0)).answers(3, func(errno unix.Errno) error {
		seen = append(seen, errno)
		return nil
	})
	if err != nil || refused != 2 || len(seen) != 2 || seen[0] != unix.EEXIST || seen[1] != unix.ENOMEM {
		t.Errorf("refused %d %v, error %v", refused, seen, err)
	}
	bad := errors.New("bad")
	if refused, err = fakeKernel(t, answer(1, unix.EINVAL), answer(3, unix.EINVAL)).answers(3, func(unix.Errno) error { return bad }); !errors.Is(err, bad) || refused != 2 {
		t.Errorf("refused %d, error %v", refused, err)
	}
	if _, err = fakeKernel(t, answer(1, unix.EEXIST)).answers(3, func(unix.Errno) error { return nil }); err == nil {
		t.Error("no acknowledgement, no error")
	}
}
