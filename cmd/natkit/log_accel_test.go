// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/testutil/ktest"
)

// kernelNAT has the gateway translate by netfilter: whoever is inside, and what comes to a published port.
const kernelNAT = `
table ip nat {
  chain pre { type nat hook prerouting priority -100; iifname "out" meta l4proto { tcp, udp } th dport 8080 dnat to 10.0.0.2:80; }
  chain post { type nat hook postrouting priority 100; oifname "out" snat to 203.0.113.16; }
}
`

// udpTimeout is how long a UDP flow of kernelNAT is remembered after its last packet.
const udpTimeout = 3 * time.Second

// byKernel has the kernel translate, with conntrack entries that end soon after their flow.
func (w *wire) byKernel() {
	w.t.Helper()
	nft, sysctl := ktest.Tool(w.t, "nft"), ktest.Tool(w.t, "sysctl")
	seconds := fmt.Sprint(int(udpTimeout / time.Second))
	if err := w.here.Do(func() error {
		for _, args := range [][]string{
			{nft, "-f", "-"},
			{sysctl, "-qw", "net.ipv4.ip_forward=1", "net.netfilter.nf_conntrack_events=1", "net.netfilter.nf_conntrack_udp_timeout=" + seconds,
				"net.netfilter.nf_conntrack_udp_timeout_stream=" + seconds, "net.netfilter.nf_conntrack_tcp_timeout_time_wait=1",
				"net.netfilter.nf_conntrack_tcp_timeout_close=1", "net.netfilter.nf_conntrack_tcp_timeout_last_ack=1"},
		} {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Stdin = strings.NewReader(kernelNAT)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("%v: %w: %s", args, err, out)
			}
		}
		return addressed("out", "203.0.113.16/32")
	}); err != nil {
		w.t.Fatal(err)
	}
}

// conversation is a flow through the gateway, by who began it.
type conversation struct {
	protocol           string
	from, to, external netip.AddrPort // external is what the other side sees, or where it sends to
	inward             bool           // to a published port
	conn               net.Conn
}

func (c *conversation) String() string {
	return fmt.Sprintf("%s %v to %v", c.protocol, c.from, c.to)
}

// host is who is inside.
func (c *conversation) host() netip.AddrPort {
	if c.inward {
		return netip.MustParseAddrPort("10.0.0.2:80")
	}
	return c.from
}

// converses begins flows of both protocols and directions, whose other end sends back what comes.
func (w *wire) converses() (all []*conversation) {
	w.t.Helper()
	must := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	for _, protocol := range []string{"udp", "tcp"} {
		for _, inward := range []bool{false, true} {
			c := &conversation{protocol: protocol, inward: inward}
			there, here, at := w.server, w.client, "203.0.113.2:7000"
			c.from, c.to, c.external = netip.MustParseAddrPort("10.0.0.2:6000"), netip.MustParseAddrPort(at), netip.MustParseAddrPort("203.0.113.16:6000")
			if inward {
				there, here, at = w.client, w.server, "10.0.0.2:80"
				c.from, c.to = netip.MustParseAddrPort("203.0.113.2:6000"), netip.MustParseAddrPort("203.0.113.1:8080")
				c.external = c.to
			}
			must(there.Do(func() error { return echo(w.t, protocol, at) }))
			local := net.Addr(net.UDPAddrFromAddrPort(c.from))
			if protocol == "tcp" {
				local = net.TCPAddrFromAddrPort(c.from)
			}
			d := net.Dialer{LocalAddr: local, Timeout: 10 * time.Second}
			must(here.Do(func() (err error) { c.conn, err = d.Dial(protocol, c.to.String()); return err }))
			w.t.Cleanup(func() { c.conn.Close() })
			all = append(all, c)
		}
	}
	return all
}

// echo sends back what comes there.
func echo(t *testing.T, protocol, at string) error {
	if protocol == "udp" {
		c, err := net.ListenPacket("udp4", at)
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo(b[:n], from)
			}
		}()
		return nil
	}
	l, err := net.Listen("tcp4", at)
	if err != nil {
		return err
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
	return nil
}

// talk exchanges some packets.
func (w *wire) talk(all []*conversation) {
	w.t.Helper()
	b := make([]byte, 100)
	for range 20 {
		for _, c := range all {
			_ = c.conn.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := c.conn.Write(b); err != nil {
				w.t.Fatalf("%v: %v", c, err)
			}
			if _, err := io.ReadFull(c.conn, b); err != nil {
				w.t.Fatalf("%v: %v", c, err)
			}
		}
	}
}

// life is the one that the log has of a flow; ok: it has one, and reaches so far.
func (w *wire) life(dir string, c *conversation, at time.Time) (l store.Life, ok bool) {
	w.t.Helper()
	protocol, _ := natlog.ParseProtocol(c.protocol)
	got, err := store.Who(dir, store.Question{Address: c.external.Addr(), Port: c.external.Port(), Protocol: protocol, Since: natlog.MicrosOf(at), Upto: natlog.MicrosOf(at)})
	if err != nil {
		w.t.Fatal(err)
	}
	if len(got.Lives) > 1 {
		w.t.Errorf("%v at %v: %+v", c, at, got)
	}
	if len(got.Lives) != 1 || len(got.Gaps) > 0 {
		return l, false
	}
	return got.Lives[0], true
}

