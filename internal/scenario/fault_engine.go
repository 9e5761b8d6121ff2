// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
)

// What can go wrong with natkit's own engine: the gateway of the lab translates by it in
// place of the kernel.

// engineFlows is how many programs of the client send through the engine.
const engineFlows = 20

// engine brings natkit's engine up on the gateway with a rule file, in place of the one that
// is, and lets the client's programs send.
func (s *faultRun) engine(ctx context.Context, text string) error {
	const port = 5353
	ns := s.watched.Handle()
	if s.file == "" {
		dir, err := os.MkdirTemp("", "natkit-lab")
		if err != nil {
			return err
		}
		s.file = filepath.Join(dir, "nat.yaml")
		s.closers = append(s.closers, func() {
			_, _ = control.Down(ns) // with the lab all of it goes
			os.RemoveAll(dir)
		})
		server := s.lab.ServerNode()
		if err := s.swallow(server, port); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, port), engineFlows, 20))
		if err := s.run(ctx, s.watched, "nft flush ruleset"); err != nil {
			return err
		}
	} else if _, err := control.Down(ns); err != nil {
		return err
	}
	if !strings.HasPrefix(text, "inside:") {
		text = "inside: [eth1]\noutside: [eth0]\n" + text
	}
	if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
		return err
	}
	file, err := rulefile.Parse(s.file, []byte(text))
	if err == nil {
		_, err = control.Up(ctx, file, text, control.Options{Namespace: ns, Engine: s.kind})
	}
	if err != nil {
		return fmt.Errorf("start the engine: %w", err)
	}
	return nil
}

// engineRules masquerade the clients, with limits and ports as given.
func (s *faultRun) engineRules(limits, ports string) string {
	rule := fmt.Sprintf("rules:\n  - masquerade: %s\n", s.lab.Options().Addresses.Client.Masked())
	if ports != "" {
		rule += "    ports: " + ports + "\n"
	}
	if limits != "" {
		limits = "limits: {" + limits + "}\n"
	}
	return limits + rule
}

var engineLimitFault = Fault{
	Code:    "engine-source-limit",
	Healthy: "a client has exactly as many sessions as the engine's rule file allows one host",
	Broken:  "the rule file allows one host five sessions fewer than the client needs",
	Cured:   "the limit is raised in the rule file, and the file is applied",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		return s.engine(ctx, s.engineRules(fmt.Sprintf("sessions_per_source: %d", engineFlows), ""))
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.engine(ctx, s.engineRules(fmt.Sprintf("sessions_per_source: %d", engineFlows-5), ""))
	},
	cure: follow("sed -i", "natkit"),
}

var engineDriftFault = Fault{
	Code:    "engine-drift",
	Healthy: "the engine masquerades behind an address; another one was added to the interface",
	Broken:  "the interface has lost the first address, and the engine still uses it",
	Cured:   "the rule file is applied again",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		far := s.lab.Options().Addresses.Far
		return errors.Join(s.engine(ctx, s.engineRules("", "")),
			s.run(ctx, s.watched, "sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1", fmt.Sprintf("ip addr add %s dev eth0", netip.PrefixFrom(far.Addr().Next().Next(), far.Bits()))))
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.watched, fmt.Sprintf("ip addr del %s dev eth0", s.lab.Options().Addresses.Far))
	},
	cure: follow("natkit"),
}
