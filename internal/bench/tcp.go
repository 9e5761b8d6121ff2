// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/words/plural"
)

// TCPCounters is what the kernel counted during a run. They are counters of a
// whole network namespace: other traffic there is in them.
type TCPCounters struct {
	SYNRetransmits  uint64 `json:"syn_retransmits"`  // where the clients are
	ListenOverflows uint64 `json:"listen_overflows"` // connections that found an accept queue full
	// ListenOverflowsAt is "server" when they were read in the server's namespace,
	// "client" when that was not known.
	ListenOverflowsAt string `json:"listen_overflows_at"`
}

func (c TCPCounters) since(before TCPCounters) TCPCounters {
	c.SYNRetransmits -= before.SYNRetransmits
	c.ListenOverflows -= before.ListenOverflows
	return c
}

func readTCPCounters(client, server *netns.Handle) (TCPCounters, error) {
	c := TCPCounters{ListenOverflowsAt: "client"}
	at, err := readTCPExt(client)
	if err != nil {
		return c, err
	}
	c.SYNRetransmits = at["TCPSynRetrans"]
	if server != nil {
		c.ListenOverflowsAt = "server"
		if at, err = readTCPExt(server); err != nil {
			return c, err
		}
	}
	c.ListenOverflows = at["ListenOverflows"]
	return c, nil
}

// readTCPExt reads a namespace's TcpExt counters. They come as two lines, names
// and values.
func readTCPExt(ns *netns.Handle) (map[string]uint64, error) {
	data, err := readIn(ns, "/proc/thread-self/net/netstat")
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		rest, ok := strings.CutPrefix(line, "TcpExt:")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if names == nil {
			names = fields
			continue
		}
		counters := map[string]uint64{}
		for i, v := range fields[:min(len(fields), len(names))] {
			counters[names[i]], _ = strconv.ParseUint(v, 10, 64) // a negative one is none of ours
		}
		return counters, nil
	}
	return nil, errors.New("read /proc/net/netstat: no TcpExt counters")
}

// Ports is how many local ports the clients' namespace has for connections to
// one address and port. Each connection needs one, and keeps it for a minute
// after its end if the client closed it first.
type Ports struct {
	PortsRange int `json:"ports_range"` // ip_local_port_range without ip_local_reserved_ports
	PortsLeft  int `json:"ports_left"`  // of those, not used by a socket to the target, TIME_WAIT included
}

// readPorts counts sockets in the kernel's table of TCP sockets. One local
// address is assumed: with several, each has the whole range.
func readPorts(ns *netns.Handle, target netip.AddrPort) (Ports, error) {
	usable, err := usablePorts(ns)
	if err != nil {
		return Ports{}, err
	}
	var ports Ports
	for _, u := range usable {
		if u {
			ports.PortsRange++
		}
	}

	table := "/proc/thread-self/net/tcp"
	if target.Addr().Is6() {
		table = "/proc/thread-self/net/tcp6"
	}
	ports.PortsLeft = ports.PortsRange
	remote := procAddrPort(target)
	err = ns.Do(func() error {
		f, err := os.Open(table)
		if err != nil {
			return err
		}
		defer f.Close()
		sockets := bufio.NewScanner(f)
		for sockets.Scan() {
			field := strings.Fields(sockets.Text())
			if len(field) < 3 || field[2] != remote {
				continue
			}
			_, port, _ := strings.Cut(field[1], ":")
			if p, err := strconv.ParseUint(port, 16, 16); err == nil && usable[p] {
				usable[p] = false
				ports.PortsLeft--
			}
		}
		return sockets.Err()
	})
	if err != nil {
		return Ports{}, fmt.Errorf("count sockets: %w", err)
	}
	return ports, nil
}

// usablePorts are the local ports that the kernel may choose, true by number.
func usablePorts(ns *netns.Handle) ([]bool, error) {
	low, high := 0, 0
	data, err := readIn(ns, "/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(data), &low, &high)
	}
	if err != nil {
		return nil, fmt.Errorf("read ip_local_port_range: %w", err)
	}
	usable := make([]bool, 65536)
	for p := low; p <= min(high, 65535); p++ {
		usable[p] = true
	}
	if data, err = readIn(ns, "/proc/sys/net/ipv4/ip_local_reserved_ports"); err != nil {
		return nil, err
	}
	for part := range strings.SplitSeq(strings.TrimSpace(string(data)), ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, errA := strconv.ParseUint(from, 10, 16)
		b, errB := strconv.ParseUint(to, 10, 16)
		for p := a; errA == nil && errB == nil && p <= b; p++ {
			usable[p] = false
		}
	}
	return usable, nil
}

// procAddrPort writes an address and port as the kernel's table has them: words
// of the machine's byte order, in hexadecimal.
func procAddrPort(a netip.AddrPort) string {
	var b strings.Builder
	raw := a.Addr().AsSlice()
	for i := 0; i < len(raw); i += 4 {
		fmt.Fprintf(&b, "%08X", binary.NativeEndian.Uint32(raw[i:]))
	}
	return fmt.Sprintf("%s:%04X", b.String(), a.Port())
}

// readIn reads a file as a thread in the namespace sees it.
func readIn(ns *netns.Handle, path string) (data []byte, err error) {
	err = ns.Do(func() error {
		data, err = os.ReadFile(path)
		return err
	})
	return data, err
}

// allowConnections raises the process's limit of open files for n connections.
func allowConnections(n int) error {
	open, err := openFiles()
	if err != nil {
		return err
	}
	// Beside the connections: epoll sets, event descriptors, files read at the end.
	need := uint64(n+open) + 64
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read limit of open files: %w", err)
	}
	if limit.Cur >= need {
		return nil
	}
	want := unix.Rlimit{Cur: max(limit.Max, need), Max: max(limit.Max, need)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err == nil {
		return nil
	}
	// Only CAP_SYS_RESOURCE may raise the hard limit.
	want = unix.Rlimit{Cur: limit.Max, Max: limit.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil {
		return fmt.Errorf("raise limit of open files to %d: %w", limit.Max, err)
	}
	if limit.Max >= need {
		return nil
	}
	return refuse("Concurrency",
		"%d: this process may open %d files, enough for %s; raise the limit before starting natkit (as root: ulimit -Hn %d)",
		n, limit.Max, plural.Count(max(int64(limit.Max)-int64(need)+int64(n), 0), "connection"), need)
}

func openFiles() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("count open files: %w", err)
	}
	return len(entries), nil
}
