// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var vlanFault = Fault{
	Code:    "vlan-mismatch",
	Healthy: "web traffic through the gateway, and requests of another VLAN of the trunk, for a router of its own",
	Broken:  "requests for the gateway arrive with the tag of that VLAN",
	Cured:   "the switch sends them untagged",
	Note:    "only the owner of the network knows whether the tag or the interface is wrong: here it is the tag, which the cure removes",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.taggedARP(netip.MustParseAddr("10.30.0.2"), netip.MustParseAddr("10.30.0.1")))
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.taggedARP(s.lab.Node(lab.RoleClient).Addr, s.lab.Options().Addresses.Near))
		return nil
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.traffic = s.traffic[:len(s.traffic)-1]
		return nil
	},
}

// taggedARP asks from the client for an address, in VLAN 30.
func (s *faultRun) taggedARP(sender, target netip.Addr) func(context.Context) error {
	return func(ctx context.Context) error {
		fd := -1
		var link *net.Interface
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			if link, err = net.InterfaceByName("eth0"); err != nil {
				return err
			}
			fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		defer unix.Close(fd)
		frame := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, link.HardwareAddr...)
		frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_8021Q)
		frame = binary.BigEndian.AppendUint16(frame, 30)
		frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_ARP)
		frame = append(frame, 0, 1, 8, 0, 6, 4, 0, 1) // Ethernet, IPv4, request
		frame = append(append(frame, link.HardwareAddr...), sender.AsSlice()...)
		frame = append(append(frame, make([]byte, 6)...), target.AsSlice()...)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			// A queue that is full takes the next one.
			_ = unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index, Halen: 6})
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}
