// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// Unconfirmed are TCP connections that were answered at least a second ago, and that their clients have not confirmed.
type Unconfirmed struct {
	Entries uint64
	Most    uint64 // of one client
}

// mostUnconfirmed is how many entries CountUnconfirmed reads. A table with more of the kind shows that otherwise, too; and an
// old kernel, which knows no filter, sends all its entries.
const mostUnconfirmed = 4096

// CountUnconfirmed counts those over IPv4 in the table of the calling thread's namespace. The kernel
// chooses them, so that this costs the walk through the hash and hardly a message.
func CountUnconfirmed(ctx context.Context) (Unconfirmed, error) {
	s, err := openSocket(ctx, 0)
	if err != nil {
		return Unconfirmed{}, err
	}
	defer s.close()
	s.seq++
	if err := s.send(unconfirmedRequest(s.seq)); err != nil {
		return Unconfirmed{}, err
	}
	return s.readUnconfirmed(ctx, ReadTimeouts())
}

// unconfirmedRequest asks for TCP entries of IPv4 that have seen a reply and are not assured.
func unconfirmedRequest(seq uint32) []byte {
	const protoNum = 1 << 3 // CTA_FILTER_FLAG(CTA_PROTO_NUM)
	var m message
	m.begin(msgGet, unix.NLM_F_DUMP, seq, unix.AF_INET)
	m.attr32(ctaStatus, uint32(StatusSeenReply))
	m.attr32(ctaStatusMask, uint32(StatusSeenReply|StatusAssured))
	orig := m.nest(ctaTupleOrig)
	proto := m.nest(ctaTupleProto)
	m.attr(ctaProtoNum, unix.IPPROTO_TCP)
	m.endNest(proto)
	m.endNest(orig)
	filter := m.nest(ctaFilter)
	m.attr(ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, protoNum)...)
	m.endNest(filter)
	m.end()
	return m.b
}

var errEnough = errors.New("enough entries")

func (s *socket) readUnconfirmed(ctx context.Context, timeouts Timeouts) (out Unconfirmed, err error) {
	clients := map[addrKey]uint64{}
	read := 0
	var res DumpResult
	err = s.readDump(ctx, Filter{}, &res, func(f *Flow) error {
		if read++; read > mostUnconfirmed {
			return errEnough
		}
		if f.Proto == unix.IPPROTO_TCP && f.Has&HasState != 0 && f.State == TCPSynRecv && !f.zoned() && timeouts.unconfirmed(f) {
			client := addrKey(f.Orig.Src.As16())
			clients[client]++
			out.Entries, out.Most = out.Entries+1, max(out.Most, clients[client])
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return out, err
}
