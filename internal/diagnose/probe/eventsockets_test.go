// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
)

const netlinkText = `sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000cda935af 0   0          00000000 0        0        0     2        0        4       
00000000d913e2e4 12  4711       00000007 212992   0        0     2        13       416     
00000000d913e2e5 12  4712       00000008 0        0        0     2        9        417     
00000000d913e2e6 9   4713       00000001 0        0        0     2        9        418     
00000000d913e2e7 12  4294963199 00000004 0        0        0     2        0        419     
`

func TestParseEventSockets(t *testing.T) {
	got, err := parseEventSockets(netlinkText)
	want := []snapshot.EventSocket{{PortID: 4711, QueueBytes: 212992, Drops: 13, Inode: 416}, {PortID: 4294963199, Inode: 419}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	for _, bad := range []string{"", "sk Eth Pid", netlinkText + "short line\n", netlinkText + "0 12 x 7 0 0 0 0 0 1\n"} {
		if got, err := parseEventSockets(bad); err == nil {
			t.Errorf("%q gives %+v", bad, got)
		}
	}
}

// A sample has the listeners that lost events since the one before, new ones too; the first has none.
func TestSampleEventSockets(t *testing.T) {
	root := t.TempDir()
	sample := func(n *sampled, drops, others string) []snapshot.EventSocket {
		t.Helper()
		text := strings.Replace(netlinkText, "13       416", drops+"       416", 1) + others
		if err := errors.Join(os.MkdirAll(filepath.Join(root, "proc/net"), 0o755), os.WriteFile(filepath.Join(root, "proc/net/netlink"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		var s snapshot.Snapshot
		n.sampleEventSockets(newView(root), &s)
		return s.EventSockets
	}
	n := &sampled{}
	for _, round := range []struct {
		drops, others string
		want          map[uint64]uint64 // by inode
	}{
		{"13", "", map[uint64]uint64{}},
		{"13", "", map[uint64]uint64{}},
		{"20", "", map[uint64]uint64{416: 7}},
		{"20", "00000000d913e2e8 12 4714 00000001 0 0 0 2 3 420\n", map[uint64]uint64{420: 3}},
	} {
		got := map[uint64]uint64{}
		for _, socket := range sample(n, round.drops, round.others) {
			got[socket.Inode] = socket.Drops
		}
		if !maps.Equal(got, round.want) {
			t.Errorf("%+v: got %v", round, got)
		}
	}
}

// A listener that does not read is seen with what it lost, and by its program's name.
func TestLiveEventSockets(t *testing.T) {
	h := newNetns(t)
	if got := takeWhile(t, Options{Netns: h}, func() {}).EventSockets; got == nil || len(got) != 0 {
		t.Errorf("listeners of an empty namespace: %v", got)
	}
	fd := -1
	in(t, h, func() (err error) {
		if fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: conntrackGroups})
	})
	t.Cleanup(func() { unix.Close(fd) })
	s := takeWhile(t, Options{Netns: h}, func() {
		in(t, h, func() error {
			_, err := conntrack.Fill(t.Context(), conntrack.FillOptions{Count: 1000})
			return err
		})
	})
	if len(s.EventSockets) != 1 {
		t.Fatalf("listeners: %+v", s.EventSockets)
	}
	if l := s.EventSockets[0]; l.Drops == 0 || l.Drops > 1000 || l.QueueBytes == 0 || l.Process != comm(t) {
		t.Errorf("listener %+v of %q, want lost events", l, comm(t))
	}
}

func FuzzEventSockets(f *testing.F) {
	f.Add(netlinkText)
	f.Fuzz(func(t *testing.T, text string) {
		if got, err := parseEventSockets(text); err == nil && len(got) > maxEventSockets {
			t.Errorf("%d sockets", len(got))
		}
	})
}
