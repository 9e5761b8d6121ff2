// SPDX-License-Identifier: Apache-2.0

package conntrack

// How long ago a flow had its last packet, told from the time it has left: each
// packet sets the flow's timer again.

import "golang.org/x/sys/unix"

// Timeouts are those of a namespace that tell when a flow had its last packet, in
// seconds; 0 where one is not known.
type Timeouts struct {
	TCPEstablished, TCPSynSent, TCPSynRecv uint64
	// An open connection has one of these two instead of TCPEstablished while data
	// is not acknowledged.
	TCPUnacknowledged, TCPMaxRetrans uint64
	UDP, UDPStream                   uint64
	TCPTimeWait                      uint64
}

// ReadTimeouts reads those of the calling thread's namespace. What can't be read
// is not known.
func ReadTimeouts() Timeouts {
	var t Timeouts
	for name, to := range map[string]*uint64{
		"tcp_timeout_established": &t.TCPEstablished, "tcp_timeout_syn_sent": &t.TCPSynSent, "tcp_timeout_syn_recv": &t.TCPSynRecv,
		"tcp_timeout_unacknowledged": &t.TCPUnacknowledged, "tcp_timeout_max_retrans": &t.TCPMaxRetrans,
		"udp_timeout": &t.UDP, "udp_timeout_stream": &t.UDPStream, "tcp_timeout_time_wait": &t.TCPTimeWait,
	} {
		if n, err := readNumber(sysctlDir + "nf_conntrack_" + name); err == nil {
			*to = n
		}
	}
	return t
}

// idle is how many seconds an open TCP connection has been without a packet; 0
// when that can't be told.
func (t Timeouts) idle(f *Flow) uint64 {
	left := uint64(f.Timeout)
	if f.Has&HasTimeout == 0 || left <= max(t.TCPUnacknowledged, t.TCPMaxRetrans, 300) || left > t.TCPEstablished {
		return 0
	}
	return t.TCPEstablished - left
}

// unconfirmed says that a connection was answered at least a second ago, which is longer
// than its client needs to confirm that. What either end repeats leaves the timer alone.
func (t Timeouts) unconfirmed(f *Flow) bool {
	return f.Has&HasTimeout != 0 && uint64(f.Timeout)+2 <= t.TCPSynRecv
}

// recent says that a flow had a packet in the last within seconds, and false when that
// can't be told.
func (t Timeouts) recent(f *Flow, within uint64) bool {
	if f.Has&HasTimeout == 0 {
		return false
	}
	var set []uint64
	switch {
	case f.Proto == unix.IPPROTO_UDP && f.Status&StatusAssured != 0:
		set = []uint64{t.UDPStream}
	case f.Proto == unix.IPPROTO_UDP:
		set = []uint64{t.UDP}
	case f.Proto == unix.IPPROTO_TCP && f.State == TCPSynSent:
		set = []uint64{t.TCPSynSent}
	case f.Proto == unix.IPPROTO_TCP && f.State == TCPSynRecv:
		set = []uint64{t.TCPSynRecv}
	case f.Proto == unix.IPPROTO_TCP && f.State == TCPEstablished:
		set = []uint64{t.TCPEstablished, t.TCPUnacknowledged, t.TCPMaxRetrans}
	case f.Proto == unix.IPPROTO_TCP && f.State == TCPTimeWait:
		set = []uint64{t.TCPTimeWait}
	}
	for _, timeout := range set {
		left := uint64(f.Timeout)
		if timeout > within && left <= timeout && timeout-left <= within {
			return true
		}
	}
	return false
}
