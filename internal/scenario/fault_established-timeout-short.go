// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var establishedShortFault = Fault{
	Code:    "established-timeout-short",
	Healthy: "clients ask a server that replies after one and a half seconds, with the kernel's timeouts",
	Broken:  "the gateway forgets open connections after one second without a packet",
	Cured:   "the timeout is set to a day",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		return s.slowAnswers(ctx, 5000, answerAfter)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		if err := s.watched.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "1"); err != nil {
			return err
		}
		// Connections that are open have the old time-out; wait for those that have not.
		return wait(ctx, answerAfter)
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "sysctl -w"); err != nil {
			return err
		}
		return wait(ctx, answerAfter) // until those that it has forgotten are over
	},
}

const answerAfter = 1500 * time.Millisecond

// slowAnswers is a server that answers each connection after a while, and a
// client that opens one every twenty milliseconds, already before the doctor
// comes.
func (s *faultRun) slowAnswers(ctx context.Context, port uint16, after time.Duration) error {
	server, client := s.lab.ServerNode(), s.lab.Node(lab.RoleClient)
	var l net.Listener
	if err := server.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		return fmt.Errorf("listen in %s: %w", server.Netns, err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			time.AfterFunc(after, func() {
				_, _ = c.Write([]byte("natkit lab"))
				c.Close()
			})
		}
	}()
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			var c net.Conn
			if err := client.Do(func() (err error) {
				c, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp4", netip.AddrPortFrom(server.Addr, port).String())
				return err
			}); err != nil {
				continue
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetReadDeadline(time.Now().Add(2 * after))
				_, _ = c.Read(make([]byte, 16))
			})
		}
	})
	s.closers = append(s.closers, func() { stop(); l.Close(); wg.Wait() })
	// The first answers are due when the doctor comes.
	return wait(ctx, after)
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
