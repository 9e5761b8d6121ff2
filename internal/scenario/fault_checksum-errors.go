// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var checksumFault = Fault{
	Code:    "checksum-errors",
	Healthy: "the doctor watches the gateway, which serves its clients on one of its ports",
	Broken:  "a client sends to that port with wrong checksums, like a card that does not fill them in",
	Cured:   "that client computes its checksums itself",
	Note:    "no device of a lab writes wrong checksums, so the client does; the cure is on the sender, so it is shown and not run",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.swallow(s.watched, 5353); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.sums(0xbad))
		return nil
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.traffic[len(s.traffic)-1] = s.sums(0) // none: a datagram may leave it out
		return nil
	},
}

// sums sends datagrams with this checksum to the gateway, a hundred a second.
func (s *faultRun) sums(sum uint16) func(context.Context) error {
	return func(ctx context.Context) error {
		client := s.lab.Node(lab.RoleClient)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		packet := udpPacket(client.Addr, s.watched.Addr, 1, 0, []byte("natkit lab"))
		binary.BigEndian.PutUint16(packet[26:], sum)
		for {
			err := client.Do(func() error { return sendRaw(s.watched.Addr, 1, func(int) []byte { return packet }) })
			if err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}
