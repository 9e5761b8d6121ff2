// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"natkit/internal/diagnose/probe"
	"natkit/internal/nat/control"
)

// accelerate has natkit accel forward between the gateway's two interfaces.
func (s *faultRun) accelerate(ctx context.Context) error {
	ns := s.watched.Handle()
	chains, err := probe.Chains(ns)
	if err == nil {
		_, err = control.AccelOn(ctx, control.AccelOptions{Namespace: ns, Interfaces: []string{"eth0", "eth1"}, Attach: control.AttachTC, Chains: chains})
	}
	if err != nil {
		return fmt.Errorf("turn acceleration on: %w", err)
	}
	s.closers = append(s.closers, func() { _, _ = control.AccelOff(ns) }) // with the lab all of it goes
	return nil
}

var accelSlowPathFault = Fault{
	Code:    "accel-slow-path",
	Healthy: "natkit accel forwards UDP; there is little TCP, which takes the stack",
	Broken:  "a client asks a web server two hundred times a second: nearly all packets are TCP",
	Cured:   "acceleration is turned off, and on again with TCP",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		const port = 5353
		server := s.lab.ServerNode()
		if err := s.swallow(server, port); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, port), 4, 20))
		return s.accelerate(ctx)
	},
	broken: browse,
	cure:   follow("natkit"),
}
