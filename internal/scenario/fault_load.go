// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/words/plural"
)

// What the scenarios have in common: traffic that is bounded, servers that live
// as long as the run, and filling the table.

// requests makes HTTP requests from the client at a rate, each on a connection
// of its own, as many at a time as it takes.
func (s *faultRun) requests(url string, rate float64) func(context.Context) error {
	return s.httpLoad(bench.HTTPOptions{URL: url, Rate: rate, Concurrency: 500})
}

func (s *faultRun) httpLoad(o bench.HTTPOptions) func(context.Context) error {
	o.Netns = s.lab.Node(lab.RoleClient).Handle()
	o.Requests = math.MaxInt32
	o.SocketTimeout = 2 * time.Second
	o.TolerateErrors = true
	o.Workers = 1
	return func(ctx context.Context) error {
		_, err := bench.HTTP(ctx, o)
		return err
	}
}

// datagrams sends UDP from several sockets of the client, each flow so many
// datagrams a second. from is their source address, the client's own where it is
// not valid.
func (s *faultRun) datagrams(from netip.Addr, to netip.AddrPort, flows int, perSecond float64) func(context.Context) error {
	return func(ctx context.Context) error {
		var socks []*net.UDPConn
		defer func() {
			for _, c := range socks {
				c.Close()
			}
		}()
		err := s.lab.Node(lab.RoleClient).Do(func() error {
			var local *net.UDPAddr
			if from.IsValid() {
				local = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
			}
			for range flows {
				c, err := net.DialUDP("udp4", local, net.UDPAddrFromAddrPort(to))
				if err != nil {
					return err
				}
				socks = append(socks, c)
			}
			return nil
		})
		if err != nil {
			return err
		}
		tick := time.NewTicker(time.Duration(float64(time.Second) / perSecond))
		defer tick.Stop()
		for {
			for _, c := range socks {
				// What comes back, such as an ICMP error, is none of the sender's business.
				_, _ = c.Write([]byte("natkit lab"))
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}

// spray sends one datagram from the client to each of so many ports of an
// address, as a scan does, at most perSecond of them.
func (s *faultRun) spray(to netip.Addr, ports, perSecond int) func(context.Context) error {
	return func(ctx context.Context) error {
		var c *net.UDPConn
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			c, err = net.ListenUDP("udp4", nil)
			return err
		})
		if err != nil {
			return err
		}
		defer c.Close()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for sent := 0; sent < ports; {
			for range max(1, perSecond/100) {
				_, _ = c.WriteToUDPAddrPort([]byte("natkit lab"), netip.AddrPortFrom(to, uint16(10000+sent)))
				sent++
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
		return nil
	}
}

// swallow takes datagrams in the namespace of a node and never answers.
func (s *faultRun) swallow(node *lab.Node, port uint16) error {
	var c *net.UDPConn
	err := node.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: int(port)})
		return err
	})
	if err != nil {
		return fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			if _, _, err := c.ReadFromUDP(buf); err != nil {
				return
			}
		}
	}()
	s.closers = append(s.closers, func() { c.Close() })
	return nil
}

// background lets traffic flow from now on until close, so that its flows outlive
// the steps.
func (s *faultRun) background(ctx context.Context, traffic func(context.Context) error) {
	flowing, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = traffic(flowing) // what fails is not seen by the doctor either, who is asked
	}()
	s.closers = append(s.closers, func() { stop(); <-ended })
}

// echo answers datagrams in the namespace of a node with themselves.
func (s *faultRun) echo(node *lab.Node, port uint16) error { return s.lateEcho(node, port, 0) }

// lateEcho is echo after a while.
func (s *faultRun) lateEcho(node *lab.Node, port uint16, after time.Duration) error {
	var c *net.UDPConn
	err := node.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: int(port)})
		return err
	})
	if err != nil {
		return fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			if after == 0 {
				_, _ = c.WriteToUDPAddrPort(buf[:n], from)
				continue
			}
			reply := bytes.Clone(buf[:n])
			time.AfterFunc(after, func() { _, _ = c.WriteToUDPAddrPort(reply, from) })
		}
	}()
	s.closers = append(s.closers, func() { c.Close() })
	return nil
}

// run runs commands in the namespace of a node, in the order given.
func (s *faultRun) run(ctx context.Context, node *lab.Node, commands ...string) error {
	for _, line := range commands {
		var out bytes.Buffer
		cmd := node.Command(ctx, "sh", "-c", line)
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("run %q in %s: %w: %s", line, node.Netns, err, strings.TrimSpace(out.String()))
		}
	}
	return nil
}

// serve answers HTTP behind the NAT, where the lab's URL leads, until close.
func (s *faultRun) serve(ctx context.Context, o lab.HTTPServerOptions) error {
	server, err := s.lab.ServerNode().ServeHTTP(ctx, ":80", o)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, func() { server.Close() })
	return nil
}