// The log has flows that natkit accel takes past connection tracking as it has those that go through it:
// alive while they have packets, however long, and ended when their conntrack entry is. natkit who answers
// for them during that and after it, also by a log that is begun when they are accelerated.
func TestLogOfAcceleratedFlows(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	logs := map[string][]string{}
	var mu sync.Mutex
	t.Run("flows", func(t *testing.T) {
		for _, record := range []string{"mappings", "destinations"} {
			for _, accelerated := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, accelerated %t", record, accelerated), func(t *testing.T) {
					t.Parallel() // most of the time is waiting
					has := makeWire(t).logOfFlows(accelerated, record == "destinations")
					mu.Lock()
					defer mu.Unlock()
					logs[fmt.Sprint(record, accelerated)] = has
				})
			}
		}
	})
	for _, record := range []string{"mappings", "destinations"} {
		if without, with := logs[record+"false"], logs[record+"true"]; !slices.Equal(without, with) {
			t.Errorf("the log has\n%s\nand with accel\n%s", strings.Join(without, "\n"), strings.Join(with, "\n"))
		}
	}
}

// logOfFlows gives what the log has of some flows, but for the times, which it checks.
func (w *wire) logOfFlows(accelerated, destinations bool) (has []string) {
	t := w.t
	w.byKernel()
	if accelerated {
		t.Cleanup(func() { _, _, _ = observed(context.Background(), "accel off --netns "+w.gateway) })
		if code, stdout, stderr := observed(t.Context(), "accel on in out --tcp-liberal --attach tc --netns "+w.gateway); code != exitOK {
			t.Fatalf("accel on: exit %d: %s%s", code, stdout, stderr)
		}
	}
	dirs := []string{filepath.Join(t.TempDir(), "log"), filepath.Join(t.TempDir(), "late")}
	logs := func(dir string) (end func(unix.Signal)) {
		out, end := w.runs("log", "--dir", dir, fmt.Sprintf("--destinations=%t", destinations))
		ktest.Wait(t, time.Minute, "natkit log to record", func() bool { return out.has("recording in " + dir) })
		return end
	}
	end := logs(dirs[0])
	began := time.Now()
	all := w.converses()
	w.talk(all)
	forwarded := uint64(0)
	if accelerated {
		ktest.Wait(t, time.Minute, "all flows to use the fast path both ways", func() bool {
			w.talk(all)
			stats := w.accelStats()
			forwarded = stats.Reasons["forwarded"]
			return stats.Valid >= 2*len(all)
		})
	}
	endLate := logs(dirs[1])
	late := time.Now()
	for time.Since(late) < 2*udpTimeout { // they live longer than a time-out
		w.talk(all)
		time.Sleep(20 * time.Millisecond) // a pace: flat out, four pairs of hosts would take the processors from the logs
	}
	if accelerated {
		if now := w.accelStats().Reasons["forwarded"]; now < forwarded+100 {
			t.Errorf("%d packets used the fast path, then %d", forwarded, now)
		}
	}
	during := time.Now()
	every := func(is func(store.Life) bool) func() bool {
		return func() bool {
			for _, dir := range dirs {
				for _, c := range all {
					if l, ok := w.life(dir, c, during); !ok || !is(l) {
						return false
					}
				}
			}
			return true
		}
	}
	ktest.Wait(t, 10*time.Second, "the log to have all as alive", func() bool {
		w.talk(all)
		return every(func(l store.Life) bool { return l.Until == 0 })()
	})
	for _, c := range all {
		c.conn.Close()
	}
	closed := time.Now()
	ktest.Wait(t, time.Minute, "the ends in the log", every(func(l store.Life) bool { return l.Until != 0 }))
	read := time.Now()
	end(unix.SIGTERM)
	endLate(unix.SIGTERM)
	for _, c := range all {
		for i, dir := range dirs {
			l, ok := w.life(dir, c, during)
			if !ok || l.Internal != c.host() || l.Since == 0 && i == 0 || l.Since != 0 && (l.Since.Time().Before(began.Add(-time.Second)) || l.Since.Time().After(late)) ||
				l.Until != l.Least || l.Until.Time().Before(closed.Add(-time.Second)) || l.Until.Time().After(read) {
				t.Errorf("%v, %v inside, began after %v and was closed at %v: log %d has %+v", c, c.host(), began.UTC(), closed.UTC(), i, l)
			}
			has = append(has, fmt.Sprintf("%v: %+v", c, l.Translation))
			if l, ok := w.life(dir, c, l.Until.Time().Add(time.Millisecond)); ok {
				t.Errorf("%v is there after its end: %+v", c, l)
			}
		}
		code, stdout, stderr := observed(t.Context(), fmt.Sprintf("who %v %s --at %s --dir %s", c.external, c.protocol, during.UTC().Format("2006-01-02T15:04:05.000Z"), dirs[0]))
		if code != exitOK || !strings.Contains(stdout, c.host().String()) {
			t.Errorf("who had %v: exit %d: %s%s", c.external, code, stdout, stderr)
		}
	}
	return has
}

func (w *wire) accelStats() *rulefile.AccelStats {
	w.t.Helper()
	status, err := control.ReadAccelStatus(w.here)
	if err != nil || status.Stats == nil {
		w.t.Fatalf("%+v, %v", status, err)
	}
	return status.Stats
}
