// SPDX-License-Identifier: Apache-2.0

package natproof

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

const icmpEcho = 8 // RFC 792: an echo request

// Router is the router in a namespace of its own, whose interfaces the test reads and
// writes.
type Router struct {
	Namespace *netns.Handle
	tuns      map[string]*os.File
}

// NewRouter makes it.
func NewRouter(t *testing.T) *Router {
	t.Helper()
	r := &Router{Namespace: namespace(t), tuns: map[string]*os.File{}}
	if err := r.Namespace.Do(func() error {
		for name, value := range map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/default/disable_ipv6": "1", "ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0", "ipv4/conf/default/send_redirects": "0", "ipv4/conf/all/send_redirects": "0"} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil && !strings.HasPrefix(name, "ipv6") {
				return err
			}
		}
		for _, name := range Links {
			tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name, TxQLen: 4096}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_ONE_QUEUE, NonPersist: true, Queues: 1}
			if err := netlink.LinkAdd(tun); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			r.tuns[name] = tun.Fds[0]
			if err := unix.SetNonblock(int(tun.Fds[0].Fd()), true); err != nil {
				return err
			}
			if err := address(name, addresses[name]+"/32"); err != nil {
				return err
			}
		}
		for link, to := range map[string]string{"eth1": "10.1.0.0/16", "eth2": "10.2.0.0/16", "ppp0": "198.51.100.0/24", "eth0": "0.0.0.0/0"} {
			if err := route(link, to); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range r.tuns {
			f.Close()
		}
	})
	return r
}

// Run runs a program in the router.
func (r *Router) Run(in string, command ...string) (out []byte, err error) {
	err = r.Namespace.Do(func() error {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdin = strings.NewReader(in)
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		out, err = cmd.Output()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", command[0], err, complaint.Bytes())
		}
		return nil
	})
	return out, err
}

// Send gives the router a packet, and what it sends on: packets are on their way out
// before the writing ends. What the router sends itself, as the reply to a ping of its own
// address, has an identification of its own, which may by chance be the packet's.
func (r *Router) Send(p rulefile.Packet, id uint16) (Result, error) {
	if _, err := unix.Write(int(r.tuns[p.In].Fd()), rawPacket(p, id)); err != nil {
		return Result{}, err
	}
	found := Result{gone: true}
	buffer := make([]byte, 2048)
	for _, name := range Links {
		for {
			n, err := unix.Read(int(r.tuns[name].Fd()), buffer)
			if err != nil || n < 20 {
				break
			}
			b := buffer[:n]
			if b[0]>>4 != 4 || uint16(b[4])<<8|uint16(b[5]) != id || b[9] != byte(p.Protocol) || p.Protocol == rulefile.ICMP && b[20] != icmpEcho {
				continue
			}
			found = Result{src: netip.AddrFrom4([4]byte(b[12:16])).String(), dst: netip.AddrFrom4([4]byte(b[16:20])).String()}
			if p.Protocol.HasPorts() {
				found.port = uint16(b[22])<<8 | uint16(b[23])
			}
		}
	}
	return found, nil
}

// rawPacket is the packet's bytes, with the right checksums.
func rawPacket(p rulefile.Packet, id uint16) []byte {
	var l4 []byte
	switch p.Protocol {
	case rulefile.TCP:
		l4 = make([]byte, 20)
		l4[12], l4[13], l4[14] = 5<<4, 2, 0x20
	case rulefile.UDP:
		l4 = make([]byte, 12)
		l4[5] = 12
	case rulefile.ICMP:
		l4 = make([]byte, 12)
		l4[0], l4[4], l4[5] = icmpEcho, byte(id>>8), byte(id)
	default:
		l4 = []byte{0, 0, 8, 0, 0, 0, 0, 0}
	}
	if p.Protocol.HasPorts() {
		l4[0], l4[1], l4[2], l4[3] = byte(p.SourcePort>>8), byte(p.SourcePort), byte(p.DestinationPort>>8), byte(p.DestinationPort)
	}
	b := make([]byte, 20, 20+len(l4))
	b[0], b[2], b[3], b[4], b[5], b[8], b[9] = 0x45, 0, byte(20+len(l4)), byte(id>>8), byte(id), 64, byte(p.Protocol)
	src, dst := p.Source.As4(), p.Destination.As4()
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	put := func(at []byte, sum uint32) {
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		at[0], at[1] = byte(^sum>>8), byte(^sum)
	}
	sum := func(data []byte) (n uint32) {
		for k := 0; k+1 < len(data); k += 2 {
			n += uint32(data[k])<<8 | uint32(data[k+1])
		}
		return n
	}
	put(b[10:], sum(b))
	pseudo := sum(src[:]) + sum(dst[:]) + uint32(p.Protocol) + uint32(len(l4))
	switch p.Protocol {
	case rulefile.TCP:
		put(l4[16:], sum(l4)+pseudo)
	case rulefile.UDP:
		put(l4[6:], sum(l4)+pseudo)
	case rulefile.ICMP:
		put(l4[2:], sum(l4))
	}
	return append(b, l4...)
}

// LoadRandom puts random rules into the kernel, of iptables or nftables, and lists them as
// an import wants them.
func (r *Router) LoadRandom(t *testing.T, random *rand.Rand, seed uint64) ([]byte, error) {
	m := Maker{Rand: random}
	if seed%2 == 0 {
		return r.Load(t, m.IPTables())
	}
	return r.Load(t, m.NFTables())
}

// Load replaces the rules of the kernel and forgets its connections.
func (r *Router) Load(t *testing.T, rules string) (listed []byte, err error) {
	load, list := []string{ktest.Tool(t, "nft"), "-f", "-"}, []string{ktest.Tool(t, "nft"), "-j", "list", "ruleset"}
	if strings.HasPrefix(rules, "*") {
		load, list = []string{ktest.Tool(t, "iptables-nft-restore")}, []string{ktest.Tool(t, "iptables-nft-save"), "-t", "nat"}
	}
	if err := r.Clear(t); err != nil {
		return nil, err
	}
	if _, err := r.Run(rules, load...); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, rules)
	}
	return ktest.WithoutTraces(t, func() ([]byte, error) { return r.Run("", list...) })
}

// Clear takes all rules out of the kernel and forgets its connections.
func (r *Router) Clear(t *testing.T) error {
	if _, err := r.Run("", ktest.Tool(t, "nft"), "flush", "ruleset"); err != nil {
		return err
	}
	return r.Namespace.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

func namespace(t *testing.T) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	return h
}

func address(link, a string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	own, err := netlink.ParseAddr(a)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetUp(l), netlink.AddrAdd(l, own))
}

func route(link, to string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	_, dst, err := net.ParseCIDR(to)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Scope: unix.RT_SCOPE_LINK})
}
