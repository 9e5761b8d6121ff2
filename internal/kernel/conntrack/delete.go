// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flush removes every entry of the calling thread's namespace, as `conntrack -F`.
func Flush(ctx context.Context) error {
	s, err := openSocket(ctx, 0)
	if err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	defer s.close()
	var m message
	s.seq++
	m.begin(msgDelete, unix.NLM_F_ACK, s.seq, unix.AF_UNSPEC)
	m.end()
	if err := s.send(m.b); err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	if _, err := s.answers(s.seq, func(errno unix.Errno) error { return explain(errno) }); err != nil {
		return fmt.Errorf("flush conntrack table: %w", err)
	}
	return nil
}

// Delete removes the entries of the calling thread's namespace that w chooses,
// and returns how many. Packets of a flow that go on after it make a new entry:
// a translated connection may get another port and break.
func Delete(ctx context.Context, w Filter) (deleted uint64, err error) {
	return DeleteFunc(ctx, w, nil)
}

// DeleteFunc is Delete of those entries that also chooses as well.
func DeleteFunc(ctx context.Context, w Filter, also func(*Flow) bool) (deleted uint64, err error) {
	deleted, _, err = change(ctx, w, also, (*Flow).appendDelete)
	if err != nil {
		return deleted, fmt.Errorf("delete conntrack entries: %w", err)
	}
	return deleted, nil
}

// change sends for each entry that w, and also if it is given, chooses the message that write appends, and
// returns how many the kernel carried out. Entries that end by themselves in that time
// are no error. interrupted: it may have missed some, as a dump may.
func change(ctx context.Context, w Filter, also func(*Flow) bool, write func(*Flow, *message, uint32)) (changed uint64, interrupted bool, err error) {
	s, err := openSocket(ctx, 0)
	if err != nil {
		return 0, false, err
	}
	defer s.close()
	var m message
	var pending uint64
	flush := func() error {
		if pending == 0 {
			return nil
		}
		m.requestAck()
		if err := s.send(m.b); err != nil {
			return err
		}
		refused, err := s.answers(s.seq, func(errno unix.Errno) error {
			if errno == unix.ENOENT { // it ended by itself
				return nil
			}
			return explain(errno)
		})
		changed += pending - uint64(refused)
		m.b, pending = m.b[:0], 0
		return err
	}
	res, err := Dump(ctx, w, func(f *Flow) error {
		if also != nil && !also(f) {
			return nil
		}
		s.seq++
		write(f, &m, s.seq)
		if pending++; pending < fillBatch {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	return changed, res.Interrupted || res.Malformed > 0, err
}

// appendDelete appends the message that removes exactly this entry: its
// identifier is given too, so that one which took its place stays.
func (f *Flow) appendDelete(m *message, seq uint32) {
	m.begin(msgDelete, 0, seq, f.Family)
	m.name(f)
	m.attr32(ctaID, f.ID)
	m.end()
}

// name appends what the kernel finds an entry by.
func (m *message) name(f *Flow) {
	// A zone of the reply direction alone does not belong to the original tuple.
	if f.Has&HasZoneOrig != 0 {
		m.zonedTuple(ctaTupleOrig, f.Proto, &f.Orig, f.ZoneOrig)
	} else {
		m.tuple(ctaTupleOrig, f.Proto, &f.Orig)
	}
	if f.Has&HasZone != 0 {
		m.attr16(ctaZone, f.Zone)
	}
}
