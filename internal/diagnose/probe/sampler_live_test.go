// SPDX-License-Identifier: Apache-2.0

package probe

// What a Sampler has open in a namespace with a packet filter from one round to the next.

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
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

// The number of a namespace that is gone is given to the next one: a Sampler reports it, and compares nothing of the new one
// with the old one. One that is still the same is not reported, by whatever name it is found.
func TestLiveNumberIsGivenAgain(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	number := h.Inode()
	t.Cleanup(func() { netns.Delete(name) })
	p, err := OpenSampler(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	round := func() *Round {
		t.Helper()
		r, err := p.Round(t.Context(), RoundOptions{Window: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := round(); slices.Contains(r.Renewed, number) {
		t.Error("reported, and it is the same")
	}
	p.seen[number].ref = "pid:4194304" // by which it was found before
	if r := round(); slices.Contains(r.Renewed, number) || p.seen[number].ref != name {
		t.Errorf("reported, and it is the same by another name: %v", p.seen[number].ref)
	}
	h.Close()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if err := netns.Delete(name); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // the kernel frees the number when it has cleaned up
		if h, err = netns.Create(name); err != nil {
			t.Fatal(err)
		}
		again := h.Inode() == number
		h.Close()
		if again {
			break
		}
		if time.Now().After(deadline) {
			ktest.Unsupported(t, "the kernel gave the number to somebody else")
		}
	}
	before := p.seen[number]
	if r := round(); !slices.Contains(r.Renewed, number) || p.seen[number] == before {
		t.Errorf("another namespace with the number %d was not reported: %v", number, r.Renewed)
	}
	if r := round(); slices.Contains(r.Renewed, number) {
		t.Error("reported twice")
	}
	p.seen[number].ref, p.seen[number].cookie = "pid:4194304", p.seen[number].cookie+1 // of another name, too
	if r := round(); !slices.Contains(r.Renewed, number) {
		t.Error("another one by another name was not reported")
	}
}

// Namespaces beyond those that are watched at once are counted, and none is forgotten by the count.
func TestLiveTooManyNamespaces(t *testing.T) {
	newNetns(t)
	p, err := OpenSampler(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.most = 1
	r, err := p.Round(t.Context(), RoundOptions{Window: time.Millisecond})
	if err != nil || len(r.Samples) != 1 || r.Unwatched < 1 {
		t.Fatalf("%d samples, %d unwatched, %v", len(r.Samples), r.Unwatched, err)
	}
	p.most = MaxNamespaces
	if r, err = p.Round(t.Context(), RoundOptions{Window: time.Millisecond}); err != nil || len(r.Samples) < 2 || r.Unwatched != 0 {
		t.Fatalf("%d samples, %d unwatched, %v", len(r.Samples), r.Unwatched, err)
	}
}

// A namespace may be there before the processes of its pod: when these have come it gets their name.
func TestLiveNameComesLater(t *testing.T) {
	h := newNetns(t)
	p, err := OpenSampler(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	title := func() string {
		t.Helper()
		r, err := p.Round(t.Context(), RoundOptions{Window: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(r.Samples, func(s *snapshot.Snapshot) bool { return s.Netns.Inode == h.Inode() })
		return r.Samples[i].Netns.Title()
	}
	if got := title(); got != h.Name() {
		t.Fatalf("title %q", got)
	}
	root := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	group := root + "/docker-" + strings.Repeat("0123456789abcdef", 4) + ".scope"
	if err := os.Mkdir(group, 0o755); err != nil {
		ktest.Unsupported(t, "no group of processes can be made: %v", err)
	}
	cmd := exec.Command("sleep", "60")
	in(t, h, cmd.Start)
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		os.Remove(group)
	})
	if err := os.WriteFile(group+"/cgroup.procs", []byte(fmt.Sprint(cmd.Process.Pid)), 0o644); err != nil {
		t.Fatal(err)
	}
	for range nameAgain + 1 {
		if title() != h.Name() {
			return
		}
	}
	t.Errorf("its process is in %s, and the namespace is still called %q", group, title())
}

// ARP requests for this machine's address are counted in each sample if their tag is that of a VLAN without an
// interface, or if one host repeats them.
func TestLiveRequests(t *testing.T) {
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
			frame := arpProbe(net.HardwareAddr{2, 0, 0, 0, 0, 0x99}, netip.MustParseAddr(asked))
			copy(frame[28:], []byte{198, 51, 100, 2}) // its sender
			if tag > 0 {
				vlan := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_8021Q), tag)
				frame = append(append(append([]byte{}, frame[:12]...), vlan...), frame[12:]...)
			}
			return sendFrame("veth1", string(frame))
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
	request(0, "198.51.100.1")
	if got := sample(); len(got) != 0 {
		t.Errorf("twice untagged, or for another host: %+v", got)
	}
	for range arpRepeated {
		request(0, "198.51.100.1")
	}
	for range arpRepeated { // to this machine alone
		in(t, h, func() error {
			frame := arpProbe(net.HardwareAddr{2, 0, 0, 0, 0, 0x99}, netip.MustParseAddr("198.51.100.1"))
			link, err := net.InterfaceByName("veth0")
			copy(frame, link.HardwareAddr)
			copy(frame[28:], []byte{198, 51, 100, 3})
			return errors.Join(err, sendFrame("veth1", string(frame)))
		})
	}
	if got := sample(); len(got) != 1 || got[0].Count != arpRepeated || got[0].Asker != netip.MustParseAddr("198.51.100.2") {
		t.Errorf("%+v, want %d without a tag", got, arpRepeated)
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

// Who looks all the time looks at the first packets of a window one by one, of ARP at all if that is asked for; who looks
// once sees all. What leaves is not shown to the tap that looks for frames for others.
func TestLiveQuietTaps(t *testing.T) {
	h := newNetns(t)
	output(t, h, "", "ip", "link", "add", "veth0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "veth1")
	output(t, h, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth0")
	output(t, h, "", "ip", "link", "set", "veth0", "up")
	output(t, h, "", "ip", "link", "set", "veth1", "up")
	frame := func(to, from byte, protocol uint16, rest []byte) []byte {
		b := []byte{2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from}
		return append(binary.BigEndian.AppendUint16(b, protocol), rest...)
	}
	astray := frame(0x77, 0x99, unix.ETH_P_IP, []byte{0x45, 0, 0, 20, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 198, 51, 100, 2, 198, 51, 100, 3})
	request := frame(1, 0x99, unix.ETH_P_ARP, arpProbe(net.HardwareAddr{2, 0, 0, 0, 0, 0x99}, netip.MustParseAddr("198.51.100.1"))[14:])
	copy(request[28:], []byte{198, 51, 100, 2})
	for _, test := range []struct {
		name           string
		quiet, replies bool
		astray, asked  uint64
	}{
		{"once", false, false, 2, 2}, {"all the time", true, false, 1, 1}, {"all the time, with replies", true, true, 1, 2},
	} {
		in(t, h, func() error {
			tap, err := openFrames(test.quiet, test.replies)
			if err != nil {
				return err
			}
			defer tap.close()
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			link, err := net.InterfaceByName("veth1")
			if err != nil {
				return err
			}
			to := &unix.SockaddrLinklayer{Ifindex: link.Index}
			send := func(n int, frame []byte) (err error) {
				for range n {
					err = errors.Join(err, unix.Sendto(fd, frame, 0, to))
				}
				return err
			}
			err = errors.Join(send(1, astray), send(1, request))
			others := frame(1, 0x99, unix.ETH_P_LOOPBACK, make([]byte, 46))
			err = errors.Join(err, send(quietEnough, others))
			if test.quiet {
				muted := func(p *packetTap) bool {
					at, err := unix.Getsockname(p.fd)
					bound, ok := at.(*unix.SockaddrLinklayer)
					return err == nil && ok && bound.Ifindex == 1
				}
				ktest.Wait(t, 10*time.Second, "the taps are off the packets' way", func() bool { return muted(tap.astray) && (test.replies || muted(tap.arp)) })
			}
			err = errors.Join(err, send(1, astray), send(1, request))
			got, errRead := tap.read()
			if errors.Join(err, errRead) != nil {
				return errors.Join(err, errRead)
			}
			count := func(n int, of func(i int) uint64) (all uint64) {
				for i := range n {
					all += of(i)
				}
				return all
			}
			seen, asked := count(len(got.Astray), func(i int) uint64 { return got.Astray[i].Count }), count(len(got.Asked), func(i int) uint64 { return got.Asked[i].Count })
			if seen != test.astray || asked != test.asked {
				t.Errorf("%s: %d frames for others and %d requests, want %d and %d: %+v", test.name, seen, asked, test.astray, test.asked, got)
			}
			return nil
		})
	}
}

// A machine that has an address of this one is found by an ARP probe as RFC 5227 has it, which leaves nothing
// behind anywhere; without one nothing is sent, and nothing found.
func TestLiveARPProbe(t *testing.T) {
	h, other := newNetns(t), newNetnsNamed(t, ktest.Name(t)+"-other")
	output(t, h, "", "ip", "link", "add", "veth0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "veth1", "netns", other.Name())
	output(t, h, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth0")
	output(t, h, "", "ip", "link", "set", "veth0", "up")
	output(t, other, "", "ip", "link", "set", "veth1", "up")
	output(t, other, "", "ip", "addr", "add", "198.51.100.2/24", "dev", "veth1")
	p, n := samplerOf(t, h)
	wire := listenOn(t, other)
	wire.until(t, h, "veth0") // frames arrive
	claims := func() (out []snapshot.AddressClaim) {
		in(t, h, func() error {
			s := &snapshot.Snapshot{}
			if n.sampleARP(s); s.Frames != nil {
				out = s.Frames.Claims
			}
			return nil
		})
		return out
	}
	output(t, other, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "veth1")
	for _, due := range []func(uint64) bool{nil, func(uint64) bool { return false }} {
		p.askForOwn(due)
		if got := wire.until(t, h, "veth0"); len(got) != 0 {
			t.Errorf("sent, and nobody had asked for it: %x", got)
		}
		if got := claims(); len(got) != 0 {
			t.Errorf("found without a probe: %+v", got)
		}
	}
	always := func(inode uint64) bool { return inode == h.Inode() }
	p.askForOwn(always)
	want := "ffffffffffff" + "020000000001" + "0806" + "0001" + "0800" + "06" + "04" + "0001" + "020000000001" + "00000000" + "000000000000" + "c6336401"
	if got := wire.until(t, h, "veth0"); len(got) != 1 || hex.EncodeToString(got[0]) != want {
		t.Errorf("sent %x, want %s", got, want)
	}
	ktest.Wait(t, 10*time.Second, "the other machine replies", func() bool {
		got := claims()
		return len(got) == 1 && got[0].Own && got[0].Addr == netip.MustParseAddr("198.51.100.1")
	})
	if known := output(t, other, "", "ip", "-4", "neigh", "show"); strings.Contains(known, "198.51.100.1") {
		t.Errorf("the probe has left an entry behind: %s", known)
	}
	output(t, h, "", "ip", "addr", "del", "198.51.100.1/24", "dev", "veth0")
	p.askForOwn(always)
	if got := wire.until(t, h, "veth0"); len(got) != 0 {
		t.Errorf("sent for an address that has gone: %x", got)
	}
}

// Nothing is sent where ARP is not spoken, and never more than mostAsked at once.
func TestLiveARPProbeInterfaces(t *testing.T) {
	for name, test := range map[string]struct {
		commands []string
		want     int
	}{
		"broadcast network": {nil, 1},
		"many addresses":    {[]string{"for i in $(seq 2 60); do ip addr add 198.51.100.$i/24 dev veth0; done"}, mostAsked},
		"without ARP":       {[]string{"ip link set veth0 arp off"}, 0},
		"down":              {[]string{"ip link set veth0 down"}, 0},
		"without carrier":   {[]string{"ip link set veth1 down"}, 0},
		"port of a bridge":  {[]string{"ip link add br0 type bridge", "ip link set veth0 master br0"}, 0},
		"loopback":          {[]string{"ip addr flush dev veth0", "ip addr add 198.51.100.1/32 dev lo"}, 0},
		"point-to-point":    {[]string{"ip addr flush dev veth0", "ip tuntap add dev t0 mode tun", "ip addr add 198.51.100.1/24 dev t0", "ip link set t0 up"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			h := newNetns(t)
			for _, c := range append([]string{"ip link add veth0 type veth peer name veth1", "ip link set veth0 up", "ip link set veth1 up", "ip addr add 198.51.100.1/24 dev veth0"}, test.commands...) {
				output(t, h, "", "sh", "-ec", c)
			}
			p, _ := samplerOf(t, h)
			wire := listenOn(t, h)
			if test.want > 0 {
				wire.until(t, h, "veth0") // frames arrive
			}
			p.askForOwn(func(uint64) bool { return true })
			got := wire.until(t, h, "lo")
			if len(got) != test.want {
				t.Errorf("%d sent, want %d: %x", len(got), test.want, got)
			}
		})
	}
}

// samplerOf is a Sampler of one namespace, in which it listens for ARP.
func samplerOf(t *testing.T, h *netns.Handle) (*Sampler, *sampled) {
	t.Helper()
	n := &sampled{}
	in(t, h, func() (err error) {
		n.arp, err = openARPWatch()
		return err
	})
	t.Cleanup(n.close)
	return &Sampler{places: []netns.Place{{Ref: h.Name(), Inode: h.Inode()}}, seen: map[uint64]*sampled{h.Inode(): n}}, n
}

// wire is what goes over the interfaces of a namespace.
type wire int

// listenOn begins to listen.
func listenOn(t *testing.T, h *netns.Handle) (w wire) {
	t.Helper()
	in(t, h, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(networkOrder(unix.ETH_P_ALL)))
		w = wire(fd)
		return errors.Join(err, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	})
	t.Cleanup(func() { unix.Close(int(w)) })
	return w
}

// until returns the ARP requests that were sent or received until now, each once: a frame that it sends by an interface of a
// namespace ends them. An interface that has just come up may lose some.
func (w wire) until(t *testing.T, h *netns.Handle, link string) (out [][]byte) {
	t.Helper()
	last := "\x88\xb5" + time.Now().String() // a local experimental protocol
	seen := map[string]bool{}
	b := make([]byte, 2000)
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		in(t, h, func() error { return sendFrame(link, "\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x77"+last) })
		for {
			n, _, err := unix.Recvfrom(int(w), b, 0)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			frame := string(b[:n])
			switch {
			case n >= 14 && strings.HasPrefix(frame[12:], last):
				return out
			case n >= 22 && frame[12:14] == "\x08\x06" && frame[20:22] == "\x00\x01" && !seen[frame]:
				seen[frame] = true
				out = append(out, []byte(frame))
			}
		}
	}
	t.Fatalf("no frame sent by %s arrives", link)
	return nil
}

// sendFrame sends by an interface of the calling thread's namespace.
func sendFrame(link, frame string) error {
	l, err := net.InterfaceByName(link)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, []byte(frame), 0, &unix.SockaddrLinklayer{Ifindex: l.Index, Halen: 6})
}

// A tracer that cannot be replaced stays; one that failed is replaced soon, unless the kernel allows none.
func TestLiveTracerStays(t *testing.T) {
	ktest.Root(t)
	p := &Sampler{shared: &sharedSources{drops: traceAll()}}
	defer func() { p.shared.drops.close() }()
	if p.shared.drops.err != nil {
		ktest.Unsupported(t, "tracing of drops: %v", p.shared.drops.err)
	}
	for _, c := range []struct {
		ago  time.Duration
		err  error
		want bool
	}{
		{retrace - time.Minute, nil, false},
		{retrace, nil, true},
		{2 * time.Minute, unix.ENOMEM, true},
		{time.Second, unix.ENOMEM, false},
		{2 * time.Minute, fmt.Errorf("no types: %w", observe.ErrUnavailable), false},
	} {
		p.traced, p.shared.drops.err = time.Now().Add(-c.ago), c.err
		if got := p.retraceDue(); got != c.want {
			t.Errorf("%v after it was opened, with %v: %v, want %v", c.ago, c.err, got, c.want)
		}
	}
	p.shared.drops.err = nil
	first := p.shared.drops
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	few := files
	few.Cur = 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	p.retrace()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	if p.shared.drops != first || first.err != nil {
		t.Errorf("the tracer was replaced by one that fails: %v", p.shared.drops.err)
	}
	p.retrace()
	if p.shared.drops == first || p.shared.drops.err != nil {
		t.Errorf("the tracer was not replaced: %v", p.shared.drops.err)
	}
}

// The file of a table's number of entries stays open: it has today's number, it keeps no namespace alive, and after the
// namespace's end it says nothing.
func TestEntriesStayOpen(t *testing.T) {
	ktest.Root(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	n, v := &sampled{}, newView("")
	defer func() { n.entries.close() }()
	read := func() (count uint64) {
		t.Helper()
		in(t, h, func() (err error) { count, err = n.readEntries(v); return err })
		return count
	}
	if got := read(); got != 0 {
		t.Errorf("%d entries in a new namespace", got)
	}
	fd := n.entries.fd
	in(t, h, func() error {
		for _, entry := range []string{"udp", "tcp --state SYN_SENT"} {
			args := "-I -p " + entry + " -t 60 -s 10.0.0.1 -d 10.0.0.2 --sport 1 --dport 2"
			if out, err := exec.Command(ktest.Tool(t, "conntrack"), strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("conntrack %s: %w %s", args, err, out)
			}
		}
		return nil
	})
	if got := read(); got != 2 || n.entries.fd != fd {
		t.Errorf("%d entries of 2, file %d, then %d", got, fd, n.entries.fd)
	}
	h.Close()
	ktest.Wait(t, 30*time.Second, "the end of the namespace", func() bool {
		_, err := v.readNumber(fd, conntrackSysctls+"count")
		return errors.Is(err, unix.ENOENT)
	})
}

// Connections are not counted again where nothing has come since: neither a packet nor an entry, from a whole sample before
// the last walk on.
func TestNoWalkWhereNothingCame(t *testing.T) {
	h := newNetns(t)
	noon, earlier := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC), conntrack.Unconfirmed{Entries: 9, Most: 9}
	for _, test := range []struct {
		about  string
		window snapshot.Snapshot // before the first walk
		since  func(n *sampled)
		again  bool
	}{
		{"nothing came", idleWindow(0, 0), func(*sampled) {}, false},
		{"a packet came", idleWindow(0, 0), func(n *sampled) { n.counters = map[string]uint64{received: 8} }, true},
		{"an entry came", idleWindow(0, 0), func(n *sampled) { n.count++ }, true},
		{"packets were not counted", idleWindow(0, 0), func(n *sampled) { n.at = n.at.Add(time.Second) }, true},
		{"a packet came just before the first walk", idleWindow(1, 0), func(*sampled) {}, true},
		{"an entry came just before the first walk", idleWindow(0, 1), func(*sampled) {}, true},
		{"the first walk was in the first sample", snapshot.Snapshot{}, func(*sampled) {}, true},
	} {
		w, n := &walks{}, &sampled{at: noon, stackAt: noon, count: 5, counters: map[string]uint64{received: 7}}
		in(t, h, func() error {
			_, err := w.walk(n, &test.window)
			n.walked.found = earlier
			test.since(n)
			found, errAgain := w.walk(n, &snapshot.Snapshot{})
			if again := found != earlier; again != test.again {
				t.Errorf("%s: counted again %v", test.about, again)
			}
			return errors.Join(err, errAgain)
		})
	}
}

// idleWindow is a sample in which so many packets and entries have come.
func idleWindow(packets, entries uint64) snapshot.Snapshot {
	return snapshot.Snapshot{Counters: map[string]uint64{received: packets}, Conntrack: &snapshot.Conntrack{CountStart: 5 - entries, Count: 5}}
}
