// SPDX-License-Identifier: Apache-2.0

package probe

// What a Sampler has open in a namespace with a packet filter from one round to the next.

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// A neighbour's hardware address that somebody set is a change; what the kernel learns by itself is none.
func TestLiveNeighbourIsSet(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
	output(t, h, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth0")
	output(t, h, "", "ip", "link", "set", "veth0", "up")
	l, err := listenForChanges(h)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	output(t, h, "", "ip", "neigh", "add", "198.51.100.3", "lladdr", "02:00:00:00:00:03", "dev", "veth0", "nud", "stale")
	output(t, h, "", "ip", "neigh", "add", "198.51.100.2", "lladdr", "02:00:00:00:00:01", "dev", "veth0", "nud", "permanent")
	var got []string
	ktest.Wait(t, 10*time.Second, "a change of a neighbour", func() bool {
		for _, c := range l.take() {
			if strings.HasPrefix(c.What, "neighbour") {
				got = append(got, c.What)
			}
		}
		return len(got) > 0
	})
	if want := "neighbour set: 198.51.100.2 is 02:00:00:00:00:01 on veth0, permanent"; len(got) != 1 || got[0] != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// ARP requests for this machine's address are counted in each sample if their tag is that of a VLAN without an
// interface, and only then.
func TestLiveTaggedRequests(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
	output(t, h, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth0")
	output(t, h, "", "ip", "link", "set", "veth0", "up")
	output(t, h, "", "ip", "link", "set", "veth1", "up")
	n := &sampled{}
	in(t, h, func() (err error) {
		n.arp, err = openARPWatch()
		return err
	})
	defer n.close()
	request := func(tag uint16, asked string) {
		in(t, h, func() error {
			link, err := net.InterfaceByName("veth1")
			if err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			frame := arpProbe(net.HardwareAddr{2, 0, 0, 0, 0, 0x99}, netip.MustParseAddr(asked))
			copy(frame[28:], []byte{198, 51, 100, 2}) // its sender
			if tag > 0 {
				vlan := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_8021Q), tag)
				frame = append(append(append([]byte{}, frame[:12]...), vlan...), frame[12:]...)
			}
			return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index, Halen: 6})
		})
	}
	sample := func() (out []snapshot.ARPQuestion) {
		in(t, h, func() error {
			s := &snapshot.Snapshot{}
			n.sampleARP(s)
			if s.Frames != nil {
				out = s.Frames.Asked
			}
			return nil
		})
		return out
	}
	request(0, "198.51.100.1")
	request(30, "198.51.100.9")
	if got := sample(); len(got) != 0 {
		t.Errorf("untagged, or for another host: %+v", got)
	}
	for range 4 {
		request(30, "198.51.100.1")
	}
	if got := sample(); len(got) != 1 || got[0].Count != 4 || got[0].Interface != "veth0" {
		t.Errorf("%+v, want 4 with tag 30", got)
	}
	if got := sample(); len(got) != 0 {
		t.Errorf("counted again: %+v", got)
	}
}
