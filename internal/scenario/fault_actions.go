// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// action is one thing that a scenario does: it changes the lab, starts a server or
// adds traffic. Traffic is an action, too, that sends until its context ends. What makes an
// action of many calls in the tables is not inlined: each would have a copy of it, 0.2 MB in all.
type action func(ctx context.Context, s *faultRun) error

// do does one after the other, up to the first that fails.
//
//go:noinline
func do(actions ...action) action {
	return func(ctx context.Context, s *faultRun) error {
		for _, a := range actions {
			if err := a(ctx, s); err != nil {
				return err
			}
		}
		return nil
	}
}

// expand puts the lab's own addresses into a line: {client}, {client2} and {clients}, their
// network; {near} and {far}, the gateway's, and {far-net}, with its network; {server} and the
// three addresses after it, {spare}, {router} and {nobody}, that nobody has; {client-netns} and
// {server-netns}, the names of namespaces; {url}, where the client gets pages.
func (s *faultRun) expand(line string) string {
	if !strings.Contains(line, "{") {
		return line
	}
	a, client, server := s.lab.Options().Addresses, s.lab.Node(lab.RoleClient), s.lab.ServerNode()
	spare := server.Addr.Next()
	names := []string{"{client}", client.Addr.String(), "{clients}", a.Client.Masked().String(), "{near}", a.Near.String(), "{near-net}", netip.PrefixFrom(a.Near, a.Client.Bits()).String(),
		"{far}", a.Far.Addr().String(), "{far-net}", a.Far.String(), "{server}", server.Addr.String(), "{spare}", spare.String(), "{router}", spare.Next().String(),
		"{nobody}", spare.Next().Next().String(), "{client-netns}", client.Netns, "{server-netns}", server.Netns, "{url}", s.lab.URL()}
	if second := s.lab.Node(lab.RoleClient + "2"); second != nil {
		names = append(names, "{client2}", second.Addr.String())
	}
	return strings.NewReplacer(names...).Replace(line)
}

func (s *faultRun) addr(text string) netip.Addr { return netip.MustParseAddr(s.expand(text)) }

func (s *faultRun) addrPort(text string) netip.AddrPort {
	return netip.MustParseAddrPort(s.expand(text))
}

// node is one of the lab: gateway and server are who translates and who is behind that, in
// each topology.
func (s *faultRun) node(role string) *lab.Node {
	switch role {
	case lab.RoleGateway:
		return s.lab.NATNode()
	case lab.RoleServer:
		return s.lab.ServerNode()
	}
	return s.lab.Node(role)
}

// on runs shell commands in the namespace of a node.
//
//go:noinline
func on(role string, lines ...string) action {
	return func(ctx context.Context, s *faultRun) error {
		for _, line := range lines {
			if err := s.run(ctx, s.node(role), s.expand(line)); err != nil {
				return err
			}
		}
		return nil
	}
}

func onGateway(lines ...string) action { return on(lab.RoleGateway, lines...) }
func onServer(lines ...string) action  { return on(lab.RoleServer, lines...) }
func onClient(lines ...string) action  { return on(lab.RoleClient, lines...) }

// byOwner is on, for a cure that no command of the finding is: they are shown.
func byOwner(role string, lines ...string) action {
	return func(ctx context.Context, s *faultRun) error {
		for _, line := range lines {
			s.commands = append(s.commands, s.expand(line))
		}
		return on(role, lines...)(ctx, s)
	}
}

// run runs shell commands in the namespace of a node, in the order given.
func (s *faultRun) run(ctx context.Context, node *lab.Node, commands ...string) error {
	for _, line := range commands {
		cmd := node.Command(ctx, "sh", "-c", line)
		if own, err := os.Executable(); err == nil { // natkit is this program
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(own)+":"+os.Getenv("PATH"))
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("run %q in %s: %w: %s", line, node.Netns, err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// nftText gives a text to the program nft in the watched namespace.
func nftText(text string) action {
	return func(ctx context.Context, s *faultRun) error {
		cmd := s.watched.Command(ctx, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("run nft in %s: %w: %s", s.watched.Netns, err, bytes.TrimSpace(out))
		}
		return nil
	}
}

// follow runs those commands of the finding's remedy that contain one of the words, in
// their order: exactly as the finding gives them.
//
//go:noinline
func follow(words ...string) action {
	return func(ctx context.Context, s *faultRun) error {
		followed := 0
		for _, line := range s.found.Remedy {
			if strings.HasPrefix(line, "#") || !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) }) {
				continue
			}
			followed++
			if s.options.command != nil {
				continue // cure has run it
			}
			s.options.Progress(line, 0)
			s.commands = append(s.commands, line)
			if err := s.run(ctx, s.watched, line); err != nil {
				return err
			}
		}
		if followed == 0 {
			return fmt.Errorf("the remedy of %s has no command with any of %q:\n%s", s.found.Code, words, strings.Join(s.found.Remedy, "\n"))
		}
		return nil
	}
}

