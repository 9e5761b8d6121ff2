// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// In each set-up a TCP connection comes through with its data, from the address
// that the set-up says; in set-ups 4 and 5 its packets have a third address in
// between, both ways.
func TestPaperSetups(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	for i, s := range PaperSetups() {
		t.Run(s.Router.Name(), func(t *testing.T) {
			t.Parallel()
			testbed, err := bench.NewTestbed(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { testbed.Close() })
			remove, err := s.Router.Install(t.Context(), testbed, bench.RouterOptions{})
			if err != nil {
				t.Fatal(err)
			}
			run := func(rules string) string {
				cmd := testbed.Node(lab.RoleGateway).Command(t.Context(), "nft", "-f", "-")
				cmd.Stdin = strings.NewReader(rules)
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("nft: %v\n%s", err, out)
				}
				return string(out)
			}
			run(fmt.Sprintf(`table ip seen { chain forward { type filter hook forward priority 0;
				ip saddr %[1]s counter comment "forth"; ip daddr %[1]s counter comment "back"; }; }`, paperMiddle(testbed)))

			from := fetch(t, testbed)
			want := paperHost(testbed)
			if s.Router.NAT() {
				want = paperSeenAs
			}
			if from != want {
				t.Errorf("the right end sees %s, want %s", from, want)
			}
			counts := regexp.MustCompile(`counter packets (\d+)`).FindAllStringSubmatch(run("list table ip seen"), -1)
			if len(counts) != 2 {
				t.Fatalf("counters %q", counts)
			}
			for _, c := range counts {
				if twice := c[1] != "0"; twice != (i >= 3) {
					t.Errorf("%s packets with the address in between, one way", c[1])
				}
			}
			if err := remove(); err != nil {
				t.Error(err)
			}
		})
	}
}

// fetch sends data forth and back on a connection from the host of the set-ups,
// and returns the address it is seen by.
func fetch(t *testing.T, testbed *bench.Testbed) netip.Addr {
	t.Helper()
	target := netip.AddrPortFrom(testbed.Targets.Addr().Next(), 7000)
	var listener *net.TCPListener
	if err := testbed.Right.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(target))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	seen := make(chan netip.Addr, 1)
	go func() {
		defer close(seen)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		io.Copy(conn, conn)
		seen <- conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	}()
	const bytes = 1 << 20
	if err := testbed.Left.Do(func() error {
		dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(paperHost(testbed), 0))}
		conn, err := dialer.DialContext(t.Context(), "tcp4", target.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		go func() {
			conn.Write(make([]byte, bytes))
			conn.(*net.TCPConn).CloseWrite()
		}()
		n, err := io.Copy(io.Discard, conn)
		if err == nil && n != bytes {
			err = fmt.Errorf("%d bytes came back of %d", n, bytes)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return <-seen
}