// nft gives a text to the program nft in the watched namespace.
func (s *faultRun) nft(ctx context.Context, text string) error {
	var out bytes.Buffer
	cmd := s.watched.Command(ctx, "nft", "-f", "-")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(text), &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run nft in %s: %w: %s", s.watched.Netns, err, strings.TrimSpace(out.String()))
	}
	return nil
}

// browse is a web server and a client that asks it a little, through the NAT: a
// network at work.
func (s *faultRun) browse(ctx context.Context) error { return s.browseAt(ctx, 200) }

// browseAt is browse with so many connections a second.
func (s *faultRun) browseAt(ctx context.Context, perSecond float64) error {
	if err := s.serve(ctx, lab.HTTPServerOptions{}); err != nil {
		return err
	}
	s.traffic = append(s.traffic, s.requests(s.lab.URL(), perSecond))
	return nil
}

// ended waits until a node has no TCP connection any more that would send: those
// that hang keep the segment size that they began with.
func (s *faultRun) ended(ctx context.Context, node *lab.Node) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("its connections do not end"))
	defer cancel()
	for {
		var open int
		err := node.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/tcp")
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				// "sl local remote st ...", states as in the kernel's tcp_states.h
				if f := strings.Fields(line); len(f) > 3 && f[0] != "sl" && f[3] != "0A" && f[3] != "06" { // LISTEN, TIME_WAIT
					open++
				}
			}
			return nil
		})
		if err != nil || open == 0 {
			return err
		}
		s.options.Progress(fmt.Sprintf("%s: %s hang", node.Role, plural.Count(open, "connection")), 0)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", node.Netns, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// fillDest is where the connections go that fill the table.
var fillDest = netip.MustParseAddrPort("198.19.0.1:80")

// fill adds entries to the watched namespace's table, a share of its limit less
// so many. Each call takes sources of its own.
func (s *faultRun) fill(ctx context.Context, part float64, less int, sources string, o conntrack.FillOptions) error {
	return s.watched.Do(func() error {
		limits, err := conntrack.ReadLimits()
		if err != nil {
			return err
		}
		if limits.Max == 0 {
			return errors.New("nf_conntrack_max is 0 here: the table has no limit to reach")
		}
		if err := affordable(limits.Max); err != nil {
			return err
		}
		o.Count = int(part*float64(limits.Max)) - less
		if part == 1 {
			o.Count -= int(limits.Count)
		}
		o.Sources, o.Dest = netip.MustParsePrefix(sources), fillDest
		o.Progress = func(done, total int) {
			s.options.Progress("filling the connection tracking table", float64(done)/float64(total))
		}
		_, err = conntrack.Fill(ctx, o)
		return err
	})
}

// empty removes entries as the finding's own conntrack -D would, by netlink: a
// table of hundreds of thousands takes that program too long.
func (s *faultRun) empty(ctx context.Context, f causes.Finding, which conntrack.Filter) error {
	i := slices.IndexFunc(f.Remedy, func(line string) bool { return strings.Contains(line, "conntrack -D") })
	if i < 0 {
		return fmt.Errorf("the remedy of %s empties nothing:\n%s", f.Code, strings.Join(f.Remedy, "\n"))
	}
	s.options.Progress(f.Remedy[i], 0)
	s.commands = append(s.commands, f.Remedy[i])
	return s.watched.Do(func() error {
		_, err := conntrack.Delete(ctx, which)
		return err
	})
}

// affordable refuses to fill a table whose limit is beyond a share of the
// machine's memory.
func affordable(entries uint64) error {
	const entryBytes = 512 // more than any kernel's
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return fmt.Errorf("read size of memory: %w", err)
	}
	memory := float64(info.Totalram) * float64(info.Unit)
	if need := float64(entries) * entryBytes; need > DefaultFillShare*memory {
		return fmt.Errorf("filling the table to its limit of %d entries takes up to %.0f MiB of kernel memory, more than %.0f %% of this machine's: not done",
			entries, need/(1<<20), 100*DefaultFillShare)
	}
	return nil
}

// The steps of faults that need no more than one thing.

// browse is web traffic, and nothing is changed.
func browse(ctx context.Context, s *faultRun) error { return s.browse(ctx) }

// shell runs a line in the watched namespace.
func shell(line string) func(context.Context, *faultRun) error {
	return func(ctx context.Context, s *faultRun) error { return s.shell(ctx, line) }
}

// follow runs those commands of the finding's remedy that hold one of these texts.
func follow(texts ...string) func(context.Context, *faultRun, causes.Finding) error {
	return func(ctx context.Context, s *faultRun, f causes.Finding) error { return s.follow(ctx, f, texts...) }
}
