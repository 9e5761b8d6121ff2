// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// DumpResult is what a dump of the live table was like.
type DumpResult struct {
	Entries uint64 // given to the function
	Seconds float64
	// Interrupted: the table changed while it was read in a way that may have
	// made the kernel leave entries out or show them twice: it said so
	// (NLM_F_DUMP_INTR), or the hash was resized. Entries that come or go during
	// every dump may or may not be in it.
	Interrupted bool
	Malformed   uint64 // messages that could not be read
}

// Dump gives every entry of the calling thread's namespace that w chooses to fn:
// all families and zones. The Flow is used again for the next entry. Dump ends
// with fn's error when there is one. It needs CAP_NET_ADMIN.
func Dump(ctx context.Context, w Filter, fn func(*Flow) error) (DumpResult, error) {
	began := time.Now()
	res, err := dump(ctx, w, fn)
	res.Seconds = time.Since(began).Seconds()
	if err != nil {
		return res, fmt.Errorf("dump conntrack table: %w", err)
	}
	return res, nil
}

func dump(ctx context.Context, w Filter, fn func(*Flow) error) (DumpResult, error) {
	var res DumpResult
	before, beforeErr := ReadLimits()
	s, err := openSocket(ctx, 0)
	if err != nil {
		return res, err
	}
	defer s.close()
	var m message
	s.seq++
	m.begin(msgGet, unix.NLM_F_DUMP, s.seq, w.Family)
	m.end()
	if err := s.send(m.b); err != nil {
		return res, err
	}

	if err := s.readDump(ctx, w, &res, fn); err != nil {
		return res, err
	}
	if after, err := ReadLimits(); err == nil && beforeErr == nil && after.Buckets != before.Buckets {
		res.Interrupted = true
	}
	return res, nil
}

// readDump reads the answer to the dump that message s.seq asked for, to its end.
func (s *socket) readDump(ctx context.Context, w Filter, res *DumpResult, fn func(*Flow) error) error {
	var f Flow
	var failure error
	now := time.Now().UnixNano()
	each := func(typ, flags uint16, seq uint32, payload []byte) bool {
		if seq != s.seq {
			return true
		}
		res.Interrupted = res.Interrupted || flags&unix.NLM_F_DUMP_INTR != 0
		switch typ {
		case msgNew:
			if f.parse(payload) != nil {
				res.Malformed++
				return true
			}
			if !w.Match(&f) {
				return true
			}
			f.age(now)
			res.Entries++
			failure = fn(&f)
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			failure = errDone
			if errno, ok := errorOf(payload); ok && errno != 0 {
				failure = explain(errno)
			}
		}
		return failure == nil
	}
	for failure == nil {
		b, err := s.receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			res.Interrupted = true
			continue
		case err != nil:
			return err
		}
		if err := eachMessage(b, each); err != nil {
			return err
		}
	}
	if failure == errDone {
		return nil
	}
	return failure
}

var errDone = errors.New("end of dump")

// age sets how old a flow is, as conntrack(8) prints it.
func (f *Flow) age(now int64) {
	if f.Has&HasStart == 0 {
		return
	}
	end := now
	if f.Has&HasStop != 0 {
		end = f.Stop
	}
	f.DeltaSeconds = uint64(max(end/1e9-f.Start/1e9, 0))
	f.Has |= HasDelta
}