// watch has the doctor look at another node from now on.
func watch(role string) action {
	return func(_ context.Context, s *faultRun) error {
		s.watched = s.node(role)
		return nil
	}
}

// atLeast has the doctor watch that long: the fault shows only after a while.
func atLeast(d time.Duration) action {
	return func(_ context.Context, s *faultRun) error {
		s.least = d
		return nil
	}
}

// read changes what the doctor is given to judge, in place of what was changed before.
func read(change func(facts *snapshot.Snapshot)) action {
	return func(_ context.Context, s *faultRun) error {
		s.reads = change
		return nil
	}
}

func wait(d time.Duration) action {
	return func(ctx context.Context, _ *faultRun) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
}

// closeAll ends all servers and what flows in the background.
func closeAll(_ context.Context, s *faultRun) error {
	s.close()
	return nil
}

// closeLast ends the last so many that were started.
func closeLast(n int) action {
	return func(_ context.Context, s *faultRun) error {
		kept := len(s.closers) - n
		for _, c := range s.closers[kept:] {
			c()
		}
		s.closers = s.closers[:kept]
		return nil
	}
}

// ended waits until a node has no TCP connection any more that would send: those
// that hang keep the segment size that they began with.
func ended(role string) action {
	return func(ctx context.Context, s *faultRun) error {
		node := s.node(role)
		ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("its connections do not end"))
		defer cancel()
		for {
			open, err := openConnections(node)
			if err != nil || open == 0 {
				return err
			}
			s.options.Progress(fmt.Sprintf("%s: %s hang", node.Role, plural.Count(open, "connection")), 0)
			if err := wait(50*time.Millisecond)(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", node.Netns, context.Cause(ctx))
			}
		}
	}
}

func openConnections(node *lab.Node) (open int, err error) {
	return open, node.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/tcp")
		for line := range strings.Lines(string(text)) {
			// "sl local remote st ...", states as in the kernel's tcp_states.h
			if f := strings.Fields(line); len(f) > 3 && f[0] != "sl" && f[3] != "0A" && f[3] != "06" { // LISTEN, TIME_WAIT
				open++
			}
		}
		return err
	})
}

// fillDest is where the connections go that fill the table.
var fillDest = netip.MustParseAddrPort("198.19.0.1:80")

// ofFill are these connections, for empty.
var ofFill = conntrack.Filter{Dst: netip.PrefixFrom(fillDest.Addr(), 32)}

// fill adds entries to the watched namespace's table, a share of its limit less
// so many; a share of 1 is what has room yet. Each call takes sources of its own.
//
//go:noinline
func fill(part float64, less int, sources string, o conntrack.FillOptions) action {
	return func(ctx context.Context, s *faultRun) error {
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
			o := o
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
}

// empty removes entries as the finding's own conntrack -D would, by netlink: a
// table of hundreds of thousands takes that program too long.
//
//go:noinline
func empty(which conntrack.Filter) action {
	return func(ctx context.Context, s *faultRun) error {
		i := slices.IndexFunc(s.found.Remedy, func(line string) bool { return strings.Contains(line, "conntrack -D") })
		if i < 0 {
			return fmt.Errorf("the remedy of %s empties nothing:\n%s", s.found.Code, strings.Join(s.found.Remedy, "\n"))
		}
		s.options.Progress(s.found.Remedy[i], 0)
		s.commands = append(s.commands, s.found.Remedy[i])
		return s.watched.Do(func() error {
			_, err := conntrack.Delete(ctx, which)
			return err
		})
	}
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
