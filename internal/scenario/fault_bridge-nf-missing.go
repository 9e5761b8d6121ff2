// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var bridgeNFFault = Fault{
	Code:    "bridge-nf-missing",
	Healthy: "a second container of the bridge reaches the first by the address of a service, which the host translates, with br_netfilter on",
	Broken:  "bridged frames no longer pass the IP packet filter",
	Cured:   "they do again",

	topology: "published",
	healthy: func(ctx context.Context, s *faultRun) error {
		if _, err := s.watched.SysctlValue("net.bridge.bridge-nf-call-iptables"); err != nil {
			return errors.New("br_netfilter is not loaded in this kernel (modprobe br_netfilter): replies between containers cannot be translated")
		}
		// The client gets a second leg, as a container of the bridge.
		client, container := s.lab.Node(lab.RoleClient), s.lab.ServerNode().Addr
		if err := s.run(ctx, s.watched, "ip link add veth1 master docker0 type veth peer name eth1 netns "+client.Netns, "ip link set veth1 up",
			fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr 10.96.0.10 tcp dport 80 dnat to %s:80", container)); err != nil {
			return err
		}
		if err := s.run(ctx, client, "ip addr add 172.17.0.3/16 dev eth1", "ip link set eth1 up", "ip route add 10.96.0.10/32 via 172.17.0.1"); err != nil {
			return err
		}
		if err := s.serve(ctx, lab.HTTPServerOptions{}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests("http://10.96.0.10/", 50))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		return s.watched.Sysctl("net.bridge.bridge-nf-call-iptables", "0")
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "bridge-nf-call-iptables=1"); err != nil {
			return err
		}
		// What was tried before would be seen as unanswered for two minutes.
		return s.run(ctx, s.watched, "conntrack -F")
	},
}
