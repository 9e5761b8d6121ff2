// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

// Every router that this kernel can have forwards a datagram from any source to
// any target, translated or not as it says; after its removal packets pass as
// before it.
func TestRouters(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "iptables-nft")
	testbed, err := bench.NewTestbed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testbed.Close() })
	for _, r := range Routers() {
		if slices.Contains([]string{"xdp-forward", "ebpf", "accel", "accel-filtered"}, r.Name()) {
			if _, err := r.Install(t.Context(), testbed, bench.RouterOptions{Sockets: true}); !errors.As(err, new(*bench.UnsupportedError)) {
				t.Errorf("%s for sockets' packets: %v", r.Name(), err)
			}
			continue // on veth XDP takes a generator's frames, not sockets' packets
		}
		t.Run(r.Name(), func(t *testing.T) {
			if r.Describe() == "" {
				t.Error("no description")
			}
			numbers := []int{0, 500}
			if _, engine := r.(*engineRouter); engine {
				numbers = numbers[1:] // the kernel checks its programs for seconds each time
			}
			for _, rules := range numbers {
				t.Run(strconv.Itoa(rules), func(t *testing.T) {
					remove, err := r.Install(t.Context(), testbed, bench.RouterOptions{Rules: rules})
					if errors.As(err, new(*bench.UnsupportedError)) {
						ktest.Unsupported(t, "%v", err)
					}
					if err != nil {
						t.Fatal(err)
					}
					from := exchange(t, testbed)
					if removeErr := remove(); removeErr != nil {
						t.Error(removeErr)
					}
					if translated := !testbed.Sources.Contains(from); translated != r.NAT() {
						t.Errorf("the right end sees %s, NAT is %v", from, r.NAT())
					}
					if from := exchange(t, testbed); !testbed.Sources.Contains(from) {
						t.Errorf("after the removal the right end sees %s", from)
					}
				})
			}
		})
	}
}

// Every router lets whole TCP connections through, of which those that track know
// the end.
func TestRoutersTCP(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "iptables-nft")
	if testing.Short() {
		ktest.Unsupported(t, "needs a machine that takes a hundred thousand frames a second (-short)")
	}
	const sessions = 500
	res, err := bench.CPS(t.Context(), bench.CPSOptions{
		Routers: Routers(), Protocols: []string{"tcp"}, Sessions: sessions, Duration: 20 * time.Millisecond, Trials: 1})
	if err != nil {
		t.Fatal(err)
	}
	figures := map[string]float64{}
	noisy := map[string]bool{} // routers that were disturbed as often as they were tried
	for _, f := range res.Figures {
		figures[f.Router+" "+f.Metric] = f.Median
		noisy[f.Router] = noisy[f.Router] || f.Label == "noisy"
	}
	for _, r := range res.Routers {
		if r.Unsupported != "" || noisy[r.Name] {
			continue
		}
		if figures[r.Name+" establishment_cps"] <= 0 || figures[r.Name+" established_pps"] <= 0 {
			t.Errorf("%s: no connection, or no data on it: %v", r.Name, figures)
		}
		if slices.Contains([]string{"default", "trimmed", "nft", "nft-map", "iptables", "iptables-legacy"}, r.Name) && figures[r.Name+" capacity_sessions"] <= 0 {
			t.Errorf("%s: no connection is in its table: %v", r.Name, figures)
		}
	}
}

// exchange sends a datagram from one of the testbed's sources to one of its targets
// and returns the source that arrives.
func exchange(t *testing.T, testbed *bench.Testbed) (from netip.Addr) {
	t.Helper()
	var in, out int
	source, target := testbed.Sources.Addr().Next(), testbed.Targets.Addr().Next()
	if err := testbed.Right.Do(func() (err error) {
		in, err = udpSocket(netip.AddrPortFrom(target, 7000))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(in)
	if err := testbed.Left.Do(func() (err error) {
		out, err = udpSocket(netip.AddrPortFrom(source, 0))
		if err != nil {
			return err
		}
		return unix.Sendto(out, []byte("x"), 0, &unix.SockaddrInet4{Addr: target.As4(), Port: 7000})
	}); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(out)
	unix.SetsockoptTimeval(in, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	var b [16]byte
	_, sa, err := unix.Recvfrom(in, b[:], 0)
	if err != nil {
		t.Fatalf("nothing arrived: %v", err)
	}
	return netip.AddrFrom4(sa.(*unix.SockaddrInet4).Addr)
}

// udpSocket is a UDP socket bound to an address.
func udpSocket(at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}
