// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flags of one direction of a TCP entry: linux/netfilter/nf_conntrack_tcp.h.
const (
	tcpFlagLiberal        = 0x08 // its windows are not checked
	tcpFlagUnacknowledged = 0x10 // sent, and no acknowledgement seen: five minutes to live
)

// IgnoreWindows has the kernel not check the windows of the TCP connections over IPv4
// that are open in the calling thread's namespace, each till it ends, and returns how
// many they are: their packets may have gone where connection tracking did not see them,
// and so what it knows of their windows is old. Those that open later are checked as
// nf_conntrack_tcp_be_liberal says. It needs CAP_NET_ADMIN.
func IgnoreWindows(ctx context.Context) (marked uint64, err error) {
	open := Filter{Family: unix.AF_INET, Proto: unix.IPPROTO_TCP,
		States: 1<<TCPEstablished | 1<<TCPFinWait | 1<<TCPCloseWait | 1<<TCPLastAck | 1<<TCPTimeWait}
	// None may be left out: where a dump may have missed some, there is another one.
	for range 3 {
		var again bool
		if marked, again, err = change(ctx, open, nil, (*Flow).appendLiberal); err != nil || !again {
			break
		}
		err = errors.New("the table could not be read whole, three times")
	}
	if err != nil {
		return marked, fmt.Errorf("have conntrack entries ignore TCP windows: %w", err)
	}
	return marked, nil
}

// appendLiberal appends the message that marks an entry, and leaves its state and
// time-out as they are.
func (f *Flow) appendLiberal(m *message, seq uint32) {
	m.begin(msgNew, 0, seq, f.Family)
	m.name(f)
	info := m.nest(ctaProtoinfo)
	tcp := m.nest(ctaProtoinfoTCP)
	for _, direction := range []uint16{ctaProtoinfoTCPFlagsOrig, ctaProtoinfoTCPFlagsReply} {
		m.attr(direction, tcpFlagLiberal, tcpFlagLiberal|tcpFlagUnacknowledged) // the value, and which bits of it count
	}
	m.endNest(tcp)
	m.endNest(info)
	m.end()
}
